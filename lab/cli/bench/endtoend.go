package bench

import (
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/path"
)

func newBenchEndToEndCommand() *cobra.Command {
	var cfg path.EndToEndConfig
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "end-to-end",
		Short: "Compare nodes that have an agent with the same nodes without one",
		Long: `Builds two clusters of two nodes on this machine: pods reach other nodes by routes in
one, over VXLAN in the other. Starts agents on all nodes, measures, removes them with
"spillway agent --cleanup", and measures again, in alternating order (A B B A). Compares
traffic that is no Service's, NodePort with a server on the node itself, and Services with
a pod of the other node. Each row has an A/A control. Needs root, nginx and nft. With the
defaults it takes about five minutes. Do not use the machine meanwhile.`,
		Example: `  spillway-lab bench end-to-end
  spillway-lab bench end-to-end --rounds 6 -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, path.EndToEnd, func(r *path.EndToEndReport) int { return len(r.Comparisons) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "e2e", "Name of the lab clusters to create.")
	f.StringVar(&cfg.Mode, "proxy-mode", "ebpf", "--proxy-mode of the agents. Targets apply to ebpf.")
	f.IntVar(&cfg.Rounds, "rounds", 16, "Measurements of each side of a row.")
	f.DurationVar(&cfg.Duration, "duration", 400*time.Millisecond, "Duration of one measurement.")
	f.DurationVar(&cfg.Warmup, "warmup", 100*time.Millisecond, "Warmup before each measurement.")
	f.IntVar(&cfg.Connections, "connections", 32, "Concurrent requests.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	cli.Choices(cmd, "proxy-mode", path.Modes...)
	return cmd
}
