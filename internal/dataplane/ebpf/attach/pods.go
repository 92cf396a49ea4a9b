package attach

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Pod is the device and the MAC addresses for packets to a pod address of this node.
type Pod struct {
	// Ifindex is the index of the host end, in the agent's namespace. 0 says that
	// several interfaces announce the address and none of the announcements is accepted.
	Ifindex int
	// PodMAC is the MAC of the pod's own interface; nil if it has none.
	PodMAC net.HardwareAddr
	// HostMAC is the MAC of the pod's gateway: the bridge's if the host end is a bridge
	// port, else the host end's.
	HostMAC net.HardwareAddr
}

func (p Pod) equal(q Pod) bool {
	return p.Ifindex == q.Ifindex && bytes.Equal(p.PodMAC, q.PodMAC) && bytes.Equal(p.HostMAC, q.HostMAC)
}

// PodChanges are changes to the last reported set of pods.
type PodChanges struct {
	// Full says that Upserts is the complete set: other pods of an earlier run do not
	// exist any more.
	Full    bool
	Upserts map[netip.Addr]Pod
	Deletes []netip.Addr
}

// podPort is the state of one pod-side device.
type podPort struct {
	name                        string
	ifindex, peer, nsid, master int
	ovs                         bool // master is an Open vSwitch device
	vrf                         int  // index of the VRF of the interface or its bridge, or 0
	hostMAC, podMAC             net.HardwareAddr
	addrs                       []podAddr
	stale                       bool          // the pod's own side must be read
	named                       [2]netip.Addr // by family, the address of the Pod that owns the interface
	reports                     int           // number of reported refused announcements
}

// podAddr is an address of a pod's own interface.
type podAddr struct {
	addr    netip.Addr
	dynamic bool // from IPv6 autoconfiguration, not from the CNI
}

// podTable finds the pods behind pod-side devices without entering their namespaces.
// The kernel answers queries about a namespace that has a number in this one
// (IFLA_LINK_NETNSID). The namespace at the other end of each veth has one.
type podTable struct {
	sock     *nl.SocketHandle // with strict checking: otherwise the kernel ignores the namespace
	h        *netlink.Handle
	ports    map[int]*podPort
	reported map[netip.Addr]Pod
	first    bool

	facts     func(netip.Addr) Fact // nil: all addresses are Unknown
	paths     *pathTable
	vlans     map[int]int  // VLAN devices of bridges, with their bridge
	ovs       map[int]bool // devices of Open vSwitch
	learned   []neighbor   // nil: not read yet
	announced announcements
	owners    map[netip.Addr]owner
	refused   map[refusalKey]*refusal
}

// newPodTable returns a table in which owners, of an earlier run, have their addresses.
func newPodTable(h *netlink.Handle, facts func(netip.Addr) Fact, owners map[netip.Addr]Pod) (*podTable, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(requestTimeout))
	_ = s.SetReceiveTimeout(&timeout)
	// Since Linux 5.0. Without it every query fails, and neighbors are used.
	_ = unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	t := &podTable{
		sock: &nl.SocketHandle{Socket: s}, h: h, first: true,
		ports: make(map[int]*podPort), reported: make(map[netip.Addr]Pod),
		facts: facts, paths: newPathTable(h), owners: make(map[netip.Addr]owner),
	}
	for a, p := range owners {
		t.owners[a] = owner{ifindex: p.Ifindex, mac: p.PodMAC, earlier: true}
	}
	return t, nil
}

func (t *podTable) close() { t.sock.Close() }

// setPorts sets the pod-side devices. New ones, and those with another other end, are
// marked as stale.
func (t *podTable) setPorts(devices []device, ifaces []Interface) {
	macs := make(map[int]net.HardwareAddr, len(devices))
	byIndex := make(map[int]*device, len(devices))
	for i := range devices {
		macs[devices[i].index] = devices[i].mac
		byIndex[devices[i].index] = &devices[i]
	}
	t.vlans, t.ovs = make(map[int]int), make(map[int]bool)
	for i := range devices {
		d := &devices[i]
		switch {
		case d.kind == "openvswitch":
			t.ovs[d.index] = true
		case d.kind == "vlan" && byIndex[d.peer] != nil && byIndex[d.peer].isSwitch():
			t.vlans[d.index] = d.peer
		}
	}
	vrf := func(d *device) int {
		if m := byIndex[d.master]; m != nil && m.kind == "vrf" {
			return m.index
		}
		return 0
	}
	ports := make(map[int]*podPort)
	for _, iface := range ifaces {
		if iface.Role != PodSide {
			continue
		}
		d := byIndex[iface.Ifindex]
		p := t.ports[d.index]
		if p == nil || p.nsid != d.nsid || p.peer != d.peer {
			if p != nil {
				t.deleteOwner(d.index)
			}
			p = &podPort{ifindex: d.index, nsid: d.nsid, peer: d.peer, stale: true}
		}
		p.name, p.master, p.ovs, p.hostMAC, p.vrf = d.name, 0, false, d.mac, vrf(d)
		if m := byIndex[d.master]; m != nil && m.isSwitch() {
			p.master, p.ovs, p.hostMAC, p.vrf = d.master, m.kind == "openvswitch", m.mac, vrf(m)
		}
		ports[d.index] = p
	}
	t.ports = ports
}

// deleteOwner deletes the addresses of an interface: another one has its index now.
func (t *podTable) deleteOwner(ifindex int) {
	for a, o := range t.owners {
		if o.ifindex == ifindex {
			delete(t.owners, a)
		}
	}
}

// read reads the pods in the given namespaces and the unread ones, or all. It reports
// whether there were any.
func (t *podTable) read(nsids map[int]bool, all bool) (any bool) {
	for _, p := range t.ports {
		if !all && !p.stale && !nsids[p.nsid] {
			continue
		}
		any = true
		p.stale = false
		p.addrs, p.podMAC = nil, nil
		if p.nsid < 0 {
			continue // A virtual machine's tap: only neighbor tables show the address.
		}
		mac, err := t.peerMAC(p.nsid, p.peer)
		if err != nil {
			continue // Deleted, or access denied: see neighbors.
		}
		addrs, err := t.peerAddrs(p.nsid, p.peer)
		if err != nil {
			continue
		}
		p.podMAC, p.addrs = mac, addrs
	}
	return any
}

// peerMAC queries the link-layer address of an interface of another namespace.
func (t *podTable) peerMAC(nsid, ifindex int) (net.HardwareAddr, error) {
	req := t.request(unix.RTM_GETLINK, 0)
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(ifindex)
	req.AddData(msg)
	req.AddData(nl.NewRtAttr(unix.IFLA_TARGET_NETNSID, nl.Uint32Attr(uint32(nsid))))
	msgs, err := req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWLINK)
	if err != nil {
		return nil, err
	}
	for _, m := range msgs {
		if len(m) < unix.SizeofIfInfomsg {
			continue
		}
		attrs, err := routeAttrs(m[unix.SizeofIfInfomsg:])
		if err != nil {
			return nil, err
		}
		var mac net.HardwareAddr
		answered := false
		for _, at := range attrs {
			switch at.Attr.Type {
			case unix.IFLA_ADDRESS:
				mac = slices.Clone(at.Value)
			case unix.IFLA_TARGET_NETNSID:
				answered = true
			}
		}
		if answered {
			return mac, nil
		}
	}
	return nil, fmt.Errorf("no answer from namespace %d", nsid)
}

// peerAddrs queries the global addresses of an interface of another namespace.
func (t *podTable) peerAddrs(nsid, ifindex int) ([]podAddr, error) {
	msgs, err := dump(func() ([][]byte, error) {
		req := t.request(unix.RTM_GETADDR, unix.NLM_F_DUMP)
		msg := nl.NewIfAddrmsg(unix.AF_UNSPEC)
		msg.Index = uint32(ifindex)
		req.AddData(msg)
		req.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(nsid))))
		return req.Execute(unix.NETLINK_ROUTE, unix.RTM_NEWADDR)
	})
	if err != nil {
		return nil, err
	}
	var addrs []podAddr
	for _, m := range msgs {
		if a, ok := parseAddr(m, nsid, ifindex); ok && len(addrs) < maxAddrs {
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

// parseAddr returns the address of an RTM_NEWADDR if it is usable and of this
// interface.
func parseAddr(m []byte, nsid, ifindex int) (podAddr, bool) {
	if len(m) < unix.SizeofIfAddrmsg {
		return podAddr{}, false
	}
	msg := nl.DeserializeIfAddrmsg(m)
	attrs, err := routeAttrs(m[unix.SizeofIfAddrmsg:])
	if err != nil || int(msg.Index) != ifindex {
		return podAddr{}, false
	}
	addr := netlink.Addr{IPNet: &net.IPNet{}, Scope: int(msg.Scope), Flags: int(msg.Flags)}
	answered := false
	for _, at := range attrs {
		if len(at.Value) < 4 {
			continue // none of these is shorter
		}
		switch at.Attr.Type {
		case unix.IFA_LOCAL:
			addr.IP = at.Value
		case unix.IFA_ADDRESS:
			if addr.IP == nil {
				addr.IP = at.Value
			}
		case unix.IFA_FLAGS:
			addr.Flags = int(binary.NativeEndian.Uint32(at.Value))
		case unix.IFA_TARGET_NETNSID:
			answered = int(binary.NativeEndian.Uint32(at.Value)) == nsid
		}
	}
	if !answered {
		return podAddr{}, false
	}
	a, ok := globalAddr(&addr)
	return podAddr{a, a.Is6() && addr.Flags&unix.IFA_F_PERMANENT == 0}, ok
}

// routeAttrs is nl.ParseRouteAttr for messages whose last attribute lacks its padding.
// That function panics on them.
func routeAttrs(b []byte) ([]syscall.NetlinkRouteAttr, error) {
	if over := len(b) % unix.NLMSG_ALIGNTO; over != 0 {
		b = append(slices.Clip(b), make([]byte, unix.NLMSG_ALIGNTO-over)...)
	}
	return nl.ParseRouteAttr(b)
}

func (t *podTable) request(typ, flags int) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(typ, flags)
	req.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_ROUTE: t.sock}
	return req
}

// changes decides about the announcements and returns the differences to the last decision.
func (t *podTable) changes() PodChanges {
	now := t.decide(time.Now())
	c := PodChanges{Full: t.first, Upserts: make(map[netip.Addr]Pod)}
	for a, pod := range now {
		if old, ok := t.reported[a]; !ok || !old.equal(pod) {
			c.Upserts[a] = pod
		}
	}
	for a := range t.reported {
		if _, ok := now[a]; !ok {
			c.Deletes = append(c.Deletes, a)
		}
	}
	slices.SortFunc(c.Deletes, netip.Addr.Compare)
	t.reported, t.first = now, false
	return c
}
