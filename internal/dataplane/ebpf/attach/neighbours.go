package attach

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// neighbour is an address that a neighbor table has behind a pod-side interface.
type neighbour struct {
	addr    netip.Addr
	ifindex int
	mac     net.HardwareAddr
}

// neighbours finds pods whose own side tells no address: virtual machines,
// sandboxes with a network stack of their own (gVisor takes the address off
// the interface), and all pods where the kernel does not let us look. The
// neighbour table of the interface or of its bridge gives address and MAC, the
// bridge's forwarding table the port. A pod is seen once it has talked.
func (t *podTable) neighbours() []neighbour {
	res := []neighbour{}
	bridges := make(map[int]bool)
	for _, p := range t.ports {
		if len(p.addrs) > 0 {
			continue
		}
		if p.master != 0 {
			bridges[p.master] = true
			continue
		}
		for a, n := range t.neighbourTable(p.ifindex) {
			res = append(res, neighbour{a, p.ifindex, n.HardwareAddr})
		}
	}
	for bridge := range bridges {
		portOf := t.forwarding(bridge)
		for a, n := range t.neighbourTable(bridge) {
			p := t.ports[portOf[n.HardwareAddr.String()]]
			if p != nil && len(p.addrs) == 0 {
				res = append(res, neighbour{a, p.ifindex, n.HardwareAddr})
			}
		}
	}
	return res
}

// neighbourWatch names the interfaces whose neighbours decide about pods.
func (t *podTable) neighbourWatch() map[int]bool {
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

func (t *podTable) neighbourTable(ifindex int) map[netip.Addr]netlink.Neigh {
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

// forwarding tells behind which port of the bridge a MAC was seen.
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
