package flows_test

import (
	"testing"

	"spillway.dev/spillway/lab/topology"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
)

// TestMain runs 32 flows at once: most of them wait, for an answer or for silence.
func TestMain(m *testing.M) { harness.Main(m, 32) }

// start makes a cluster for cases.
func start(t *testing.T, cfg cluster.Config) *suite.Suite {
	t.Helper()
	return suite.New(harness.Start(t, cfg).Cluster)
}

// spec is the cluster that the package comment describes.
func spec(name, network string) topology.Spec {
	s := topology.DefaultSpec(name)
	s.Nodes, s.PodsPerNode, s.Clients, s.PodNetwork = 3, 4, 2, network
	s.Zones = []string{"east", "west"}
	return s
}

// TestFlows runs every case where nodes reach each other's pods by routes.
func TestFlows(t *testing.T) {
	s := spec("flows", topology.Routed)
	s.Conntrack = true // as on every node where netfilter has rules
	start(t, cluster.Config{Spec: s, Flags: hostPorts}).Run(t, flows.Cases())
}

// hostPorts are the flags of agents that serve host ports.
var hostPorts = map[string][]string{"": {"--host-ports"}}

// TestFlowsVXLAN runs cases where they do so by VXLAN, with flannel's
// masquerade rules.
func TestFlowsVXLAN(t *testing.T) {
	s := spec("flows-vxlan", topology.VXLAN)
	s.Masquerade = true
	start(t, cluster.Config{Spec: s}).Run(t, flows.EverywhereCases())
}

// TestFlowsStrictSources runs cases where the kernel checks that answers would
// leave by the device that the question came from.
func TestFlowsStrictSources(t *testing.T) {
	s := spec("flows-strict", topology.Routed)
	s.RPFilter = 1
	start(t, cluster.Config{Spec: s}).Run(t, flows.EverywhereCases())
}

// TestFlowsFlags runs cases of agents with other flags, a different one on each
// node.
func TestFlowsFlags(t *testing.T) {
	s := spec("flows-flags", topology.Routed)
	lan := s.LAN4.String() + "," + s.LAN6.String()
	start(t, cluster.Config{
		Spec: s,
		Flags: map[string][]string{
			"a": {"--nodeport-addresses=" + lan, "--localhost-nodeports", "--bypass=never"},
			"b": {"--service-proxy-name=spillway", "--allow-external-ips=false"},
			"c": {"--masquerade-all", "--localhost-nodeports"},
		},
	}).Run(t, flows.FlagCases())
}

// TestFlowsFromAPI runs every case with its objects from a real API server, and
// another dataplane on each node: eBPF on a, or what the flags say.
func TestFlowsFromAPI(t *testing.T) {
	start(t, cluster.Config{
		Spec: spec("flows-api", topology.Routed), FromAPI: true, Flags: hostPorts,
		Modes: map[string]string{"b": "nftables", "c": "iptables"},
	}).Run(t, flows.Cases())
}

var _ flows.Plan = (*cluster.Cluster)(nil)
