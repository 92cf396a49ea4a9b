package attach

import (
	"errors"
	"fmt"
	"maps"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The marks of our classifiers. The handle distinguishes them from other classifiers of
// the same priority.
const (
	clsactFilterName   = "spillway"
	clsactFilterHandle = 0x53500001
	clsactFilterPrio   = 1
)

// clsactHooks attaches direct-action classifiers in a clsact queueing discipline, for
// kernels without tcx (< 6.6). They stay attached without a pin.
type clsactHooks struct {
	h     *netlink.Handle
	progs map[hook]ebpf.ProgramID
}

// load finds the filters of an earlier run.
func (c *clsactHooks) load() error {
	c.progs = make(map[hook]ebpf.ProgramID)
	qdiscs, err := dump(func() ([]netlink.Qdisc, error) { return c.h.QdiscList(nil) })
	if err != nil {
		return fmt.Errorf("list queueing disciplines: %w", err)
	}
	for _, q := range qdiscs {
		if q.Type() != "clsact" {
			continue
		}
		for _, dir := range []direction{ingress, egress} {
			at := hook{q.Attrs().LinkIndex, dir}
			if id, ok := c.find(at); ok {
				c.progs[at] = id
			}
		}
	}
	return nil
}

// find returns the program of our filter at the hook.
func (c *clsactHooks) find(at hook) (ebpf.ProgramID, bool) {
	filters, err := c.filters(at)
	if err != nil {
		return 0, false
	}
	for _, f := range filters {
		if b, ok := f.(*netlink.BpfFilter); ok && b.Name == clsactFilterName && b.Handle == clsactFilterHandle {
			return ebpf.ProgramID(b.Id), true
		}
	}
	return 0, false
}

func (c *clsactHooks) filters(at hook) ([]netlink.Filter, error) {
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: at.ifindex}}
	return dump(func() ([]netlink.Filter, error) { return c.h.FilterList(l, clsactParent(at.dir)) })
}

// ensure makes p the hook's program. It replaces an existing program in place.
func (c *clsactHooks) ensure(at hook, p program, verify bool) error {
	if verify {
		delete(c.progs, at)
		if id, ok := c.find(at); ok {
			c.progs[at] = id
		}
	}
	if c.progs[at] == p.id {
		return nil
	}
	if err := c.addQdisc(at.ifindex); err != nil {
		return err
	}
	f := clsactFilter(at)
	f.Fd = p.FD()
	if err := c.h.FilterReplace(f); err != nil {
		return fmt.Errorf("add %s filter: %w", at.dir, err)
	}
	c.progs[at] = p.id
	return nil
}

// addQdisc adds clsact unless it exists. An ingress queueing discipline may have its
// place. It would accept egress filters and run them at ingress.
func (c *clsactHooks) addQdisc(ifindex int) error {
	err := c.h.QdiscAdd(clsactQdisc(ifindex))
	if err == nil {
		return nil
	}
	if !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add clsact: %w", err)
	}
	qdiscs, err := dump(func() ([]netlink.Qdisc, error) { return c.h.QdiscList(nil) })
	if err != nil {
		return fmt.Errorf("list queueing disciplines: %w", err)
	}
	for _, q := range qdiscs {
		if q.Attrs().LinkIndex == ifindex && q.Type() == "clsact" {
			return nil
		}
	}
	return errors.New("add clsact: the interface has an ingress queueing discipline in its place; " +
		"remove that (tc qdisc del dev INTERFACE ingress)")
}

// drop removes our filter, and the queueing discipline if no filter is left.
func (c *clsactHooks) drop(at hook) error {
	delete(c.progs, at)
	if err := c.h.FilterDel(clsactFilter(at)); err != nil && !absent(err) {
		return fmt.Errorf("delete %s filter: %w", at.dir, err)
	}
	for _, dir := range []direction{ingress, egress} {
		left, err := c.filters(hook{at.ifindex, dir})
		if err != nil || len(left) > 0 {
			return nil
		}
	}
	if err := c.h.QdiscDel(clsactQdisc(at.ifindex)); err != nil && !absent(err) {
		return fmt.Errorf("delete clsact: %w", err)
	}
	return nil
}

func (c *clsactHooks) attached() map[hook]ebpf.ProgramID { return maps.Clone(c.progs) }

func (c *clsactHooks) close() { c.progs = nil }

// absent reports whether err says that the object to delete does not exist.
func absent(err error) bool {
	return vanished(err) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL)
}

func clsactQdisc(ifindex int) netlink.Qdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{
			LinkIndex: ifindex,
			Handle:    netlink.MakeHandle(0xffff, 0),
			Parent:    netlink.HANDLE_CLSACT,
		},
		QdiscType: "clsact",
	}
}

func clsactFilter(at hook) *netlink.BpfFilter {
	return &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: at.ifindex,
			Parent:    clsactParent(at.dir),
			Handle:    clsactFilterHandle,
			Priority:  clsactFilterPrio,
			Protocol:  unix.ETH_P_ALL,
		},
		Fd:           -1,
		Name:         clsactFilterName,
		DirectAction: true,
	}
}

func clsactParent(dir direction) uint32 {
	if dir == ingress {
		return netlink.HANDLE_MIN_INGRESS
	}
	return netlink.HANDLE_MIN_EGRESS
}
