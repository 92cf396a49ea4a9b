package reconcile

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// TestMetricsAndProblemsSayWhatIsNotKnown goes from an earlier agent's table that is left
// as it is, over one that another program deletes, to a repaired file.
func TestMetricsAndProblemsSayWhatIsNotKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		unread, mended := model.Unread{Reason: model.UnreadFile, Text: "m.yaml"}, model.Unread{}
		table := &fakeTable{targets: 3}
		g := start(t, func(c *Config) { c.Policies = table }, newFakeBackend("ebpf"))
		look := func(when string, held, known float64, targets int, problem string) {
			t.Helper()
			if got := g.metric("spillway_do_not_track_held"); got != held {
				t.Errorf("%s: held %v, want %v", when, got, held)
			}
			if got := g.metric("spillway_do_not_track_policies"); got != known {
				t.Errorf("%s: %v policies, want %v", when, got, known)
			}
			if got := g.series("spillway_do_not_track_targets"); len(got) == 0 != (targets < 0) || len(got) > 0 && got[0] != float64(targets) {
				t.Errorf("%s: targets %v, want %d", when, got, targets)
			}
			var all []string
			for _, p := range g.Status().Problems {
				all = append(all, p.String())
			}
			if got := strings.Join(all, "; "); (problem == "") != (got == "") || !strings.Contains(got, problem) {
				t.Errorf("%s: problems %q, want %q", when, got, problem)
			}
		}
		d := policyDelta()
		d.Unread = &unread
		g.Deliver(d, nil)
		g.after(time.Second)
		look("an earlier agent's table", 1, 1, -1, "the kernel holds what an earlier agent wrote, and m.yaml cannot be read")
		_ = table.Replace(t.Context(), donottrack.State{}) // another program deletes it
		g.after(time.Minute)
		look("another program deleted it", 0, 1, 1, "m.yaml cannot be read, and the kernel had nothing of an earlier agent: everything else "+
			"is applied; these policies may be incomplete: p")
		g.Deliver(model.Delta{Unread: &mended}, nil)
		g.after(time.Second)
		look("mended", 0, 1, 1, "")
		g.Deliver(model.Delta{Unread: &unread}, nil)
		g.after(time.Second)
		look("another file, while this agent knows what was", 0, 1, 1, "")
	})
}

// TestOnlyPoliciesThatCannotBeReadLackNothingElse: what a policy says does not decide
// what another selects, whereas a file may say anything, whatever its name.
func TestOnlyPoliciesThatCannotBeReadLackNothingElse(t *testing.T) {
	for _, row := range []struct {
		unread model.Unread
		lacks  bool
	}{
		{model.Unread{Reason: model.UnreadPolicy, Text: "DoNotTrackPolicy cache"}, false},
		{model.Unread{Reason: model.UnreadPolicies, Text: "DoNotTrackPolicies, which RBAC forbids,"}, false},
		{model.Unread{Reason: model.UnreadFile, Text: "DoNotTrackPolicies.yaml"}, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			g := start(t, func(c *Config) {
				c.Policies = &fakeTable{}
			}, newFakeBackend("ebpf"))
			d := policyDelta()
			d.Unread = &row.unread
			g.Deliver(d, nil)
			g.after(time.Second)
			if ps := g.policies.problem(); len(ps) > 0 != row.lacks {
				t.Errorf("%s: problems %v", row.unread.Text, ps)
			}
		})
	}
}

// series are the values of a gauge, whatever its labels.
func (g *harness) series(name string) (values []float64) {
	g.t.Helper()
	families, err := g.metrics.Gatherer().Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				values = append(values, m.GetGauge().GetValue())
			}
		}
	}
	return values
}
