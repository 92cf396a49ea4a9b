package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/path"
)

// newBenchCommand makes `spillway bench`.
func newBenchCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure Spillway on a lab cluster on this machine",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageErrorf("no benchmark given: say which one, such as 'spillway bench path'")
		},
	}
	cmd.AddCommand(newBenchPathCommand(), newBenchSyncCommand(), newBenchSideCommand(), newBenchTFTPCommand(), newBenchAPICommand(), newBenchNotrackCommand())
	return cmd
}

// newBenchTFTPCommand makes `spillway bench tftp`: bench path with files.
func newBenchTFTPCommand() *cobra.Command {
	cmd := newBenchPathCommand()
	cmd.Use = "tftp"
	cmd.Short = "Compare files read by TFTP through a Service with the same server reached without one"
	cmd.Long = `Builds a cluster of two nodes on this machine and compares, in pairs that take
turns (A B B A), files of 5 KB read by TFTP in blocks of 512 bytes: NodePort with
a server on the node itself, and NodePort with a pod of another node reached by its
own address. Needs root. With the defaults it takes about two minutes; leave the
machine alone meanwhile.`
	_ = cmd.Flags().Set("tftp", "true")
	return cmd
}

func newBenchPathCommand() *cobra.Command {
	var cfg path.Config
	var modes []string
	var only, output string
	cmd := &cobra.Command{
		Use:   "path",
		Short: "Compare the way through a Service with the same server reached without one",
		Long: `Builds a cluster of two nodes on this machine and compares, in pairs that take
turns (A B B A), NodePort with a server on the node itself, and ClusterIP with
the pod's own address. Needs root and nginx. With the defaults it takes about
ten minutes; leave the machine alone meanwhile.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(output); err != nil {
				return err
			}
			if len(modes) != 1 {
				return usageErrorf("--modes %v: one mode at a time for now: use ebpf", modes)
			}
			cfg.Mode = modes[0]
			if only != "" {
				var err error
				if cfg.Only, err = regexp.Compile(only); err != nil {
					return usageErrorf("--only: %v", err)
				}
			}
			cfg.Progress = experiment.NewProgress(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, path.Run, func(r *path.Report) int { return len(r.Comparisons) })
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
	f.BoolVar(&cfg.TFTP, "tftp", false, "files read by TFTP instead of HTTP")
	_ = f.MarkHidden("tftp")
	f.StringSliceVar(&modes, "modes", []string{"ebpf"}, "dataplanes to measure")
	f.StringVarP(&output, "output", "o", "table", "table or json")
	return cmd
}

// measure runs a benchmark until a signal ends it, and prints what has been measured
// by then, of which rows tells how much there is.
func measure[C interface{ Validate() error }, R interface {
	comparable
	Write(io.Writer) error
}](cmd *cobra.Command, output string, cfg C, run func(context.Context, C) (R, error), rows func(R) int) error {
	if err := cfg.Validate(); err != nil {
		return usageErrorf("%v", err)
	}
	ctx, stop := untilSignal(cmd.Context())
	defer stop()
	report, err := run(ctx, cfg)
	if none := *new(R); report == none || rows(report) == 0 {
		return err
	}
	return errors.Join(err, printResult(cmd.OutOrStdout(), output, report))
}

// checkOutput refuses an output format that there is not.
func checkOutput(output string) error {
	if !slices.Contains([]string{"table", "json"}, output) {
		return usageErrorf("--output %q: not a format: use table or json", output)
	}
	return nil
}

// printResult writes a result as JSON, or as the table that it makes of itself.
func printResult(w io.Writer, output string, result interface{ Write(io.Writer) error }) error {
	if output != "json" {
		return result.Write(w)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(result); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}
