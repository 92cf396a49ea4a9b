package path

import (
	"context"
	"strings"
	"testing"

	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// The agent must accept the manifests, and the kernel the rules.
func TestDesigns(t *testing.T) {
	cluster, delta := fixture.Manifests(t, "designs", func(r *harness.Harness) (string, error) {
		text, err := designManifests(r.Cluster)
		if err != nil {
			return "", err
		}
		_, err = r.WriteFile("manifests/bench.yaml", text)
		return r.Path("manifests"), err
	})
	if len(delta.Services) != 2 || len(delta.Slices) != 2 {
		t.Errorf("found %d Services, %d slices; want 2 each", len(delta.Services), len(delta.Slices))
	}
	all := designPlans(cluster)
	checkPlans(t, all)
	names := map[string]bool{}
	for _, p := range all {
		name := p.name + ", " + loadName(p)
		if names[name] {
			t.Errorf("two comparisons %q", name)
		}
		names[name] = true
		checkRules(t, cluster.Node(0), p.rules)
	}
}

func checkRules(t *testing.T, node *topology.Host, rules string) {
	t.Helper()
	if rules == "" {
		return
	}
	cmd := node.Command(context.Background(), "nft", "--check", "-f", "-")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s%s", err, out, rules)
	}
}
