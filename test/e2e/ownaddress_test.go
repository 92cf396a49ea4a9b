package e2e

import (
	"fmt"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestANodeReachesALoadBalancerAddressThatItHas asks from nodes that have the address of a load
// balancer, as keepalived or kube-vip gives it to one. The kernel then takes that address as the
// source. kube-proxy allows it if loadBalancerSourceRanges have the node's own address. eBPF
// translates before the kernel chooses a source.
func TestANodeReachesALoadBalancerAddressThatItHas(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{
		Spec: topology.DefaultSpec("e2e-own"), Modes: map[string]string{"a": "nftables", "b": "iptables"},
	})}
	load := func(allow ...string) *suite.File {
		s := e.Load(t, flows.Service{
			Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a", "b"}, AllowFrom: allow, Endpoints: flows.On("a0"),
		})
		for _, node := range e.Nodes() {
			for _, combo := range flows.TCP {
				addr := netip.MustParseAddrPort(s.MustAddress(t, flows.LoadBalancer(node), combo)).Addr()
				e.Output(t, node, "ip", "address", "add", netip.PrefixFrom(addr, addr.BitLen()).String(), "dev", "lo")
			}
		}
		return s
	}
	refusing, allowing := load("client0"), load("client0", "a", "b")
	for _, node := range e.Nodes() {
		p := e.MustProbe(t, node)
		for _, combo := range flows.AllCombos {
			await.NoError(t, func() error { // until the agent knows the address
				if got := askOnce(t, p, allowing.MustAddress(t, flows.LoadBalancer(node), combo), combo, false); got[0].Server != "a0" {
					return fmt.Errorf("%s of node %s: answer %+v, want server a0", combo, node, got[0])
				}
				return nil
			})
			if got := askOnce(t, p, refusing.MustAddress(t, flows.LoadBalancer(node), combo), combo, false); got[0].Server != "" {
				t.Errorf("%s of node %s, which is in no range: answer %+v", combo, node, got[0])
			}
		}
	}
}
