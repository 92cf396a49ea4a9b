package topology

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	vxlanVNI       = 1 // flannel's defaults
	vxlanPort      = 8472
	vxlanOverhead4 = 50
	vxlanOverhead6 = 70
)

// tunnel holds the parameters of a vxlan device for one family. flannel has one device
// for each family, each over an underlay of its own family.
type tunnel struct {
	device    string
	overhead  int
	macPrefix byte
	underlay  func(*Host) netip.Addr
	podCIDR   func(*Host) netip.Prefix
}

var (
	tunnel4 = tunnel{"flannel.1", vxlanOverhead4, 0x0e,
		func(h *Host) netip.Addr { return h.addr4 }, func(h *Host) netip.Prefix { return h.podCIDR4 }}
	tunnel6 = tunnel{"flannel-v6.1", vxlanOverhead6, 0x06,
		func(h *Host) netip.Addr { return h.addr6 }, func(h *Host) netip.Prefix { return h.podCIDR6 }}
)

func (t tunnel) mac(h *Host) net.HardwareAddr { return macOf(t.macPrefix, h.addr4) }

// gateway is the address of a node's vxlan device, the first of its pod CIDR.
func (t tunnel) gateway(h *Host) netip.Addr { return t.podCIDR(h).Addr() }

// routeThroughVXLAN is flannel's vxlan backend. It learns nothing: the neighbor and FDB
// entries of all other nodes are permanent.
func (b *builder) routeThroughVXLAN(node *Host) error {
	n := b.networks[node.Name]
	for _, t := range pick(n.families, tunnel4, tunnel6) {
		dev, err := n.vxlan(t, node)
		if err != nil {
			return err
		}
		for _, other := range b.c.nodes {
			if other == node {
				continue
			}
			if err := n.tunnelTo(t, dev, other); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *network) vxlan(t tunnel, node *Host) (netlink.Link, error) {
	eth0, err := n.nl.LinkByName("eth0")
	if err != nil {
		return nil, n.fail("find link", "eth0", err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr, attrs.MTU = t.device, t.mac(node), ethernetMTU-t.overhead
	dev, err := n.ensureLink(&netlink.Vxlan{
		LinkAttrs:    attrs,
		VxlanId:      vxlanVNI,
		VtepDevIndex: eth0.Attrs().Index,
		SrcAddr:      t.underlay(node).AsSlice(),
		Port:         vxlanPort,
		Learning:     false,
	})
	if err != nil {
		return nil, err
	}
	gw := t.gateway(node)
	own := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(gw, gw.BitLen()))}
	if gw.Is6() {
		own.Flags = unix.IFA_F_NODAD
	}
	if err := n.nl.AddrReplace(dev, own); err != nil {
		return nil, n.fail("add address", fmt.Sprintf("%s to %s", gw, t.device), err)
	}
	return dev, nil
}

func (n *network) tunnelTo(t tunnel, dev netlink.Link, other *Host) error {
	gw := t.gateway(other)
	family := netlink.FAMILY_V4
	if gw.Is6() {
		family = netlink.FAMILY_V6
	}
	entries := []*netlink.Neigh{
		{Family: family, IP: gw.AsSlice()},
		{Family: unix.AF_BRIDGE, Flags: netlink.NTF_SELF, IP: t.underlay(other).AsSlice()},
	}
	for _, e := range entries {
		e.LinkIndex, e.State, e.HardwareAddr = dev.Attrs().Index, netlink.NUD_PERMANENT, t.mac(other)
		if err := n.nl.NeighSet(e); err != nil {
			return n.fail("add neighbor", fmt.Sprintf("%s on %s", e.IP, t.device), err)
		}
	}
	return n.route(t.podCIDR(other), gw, t.device, true)
}
