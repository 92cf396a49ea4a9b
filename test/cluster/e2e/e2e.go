// Package e2e runs Kubernetes' own tests of Services against a cluster, and compares the
// failures with the expected ones.
package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Programs names what Run needs of hack/peers.
var Programs = []string{"e2e.test", "ginkgo", "kubectl"}

// Config configures a run.
type Config struct {
	Kubeconfig string
	Programs   string // directory of the programs
	Dir        string // of the log and the report; Run makes it
	// Label names the run in tables, and its proxy in the list of expected failures.
	Label string
	CNI   string // in the list of expected failures
	Focus Focus
	Procs int // tests at once; 0 is 6: they mostly wait
	Nodes int // of the cluster; 0 is 3
	// Exec runs a command where the API server can be reached; nil runs it here.
	Exec func(ctx context.Context, out io.Writer, argv ...string) error
}

// Focus selects tests, by regular expressions of Ginkgo's.
type Focus struct{ Match, Skip string }

// skip leaves out tests that need a cloud, a feature gate, a NetworkPolicy or much time,
// and those that change other tests' nodes.
const skip = `\[Slow\]|\[Disruptive\]|\[Flaky\]|\[Feature|\[Provider:|LoadBalancer|Netpol`

var (
	// All are the tests of [sig-network] for any cluster; they take half an hour.
	All = Focus{`\[sig-network\]`, skip}
	// Conformance are the tests of All that every Kubernetes cluster must pass.
	Conformance = Focus{`\[sig-network\].*\[Conformance\]`, skip}
)

// WithDualStack adds the tests that need a dual-stack cluster.
func (f Focus) WithDualStack() Focus {
	f.Match = strings.Replace(f.Match, `\[Conformance\]`, `(\[Conformance\]|\[Feature:IPv6DualStack\])`, 1)
	f.Skip = strings.Replace(f.Skip, `\[Feature|`, `\[FeatureGate|\[Feature:([^I]|I[^P]|IP[^v])|`, 1)
	return f
}

// Run runs the selected tests. A failed test is no error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if cfg.Procs == 0 {
		cfg.Procs = 6
	}
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.Exec == nil {
		cfg.Exec = run
	}
	report, err := cfg.run(ctx)
	if err != nil {
		return nil, fmt.Errorf("run e2e.test: %w", err)
	}
	return report, nil
}

func (cfg Config) run(ctx context.Context) (*Report, error) {
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, err
	}
	out, err := os.Create(filepath.Join(cfg.Dir, "e2e.log"))
	if err != nil {
		return nil, err
	}
	defer out.Close()
	program := func(name string) string { return filepath.Join(cfg.Programs, name) }
	const name = "report.json"
	path := filepath.Join(cfg.Dir, name)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	ran := cfg.Exec(ctx, out, program("ginkgo"),
		"--procs", strconv.Itoa(cfg.Procs), "--timeout", "2h", "--no-color",
		"--focus", cfg.Focus.Match, "--skip", cfg.Focus.Skip,
		"--output-dir", cfg.Dir, "--json-report", name,
		program("e2e.test"), "--",
		"--kubeconfig", cfg.Kubeconfig, "--kubectl-path", program("kubectl"),
		"--num-nodes", strconv.Itoa(cfg.Nodes), "--disable-log-dump", "--provider", "skeleton")
	report, err := read(path, cfg.Label)
	if err != nil { // ginkgo ended before any test
		return nil, fmt.Errorf("%w; its log is %s", errors.Join(ran, err), out.Name())
	}
	report.CNI = cfg.CNI
	return report, ctx.Err()
}

// run runs a command, and interrupts it when the context ends: ginkgo then deletes the
// namespaces of its tests.
func run(ctx context.Context, out io.Writer, argv ...string) error {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	return cmd.Run()
}
