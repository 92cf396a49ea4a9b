package flows

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/escape"
)

// quiet is the pause after which an agent that does not end the stream has sent what it remembered:
// one of an earlier version.
const quiet = 5 * time.Second

const nothingRemembered = "no event that the filters select is remembered"

// watcher prints the events of agents.
type watcher struct {
	out     *printer
	request *nodev1alpha1.WatchFlowsRequest
	follow  bool // else: end after what the agent remembers
}

// one watches one agent.
func (w *watcher) one(ctx context.Context, agent nodeclient.Dialer) error {
	if err := w.hint(ctx, "", agent); err != nil {
		return nodeclient.Error(does, agent, err)
	}
	err := w.watch(ctx, agent, func() {}, func(resp *nodev1alpha1.WatchFlowsResponse) error { return w.event("", resp) })
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return nodeclient.Error(does, agent, err)
	case w.follow:
		return fmt.Errorf("%s: %s has ended the stream: it stops or restarts", does, agent.Where)
	case !w.out.any:
		w.out.note(nothingRemembered)
	}
	return nil
}

// listEvery is the time between two lists of the nodes.
const listEvery = 10 * time.Second

// remembered prints what the agents of nodes remember, node by node.
func (w *watcher) remembered(ctx context.Context, nodes *reach.Nodes) error {
	ask := func(ctx context.Context, d nodeclient.Dialer) (events []*nodev1alpha1.WatchFlowsResponse, err error) {
		keep := func(resp *nodev1alpha1.WatchFlowsResponse) error {
			events = append(events, proto.CloneOf(resp))
			return nil
		}
		err = w.watch(ctx, d, func() {}, keep)
		return events, err
	}
	answers, err := reach.Ask(ctx, nodes, does, w.out.notes, ask)
	if err != nil {
		return err
	}
	for _, r := range answers.List {
		for _, resp := range r.Value {
			if err := w.out.events(r.Agent.Node, resp); err != nil {
				return err
			}
		}
	}
	if !w.out.any && len(answers.List) > 0 {
		w.out.note(nothingRemembered)
	}
	return answers.Silent(does)
}

// all watches the agents of nodes until ctx ends, also those of nodes that come later.
func (w *watcher) all(ctx context.Context, cluster *reach.Nodes) error {
	agents, complete, err := cluster.Asked(ctx, does, w.out.note)
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	watched := map[string]context.CancelFunc{}
	for {
		gone := maps.Clone(watched)
		for _, a := range agents {
			delete(gone, a.Node)
			if watched[a.Node] == nil {
				own, cancel := context.WithCancel(ctx)
				watched[a.Node] = cancel
				running.Go(func() { w.again(own, cluster.Cluster, a.Node) })
			}
		}
		for node, cancel := range gone {
			if complete { // else a node whose Pod is replaced seems to have gone
				cancel()
				delete(watched, node)
				w.out.note(fmt.Sprintf("node %s: it has left the cluster", escape.Text(node)))
			}
		}
		select {
		case <-ctx.Done():
			for _, cancel := range watched {
				cancel()
			}
			return nil
		case <-time.After(listEvery):
		}
		// While the API server is away, its agents are too: their lines say so.
		if now, all, err := cluster.Agents(ctx); err == nil {
			agents, complete = now, all
		}
	}
}

// again watches the agent of one node, also after it has ended.
func (w *watcher) again(ctx context.Context, cluster *reach.Cluster, node string) {
	cluster.Follow(ctx, node, func(ctx context.Context, d nodeclient.Dialer, connected func()) error {
		if err := w.hint(ctx, node, d); err != nil {
			return err
		}
		return w.watch(ctx, d, connected, func(resp *nodev1alpha1.WatchFlowsResponse) error { return w.event(node, resp) })
	}, func(err *reach.Error) { w.out.note(lostText(node, err)) })
}

// hint notes what the agent does not report.
func (w *watcher) hint(ctx context.Context, node string, agent nodeclient.Dialer) error {
	ctx, cancel := context.WithTimeout(ctx, nodeclient.Timeout)
	defer cancel()
	status, err := nodeclient.New(agent).Status(ctx, &nodev1alpha1.StatusRequest{})
	if err != nil {
		return err
	}
	if text := modeHint(status.Events, w.follow); text != "" {
		w.out.note(ofNode(node, text))
	}
	return nil
}

// event prints the events of a message, after what the agent says of its reporting.
func (w *watcher) event(node string, resp *nodev1alpha1.WatchFlowsResponse) error {
	w.noteReporting(node, resp.Reporting)
	return w.out.events(node, resp)
}

// ofNode adds the name of a node to a note; "" is this node.
func ofNode(node, text string) string {
	if node == "" {
		return text
	}
	return "node " + escape.Text(node) + ": " + text
}

// noteReporting notes from when on an agent reports flows because of this program, or why it does not.
func (w *watcher) noteReporting(node string, r *nodev1alpha1.Reporting) {
	switch {
	case r.GetProblem() != "":
		w.out.note(ofNode(node, "flows are not reported yet: "+escape.Text(r.Problem)))
	case r.GetTurnedOn() && r.FlowsSince != nil:
		w.out.note(ofNode(node, "flows are reported since "+r.FlowsSince.AsTime().Local().Format(time.TimeOnly)))
	}
}

// errQuiet ends a watch without --follow.
var errQuiet = errors.New("no more events")

// watch gives the events of an agent to use, until the stream ends. Without follow that is after the
// events that the agent remembers.
func (w *watcher) watch(ctx context.Context, agent nodeclient.Dialer, connected func(),
	use func(*nodev1alpha1.WatchFlowsResponse) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(quiet, func() { cancel(errQuiet) })
	defer silence.Stop()
	if w.follow {
		silence.Stop()
	}
	stream, err := nodeclient.New(agent).WatchFlows(ctx, w.request)
	if err == nil {
		defer stream.Close()
		connected()
		for err == nil && stream.Receive() {
			if !w.follow {
				silence.Reset(quiet)
			}
			err = use(stream.Msg())
		}
		err = cmp.Or(err, stream.Err())
	}
	if errors.Is(context.Cause(ctx), errQuiet) {
		return nil
	}
	return err
}
