package kube

import (
	"fmt"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// TestNamesOfNodesInSlicesAreLimited gives the source more names without a Node than a
// cluster has Nodes, as a user may who writes EndpointSlices.
func TestNamesOfNodesInSlicesAreLimited(t *testing.T) {
	access := without(t)
	access.QPS = -1 // no limit
	client, _, err := Connect(access)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Client: client, NodeName: "a"})
	if err != nil {
		t.Fatal(err)
	}
	s.others.kind = s.newNodes("other Node")
	s.others.kind.listed = true
	known := model.Name{Name: "node-0"}
	s.others.kind.known[known] = &model.Node{Name: known.Name}

	hostile := &model.EndpointSlice{}
	for i := range 5000 {
		hostile.Endpoints = append(hostile.Endpoints, model.Endpoint{Node: fmt.Sprint("node-", i)})
	}
	requests := 0
	for range 50 {
		s.noteNodes(hostile)
		names := s.takeUnknown()
		if len(names) > newNodesAtOnce || len(s.others.unknown) > mostUnknown {
			t.Fatalf("%d names at once and %d that wait", len(names), len(s.others.unknown))
		}
		for _, name := range names {
			if name == known.Name {
				t.Errorf("%s is known and was requested", name)
			}
			if err := s.readNode(t.Context(), name); err != nil {
				t.Fatal(err)
			}
			requests++
		}
	}
	if requests == 0 || requests > 150 {
		t.Errorf("%d requests, want 1 to 150", requests)
	}
}
