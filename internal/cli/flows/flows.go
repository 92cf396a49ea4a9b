// Package flows has the commands that show flows: of a node, and of the whole cluster.
package flows

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/escape"
)

// NewCommand returns the command flows.
func NewCommand() *cobra.Command {
	c := &config{}
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "Show the flows of Services, and what happens to them",
		Long: `Shows the flows in the kernel's table. With --since the events that the agent remembers,
and with --follow those to come: flows that are opened, answered and closed, and packets
that are refused or dropped. By default an agent reports flows only while a program
follows them, and refusals and drops always. Needs root.

With --node or --all-nodes it asks other nodes' agents through the API server, with the
rights of a kubeconfig. The exit code is 1 if one of them does not answer. With --follow,
such an agent is named and tried again instead. Events of several nodes may come in
another order than they happened in.`,
		Example: `  spillway flows -n shop --service web
  spillway flows --state new --all-nodes
  spillway flows -f --event refused,dropped
  spillway flows --since 5m --address 192.0.2.0/24 -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd) },
	}
	c.addFlags(cmd, false)
	c.cluster.AddNodes(cmd.Flags())
	c.cluster.Complete(cmd, &c.socket)
	return cmd
}

// NewObserveCommand returns the command observe: flows with other defaults.
func NewObserveCommand() *cobra.Command {
	c := &config{}
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to flows of Services on all nodes: flows --all-nodes --follow",
		Long: `Is another name of 'spillway flows --all-nodes --follow': shows the events of all agents as
they happen, until interrupted. --node chooses nodes, and --follow=false ends after what
the agents have. The help of 'spillway flows' says more.`,
		Example: `  spillway observe --event refused,dropped
  spillway observe -n shop --service web -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.run(cmd) },
	}
	c.addFlags(cmd, true)
	c.cluster.AddAllNodes(cmd.Flags())
	c.cluster.Complete(cmd, &c.socket)
	return cmd
}

// config is the command line.
type config struct {
	socket  nodeclient.Socket
	cluster reach.Flags
	output  cli.Output
	want    selection
	follow  bool
	limit   uint32
	state   string
}

func (c *config) addFlags(cmd *cobra.Command, follow bool) {
	f := cmd.Flags()
	f.SortFlags = false
	c.want.addFlags(f)
	f.BoolVarP(&c.follow, "follow", "f", follow, "Show events as they happen, until interrupted.")
	f.StringVar(&c.state, "state", "", "State of the flows of the table: "+strings.Join(states, ", ")+" (default: all).")
	f.Uint32Var(&c.limit, "limit", 0, "Maximum number of flows of a node's table (default: the agent's choice, 1000).")
	c.socket.AddFlag(f)
	c.output.AddFlag(cmd)
	cli.Choices(cmd, "event", kinds...)
	cli.Choices(cmd, "state", states...)
}

func (c *config) run(cmd *cobra.Command) error {
	if err := c.want.validate(cmd.Flags()); err != nil {
		return err
	}
	if err := c.output.Validate(); err != nil {
		return err
	}
	events := c.follow || c.want.since > 0
	if err := validateState(c.state, events); err != nil {
		return err
	}
	ctx, stop := cli.UntilSignal(cmd.Context())
	defer stop()
	request := &nodev1alpha1.ListFlowsRequest{Filter: c.want.filter(), Limit: c.limit, State: c.state}
	out := newPrinter(cmd.OutOrStdout(), cmd.ErrOrStderr(), c.output)
	w := &watcher{out: out, request: c.want.request(time.Now(), c.follow), follow: c.follow}
	if !c.cluster.Several() {
		agent, err := c.cluster.Dialer(cmd, &c.socket)
		if err != nil {
			return err
		}
		if !events {
			return list(ctx, cmd.OutOrStdout(), agent, request, c.output)
		}
		return w.one(ctx, agent)
	}
	nodes, err := c.cluster.Chosen(cmd)
	if err != nil {
		return err
	}
	w.out.nodes = true
	switch {
	case !events:
		return listAll(ctx, cmd.OutOrStdout(), cmd.ErrOrStderr(), nodes, request, c.output)
	case !c.follow:
		return w.remembered(ctx, nodes)
	}
	return w.all(ctx, nodes)
}

// states are the states of flows in the table. Before its answer a flow is new.
var states = []string{"new", "syn-recv", "established", "closing", "last-ack", "closed"}

func validateState(state string, events bool) error {
	switch {
	case state == "":
	case !slices.Contains(states, state):
		return cli.UsageErrorf("--state %q: not a state: use %s", state, strings.Join(states, ", "))
	case events:
		return cli.UsageErrorf("--state %s: events have no state: leave out --since and --follow, or use --event", state)
	}
	return nil
}

// selection is what the flags select.
type selection struct {
	namespace, service, pod, address string
	port                             uint16
	events                           []string
	since                            time.Duration
}

// kinds are the names of events, in their order.
var kinds = []string{"opened", "answered", "closed", "refused", "dropped"}

func (s *selection) addFlags(f *pflag.FlagSet) {
	f.StringVarP(&s.namespace, "namespace", "n", "", "Namespace of the Services (default: all).")
	f.StringVar(&s.service, "service", "", "Name of the Service, or NAMESPACE/NAME.")
	f.StringVar(&s.pod, "pod", "", "Pod that is the client or the endpoint, as NAMESPACE/NAME.")
	f.StringVar(&s.address, "address", "", "Address or prefix of the client or of the endpoint.")
	f.Uint16Var(&s.port, "port", 0, "Port of the Service or of the endpoint.")
	f.StringSliceVar(&s.events, "event", nil, "Events to show: "+strings.Join(kinds, ", ")+" (default: all).")
	f.DurationVar(&s.since, "since", 0, "Begin with events that are so old, as far as the agent remembers them.")
}

func (s *selection) validate(flags *pflag.FlagSet) error {
	if err := cli.NotEmpty(flags, "namespace", "service", "pod", "address", "event"); err != nil {
		return err
	}
	if namespace, name, both := strings.Cut(s.service, "/"); both {
		if s.namespace != "" && s.namespace != namespace {
			return cli.UsageErrorf("--service %q: the namespace is not that of --namespace %q: give one of them", s.service, s.namespace)
		}
		s.namespace, s.service = namespace, name
	}
	if _, err := netip.ParsePrefix(s.address); err != nil && s.address != "" {
		if _, err := netip.ParseAddr(s.address); err != nil {
			return cli.UsageErrorf("--address %q: not an address or prefix, such as 192.0.2.1 or 10.0.0.0/8", s.address)
		}
	}
	for _, e := range s.events {
		if !slices.Contains(kinds, e) {
			return cli.UsageErrorf("--event %q: not an event: use %s", e, strings.Join(kinds, ", "))
		}
	}
	if s.since < 0 {
		return cli.UsageErrorf("--since %v: must not be negative", s.since)
	}
	return nil
}

func (s *selection) filter() *nodev1alpha1.FlowFilter {
	f := &nodev1alpha1.FlowFilter{Namespace: s.namespace, Service: s.service, Pod: s.pod, Address: s.address, Port: uint32(s.port)}
	for _, e := range s.events {
		f.Kinds = append(f.Kinds, nodev1alpha1.EventKind(slices.Index(kinds, e)+1))
	}
	return f
}

func (s *selection) request(now time.Time, follow bool) *nodev1alpha1.WatchFlowsRequest {
	r := &nodev1alpha1.WatchFlowsRequest{Filter: s.filter(), Remembered: !follow}
	if s.since > 0 {
		r.Since = timestamppb.New(now.Add(-s.since))
	}
	return r
}

// list prints the flows of the kernel's table.
func list(ctx context.Context, out io.Writer, agent nodeclient.Dialer, req *nodev1alpha1.ListFlowsRequest, output cli.Output) error {
	ctx, cancel := context.WithTimeout(ctx, nodeclient.Timeout)
	defer cancel()
	resp, err := nodeclient.New(agent).ListFlows(ctx, req)
	if err != nil {
		return nodeclient.Error("list flows", agent, err)
	}
	return output.Print(out, table{ListFlowsResponse: resp, now: time.Now()})
}

// listAll prints the flows of several nodes' tables, node by node.
func listAll(ctx context.Context, out, stderr io.Writer, nodes *reach.Nodes, req *nodev1alpha1.ListFlowsRequest, output cli.Output) error {
	const does = "list flows"
	ask := func(ctx context.Context, d nodeclient.Dialer) (*nodev1alpha1.ListFlowsResponse, error) {
		return nodeclient.New(d).ListFlows(ctx, req)
	}
	answers, err := reach.Ask(ctx, nodes, does, stderr, ask)
	if err != nil {
		return err
	}
	t := table{ListFlowsResponse: &nodev1alpha1.ListFlowsResponse{}, now: time.Now(), nodes: true}
	for _, r := range answers.List {
		for _, f := range r.Value.Flows {
			f.Node = r.Agent.Node // the API server's name, also of an older agent
			t.Flows = append(t.Flows, f)
		}
		t.More = t.More || r.Value.More
	}
	if err := output.Print(out, t); err != nil {
		return err
	}
	return answers.Silent(does)
}

// modeHint says what the agent does not report to a program that follows events, or that reads those
// that the agent remembers; "" if it reports everything.
func modeHint(e *nodev1alpha1.Events, follow bool) string {
	switch mode := e.GetMode(); mode {
	case "all":
		return ""
	case "on-demand":
		if follow {
			return ""
		}
		return "the agent remembers flows only of times when a program followed them: use --follow, or give the agent --flow-events all"
	case "refused":
		return "the agent reports only refused and dropped packets: give it --flow-events on-demand or all to see flows too"
	case "off", "":
		return "the agent reports no events: give it --flow-events on-demand or all"
	default:
		return "the agent reports events by --flow-events " + escape.Text(mode) + ", which this program does not know"
	}
}

// does says what failed, in errors.
const does = "watch flows"

func lostText(node string, err *reach.Error) string {
	if err == nil {
		return fmt.Sprintf("node %s: the agent has ended; it is tried again", escape.Text(node))
	}
	return fmt.Sprintf("node %s: %s; it is tried again", escape.Text(node), err)
}
