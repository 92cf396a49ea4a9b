package status

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/page"
)

// runAll prints the states of the nodes.
func runAll(ctx context.Context, out io.Writer, chosen *reach.Nodes, output cli.Output) error {
	agents, complete, err := chosen.Agents(ctx)
	if err != nil {
		return fmt.Errorf("show status: %w", err)
	}
	all := nodes{complete: complete, Nodes: []*node{}}
	for _, r := range reach.Each(ctx, chosen.Cluster, agents, ask) {
		n := &node{Node: r.Agent.Node}
		if r.Err != nil {
			n.Error, n.Reason = r.Err.Error(), r.Err.Reason
		} else {
			n.Status, n.clock = &result{r.Value.status, cli.Build().Version}, r.Value.clock
		}
		all.Nodes = append(all.Nodes, n)
	}
	all.compareClocks()
	if err := output.Print(out, all); err != nil {
		return err
	}
	return reach.Missing("show status", all.silent(), len(all.Nodes))
}

// answer is what one agent answered, and when.
type answer struct {
	status *nodev1alpha1.StatusResponse
	clock  reach.Clock
}

func ask(ctx context.Context, d nodeclient.Dialer) (answer, error) {
	ctx, trip := reach.Timed(ctx)
	resp, err := nodeclient.New(d).Status(ctx, &nodev1alpha1.StatusRequest{})
	if err != nil {
		return answer{}, err
	}
	return answer{resp, trip.Clock(resp.GetTime().AsTime())}, nil
}

// nodes are the states of all nodes, sorted by name.
type nodes struct {
	Nodes []*node `json:"nodes"`
	// OwnClockAheadSeconds is of this machine's clock against the nodes' median.
	OwnClockAheadSeconds float64 `json:"ownClockAheadSeconds"`
	complete             bool    // no node is missing
}

// node is the state of one node, or why there is none.
type node struct {
	Node   string       `json:"node"`
	Status *result      `json:"status,omitempty"`
	Error  string       `json:"error,omitempty"`
	Reason reach.Reason `json:"reason,omitempty"`
	// ClockAheadSeconds is against the median of all nodes; 0: within a second of it.
	ClockAheadSeconds float64 `json:"clockAheadSeconds"`
	clock             reach.Clock
}

// compareClocks finds nodes whose clocks differ from the others'.
func (all *nodes) compareClocks() {
	var clocks []reach.Clock
	var of []*node
	for _, n := range all.Nodes {
		if n.Status != nil && n.Status.Time != nil {
			clocks, of = append(clocks, n.clock), append(of, n)
		}
	}
	ahead, own := reach.Skews(clocks)
	for i, n := range of {
		n.ClockAheadSeconds = ahead[i].Seconds()
	}
	all.OwnClockAheadSeconds = own.Seconds()
}

func (all *nodes) silent() (n int) {
	for _, one := range all.Nodes {
		if one.Status == nil {
			n++
		}
	}
	return n
}

// MarshalJSON adds whether nodes may be missing.
func (all nodes) MarshalJSON() ([]byte, error) {
	type plain nodes
	return json.Marshal(struct {
		plain
		Complete bool `json:"complete"`
	}{plain(all), all.complete})
}

// Write prints a line for each node.
func (all nodes) Write(w io.Writer) error {
	t := page.NewTable(page.Text("NODE").Shrinks(12), page.Text("AGENT"), page.Text("MODE"), page.Number("SERVICES"),
		page.Text("STATE").Shrinks(24))
	versions := map[string]bool{}
	for _, n := range all.Nodes {
		if n.Status == nil {
			t.Row(n.Node, "-", "-", "-", n.Error)
			continue
		}
		versions[n.Status.Version] = true
		services := "-"
		if s := n.Status.Sync; s != nil {
			services = fmt.Sprint(s.Services)
		}
		t.Row(n.Node, n.Status.Version, n.Status.ProxyMode, services, n.state())
	}
	if len(versions) > 1 {
		t.Foot("the nodes run %d versions of the agent", len(versions))
	}
	if own := seconds(all.OwnClockAheadSeconds); own != 0 {
		t.Foot("this machine's clock is %s", aheadOrBehind(own))
	}
	if !all.complete {
		t.Foot(reach.WithoutNodes)
	}
	good := len(all.Nodes) - all.silent()
	for _, n := range all.Nodes {
		if n.Status != nil && n.state() != wellState {
			good--
		}
	}
	switch {
	case len(all.Nodes) == 0:
		t.Verdict(page.Bad, "no agents", reach.WithoutAgents)
	case good == len(all.Nodes):
		t.Verdict(page.Good, "serving", "all %d nodes, without a problem", good)
	default:
		t.Verdict(page.Warning, "look at", "%d of %d nodes", len(all.Nodes)-good, len(all.Nodes))
	}
	return t.Write(w)
}

const wellState = "serving"

// waitsLong is how long a change may wait before it is worth a look.
const waitsLong = 5 * time.Second

// state says in a few words what an operator must know of a node.
func (n *node) state() string {
	s := n.Status
	what := wellState
	switch text := s.trouble(); {
	case s.Sync == nil:
		what = "unknown"
	case !s.Sync.Listed || s.Sync.LastSynced == nil:
		what = "not serving yet"
	case text != "":
		what += ", with " + text
	}
	if faults := nodeclient.Faults(s.Findings); len(faults) > 0 {
		worst := faults[0].Object
		worst.Endpoint = ""
		what += ", such as " + faults[0].ID + " of " + worst.String()
	}
	if s.Sync != nil && s.Sync.PendingSince != nil && s.Time.AsTime().Sub(s.Sync.PendingSince.AsTime()) > waitsLong {
		what += ", a change waits for " + nodeclient.Age(s.Time, s.Sync.PendingSince)
	}
	if d := seconds(n.ClockAheadSeconds); d != 0 {
		what += ", its clock is " + aheadOrBehind(d)
	}
	return what
}

func seconds(s float64) time.Duration {
	return time.Duration(s * float64(time.Second)).Round(100 * time.Millisecond)
}

func aheadOrBehind(d time.Duration) string {
	if d < 0 {
		return (-d).String() + " behind the nodes' median"
	}
	return d.String() + " ahead of the nodes' median"
}
