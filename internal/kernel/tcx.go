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
// (Linux 6.6). It only asks which are there.
func HaveTCX() bool {
	const loopback = 1 // lo's index in every network namespace
	_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
	return err == nil || errors.Is(err, unix.ENOENT)
}

// IngressPrograms names the eBPF programs at the ingress hook of a device in the calling
// thread's network namespace: those of tcx links by the programs' names, those of
// filters (before Linux 6.6) by the filters' names.
func IngressPrograms(device netlink.Link) (names []string, err error) {
	attached, err := link.QueryPrograms(link.QueryOptions{Target: device.Attrs().Index, Attach: ebpf.AttachTCXIngress})
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) { // nothing attached, or no tcx
		return nil, fmt.Errorf("list programs of %s: %w", device.Attrs().Name, err)
	}
	if attached != nil {
		for _, p := range attached.Programs {
			name, err := programName(p.ID)
			if err != nil {
				return nil, fmt.Errorf("list programs of %s: %w", device.Attrs().Name, err)
			}
			names = append(names, name)
		}
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

// programName is "" for a program that is gone by now.
func programName(id ebpf.ProgramID) (string, error) {
	p, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, unix.ENOENT) {
		return "", nil
	}
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
