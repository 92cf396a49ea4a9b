package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/facts/model"
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
	port, sourcePort     int
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
WHO is a pod as NAMESPACE/NAME, a node as node/NAME, or an address; a Service's
cluster IP stands for its endpoints. It is worked out from the objects, as every
node's agent does; no agent is asked.

Another address of a Service, or a node's port that leads to others, is "not judged"
if a policy may have a say: ask for an endpoint. Where addresses fare differently the
outcome is "differs by address"; where requests from some source ports count as
answers, it is "differs by source port".`,
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
	f.IntVar(&q.sourcePort, "source-port", 0, "the port that it is asked from (default: any of 32768 to 60999)")
	f.StringVar(&q.protocol, "protocol", "TCP", "TCP, UDP or SCTP")
	f.StringVar(&q.manifests, "manifests", "", "directory of Kubernetes YAML, instead of an API server")
	f.StringVar(&q.kubeconfig, "kubeconfig", "", "how the API server is reached")
	f.StringVar(&q.master, "master", "", "address of the API server")
	f.StringVar(&q.proxyMode, "proxy-mode", "ebpf", "that of the agents: what netfilter translates is tracked")
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
	Outcome   string         `json:"outcome"` // of all flows, or differs
	Flows     []flowOutcome  `json:"flows"`   // one for each pair of addresses
	Decisions []nodeDecision `json:"decisions"`
	Notes     []string       `json:"notes,omitempty"`    // what was assumed
	Problems  []string       `json:"problems,omitempty"` // of what it was worked out from
}

// flowOutcome is what becomes of connections between two addresses.
type flowOutcome struct {
	From    netip.Addr     `json:"from"`
	To      netip.AddrPort `json:"to"`
	Outcome string         `json:"outcome"`
}

// nodeDecision is what one node decides.
type nodeDecision struct {
	Node string `json:"node"`
	Side string `json:"side"`
	policy.Decision
}

// differs is the outcome where it is not the same for all addresses of who asks and
// who is asked.
const differs = "differs by address"

// notJudged is the outcome where a Service or a CNI leads from who is asked to others,
// of whom policies may say something.
const notJudged = "not judged"

var flowProtocols = map[string]model.Protocol{"TCP": model.TCP, "UDP": model.UDP, "SCTP": model.SCTP}

func (q question) check() error {
	_, known := flowProtocols[strings.ToUpper(q.protocol)]
	switch {
	case q.from == "" || q.to == "":
		return usageErrorf("--from and --to are needed: a pod as NAMESPACE/NAME, node/NAME, or an address")
	case q.port < 1 || q.port > 65535:
		return usageErrorf("--port %d: give a port from 1 to 65535", q.port)
	case q.sourcePort < 0 || q.sourcePort > 65535:
		return usageErrorf("--source-port %d: give a port from 1 to 65535", q.sourcePort)
	case !known:
		return usageErrorf("--protocol %q: use TCP, UDP or SCTP", q.protocol)
	case !slices.Contains(proxyModeNames(), q.proxyMode):
		return usageErrorf("--proxy-mode %q: use one of %s", q.proxyMode, strings.Join(proxyModeNames(), ", "))
	case q.manifests != "" && (q.kubeconfig != "" || q.master != ""):
		return usageErrorf("--manifests takes the place of an API server: leave --kubeconfig and --master out")
	}
	return nil
}

func (q question) explain(ctx context.Context) (*explanation, error) {
	if err := q.check(); err != nil {
		return nil, err
	}
	world, problems, err := q.world(ctx)
	if err != nil {
		return nil, err
	}
	w := newFlowWorld(q, world, problems)
	flows, err := w.flows()
	if err != nil {
		return nil, err
	}
	e := &explanation{
		From: q.from, To: q.to, Port: uint16(q.port), Protocol: w.proto.String(),
		Decisions: []nodeDecision{}, Problems: w.problems,
	}
	for _, f := range flows {
		one := flowOutcome{f.From, netip.AddrPortFrom(f.To, f.Port), w.decide(e, f)}
		e.Flows = append(e.Flows, one)
		if e.Outcome != "" && e.Outcome != one.Outcome {
			e.Outcome = differs
		} else {
			e.Outcome = one.Outcome
		}
	}
	w.note(e)
	w.hint(e)
	e.Notes = w.notes
	return e, nil
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

// shownProblems is how many problems are printed; JSON has all.
const shownProblems = 20

// Write prints the explanation for people.
func (e *explanation) Write(w io.Writer) error {
	fmt.Fprintf(w, "%s to %s, %s port %d: %s\n", e.From, e.To, e.Protocol, e.Port, e.Outcome)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if e.Outcome == differs {
		fmt.Fprintln(tw, "FROM\tTO\tOUTCOME")
		for _, f := range e.Flows {
			fmt.Fprintf(tw, "%s\t%s\t%s\n", f.From, f.To, f.Outcome)
		}
		tw.Flush()
	}
	if len(e.Decisions) > 0 {
		fmt.Fprintln(tw, "NODE\tSIDE\tPOLICY\tRULE\tDECISION\tWHY")
	}
	for _, d := range e.Decisions {
		side := fmt.Sprintf("%s of %s", d.Side, d.Addr)
		if d.SourcePorts != "" {
			side += ", from port " + d.SourcePorts
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", d.Node, side, d.Policy, d.Field, d.Outcome, d.Why)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	for _, n := range e.Notes {
		fmt.Fprintln(w, n)
	}
	for i, p := range e.Problems {
		if i == shownProblems {
			fmt.Fprintf(w, "and %d more problems (-o json)\n", len(e.Problems)-i)
			break
		}
		fmt.Fprintln(w, "problem:", p)
	}
	return nil
}
