package bench

import (
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/flood"
	"spillway.dev/spillway/lab/experiment/harness"
)

func newBenchFloodCommand() *cobra.Command {
	var cfg flood.Config
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "flood",
		Short: "Measure new connections to a NodePort during a flood of SYNs from forged sources",
		Long: `Builds a cluster of two nodes on this machine for each mode. A host on the LAN sends
SYNs from forged sources to a NodePort, and honest clients open connections to the same
NodePort: with the endpoint on the receiving node, and on the other one. Reports the
share of new connections with a first answer within a second. Modes that begin with
kube-proxy need "hack/peers kube-proxy". Needs root, nginx and nft. Do not use the machine
meanwhile.`,
		Example: `  spillway-lab bench flood
  spillway-lab bench flood --modes ebpf --rate 0`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, flood.Run, func(r *flood.Report) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "flood", "Name of the lab clusters to create.")
	f.StringSliceVar(&cfg.Modes, "modes", []string{"ebpf", "kube-proxy-nftables"}, "Modes to measure, of "+strings.Join(flood.Modes, ", ")+".")
	f.IntVar(&cfg.Rate, "rate", 100_000, "SYNs a second. 0: as many as the machine sends.")
	f.DurationVar(&cfg.Duration, "duration", 10*time.Second, "Duration of a flood, and of the measurement without one before it.")
	f.IntVar(&cfg.Clients, "clients", 16, "Honest clients that connect concurrently.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	cli.Choices(cmd, "modes", flood.Modes...)
	return cmd
}
