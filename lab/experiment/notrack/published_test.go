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
