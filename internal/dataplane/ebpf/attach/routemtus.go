package attach

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RouteKey is the destination of routes by one device.
type RouteKey struct {
	Dst     netip.Prefix
	Ifindex int
}

// RouteMTUs are the MTUs of routes of the main routing tables.
type RouteMTUs struct {
	// MTUs are in bytes. One of 0 is that of a route without an MTU whose destination is within that
	// of a route by the same device that has one.
	MTUs map[RouteKey]uint32
	// LeftOut is the number of routes beyond Config.MaxRouteMTUs. Those without an MTU are left out
	// first.
	LeftOut int
}

// leastMTUv6 is the least MTU that the kernel forwards IPv6 packets by (ip6_forward).
const leastMTUv6 = 1280

// mtuRoutes collects RouteMTUs.
type mtuRoutes struct {
	RouteMTUs
	max        int
	priorities map[RouteKey]int
	wide       prefixes // destinations of routes with an MTU, by device
}

func newMTURoutes(limit int) *mtuRoutes {
	return &mtuRoutes{
		RouteMTUs: RouteMTUs{MTUs: make(map[RouteKey]uint32)}, max: limit,
		priorities: make(map[RouteKey]int), wide: prefixes{keys: make(map[RouteKey]bool)},
	}
}

// add adds the MTU of a route. Of two routes with one destination and device, the kernel uses that with
// the lower priority number, or the first.
func (m *mtuRoutes) add(family int, r *netlink.Route) {
	dst, ok := routeDst(family, r)
	if !ok {
		return
	}
	mtu := uint32(max(r.MTU, 0))
	if mtu > 0 && family == netlink.FAMILY_V6 {
		mtu = max(mtu, leastMTUv6)
	}
	var by path
	by.add(r)
	for _, ifindex := range by.devices {
		m.addKey(RouteKey{dst, ifindex}, mtu, r.Priority)
	}
}

func (m *mtuRoutes) addKey(key RouteKey, mtu uint32, priority int) {
	if mtu == 0 && !m.wide.cover(key) {
		return
	}
	before, found := m.priorities[key]
	switch {
	case found && before <= priority:
		return
	case !found && len(m.MTUs) >= m.max:
		m.LeftOut++
		return
	}
	m.MTUs[key], m.priorities[key] = mtu, priority
	if mtu > 0 {
		m.wide.add(key)
	}
}

// routeDst returns the destination of a unicast route that the FIB lookup of the programs can find:
// they give no TOS.
func routeDst(family int, r *netlink.Route) (netip.Prefix, bool) {
	if r.Type != unix.RTN_UNICAST || r.Tos != 0 {
		return netip.Prefix{}, false
	}
	addr, ones := netip.IPv4Unspecified(), 0
	if family == netlink.FAMILY_V6 {
		addr = netip.IPv6Unspecified()
	}
	if r.Dst != nil {
		addr, _ = netip.AddrFromSlice(r.Dst.IP)
		addr = addr.Unmap()
		ones, _ = r.Dst.Mask.Size()
	}
	p, err := addr.Prefix(ones)
	return p, err == nil && !addr.IsMulticast() && !addr.IsLinkLocalUnicast()
}

// prefixes is a set of destinations by device. Device 0 stands for any.
type prefixes struct {
	keys    map[RouteKey]bool
	lengths [129]bool // of the destinations
}

func (s *prefixes) add(key RouteKey) {
	s.keys[key], s.keys[RouteKey{Dst: key.Dst}] = true, true
	s.lengths[key.Dst.Bits()] = true
}

// cover reports whether a destination is within one of the set.
func (s *prefixes) cover(key RouteKey) bool {
	for bits := range key.Dst.Bits() + 1 {
		if !s.lengths[bits] {
			continue
		}
		if p, err := key.Dst.Addr().Prefix(bits); err == nil && s.keys[RouteKey{p, key.Ifindex}] {
			return true
		}
	}
	return false
}

// readRoutes reads the routes, and reports their MTUs. Most nodes have no route with an MTU. Only the
// others pay for a second look, which finds the routes without an MTU that are within one with one.
func (a *Attacher) readRoutes() error {
	begin := time.Now()
	a.events.flushMTUs()
	mtus := newMTURoutes(a.cfg.MaxRouteMTUs)
	rs, err := listRoutes(a.h, mtus)
	if err != nil {
		return err
	}
	// Before the second look: a route that changes in between causes an event.
	a.events.watchMTUs(mtus.wide)
	if len(mtus.MTUs) > 0 {
		err := eachRoute(a.h, func(family int, r *netlink.Route) {
			if r.MTU == 0 {
				mtus.add(family, r)
			}
		})
		if err != nil {
			return err
		}
	}
	a.routes, a.routesTook = rs, time.Since(begin)
	if a.routeMTUs == nil || !maps.Equal(a.routeMTUs, mtus.MTUs) {
		a.routeMTUs = mtus.MTUs
		if a.cfg.OnRouteMTUs != nil {
			a.cfg.OnRouteMTUs(RouteMTUs{MTUs: maps.Clone(mtus.MTUs), LeftOut: mtus.LeftOut})
		}
	}
	return nil
}

// eachRoute calls do with the routes of the main tables.
func eachRoute(h *netlink.Handle, do func(family int, r *netlink.Route)) error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		err := h.RouteListFilteredIter(family, &netlink.Route{}, 0, func(r netlink.Route) bool {
			do(family, &r)
			return true
		})
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list routes: %w", err)
		}
	}
	return nil
}

// mtuPass reads the routes again if their MTUs may have changed.
func (a *Attacher) mtuPass() {
	if !a.events.flushMTUs() {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.readRoutes(); err != nil {
		a.report("", err) // the next full check reads them again
	}
}

// mtuWait is how long mtuPass waits for further events: a node with BGP may have a million routes.
// Reading them takes a tenth of the time at most.
func (a *Attacher) mtuWait() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return max(9*a.routesTook, minInterfaceWait)
}

// mtuMatters reports whether a route message can change MTUs: the route has metrics, or a route with
// an MTU covers its destination.
func (n *events) mtuMatters(data []byte) bool {
	if len(data) < unix.SizeofRtMsg {
		return false
	}
	msg := nl.DeserializeRtMsg(data)
	if msg.Table != unix.RT_TABLE_MAIN || msg.Type != unix.RTN_UNICAST {
		return false
	}
	prefix, ok := routePrefix(data)
	if !ok {
		return false
	}
	if n.mtuRoutes.cover(RouteKey{Dst: prefix}) {
		return true
	}
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofRtMsg:])
	return err == nil && hasMetrics(attrs)
}

func hasMetrics(attrs []syscall.NetlinkRouteAttr) bool {
	return slices.ContainsFunc(attrs, func(at syscall.NetlinkRouteAttr) bool { return at.Attr.Type == unix.RTA_METRICS })
}

// watchMTUs sets the destinations of routes with an MTU.
func (n *events) watchMTUs(routes prefixes) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.mtuRoutes = routes
}

// flushMTUs reports whether MTUs of routes may have changed since the last call.
func (n *events) flushMTUs() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	changed := n.mtus
	n.mtus = false
	return changed
}
