package topology

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// network is a namespace opened for rtnetlink. Its methods create missing objects.
type network struct {
	name     string
	ns       netns.NsHandle
	nl       *netlink.Handle
	families families
}

func openNetwork(name string, s Spec) (*network, error) {
	ns, err := netns.GetFromPath(namespacePath(name))
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	nl, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("open rtnetlink in %s: %w", name, err)
	}
	return &network{name, ns, nl, families{s.IPv4, s.IPv6}}, nil
}

func (n *network) close() {
	n.nl.Close()
	n.ns.Close()
}

func (n *network) fail(verb, object string, err error) error {
	return fmt.Errorf("%s %s in %s: %w", verb, object, n.name, err)
}

// link returns a link, or nil if the name does not exist.
func (n *network) link(name string) (netlink.Link, error) {
	l, err := n.nl.LinkByName(name)
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil, nil
	}
	if err != nil {
		return nil, n.fail("find link", name, err)
	}
	return l, nil
}

// ensureLink creates a missing link, and brings it up.
func (n *network) ensureLink(want netlink.Link) (netlink.Link, error) {
	name := want.Attrs().Name
	l, err := n.link(name)
	if err != nil {
		return nil, err
	}
	if l != nil && l.Type() != want.Type() {
		if err := n.nl.LinkDel(l); err != nil {
			return nil, n.fail("remove link", name, err)
		}
		l = nil
	}
	if l == nil {
		if err := n.nl.LinkAdd(want); err != nil {
			return nil, n.fail("create link", name, err)
		}
		if l, err = n.nl.LinkByName(name); err != nil {
			return nil, n.fail("find link", name, err)
		}
	}
	return l, n.up(name)
}

func (n *network) up(name string) error {
	l, err := n.nl.LinkByName(name)
	if err == nil {
		err = n.nl.LinkSetUp(l)
	}
	if err != nil {
		return n.fail("bring up link", name, err)
	}
	return nil
}

func (n *network) bridge(name string, mac net.HardwareAddr, mtu int) (netlink.Link, error) {
	attrs := netlink.NewLinkAttrs()
	// Set explicitly: otherwise a bridge takes the lowest of its ports' addresses, and
	// changes it with its ports.
	attrs.Name, attrs.HardwareAddr, attrs.MTU = name, mac, mtu
	return n.ensureLink(&netlink.Bridge{LinkAttrs: attrs})
}

// port connects a namespace's new eth0 to a bridge here. The pair is created in
// place: no end of it is ever seen in another namespace.
func (n *network) port(name string, bridge netlink.Link, peer *network, mac net.HardwareAddr, mtu int) (netlink.Link, error) {
	if err := n.removeUnlessPaired(name, peer); err != nil {
		return nil, err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	l, err := n.ensureLink(&netlink.Veth{
		LinkAttrs:        attrs,
		PeerName:         "eth0",
		PeerNamespace:    netlink.NsFd(peer.ns),
		PeerHardwareAddr: mac,
		PeerMTU:          uint32(mtu),
		PeerTxQLen:       -1,
	})
	if err != nil {
		return nil, err
	}
	if l.Attrs().MasterIndex != bridge.Attrs().Index {
		if err := n.nl.LinkSetMaster(l, bridge); err != nil {
			return nil, n.fail("add bridge port", name, err)
		}
	}
	return l, peer.up("eth0")
}

// removeUnlessPaired removes the remaining half of a veth pair after an interrupted
// Up or a change by another program.
func (n *network) removeUnlessPaired(name string, peer *network) error {
	here, err := n.link(name)
	if err != nil {
		return err
	}
	there, err := peer.link("eth0")
	if err != nil {
		return err
	}
	if here != nil && there != nil && here.Attrs().ParentIndex == there.Attrs().Index &&
		there.Attrs().ParentIndex == here.Attrs().Index {
		return nil
	}
	if here != nil {
		if err := n.nl.LinkDel(here); err != nil {
			return n.fail("remove link", name, err)
		}
	}
	if there != nil {
		if err := peer.nl.LinkDel(there); err != nil && !isNotFound(err) {
			return peer.fail("remove link", "eth0", err)
		}
	}
	return nil
}

// addresses assigns to a link each of the two addresses whose family is in use.
func (n *network) addresses(link string, v4, v6 netip.Prefix) error {
	l, err := n.nl.LinkByName(link)
	if err != nil {
		return n.fail("find link", link, err)
	}
	for _, p := range pick(n.families, v4, v6) {
		a := &netlink.Addr{IPNet: ipNet(p)}
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD
		}
		if err := n.nl.AddrReplace(l, a); err != nil {
			return n.fail("add address", p.String()+" to "+link, err)
		}
	}
	return nil
}

// route creates a route to a prefix via a gateway. onlink declares the gateway reachable
// without a route to it.
func (n *network) route(to netip.Prefix, via netip.Addr, link string, onlink bool) error {
	l, err := n.nl.LinkByName(link)
	if err != nil {
		return n.fail("find link", link, err)
	}
	r := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(to), Gw: via.AsSlice()}
	if onlink {
		r.SetFlag(netlink.FLAG_ONLINK)
	}
	if err := n.nl.RouteReplace(r); err != nil {
		return n.fail("add route", fmt.Sprintf("%s via %s", to, via), err)
	}
	return nil
}

func (n *network) defaultRoute(v4, v6 netip.Addr) error {
	for _, gw := range pick(n.families, v4, v6) {
		if err := n.route(netip.PrefixFrom(zeroLike(gw), 0), gw, "eth0", false); err != nil {
			return err
		}
	}
	return nil
}

func zeroLike(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
