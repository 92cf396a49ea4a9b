package attach

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// dirty lists what must be checked again.
type dirty struct {
	links  bool         // links, addresses or roles
	routes bool         // routes that can change a role or a source address
	neighs bool         // neighbors behind which pods may be
	gone   map[int]bool // deleted interfaces; a new one may have the same index
	nsids  map[int]bool // namespaces of pods with events
	all    bool         // events were lost

	facts bool                // the cluster's data about addresses
	paths map[netip.Addr]bool // addresses whose covering route was added, deleted or changed
	rules bool                // routing rules
}

// events collects rtnetlink events until the next pass.
type events struct {
	own *kernel.Subscription
	// others receives events of the pods' namespaces; nil if the kernel denies that.
	others *kernel.Subscription

	mu         sync.Mutex
	dirty      dirty
	decided    map[int]bool // interfaces whose role no route changes
	watchNeigh map[int]bool // interfaces whose neighbors matter
	watchAddrs []netip.Addr // addresses whose routes matter, sorted
	neighs     bool         // own receives events of neighbors
	mtuRoutes  prefixes     // destinations of routes with an MTU
	mtus       bool         // MTUs of routes may have changed

	wake chan struct{}
}

func newEvents() (*events, error) {
	own, err := kernel.Subscribe(false, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_RULE, unix.RTNLGRP_IPV6_RULE)
	if err != nil {
		return nil, err
	}
	n := &events{own: own, wake: make(chan struct{}, 1)}
	n.others, err = kernel.Subscribe(true, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR)
	if err != nil {
		n.others = nil
	}
	go n.pump(n.own, n.addOwn)
	if n.others != nil {
		go n.pump(n.others, n.addOther)
	}
	return n, nil
}

func (n *events) close() {
	n.own.Close()
	if n.others != nil {
		n.others.Close()
	}
}

func (n *events) pump(s *kernel.Subscription, add func(kernel.Notification) bool) {
	for {
		msgs, err := s.Receive()
		if errors.Is(err, os.ErrClosed) {
			return
		}
		n.mu.Lock()
		useful := false
		for _, m := range msgs {
			useful = add(m) || useful
		}
		if err != nil {
			n.dirty.all = true
			useful = true
		}
		n.mu.Unlock()
		if useful {
			n.wakeUp()
		}
		if err != nil && !errors.Is(err, kernel.ErrOverrun) {
			time.Sleep(time.Second) // Unknown error: do not retry in a busy loop.
		}
	}
}

func (n *events) wakeUp() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// addOwn records a message of the agent's namespace. n.mu is held.
func (n *events) addOwn(m kernel.Notification) bool {
	switch m.Type {
	case unix.RTM_NEWLINK, unix.RTM_DELLINK:
		if len(m.Data) < unix.SizeofIfInfomsg {
			return false
		}
		// Bridges send messages about ports in their own family.
		if m.Type == unix.RTM_DELLINK && m.Data[0] == unix.AF_UNSPEC {
			if n.dirty.gone == nil {
				n.dirty.gone = make(map[int]bool)
			}
			n.dirty.gone[int(nl.DeserializeIfInfomsg(m.Data).Index)] = true
		}
		n.dirty.links = true
	case unix.RTM_NEWADDR, unix.RTM_DELADDR:
		n.dirty.links = true
	case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
		covers := n.noteRoute(m.Data)
		mtus := n.mtuMatters(m.Data)
		n.mtus = n.mtus || mtus
		if n.routeMatters(m.Data) {
			n.dirty.routes = true
		} else if !covers && !mtus {
			return false
		}
	case unix.RTM_NEWRULE, unix.RTM_DELRULE:
		n.dirty.rules = true
	case unix.RTM_NEWNEIGH, unix.RTM_DELNEIGH:
		if len(m.Data) < 8 || !n.watchNeigh[int(int32(binary.NativeEndian.Uint32(m.Data[4:])))] {
			return false
		}
		n.dirty.neighs = true
	default:
		return false
	}
	return true
}

// routeMatters filters out most routes of a routing daemon, and those to single pods,
// which would cost a dump each. Only default routes count, and wide routes of
// interfaces without a certain role.
func (n *events) routeMatters(data []byte) bool {
	if len(data) < unix.SizeofRtMsg {
		return false
	}
	msg := nl.DeserializeRtMsg(data)
	if msg.Table != unix.RT_TABLE_MAIN || msg.Type != unix.RTN_UNICAST || msg.Flags&unix.RTM_F_CLONED != 0 {
		return false
	}
	if msg.Dst_len == 0 {
		return true
	}
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofRtMsg:])
	if err != nil || msg.Protocol == unix.RTPROT_KERNEL {
		return false
	}
	oif, wide := 0, msg.Dst_len < 32 || msg.Family == unix.AF_INET6 && msg.Dst_len < 128
	for _, at := range attrs {
		switch at.Attr.Type {
		case unix.RTA_OIF:
			oif = int(binary.NativeEndian.Uint32(at.Value))
		case unix.RTA_MULTIPATH, unix.RTA_GATEWAY, unix.RTA_VIA:
			wide = true
		}
	}
	return wide && !n.decided[oif]
}

// noteRoute records the addresses that a route covers, and reports whether there are
// any.
func (n *events) noteRoute(data []byte) (any bool) {
	if len(n.watchAddrs) == 0 || len(data) < unix.SizeofRtMsg {
		return false
	}
	prefix, ok := routePrefix(data)
	if !ok {
		return false
	}
	first, _ := slices.BinarySearchFunc(n.watchAddrs, prefix.Addr(), netip.Addr.Compare)
	for _, a := range n.watchAddrs[first:] {
		if !prefix.Contains(a) {
			break
		}
		if n.dirty.paths == nil {
			n.dirty.paths = make(map[netip.Addr]bool)
		}
		n.dirty.paths[a] = true
		any = true
	}
	return any
}

// routePrefix returns the destination of a route message.
func routePrefix(data []byte) (netip.Prefix, bool) {
	msg := nl.DeserializeRtMsg(data)
	if msg.Flags&unix.RTM_F_CLONED != 0 {
		return netip.Prefix{}, false
	}
	var dst netip.Addr
	switch msg.Family {
	case unix.AF_INET:
		dst = netip.IPv4Unspecified()
	case unix.AF_INET6:
		dst = netip.IPv6Unspecified()
	default:
		return netip.Prefix{}, false
	}
	attrs, err := nl.ParseRouteAttr(data[unix.SizeofRtMsg:])
	if err != nil {
		return netip.Prefix{}, false
	}
	for _, at := range attrs {
		if at.Attr.Type == unix.RTA_DST {
			dst, _ = netip.AddrFromSlice(at.Value)
		}
	}
	p, err := dst.Prefix(int(msg.Dst_len))
	return p, err == nil
}

// addOther records a message of another namespace. n.mu is held.
func (n *events) addOther(m kernel.Notification) bool {
	if m.NSID == kernel.OwnNetns {
		return false
	}
	if n.dirty.nsids == nil {
		n.dirty.nsids = make(map[int]bool)
	}
	n.dirty.nsids[m.NSID] = true
	return true
}

// flush returns and resets the collected events.
func (n *events) flush() dirty {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := n.dirty
	n.dirty = dirty{}
	return d
}

// flushNamespaces returns and resets only the events of pods' namespaces.
func (n *events) flushNamespaces() dirty {
	n.mu.Lock()
	defer n.mu.Unlock()
	d := dirty{nsids: n.dirty.nsids}
	n.dirty.nsids = nil
	return d
}

// ignoreRoutes sets the interfaces whose routes cause no events.
func (n *events) ignoreRoutes(decided map[int]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.decided = decided
}

// watchNeighbors sets the interfaces whose neighbors cause events.
func (n *events) watchNeighbors(neigh map[int]bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watchNeigh = neigh
	if len(neigh) > 0 && !n.neighs {
		n.neighs = n.own.Join(unix.RTNLGRP_NEIGH) == nil
		// Neighbors learned just before the subscription are read once more.
		n.dirty.neighs = true
		n.wakeUp()
	}
}

// watchRoutes sets the addresses, sorted, whose routes cause events.
func (n *events) watchRoutes(addrs []netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watchAddrs = addrs
}

// noteFacts records that the cluster's data about addresses has changed.
func (n *events) noteFacts() {
	n.mu.Lock()
	n.dirty.facts = true
	n.mu.Unlock()
	n.wakeUp()
}

// dump reads a kernel table, again if it changed meanwhile.
func dump[T any](list func() ([]T, error)) ([]T, error) { return kernel.Dump(list) }
