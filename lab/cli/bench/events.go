package bench

import (
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/path"
)

func newBenchEventsCommand() *cobra.Command {
	var cfg path.EventsConfig
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "events",
		Short: "Compare flow events and metrics by Service with the default flags",
		Long: `Builds five clusters of two nodes on this machine, each with an agent in mode ebpf on
node0. Two agents have the default flags, one has --service-metrics all, and two have
--flow-events all, with the default --flow-events-rate and without a limit. A program reads
the events of the last two. Measures every load on all clusters in turns, in every other
round in the reverse order: connections that stay open, and new connections, as fast as
possible and at fixed rates. Compares rates and CPU time, and counts lost events. Needs
root, nginx and nft. With the defaults it takes about ten minutes. Do not use the machine
meanwhile.`,
		Example: `  spillway-lab bench events
  spillway-lab bench events --rounds 6 --rates 20000 -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, path.Events, func(r *path.EventsReport) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "events", "Name of the lab clusters to create.")
	f.IntVar(&cfg.Rounds, "rounds", 10, "Measurements of each row on each side.")
	f.DurationVar(&cfg.Duration, "duration", 400*time.Millisecond, "Duration of one measurement.")
	f.DurationVar(&cfg.Warmup, "warmup", 100*time.Millisecond, "Warmup before each measurement.")
	f.IntVar(&cfg.Connections, "connections", 32, "Concurrent requests.")
	f.IntSliceVar(&cfg.Rates, "rates", []int{5000, 20000}, "New connections/s at which CPU is compared.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	return cmd
}
