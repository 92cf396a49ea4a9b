package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// report has one test of each state, one that was not selected, and a preparation.
const report = `[{"RunTime": 120000000000, "SpecReports": [
	{"LeafNodeType": "SynchronizedBeforeSuite", "State": "passed", "NumAttempts": 1},
	{"ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeType": "It", "LeafNodeText": "serve", "State": "passed", "NumAttempts": 1},
	{"ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeType": "It", "LeafNodeText": "reject", "State": "failed", "NumAttempts": 1, "Failure": {"Message": "no answer"}},
	{"ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeType": "It", "LeafNodeText": "hang", "State": "timedout", "NumAttempts": 1},
	{"ContainerHierarchyTexts": ["[sig-network] Services"], "LeafNodeType": "It", "LeafNodeText": "need zones", "State": "skipped", "NumAttempts": 1},
	{"ContainerHierarchyTexts": ["[sig-node] Pods"], "LeafNodeType": "It", "LeafNodeText": "run", "State": "skipped"}]}]`

func readText(t *testing.T, text string) (*Report, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "report.json")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return read(path, "ebpf")
}

func TestTableCountsTestsThatWereSelected(t *testing.T) {
	r, err := readText(t, report)
	if err != nil {
		t.Fatal(err)
	}
	want := `| proxy | passed | failed | skipped | minutes |
|---|---|---|---|---|
| ebpf | 1 | 2 | 1 | 2 |

| failed test | ebpf |
|---|---|
| Services hang | failed |
| Services reject | failed |
`
	if got := Table(r); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestAFailedPreparationIsAFailure(t *testing.T) {
	r, err := readText(t, strings.Replace(report, `"passed"`, `"failed"`, 1))
	if err != nil {
		t.Fatal(err)
	}
	if r.Count(Failed) != 3 {
		t.Errorf("got %v", r.Tests)
	}
}

func TestARunWithoutTestsIsAnError(t *testing.T) {
	for _, text := range []string{"[]", `[{"SpecReports": [{"LeafNodeType": "It", "State": "skipped"}]}]`, "{"} {
		if _, err := readText(t, text); err == nil {
			t.Errorf("%s: no error", text)
		}
	}
}

func TestCheck(t *testing.T) {
	r, err := readText(t, report)
	if err != nil {
		t.Fatal(err)
	}
	r.CNI = "bridge"
	reject, hang := Expected{Test: "[sig-network] Services reject"}, Expected{Test: "[sig-network] Services hang", Proxies: []string{"ebpf"}}
	for _, c := range []struct {
		name     string
		expected []Expected
		want     []string // in the error's lines
	}{
		{"all are expected", []Expected{reject, hang}, nil},
		{"one is not", []Expected{hang}, []string{"ebpf: [sig-network] Services reject failed: no answer"}},
		{"expected with another proxy", []Expected{reject, {Test: hang.Test, Proxies: []string{"iptables"}}}, []string{"hang failed"}},
		{"expected with another CNI", []Expected{reject, {Test: hang.Test, CNIs: []string{"flannel-vxlan"}}}, []string{"hang failed"}},
		{"expected with this CNI", []Expected{reject, {Test: hang.Test, CNIs: []string{"bridge"}}}, nil},
		{"expected, but passed", []Expected{reject, hang, {Test: "[sig-network] Services serve", Reason: "old"}},
			[]string{"serve passed: delete it from expected.yaml (old)"}},
	} {
		var lines []string
		if err := r.Check(c.expected); err != nil {
			lines = strings.Split(err.Error(), "\n")
		}
		if len(lines) != len(c.want) {
			t.Errorf("%s: got %q, want %q", c.name, lines, c.want)
			continue
		}
		for i, want := range c.want {
			if !strings.Contains(lines[i], want) {
				t.Errorf("%s: got %q, want %q", c.name, lines[i], want)
			}
		}
	}
}

func TestExpectedFailuresHaveReasons(t *testing.T) {
	if _, err := ExpectedFailures(); err != nil {
		t.Error(err)
	}
}

func TestDualStackAddsItsTestsAndNoOthers(t *testing.T) {
	for _, focus := range []Focus{All, Conformance} {
		dual := focus.WithDualStack()
		for name, want := range map[string]bool{
			"[sig-network] [Feature:IPv6DualStack] should create service with ipv4,v6 cluster ip": true,
			"[sig-network] Services should serve a basic endpoint from pods [Conformance]":        true,
			"[sig-network] Services should be rejected [Feature:SCTPConnectivity]":                false,
			"[sig-network] Services should work [FeatureGate:ServiceTrafficDistribution]":         false,
			"[sig-network] [Feature:IPVS] of another proxy":                                       false,
			"[sig-node] Pods should be submitted and removed [Conformance]":                       false,
		} {
			selected := regexp.MustCompile(dual.Match).MatchString(name) && !regexp.MustCompile(dual.Skip).MatchString(name)
			if selected != want {
				t.Errorf("%s: selected %v, want %v", name, selected, want)
			}
		}
	}
}
