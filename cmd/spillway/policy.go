package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/model"
	"spillway.dev/spillway/internal/policy"
	"spillway.dev/spillway/internal/source/kube"
	"spillway.dev/spillway/internal/source/manifest"
)

func newPolicyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Look at do-not-track policies",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			return usageErrorf("nothing to do: say what, such as 'spillway policy explain'")
		},
	}
	cmd.AddCommand(newPolicyExplainCommand())
	return cmd
}

// question is what explain is asked.
type question struct {
	from, to             string
	port                 int
	protocol             string
	manifests            string
	kubeconfig, master   string
	proxyMode, proxyName string
	output               string
}

func newPolicyExplainCommand() *cobra.Command {
	var q question
	cmd := &cobra.Command{
		Use:   "explain --from WHO --to WHO --port PORT",
		Short: "Say which do-not-track policy decides about a flow, and why",
		Long: `Says which DoNotTrackPolicy decides about a flow, whether it is tracked, and why.
WHO is a pod as NAMESPACE/NAME, a node as node/NAME, or an address. It is worked out
from the objects, as every node's agent does; no agent is asked.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutput(q.output); err != nil {
				return err
			}
			ctx, stop := untilSignal(cmd.Context())
			defer stop()
			e, err := q.explain(ctx)
			if err != nil {
				return err
			}
			return printResult(cmd.OutOrStdout(), q.output, e)
		},
	}
	f := cmd.Flags()
	f.StringVar(&q.from, "from", "", "who asks: NAMESPACE/POD, node/NAME or an address")
	f.StringVar(&q.to, "to", "", "who is asked: NAMESPACE/POD, node/NAME or an address")
	f.IntVar(&q.port, "port", 0, "the port that is asked")
	f.StringVar(&q.protocol, "protocol", "TCP", "TCP, UDP or SCTP")
	f.StringVar(&q.manifests, "manifests", "", "directory of Kubernetes YAML, instead of an API server")
	f.StringVar(&q.kubeconfig, "kubeconfig", "", "how the API server is reached")
	f.StringVar(&q.master, "master", "", "address of the API server")
	f.StringVar(&q.proxyMode, "proxy-mode", "ebpf", "that of the agents: where netfilter translates, Services refuse policies")
	f.StringVar(&q.proxyName, "service-proxy-name", "", "that of the agents")
	f.StringVarP(&q.output, "output", "o", "table", "table or json")
	return cmd
}

// explanation is what explain answers.
type explanation struct {
	From      string         `json:"from"`
	To        string         `json:"to"`
	Port      uint16         `json:"port"`
	Protocol  string         `json:"protocol"`
	Outcome   string         `json:"outcome"`
	Decisions []nodeDecision `json:"decisions"`
	Notes     []string       `json:"notes,omitempty"`    // where it depends on the port that is asked from
	Problems  []string       `json:"problems,omitempty"` // of policies
}

// nodeDecision is what one node decides.
type nodeDecision struct {
	Node string `json:"node"`
	Side string `json:"side"`
	policy.Decision
}

func (q question) explain(ctx context.Context) (*explanation, error) {
	protocols := map[string]model.Protocol{"TCP": model.TCP, "UDP": model.UDP, "SCTP": model.SCTP}
	proto, known := protocols[strings.ToUpper(q.protocol)]
	switch {
	case q.from == "" || q.to == "":
		return nil, usageErrorf("--from and --to are needed: a pod as NAMESPACE/NAME, node/NAME, or an address")
	case q.port < 1 || q.port > 65535:
		return nil, usageErrorf("--port %d: give a port from 1 to 65535", q.port)
	case !known:
		return nil, usageErrorf("--protocol %q: use TCP, UDP or SCTP", q.protocol)
	case !slices.Contains(proxyModeNames(), q.proxyMode):
		return nil, usageErrorf("--proxy-mode %q: use one of %s", q.proxyMode, strings.Join(proxyModeNames(), ", "))
	}
	world, problems, err := q.world(ctx)
	if err != nil {
		return nil, err
	}
	from, err := addressesOf(world, "--from", q.from)
	if err != nil {
		return nil, err
	}
	to, err := addressesOf(world, "--to", q.to)
	if err != nil {
		return nil, err
	}
	e := &explanation{From: q.from, To: q.to, Port: uint16(q.port), Protocol: proto.String(), Decisions: []nodeDecision{}}
	for _, p := range problems {
		if strings.Contains(p.Where, "DoNotTrackPolicy") {
			e.Problems = append(e.Problems, p.String())
		}
	}
	for _, f := range from {
		for _, t := range to {
			if f.Is4() != t.Is4() {
				continue
			}
			outcome := q.decide(world, e, f, t, proto)
			if e.Outcome != "" && e.Outcome != outcome {
				outcome = differs
			}
			e.Outcome = outcome
		}
	}
	if e.Outcome == "" {
		return nil, usageErrorf("--from %s and --to %s have no address of one family", q.from, q.to)
	}
	return e, nil
}

// differs is the outcome where it is not the same for all addresses of who asks and
// who is asked.
const differs = "differs by address"

// decide asks each node what it makes of a flow between two addresses, and says what
// becomes of it.
func (q question) decide(world model.Delta, e *explanation, from, to netip.Addr, proto model.Protocol) string {
	var all []policy.Decision
	for _, name := range slices.Sorted(maps.Keys(world.Nodes)) {
		t := policy.New(policy.Config{NodeName: name, ProxyName: q.proxyName, Netfilter: modeUsesNetfilter(q.proxyMode)})
		t.SetNodeAddrs(world.Nodes[name].Addresses)
		t.Apply(world)
		e.Notes = append(e.Notes, t.Sources(from, to, proto)...)
		for _, d := range t.Explain(from, to, proto, uint16(q.port)) {
			e.Decisions = append(e.Decisions, nodeDecision{name, d.Side.String(), d})
			all = append(all, d)
		}
	}
	return policy.Outcome(all)
}

func (q question) world(ctx context.Context) (model.Delta, []model.Problem, error) {
	if q.manifests != "" {
		return manifest.Load(q.manifests)
	}
	access := kube.Access{Kubeconfig: q.kubeconfig, Master: q.master, UserAgent: "spillway/" + version}
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

// addressesOf finds the addresses of who is meant.
func addressesOf(world model.Delta, flag, who string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(who); err == nil {
		if s := serviceAt(world, a.Unmap()); s != nil {
			return nil, usageErrorf("%s %s: that is an address of Service %s, and policies are about what is behind it: ask for a pod of it", flag, who, s.Name)
		}
		return []netip.Addr{a.Unmap()}, nil
	}
	namespace, name, ok := strings.Cut(who, "/")
	if !ok {
		return nil, usageErrorf("%s %s: neither an address nor NAMESPACE/POD nor node/NAME", flag, who)
	}
	if namespace == "node" && world.Nodes[name] != nil {
		return world.Nodes[name].Addresses, nil
	}
	p := world.Pods[model.Name{Namespace: namespace, Name: name}]
	if p == nil || len(p.IPs) == 0 {
		return nil, fmt.Errorf("%s %s: there is no such pod with an address of its own", flag, who)
	}
	return p.IPs, nil
}

// serviceAt finds the Service that has an address, nil if none has.
func serviceAt(world model.Delta, a netip.Addr) *model.Service {
	for _, s := range world.Services {
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			for _, of := range list {
				if of.Unmap() == a {
					return s
				}
			}
		}
	}
	return nil
}

// Write prints the explanation for people.
func (e *explanation) Write(w io.Writer) error {
	fmt.Fprintf(w, "%s to %s, %s port %d: %s\n", e.From, e.To, e.Protocol, e.Port, e.Outcome)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if len(e.Decisions) > 0 {
		fmt.Fprintln(tw, "NODE\tSIDE\tPOLICY\tRULE\tDECISION\tWHY")
	} else {
		fmt.Fprintln(tw, "no policy selects either")
	}
	for _, d := range e.Decisions {
		fmt.Fprintf(tw, "%s\t%s of %s\t%s\t%s\t%s\t%s\n", d.Node, d.Side, d.Addr, d.Policy, d.Field, d.Outcome, d.Why)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	for _, n := range e.Notes {
		fmt.Fprintln(w, "but", n)
	}
	for _, p := range e.Problems {
		fmt.Fprintln(w, "problem:", p)
	}
	return nil
}
