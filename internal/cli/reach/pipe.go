package reach

import (
	"fmt"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
)

// NewPipeCommand returns the hidden command api-pipe. It has no flags and no arguments: the
// chart's policy allows viewers this command line and no other.
func NewPipeCommand() *cobra.Command {
	return &cobra.Command{
		Use:    Command,
		Short:  "Connect standard input and output to the agent's API, for clients in other places",
		Hidden: true,
		Args:   cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			api := nodeclient.Unix(nodeclient.DefaultSocket)
			err := Pipe(ctx, api.Dial, cmd.InOrStdin(), cmd.OutOrStdout())
			if err != nil {
				return fmt.Errorf("connect to %s: %w", api.Where, err)
			}
			return nil
		},
	}
}
