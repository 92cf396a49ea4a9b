package snat

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
)

func TestEachCostHasARow(t *testing.T) {
	for _, quick := range []bool{false, true} {
		seen := map[string]bool{}
		for _, row := range costRows(experiment.Options{Name: "x", Quick: quick}) {
			if seen[row.Name] {
				t.Errorf("quick %t: two rows are called %q", quick, row.Name)
			}
			seen[row.Name] = true
		}
		open := map[bool]string{false: "new connections, 100000 open: Spillway, eBPF", true: "new connections, 2000 open: Spillway, eBPF"}[quick]
		if !seen["new connections: Spillway, eBPF to MASQUERADE"] || !seen["new connections, conntrack full: Spillway, eBPF"] || !seen[open] {
			t.Errorf("quick %t: rows %v", quick, seen)
		}
	}
}

// A round without an answer on the base's side has no ratio; one without on the other has ratio 0.
func TestFiguresOfACost(t *testing.T) {
	sample := func(rate, cpu float64, entries int) harness.Sample {
		result := load.Result{Rate: rate, Requests: 90, Errors: map[string]int64{"timeout": 10}}
		return harness.Sample{Result: result, CPUPerRequest: cpu, Conntrack: entries}
	}
	trial := experiment.Trial[harness.Sample]{
		A: []harness.Sample{sample(100, 20, 0), sample(0, 0, 0), sample(100, 20, 0)},
		B: []harness.Sample{sample(150, 10, 1), sample(150, 10, 2), sample(0, 0, 3)},
	}
	var m experiment.Measurement
	cost{}.add(trial, &m)
	want := map[string][]float64{"ratio": {1.5, 0}, "cpu": {0.5}, "rate": {150, 150, 0}, "base": {100, 0, 100}, "entries": {1, 2, 3},
		"failed": {10, 10, 10}}
	if diff := cmp.Diff(want, m.Samples); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}
