package notrack

import (
	"strings"
	"testing"

	"spillway.dev/spillway/lab/experiment"
)

func TestRowsOfTheExperiment(t *testing.T) {
	for _, quick := range []bool{true, false} {
		o := experiment.Options{Name: "x", Quick: quick}
		if err := shape(o).Validate(); err != nil {
			t.Error(err)
		}
		seen := map[string]bool{}
		for _, r := range rows(o) {
			if seen[r.Name] || r.Takes <= 0 {
				t.Errorf("row %+v", r)
			}
			seen[r.Name] = true
		}
	}
}

func TestWhatIsComparedHasATableOfItsKind(t *testing.T) {
	b := &bench{cfg: shape(experiment.Options{Name: "x"})}
	seen := map[string]bool{}
	for _, p := range b.plans() {
		if seen[p.name+p.figure] {
			t.Errorf("%s, %s is measured twice", p.name, p.figure)
		}
		seen[p.name+p.figure] = true
		for _, s := range []side{p.a, p.b} {
			if s.full && s.lived || s.full != strings.Contains(p.name, "table full") && s.policy != "" {
				t.Errorf("%s, %s: the table is %+v", p.name, p.figure, s)
			}
			// The entries of a side expire after giveUp: they must fit.
			if s.lived && (p.rate == 0 || p.rate*giveUp > room) {
				t.Errorf("%s, %s: %v connections/s do not fit into %d entries", p.name, p.figure, p.rate, room)
			}
		}
	}
}

func TestConcludeDividesByThePolicyThatTracks(t *testing.T) {
	row := func(name, key string, v float64) experiment.RowResult {
		return experiment.RowResult{Name: name, Values: map[string]experiment.Summary{key: experiment.Summarize([]float64{v})}}
	}
	res := &experiment.Result{Rows: []experiment.RowResult{row("policy that tracks", "cpu", 200), row("do-not-track policy", "cpu", 150),
		row(subjects[4].name, "max", 1000), row("do-not-track policy, table full", "max", 21000)}}
	got := strings.Join(conclude(res), " ")
	if !strings.Contains(got, "tracks: 0.75 (published: 0.80)") || !strings.Contains(got, "tracks: 21 (published: 13.7)") {
		t.Errorf("concludes %q", got)
	}
}
