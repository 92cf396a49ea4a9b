package controlplane

import (
	"context"
	"maps"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/lab/experiment/apiload"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// TestAnAgentAsksForWhatItNeeds counts what agents ask a real API server, in a cluster
// with more Nodes than an agent watches.
func TestAnAgentAsksForWhatItNeeds(t *testing.T) {
	t.Parallel()
	const agents = 5
	b := must[*apiload.Bench](t)(apiload.Up(t.Context(), apiload.Config{
		Agents: agents, AtOnce: agents, Services: 20, Endpoints: 10, Nodes: 510, Pods: 2, Changes: 20, Beats: 20,
	}))
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
			row := must[apiload.Row](t)(b.Measure(t.Context(), c.kind))
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

// TestCompletePrograms checks that a complete agent and kube-proxy have the watches of the
// clients that bench apiserver counts.
func TestCompletePrograms(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: three programs start, one after the other")
	}
	n := newNode(t)
	before := must[map[string]int](t)(apiload.Watches(t.Context(), n.cp))
	watches := func() map[string]int {
		now := must[map[string]int](t)(apiload.Watches(context.WithoutCancel(t.Context()), n.cp))
		for resource, count := range before {
			if now[resource] -= count; now[resource] == 0 {
				delete(now, resource)
			}
		}
		return now
	}
	agent := map[string]int{"services": 1, "endpointslices": 1, "nodes": 1, "pods": 1, "networkpolicies": 1}
	kubeProxy := must[string](t)(controlplane.Program("kube-proxy"))
	for _, c := range []struct {
		name string
		argv []string
		want map[string]int
	}{
		{"ebpf", n.argv, agent},
		{"nftables", append(n.argv[:len(n.argv):len(n.argv)], "--proxy-mode", "nftables"), agent},
		{"kube-proxy", []string{kubeProxy, "--proxy-mode", "nftables", "--hostname-override", n.host.Name, "--kubeconfig", flagValue(n.argv, "--kubeconfig"),
			// No setting of the whole machine is changed.
			"--conntrack-max-per-core", "0", "--conntrack-min", "0", "--conntrack-tcp-timeout-established", "0", "--conntrack-tcp-timeout-close-wait", "0"},
			map[string]int{"services": 1, "endpointslices": 1, "nodes": 1, "servicecidrs": 1}},
	} {
		n.argv = c.argv
		n.start()
		n.until("the watches of "+c.name, func() bool { return maps.Equal(watches(), c.want) })
		n.signal(syscall.SIGTERM)
		n.until("no watch after "+c.name, func() bool { return len(watches()) == 0 })
	}
}

// flagValue returns the argument after a flag.
func flagValue(argv []string, flag string) string {
	for i, arg := range argv {
		if strings.EqualFold(arg, flag) {
			return argv[i+1]
		}
	}
	return ""
}
