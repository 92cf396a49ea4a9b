package bench

import (
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/notrack"
)

func newBenchNotrackCommand() *cobra.Command {
	var cfg notrack.Config
	var only string
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "notrack",
		Short: "Compare short connections without a policy, with a tracked and with a do-not-track policy",
		Long: `Builds two small clusters on this machine, one with conntrack and an agent, one with
neither. Compares short connections to a real memcached in alternating pairs: CPU at a
fixed rate, and connections/s with a free and with a full conntrack table. The table is
filled with flows up to this machine's nf_conntrack_max, which is not changed. Needs root,
memcached, nft and conntrack. Do not use the machine meanwhile.`,
		Example: `  spillway-lab bench notrack
  spillway-lab bench notrack --proxy-mode ebpf --only CPU`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			if !slices.Contains(proxymode.Names(), cfg.Mode) {
				return cli.UsageErrorf("--proxy-mode %q: use one of %s", cfg.Mode, strings.Join(proxymode.Names(), ", "))
			}
			if only != "" {
				var err error
				if cfg.Only, err = regexp.Compile(only); err != nil {
					return cli.UsageErrorf("--only: %v", err)
				}
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, notrack.Run, func(r *notrack.Report) int { return len(r.Comparisons) + len(r.Ceilings) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "dnt", "Name of the lab clusters to create.")
	f.StringVar(&cfg.Mode, "proxy-mode", "nftables", "--proxy-mode of the agent.")
	f.IntVar(&cfg.Rounds, "rounds", 10, "Measurements of each side of a pair.")
	f.DurationVar(&cfg.Duration, "duration", time.Second, "Duration of one measurement. Half of it is added as warmup.")
	f.IntVar(&cfg.Connections, "connections", 64, "Concurrent connections.")
	f.Float64Var(&cfg.Rate, "rate", 4000, "Connections/s at which CPU is compared.")
	f.StringVar(&only, "only", "", "Regular expression that the \"NAME, FIGURE\" of a comparison must match, such as 'CPU' or 'ceiling'.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	cli.Choices(cmd, "proxy-mode", proxymode.Names()...)
	return cmd
}
