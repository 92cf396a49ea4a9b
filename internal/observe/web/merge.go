package web

import (
	"context"
	"errors"
	"io"
	"log"
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
	nodes []*node
}

// retryFirst and retryMost limit the time between two attempts to watch a node.
const (
	retryFirst = time.Second
	retryMost  = 15 * time.Second
)

// WatchFlows forwards the events of every node that has them. It ends with an error if the
// filter is wrong, or if no node can be watched.
func (m *merge) WatchFlows(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest, out *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// An answer begins with its first message.
	if err := out.Send(&nodev1alpha1.WatchFlowsResponse{}); err != nil {
		return err
	}
	// The buffer is small: an agent counts the events that a slow page misses.
	messages := make(chan *nodev1alpha1.WatchFlowsResponse, 16)
	ends := make(chan error, len(m.nodes))
	for _, n := range m.nodes {
		go func() { ends <- n.follow(ctx, req, messages) }()
	}
	for running := len(m.nodes); ; {
		select {
		case message := <-messages:
			if err := out.Send(message); err != nil {
				return err
			}
		case err := <-ends:
			if running--; running == 0 || connect.CodeOf(err) == connect.CodeInvalidArgument {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// follow watches one node until the context ends, and again after a failure. It gives up
// only if the agent refuses the call.
func (n *node) follow(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest, messages chan<- *nodev1alpha1.WatchFlowsResponse) error {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		began := time.Now()
		err := n.followOnce(ctx, req, messages)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		switch connect.CodeOf(err) {
		case connect.CodeUnimplemented:
			n.setWatchError("This agent has no live events: it is older than the page, or does not follow flows.")
			return err
		case connect.CodeInvalidArgument, connect.CodeFailedPrecondition, connect.CodePermissionDenied:
			var refused *connect.Error
			if errors.As(err, &refused) && connect.CodeOf(err) != connect.CodeInvalidArgument {
				n.setWatchError(refused.Message())
			}
			return err
		}
		n.setWatchError(n.explain(err))
		if time.Since(began) > retryMost {
			wait = retryFirst
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (n *node) followOnce(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest, messages chan<- *nodev1alpha1.WatchFlowsResponse) error {
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
