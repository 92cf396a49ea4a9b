package bench

import (
	"context"
	"log/slog"
	"net/netip"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/lab/experiment/change"
	"spillway.dev/spillway/lab/experiment/harness"
)

func newBenchSyncCommand() *cobra.Command {
	var cfg change.Config
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "sync",
		Short: "Measure the cost of an endpoint change in clusters of different sizes",
		Long: `Runs each dataplane with increasing numbers of Services, of ten endpoints each. Measures
the first full sync, single changes, and the first packet of a connection. The modes
kube-proxy-nftables and kube-proxy-iptables measure kube-proxy (run "hack/peers
kube-proxy" first). With iptables, -legacy or -nft at the end of a mode selects the
variant. Needs root and nginx. Do not use the machine meanwhile.`,
		Example: `  spillway-lab bench sync
  spillway-lab bench sync --modes ebpf,kube-proxy-nftables --services 100,1000`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, change.Run, func(r *change.Report) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "sync", "Name of the lab clusters to create.")
	f.StringSliceVar(&cfg.Modes, "modes", []string{"ebpf", "nftables", "iptables"}, "Modes to measure: dataplanes, and kube-proxy's.")
	f.IntSliceVar(&cfg.Services, "services", []int{100, 1000, 5000, 10000, 50000}, "Numbers of Services.")
	f.IntVar(&cfg.Changes, "changes", 100, "Single changes for the percentiles.")
	f.IntVar(&cfg.Rounds, "rounds", 20, "Comparisons of first packets.")
	output.AddFlag(cmd)
	cli.Choices(cmd, "modes", change.Modes...)
	return cmd
}

// newBenchSideCommand returns the command of the process that `bench sync` starts on each
// node.
func newBenchSideCommand() *cobra.Command {
	var side change.Side
	var c agent.Config
	var pod string
	cmd := &cobra.Command{
		Use:    "sync-side",
		Short:  "Write a synthetic cluster to this node's kernel, and change it, for 'bench sync'",
		Hidden: true,
		Args:   cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if side.Pod, err = netip.ParseAddr(pod); err != nil {
				return cli.UsageErrorf("--pod %q: not an address", pod)
			}
			if err := c.Validate(); err != nil {
				return err
			}
			agent.SaveMemory() // as the agent does
			side.Node = c.NodeName
			log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			unregistered := func(prometheus.Collector) error { return nil }
			side.Open = func(ctx context.Context) (dataplane.Backend, error) {
				return proxymode.OpenOne(ctx, c.ProxyMode, c.Dataplanes(log), unregistered)
			}
			return side.Run(cmd.Context(), cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	c.AddFlags(f)
	f.StringVar(&pod, "pod", "", "Address of the pod that answers.")
	f.IntVar(&side.Services, "services", 10, "Number of Services.")
	f.IntVar(&side.Changes, "changes", 1, "Changes in each batch.")
	return cmd
}
