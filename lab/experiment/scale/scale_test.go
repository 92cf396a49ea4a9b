package scale

import (
	"context"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/change"
	"spillway.dev/spillway/lab/experiment/rig"
	"spillway.dev/spillway/lab/topology"
	"spillway.dev/spillway/lab/workload"
)

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	m.Run()
}

func TestRows(t *testing.T) {
	for _, s := range sides {
		if !slices.Contains(change.Modes, s.mode) {
			t.Errorf("%s is no mode of lab/experiment/change", s.mode)
		}
	}
	for _, quick := range []bool{true, false} {
		seen := map[string]bool{}
		for _, r := range rows(experiment.Options{Name: "x", Quick: quick}) {
			if seen[r.Name] || r.Takes <= 0 {
				t.Errorf("row %+v", r)
			}
			seen[r.Name] = true
			peer := strings.HasPrefix(r.Name, "kube-proxy") || r.Group == "API to packet"
			if peer != (r.Needs != nil) {
				t.Errorf("%s needs what is built by make peers: %v", r.Name, r.Needs != nil)
			}
			if strings.HasPrefix(r.Name, "kube-proxy") && r.X > peerLimit {
				t.Errorf("%s is larger than an API server is filled", r.Name)
			}
		}
	}
}

func TestConcludeComparesTheSmallestWithTheLargest(t *testing.T) {
	row := func(x, ms float64) experiment.RowResult {
		return experiment.RowResult{Group: "Spillway, eBPF", X: x, Values: map[string]experiment.Summary{"change": experiment.Summarize([]float64{ms})}}
	}
	res := &experiment.Result{Rows: []experiment.RowResult{row(1000, 2), row(100, 1), row(5000, 3)}}
	if got := conclude(res)[0]; !strings.Contains(got, "Spillway, eBPF 1 ms at 100 and 3 ms at 5000 Services") {
		t.Errorf("concludes %q", got)
	}
}

// waitFor must tell pods apart, and say who answered instead.
func TestWaitForSaysWhoAnswered(t *testing.T) {
	if err := rig.CanRun(); err != nil {
		t.Skip(err)
	}
	spec := topology.DefaultSpec("scaletest")
	spec.Nodes, spec.PodsPerNode = 1, 1
	r, err := rig.Up(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Down(); err != nil {
			t.Error(err)
		}
	}()
	// In place of a proxy: a server where the NodePort would be.
	if err := r.Serve(context.Background(), r.Cluster.Node(0), workload.HTTP, probeNodePort); err != nil {
		t.Fatal(err)
	}
	if err := waitFor(context.Background(), r, "node0", 5e9); err != nil {
		t.Error(err)
	}
	if err := waitFor(context.Background(), r, "node0-pod0", 3e8); err == nil || !strings.Contains(err.Error(), "but: node0") {
		t.Errorf("another answered: error %v", err)
	}
}
