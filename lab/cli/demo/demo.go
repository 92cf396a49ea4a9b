// Package demo is the command that shows Spillway on a cluster of two nodes.
package demo

import (
	"errors"
	"io/fs"
	"os"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/examples"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/demo"
	"spillway.dev/spillway/lab/experiment/harness"
)

// NewCommand returns the command demo.
func NewCommand() *cobra.Command {
	cfg := demo.Config{Mode: "ebpf"}
	var manifests string
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show Spillway on a cluster of two nodes on this machine",
		Long: `Builds a cluster of two nodes and an outside client from network namespaces,
starts an agent on each node with the manifests of examples/demo, and sends requests
to every Service address. Compares the path through a Service with direct access to the
same server on the node itself ("metal"). Takes one to two minutes, needs root and nginx,
and removes everything at the end.`,
		Example: `  spillway-lab demo
  spillway-lab demo --rounds 2 -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			if err := cfg.Validate(); err != nil {
				return cli.UsageErrorf("%v", err)
			}
			var err error
			if cfg.Manifests, err = fs.Sub(examples.Demo, "demo"); err != nil {
				return err
			}
			if manifests != "" {
				cfg.Manifests = os.DirFS(manifests)
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			report, err := demo.Run(ctx, cfg)
			if report == nil || len(report.Visits) == 0 {
				return err
			}
			return errors.Join(err, output.Print(cmd.OutOrStdout(), report))
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "demo", "Name of the lab cluster to create.")
	f.StringVar(&manifests, "manifests", "", "Directory to serve instead of the built-in manifests.")
	f.IntVar(&cfg.Rounds, "rounds", 4, "Measurements of each path.")
	f.DurationVar(&cfg.Duration, "duration", time.Second, "Duration of one measurement.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	return cmd
}
