package attach

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// neighbor is an entry of a neighbor table for an address behind a pod-side device.
type neighbor struct {
	addr    netip.Addr
	ifindex int
	mac     net.HardwareAddr
}

// neighbors finds pods whose own side shows no address: virtual machines, sandboxes
// with their own network stack (gVisor removes the address from the interface), and all
// pods if the kernel denies access to their namespaces. The neighbor table of the
// interface or of its bridge has the address and the MAC. The bridge's forwarding table
// has the port. A pod appears after it has sent a packet.
func (t *podTable) neighbors() []neighbor {
	res := []neighbor{}
	bridges := make(map[int]bool)
	for _, p := range t.ports {
		if len(p.addrs) > 0 {
			continue
		}
		if p.master != 0 {
			bridges[p.master] = true
			continue
		}
		for a, n := range t.neighborTable(p.ifindex) {
			res = append(res, neighbor{a, p.ifindex, n.HardwareAddr})
		}
	}
	for bridge := range bridges {
		portOf := t.forwarding(bridge)
		for a, n := range t.neighborTable(bridge) {
			p := t.ports[portOf[n.HardwareAddr.String()]]
			if p != nil && len(p.addrs) == 0 {
				res = append(res, neighbor{a, p.ifindex, n.HardwareAddr})
			}
		}
	}
	return res
}

// neighborWatch returns the interfaces whose neighbors decide about pods.
func (t *podTable) neighborWatch() map[int]bool {
	res := make(map[int]bool)
	for _, p := range t.ports {
		if len(p.addrs) > 0 {
			continue
		}
		res[p.ifindex] = true
		if p.master != 0 {
			res[p.master] = true
		}
	}
	return res
}

func (t *podTable) neighborTable(ifindex int) map[netip.Addr]netlink.Neigh {
	res := make(map[netip.Addr]netlink.Neigh)
	list, err := dump(func() ([]netlink.Neigh, error) { return t.h.NeighList(ifindex, netlink.FAMILY_ALL) })
	if err != nil {
		return nil
	}
	const known = unix.NUD_REACHABLE | unix.NUD_STALE | unix.NUD_DELAY | unix.NUD_PROBE | unix.NUD_PERMANENT
	for _, n := range list {
		a, ok := netip.AddrFromSlice(n.IP)
		a = a.Unmap()
		if ok && n.State&known != 0 && len(n.HardwareAddr) == 6 && a.IsGlobalUnicast() {
			res[a] = n
		}
	}
	return res
}

// forwarding returns the port of the bridge behind each MAC.
func (t *podTable) forwarding(bridge int) map[string]int {
	res := make(map[string]int)
	list, err := dump(func() ([]netlink.Neigh, error) { return t.h.NeighList(0, unix.AF_BRIDGE) })
	if err != nil {
		return nil
	}
	for _, n := range list {
		if n.MasterIndex == bridge && n.State&unix.NUD_PERMANENT == 0 {
			res[n.HardwareAddr.String()] = n.LinkIndex
		}
	}
	return res
}
