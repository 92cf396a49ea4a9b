package trace

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// routeText describes the route to an address in the calling thread's network namespace.
func routeText(to netip.Addr) (string, error) {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil {
		return "", fmt.Errorf("no route to %s: %w", to, err)
	}
	if len(routes) == 0 {
		return "", fmt.Errorf("no route to %s", to)
	}
	r := routes[0]
	name := fmt.Sprintf("device %d", r.LinkIndex)
	if dev, err := net.InterfaceByIndex(r.LinkIndex); err == nil {
		name = dev.Name
	}
	if name == "lo" {
		return "this node itself", nil
	}
	hop := to
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		hop = gw.Unmap()
	}
	return fmt.Sprintf("%s by %s (neighbor %s)", name, hop, neighborState(r.LinkIndex, hop)), nil
}

// neighborState names the state of a neighbor in the calling thread's network namespace.
func neighborState(ifindex int, a netip.Addr) string {
	list, err := netlink.NeighList(ifindex, 0)
	if err != nil {
		return "unknown"
	}
	for _, n := range list {
		if have, ok := netip.AddrFromSlice(n.IP); ok && have.Unmap() == a {
			return cmp.Or(nudNames[n.State], fmt.Sprintf("state %#x", n.State))
		}
	}
	return "not in the table yet"
}
