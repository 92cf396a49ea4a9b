package intent

import (
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

func TestPodsOfPoliciesGoThroughTheStackOrNeedNot(t *testing.T) {
	pod := netip.MustParseAddr("10.244.0.2")
	name := model.Name{Namespace: "n", Name: "cache"}
	tr := New(Config{NodeName: "here"})
	tr.Apply(model.Delta{Full: true,
		Services: map[model.Name]*model.Service{name: {Name: name, Type: model.ClusterIP,
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:      []model.ServicePort{{Name: "a", Protocol: model.TCP, Port: 1}, {Name: "b", Protocol: model.TCP, Port: 2}}}},
		Slices: map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name, Family: model.IPv4,
			Ports:     []model.EndpointPort{{Name: "a", Protocol: model.TCP, Port: 11211}, {Name: "b", Protocol: model.TCP, Port: 80}},
			Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: "here"}}}},
	})
	check := func(when string, c Changes, upserts int, policed, open bool) {
		t.Helper()
		if len(c.Upserts) != upserts {
			t.Errorf("%s: %d ports changed, want %d", when, len(c.Upserts), upserts)
		}
		s := tr.State()
		if slices.Contains(s.Node.MustTraverseNetfilter, pod) != policed {
			t.Errorf("%s: policed pods %v", when, s.Node.MustTraverseNetfilter)
		}
		for _, p := range s.Ports {
			e := p.Endpoints[0]
			if e.MustTraverseNetfilter != policed || e.AllowsAny != (open && e.Addr.Port() == 11211) {
				t.Errorf("%s: endpoint %+v", when, e)
			}
		}
	}
	denied := donottrack.Traversal{DenyRulePods: []netip.Addr{pod}}
	check("guarded", setTraversal(tr, denied), 2, true, false)
	check("guarded again", setTraversal(tr, denied), 0, true, false)
	ports := []donottrack.Target{{Addr: pod, Protocol: model.TCP, First: 11200, Last: 11220},
		{Addr: pod, Protocol: model.UDP, First: 80, Last: 80}}
	both := donottrack.Traversal{DenyRulePods: []netip.Addr{pod}, AllowsAny: ports}
	check("opened too", setTraversal(tr, both), 1, true, true)
	check("opened again", setTraversal(tr, both), 0, true, true)
	unknown := both
	unknown.Unknown = true
	if c := setTraversal(tr, unknown); c.Node == nil || !c.Node.PoliciesUnknown {
		t.Errorf("guards unknown: node %+v", c.Node)
	}
	if c := setTraversal(tr, both); c.Node == nil || c.Node.PoliciesUnknown {
		t.Errorf("guards known: node %+v", c.Node)
	}
	check("guarded no more", setTraversal(tr, donottrack.Traversal{AllowsAny: ports}), 2, false, true)
	check("opened no more", setTraversal(tr, donottrack.Traversal{}), 1, false, false)
}

// TestSelectorsOfANamespaceAreBounded has a policy with so many parts that a pod is not compared with
// all of them: it may be selected.
func TestSelectorsOfANamespaceAreBounded(t *testing.T) {
	pod := netip.MustParseAddr("10.244.0.2")
	name := model.Name{Namespace: "n", Name: "cache"}
	for _, row := range []struct {
		parts    int
		selected bool
	}{{mostSelectorParts - 1, false}, {mostSelectorParts, true}} {
		selector := model.Selector{MatchLabels: map[string]string{"no": "pod"}}
		for i := range row.parts - 1 {
			selector.Expressions = append(selector.Expressions, model.Requirement{Key: strconv.Itoa(i), Operator: "DoesNotExist"})
		}
		tr := New(Config{NodeName: "here"})
		tr.Apply(model.Delta{Full: true,
			Services: map[model.Name]*model.Service{name: {Name: name, Type: model.ClusterIP,
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
				Ports:      []model.ServicePort{{Name: "a", Protocol: model.TCP, Port: 1}}}},
			Slices: map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name, Family: model.IPv4,
				Ports:     []model.EndpointPort{{Name: "a", Protocol: model.TCP, Port: 11211}},
				Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: "here", Pod: name}}}},
			Pods:            map[model.Name]*model.Pod{name: {Name: name, Node: "here", IPs: []netip.Addr{pod}}},
			NetworkPolicies: map[model.Name]*model.NetworkPolicy{name: {Name: name, Selector: selector, Ingress: true}},
		})
		tr.SetTime(time.Now())
		tr.Changes()
		if e := tr.State().Ports[0].Endpoints[0]; e.MustTraverseNetfilter != row.selected {
			t.Errorf("%d parts: the pod's packets must traverse netfilter: %v, want %v", row.parts, e.MustTraverseNetfilter, row.selected)
		}
	}
}

// With --bypass always, packets bypass the enforcement of NetworkPolicies. Deny rules of
// Spillway's own policies still hold.
func TestIgnoredNetworkPoliciesLeavePodsGuarded(t *testing.T) {
	guarded, other := netip.MustParseAddr("10.244.0.2"), netip.MustParseAddr("10.244.0.3")
	name := model.Name{Namespace: "n", Name: "cache"}
	unknown := true
	tr := New(Config{NodeName: "here", IgnoreNetworkPolicies: true})
	tr.Apply(model.Delta{Full: true, NetworkPoliciesUnknown: &unknown,
		Services: map[model.Name]*model.Service{name: {Name: name, Type: model.ClusterIP,
			ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 1}}}},
		Slices: map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name, Family: model.IPv4,
			Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 11211}},
			Endpoints: []model.Endpoint{{Addr: guarded, Ready: true, Serving: true, Node: "here"},
				{Addr: other, Ready: true, Serving: true, Node: "here"}}}},
		NetworkPolicies: map[model.Name]*model.NetworkPolicy{name: {Name: name, Ingress: true}},
	})
	setTraversal(tr, donottrack.Traversal{DenyRulePods: []netip.Addr{guarded}})
	s := tr.State()
	if !slices.Equal(s.Node.MustTraverseNetfilter, []netip.Addr{guarded}) || s.Node.PoliciesUnknown {
		t.Errorf("policed pods %v, policies unknown %v", s.Node.MustTraverseNetfilter, s.Node.PoliciesUnknown)
	}
	for _, p := range s.Ports {
		for _, e := range p.Endpoints {
			if e.MustTraverseNetfilter != (e.Addr.Addr() == guarded) {
				t.Errorf("endpoint %+v", e)
			}
		}
	}
}

// A guarded pod is policed by the guard alone until a NetworkPolicy selects it as well,
// whether it is an endpoint or not.
func TestGuardedPodsThatANetworkPolicySelects(t *testing.T) {
	pod := netip.MustParseAddr("10.244.0.2")
	name := model.Name{Namespace: "n", Name: "cache"}
	for _, endpoint := range []bool{false, true} {
		tr := New(Config{NodeName: "here"})
		d := model.Delta{Full: true, Pods: map[model.Name]*model.Pod{name: {Name: name, Node: "here", IPs: []netip.Addr{pod}}}}
		if endpoint {
			d.Services = map[model.Name]*model.Service{name: {Name: name, Type: model.ClusterIP,
				ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
				Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 1}}}}
			d.Slices = map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name, Family: model.IPv4,
				Ports:     []model.EndpointPort{{Protocol: model.TCP, Port: 80}},
				Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: "here"}}}}
		}
		tr.Apply(d)
		check := func(when string, policed, guarded bool) {
			t.Helper()
			n := tr.State().Node
			if slices.Contains(n.MustTraverseNetfilter, pod) != policed || slices.Contains(n.DenyRuleOnlyPods, pod) != guarded {
				t.Errorf("endpoint %v, %s: policed %v, guarded %v", endpoint, when, n.MustTraverseNetfilter, n.DenyRuleOnlyPods)
			}
		}
		network := func(p *model.NetworkPolicy) {
			tr.Apply(model.Delta{NetworkPolicies: map[model.Name]*model.NetworkPolicy{name: p}})
		}
		check("at first", false, false)
		setTraversal(tr, donottrack.Traversal{DenyRulePods: []netip.Addr{pod}})
		check("guarded", true, true)
		network(&model.NetworkPolicy{Name: name, Ingress: true})
		check("selected too", true, false)
		network(nil)
		check("selected no more", true, true)
		network(&model.NetworkPolicy{Name: name, Egress: true})
		setTraversal(tr, donottrack.Traversal{})
		check("guarded no more", true, false)
		network(nil)
		check("at last", false, false)
	}
}
