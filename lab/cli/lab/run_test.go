package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent"
	"spillway.dev/spillway/lab/cli/load"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/workload"
)

// asProgram makes the test binary act as spillway-lab, and as spillway.
const asProgram = "SPILLWAY_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	if os.Getenv(asProgram) != "" {
		p := cli.Program{Name: "spillway-lab", Commands: []*cobra.Command{NewCommand(), load.NewCommand(), agent.NewCommand()}}
		os.Exit(p.Run(os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// program prepares the program as a process of its own.
func program(args ...string) *exec.Cmd {
	if slices.Equal(args[:min(len(args), 2)], []string{"lab", "run"}) {
		args = append(args, "--spillway", os.Args[0])
	}
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), asProgram+"=1")
	return cmd
}

// left lists the objects on this machine that remain of a run.
func left(t *testing.T, name string) (found []string) {
	t.Helper()
	for _, pattern := range []string{"/run/netns/spw-" + name + "-*", "/run/spillway-rig/" + name + "-*", "/run/spillway-lab/" + name + "-*",
		"/sys/fs/cgroup/spillway-lab/" + name + "-*", "/sys/fs/cgroup/unified/spillway-lab/" + name + "-*", "/run/spillway-sysctl/journal"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		found = append(found, paths...)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), "/run/spillway-rig/"+name+"-") {
		found = append(found, fmt.Sprintf("a mount (%v)", err))
	}
	// A process in a lab has the directory of its cluster in its environment.
	environs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range environs {
		text, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(text), "/"+name+"-") && strings.Contains(string(text), "SPILLWAY_LAB_DIR=") {
			cmdline, _ := os.ReadFile(filepath.Dir(path) + "/cmdline")
			found = append(found, "a process: "+strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
	return found
}

func TestAnInterruptedLabRunLeavesNothing(t *testing.T) {
	if err := harness.CanRun(); err != nil {
		t.Skip(err)
	}
	const name = "labint"
	// From the first thing that it makes: while the cluster is built, while agents start, while
	// load runs, and a second row after that.
	for _, after := range []time.Duration{0, 500 * time.Millisecond, 1300 * time.Millisecond, 2400 * time.Millisecond} {
		dir := t.TempDir()
		cmd := program("lab", "run", "snat-race", "--quick", "--yes-on-this-node", "--name", name, "-d", dir,
			"--only", "80 threads: (Spillway, eBPF|MASQUERADE)$")
		var messages strings.Builder
		cmd.Stderr = &messages
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		await.True(t, "the run begins", func() bool {
			return slices.ContainsFunc(left(t, name), func(found string) bool { return strings.Contains(found, name+"-") })
		})
		time.Sleep(after)
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		err := cmd.Wait()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != cli.ExitFailed {
			t.Errorf("interrupted after %v: %v; want exit code %d: %s", after, err, cli.ExitFailed, messages.String())
		}
		if found := left(t, name); len(found) > 0 {
			t.Errorf("interrupted after %v, it left: %s", after, strings.Join(found, "\n"))
		}
		run, err := experiment.ReadRun(dir + "/results.json")
		if errors.Is(err, os.ErrNotExist) && strings.Contains(messages.String(), "no report is written") {
			continue
		}
		if err != nil {
			t.Fatalf("interrupted after %v: %v: %s", after, err, messages.String())
		}
		last := run.Results[0].Rows[len(run.Results[0].Rows)-1]
		if len(run.Results[0].Rows) != 2 || last.Status != experiment.Interrupted {
			t.Errorf("interrupted after %v: the last row is %+v", after, last)
		}
	}
}

// The expected durations of the rows must fit the documented duration of a run: 40
// minutes in full, 5 in quick form.
func TestAllExperimentsFitInTheirTime(t *testing.T) {
	for quick, limit := range map[bool]time.Duration{false: 41 * time.Minute, true: 330 * time.Second} {
		var all time.Duration
		for _, e := range labExperiments() {
			for _, row := range e.Rows(experiment.Options{Name: "x", Quick: quick}) {
				all += row.Takes
			}
		}
		if all > limit || all < limit/2 {
			t.Errorf("quick: %v: all rows take %v, the limit is %v", quick, all, limit)
		}
	}
}

// The check for leftovers must be able to find some.
func TestLeftFindsAProcess(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	cmd.Env = []string{"SPILLWAY_LAB_DIR=/run/x/labplant-snat"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	await.True(t, "the process that is left is found", func() bool { // once it has its environment
		found := left(t, "labplant")
		return len(found) == 1 && strings.Contains(found[0], "sleep 60")
	})
}

func TestLabRunAndDiffRefuse(t *testing.T) {
	dir := t.TempDir()
	write := func(name, kernel string) string {
		path := filepath.Join(dir, name)
		text, err := json.Marshal(experiment.Run{Format: experiment.Format, Machine: experiment.Machine{Kernel: kernel}})
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	of := func(experimentName string) string {
		path := filepath.Join(dir, experimentName+".json")
		text, err := json.Marshal(experiment.Run{Format: experiment.Format, Results: []experiment.Result{
			{Name: experimentName, Rows: []experiment.RowResult{{Name: "r", Status: experiment.OK}}}}})
		if err == nil {
			err = os.WriteFile(path, text, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	a, b := write("a.json", "6.1"), write("b.json", "6.18")
	file := write("file", "6.1")
	tests := []struct {
		args []string
		code int
		says string
	}{
		{[]string{"lab", "run"}, cli.ExitUsage, "lab run: no experiment given: use all, or some of do-not-track"},
		{[]string{"lab", "run", "nothing"}, cli.ExitUsage, `experiment "nothing": unknown: use all, or some of do-not-track`},
		{[]string{"lab", "run", "snat-rase"}, cli.ExitUsage, `experiment "snat-rase": unknown (did you mean snat-race?)`},
		{[]string{"lab", "run", "all", "--only", "("}, cli.ExitUsage, "--only"},
		{[]string{"lab", "run", "all", "snat-race"}, cli.ExitUsage, "give no other name with it"},
		{[]string{"lab", "run", "all", "--yes-on-this-node", "-d", ""}, cli.ExitUsage, "--directory: empty"},
		{[]string{"lab", "run", "all", "--yes-on-this-node", "-d", "/proc/self"}, cli.ExitFailed, "write into the directory for the report"},
		{[]string{"lab", "run", "all", "--name", "much-too-long"}, cli.ExitUsage, `--name "much-too-long"`},
		{[]string{"lab", "run", "all", "-o", "xml"}, cli.ExitUsage, `--output "xml"`},
		{[]string{"lab", "run", "all", "--yes-on-this-node", "--only", "no such row"}, cli.ExitFailed, "no row to run"},
		{[]string{"lab", "run", "all", "--yes-on-this-node", "-d", file + "/below"}, cli.ExitFailed, "make directory for the report"},
		{[]string{"lab", "diff", a, b}, cli.ExitFailed, "kernel: 6.1, 6.18"},
		{[]string{"lab", "diff", a, dir + "/none"}, cli.ExitFailed, "read results"},
		{[]string{"lab", "diff", a, b, "--force"}, cli.ExitDone, ""},
		{[]string{"lab", "diff", a, a}, cli.ExitDone, ""},
		{[]string{"lab", "diff", of("one"), of("two")}, cli.ExitFailed, "no row was measured in both"},
	}
	for _, tt := range tests {
		if slices.Contains(tt.args, "--yes-on-this-node") && os.Geteuid() != 0 {
			continue
		}
		cmd := program(tt.args...)
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != tt.code || !strings.Contains(string(out), tt.says) {
			t.Errorf("%v: exit code %d (%v), %s; want %d and %q", tt.args, code, err, out, tt.code, tt.says)
		}
	}
}

// The last lines are one verdict for each experiment, and the report's path.
func TestALabRunEndsWithVerdicts(t *testing.T) {
	run := &experiment.Run{}
	for _, e := range labExperiments() {
		run.Results = append(run.Results, experiment.Result{Name: e.Name, Card: &experiment.Card{Verdict: "verdict of " + e.Name},
			Rows: []experiment.RowResult{{Name: "r", Status: experiment.OK}}})
	}
	var out strings.Builder
	if err := labRunEnd(&out, labRunConfig{output: "table"}, run, "report/index.html"); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	lines = lines[len(lines)-len(run.Results)-1:]
	for i, res := range run.Results {
		if !strings.HasPrefix(lines[i], res.Name) || !strings.HasSuffix(lines[i], res.Card.Verdict) {
			t.Errorf("line %d from the end is %q, want the verdict of %s", len(lines)-i, lines[i], res.Name)
		}
	}
	if last := lines[len(lines)-1]; last != "report: report/index.html" {
		t.Errorf("the last line is %q", last)
	}
}

// A second run of a name during the first fails its rows and changes nothing.
func TestASecondLabRunOfANameFails(t *testing.T) {
	if err := harness.CanRun(); err != nil {
		t.Skip(err)
	}
	if err := os.MkdirAll("/run/spillway-rig/labtwo-snat", 0o700); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open("/run/spillway-rig/labtwo-snat")
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(dir.Name())
	defer dir.Close()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	cmd := program("lab", "run", "snat-race", "--quick", "--yes-on-this-node", "--name", "labtwo", "-d", t.TempDir(), "--only",
		"80 threads: MASQUERADE$")
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != cli.ExitFailed ||
		!strings.Contains(string(out), "failed: lock /run/spillway-rig/labtwo-snat: another run") {
		t.Errorf("%v: %s", err, out)
	}
}
