// Package donottrack is the command that explains decisions of do-not-track policies.
package donottrack

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/diagnosis/donottrackflow"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/proxymode"
)

// NewCommand returns the command donottrack.
func NewCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "donottrack",
		Short: "Explain do-not-track policies",
		Example: `  spillway donottrack explain --from shop/web-0 --to shop/cache-0 --port 11211
  spillway donottrack explain --from shop/web-0 --to 10.96.0.10 --port 80`,
	}
	cmd.AddCommand(newExplainCommand())
	return cli.Group(cmd)
}

// config is the command line of `spillway donottrack explain`.
type config struct {
	donottrackflow.Question
	manifests          string
	kubeconfig, master string
	output             cli.Output
}

func newExplainCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "explain --from PEER --to PEER --port PORT",
		Short: "Show which do-not-track policy decides about a flow, and why",
		Long: `Shows which DoNotTrackPolicy decides about a flow, whether it is tracked, and why.
PEER is a pod as NAMESPACE/NAME, a node as node/NAME, or an address. A Service's cluster
IP stands for its endpoints. The command computes the decision from the objects, as every
node's agent does. It does not query an agent. Objects that could not be read are listed
as problems: they might have changed the decision. With --manifests, the exit code is 1
if an object could not be read.

Other outcomes:

  not judged              a policy may decide, but --to is another address of a
                          Service, or a node's port that leads to endpoints:
                          give an endpoint
  differs by address      the addresses of a peer have different outcomes
  differs by source port  requests from some source ports count as replies`,
		Example: `  spillway donottrack explain --from shop/web-0 --to shop/cache-0 --port 11211
  spillway donottrack explain --from node/a --to dns/a --port 53 --protocol UDP
  spillway donottrack explain --manifests . --from 10.0.0.9 --to web/a --port 80`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.output.Validate(); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			e, err := c.explain(ctx)
			if err != nil {
				return err
			}
			if err := c.output.Print(cmd.OutOrStdout(), e); err != nil {
				return err
			}
			// In a cluster, objects of others are no fault of this command line.
			if len(e.Problems) > 0 && c.manifests != "" {
				return errors.New("explain the flow: objects could not be read: fix the problems that the result lists")
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.From, "from", "", "Client, a `peer`: NAMESPACE/POD, node/NAME or an address.")
	f.StringVar(&c.To, "to", "", "Server, a `peer`: NAMESPACE/POD, node/NAME or an address.")
	f.IntVar(&c.Port, "port", 0, "Port of the server.")
	f.IntVar(&c.SourcePort, "source-port", 0, "Source port of the client (default: any of 32768 to 60999).")
	f.StringVar(&c.Protocol, "protocol", "TCP", "Protocol: TCP, UDP or SCTP.")
	f.StringVar(&c.manifests, "manifests", "", "Directory of Kubernetes YAML, instead of an API server.")
	f.StringVar(&c.kubeconfig, "kubeconfig", "", "Kubeconfig file for the API server (default: the Pod's own account).")
	f.StringVar(&c.master, "master", "", "Address of the API server, instead of the kubeconfig's.")
	f.StringVar(&c.ProxyMode, "proxy-mode", "ebpf", "--proxy-mode of the agents. Flows that netfilter translates are tracked.")
	f.StringVar(&c.ProxyName, "service-proxy-name", "", "--service-proxy-name of the agents.")
	c.output.AddFlag(cmd)
	cli.Choices(cmd, "protocol", "TCP", "UDP", "SCTP")
	cli.Choices(cmd, "proxy-mode", proxymode.Names()...)
	cli.GroupFlags(f, "Flow", "from", "to", "port", "source-port", "protocol")
	cli.GroupFlags(f, "Source", "manifests", "kubeconfig", "master")
	cli.GroupFlags(f, "Agent", "proxy-mode", "service-proxy-name")
	return cmd
}

func (c *config) explain(ctx context.Context) (*donottrackflow.Explanation, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	store, problems, err := c.load(ctx)
	if err != nil {
		return nil, err
	}
	e, err := donottrackflow.Explain(c.Question, store, problems)
	var wrong *donottrackflow.QuestionError
	if errors.As(err, &wrong) {
		return nil, cli.UsageErrorf("%v", err)
	}
	return e, err
}

func (c *config) check() error {
	if err := c.Question.Validate(); err != nil {
		return cli.UsageErrorf("%v", err)
	}
	if c.manifests != "" && (c.kubeconfig != "" || c.master != "") {
		return cli.UsageErrorf("--manifests replaces an API server: omit --kubeconfig and --master")
	}
	return nil
}

// load reads the objects that decisions depend on.
func (c *config) load(ctx context.Context) (model.Delta, []model.Problem, error) {
	if c.manifests != "" {
		return manifest.Load(c.manifests)
	}
	access := kube.Access{Kubeconfig: c.kubeconfig, Master: c.master, UserAgent: cli.UserAgent()}
	client, _, err := kube.Connect(access)
	if err != nil {
		return model.Delta{}, nil, err
	}
	policies, err := kube.ConnectDynamic(access)
	if err != nil {
		return model.Delta{}, nil, err
	}
	return kube.Snapshot(ctx, client, policies)
}
