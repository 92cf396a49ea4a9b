package reach

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/escape"
)

// Nodes are the nodes that a command asks: some by name, or all of the cluster.
type Nodes struct {
	*Cluster
	names []string // none: all
}

// All reports whether these are all nodes of the cluster.
func (n *Nodes) All() bool { return len(n.names) == 0 }

// Agents returns the agents as Cluster.Agents does; of chosen nodes each has one, or an Err.
func (n *Nodes) Agents(ctx context.Context) (agents []Agent, complete bool, err error) {
	if n.All() {
		return n.Cluster.Agents(ctx)
	}
	pods, err := n.Pods(ctx)
	if err != nil {
		return nil, false, err
	}
	for _, name := range slices.Compact(slices.Sorted(slices.Values(n.names))) {
		a := pods.choose(name)
		if a.Err != nil {
			a.Err = n.orNoNode(ctx, name, a.Err)
		}
		agents = append(agents, a)
	}
	return agents, true, nil
}

// Asked returns the agents that a command asks, and fails if there are none. note is called with a line
// if some are missing.
func (n *Nodes) Asked(ctx context.Context, does string, note func(string)) (agents []Agent, complete bool, err error) {
	agents, complete, err = n.Agents(ctx)
	switch {
	case err != nil:
		return nil, false, fmt.Errorf("%s: %w", does, err)
	case len(agents) == 0:
		return nil, false, fmt.Errorf("%s: %s", does, WithoutAgents)
	case !complete:
		note(WithoutNodes)
	}
	return agents, complete, nil
}

// noteTo returns what writes lines for people.
func noteTo(stderr io.Writer) func(string) {
	return func(text string) { fmt.Fprintf(stderr, "spillway: %s\n", text) }
}

// Answers are what nodes answered.
type Answers[T any] struct {
	List     []Result[T] // without an Err, in the order of the nodes
	Complete bool        // no node is missing because the user may not list them
	asked    int
}

// Ask asks the agents of the nodes. A node that gives no answer is a line on stderr; Silent then
// returns the error of the command.
func Ask[T any](ctx context.Context, n *Nodes, does string, stderr io.Writer,
	ask func(context.Context, nodeclient.Dialer) (T, error)) (a Answers[T], err error) {
	agents, complete, err := n.Asked(ctx, does, noteTo(stderr))
	if err != nil {
		return a, err
	}
	a.asked, a.Complete = len(agents), complete
	for _, r := range Each(ctx, n.Cluster, agents, ask) {
		if r.Err != nil {
			fmt.Fprintln(stderr, Line(r.Agent.Node, r.Err))
			continue
		}
		a.List = append(a.List, r)
	}
	return a, nil
}

// Silent is the error of a command that lacks the answers of some nodes; nil: it has all.
func (a *Answers[T]) Silent(does string) error {
	return Missing(does, a.asked-len(a.List), a.asked)
}

// Missing is the error of a command that lacks the answers of so many nodes; nil for none.
func Missing(does string, silent, asked int) error {
	if silent == 0 {
		return nil
	}
	return fmt.Errorf("%s: %d of %d nodes gave none: their lines have the reasons", does, silent, asked)
}

// Nodes returns the names of the nodes that answered.
func (a *Answers[T]) Nodes() []string {
	names := []string{}
	for _, r := range a.List {
		names = append(names, r.Agent.Node)
	}
	return names
}

// Line is a line for stderr about a node that gives no answer.
func Line(node string, err *Error) string {
	return fmt.Sprintf("spillway: node %s: %s", escape.Text(node), err)
}

// shownNodes is how many names of nodes a cell of a table has.
const shownNodes = 3

// Names returns the cell of a table for some of the nodes that answered: "all" for each of them.
// wide: with all names.
func Names(nodes []string, answered int, wide bool) string {
	switch {
	case len(nodes) == answered && answered > 1:
		return fmt.Sprintf("all %d", answered)
	case len(nodes) <= shownNodes || wide:
		return strings.Join(nodes, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(nodes[:shownNodes], ", "), len(nodes)-shownNodes)
}
