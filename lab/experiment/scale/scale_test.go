package scale

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/change"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
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
				t.Errorf("%s needs kube-proxy: %v", r.Name, r.Needs != nil)
			}
			if strings.HasPrefix(r.Name, "kube-proxy") && r.X > peerLimit {
				t.Errorf("%s is larger than the limit", r.Name)
			}
		}
	}
}

func TestConcludeComparesTheSmallestWithTheLargest(t *testing.T) {
	row := func(x, ms float64) experiment.RowResult {
		return experiment.RowResult{Group: "Spillway, eBPF", X: x,
			Values: map[string]experiment.Summary{"change": experiment.Summarize([]float64{ms})}}
	}
	res := &experiment.Result{Rows: []experiment.RowResult{row(1000, 2), row(100, 1), row(5000, 3)}}
	if got := conclude(res)[0]; !strings.Contains(got, "Spillway, eBPF 1 ms at 100 and 3 ms at 5000 Services") {
		t.Errorf("concludes %q", got)
	}
}

// An agent must accept the probe without a problem.
func TestProbeIsWhatAnAgentReads(t *testing.T) {
	_, delta := fixture.Manifests(t, "scaletest", func(r *harness.Harness) (string, error) {
		service, slice := probeService(), probeSlice(r.Cluster.Pod(0, 0))
		service.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
		slice.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
		text, err := r.Cluster.NodesYAML()
		for _, o := range []any{service, slice} {
			one, e := yaml.Marshal(o)
			err = errors.Join(err, e)
			text = append(append(text, "---\n"...), one...)
		}
		if err != nil {
			return "", err
		}
		_, err = r.WriteFile("manifests/probe.yaml", text)
		return r.Path("manifests"), err
	})
	if len(delta.Services) != 1 || len(delta.Slices) != 1 {
		t.Errorf("%d Services, %d EndpointSlices", len(delta.Services), len(delta.Slices))
	}
}

// waitFor must distinguish pods, and name the one that answered instead.
func TestWaitForSaysWhoAnswered(t *testing.T) {
	if err := harness.CanRun(); err != nil {
		t.Skip(err)
	}
	spec := topology.DefaultSpec("scaletest")
	spec.Nodes, spec.PodsPerNode = 1, 1
	r, err := harness.Up(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Down(); err != nil {
			t.Error(err)
		}
	}()
	// Instead of a proxy: a server at the NodePort.
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
