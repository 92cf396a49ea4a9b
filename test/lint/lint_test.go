// Package lint tests the dependency rules in .golangci.yml, and prose that vale does not read.
package lint

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const root = "../.."

// TestForbiddenImportsAreFound lints a module of the product's name. Its imports
// break each kind of rule once; the other imports in it are allowed.
func TestForbiddenImportsAreFound(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: tests golangci-lint with the rules of this tree")
	}
	dir := t.TempDir()
	if err := os.CopyFS(dir, os.DirFS("testdata/forbidden")); err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(filepath.Join(root, ".golangci.yml"))
	if err != nil {
		t.Fatal(err)
	}
	// ${base-path} in the rules is the folder of the file.
	if err := os.WriteFile(filepath.Join(dir, ".golangci.yml"), config, 0o600); err != nil {
		t.Fatal(err)
	}
	want := []string{
		// One dataplane imports another.
		"internal/dataplane/ebpf/ebpf.go: spillway.dev/spillway/internal/dataplane/nftables",
		// A package that tests use follows the rule of tests.
		"internal/dataplane/ebpf/ebpftest/ebpftest.go: spillway.dev/spillway/test/flows",
		// A decision imports what writes it.
		"internal/decisions/intent/intent.go: spillway.dev/spillway/internal/reconcile",
		// The rule allows conntrack, but not the packages below it.
		"internal/diagnosis/drops/drops.go: spillway.dev/spillway/internal/node/conntrack/stale",
		// A third-party package; the test of the same package may import it.
		"internal/facts/model/model.go: example.org/clock",
		"internal/facts/model/model_test.go: spillway.dev/spillway/lab",
		// Of the packages in test/, a test may import await and must.
		"internal/facts/model/model_test.go: spillway.dev/spillway/test/flows",
		// No rule names these packages.
		"internal/newpackage/newpackage.go: spillway.dev/spillway/internal/facts/model",
		// The rule allows the Backend interface, but no dataplane.
		"internal/reconcile/reconcile.go: spillway.dev/spillway/internal/dataplane/ebpf/attach",
		"internal/reconcile/reconcile.go: spillway.dev/spillway/test/await",
		"somewhere/somewhere.go: spillway.dev/spillway/lab",
	}
	if got := forbidden(t, dir); !slices.Equal(got, want) {
		t.Errorf("got:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// forbidden runs golangci-lint in dir and returns "file: import" for each import
// that depguard reports.
func forbidden(t *testing.T, dir string) []string {
	t.Helper()
	cmd := exec.Command("go", "tool", "-modfile=hack/tools/go.mod", "-n", "golangci-lint")
	cmd.Dir = root
	tool, err := cmd.Output()
	if err != nil {
		t.Fatalf("build golangci-lint: %v", err)
	}
	cmd = exec.Command(strings.TrimSpace(string(tool)), "run", "--allow-parallel-runners", "--enable-only=depguard",
		"--issues-exit-code=0", "--show-stats=false", "--output.json.path=stdout", "./...")
	cmd.Dir = dir
	// The copy has another path in each run, so a cache of its results is of no use.
	cmd.Env = append(os.Environ(), "GOLANGCI_LINT_CACHE="+t.TempDir())
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("run golangci-lint: %v\n%s", err, out)
	}
	var report struct {
		Issues []struct {
			Text string
			Pos  struct{ Filename string }
		}
	}
	if err := json.Unmarshal(out, &report); err != nil {
		t.Fatalf("decode the report: %v\n%s", err, out)
	}
	imported := regexp.MustCompile(`^import '([^']+)' is not allowed`)
	var list []string
	for _, issue := range report.Issues {
		m := imported.FindStringSubmatch(issue.Text)
		if m == nil {
			t.Fatalf("unexpected finding: %s", issue.Text)
		}
		list = append(list, issue.Pos.Filename+": "+m[1])
	}
	slices.Sort(list)
	return list
}
