package reach_test

import (
	"context"
	"io"
	"strings"
	"testing"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/flows"
	"spillway.dev/spillway/internal/cli/reach"
)

// WatchFlows sends one refusal.
func (a named) WatchFlows(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest,
	to *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	event := &nodev1alpha1.FlowEvent{Kind: nodev1alpha1.EventKind_EVENT_KIND_REFUSED,
		Flow: &nodev1alpha1.Flow{Node: a.node, Namespace: "shop", Service: "web"}}
	if err := to.Send(&nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{event}}); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

// observe follows nodes that come while it runs, and says which have left.
func TestObserveFollowsNodesThatCome(t *testing.T) {
	t.Parallel() // it waits 10 s for the next list of the nodes
	c := reach.NewFakeCluster(t)
	c.Agent("first", named{node: "first"})
	ctx, stop := context.WithCancel(t.Context())
	out, in := io.Pipe()
	cmd := flows.NewObserveCommand()
	cmd.SetArgs([]string{"--kubeconfig", c.Kubeconfig()})
	cmd.SetOut(in)
	cmd.SetErr(in)
	end := make(chan error, 1)
	go func() {
		err := cmd.ExecuteContext(ctx)
		in.CloseWithError(err)
		end <- err
	}()
	var got strings.Builder
	until := func(want string) {
		t.Helper()
		b := make([]byte, 1<<10)
		for !strings.Contains(got.String(), want) {
			n, err := out.Read(b)
			got.Write(b[:n])
			if err != nil {
				t.Fatalf("%v: %s", err, &got)
			}
		}
	}
	until("first refused")
	c.Agent("second", named{node: "second"})
	c.Delete("first")
	until("node first: it has left the cluster")
	until("second refused")
	stop()
	go func() { _, _ = io.Copy(io.Discard, out) }()
	if err := <-end; err != nil {
		t.Error(err)
	}
}
