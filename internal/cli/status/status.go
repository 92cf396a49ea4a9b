// Package status is the command that shows the state of a node's agent.
package status

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// NewCommand returns the command status.
func NewCommand() *cobra.Command {
	var socket nodeclient.Socket
	var cluster reach.Flags
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether agents serve, and what they lack",
		Long: `Shows the state of the agent: how far the kernel follows the cluster, which dataplanes
serve, how full their tables are, where programs are attached, all problems, and what
doctor finds in the agent. Problems and findings are no failure: the exit code is 0 if the
agent answers. Needs root.

With --node or --all-nodes it asks other nodes' agents through the API server, with the
rights of a kubeconfig. The exit code is 1 if one of them does not answer.`,
		Example: `  spillway status
  spillway status --node node2 -o json
  spillway status --all-nodes`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cli.NotEmpty(cmd.Flags(), "api-socket"); err != nil {
				return err
			}
			if err := output.Validate(); err != nil {
				return err
			}
			ctx, stop := cli.UntilSignal(cmd.Context())
			defer stop()
			if cluster.Several() {
				nodes, err := cluster.Chosen(cmd)
				if err != nil {
					return err
				}
				return runAll(ctx, cmd.OutOrStdout(), nodes, output)
			}
			agent, err := cluster.Dialer(cmd, &socket)
			if err != nil {
				return err
			}
			return run(ctx, cmd.OutOrStdout(), agent, output)
		},
	}
	socket.AddFlag(cmd.Flags())
	output.AddFlag(cmd)
	cluster.AddNodes(cmd.Flags())
	cluster.Complete(cmd, &socket)
	return cmd
}

func run(ctx context.Context, out io.Writer, agent nodeclient.Dialer, output cli.Output) error {
	ctx, cancel := context.WithTimeout(ctx, nodeclient.Timeout)
	defer cancel()
	resp, err := nodeclient.New(agent).Status(ctx, &nodev1alpha1.StatusRequest{})
	if err != nil {
		return nodeclient.Error("show status", agent, err)
	}
	return output.Print(out, result{resp, cli.Build().Version})
}

// result is the state of one agent.
type result struct {
	*nodev1alpha1.StatusResponse
	own string // version of this program
}

// MarshalJSON implements json.Marshaler.
func (r result) MarshalJSON() ([]byte, error) { return nodeclient.JSON(r.StatusResponse) }

// Write prints the state as text. An older agent leaves fields empty: their lines are left
// out.
func (r result) Write(w io.Writer) error {
	p := page.Of(w)
	if err := r.summary().Write(p); err != nil {
		return err
	}
	for _, t := range []*page.Table{r.tables(), r.hooks(p.Wide), r.features(p.Wide), r.problems(), r.findings(p.Wide)} {
		if t == nil {
			continue
		}
		if _, err := fmt.Fprintln(p); err != nil {
			return fmt.Errorf("write table: %w", err)
		}
		if err := t.Write(p); err != nil {
			return err
		}
	}
	end := page.NewTable()
	r.verdict(end)
	if note := nodeclient.NewerAgent(r.StatusResponse); note != "" {
		end.Foot("%s", note)
	}
	if _, err := fmt.Fprintln(p); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return end.Write(p)
}

// summary is the table of single facts.
func (r result) summary() *page.Table {
	t := page.NewTable(page.Column{}, page.Column{Least: 20})
	row := func(name, value string) {
		if value != "" {
			t.Row(name, value)
		}
	}
	row("Node", r.Node)
	row("Agent", r.agent())
	row("Kernel", r.Kernel)
	row("Mode", r.ProxyMode)
	if s := r.Sync; s != nil {
		row("Services", fmt.Sprintf("%d, with %d ports and %d endpoints", s.Services, s.Ports, s.Endpoints))
		row("Written", written(r.StatusResponse))
	}
	for _, d := range r.Dataplanes {
		row("Dataplane", dataplane(d))
	}
	if attached, of := r.attached(); of > 0 {
		row("Hooks", fmt.Sprintf("%d of %d attached", attached, of))
	}
	row("DSR", dsrEndpoints(r.DsrEndpoints))
	row("Egress", egress(r.Egress))
	row("Flow events", events(r.Events))
	return t
}

// shownRanges is how many ranges of pods, and how many addresses, the line of egress has.
const shownRanges = 4

// some joins the first shownRanges texts, and says how many more there are.
func some(texts []string) string {
	text := strings.Join(texts[:min(len(texts), shownRanges)], ", ")
	if more := len(texts) - shownRanges; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

// egress says which connections of pods to the outside get the node's address from the dataplane.
func egress(e *nodev1alpha1.Egress) string {
	switch {
	case e == nil:
		return ""
	case len(e.Sources) == 0 && e.Mode == "auto":
		return "auto: no rule masquerades pods of this node, so netfilter has them all"
	case len(e.Sources) == 0:
		return e.Mode + ": netfilter has all connections of pods"
	}
	text := fmt.Sprintf("%s: pods of %s, but to %d ranges", e.Mode, some(e.Sources), e.Kept)
	if len(e.Addresses) > 0 {
		text += "; as " + some(e.Addresses)
	}
	if e.Connections != nil {
		text += fmt.Sprintf("; %d connections", *e.Connections)
	}
	return text
}

func (r result) agent() string {
	var parts []string
	if r.Version != "" {
		parts = append(parts, r.Version)
	}
	if r.Commit != "" {
		parts = append(parts, "commit "+short(r.Commit))
	}
	if age := nodeclient.Age(r.Time, r.Started); age != "" {
		parts = append(parts, "runs for "+age)
	}
	if r.Version != "" && r.Version != r.own {
		parts = append(parts, "this program is "+r.own)
	}
	return strings.Join(parts, ", ")
}

// short returns the first digits of a commit, as git does.
func short(commit string) string {
	const digits = 12
	if len(commit) > digits && !strings.ContainsFunc(commit[:digits],
		func(r rune) bool { return !strings.ContainsRune("0123456789abcdef", r) }) {
		return commit[:digits]
	}
	return commit
}

// written says how far the kernel follows the cluster.
func written(r *nodev1alpha1.StatusResponse) string {
	last := nodeclient.Age(r.Time, r.Sync.LastSynced)
	switch {
	case !r.Sync.Listed:
		return "nothing yet: the agent waits for the list of all objects"
	case last == "":
		return "nothing yet: the first write is not done"
	case r.Sync.PendingSince != nil:
		return fmt.Sprintf("everything up to %s ago; a change waits for %s", last, nodeclient.Age(r.Time, r.Sync.PendingSince))
	}
	return fmt.Sprintf("everything, last %s ago", last)
}

func dataplane(d *nodev1alpha1.Dataplane) string {
	what := fmt.Sprintf("%s, serves %d ports", d.Name, d.Ports)
	if d.Error != "" {
		what += "; the last write failed: " + d.Error
	}
	return what
}

// dsrEndpoints says how packets tell the nodes of endpoints with DSR about their Services.
func dsrEndpoints(list []*nodev1alpha1.DSREndpoints) string {
	var parts []string
	for _, e := range list {
		part := fmt.Sprintf("%d by %s", e.Count, e.Encapsulation)
		switch {
		case e.Encapsulation == "none" || e.Encapsulation == "unknown":
			part = fmt.Sprintf("%d %s", e.Count, e.Encapsulation)
		case e.Mtu > 0:
			part += fmt.Sprintf(" (MTU %d)", e.Mtu)
		}
		parts = append(parts, part)
	}
	if parts == nil {
		return ""
	}
	return "endpoints on other nodes: " + strings.Join(parts, ", ")
}

func events(e *nodev1alpha1.Events) string {
	if e == nil || !e.Enabled {
		return ""
	}
	what := fmt.Sprintf("%d received", e.Received)
	if e.Lost > 0 {
		what += fmt.Sprintf(", %d lost", e.Lost)
	}
	if e.SampledOut > 0 {
		what += fmt.Sprintf(", %d left out by sampling", e.SampledOut)
	}
	return what
}

func (r result) attached() (n, of int) {
	for _, h := range r.Hooks {
		if h.Error == "" {
			n++
		}
	}
	return n, len(r.Hooks)
}

// tables is the table of the kernel's tables; nil if there are none.
func (r result) tables() *page.Table {
	if len(r.Tables) == 0 {
		return nil
	}
	t := page.NewTable(page.Text("TABLE").Shrinks(12), page.Number("USED"), page.Number("SIZE"), page.Number("USE"))
	for _, one := range r.Tables {
		t.Row(one.Name, one.Used, one.Size, share(one))
	}
	return t
}

func share(t *nodev1alpha1.Table) string {
	if t.Size == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", 100*float64(t.Used)/float64(t.Size))
}

// hooks is the table of hooks: of those that are not attached, and with -o wide of all.
func (r result) hooks(wide bool) *page.Table {
	t := page.NewTable(page.Text("HOOK").Shrinks(12), page.Text("PROGRAM"), page.Text("BY"), page.Text("STATE").Shrinks(16))
	rows := 0
	for _, h := range r.Hooks {
		state := "attached"
		if h.Error != "" {
			state = "not attached: " + h.Error
		} else if !wide {
			continue
		}
		t.Row(h.Place, h.Program, h.Mechanism, state)
		rows++
	}
	if rows == 0 {
		return nil
	}
	return t
}

// features is the table of features: of those that are missing, and with -o wide of all.
func (r result) features(wide bool) *page.Table {
	t := page.NewTable(page.Text("KERNEL FEATURE").Shrinks(12), page.Text("PRESENT"), page.Text("FOR").Shrinks(20))
	rows := 0
	for _, f := range r.Features {
		if f.Present && !wide {
			continue
		}
		present := "no"
		if f.Present {
			present = "yes"
		}
		t.Row(f.Name, present, f.Detail)
		rows++
	}
	if rows == 0 {
		return nil
	}
	return t
}

// problems is the table of Problems; nil if there are none.
func (r result) problems() *page.Table {
	if len(r.Problems) == 0 {
		return nil
	}
	t := page.NewTable(page.Text("PROBLEM").Shrinks(12), page.Text("").Shrinks(20))
	for _, p := range r.Problems {
		t.Row(p.Where, p.What)
	}
	if r.MoreProblems > 0 {
		t.Foot("and %d more problems: the agent's log has them", r.MoreProblems)
	}
	return t
}

// shownFindings is how many findings a page has without -o wide.
const shownFindings = 5

// findings is the table of findings: of faults, and with -o wide of all; nil if there are none.
func (r result) findings(wide bool) *page.Table {
	list := nodeclient.Faults(r.Findings)
	if wide {
		list = nodeclient.Findings(r.Findings)
	}
	if len(list) == 0 {
		return nil
	}
	t := page.NewTable(page.Text("FINDING").Shrinks(16), page.Text("SEVERITY"), page.Text("SINCE"), page.Text("").Shrinks(30))
	for i, f := range list {
		if i == shownFindings && !wide {
			t.Foot("and %d more", len(list)-i)
			break
		}
		since := "-"
		if !f.Since.IsZero() {
			since = nodeclient.Age(r.Time, timestamppb.New(f.Since))
		}
		t.Row(f.ID, f.Severity, since, f.Title)
	}
	t.Foot("spillway doctor shows evidence and fixes")
	return t
}

// verdict adds the last line: what an operator must know first.
func (r result) verdict(t *page.Table) {
	text := r.trouble()
	node := escape.Text(r.Node)
	switch {
	case r.Sync == nil:
		t.Verdict(page.Warning, "unknown", "the agent of %s does not tell what it serves", node)
	case !r.Sync.Listed || r.Sync.LastSynced == nil:
		t.Verdict(page.Bad, "not serving yet", "the kernel of %s has what an earlier agent wrote, or nothing", node)
	case text != "":
		t.Verdict(page.Warning, "serving", "%s, with %s", node, text)
	default:
		t.Verdict(page.Good, "serving", "%s, without a problem", node)
	}
}

// trouble counts problems, findings and hooks that are not attached; "": there are none.
func (r result) trouble() string {
	attached, of := r.attached()
	parts := []string{counted(len(r.Problems)+int(r.MoreProblems), "problem")}
	faults := nodeclient.Faults(r.Findings)
	found, critical := counted(len(faults), "finding"), 0
	for _, f := range faults {
		if f.Severity == doctor.Critical {
			critical++
		}
	}
	if critical > 0 {
		found += fmt.Sprintf(" (%d critical)", critical)
	}
	parts = append(parts, found)
	if attached < of {
		parts = append(parts, counted(of-attached, "hook")+" not attached")
	}
	parts = slices.DeleteFunc(parts, func(p string) bool { return p == "" })
	if len(parts) < 2 {
		return strings.Join(parts, "")
	}
	last := len(parts) - 1
	return strings.Join(parts[:last], ", ") + " and " + parts[last]
}

func counted(n int, what string) string {
	if n == 0 {
		return ""
	}
	return page.Counted(n, what)
}
