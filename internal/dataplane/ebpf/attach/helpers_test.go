package attach

import (
	"context"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/must"
)

// enterNetns moves the test into a new network namespace until it ends.
func enterNetns(t *testing.T) {
	t.Helper()
	netnstest.Enter(t)
	lo, err := netlink.LinkByName("lo")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(lo))
}

// pod is a namespace at the other end of a veth.
type pod struct {
	ns netns.NsHandle
	h  *netlink.Handle
}

// newPod makes a namespace with eth0 connected to the host end named.
func newPod(t *testing.T, host string) *pod {
	t.Helper()
	home, err := netns.Get()
	must.Do(t, err)
	defer home.Close()
	ns, err := netns.New()
	must.Do(t, err)
	must.Do(t, netns.Set(home))
	must.Do(t, netlink.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: host}, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns),
	}))
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must.Do(t, err)
	p := &pod{ns: ns, h: h}
	t.Cleanup(p.delete)
	setUp(t, host)
	eth0, err := h.LinkByName("eth0")
	must.Do(t, err)
	must.Do(t, h.LinkSetUp(eth0))
	return p
}

func (p *pod) delete() {
	if p.h != nil {
		p.h.Close()
		p.ns.Close()
		p.h = nil
	}
}

func (p *pod) addAddr(t *testing.T, cidr string) {
	t.Helper()
	eth0, err := p.h.LinkByName("eth0")
	must.Do(t, err)
	must.Do(t, p.h.AddrAdd(eth0, parseCIDR(t, cidr)))
}

func (p *pod) delAddr(t *testing.T, cidr string) {
	t.Helper()
	eth0, err := p.h.LinkByName("eth0")
	must.Do(t, err)
	must.Do(t, p.h.AddrDel(eth0, parseCIDR(t, cidr)))
}

func (p *pod) mac(t *testing.T) net.HardwareAddr {
	t.Helper()
	eth0, err := p.h.LinkByName("eth0")
	must.Do(t, err)
	return eth0.Attrs().HardwareAddr
}

func parseCIDR(t *testing.T, cidr string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(cidr)
	must.Do(t, err)
	a.Flags = unix.IFA_F_NODAD
	return a
}

func addLink(t *testing.T, l netlink.Link) int {
	t.Helper()
	must.Do(t, netlink.LinkAdd(l))
	return setUp(t, l.Attrs().Name)
}

func addDummyNIC(t *testing.T, name, cidr string) int {
	t.Helper()
	// A veth stands for a NIC: it is outward by its address, as in a node
	// that is a container.
	newPod(t, name)
	addAddr(t, name, cidr)
	return ifindex(t, name)
}

func addAddr(t *testing.T, name, cidr string) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	must.Do(t, netlink.AddrAdd(l, parseCIDR(t, cidr)))
}

// addRoute makes the node route a prefix by a device.
func addRoute(t *testing.T, cidr, name string) {
	t.Helper()
	must.Do(t, netlink.RouteReplace(route(t, cidr, name)))
}

func delRoute(t *testing.T, cidr, name string) {
	t.Helper()
	must.Do(t, netlink.RouteDel(route(t, cidr, name)))
}

func route(t *testing.T, cidr, name string) *netlink.Route {
	t.Helper()
	_, dst, err := net.ParseCIDR(cidr)
	must.Do(t, err)
	return &netlink.Route{LinkIndex: ifindex(t, name), Scope: netlink.SCOPE_LINK, Dst: dst}
}

func setUp(t *testing.T, name string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(l))
	return l.Attrs().Index
}

func setMaster(t *testing.T, name, master string) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	m, err := netlink.LinkByName(master)
	must.Do(t, err)
	must.Do(t, netlink.LinkSetMaster(l, m))
}

func delLink(t *testing.T, name string) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	must.Do(t, netlink.LinkDel(l))
}

func ifindex(t *testing.T, name string) int {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	return l.Attrs().Index
}

// mountBPF mounts a BPF file system of the test's own.
func mountBPF(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, unix.Mount("bpf", dir, "bpf", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dir, 0)) })
	return dir
}

const tcxNext = -1

func classifier(t *testing.T, verdict int32) *ebpf.Program {
	t.Helper()
	return newProgram(t, &ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, verdict), asm.Return()},
	})
}

func newProgram(t *testing.T, spec *ebpf.ProgramSpec) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(spec)
	must.Do(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

func classifiers(t *testing.T) Programs {
	t.Helper()
	return Programs{
		FromNetwork: classifier(t, tcxNext), ToNetwork: classifier(t, tcxNext),
		FromPod: classifier(t, tcxNext), ToPod: classifier(t, tcxNext),
	}
}

func newAttacher(t *testing.T, cfg Config) *Attacher {
	t.Helper()
	a, err := New(cfg)
	must.Do(t, err)
	t.Cleanup(func() { a.Close() })
	return a
}

// run lets the attacher follow the kernel until the test ends or stop is called.
func run(t *testing.T, a *Attacher) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	stopped := false
	stop = func() {
		if !stopped {
			stopped = true
			cancel()
			must.Do(t, <-done)
		}
	}
	t.Cleanup(stop)
	return stop
}

// podsOf returns the pods of the node as last reported.
func podsOf(a *Attacher) map[netip.Addr]Pod {
	a.mu.Lock()
	defer a.mu.Unlock()
	return maps.Clone(a.pods.reported)
}

type attachment struct {
	prog ebpf.ProgramID
	link link.ID
}

// attached asks the kernel what is at a hook, in order. Filters have no link.
func attached(t *testing.T, index int, dir direction) []attachment {
	t.Helper()
	if !kernel.HaveTCX() {
		return filtered(t, index, dir)
	}
	res, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: dir.tcx()})
	must.Do(t, err)
	var as []attachment
	for i := range res.Programs {
		id, _ := res.Programs[i].LinkID()
		as = append(as, attachment{res.Programs[i].ID, id})
	}
	return as
}

func filtered(t *testing.T, index int, dir direction) []attachment {
	t.Helper()
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	filters, err := netlink.FilterList(l, clsactParent(dir))
	must.Do(t, err)
	var as []attachment
	for _, f := range filters {
		as = append(as, attachment{prog: ebpf.ProgramID(f.(*netlink.BpfFilter).Id)})
	}
	return as
}

// needsTCX skips what is about links alone.
func needsTCX(t *testing.T) {
	t.Helper()
	if !kernel.HaveTCX() {
		t.Skip("needs tcx (Linux 6.6): is about its links")
	}
}

func programID(t *testing.T, p *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := p.Info()
	must.Do(t, err)
	id, _ := info.ID()
	return id
}

func wantPrograms(t *testing.T, index int, in, out *ebpf.Program) {
	t.Helper()
	for dir, p := range map[direction]*ebpf.Program{ingress: in, egress: out} {
		if err := samePrograms(t, index, dir, p); err != nil {
			t.Error(err)
		}
	}
}

func samePrograms(t *testing.T, index int, dir direction, want ...*ebpf.Program) error {
	t.Helper()
	var ids, got []ebpf.ProgramID
	for _, p := range want {
		if p != nil {
			ids = append(ids, programID(t, p))
		}
	}
	for _, a := range attached(t, index, dir) {
		got = append(got, a.prog)
	}
	if !slices.Equal(got, ids) {
		return fmt.Errorf("interface %d %s: programs %v, want %v", index, dir, got, ids)
	}
	return nil
}

func pins(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "links"))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }
