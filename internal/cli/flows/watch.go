package flows

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/escape"
)

// quiet is the pause after which an agent has sent what it remembered.
const quiet = time.Second

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
	err := w.watch(ctx, "", agent, func() {})
	if errors.Is(err, errQuiet) && !w.out.any {
		w.out.note("no event that the filters select is remembered")
	}
	if ctx.Err() != nil || errors.Is(err, errQuiet) {
		return nil
	}
	if err == nil {
		return fmt.Errorf("%s: %s has ended the stream: it stops or restarts", does, agent.Where)
	}
	return nodeclient.Error(does, agent, err)
}

// listEvery is the time between two lists of the nodes.
const listEvery = 10 * time.Second

// all watches the agents of all nodes until ctx ends, also those of nodes that come later.
func (w *watcher) all(ctx context.Context, cluster *reach.Cluster) error {
	agents, complete, err := cluster.Agents(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", does, err)
	}
	if len(agents) == 0 {
		return fmt.Errorf("%s: %s", does, reach.WithoutAgents)
	}
	if !complete {
		w.out.note(reach.WithoutNodes)
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
				running.Go(func() { w.again(own, cluster, a.Node) })
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
		return w.watch(ctx, node, d, connected)
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

// watch prints the events of an agent until the stream ends.
func (w *watcher) watch(ctx context.Context, node string, agent nodeclient.Dialer, connected func()) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(time.Hour, func() { cancel(errQuiet) })
	silence.Stop()
	defer silence.Stop()
	if !w.follow {
		silence.Reset(quiet)
	}
	stream, err := nodeclient.New(agent).WatchFlows(ctx, w.request)
	if err != nil {
		// An agent that remembers no event has not answered yet.
		if errors.Is(context.Cause(ctx), errQuiet) {
			return errQuiet
		}
		return err
	}
	defer stream.Close()
	connected()
	for stream.Receive() {
		if !w.follow {
			silence.Reset(quiet)
		}
		w.noteReporting(node, stream.Msg().Reporting)
		if err := w.out.events(stream.Msg()); err != nil {
			return err
		}
	}
	if stream.Err() == nil && !w.follow {
		return errQuiet
	}
	if cause := context.Cause(ctx); errors.Is(cause, errQuiet) {
		return errQuiet
	}
	return stream.Err()
}
