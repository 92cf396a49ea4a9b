package flows_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestMain runs 32 flows at once: most of them wait, for an answer or for silence.
func TestMain(m *testing.M) { harness.Main(m, 32) }

// start makes a cluster for cases. The kept UDP sockets of a case are idle while its next step is
// written, on a busy machine for longer than conntrack's default of 30 s. With DSR a longer time would be
// wrong: an endpoint's node then knows each client's port for longer, and a later case may get the port
// again (dsr.md).
func start(t *testing.T, cfg cluster.Config) *suite.Suite {
	t.Helper()
	cfg.IdleUDP = 2 * time.Minute
	if !testing.Short() { // only all suites at once are so slow: a later socket of a node may have an entry's port
		cfg.ConntrackIdleUDP = cfg.IdleUDP
	}
	cfg.FollowDrops = true
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
			"c": {"--masquerade-all", "--localhost-nodeports", "--host-ports"},
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

// runDirect runs cases on a cluster whose nodes let endpoints on other nodes answer clients
// directly. The tables of maglev are short: the eBPF map has no room for so many of the default
// length.
func runDirect(t *testing.T, spec topology.Spec, cases []flows.Case) {
	t.Helper()
	suite.New(startDirect(t, spec).Cluster).Run(t, cases)
}

func startDirect(t *testing.T, spec topology.Spec) *harness.Harness {
	t.Helper()
	if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
		t.Skip("the other dataplanes forward with their node's address")
	}
	secret := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(secret, []byte("a secret of the cluster\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{
		"": {"--host-ports", "--forwarding", "dsr", "--dsr-key-file", secret, "--maglev-table-size", "251"},
	}})
}

// dsrCases are all cases, with DSR where a Service can have them.
func dsrCases() []flows.Case {
	return append(flows.DSRCases(), flows.DSR(flows.Cases())...)
}

// TestFlowsDSR runs every case with DSR.
func TestFlowsDSR(t *testing.T) {
	s := spec("flows-direct", topology.Routed)
	s.Conntrack = true
	runDirect(t, s, dsrCases())
}

// TestFlowsDSRVXLAN does so where nodes reach each other's pods by VXLAN.
func TestFlowsDSRVXLAN(t *testing.T) {
	s := spec("flows-direct-vxlan", topology.VXLAN)
	s.Masquerade = true
	runDirect(t, s, dsrCases())
}

// elsewhereCases are the cases for another network than those of TestFlowsDSR and
// TestFlowsDSRVXLAN: with -short only those that depend on it.
func elsewhereCases() []flows.Case {
	if testing.Short() {
		return append(flows.DSRCases(), flows.DSR(flows.EverywhereCases())...)
	}
	return dsrCases()
}

// TestFlowsDSRStrictSources does so with the reverse path filter of TestFlowsStrictSources.
func TestFlowsDSRStrictSources(t *testing.T) {
	s := spec("flows-direct-strict", topology.Routed)
	s.RPFilter = 1
	runDirect(t, s, elsewhereCases())
}

// TestFlowsDSRDatagrams does so where the network drops IP options.
func TestFlowsDSRDatagrams(t *testing.T) {
	s := spec("flows-direct-gue", topology.Routed)
	s.Conntrack = true
	h := startDirect(t, s)
	h.OnLAN(t, `table bridge options {
	chain forward {
		type filter hook forward priority 0;
		ether type ip ip hdrlength > 5 drop
		ether type ip6 ip6 nexthdr 60 drop
	}
}`, "nft", "-f", "-")
	everywhere := []string{"a", "b", "c"}
	for _, node := range everywhere[:3] {
		for pod := range s.PodsPerNode {
			everywhere = append(everywhere, fmt.Sprint(node, pod))
		}
	}
	h.Load(t, flows.Service{Endpoints: flows.On(everywhere...), Annotations: map[string]string{intent.BalanceAnnotation: "maglev"}})
	for _, node := range everywhere[:3] {
		awaitDatagrams(t, h, node, 2*(len(everywhere)-1-s.PodsPerNode))
	}
	suite.New(h.Cluster).Run(t, elsewhereCases())
}

// awaitDatagrams waits until a node has found out that it must send so many endpoints datagrams.
func awaitDatagrams(t *testing.T, h *harness.Harness, node string, endpoints int) {
	t.Helper()
	want := fmt.Sprintf(`spillway_ebpf_dsr_endpoints{encapsulation="gue"} %d`, endpoints)
	await.NoError(t, func() error {
		page, err := h.Agent(node).Metrics(t.Context())
		if err == nil && !strings.Contains(page, want) {
			err = fmt.Errorf("node %s has no %s", node, want)
		}
		return err
	})
}

// TestFlowsDSRUnused runs every case while no Service has what DSR replies need; with -short
// those that also run on other networks.
func TestFlowsDSRUnused(t *testing.T) {
	s := spec("flows-direct-unused", topology.Routed)
	s.Conntrack = true
	cases := flows.Cases()
	if testing.Short() {
		cases = flows.EverywhereCases()
	}
	runDirect(t, s, cases)
}

var _ flows.Plan = (*cluster.Cluster)(nil)
