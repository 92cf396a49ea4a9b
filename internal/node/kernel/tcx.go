package kernel

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// HaveTCX reports whether programs can be attached to interfaces by tcx links
// (Linux 6.6). It only lists attached programs.
func HaveTCX() bool {
	const loopback = 1 // lo's index in every network namespace
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
	return err == nil || errors.Is(err, unix.ENOENT)
}

// IngressPrograms returns the names of the eBPF programs at the ingress hook of a device
// in the calling thread's network namespace. For tcx links these are the names of the
// programs, for filters (before Linux 6.6) the names of the filters.
func IngressPrograms(device netlink.Link) (names []string, err error) {
	if names, err = TCXPrograms(device.Attrs().Index, ebpf.AttachTCXIngress); err != nil {
		return nil, err
	}
	filters, err := Dump(func() ([]netlink.Filter, error) { return netlink.FilterList(device, netlink.HANDLE_MIN_INGRESS) })
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // no clsact
		return nil, fmt.Errorf("list filters of %s: %w", device.Attrs().Name, err)
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok {
			names = append(names, b.Name)
		}
	}
	return names, nil
}

// TCXPrograms lists the names of the programs at a tcx hook of an interface in the
// calling thread's network namespace, in the order of execution. A kernel without tcx
// has none. It needs CAP_NET_ADMIN, and CAP_SYS_ADMIN for names.
func TCXPrograms(ifindex int, hook ebpf.AttachType) (names []string, err error) {
	res, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: hook})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENODEV) || errors.Is(err, ebpf.ErrNotSupported) {
		return nil, nil // no program; before 6.6; the interface was removed
	}
	if err != nil {
		return nil, fmt.Errorf("list tcx programs of interface %d: %w", ifindex, err)
	}
	for _, p := range res.Programs {
		name, err := programName(p.ID)
		if errors.Is(err, unix.ENOENT) {
			continue // detached meanwhile
		}
		if err != nil {
			return nil, fmt.Errorf("read program %d at interface %d: %w", p.ID, ifindex, err)
		}
		names = append(names, name)
	}
	return names, nil
}

func programName(id ebpf.ProgramID) (string, error) {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return "", err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return "", err
	}
	return info.Name, nil
}
