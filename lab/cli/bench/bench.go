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
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return cli.UsageErrorf("no benchmark given: say which one, such as 'spillway-lab bench path'")
		},
	}
	cmd.AddCommand(newBenchPathCommand(), newBenchSyncCommand(), newBenchSideCommand(), newBenchTFTPCommand(), newBenchAPICommand(), newBenchNotrackCommand(), newBenchFloodCommand())
	return cmd
}

// newBenchTFTPCommand makes `spillway-lab bench tftp`: bench path with files.
func newBenchTFTPCommand() *cobra.Command {
	var cfg path.Config
	cmd := pathCommand(&cfg, func() error { return nil })
	cmd.Use = "tftp"
	cmd.Short = "Compare files read by TFTP through a Service with the same server reached without one"
	cmd.Long = `Builds a cluster of two nodes on this machine and compares, in pairs that take
turns (A B B A), files of 5 KB read by TFTP in blocks of 512 bytes: NodePort with
a server on the node itself, with room in the node's conntrack table and with a table
that flows of others have filled up to this machine's nf_conntrack_max (which stays as
it is), and NodePort with a pod of another node reached by its own address. Beside
Spillway's dataplanes, on clusters of their own: kube-proxy (which "make peers" builds)
with a helper rule made by hand. Needs root, nft, iptables and conntrack. With the
defaults it takes about six minutes; leave the machine alone meanwhile.`
	cmd.Flags().StringSliceVar(&cfg.Files, "modes", []string{"ebpf", "nftables", path.KubeProxy}, "what to measure, of "+strings.Join(path.Proxies, ", "))
	return cmd
}

func newBenchPathCommand() *cobra.Command {
	var cfg path.Config
	var modes []string
	cmd := pathCommand(&cfg, func() error {
		if len(modes) != 1 {
			return cli.UsageErrorf("--modes %v: one mode at a time for now: use ebpf", modes)
		}
		cfg.Mode = modes[0]
		return nil
	})
	cmd.Use = "path"
	cmd.Short = "Compare the way through a Service with the same server reached without one"
	cmd.Long = `Builds a cluster of two nodes on this machine and compares, in pairs that take
turns (A B B A), NodePort with a server on the node itself, and ClusterIP with
the pod's own address. Needs root and nginx. With the defaults it takes about
ten minutes; leave the machine alone meanwhile.`
	cmd.Flags().StringSliceVar(&modes, "modes", []string{"ebpf"}, "dataplanes to measure")
	return cmd
}

// pathCommand returns either command without its help text. complete runs after the flags
// were parsed.
func pathCommand(cfg *path.Config, complete func() error) *cobra.Command {
	var only, output string
	cmd := &cobra.Command{
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.CheckOutput(output); err != nil {
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
	f.StringVar(&cfg.Name, "name", "bench", "name of the lab cluster that is made")
	f.IntVar(&cfg.Rounds, "rounds", 30, "measurements of each side of a pair")
	f.DurationVar(&cfg.Duration, "duration", 400*time.Millisecond, "length of one measurement; latency takes twice as long and twice the rounds")
	f.DurationVar(&cfg.Warmup, "warmup", 100*time.Millisecond, "time before each measurement that does not count")
	f.IntVar(&cfg.Connections, "connections", 32, "requests under way at once")
	f.StringVar(&only, "only", "", "measure only comparisons whose \"NAME, LOAD\" matches this regular expression, such as 'half load'")
	f.BoolVar(&cfg.Untracked, "no-conntrack", false, "keep conntrack off on the nodes, for metal as well")
	harness.SpillwayFlag(f)
	f.StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

// measure runs a benchmark until a signal ends it, and prints the results so far. rows
// returns their number.
func measure[C interface{ Validate() error }, R interface {
	comparable
	Write(io.Writer) error
}](cmd *cobra.Command, output string, cfg C, run func(context.Context, C) (R, error), rows func(R) int) error {
	if err := cfg.Validate(); err != nil {
		return cli.UsageErrorf("%v", err)
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	report, err := run(ctx, cfg)
	if none := *new(R); report == none || rows(report) == 0 {
		return err
	}
	return errors.Join(err, cli.PrintResult(cmd.OutOrStdout(), output, report))
}
