// Package trace is the command that explains a new connection through a Service.
package trace

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/trace"
	"spillway.dev/spillway/internal/facts/model"
)

// config is the command line of `spillway trace`.
type config struct {
	from, to, protocol string
	sourcePort         uint16
	noProbe, fail      bool
	timeout            time.Duration
	source             source
	socket             nodeclient.Socket
	pins               cli.Pins
	output             cli.Output
	cluster            reach.Flags
}

// mostTimeout bounds the probe.
const mostTimeout = time.Minute

// NewCommand returns the command trace.
func NewCommand() *cobra.Command {
	var c config
	cmd := &cobra.Command{
		Use:   "trace --from POD|ADDRESS --to SERVICE[:PORT]",
		Short: "Show what happens to a new connection, step by step, and try it",
		Long: `Shows the decision of this node's dataplane about a new connection: each step, the entry
that it read and what follows. Then it opens one real connection from the client, and
reports where that got to. Run it on the node of the client, or on the node at which an
outside client's packets arrive.

The eBPF programs decide themselves, on copies of the maps that they write: the steps
change nothing. The probe is a real connection, or one datagram. It runs in the network
namespace and the cgroup of the client, so only clients on this node can be probed.

POD is NAMESPACE/NAME of a pod of this node. SERVICE is ADDRESS:PORT, or
NAMESPACE/NAME[:PORT]. The agent of this node knows both by name, and so do --kubeconfig
and --manifests. The exit code is 0 whatever the decision is, or with --fail 1 if the
connection is refused or its probe fails. Needs root.

With --node it runs in the container of that node's agent, by exec through the API server.
That takes more than the rights of a viewer.`,
		Example: `  spillway trace --from 10.244.1.7 --to 10.96.0.10:53 --protocol udp
  spillway trace --from 203.0.113.9 --to 192.0.2.10:30080
  spillway trace --from shop/web-0 --to shop/cart
  spillway trace --from shop/web-0 --to shop/cart:http --fail`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if request := os.Getenv(trace.ChildVariable); request != "" {
				return trace.Child(request, cmd.OutOrStdout())
			}
			if err := c.check(cmd); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !c.cluster.Local() {
				return c.cluster.Run(ctx, cmd, c.output)
			}
			if err := cli.NeedRoot("trace a connection"); err != nil {
				return err
			}
			question, err := c.question(ctx)
			if err != nil {
				return err
			}
			report, err := trace.Trace(ctx, question)
			if err != nil {
				return fmt.Errorf("trace the connection: %w", err)
			}
			report.Service = c.serviceOf(ctx, &question)
			if err := c.output.Print(cmd.OutOrStdout(), report); err != nil {
				return err
			}
			if why := report.Failure(); c.fail && why != "" {
				return fmt.Errorf("--fail: %s", why)
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&c.from, "from", "", "Client: an `address`, or a pod of this node as NAMESPACE/NAME.")
	f.StringVar(&c.to, "to", "", "Server: `ADDRESS:PORT`, or a Service as NAMESPACE/NAME[:PORT].")
	f.StringVar(&c.protocol, "protocol", "tcp", "Protocol: tcp or udp.")
	f.Uint16Var(&c.sourcePort, "source-port", 0, "Source `port` of the client (default: a free one).")
	f.BoolVar(&c.noProbe, "no-probe", false, "Show the decision only, and open no connection.")
	f.DurationVar(&c.timeout, "timeout", 2*time.Second, "Time to wait for the answer to the probe, 1m at most.")
	f.BoolVar(&c.fail, "fail", false, "Exit with code 1 if the connection is refused, or if its probe fails.")
	c.socket.AddFlag(f)
	c.source.addFlags(f)
	c.pins.AddFlag(f, "Directory of the agent's pins.")
	c.output.AddFlag(cmd)
	c.cluster.AddOneNode(f, "Node to run on, that of the client, in its agent's container (default: this machine).")
	cli.Choices(cmd, "protocol", "tcp", "udp")
	c.cluster.Complete(cmd, &c.socket)
	cli.GroupFlags(f, "Connection", "from", "to", "protocol", "source-port")
	cli.GroupFlags(f, "Names", "manifests", "master")
	return cmd
}

func (c *config) check(cmd *cobra.Command) error {
	if err := c.output.Validate(); err != nil {
		return err
	}
	if err := cli.NotEmpty(cmd.Flags(), "manifests", "kubeconfig", "master", "api-socket"); err != nil {
		return err
	}
	c.source.kubeconfig = c.cluster.Kubeconfig()
	if c.cluster.Local() {
		if err := c.cluster.Validate(cmd, false); err != nil {
			return err
		}
	}
	switch {
	case c.from == "" || c.to == "":
		return cli.UsageErrorf("--from and --to are needed: see 'spillway trace --help'")
	case c.timeout <= 0 || c.timeout > mostTimeout:
		return cli.UsageErrorf("--timeout %v: use more than 0, and %v at most", c.timeout, mostTimeout)
	case !c.cluster.Local() && (c.source.manifests != "" || c.source.master != ""):
		return cli.UsageErrorf("--node: its agent looks up the names: omit --manifests and --master")
	case c.source.manifests != "" && (c.source.kubeconfig != "" || c.source.master != ""):
		return cli.UsageErrorf("--manifests replaces an API server: omit --kubeconfig and --master")
	}
	_, err := c.proto()
	return err
}

func (c *config) proto() (model.Protocol, error) {
	switch strings.ToLower(c.protocol) {
	case "tcp":
		return model.TCP, nil
	case "udp":
		return model.UDP, nil
	case "icmp":
		return 0, cli.UsageErrorf("--protocol icmp: only connections with ports are traced: use ping in the client's pod, " +
			"and look for its flow in 'spillway flows'")
	}
	return 0, cli.UsageErrorf("--protocol %q: use tcp or udp", c.protocol)
}

// question looks up the names of the command line.
func (c *config) question(ctx context.Context) (trace.Config, error) {
	q := trace.Config{BPFFS: c.pins.Dir(), SourcePort: c.sourcePort, Connect: !c.noProbe, Timeout: c.timeout}
	var err error
	if q.Protocol, err = c.proto(); err != nil {
		return q, err
	}
	r := resolver{ctx: ctx, source: &c.source, agent: c.socket.Dialer()}
	client, err := r.client(c.from)
	if err != nil {
		return q, err
	}
	if q.To, q.Port, err = r.server(c.to, q.Protocol, client); err != nil {
		return q, err
	}
	if q.From, err = ofFamily(client, c.from, q.To.Addr); err != nil {
		return q, err
	}
	return q, nil
}

// serviceOf returns the Service port that is served at the destination, by the agent, or the name that
// the command line has; "": none is known.
func (c *config) serviceOf(ctx context.Context, q *trace.Config) string {
	at := nodeclient.Address{Protocol: strings.ToLower(c.protocol), AddrPort: netip.AddrPortFrom(q.To.Addr, q.Port)}
	owners, _ := nodeclient.NewNames(c.socket.Dialer()).Of(ctx, []nodeclient.Address{at}) // trace needs no agent
	if owners[0].Service != "" || q.To.Name == "" {
		return owners[0].Service
	}
	return fmt.Sprintf("%s:%d", q.To.Name, q.Port)
}

// ofFamily chooses the client's address of the server's family.
func ofFamily(addrs []netip.Addr, name string, like netip.Addr) (trace.Peer, error) {
	for _, a := range addrs {
		if a.Is4() == like.Is4() {
			return trace.Peer{Name: name, Addr: a}, nil
		}
	}
	return trace.Peer{}, cli.UsageErrorf("--from %s: has no address of the family of %s", name, like)
}
