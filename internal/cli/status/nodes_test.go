package status

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/reach"
)

// allNodes is a cluster with everything that a line can show.
func allNodes() *nodes {
	serves := func(name string, change func(*nodev1alpha1.StatusResponse)) *node {
		s := &nodev1alpha1.StatusResponse{Node: name, Version: "0.1.0", ProxyMode: "ebpf", Time: timestamppb.New(now),
			Sync: &nodev1alpha1.Sync{Listed: true, LastSynced: timestamppb.New(now.Add(-time.Second)), Services: 512}}
		if change != nil {
			change(s)
		}
		return &node{Node: name, Status: &result{s, "0.1.0"}, clock: reach.Clock{Error: time.Millisecond}}
	}
	all := &nodes{complete: true, Nodes: []*node{
		serves("node1", nil),
		serves("node2", func(s *nodev1alpha1.StatusResponse) {
			s.Problems = []*nodev1alpha1.Problem{{Where: "shop/web", What: "x"}}
		}),
		serves("node3", func(s *nodev1alpha1.StatusResponse) {
			s.Version, s.Sync.PendingSince = "0.2.0", timestamppb.New(now.Add(-time.Minute))
		}),
		serves("node4", func(s *nodev1alpha1.StatusResponse) { s.Sync.LastSynced = nil }),
		serves("node5", func(s *nodev1alpha1.StatusResponse) { s.Sync.PendingSince = timestamppb.New(now.Add(-time.Second)) }),
		serves("node5a", func(s *nodev1alpha1.StatusResponse) { s.Findings = sick().Findings }),
		serves("node5b", func(s *nodev1alpha1.StatusResponse) { s.Findings = sick().Findings[7:] }),
		{Node: "node6", Error: "the node does not answer within 15s", Reason: reach.NoAnswer},
		{Node: "node7.with.a.name.that.is.much.longer.than.usual.example.com", Error: "no agent runs on this node", Reason: reach.NoAgent},
		serves("node8", nil),
	}}
	all.Nodes[9].clock.Ahead = -90 * time.Second
	all.compareClocks()
	return all
}

func TestAllNodes(t *testing.T) {
	clitest.Pages(t, "all-nodes", allNodes())
	if got := allNodes().silent(); got != 2 {
		t.Errorf("%d nodes gave no status", got)
	}
}

func TestAllNodesAsJSON(t *testing.T) {
	text, err := json.Marshal(allNodes())
	var got struct {
		Complete bool
		Nodes    []struct {
			Node, Error, Reason string
			ClockAheadSeconds   float64
			Status              *struct{ Version string }
		}
	}
	if err != nil || json.Unmarshal(text, &got) != nil || len(got.Nodes) != 10 || !got.Complete {
		t.Fatalf("%v: %s", err, text)
	}
	if n := got.Nodes[2]; n.Status == nil || n.Status.Version != "0.2.0" || n.Error != "" {
		t.Errorf("%+v", n)
	}
	if n := got.Nodes[7]; n.Status != nil || n.Reason != "NoAnswer" || !strings.Contains(n.Error, "15s") {
		t.Errorf("%+v", n)
	}
	if n := got.Nodes[9]; n.ClockAheadSeconds != -90 {
		t.Errorf("%+v", n)
	}
}
