package attach

import (
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
)

// Role says where an interface leads.
type Role uint8

const (
	// Ignored interfaces have no hooks.
	Ignored Role = iota
	// External devices lead to other nodes and to clients.
	External
	// PodSide devices are the host ends of pods.
	PodSide
)

// String returns "ignored", "outward" or "pod-side".
func (r Role) String() string {
	switch r {
	case External:
		return "outward"
	case PodSide:
		return "pod-side"
	}
	return "ignored"
}

// Interface is a link of the agent's network namespace with its role.
type Interface struct {
	Ifindex int
	Name    string
	Role    Role
	// L3 says that packets start with the IP header, without a link-layer header
	// (WireGuard, tun, IPIP).
	L3 bool
	// MTU is in bytes, without a link-layer header.
	MTU int
}

// device has the properties of a link that its role depends on.
type device struct {
	index, master int
	name, kind    string
	encap         string // "ether", "none", "ipip", ...
	loopback, up  bool
	peer, nsid    int // the other end of a veth; nsid is -1 if it is in this namespace
	mac           net.HardwareAddr
	mtu           int
	xdp           uint32 // XDP_ATTACHED_*: how its XDP program runs

	wideAddr bool // a global address whose prefix contains other addresses
	hostAddr bool // a global address of its own prefix only (/32, /128)
	route    bool // a route through a gateway or to several addresses
}

// classify gives each device its role. The first line that fits decides:
//
//	loopback, dummy, ifb, vrf, nlmon, vcan           ignored   no packet of another machine comes by them
//	member of a bond or team                         ignored   the bond is hooked
//	bridge or OVS port: veth/netkit whose peer is in
//	  another namespace, tap                         pod-side  docker0, cni0, VMs
//	bridge or OVS port: anything else                ignored   the bridge is hooked, if its turn comes
//	bridge or OVS device with a NIC, VLAN or bond
//	  among the ports, and with an address or route  outward   "br0" of a host with VMs
//	other bridge or OVS device                       ignored   cni0: its ports are hooked
//	address with a prefix, or a route that is more
//	  than one address or has a gateway              outward   eth0 (also where it is a veth), VLANs, vxlan, bonds
//	veth/netkit whose peer is in another namespace,
//	  tap                                            pod-side  cali*, lxc*, eni*, ptp (which has a /32 of its own)
//	NIC (a device of no kind, Ethernet)              outward   its address may be on the way
//	global address (/32, /128)                       outward   flannel.1, tunl0, wireguard, tailscale0
//	anything else                                    ignored   unused tunnels, veth pairs within the namespace
//
// A member of a VRF counts as standing alone: packets pass its own hooks.
func classify(devices []device) []Interface {
	byIndex := make(map[int]*device, len(devices))
	for i := range devices {
		byIndex[devices[i].index] = &devices[i]
	}
	uplinked := uplinkedMasters(devices, byIndex)
	res := make([]Interface, 0, len(devices))
	for i := range devices {
		d := &devices[i]
		res = append(res, Interface{
			Ifindex: d.index, Name: d.name, MTU: d.mtu,
			Role: d.role(byIndex[d.master], uplinked),
			L3:   d.encap != "ether",
		})
	}
	slices.SortFunc(res, func(a, b Interface) int { return a.Ifindex - b.Ifindex })
	return res
}

func (d *device) role(master *device, uplinked map[int]bool) Role {
	if d.unused() {
		return Ignored
	}
	if master != nil {
		switch master.kind {
		case "vrf":
		case "bridge", "openvswitch":
			if d.podEnd() {
				return PodSide
			}
			return Ignored
		default:
			return Ignored
		}
	}
	switch {
	case d.isSwitch():
		if (uplinked[d.index] || d.kind == "openvswitch" && uplinked[anyOVS]) && d.addressed() {
			return External
		}
		return Ignored
	case d.wideAddr || d.route:
		return External
	case d.podEnd():
		return PodSide
	case d.kind == "device" && d.encap == "ether", d.hostAddr:
		return External
	}
	return Ignored
}

// anyOVS stands for all Open vSwitch devices: the kernel does not show which internal
// device belongs to which ports.
const anyOVS = -1

func uplinkedMasters(devices []device, byIndex map[int]*device) map[int]bool {
	res := make(map[int]bool)
	for i := range devices {
		master := byIndex[devices[i].master]
		if master == nil || !devices[i].uplink() {
			continue
		}
		res[master.index] = true
		if master.kind == "openvswitch" {
			res[anyOVS] = true
		}
	}
	return res
}

func (d *device) unused() bool {
	switch d.kind {
	case "dummy", "ifb", "vrf", "nlmon", "vcan", "vxcan", "macvtap", "ipvtap":
		return true
	}
	return d.loopback
}

func (d *device) isSwitch() bool  { return d.kind == "bridge" || d.kind == "openvswitch" }
func (d *device) addressed() bool { return d.wideAddr || d.hostAddr || d.route }

// podEnd reports whether a pod or a virtual machine can be at the other end.
func (d *device) podEnd() bool {
	switch d.kind {
	case "veth", "netkit":
		return d.nsid >= 0
	case "tuntap":
		return d.encap == "ether"
	}
	return false
}

// uplink reports whether the port can connect its bridge directly with other machines.
// Tunnels do not count: a bridge over vxlan is a pod network.
func (d *device) uplink() bool {
	switch d.kind {
	case "device", "vlan", "bond", "team", "macvlan", "hsr":
		return d.encap == "ether"
	}
	return false
}

// ambiguous reports whether a route could change the device's role.
func (d *device) ambiguous() bool {
	return !d.unused() && !d.wideAddr && (d.master == 0 || d.isSwitch())
}

// listDevices reads the links of h's namespace with their addresses and routes.
// Addresses are in the kernel's order, primary ones first.
func listDevices(links []netlink.Link, addrs map[int][]netlink.Addr, routes routes) []device {
	devices := make([]device, 0, len(links))
	for _, l := range links {
		at := l.Attrs()
		d := device{
			index: at.Index, master: at.MasterIndex, name: at.Name, kind: l.Type(),
			encap: at.EncapType, loopback: at.Flags&net.FlagLoopback != 0, up: at.Flags&net.FlagUp != 0,
			peer: at.ParentIndex, nsid: at.NetNsID, mac: at.HardwareAddr, mtu: at.MTU,
			route: routes.wide[at.Index],
		}
		if at.Xdp != nil {
			d.xdp = at.Xdp.AttachMode
		}
		for _, a := range addrs[at.Index] {
			if !a.IP.IsGlobalUnicast() {
				continue
			}
			if ones, bits := addrPrefix(&a); ones == bits {
				d.hostAddr = true
			} else {
				d.wideAddr = true
			}
		}
		devices = append(devices, d)
	}
	return devices
}

// addrPrefix returns the prefix that an address makes reachable: the peer's if it has a
// peer address (point to point).
func addrPrefix(a *netlink.Addr) (ones, bits int) {
	if a.Peer != nil && a.Peer.Mask != nil {
		return a.Peer.Mask.Size()
	}
	return a.Mask.Size()
}

func listLinks(h *netlink.Handle) ([]netlink.Link, error) {
	links, err := dump(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return links, nil
}

func listAddrs(h *netlink.Handle) (map[int][]netlink.Addr, error) {
	list, err := dump(func() ([]netlink.Addr, error) { return h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	res := make(map[int][]netlink.Addr)
	for _, a := range list {
		res[a.LinkIndex] = append(res[a.LinkIndex], a)
	}
	return res, nil
}
