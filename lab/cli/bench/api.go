package bench

import (
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/stream"
)

func newBenchAPICommand() *cobra.Command {
	var cfg stream.Config
	var output string
	cmd := &cobra.Command{
		Use:   "api",
		Short: "Measure how long changes take from a real API server to the kernel",
		Long: `Starts a real kube-apiserver with thousands of Services, and gives each proxy in
turn a stream of changes of endpoints. Some of them are waited for from a pod, by
connecting until the change is met. In the end the endpoints that the kernel holds
are compared with those that were written. Needs root, nginx, and what hack/peers
builds; leave the machine alone meanwhile.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.CheckOutput(output); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, stream.Run, func(r *stream.Report) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&cfg.Name, "name", "api", "name of the lab cluster that is made")
	f.StringSliceVar(&cfg.Proxies, "modes", []string{"ebpf", "kube-proxy-nftables"}, "proxies to measure, one after the other: ebpf, nftables, kube-proxy-nftables")
	f.IntVar(&cfg.Services, "services", 5000, "number of Services, of ten endpoints each")
	f.IntVar(&cfg.Rate, "rate", 200, "changes a second")
	f.DurationVar(&cfg.Duration, "duration", time.Minute, "length of the stream")
	f.IntVar(&cfg.Probes, "probes", 20, "changes a second that are waited for")
	harness.SpillwayFlag(f)
	f.StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}
