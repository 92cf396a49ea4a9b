package ebpf

import (
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

// routeFrom leads packets with one source to the far pods by eth0 until the test ends.
func (n *packetNode) routeFrom(t *testing.T, p *plan, source netip.Addr) {
	t.Helper()
	const table = 100
	prefix := func(s string) *net.IPNet {
		_, dst, err := net.ParseCIDR(s)
		must.Do(t, err)
		return dst
	}
	rule := netlink.NewRule()
	rule.Src, rule.Table, rule.Priority = prefix(netip.PrefixFrom(source, source.BitLen()).String()), table, 100
	rule.Family = net4or6(p, unix.AF_INET, unix.AF_INET6)
	route := &netlink.Route{Dst: prefix(p.farNet), LinkIndex: n.ifindex["eth0"], Gw: p.gateway.AsSlice(), Table: table,
		Flags: int(netlink.FLAG_ONLINK)}
	n.onThread(t, func() error { return netlink.RouteAdd(route) })
	t.Cleanup(func() { n.onThread(t, func() error { return netlink.RouteDel(route) }) })
	n.onThread(t, func() error { return netlink.RuleAdd(rule) })
	t.Cleanup(func() { n.onThread(t, func() error { return netlink.RuleDel(rule) }) })
}

// TestPacketRouteBySource: a rule may route by the source. With SNAT that is the node's address, which the
// route of the client's packet decides, from the first packet on.
func TestPacketRouteBySource(t *testing.T) {
	n := newPacketNode(t)
	eachTransport(t, n, func(t *testing.T, p *plan, proto uint8) {
		n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
		n.routeFrom(t, p, p.tun0)
		f := frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.eth0, 30080), flags: first(proto)}
		for _, packet := range []string{"first", "second"} {
			r := n.send(t, inEth0, f)
			if r.code != actRedirect || r.verdicts[objects.TCVerdictTRANSLATED_DIRECT] != 1 || r.v.src.Addr() != p.tun0 {
				t.Fatalf("the %s packet: code %d, verdicts %s", packet, r.code, verdictList(r.verdicts))
			}
			if w := n.lastNextHop(t); w.ifindex != n.ifindex["eth0"] || w.gateway != p.gateway {
				t.Errorf("the %s packet goes by %+v, want eth0 over %s", packet, w, p.gateway)
			}
		}
	})
}
