// Package soak holds the command spillway-lab soak.
package soak

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/soak"
)

// NewCommand returns the command soak.
func NewCommand() *cobra.Command {
	var cfg soak.Config
	var output cli.Output
	var replay string
	cmd := &cobra.Command{
		Use:   "soak",
		Short: "Change, restart and attack a cluster for hours, and count lost honest connections",
		Long: `Builds a cluster of three nodes on this machine. Honest clients outside, in pods and on
nodes ask through NodePorts, load balancer addresses and cluster IPs, over TCP, UDP and
TFTP, IPv4 and IPv6. Meanwhile random actions happen, one after the other: endpoints,
Services and policies change; agents are restarted, killed, suspended and upgraded; nodes
change their dataplane; the API server and links fail; a host and pods send forged packets.

A question without an answer, or a connection that breaks, is a loss. A loss that a
document allows is excused, and counted separately. The command fails if more than
--budget losses remain, or if an agent or its kernel state has grown beyond its bound.

A run of the same --seed has the same actions. Addresses of victims and the times of
packets differ. Needs root and nft. It uses less than a third of a CPU, so other programs
may run beside it.`,
		Example: `  spillway-lab soak
  spillway-lab soak --duration 20m --upgrade /tmp/former/spillway
  spillway-lab soak --replay report/soak --only mode,kill`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			if replay != "" {
				if err := repeat(cmd, replay, &cfg); err != nil {
					return err
				}
			}
			if err := cfg.Validate(); err != nil {
				return cli.UsageErrorf("%v", err)
			}
			cfg.Progress = cmd.ErrOrStderr()
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			report, err := soak.Run(ctx, cfg)
			if report == nil {
				return err
			}
			return errors.Join(err, output.Print(cmd.OutOrStdout(), report), report.Err())
		},
	}
	f := cmd.Flags()
	harness.NameFlag(f, &cfg.Name, "soak", "Name of the lab cluster to create.")
	f.DurationVar(&cfg.Duration, "duration", 4*time.Hour, "Duration of the actions.")
	f.IntVar(&cfg.Budget, "budget", 0, "Losses that a successful run may have.")
	f.Uint64Var(&cfg.Seed, "seed", 0, "Seed that chooses the actions. 0: a new one, which is printed.")
	f.IntVar(&cfg.Steps, "steps", 0, "Number of actions after which the run ends. 0: it ends after --duration.")
	f.StringSliceVar(&cfg.Only, "only", nil, "Actions to choose from: "+strings.Join(soak.Kinds(), ", ")+". Empty: all.")
	f.StringSliceVar(&cfg.Upgrades, "upgrade", nil,
		"Further spillway programs, such as that of the release before. The action upgrade changes between them. Empty: a copy of the same "+
			"program.")
	f.StringVar(&cfg.Mode, "proxy-mode", "ebpf", "Dataplane of all nodes at the start.")
	f.DurationVar(&cfg.Patience, "patience", 15*time.Second, "Time for an answer, after which a question is lost.")
	f.StringVarP(&cfg.Dir, "report", "d", "report/soak", "Directory for report.json, events.log and the logs of the agents.")
	f.StringVar(&replay, "replay", "", "Directory of an earlier report, whose seed, number of actions, --only and --proxy-mode are "+
		"repeated unless they are given.")
	harness.SpillwayFlag(f)
	output.AddFlag(cmd)
	cli.Choices(cmd, "only", soak.Kinds()...)
	cli.Choices(cmd, "proxy-mode", soak.Modes...)
	return cmd
}

// repeat takes over the configuration of an earlier run, except for flags that are given.
func repeat(cmd *cobra.Command, dir string, cfg *soak.Config) error {
	text, err := os.ReadFile(filepath.Join(dir, "report.json"))
	if err != nil {
		return fmt.Errorf("read the run to repeat: %w", err)
	}
	var former soak.Report
	if err := json.Unmarshal(text, &former); err != nil {
		return fmt.Errorf("read the run to repeat: %s/report.json: %w", dir, err)
	}
	changed := cmd.Flags().Changed
	if !changed("seed") {
		cfg.Seed = former.Seed
	}
	if !changed("steps") {
		cfg.Steps = former.Actions
	}
	if !changed("only") {
		cfg.Only = former.Only
	}
	if !changed("proxy-mode") {
		cfg.Mode = former.Mode
	}
	return nil
}
