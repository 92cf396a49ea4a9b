// Package doctor is the command that diagnoses a node.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/node/conntrack"
)

// config is the command line of `spillway doctor`.
type config struct {
	fix    bool
	failOn string
	netns  []string
	sample time.Duration
	output string
}

// NewCommand returns the command doctor.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what is wrong with conntrack and NAT on this node, and what mends it",
		Long: `Looks at conntrack, NAT rules, time-outs and devices in every network namespace
of this machine, and says what is wrong, in numbers, what it means for packets,
and the command that mends it. It changes nothing without --fix, which raises
limits and deletes stale UDP entries, and nothing else. It needs root, and no
agent. Findings are no failure: the exit code is 0 unless --fail-on is given.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.NotEmpty(cmd.Flags(), "netns", "fail-on"); err != nil {
				return err
			}
			if err := c.validate(); err != nil {
				return err
			}
			if err := cli.NeedRoot("look at this node"); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			return c.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.BoolVar(&c.fix, "fix", false, "apply what is safe: raise limits, delete stale UDP entries")
	f.StringVar(&c.failOn, "fail-on", "", "exit with 1 if there is a finding as bad as this: critical, warning or info")
	f.StringSliceVar(&c.netns, "netns", nil, "look only at these network namespaces: a name as `spillway top` shows it, a process id, or here")
	f.DurationVar(&c.sample, "sample", time.Second, "how long to watch the counters, to tell what grows now; 0: not at all")
	f.StringVarP(&c.output, "output", "o", "table", "table or json")
	return cmd
}

func (c *config) validate() error {
	if err := cli.CheckOutput(c.output); err != nil {
		return err
	}
	if c.failOn != "" && !slices.Contains(doctor.Severities, doctor.Severity(c.failOn)) {
		return cli.UsageErrorf("--fail-on %q: use critical, warning or info", c.failOn)
	}
	if c.sample < 0 {
		return cli.UsageErrorf("--sample %v: must not be negative", c.sample)
	}
	return nil
}

func (c *config) run(ctx context.Context, out, stderr io.Writer) error {
	late := &lateProgress{w: stderr, began: time.Now()}
	node, err := doctor.Load(ctx, doctor.Config{Namespaces: c.namespaces, Sample: c.sample, Part: late.part})
	late.done()
	if err != nil {
		return fmt.Errorf("look at this node: %w", err)
	}
	report := doctor.NewReport(node, doctor.Examine(node))
	if c.fix {
		report.Fixed = doctor.ApplyFixes(ctx, report.Findings)
	}
	if err := cli.PrintResult(out, c.output, report); err != nil {
		return err
	}
	if report.Namespaces == 0 {
		return errors.New("no network namespace could be looked at: run it as root, in a container with CAP_SYS_ADMIN and CAP_NET_ADMIN")
	}
	for _, f := range report.Fixed {
		if !f.Done {
			return errors.New("not every fix could be applied; the report says which")
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
		if time.Since(p.began) < patience || !progress.IsTerminal(p.w) {
			return
		}
		p.shown = progress.New(p.w)
		p.shown.Step("looking at network namespaces")
	}
	p.shown.Part(done, total)
}

func (p *lateProgress) done() {
	if p.shown != nil {
		p.shown.Done()
	}
}
