package attach

import (
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Uplink is an external device with the source addresses of packets that leave through
// it, chosen as netfilter's MASQUERADE does: the first primary global address of each
// family, or the node's own primary address if the interface has none. An address that
// the node does not have is invalid.
type Uplink struct {
	Name   string
	V4, V6 netip.Addr
	L3     bool
	MTU    int
}

// routes has the interfaces' properties from the main routing tables.
type routes struct {
	wide      map[int]bool // interfaces with a route through a gateway or to a prefix
	defaultV4 int          // interface of the best default route, or 0
	defaultV6 int
}

// listRoutes adds the MTUs of routes that have one to mtus.
func listRoutes(h *netlink.Handle, mtus *mtuRoutes) (routes, error) {
	res := routes{wide: make(map[int]bool)}
	best := map[int]int{netlink.FAMILY_V4: -1, netlink.FAMILY_V6: -1}
	err := eachRoute(h, func(family int, r *netlink.Route) {
		res.add(family, r, best)
		if r.MTU > 0 {
			mtus.add(family, r)
		}
	})
	return res, err
}

func (rs *routes) add(family int, r *netlink.Route, best map[int]int) {
	if r.Type != unix.RTN_UNICAST {
		return
	}
	ones, bits := 0, 0
	if r.Dst != nil {
		if r.Dst.IP.IsLinkLocalUnicast() || r.Dst.IP.IsMulticast() {
			return
		}
		ones, bits = r.Dst.Mask.Size()
	}
	oifs := make([]int, 0, 1)
	// Routes that an address adds (RTPROT_KERNEL) have no more information than the
	// address.
	if r.LinkIndex > 0 && (ones == 0 || r.Protocol != unix.RTPROT_KERNEL) && (r.Gw != nil || r.Via != nil || r.Dst == nil || ones < bits) {
		oifs = append(oifs, r.LinkIndex)
	}
	for _, hop := range r.MultiPath {
		oifs = append(oifs, hop.LinkIndex)
	}
	for _, oif := range oifs {
		rs.wide[oif] = true
	}
	if ones == 0 && len(oifs) > 0 && (best[family] < 0 || r.Priority < best[family]) {
		best[family] = r.Priority
		if family == netlink.FAMILY_V4 {
			rs.defaultV4 = oifs[0]
		} else {
			rs.defaultV6 = oifs[0]
		}
	}
}

// uplinks returns the external devices with their source addresses.
func uplinks(ifaces []Interface, addrs map[int][]netlink.Addr, rs routes) map[int]Uplink {
	res := make(map[int]Uplink)
	var node Uplink // The first addresses found, in order of preference.
	prefer := func(ifindex int) {
		v4, v6 := sourceAddrs(addrs[ifindex])
		if !node.V4.IsValid() {
			node.V4 = v4
		}
		if !node.V6.IsValid() {
			node.V6 = v6
		}
	}
	if v4, _ := sourceAddrs(addrs[rs.defaultV4]); v4.IsValid() {
		node.V4 = v4
	}
	if _, v6 := sourceAddrs(addrs[rs.defaultV6]); v6.IsValid() {
		node.V6 = v6
	}
	for _, i := range ifaces {
		if i.Role == External {
			prefer(i.Ifindex)
		}
	}
	prefer(loopbackIndex) // The source address of routers with unnumbered links.
	for _, i := range ifaces {
		if i.Role != External {
			continue
		}
		u := Uplink{Name: i.Name, L3: i.L3, MTU: i.MTU}
		u.V4, u.V6 = sourceAddrs(addrs[i.Ifindex])
		if !u.V4.IsValid() {
			u.V4 = node.V4
		}
		if !u.V6.IsValid() {
			u.V6 = node.V6
		}
		res[i.Ifindex] = u
	}
	return res
}

// loopbackIndex is the index of lo in every network namespace.
const loopbackIndex = 1

// sourceAddrs returns the first usable address of each family. It leaves out IPv6
// addresses in duplicate address detection, and prefers permanent and current ones.
func sourceAddrs(addrs []netlink.Addr) (v4, v6 netip.Addr) {
	var deprecated netip.Addr
	for i := range addrs {
		a := &addrs[i]
		ip, ok := globalAddr(a)
		switch {
		case !ok:
		case ip.Is4():
			if !v4.IsValid() { // The kernel lists primary addresses first.
				v4 = ip
			}
		case a.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_TEMPORARY) != 0:
			if !deprecated.IsValid() {
				deprecated = ip
			}
		case !v6.IsValid():
			v6 = ip
		}
	}
	if !v6.IsValid() {
		v6 = deprecated
	}
	return v4, v6
}

// globalAddr returns the address if other hosts can reach it now.
func globalAddr(a *netlink.Addr) (netip.Addr, bool) {
	if a.Scope != unix.RT_SCOPE_UNIVERSE {
		return netip.Addr{}, false
	}
	if a.Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_DADFAILED) != 0 && a.Flags&unix.IFA_F_OPTIMISTIC == 0 {
		return netip.Addr{}, false
	}
	ip, ok := netip.AddrFromSlice(a.IP)
	ip = ip.Unmap()
	return ip, ok && ip.IsGlobalUnicast()
}
