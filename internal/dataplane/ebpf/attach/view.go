package attach

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Attachment is an eBPF program at the ingress hook of a device.
type Attachment struct {
	ID        uint32 `json:"id"`
	Name      string `json:"name"`
	Tag       string `json:"tag,omitempty"`
	Mechanism string `json:"mechanism"` // tcx or clsact
	Own       bool   `json:"own"`       // of the instance with pins in PINDIR
}

// IngressAttachments lists the programs at the ingress hook of a device in the calling
// thread's network namespace, in the order of execution: tcx first.
func IngressAttachments(pinDir string, ifindex int) (list []Attachment, err error) {
	own := link.ID(0)
	path := filepath.Join(linksDir(pinDir), fmt.Sprintf("%d_%s", ifindex, ingress))
	if l, err := link.LoadPinnedLink(path, nil); err == nil {
		if info, err := l.Info(); err == nil {
			own = info.ID
		}
		l.Close()
	}
	res, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: ebpf.AttachTCXIngress})
	if err != nil && !absent(err) && !errors.Is(err, ebpf.ErrNotSupported) {
		return nil, fmt.Errorf("list tcx programs of interface %d: %w", ifindex, err)
	}
	if err == nil {
		for _, p := range res.Programs {
			id, ok := p.LinkID()
			list = append(list, describe(p.ID, "tcx", ok && own != 0 && id == own))
		}
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("list filters of interface %d: %w", ifindex, err)
	}
	defer h.Close()
	filters, err := (&clsactHooks{h: h}).filters(hook{ifindex, ingress})
	if err != nil && !absent(err) {
		return nil, fmt.Errorf("list filters of interface %d: %w", ifindex, err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			ours := b.Name == clsactFilterName && b.Handle == clsactFilterHandle
			list = append(list, describe(ebpf.ProgramID(b.Id), "clsact", ours))
		}
	}
	return list, nil
}

// describe reads the name and the tag of a program.
func describe(id ebpf.ProgramID, mechanism string, own bool) Attachment {
	a := Attachment{ID: uint32(id), Mechanism: mechanism, Own: own}
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return a // detached meanwhile
	}
	defer p.Close()
	if info, err := p.Info(); err == nil {
		a.Name, a.Tag = info.Name, info.Tag
	}
	return a
}

// Cgroup describes the cgroup that an instance's socket hooks serve.
type Cgroup struct {
	ID    uint64 // the inode of its directory
	Hooks []string
}

// ServedCgroup reads the pinned links of socket hooks. Without any, it has no Hooks.
func ServedCgroup(pinDir string) (c Cgroup) {
	entries, _ := os.ReadDir(cgroupPins(pinDir))
	for _, e := range entries {
		l, err := link.LoadPinnedLink(filepath.Join(cgroupPins(pinDir), e.Name()), nil)
		if err != nil {
			continue
		}
		if info, err := l.Info(); err == nil && info.Cgroup() != nil && info.Cgroup().CgroupId != 0 {
			c.ID, c.Hooks = info.Cgroup().CgroupId, append(c.Hooks, e.Name())
		}
		l.Close()
	}
	return c
}
