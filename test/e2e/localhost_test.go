package e2e

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// neighborToLoopback sends packets to 127.0.0.1 from a client to a node, as the attacker of
// CVE-2020-8558 does. $1 is the node's address.
const neighborToLoopback = `set -e
for f in /proc/sys/net/ipv4/conf/*/route_localnet; do echo 1 > "$f"; done
ip address flush dev lo
ip route add 127.0.0.1 via "$1"`

// spy counts packets to 127.0.0.0/8 that arrive at a node by a device other than lo. Netfilter
// sees them before the routing drops them.
const spy = `table ip spy {
	counter seen {}
	chain prerouting {
		type filter hook prerouting priority raw;
		iif != lo ip daddr 127.0.0.0/8 counter name seen
	}
}`

// TestLocalhostNodePorts asks a NodePort on loopback from the node and from a neighbor. Only the
// node's own process has it, and the agent does not set route_localnet.
func TestLocalhostNodePorts(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{
		Spec: topology.DefaultSpec("e2e-localhost"), Flags: map[string][]string{"": {"--localhost-nodeports"}},
	})}
	s := e.Load(t, nodePort("b0"))
	loopback := flows.NodePort("a").On("loopback")
	for _, combo := range flows.AllCombos {
		for _, got := range ask(t, e.MustProbe(t, "a"), s.MustAddress(t, loopback, combo), combo, 2) {
			if got.Server != "b0" {
				t.Errorf("%s from the node: answer %+v, want server b0", combo, got)
			}
		}
	}
	if sysctls := e.Output(t, "a", "sh", "-c", "cat /proc/sys/net/ipv4/conf/*/route_localnet"); strings.Trim(sysctls, "0\n") != "" {
		t.Errorf("route_localnet of node a: %q, want 0 everywhere", sysctls)
	}

	e.Output(t, "a", "nft", spy)
	e.Output(t, "client0", "sh", "-c", neighborToLoopback, "sh", e.Addr("a", false).String())
	for _, combo := range []flows.Combo{flows.TCP4, flows.UDP4} {
		dst := s.MustAddress(t, loopback, combo)
		for _, got := range askOnce(t, e.MustProbe(t, "client0"), dst, combo, false) {
			if got.Err != probe.Timeout {
				t.Errorf("%s from a neighbor: answer %+v, want none", combo, got)
			}
		}
		if !netip.MustParseAddrPort(dst).Addr().IsLoopback() {
			t.Fatalf("asked %s, want a loopback address", dst)
		}
	}
	if seen := e.Output(t, "a", "nft", "list", "counter", "ip", "spy", "seen"); strings.Contains(seen, "packets 0 ") {
		t.Errorf("the neighbor's packets did not reach the node: %s", seen)
	}
}
