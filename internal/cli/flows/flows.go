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
	var socket nodeclient.Socket
	var cluster reach.Flags
	var output cli.Output
	var want selection
	var follow bool
	var limit uint32
	var state string
	cmd := &cobra.Command{
		Use:   "flows",
		Short: "Show the flows of Services on this node, and what happens to them",
		Long: `Shows the flows in the kernel's table. With --since the events that the agent remembers,
and with --follow those to come: flows that are opened, answered and closed, and packets
that are refused or dropped. By default an agent reports flows only while a program
follows them, and refusals and drops always. Needs root, or with --node the rights of
a kubeconfig.`,
		Example: `  spillway flows -n shop --service web
  spillway flows --state new
  spillway flows -f --event refused,dropped
  spillway flows --since 5m --address 192.0.2.0/24 -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := want.validate(cmd.Flags()); err != nil {
				return err
			}
			if err := output.Validate(); err != nil {
				return err
			}
			if err := validateState(state, follow || want.since > 0); err != nil {
				return err
			}
			agent, err := cluster.Dialer(cmd, &socket)
			if err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if !follow && want.since == 0 {
				return list(ctx, cmd.OutOrStdout(), agent, &nodev1alpha1.ListFlowsRequest{Filter: want.filter(), Limit: limit, State: state}, output)
			}
			w := &watcher{out: newPrinter(cmd.OutOrStdout(), cmd.ErrOrStderr(), output), request: want.request(time.Now(), follow), follow: follow}
			return w.one(ctx, agent)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	want.addFlags(f)
	f.BoolVarP(&follow, "follow", "f", false, "Show events as they happen, until interrupted.")
	f.StringVar(&state, "state", "", "State of the flows of the table: "+strings.Join(states, ", ")+" (default: all).")
	f.Uint32Var(&limit, "limit", 0, "Maximum number of flows of the table (default: the agent's choice, 1000).")
	socket.AddFlag(f)
	output.AddFlag(cmd)
	cluster.AddNode(f)
	return cmd
}

// NewObserveCommand returns the command observe.
func NewObserveCommand() *cobra.Command {
	var cluster reach.Flags
	var output cli.Output
	var want selection
	cmd := &cobra.Command{
		Use:   "observe",
		Short: "Show what happens to flows of Services on all nodes of the cluster",
		Long: `Shows the events of all agents as they happen, until interrupted. The agents are reached
through the API server. An agent that ends or does not answer is named and tried again.
Events of several nodes may come in another order than they happened in.`,
		Example: `  spillway observe --event refused,dropped
  spillway observe -n shop --service web -o json`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := want.validate(cmd.Flags()); err != nil {
				return err
			}
			if err := output.Validate(); err != nil {
				return err
			}
			all, err := cluster.All(cmd)
			if err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			out := newPrinter(cmd.OutOrStdout(), cmd.ErrOrStderr(), output)
			out.nodes = true
			w := &watcher{out: out, request: want.request(time.Now(), true), follow: true}
			return w.all(ctx, all)
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	want.addFlags(f)
	output.AddFlag(cmd)
	cluster.AddCluster(f)
	return cmd
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
	return output.Print(out, table{resp, time.Now()})
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
