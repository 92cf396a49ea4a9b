// Package chart is the command for the chart's containers that do not run the agent. It
// takes the place of a shell's commands: the image has no shell.
package chart

import (
	"fmt"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/node/kernel"
)

// NewCommand returns the command chart, which help does not list.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:    "chart",
		Short:  "Steps of the Helm chart's containers",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return cli.UsageErrorf("no step given: use mount-bpffs or wait")
		},
	}
	cmd.AddCommand(
		&cobra.Command{
			Use:   "mount-bpffs",
			Short: "Mount /sys/fs/bpf unless it is mounted",
			Args:  cobra.NoArgs,
			RunE:  func(*cobra.Command, []string) error { return kernel.EnsureBPFFS(kernel.DefaultBPFFS) },
		},
		&cobra.Command{
			Use:   "wait",
			Short: "Wait for the end of the Pod after a cleanup",
			Args:  cobra.NoArgs,
			RunE: func(cmd *cobra.Command, _ []string) error {
				ctx, stop := cli.UntilSignal(cmd.Context())
				defer stop()
				fmt.Fprintln(cmd.OutOrStdout(), "the node is clean: waiting until the Pod is deleted")
				<-ctx.Done()
				return nil
			},
		},
	)
	return cmd
}
