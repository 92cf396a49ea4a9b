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
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/controlplane"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/notrack"
	"spillway.dev/spillway/lab/experiment/overlay"
	"spillway.dev/spillway/lab/experiment/scale"
	"spillway.dev/spillway/lab/experiment/snat"
	"spillway.dev/spillway/lab/experiment/suite"
	"spillway.dev/spillway/lab/experiment/sysctl"
	"spillway.dev/spillway/lab/experiment/tftp"
	"spillway.dev/spillway/lab/report"
	"spillway.dev/spillway/lab/topology"
)

// labExperiments are all that `lab run` knows. "all" runs them in this order, and a report
// shows them in it.
func labExperiments() []experiment.Experiment {
	// The process that restores the machine's values is this program again.
	program, err := os.Executable()
	if err != nil {
		program = os.Args[0]
	}
	return []experiment.Experiment{notrack.New(), scale.New(), overlay.New(), snat.New(), tftp.New([]string{program, "lab", "restore-sysctls"})}
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
			return nil, cli.UsageErrorf("experiment %q: unknown: use all, or some of %s", name, strings.Join(labExperimentNames(), ", "))
		}
		out = append(out, all[i])
	}
	return out, nil
}

type labRunConfig struct {
	opts   experiment.Options
	only   string
	dir    string
	output string
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
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: cobra.FixedCompletions(append(labExperimentNames(), "all"), cobra.ShellCompDirectiveNoFileComp),
		RunE:              func(cmd *cobra.Command, args []string) error { return labRun(cmd, args, c) },
	}
	f := cmd.Flags()
	f.StringVar(&c.opts.Name, "name", "lab", "Prefix of the names of the lab clusters.")
	f.BoolVar(&c.opts.Quick, "quick", false, "Take fewer and shorter samples, for a first look.")
	f.StringVar(&c.only, "only", "", "Regular expression that \"EXPERIMENT: ROW\" must match.")
	f.StringVarP(&c.dir, "directory", "d", "report", "Directory for the report.")
	f.StringVarP(&c.output, "output", "o", "table", "Output format: table or json.")
	harness.SpillwayFlag(f)
	f.BoolVar(&c.node, "yes-on-this-node", false, "Run even if a kubelet runs on this machine.")
	return cmd
}

var labNameRule = regexp.MustCompile(`^[a-z0-9]{1,8}$`)

func labRun(cmd *cobra.Command, args []string, c labRunConfig) error {
	if err := cli.CheckOutput(c.output); err != nil {
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
	if err := cli.PrintResult(w, c.output, runTable{run}); err != nil {
		return err
	}
	if !run.Begun() {
		return fmt.Errorf("run experiments: interrupted before the first result: no report is written")
	}
	if c.output != "json" {
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
	var output string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the experiments, their rows and durations",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.CheckOutput(output); err != nil {
				return err
			}
			return cli.PrintResult(cmd.OutOrStdout(), output, listExperiments(quick))
		},
	}
	cmd.Flags().BoolVar(&quick, "quick", false, "List them as lab run --quick runs them.")
	cmd.Flags().StringVarP(&output, "output", "o", "table", "Output format: table or json.")
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

// Write prints the list as text.
func (l labList) Write(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, e := range l.Experiments {
		fmt.Fprintf(t, "%s\t%s\n", e.Name, e.Title)
		for _, row := range e.Rows {
			fmt.Fprintf(t, "\t%s\t%v\n", row.Name, time.Duration(row.TakesSeconds*float64(time.Second)))
		}
	}
	return t.Flush()
}

func newDiffCommand() *cobra.Command {
	var force bool
	var output string
	cmd := &cobra.Command{
		Use:   "diff A.json B.json",
		Short: "Show the differences beyond noise between two runs on one machine",
		Args:  cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := cli.CheckOutput(output); err != nil {
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
			return cli.PrintResult(cmd.OutOrStdout(), output, c)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "Compare runs of different machines, kernels or lengths.")
	cmd.Flags().StringVarP(&output, "output", "o", "table", "Output format: table or json.")
	return cmd
}

// newRestoreCommand returns the command of the process that restores the machine's values
// when an experiment is killed.
func newRestoreCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "restore-sysctls",
		Short:  "Restore values of the machine when the input ends",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return sysctl.Keep(cmd.InOrStdin()) },
	}
}
