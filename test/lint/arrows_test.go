package lint

import (
	"slices"
	"strings"
	"testing"
)

func TestArrowsOfTheDesignHold(t *testing.T) {
	list, err := List("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(list) < 5 {
		t.Fatalf("only %d packages listed", len(list))
	}
	for _, line := range Check(list) {
		t.Error(line)
	}
}

// The fixture is a module of the same name with imports that go backwards.
func TestBackwardImportsAreFound(t *testing.T) {
	list, err := List("testdata/backward")
	if err != nil {
		t.Fatal(err)
	}
	got := Check(list)
	want := []string{
		module + "/internal/dataplane/ebpf may not import " + module + "/internal/dataplane/nftables",
		module + "/internal/decisions/intent may not import " + module + "/internal/reconcile",
		module + "/internal/facts/model may not import example.org/clock",
		module + "/internal/newroom may not import " + module + "/internal/facts/model",
		module + "/somewhere is in no room of test/lint/arrows.go",
		"the tests of " + module + "/internal/facts/model may not import " + module + "/lab",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

func TestRules(t *testing.T) {
	for _, c := range []struct {
		from, to string
		ok       bool
	}{
		{"internal/facts/manifest", "internal/facts/model", true},
		{"internal/facts/manifest", "internal/decisions/intent", false},
		{"internal/decisions/intent", "internal/facts/model", true},
		{"internal/decisions/intent", "internal/dataplane", false},
		{"internal/dataplane/ebpf", "internal/dataplane", true},
		{"internal/dataplane/ebpf", "internal/dataplane/ebpf/attach", true},
		{"internal/dataplane/ebpf/attach", "internal/dataplane/iptables", false},
		{"internal/dataplane/ebpf", "internal/reconcile", false},
		{"internal/dataplane/ebpf", "internal/facts/manifest", false},
		{"internal/reconcile", "internal/dataplane", true},
		{"internal/reconcile", "internal/dataplane/ebpf", false},
		{"internal/reconcile", "internal/facts/manifest", false},
		{"internal/node/conntrack", "internal/node/capacity", true},
		{"internal/node/conntrack", "internal/decisions/intent", false},
		{"internal/node/conntrack/stale", "internal/decisions/intent", true},
		{"internal/node/conntrack/stale", "internal/dataplane", false},
		{"internal/dataplane/nftables", "internal/node/conntrack/stale", false},
		{"internal/reconcile", "internal/node/conntrack/stale", false},
		{"internal/telemetry", "lab/topology", false},
		{"lab/experiment", "internal/node/kernel", true},
		{"internal/proxymode", "internal/dataplane/iptables", true},
		{"internal/proxymode", "internal/facts/kube", false},
		{"internal/diagnosis/drops", "internal/dataplane/ebpf", false},
		{"internal/cli/agent", "internal/proxymode", true},
		{"internal/cli/agent", "lab/topology", false},
		{"internal/cli/doctor", "internal/cli/progress", true},
		{"internal/cli/progress", "internal/cli", false},
		{"cmd/spillway", "internal/cli/agent", true},
		{"cmd/spillway", "lab/topology", false},
		{"cmd/spillway", "examples", false},
		{"cmd/spillway-lab", "lab/cli/lab", true},
	} {
		bad := Check([]Package{{ImportPath: module + "/" + c.from, Imports: []string{module + "/" + c.to, "fmt"}}})
		if (len(bad) == 0) != c.ok {
			t.Errorf("%s -> %s: %v, want allowed %v", c.from, c.to, bad, c.ok)
		}
	}
}
