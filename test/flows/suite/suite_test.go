package suite

import (
	"os"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

func TestMain(m *testing.M) {
	probe.Main()
	os.Exit(m.Run())
}

// TestHarnessWithoutProxy asks pods by their own addresses on a cluster without
// agents: what comes of it is known, so every verdict here is about the harness.
func TestHarnessWithoutProxy(t *testing.T) {
	spec := topology.DefaultSpec("flows-harness")
	c, err := cluster.Up(t.Context(), cluster.Config{Spec: spec, Mode: "ebpf"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Down(); err != nil {
			t.Error(err)
		}
	})
	s := New(c)
	rules := map[string][]string{"b": {
		"ip daddr ${b1} meta l4proto { tcp, udp } th dport 8081 drop",
		"ip6 daddr ${b1.6} meta l4proto { tcp, udp } th dport 8081 drop",
	}}
	r := s.start(flows.Case{Name: "direct", Rules: rules})
	r.addRules(t)
	b0, b0admin := flows.Address("b0", 8080), flows.Address("b0", 8081)
	for _, test := range []struct {
		flow  flows.Flow
		wrong string
	}{
		{flows.Flow{From: "a0", To: b0, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a0", To: b0admin, Want: flows.OneOf(flows.Kept, "b0:8081")}, ""},
		{flows.Flow{From: "a0/vm", To: b0, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a0", To: b0, Unconnected: true, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a0", To: b0, Mapped: true, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a0", To: b0, Keep: "s", Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a0", To: b0, LocalPort: 5353, Tries: 4, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a", To: b0, Want: flows.OneOf(flows.Kept, "b0")}, ""},
		{flows.Flow{From: "a/host", To: flows.Address("b", 8080), Want: flows.OneOf(flows.Kept, "b")}, ""},
		{flows.Flow{From: "client0", To: flows.Address("a", 8080), Want: flows.OneOf(flows.Kept, "a")}, ""},
		{flows.Flow{From: "a0", To: flows.Address("b0", 80), Want: flows.Reject}, ""},
		{flows.Flow{From: "a0", To: flows.Address("b1", 8081), Want: flows.Drop}, ""},
		{flows.Flow{From: "client0", To: b0, Want: flows.Unserved}, ""}, // clients have no route to pods
		// Wrong expectations must be found.
		{flows.Flow{From: "a0", To: b0, Want: flows.OneOf(flows.Kept, "b1")}, "want [b1]"},
		{flows.Flow{From: "a0", To: b0, Want: flows.Drop}, "want silence"},
		{flows.Flow{From: "a0", To: b0, Want: flows.Reject}, "want refused"},
		{flows.Flow{From: "a0", To: b0, Want: flows.OneOf(flows.NodeSource, "b0")}, "want a node's"},
		{flows.Flow{From: "a0", To: b0, Want: flows.Spread(flows.Kept, "b0", "b1")}, "never answered"},
	} {
		t.Run(title(test.flow), func(t *testing.T) {
			t.Parallel()
			for _, combo := range test.flow.Combos(nil) {
				got := ask(t, r, test.flow, combo)
				if test.wrong == "" && got != "" || !strings.Contains(got, test.wrong) {
					t.Errorf("%s: findings %q, want %q", combo, got, test.wrong)
				}
			}
		})
	}
}

// ask asks one question and returns what is wrong with the answer.
func ask(t *testing.T, r *running, f flows.Flow, combo flows.Combo) string {
	t.Helper()
	p, err := r.s.Cluster.Probe(f.From)
	if err != nil {
		t.Fatal(err)
	}
	q := question{r: r, f: f, combo: combo, probe: p}
	if err := q.resolve(); err != nil {
		t.Fatal(err)
	}
	answers, err := q.ask(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(r.s.judge(q).findings(answers), "\n")
}
