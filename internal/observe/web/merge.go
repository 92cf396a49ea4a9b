package web

import (
	"context"
	"errors"
	"io"
	"log"
	"slices"
	"time"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// discard: errors of calls are answers to the page.
var discard = log.New(io.Discard, "", 0)

// merge watches the flows of all nodes as one stream: a browser has only six connections
// to a server.
type merge struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	nodes *set
}

// retryFirst and retryMost limit the time between two attempts to watch a node.
const (
	retryFirst = time.Second
	retryMost  = 15 * time.Second
)

// WatchFlows forwards the events of every node that has them, and of nodes that come later.
// It ends with an error if the filter is wrong. It also ends if no node can be watched, and
// the nodes never change.
func (m *merge) WatchFlows(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	out *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// An answer begins with its first message.
	if err := out.Send(&nodev1alpha1.WatchFlowsResponse{}); err != nil {
		return err
	}
	f := followers{
		forever: m.nodes.refresh != nil, req: req, cancels: map[*node]context.CancelFunc{},
		// The buffer is small: an agent counts the events that a slow page misses.
		messages: make(chan *nodev1alpha1.WatchFlowsResponse, 16), ends: make(chan error),
	}
	for {
		nodes, _, changed := m.nodes.now()
		f.follow(ctx, nodes)
		for again := false; !again; {
			select {
			case message := <-f.messages:
				if err := out.Send(message); err != nil {
					return err
				}
			case err := <-f.ends:
				f.running--
				if connect.CodeOf(err) == connect.CodeInvalidArgument || f.running == 0 && !f.forever {
					return err
				}
			case <-changed:
				again = true
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// followers watch the nodes of one stream.
type followers struct {
	forever  bool // refusals are not final: an agent may be upgraded, a right granted
	req      *nodev1alpha1.WatchFlowsRequest
	cancels  map[*node]context.CancelFunc
	running  int
	messages chan *nodev1alpha1.WatchFlowsResponse
	ends     chan error // of those that gave up, or whose node has gone
}

// follow watches these nodes and no others.
func (f *followers) follow(ctx context.Context, nodes []*node) {
	for n, cancel := range f.cancels {
		if !slices.Contains(nodes, n) {
			cancel()
			delete(f.cancels, n)
		}
	}
	for _, n := range nodes {
		if f.cancels[n] != nil {
			continue
		}
		own, cancel := context.WithCancel(ctx)
		f.cancels[n] = cancel
		f.running++
		go func() {
			defer cancel()
			err := n.follow(own, f.req, f.messages, f.forever)
			select {
			case f.ends <- err:
			case <-ctx.Done():
			}
		}()
	}
}

// follow watches one node until the context ends, and again after a failure. It gives up
// if the filter is wrong, and, unless it goes on forever, if the agent refuses the call.
func (n *node) follow(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	messages chan<- *nodev1alpha1.WatchFlowsResponse, forever bool) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		began := time.Now()
		err := n.followOnce(ctx, req, messages)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		final := false
		var refused *connect.Error
		switch connect.CodeOf(err) {
		case connect.CodeInvalidArgument:
			return err
		case connect.CodeUnimplemented:
			n.setWatchError("This agent has no live events: it is older than the page, or does not follow flows.")
			final = true
		case connect.CodeFailedPrecondition, connect.CodePermissionDenied:
			if errors.As(err, &refused) {
				n.setWatchError(refused.Message())
			}
			final = true
		default:
			n.setWatchError(n.own().explain(err))
		}
		if final && !forever {
			return err
		}
		if final {
			wait = retryMost
		} else if time.Since(began) > retryMost {
			wait = retryFirst
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *node) followOnce(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	messages chan<- *nodev1alpha1.WatchFlowsResponse) error {
	stream, err := n.client.WatchFlows(ctx, req)
	if err != nil {
		return err
	}
	defer stream.Close()
	for stream.Receive() {
		n.setWatchError("")
		select {
		case messages <- stream.Msg():
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return io.ErrUnexpectedEOF
}
