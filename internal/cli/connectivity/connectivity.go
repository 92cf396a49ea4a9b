// Package connectivity is the command that tests the Services of a live cluster.
package connectivity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/cluster"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/connectivity"
)

// NewCommand returns the command connectivity.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "connectivity",
		Short: "Test the Services of a cluster with real traffic",
		Long: `Tests the Services of a cluster with real traffic. 'spillway connectivity test' deploys
clients and servers, prints a table, and removes them.`,
		Example: `  spillway connectivity test
  spillway connectivity test --nodes 5 -o json`,
	}
	cmd.AddCommand(newTestCommand(), newServeCommand(), newAskCommand())
	return cli.Group(cmd)
}

// config is the command line of `spillway connectivity test`.
type config struct {
	cluster.Access
	connectivity.Config
	agentNamespace string
	output         cli.Output
}

func newTestCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "test",
		Short: "Deploy clients and servers, ask through Services of every kind, and clean up",
		Long: `Deploys small Pods on some nodes: a server, a client, and a client on the host network.
Clients ask the servers over TCP and UDP through Services of every kind, and directly.
Prints a row for each kind. The exit code is 1 if a check fails.

The Pods run the agents' image, in a namespace spillway-test-… of their own. The command
removes it at the end, also after Ctrl-C. A second Ctrl-C ends at once and leaves it.`,
		Example: `  spillway connectivity test
  spillway connectivity test --context staging --node worker-1,worker-2
  spillway connectivity test -o json > connectivity.json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.output.Validate(); err != nil {
				return err
			}
			if err := cli.NotEmpty(cmd.Flags(), "node", "image", "agent-namespace"); err != nil {
				return err
			}
			switch {
			case c.MaxNodes < 1 || c.MaxNodes > connectivity.MostNodes:
				return cli.UsageErrorf("--nodes %d: use 1 to %d", c.MaxNodes, connectivity.MostNodes)
			case len(c.Nodes) > connectivity.MostNodes:
				return cli.UsageErrorf("--node: %d names: at most %d", len(c.Nodes), connectivity.MostNodes)
			case c.Timeout <= 0:
				return cli.UsageErrorf("--timeout %v: must be positive", c.Timeout)
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			return c.run(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&c.MaxNodes, "nodes", 3, fmt.Sprintf("Number of nodes to test, at most %d: the first ready ones by name.",
		connectivity.MostNodes))
	f.StringSliceVar(&c.Nodes, "node", nil, "Nodes to test, by their `names`, instead of --nodes.")
	f.BoolVar(&c.HostNetwork, "host-network", true, "Also start clients on the nodes' own network. The namespace then allows privileged Pods.")
	f.StringVar(&c.Image, "image", "", "Image of the Pods, which has spillway as its entry point (default: that of the agents' DaemonSet).")
	f.DurationVar(&c.Timeout, "timeout", 5*time.Minute, "Time after which missing results count as failed.")
	f.BoolVar(&c.Keep, "keep", false, "Leave the namespace with its Pods and Services.")
	c.output.AddFlag(cmd)
	c.AddFlags(cmd)
	reach.AddNamespace(f, &c.agentNamespace)
	return cmd
}

// connect returns the client of the API server; tests replace it.
var connect = func(a *cluster.Access) (kubernetes.Interface, error) { return a.Connect() }

func (c *config) run(ctx context.Context, out, stderr io.Writer) error {
	var err error
	if c.Client, err = connect(&c.Access); err != nil {
		return err
	}
	if c.Image == "" {
		if c.Image, c.Pull, err = reach.Image(ctx, c.Client, c.agentNamespace); err != nil {
			return fmt.Errorf("find the agents' image: %w; or set --image", err)
		}
	}
	shown := progress.New(stderr)
	c.Step = func(format string, args ...any) { shown.Step("spillway: "+format, args...) }
	c.Part = shown.Part
	report, err := connectivity.Run(ctx, c.Config)
	shown.Done()
	if report != nil {
		if printed := c.output.Print(out, report); printed != nil {
			return errors.Join(printed, err)
		}
		if err == nil && report.Failed > 0 {
			err = fmt.Errorf("test connectivity: %d of %d checks failed: see the table", report.Failed, report.Checks)
		}
	}
	return err
}

// newServeCommand returns the command of a server's Pod.
func newServeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "serve NAME", Hidden: true, Short: "Answer with a name, in a Pod of the test", Args: cli.Arguments("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if err := connectivity.Serve(args[0]); err != nil {
				return err
			}
			<-ctx.Done()
			return nil
		},
	}
}

// newAskCommand returns the command of a client's Pod.
func newAskCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ask PLAN", Hidden: true, Short: "Ask the questions of a plan, in a Pod of the test", Args: cli.Arguments("PLAN"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			var plan connectivity.Plan
			if err := json.Unmarshal([]byte(args[0]), &plan); err != nil {
				return fmt.Errorf("read plan: %w", err)
			}
			return connectivity.RunClient(ctx, plan, cmd.OutOrStdout())
		},
	}
}
