package path

import (
	"regexp"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// The agents must accept the benchmark's manifests without a problem.
func TestManifestsAreWhatAnAgentReads(t *testing.T) {
	cluster, delta := fixture.Manifests(t, "pathtest", func(r *harness.Harness) (string, error) { return writeManifests(r, false, false) })
	if len(delta.Nodes) != 2 || len(delta.Services) != 2 || len(delta.Slices) != 2 {
		t.Errorf("found %d Nodes, %d Services, %d slices; want 2 each", len(delta.Nodes), len(delta.Services), len(delta.Slices))
	}
	there := delta.Slices[model.Name{Namespace: "bench", Name: "web-there-ipv4"}]
	if there == nil || there.Endpoints[0].Node != "node1" || there.Endpoints[0].Addr != cluster.Pod(1, 0).IPv4 {
		t.Errorf("the slice of web-there is %+v", there)
	}
	checkPlans(t, plans(cluster, true))
	checkOnly(t, cluster)
	for _, proxy := range Proxies {
		checkPlans(t, filePlans(cluster, proxy, true))
	}
}

// checkOnly checks that exactly the selected measurements run, and the closed loop that
// gives an open loop its rate.
func checkOnly(t *testing.T, cluster *topology.Cluster) {
	t.Helper()
	for only, want := range map[string][]string{
		"metal, keep-alive, half": {"NodePort, pod on this node ÷ metal, keep-alive",
			"NodePort, pod on this node ÷ metal, keep-alive, half load"},
		"^ClusterIP.*new": {"ClusterIP from a pod ÷ pod address, new connections"},
		"no such":         nil,
	} {
		var got []string
		for _, p := range wanted(plans(cluster, false), regexp.MustCompile(only)) {
			got = append(got, p.name+", "+loadName(p))
		}
		if !slices.Equal(got, want) {
			t.Errorf("only %q leaves %q, want %q", only, got, want)
		}
	}
}

// checkPlans checks that an open loop always has a rate, and that both sides of a pair
// send from the same host.
func checkPlans(t *testing.T, all []plan) {
	t.Helper()
	found := map[load.Kind]bool{}
	for _, p := range all {
		if p.tail && !found[p.kind] {
			t.Errorf("%s, %s: no closed loop before it finds a rate", p.name, loadName(p))
		}
		found[p.kind] = found[p.kind] || p.saturates
		if p.base.from != p.service.from || p.base.to == p.service.to {
			t.Errorf("%s: from %s to %s is compared with from %s to %s", p.name,
				p.base.from.Name, p.base.to, p.service.from.Name, p.service.to)
		}
	}
}
