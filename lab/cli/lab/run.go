package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/notrack"
	"spillway.dev/spillway/lab/experiment/overlay"
	"spillway.dev/spillway/lab/experiment/scale"
	"spillway.dev/spillway/lab/experiment/snat"
	"spillway.dev/spillway/lab/experiment/suite"
	"spillway.dev/spillway/lab/experiment/tftp"
	"spillway.dev/spillway/lab/report"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/sysctl"
	"spillway.dev/spillway/test/testbed/topology"
)

// labExperiments are all that `lab run` knows. "all" runs them in this order, and a report
// shows them in it.
func labExperiments() []experiment.Experiment {
	// The process that restores the machine's values is this program again.
	program, err := os.Executable()
	if err != nil {
		program = os.Args[0]
	}
	return []experiment.Experiment{notrack.New(), scale.New(), overlay.New(), snat.New(), snat.Egress(),
		tftp.New([]string{program, "lab", "restore-sysctls"})}
}

func labExperimentNames() []string {
	var names []string
	for _, e := range labExperiments() {
		names = append(names, e.Name)
	}
	return names
}

// chooseExperiments finds experiments by name; "all" is each of them.
func chooseExperiments(names []string) ([]experiment.Experiment, error) {
	all := labExperiments()
	if slices.Equal(names, []string{"all"}) {
		return all, nil
	}
	var out []experiment.Experiment
	for _, name := range names {
		if name == "all" {
			return nil, cli.UsageErrorf("all: it includes every experiment: give no other name with it")
		}
		i := slices.IndexFunc(all, func(e experiment.Experiment) bool { return e.Name == name })
		if i < 0 {
			return nil, cli.UsageErrorf("experiment %q: unknown%s: use all, or some of %s", name, cli.DidYouMean(name, labExperimentNames()),
				strings.Join(labExperimentNames(), ", "))
		}
		out = append(out, all[i])
	}
	return out, nil
}

type labRunConfig struct {
	opts   experiment.Options
	only   string
	dir    string
	output cli.Output
	node   bool
}

func newRunCommand() *cobra.Command {
	var c labRunConfig
	cmd := &cobra.Command{
		Use:   "run EXPERIMENT...|all",
		Short: "Repeat published experiments and compare the results with the published ones",
		Long: `Repeats published experiments on clusters of network namespaces on this machine, with
Spillway and with kube-proxy, and writes a report with pictures. Needs root. "hack/peers
kube-proxy" builds kube-proxy; without it, its rows are marked "not built". Do not use the
machine meanwhile.

A row that fails is shown as failed; the others continue, and the exit code is 1. Ctrl-C
ends a run and writes a report of the results so far. Nothing of it stays in the kernel.`,
		Example: `  spillway-lab lab run all --quick
  spillway-lab lab run snat-race --only 'Spillway|random-fully'
  spillway-lab lab run tftp-nodeport do-not-track -d /tmp/report`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cli.UsageErrorf("lab run: no experiment given: use all, or some of %s", strings.Join(labExperimentNames(), ", "))
			}
			return nil
		},
		ValidArgsFunction: cobra.FixedCompletions(append(labExperimentNames(), "all"), cobra.ShellCompDirectiveNoFileComp),
		RunE:              func(cmd *cobra.Command, args []string) error { return labRun(cmd, args, c) },
	}
	f := cmd.Flags()
	f.StringVar(&c.opts.Name, "name", "lab", "Prefix of the names of the lab clusters.")
	f.BoolVar(&c.opts.Quick, "quick", false, "Take fewer and shorter samples, for a first look.")
	f.StringVar(&c.only, "only", "", "Regular expression that \"EXPERIMENT: ROW\" must match.")
	f.StringVarP(&c.dir, "directory", "d", "report", "Directory for the report.")
	c.output.AddFlag(cmd)
	harness.SpillwayFlag(f)
	f.BoolVar(&c.node, "yes-on-this-node", false, "Run even if a kubelet runs on this machine.")
	return cmd
}

var labNameRule = regexp.MustCompile(`^[a-z0-9]{1,8}$`)

func labRun(cmd *cobra.Command, args []string, c labRunConfig) error {
	if err := c.output.Validate(); err != nil {
		return err
	}
	list, err := chooseExperiments(args)
	if err != nil {
		return err
	}
	if !labNameRule.MatchString(c.opts.Name) {
		return cli.UsageErrorf("--name %q: use 1 to 8 of a-z, 0-9", c.opts.Name)
	}
	only, err := regexp.Compile(c.only)
	if err != nil {
		return cli.UsageErrorf("--only: %v", err)
	}
	if err := c.canRun(); err != nil {
		return err
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	c.opts.Progress = progress.New(cmd.ErrOrStderr())
	var path string
	var writeErr error
	run, err := suite.Run(ctx, suite.Config{
		Options: c.opts, Command: append([]string{"spillway-lab"}, os.Args[1:]...), Versions: labVersions(ctx),
		Disturbed: experiment.Disturbed, Share: sysctl.Share,
		Only: func(e, row string) bool { return only.MatchString(e + ": " + row) },
		Finished: func(r *experiment.Run) {
			// A run that was interrupted before any result has no report.
			if path != "" || r.Begun() {
				path, writeErr = report.Write(c.dir, r, "")
			}
		},
	}, list)
	if err != nil {
		return err
	}
	// The results are shown even if the files could not be written.
	return errors.Join(writeErr, labRunEnd(cmd.OutOrStdout(), c, run, path))
}

// canRun returns an error if a run would fail for a reason that can be checked before it
// takes an hour.
func (c *labRunConfig) canRun() error {
	if err := topology.RequireRoot(); err != nil {
		return err
	}
	if _, err := harness.Spillway(); err != nil {
		return err
	}
	if !c.node {
		if err := suite.RefuseKubelet(); err != nil {
			return err
		}
	}
	return writable(c.dir)
}

// writable creates the directory of a report and checks that it accepts files.
func writable(dir string) error {
	if dir == "" {
		return cli.UsageErrorf("--directory: empty: give a directory for the report")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make directory for the report: %w", err)
	}
	f, err := os.CreateTemp(dir, ".spillway-*")
	if err != nil {
		return fmt.Errorf("write into the directory for the report: %w", err)
	}
	_, err = f.Write(make([]byte, 4096))
	if err = errors.Join(err, f.Close(), os.Remove(f.Name())); err != nil {
		return fmt.Errorf("write into the directory for the report: %w", err)
	}
	return nil
}

// labRunEnd prints the results, and fails if some are missing.
func labRunEnd(w io.Writer, c labRunConfig, run *experiment.Run, path string) error {
	if err := c.output.Print(w, runTable{run}); err != nil {
		return err
	}
	if !run.Begun() {
		return fmt.Errorf("run experiments: interrupted before the first result: no report is written")
	}
	if !c.output.ForPrograms() {
		fmt.Fprintf(w, "%s\n\n", suite.Summary(run))
		if err := report.Verdicts(w, run); err != nil {
			return err
		}
		fmt.Fprintf(w, "report: %s\n", path)
	}
	if n := run.Unfinished(); n > 0 {
		return fmt.Errorf("run experiments: %d rows failed or were interrupted: see %s", n, path)
	}
	return nil
}

// runTable is a run with a form for terminals.
type runTable struct{ *experiment.Run }

// Write prints the tables of all experiments.
func (t runTable) Write(w io.Writer) error { return report.Text(w, t.Run) }

// labVersions returns the versions of the programs of a run.
func labVersions(ctx context.Context) map[string]string {
	b := cli.Build()
	v := map[string]string{"spillway": b.Version, "commit": b.Commit}
	ask := func(name string, argv ...string) {
		out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
		if err != nil {
			return // not here: the experiment that needs it reports it
		}
		if found := versionRule.FindString(string(out)); found != "" {
			v[name] = found
		}
	}
	ask("nginx", "nginx", "-v")
	ask("nft", "nft", "--version")
	ask("iptables", "iptables", "--version")
	if program, err := controlplane.Program("kube-proxy"); err == nil {
		ask("kube-proxy", program, "--version")
	}
	return v
}

var versionRule = regexp.MustCompile(`v?[0-9]+\.[0-9]+(\.[0-9]+)?( \((legacy|nf_tables)\))?`)

func newListCommand() *cobra.Command {
	var quick bool
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the experiments, their rows and durations",
		Example: `  spillway-lab lab list
  spillway-lab lab list --quick -o wide`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			return output.Print(cmd.OutOrStdout(), listExperiments(quick))
		},
	}
	cmd.Flags().BoolVar(&quick, "quick", false, "List them as lab run --quick runs them.")
	output.AddFlag(cmd)
	return cmd
}

// labList is the output of `lab list`.
type labList struct {
	Experiments []labListed `json:"experiments"`
}

type labListed struct {
	Name  string         `json:"name"`
	Title string         `json:"title"`
	Rows  []labListedRow `json:"rows"`
}

type labListedRow struct {
	Name         string  `json:"name"`
	TakesSeconds float64 `json:"takes_seconds"`
}

func listExperiments(quick bool) labList {
	var list labList
	for _, e := range labExperiments() {
		listed := labListed{Name: e.Name, Title: e.Title}
		for _, row := range e.Rows(experiment.Options{Name: "lab", Quick: quick}) {
			listed.Rows = append(listed.Rows, labListedRow{row.Name, row.Takes.Seconds()})
		}
		list.Experiments = append(list.Experiments, listed)
	}
	return list
}

// Write prints the experiments as text, with their rows for -o wide.
func (l labList) Write(w io.Writer) error {
	if page.Of(w).Wide {
		return l.rows().Write(w)
	}
	t := page.NewTable(page.Text("EXPERIMENT"), page.Number("ROWS"), page.Number("TAKES"), page.Text("MEASURES").Shrinks(20))
	var all time.Duration
	for _, e := range l.Experiments {
		var takes time.Duration
		for _, row := range e.Rows {
			takes += row.takes()
		}
		all += takes
		t.Row(e.Name, len(e.Rows), takes.Round(time.Second), e.Title)
	}
	t.Foot("all: %v; -o wide lists the rows", all.Round(time.Second))
	return t.Write(w)
}

// rows is the table of all rows.
func (l labList) rows() *page.Table {
	t := page.NewTable(page.Text("EXPERIMENT"), page.Text("ROW"), page.Number("TAKES"))
	for _, e := range l.Experiments {
		for _, row := range e.Rows {
			t.Row(e.Name, row.Name, row.takes())
		}
	}
	return t
}

func (r labListedRow) takes() time.Duration {
	return time.Duration(r.TakesSeconds * float64(time.Second))
}

func newDiffCommand() *cobra.Command {
	var force bool
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "diff A.json B.json",
		Short: "Show the differences beyond noise between two runs on one machine",
		Example: `  spillway-lab lab diff report/previous/results.json report/results.json
  spillway-lab lab diff --force a.json b.json -o json`,
		Args: cli.Arguments("A.json", "B.json"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			a, err := experiment.ReadRun(args[0])
			if err != nil {
				return err
			}
			b, err := experiment.ReadRun(args[1])
			if err != nil {
				return err
			}
			if err := experiment.Comparable(a, b); err != nil && !force {
				return err
			}
			c := experiment.Compare(a, b)
			if len(c.Differences) == 0 && len(c.OnlyA)+len(c.OnlyB) > 0 {
				return fmt.Errorf("compare results: no row was measured in both %s and %s", args[0], args[1])
			}
			return output.Print(cmd.OutOrStdout(), c)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "Compare runs of different machines, kernels or lengths.")
	output.AddFlag(cmd)
	return cmd
}

// newRestoreCommand returns the command of the process that restores the machine's values
// when an experiment is killed.
func newRestoreCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "restore-sysctls",
		Short:  "Restore values of the machine when the input ends",
		Hidden: true,
		Args:   cli.Arguments(),
		RunE:   func(cmd *cobra.Command, _ []string) error { return sysctl.Keep(cmd.InOrStdin()) },
	}
}
