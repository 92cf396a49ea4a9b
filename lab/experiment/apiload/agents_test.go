package apiload

import (
	"maps"
	"testing"
)

// TestAnAgentAsksForWhatItNeeds counts what agents ask a real API server, in a cluster
// with more Nodes than an agent watches.
func TestAnAgentAsksForWhatItNeeds(t *testing.T) {
	const agents = 5
	b, err := Up(t.Context(), Config{
		Agents: agents, AtOnce: agents, Services: 20, Endpoints: 10, Nodes: 510, Pods: 2, Changes: 20, Beats: 20,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Down(); err != nil {
			t.Error(err)
		}
	})
	agent := map[string]int{"services": agents, "endpointslices": agents, "nodes": agents, "pods": agents, "networkpolicies": agents}
	for _, c := range []struct {
		kind    string
		watches map[string]int
		// lists are the requests of a client for a list. Pages of Nodes: the first request
		// counts them.
		lists map[string]float64
	}{
		{"ebpf", agent, map[string]float64{"nodes": 3}},
		{"nftables", agent, nil},
		{"kube-proxy", map[string]int{"services": agents, "endpointslices": agents, "nodes": agents, "servicecidrs": agents}, nil},
	} {
		t.Run(c.kind, func(t *testing.T) {
			row, err := b.Measure(t.Context(), c.kind)
			if err != nil {
				t.Fatal(err)
			}
			if !maps.Equal(row.Watches, c.watches) {
				t.Errorf("watches of %d clients: %v, want %v", agents, row.Watches, c.watches)
			}
			lists := map[string]float64{}
			for _, r := range row.Start.Requests {
				if r.Resource == "donottrackpolicies" && r.Status == 404 || r.Resource == "version" {
					continue // its CRD is not installed; and an agent that hears nothing asks for the version
				}
				if r.Status != 200 || r.Type != "protobuf" {
					t.Errorf("%s %s is answered with %d %s, want 200 protobuf", r.Verb, r.Resource, r.Status, r.Type)
				}
				switch {
				case r.Verb == "list":
					lists[r.Resource] += r.Count
				case r.Verb == "stream" && r.Count != 1:
					t.Errorf("%s %s: %v times, want once", r.Verb, r.Resource, r.Count)
				case r.Resource == "pods" && r.Selector != "spec.nodeName=NODE",
					r.Resource == "nodes" && r.Selector != "metadata.name=NODE":
					t.Errorf("%s %s selects %q, want this node's alone", r.Verb, r.Resource, r.Selector)
				}
			}
			if !maps.Equal(lists, c.lists) && len(lists)+len(c.lists) > 0 {
				t.Errorf("lists of a client: %v, want %v", lists, c.lists)
			}
			for _, r := range row.Beats.Requests {
				if r.Resource == "nodes" && r.Bytes > 1000 { // more than a bookmark, less than a Node
					t.Errorf("status updates of other Nodes: %s %s receives %.0f bytes", r.Verb, r.Selector, r.Bytes)
				}
			}
		})
	}
}
