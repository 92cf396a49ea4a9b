// Package doctor is the command that diagnoses a node.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

// config is the command line of `spillway doctor`.
type config struct {
	fix    bool
	failOn string
	netns  []string
	only   []string // ids of findings
	sample time.Duration
	socket nodeclient.Socket
	pins   cli.Pins
	output cli.Output

	cluster reach.Flags
}

// NewCommand returns the command doctor.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Report problems with conntrack and NAT on this node, and the commands that fix them",
		Long: `Checks conntrack, NAT rules, timeouts and devices in every network namespace of this
machine. Reports each problem with numbers, its effect on packets, and the command that
fixes it. Changes nothing without --fix; that raises limits, sets
nf_conntrack_tcp_be_liberal and deletes stale UDP entries, and nothing else. Needs root,
but no agent. An agent of this node adds findings about Services: endpoints without an
answer, refused clients, full tables. Findings are no failure: the exit code is 0 unless
--fail-on is given.

With --node or --all-nodes it asks other nodes' agents through the API server, with the
rights of a kubeconfig: each agent examines its own network namespace and its Services.
Nodes with the same finding are one line. The exit code is 1 if one of them does not answer.`,
		Example: `  spillway doctor
  spillway doctor --netns here --fix
  spillway doctor --all-nodes
  spillway doctor --fail-on critical --finding conntrack-table-full -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.NotEmpty(cmd.Flags(), "netns", "fail-on", "finding", "api-socket", "bpffs"); err != nil {
				return err
			}
			if err := c.validate(); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !c.cluster.Local() {
				return c.runNodes(ctx, cmd)
			}
			if err := c.cluster.Validate(cmd, false); err != nil {
				return err
			}
			if err := cli.NeedRoot("diagnose this node"); err != nil {
				return err
			}
			return c.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.BoolVar(&c.fix, "fix", false, "Apply safe fixes: raise limits, set nf_conntrack_tcp_be_liberal, delete stale UDP entries.")
	f.StringVar(&c.failOn, "fail-on", "", "Least `severity` of a finding that makes the exit code 1: critical, warning or info.")
	f.StringSliceVar(&c.netns, "netns", nil, "Network `namespaces` to check: names that 'spillway top' shows, process ids, or here "+
		"(default: all).")
	f.StringSliceVar(&c.only, "finding", nil, "Report and fix these `findings` only, by id (default: all).")
	f.DurationVar(&c.sample, "sample", time.Second, "Time to watch the counters, to detect current growth. 0: not at all.")
	c.socket.AddFlag(f)
	c.pins.AddFlag(f, "Directory of the agent's pins, to find pods with a mesh's sidecar and socket hooks.")
	c.output.AddFlag(cmd)
	c.cluster.AddNodes(f)
	c.cluster.Complete(cmd, &c.socket)
	cli.Choices(cmd, "fail-on", string(doctor.Critical), string(doctor.Warning), string(doctor.Info))
	cli.CompleteNamespaces(cmd, "netns")
	cli.Choices(cmd, "finding", findingIDs()...)
	return cmd
}

// findingIDs lists the ids of all findings.
func findingIDs() []string {
	var ids []string
	for _, k := range doctor.Kinds {
		ids = append(ids, k.ID)
	}
	return ids
}

func (c *config) validate() error {
	if err := c.output.Validate(); err != nil {
		return err
	}
	if c.failOn != "" && !slices.Contains(doctor.Severities, doctor.Severity(c.failOn)) {
		return cli.UsageErrorf("--fail-on %q: use critical, warning or info", c.failOn)
	}
	for _, id := range c.only {
		if known := findingIDs(); !slices.Contains(known, id) {
			return cli.UsageErrorf("--finding %q: unknown%s: use some of %s", id, cli.DidYouMean(id, known), strings.Join(known, ", "))
		}
	}
	if c.sample < 0 {
		return cli.UsageErrorf("--sample %v: must not be negative", c.sample)
	}
	return nil
}

func (c *config) run(ctx context.Context, out, stderr io.Writer) error {
	agent := make(chan fromAgent, 1)
	go func() { agent <- c.askAgent(ctx) }()
	hooks, closeHooks := hooksOf(c.pins.Dir())
	defer closeHooks()
	late := &lateProgress{w: stderr, began: time.Now()}
	node, err := doctor.Load(ctx, doctor.Config{Namespaces: c.namespaces, Sample: c.sample, Part: late.part, Uses: c.uses, Hooks: hooks})
	late.done()
	if err != nil {
		return fmt.Errorf("diagnose this node: %w", err)
	}
	findings := doctor.Examine(node, c.only...)
	added := <-agent
	findings = added.add(node, findings)
	if p := added.notExamined(node, c.only); p != nil {
		node.Problems = append(node.Problems, *p)
	}
	report := doctor.NewReport(node, findings, c.only...)
	if c.fix {
		report.Fixed = doctor.ApplyFixes(ctx, report.Findings)
	}
	if err := c.output.Print(out, report); err != nil {
		return err
	}
	if report.Namespaces == 0 {
		return errors.New("diagnose this node: no network namespace could be read: run it as root, in a container with CAP_SYS_ADMIN and " +
			"CAP_NET_ADMIN")
	}
	if len(report.Checks) == 0 {
		return fmt.Errorf("--finding %s: not examined: see NOT EXAMINED in the report", strings.Join(c.only, ","))
	}
	for _, f := range report.Fixed {
		if !f.Done {
			return errors.New("apply fixes: some failed: see FIXED in the report")
		}
	}
	if worst := report.Worst(); c.failOn != "" && worst != "" && worst.AtLeast(doctor.Severity(c.failOn)) {
		return fmt.Errorf("--fail-on %s: %s", c.failOn, report.Summary())
	}
	return nil
}

// namespaces returns those of --netns, or all.
func (c *config) namespaces() ([]conntrack.Namespace, error) {
	if len(c.netns) == 0 {
		return conntrack.Namespaces()
	}
	return cli.Namespaces(c.netns)
}

// lateProgress shows progress on a terminal if the examination takes long.
type lateProgress struct {
	w     io.Writer
	began time.Time
	shown *progress.Progress
}

const patience = 2 * time.Second

func (p *lateProgress) part(done, total int) {
	if p.shown == nil {
		if time.Since(p.began) < patience || !page.IsTerminal(p.w) {
			return
		}
		p.shown = progress.New(p.w)
		p.shown.Step("reading network namespaces")
	}
	p.shown.Part(done, total)
}

func (p *lateProgress) done() {
	if p.shown != nil {
		p.shown.Done()
	}
}
