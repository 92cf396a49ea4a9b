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
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "api",
		Short: "Measure the latency of changes from a real API server to the kernel",
		Long: `Starts a real kube-apiserver with thousands of Services, and gives each proxy in
turn a stream of endpoint changes. For some of them, a pod connects until it sees the
change. In the end, compares the endpoints in the kernel with those that were written.
Needs root, nginx, and the programs that hack/peers builds. Do not use the machine
meanwhile.`,
		Example: `  spillway-lab bench api
  spillway-lab bench api --services 1000 --rate 100 --duration 20s`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, stream.Run, func(r *stream.Report) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "api", "Name of the lab cluster to create.")
	f.StringSliceVar(&cfg.Proxies, "modes", []string{"ebpf", "kube-proxy-nftables"},
		"Proxies to measure, one after the other: ebpf, nftables, kube-proxy-nftables.")
	f.IntVar(&cfg.Services, "services", 5000, "Number of Services, of ten endpoints each.")
	f.IntVar(&cfg.Rate, "rate", 200, "Changes a second.")
	f.DurationVar(&cfg.Duration, "duration", time.Minute, "Duration of the stream.")
	f.IntVar(&cfg.Probes, "probes", 20, "Changes a second that a pod waits for.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	cli.Choices(cmd, "modes", stream.Proxies...)
	return cmd
}
