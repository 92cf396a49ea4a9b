package attach

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Pod is what a packet needs to reach an address of a pod on this node.
type Pod struct {
	// Ifindex is the host end's, in the agent's namespace.
	Ifindex int
	// PodMAC is the pod's own interface's; nil if that has none.
	PodMAC net.HardwareAddr
	// HostMAC is the one that the pod knows as its gateway's: the bridge's if
	// the host end is a bridge port, else the host end's.
	HostMAC net.HardwareAddr
}

func (p Pod) equal(q Pod) bool {
	return p.Ifindex == q.Ifindex && bytes.Equal(p.PodMAC, q.PodMAC) && bytes.Equal(p.HostMAC, q.HostMAC)
}

// PodChanges are differences to the set of pods told before.
type PodChanges struct {
	// Full says that Upserts is the complete set: what else the receiver
	// knows, from an earlier run, is not there any more.
	Full    bool
	Upserts map[netip.Addr]Pod
	Deletes []netip.Addr
}

// podPort is what is known of one pod-side interface.
type podPort struct {
	ifindex, peer, nsid, master int
	hostMAC, podMAC             net.HardwareAddr
	addrs                       []netip.Addr
	stale                       bool // the pod's own side must be read (again)
}

// podTable finds the pods behind pod-side interfaces, without entering their
// namespaces: the kernel answers questions about a namespace that has a number
// here (IFLA_LINK_NETNSID), and the other end of each veth does.
type podTable struct {
	sock  *nl.SocketHandle // with strict checking, else the namespace is ignored
	h     *netlink.Handle
	ports map[int]*podPort
	told  map[netip.Addr]Pod
	first bool
}

func newPodTable(h *netlink.Handle) (*podTable, error) {
	s, err := nl.GetNetlinkSocketAt(netns.None(), netns.None(), unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	timeout := unix.NsecToTimeval(int64(requestTimeout))
	_ = s.SetReceiveTimeout(&timeout)
	// Since Linux 5.0. Without it every lookup fails and neighbours are used.
	_ = unix.SetsockoptInt(s.GetFd(), unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1)
	return &podTable{
		sock: &nl.SocketHandle{Socket: s}, h: h, first: true,
		ports: make(map[int]*podPort), told: make(map[netip.Addr]Pod),
	}, nil
}

func (t *podTable) close() { t.sock.Close() }

// setPorts makes the pod-side interfaces the ones looked at. Those that are
// new, or whose other end is not the same, will be read.
func (t *podTable) setPorts(devices []device, ifaces []Interface) {
	macs := make(map[int]net.HardwareAddr, len(devices))
	byIndex := make(map[int]*device, len(devices))
	for i := range devices {
		macs[devices[i].index] = devices[i].mac
		byIndex[devices[i].index] = &devices[i]
	}
	ports := make(map[int]*podPort)
	for _, iface := range ifaces {
		if iface.Role != PodSide {
			continue
		}
		d := byIndex[iface.Ifindex]
		p := t.ports[d.index]
		if p == nil || p.nsid != d.nsid || p.peer != d.peer {
			p = &podPort{ifindex: d.index, nsid: d.nsid, peer: d.peer, stale: true}
		}
		p.master, p.hostMAC = 0, d.mac
		if m := byIndex[d.master]; m != nil && m.isSwitch() {
			p.master, p.hostMAC = d.master, m.mac
		}
		ports[d.index] = p
	}
	t.ports = ports
}

// read reads the pods in the namespaces named and those never read, or all. It
// reports whether there were any.
func (t *podTable) read(nsids map[int]bool, all bool) (any bool) {
	for _, p := range t.ports {
		if !all && !p.stale && !nsids[p.nsid] {
			continue
		}
		any = true
		p.stale = false
		p.addrs, p.podMAC = nil, nil
		if p.nsid < 0 {
			continue // A virtual machine's tap: only neighbours know.
		}
		mac, err := t.peerMAC(p.nsid, p.peer)
		if err != nil {
			continue // Gone, or not allowed: see neighbours.
		}
		addrs, err := t.peerAddrs(p.nsid, p.peer)
		if err != nil {
			continue
		}
		p.podMAC, p.addrs = mac, addrs
	}
	return any
}

// peerMAC asks for the link-layer address of an interface of another namespace.
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

// peerAddrs asks for the global addresses of an interface of another namespace.
func (t *podTable) peerAddrs(nsid, ifindex int) ([]netip.Addr, error) {
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
	var addrs []netip.Addr
	for _, m := range msgs {
		if a, ok := parseAddr(m, nsid, ifindex); ok {
			addrs = append(addrs, a)
		}
	}
	return addrs, nil
}

// parseAddr gives the address of an RTM_NEWADDR if it is the one asked for and
// usable.
func parseAddr(m []byte, nsid, ifindex int) (netip.Addr, bool) {
	if len(m) < unix.SizeofIfAddrmsg {
		return netip.Addr{}, false
	}
	msg := nl.DeserializeIfAddrmsg(m)
	attrs, err := routeAttrs(m[unix.SizeofIfAddrmsg:])
	if err != nil || int(msg.Index) != ifindex {
		return netip.Addr{}, false
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
		return netip.Addr{}, false
	}
	return globalAddr(&addr)
}

// routeAttrs is nl.ParseRouteAttr for messages whose last attribute lacks its padding,
// on which that panics.
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

// changes compares what is known with what was told.
func (t *podTable) changes() PodChanges {
	now := make(map[netip.Addr]Pod, len(t.told))
	// Two interfaces can claim an address while a pod is replaced: the newer
	// one has it.
	for _, i := range slices.Sorted(maps.Keys(t.ports)) {
		p := t.ports[i]
		for _, a := range p.addrs {
			now[a] = Pod{Ifindex: p.ifindex, PodMAC: p.podMAC, HostMAC: p.hostMAC}
		}
	}
	for a, pod := range t.neighbours() {
		if _, known := now[a]; !known {
			now[a] = pod
		}
	}
	c := PodChanges{Full: t.first, Upserts: make(map[netip.Addr]Pod)}
	for a, pod := range now {
		if old, ok := t.told[a]; !ok || !old.equal(pod) {
			c.Upserts[a] = pod
		}
	}
	for a := range t.told {
		if _, ok := now[a]; !ok {
			c.Deletes = append(c.Deletes, a)
		}
	}
	slices.SortFunc(c.Deletes, netip.Addr.Compare)
	t.told, t.first = now, false
	return c
}
