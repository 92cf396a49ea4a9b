package decisions

import (
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// TestADenyRuleSendsItsPodThroughNetfilter: the Delta that brings a policy also changes the
// Node and the endpoint, in the same Changes, and so does the one that deletes it.
func TestADenyRuleSendsItsPodThroughNetfilter(t *testing.T) {
	const here = "here"
	name, pod := model.Name{Namespace: "n", Name: "cache"}, netip.MustParseAddr("10.244.0.2")
	tr := New(intent.Config{NodeName: here}, donottrack.Config{}) // one name is the node's for both
	tr.Apply(model.Delta{Full: true,
		Pods: map[model.Name]*model.Pod{name: {Name: name, Node: here, IPs: []netip.Addr{pod}}},
		Services: map[model.Name]*model.Service{name: {Name: name, Type: model.ClusterIP,
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}}}},
		Slices: map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name, Family: model.IPv4,
			Ports:     []model.EndpointPort{{Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: here}}}},
	})
	deny := &model.DoNotTrackPolicy{Name: "p", Pods: &model.PodSelection{}, DenyOthers: true,
		Ingress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.TCP, First: 11211, Last: 11211}},
			Peers: []model.PolicyPeer{{Block: netip.MustParsePrefix("192.0.2.0/24")}}}}}
	for _, step := range []struct {
		policy *model.DoNotTrackPolicy
		want   bool
	}{{deny, true}, {nil, false}} {
		c := tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"p": step.policy}})
		if len(c.Policies.Rules) == 0 || c.Services.Node == nil || len(c.Services.Upserts) != 1 {
			t.Fatalf("policy %v: changes %+v", step.policy, c)
		}
		if got := slices.Contains(c.Services.Node.DenyRuleOnlyPods, pod); got != step.want {
			t.Errorf("policy %v: pods with a deny rule %v", step.policy, c.Services.Node.DenyRuleOnlyPods)
		}
		if got := c.Services.Upserts[0].Endpoints[0].MustTraverseNetfilter; got != step.want {
			t.Errorf("policy %v: the endpoint must traverse netfilter: %v", step.policy, got)
		}
	}
	if c := tr.SetKernel(Kernel{DenyRulesUnknown: true}); c.Services.Node == nil || !c.Services.Node.PoliciesUnknown {
		t.Errorf("unknown deny rules: %+v", c.Services.Node)
	}
	// What else changes does not make them known.
	if c := tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"p": deny}}); !c.Services.Node.PoliciesUnknown {
		t.Error("a policy makes the deny rules known")
	}
}
