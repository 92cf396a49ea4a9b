package faults

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/cluster"
	"spillway.dev/spillway/test/cluster/clustertest"
)

// connectivity is what the test needs of the result of 'spillway connectivity test'.
type connectivity struct {
	Checks, Failed int
	Cases          []struct {
		Case, Common, Skipped string
		Checks, Failed        int
	}
}

// spillway runs a command where an operator is.
func (e *env) spillway(t *testing.T, args ...string) (out string, err error) {
	t.Helper()
	program := filepath.Join(clustertest.Image(t), "linux-"+runtime.GOARCH, "spillway")
	cmd := e.Client().Command(t.Context(), slices.Concat([]string{program}, args, []string{"--kubeconfig", cluster.Kubeconfig(e.Name)})...)
	text, err := cmd.Output()
	if exit, ok := err.(*exec.ExitError); ok {
		t.Logf("spillway %s: %s", strings.Join(args, " "), exit.Stderr)
	}
	return string(text), err
}

// testConnectivity returns the table of 'spillway connectivity test', which ends as wanted
// and leaves no namespace.
func (e *env) testConnectivity(t *testing.T, fails bool) connectivity {
	t.Helper()
	var result connectivity
	out, err := e.spillway(t, "connectivity", "test", "-o", "json")
	if fails != (err != nil) {
		t.Errorf("spillway connectivity test: %v: %s", err, out)
	}
	clustertest.Must(t, json.Unmarshal([]byte(out), &result))
	if left := e.kubectl(t, "get", "namespaces", "--output=name"); strings.Contains(left, "spillway-test-") {
		t.Errorf("namespaces after it: %s", left)
	}
	return result
}

// noAgentOnANode removes the agent of the last node. What it wrote stays, so only new Services
// are missing there, and 'spillway connectivity test' must show where.
func noAgentOnANode(t *testing.T, e *env) {
	for _, row := range e.testConnectivity(t, false).Cases {
		if row.Failed > 0 || row.Checks == 0 {
			t.Errorf("on a healthy cluster: %+v", row)
		}
	}
	last := e.Node(nodes - 1).Name()
	e.kubectl(t, "--namespace", namespace, "patch", "daemonset/spillway", "--type=merge", "--patch",
		`{"spec":{"template":{"spec":{"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[
		{"matchExpressions":[{"key":"kubernetes.io/hostname","operator":"NotIn","values":["`+last+`"]}]}]}}}}}}}`)
	clustertest.Must(t, e.WaitForRollout(t.Context(), namespace, "daemonset/spillway"))
	await.True(t, "no agent runs on "+last, func() bool {
		return e.kubectl(t, "--namespace", namespace, "get", "pods", "--selector="+selector,
			"--field-selector=spec.nodeName="+last, "--output=name") == ""
	})
	for _, row := range e.testConnectivity(t, true).Cases {
		switch row.Case {
		case "Pod address, headless Service":
			if row.Failed > 0 {
				t.Errorf("without a Service: %+v", row)
			}
		case "ClusterIP", "Pod to itself (hairpin)":
			if row.Common != "only from "+last {
				t.Errorf("%+v, want failures from %s", row, last)
			}
		}
	}
	archive := filepath.Join(t.TempDir(), "dump.tar.gz")
	out, err := e.spillway(t, "sysdump", "--node=false", "--objects", "--file", archive)
	clustertest.Must(t, err)
	if strings.Contains(out, "could not be read") {
		t.Errorf("spillway sysdump: %s", out)
	}
	e.kubectl(t, "--namespace", namespace, "patch", "daemonset/spillway", "--type=json", "--patch",
		`[{"op":"remove","path":"/spec/template/spec/affinity"}]`)
	clustertest.Must(t, e.WaitForRollout(t.Context(), namespace, "daemonset/spillway"))
	await.True(t, "an agent runs on "+last, func() bool { return len(e.pods(t)) == nodes })
}
