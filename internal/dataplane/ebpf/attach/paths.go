package attach

import (
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// path is the node's own route for an address.
type path struct {
	devices []int // of all next hops; empty if no route forwards to the address
	host    bool  // the route is for this address alone (/32, /128)
	local   bool  // the address is the node's own
}

// pathKey is an address in one routing domain.
type pathKey struct {
	addr netip.Addr
	vrf  int // index of the VRF device, or 0
}

// pathTable asks the kernel for paths and caches the answers. A query takes some
// microseconds, so a node with hundreds of pods must not repeat them at each event.
// Events of routes, rules or devices delete the entries that they concern.
type pathTable struct {
	h       *netlink.Handle
	known   map[pathKey]path
	up      map[int]bool        // whether each device is up
	addrs   map[netip.Addr]bool // of the node, possible preferred sources of routes
	queries int                 // queries to the kernel, for tests
}

func newPathTable(h *netlink.Handle) *pathTable {
	return &pathTable{h: h, known: make(map[pathKey]path)}
}

// lookup returns the path of an address.
func (t *pathTable) lookup(key pathKey) path {
	if p, ok := t.known[key]; ok {
		return p
	}
	p, err := t.ask(key)
	if err == nil {
		t.known[key] = p
	}
	return p
}

// ask asks the kernel for the matching entry of the routing tables.
func (t *pathTable) ask(key pathKey) (path, error) {
	t.queries++
	list, err := t.h.RouteGetWithOptions(key.addr.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true, OifIndex: key.vrf})
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EACCES), errors.Is(err, unix.EINVAL):
		return path{}, nil // no route, or one of type unreachable, prohibit or blackhole
	case err != nil:
		return path{}, err
	}
	var p path
	for i := range list {
		r := &list[i]
		switch r.Type {
		case unix.RTN_LOCAL:
			p.local = true
		case unix.RTN_UNICAST:
			p.add(r)
		}
	}
	return p, nil
}

func (p *path) add(r *netlink.Route) {
	if r.LinkIndex > 0 {
		p.devices = append(p.devices, r.LinkIndex)
	}
	for _, hop := range r.MultiPath {
		p.devices = append(p.devices, hop.LinkIndex)
	}
	if r.Dst != nil {
		ones, bits := r.Dst.Mask.Size()
		p.host = ones == bits
	}
}

// forget deletes the entries of these addresses, or all.
func (t *pathTable) forget(addrs map[netip.Addr]bool, all bool) {
	if all {
		clear(t.known)
		return
	}
	if len(addrs) == 0 {
		return
	}
	for key := range t.known {
		if addrs[key.addr] {
			delete(t.known, key)
		}
	}
}

// follow deletes the paths that a changed device or address may invalidate. The kernel
// sends no events of the IPv4 routes that it removes when a device goes down or their
// preferred source address is removed. It does send events of added routes.
func (t *pathTable) follow(devices []device, addrs map[int][]netlink.Addr) {
	up := make(map[int]bool, len(devices))
	for i := range devices {
		up[devices[i].index] = devices[i].up
	}
	for key, p := range t.known {
		for _, i := range p.devices {
			if was, known := t.up[i]; !known || was != up[i] {
				delete(t.known, key)
			}
		}
	}
	t.up = up

	now := make(map[netip.Addr]bool)
	for _, list := range addrs {
		for _, a := range list {
			// Each pod's device has a link-local address, and many have the same global
			// one. Neither matters when the pod is deleted.
			if ip, ok := netip.AddrFromSlice(a.IP); ok && ip.IsGlobalUnicast() {
				now[ip.Unmap()] = true
			}
		}
	}
	for a := range t.addrs {
		if !now[a] {
			clear(t.known)
			break
		}
	}
	t.addrs = now
}
