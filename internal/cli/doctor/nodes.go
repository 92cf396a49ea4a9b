package doctor

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// ofThisMachine are the flags that the agents of other nodes do not know.
var ofThisMachine = []string{"fix", "netns", "sample", "bpffs"}

// runNodes prints the findings of the agents of chosen nodes, or of all.
func (c *config) runNodes(ctx context.Context, cmd *cobra.Command) error {
	const does = "diagnose nodes"
	for _, name := range ofThisMachine {
		if f := cmd.Flags().Lookup(name); f != nil && f.Changed {
			return cli.UsageErrorf("--%s is for this machine: leave out --node and --all-nodes, or run the command on the node", name)
		}
	}
	nodes, err := c.cluster.Chosen(cmd)
	if err != nil {
		return err
	}
	answers, err := reach.Ask(ctx, nodes, does, cmd.ErrOrStderr(),
		func(ctx context.Context, d nodeclient.Dialer) (*nodev1alpha1.FindingsResponse, error) {
			return nodeclient.New(d).Findings(ctx, &nodev1alpha1.FindingsRequest{})
		})
	if err != nil {
		return err
	}
	r := merge(&answers, c.only)
	if err := c.output.Print(cmd.OutOrStdout(), r); err != nil {
		return err
	}
	if err := answers.Silent(does); err != nil {
		return err
	}
	if n := r.atLeast(c.failOn); n > 0 {
		return fmt.Errorf("--fail-on %s: %s", c.failOn, r.summary())
	}
	return nil
}

// nodesReport is the findings of several nodes. The keys are an interface for programs.
type nodesReport struct {
	Nodes    []string      `json:"nodes"`    // that answered
	Complete bool          `json:"complete"` // no node is missing because the user may not list them
	Findings []nodeFinding `json:"findings"`
	Problems []nodeProblem `json:"problems"` // parts that could not be read
}

// nodeFinding is a finding that nodes have alike.
type nodeFinding struct {
	ID            string   `json:"id"`
	Severity      string   `json:"severity"`
	Title         string   `json:"title"`
	Nodes         []string `json:"nodes"`
	Packets       string   `json:"packets"`
	Remedy        string   `json:"remedy"`
	Documentation string   `json:"documentation,omitempty"`
	identity      string
}

// identity is what findings of different nodes about the same thing have in common: their titles may
// have numbers. An earlier agent gives no object.
func identity(f *nodev1alpha1.Finding) string {
	o := f.Object
	if o == nil {
		return strings.Join([]string{f.Id, f.Title}, "\n")
	}
	return strings.Join([]string{f.Id, o.Kind, o.Namespace, o.Name, o.Port, o.Endpoint}, "\n")
}

type nodeProblem struct {
	What  string   `json:"what"`
	Nodes []string `json:"nodes"`
}

// rank sorts severities; those of a newer agent come last.
func rank(severity string) int {
	if i := slices.Index(doctor.Severities, doctor.Severity(severity)); i >= 0 {
		return i
	}
	return len(doctor.Severities)
}

// merge joins findings of one identity, the worst first.
func merge(answers *reach.Answers[*nodev1alpha1.FindingsResponse], only []string) *nodesReport {
	r := &nodesReport{Nodes: answers.Nodes(), Complete: answers.Complete, Findings: []nodeFinding{}, Problems: []nodeProblem{}}
	for _, one := range answers.List {
		for _, f := range one.Value.Findings {
			if len(only) > 0 && !slices.Contains(only, f.Id) {
				continue
			}
			i := slices.IndexFunc(r.Findings, func(known nodeFinding) bool { return known.identity == identity(f) })
			if i < 0 {
				i = len(r.Findings)
				r.Findings = append(r.Findings, nodeFinding{identity: identity(f), ID: f.Id, Severity: f.Severity, Title: f.Title,
					Packets: f.Detail, Remedy: f.Fix,
					Documentation: f.Documentation})
			}
			if nodes := &r.Findings[i].Nodes; !slices.Contains(*nodes, one.Agent.Node) {
				*nodes = append(*nodes, one.Agent.Node)
			}
		}
		for _, p := range one.Value.Problems {
			i := slices.IndexFunc(r.Problems, func(known nodeProblem) bool { return known.What == p.What })
			if i < 0 {
				i = len(r.Problems)
				r.Problems = append(r.Problems, nodeProblem{What: p.What})
			}
			r.Problems[i].Nodes = append(r.Problems[i].Nodes, one.Agent.Node)
		}
	}
	slices.SortStableFunc(r.Findings, func(a, b nodeFinding) int {
		return cmp.Or(cmp.Compare(rank(a.Severity), rank(b.Severity)), cmp.Compare(a.ID, b.ID))
	})
	return r
}

// atLeast counts the findings of a severity or a worse one; none for "".
func (r *nodesReport) atLeast(severity string) (n int) {
	for _, f := range r.Findings {
		if severity != "" && rank(f.Severity) <= rank(severity) {
			n++
		}
	}
	return n
}

func (r *nodesReport) summary() string {
	return page.Counted(len(r.Findings), "finding") + " on " + page.Counted(len(r.Nodes), "node")
}

// Write prints a line for each finding.
func (r *nodesReport) Write(w io.Writer) error {
	p := page.Of(w)
	t := page.NewTable(page.Text("SEVERITY"), page.Text("ID").Shrinks(12), page.Text("FINDING").Shrinks(24), page.Text("NODES").Shrinks(12),
		page.Text("REMEDY").OnlyWide())
	for _, f := range r.Findings {
		t.Row(f.Severity, f.ID, f.Title, reach.Names(f.Nodes, len(r.Nodes), p.Wide), f.Remedy)
	}
	for _, problem := range r.Problems {
		t.Foot("not examined on %s: %s", escape.Text(reach.Names(problem.Nodes, len(r.Nodes), p.Wide)), escape.Text(problem.What))
	}
	style, word := page.Good, "healthy"
	if len(r.Findings) > 0 {
		style, word = page.Warning, "found"
	}
	t.Verdict(style, word, "%s; 'spillway doctor' on a node also examines its other network namespaces", r.summary())
	return t.Write(w)
}
