// Package bench holds the benchmarks of spillway-lab.
package bench

import (
	"context"
	"errors"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/experiment/path"
)

// NewCommand returns the command bench.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure Spillway on a lab cluster on this machine",
		Example: `  spillway-lab bench path
  spillway-lab bench sync --services 100,1000 -o json`,
	}
	cmd.AddCommand(newBenchPathCommand(), newBenchSyncCommand(), newBenchSideCommand(), newBenchTFTPCommand(), newBenchEndToEndCommand(),
		newBenchEventsCommand(), newBenchDesignsCommand(), newBenchAPICommand(), newBenchAPIServerCommand(),
		newBenchNotrackCommand(), newBenchFloodCommand())
	return cli.Group(cmd)
}

// newBenchTFTPCommand makes `spillway-lab bench tftp`: bench path with files.
func newBenchTFTPCommand() *cobra.Command {
	var cfg path.Config
	cmd := pathCommand(&cfg, func() error { return nil })
	cmd.Use = "tftp"
	cmd.Short = "Compare TFTP transfers through a Service with direct access to the same server"
	cmd.Long = `Builds a cluster of two nodes on this machine. Compares, in alternating pairs
(A B B A), TFTP reads of 5 KB in blocks of 512 bytes:
  NodePort with a server on the node itself
  the same, with the node's conntrack table filled by other flows
  NodePort against the own address of a pod on another node
The table is filled up to this machine's nf_conntrack_max, which is not changed. Spillway's
dataplanes and kube-proxy (built by "hack/peers kube-proxy", with a helper rule added) each have a
cluster of their own. Needs root, nft, iptables and conntrack. With the defaults it takes
about six minutes. Do not use the machine meanwhile.`
	cmd.Flags().StringSliceVar(&cfg.Files, "modes", []string{"ebpf", "nftables", path.KubeProxy},
		"Proxies to measure, of "+strings.Join(path.Proxies, ", ")+".")
	cmd.Example = "  spillway-lab bench tftp\n  spillway-lab bench tftp --modes ebpf --only full"
	cli.Choices(cmd, "modes", path.Proxies...)
	return cmd
}

func newBenchPathCommand() *cobra.Command {
	var cfg path.Config
	var modes []string
	cmd := pathCommand(&cfg, func() error {
		if len(modes) != 1 {
			return cli.UsageErrorf("--modes %v: only one mode at a time: use ebpf", modes)
		}
		cfg.Mode = modes[0]
		return nil
	})
	cmd.Use = "path"
	cmd.Short = "Compare the path through a Service with direct access to the same server"
	cmd.Long = `Builds a cluster of two nodes on this machine. Compares, in alternating pairs
(A B B A), NodePort with a server on the node itself, and ClusterIP with the pod's own
address. Needs root and nginx. With the defaults it takes about ten minutes. Do not use
the machine meanwhile.`
	cmd.Flags().StringSliceVar(&modes, "modes", []string{"ebpf"}, "Dataplane to measure.")
	cmd.Example = "  spillway-lab bench path\n  spillway-lab bench path --only half -o json"
	cli.Choices(cmd, "modes", path.Modes...)
	return cmd
}

// pathCommand returns either command without its help text. complete runs after the flags
// were parsed.
func pathCommand(cfg *path.Config, complete func() error) *cobra.Command {
	var only string
	var output cli.Output
	cmd := &cobra.Command{
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			if err := complete(); err != nil {
				return err
			}
			if only != "" {
				var err error
				if cfg.Only, err = regexp.Compile(only); err != nil {
					return cli.UsageErrorf("--only: %v", err)
				}
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, *cfg, path.Run, func(r *path.Report) int { return len(r.Comparisons) })
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "bench", "Name of the lab cluster to create.")
	f.IntVar(&cfg.Rounds, "rounds", 30, "Measurements of each side of a pair.")
	f.DurationVar(&cfg.Duration, "duration", 400*time.Millisecond,
		"Duration of one measurement. Latency takes twice as long and twice the rounds.")
	f.DurationVar(&cfg.Warmup, "warmup", 100*time.Millisecond, "Warmup before each measurement.")
	f.IntVar(&cfg.Connections, "connections", 32, "Concurrent requests.")
	f.StringVar(&only, "only", "", "Regular expression that the \"NAME, LOAD\" of a comparison must match, such as 'half load'.")
	f.BoolVar(&cfg.Untracked, "no-conntrack", false, "Disable conntrack on the nodes, for metal as well.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	return cmd
}

// measure runs a benchmark until a signal ends it, and prints the results so far. rows
// returns their number.
func measure[C interface{ Validate() error }, R interface {
	comparable
	Write(io.Writer) error
}](cmd *cobra.Command, output cli.Output, cfg C, run func(context.Context, C) (R, error), rows func(R) int) error {
	if err := cfg.Validate(); err != nil {
		return cli.UsageErrorf("%v", err)
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	report, err := run(ctx, cfg)
	if none := *new(R); report == none || rows(report) == 0 {
		return err
	}
	return errors.Join(err, output.Print(cmd.OutOrStdout(), report))
}
