package tftp

import (
	"strings"
	"testing"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
)

// The maximum rate of a table, entries ÷ timeout, must stay the published one.
func TestScalingKeepsTheRate(t *testing.T) {
	for _, isQuick := range []bool{true, false} {
		divisor, each := shape(experiment.Options{Quick: isQuick})
		for _, k := range []kernel{then, larger, twice, onNode, onBoth} {
			published := float64(k.max) / float64(k.timeout)
			scaled := float64(k.max/divisor) / float64(seconds(k.timeout, divisor))
			// The kernel accepts whole seconds only.
			if r := scaled / published; r < 0.6 || r > 1.6 {
				t.Errorf("divided by %d, %+v allows %.0f/s instead of %.0f/s", divisor, k, scaled, published)
			}
			if seconds(k.stream, divisor) < seconds(k.timeout, divisor) || seconds(k.timeout, divisor) < 1 {
				t.Errorf("divided by %d, %+v has timeouts of %d and %d s", divisor, k, seconds(k.timeout, divisor), seconds(k.stream, divisor))
			}
		}
		if fill := seconds(then.timeout, divisor); each.Seconds() < 2*float64(fill) {
			t.Errorf("a row lasts %v, too short for a timeout of %d s to matter", each, fill)
		}
	}
}

func TestRowsHaveNamesOfTheirOwn(t *testing.T) {
	seen := map[string]bool{}
	for _, r := range rows(experiment.Options{Name: "x"}, nil) {
		if seen[r.Name] || r.Takes <= 0 {
			t.Errorf("row %+v", r)
		}
		seen[r.Name] = true
		if peer := strings.HasPrefix(r.Name, "kube-proxy"); peer != (r.Needs != nil) {
			t.Errorf("%s needs kube-proxy: %v", r.Name, r.Needs != nil)
		}
	}
	if len(rows(experiment.Options{Quick: true}, nil)) != len(quick) || len(seen) != len(steps) {
		t.Errorf("%d rows, %d in quick form", len(seen), len(quick))
	}
}

func TestMetalLeavesTheMachineAlone(t *testing.T) {
	guard, err := setKernel(nil, nil, steps[0], 16)
	if guard != nil || err != nil {
		t.Errorf("guard %v, error %v", guard, err)
	}
	if err := guard.End(); err != nil {
		t.Errorf("the end of no guard: %v", err)
	}
}

// An agent must accept the Service without a problem.
func TestServiceIsWhatAnAgentReads(t *testing.T) {
	_, delta := fixture.Manifests(t, "tftptest", func(r *harness.Harness) (string, error) {
		service, slice := objects(r, 1)
		return writeManifests(r, service, slice)
	})
	if len(delta.Services) != 1 || len(delta.Slices) != 1 {
		t.Errorf("%d Services, %d EndpointSlices", len(delta.Services), len(delta.Slices))
	}
}

func TestConcludeNamesShares(t *testing.T) {
	row := func(name string, rate, published float64) experiment.RowResult {
		return experiment.RowResult{Name: name, Status: experiment.OK, Published: map[string]float64{"rate": published},
			Values: map[string]experiment.Summary{"rate": experiment.Summarize([]float64{rate})}}
	}
	res := &experiment.Result{Rows: []experiment.RowResult{row("metal", 4000, 8500), row("kube-proxy", 1000, 1000)}}
	got := conclude(res)
	if !strings.Contains(got[0], "kube-proxy 0.25 (published: 0.12)") || strings.Contains(strings.Join(got, " "), "disturbed") {
		t.Errorf("concludes %q", got)
	}
	res.Rows[1] = row("kube-proxy", 8000, 1000)
	if got := conclude(res); !strings.Contains(got[1], "disturbed") {
		t.Errorf("of twice as much as metal it concludes %q", got)
	}
}
