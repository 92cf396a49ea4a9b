package intent

import (
	"fmt"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

func inNamespace(ns string, p *model.Pod) *model.Pod {
	p.Namespace = ns
	return p
}

func podOf(ns, n string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.Pod = model.Name{Namespace: ns, Name: n} }
}

// TestASliceCannotTakeAPodOutOfItsPolicy has a slice name no node or a wrong one, no
// pod or a wrong one, for the address of a pod of this node.
func TestASliceCannotTakeAPodOutOfItsPolicy(t *testing.T) {
	isWeb := labels{"app": "web"}
	victim := inNamespace("victim", podObject("v", here, isWeb, "10.1.0.1"))
	strict := networkPolicy("strict", isWeb)
	strict.Namespace = "victim"
	mine := podObject("mine", here, nil, "10.1.0.9")
	remote := podObject("remote", there, nil, "10.1.0.1")
	lines := clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"

	var rows []decision
	for _, node := range []string{"", there, here} {
		for what, claim := range map[string]func(*model.Endpoint){
			"no pod": func(*model.Endpoint) {}, "the pod": podOf("victim", "v"), "a pod of another namespace": podOf("ns", "mine"),
			"a pod that is not known": podOf("ns", "nobody"), "a remote pod": podOf("ns", "remote"),
		} {
			ep := sliceOf("s", at("10.1.0.1", node, claim))
			said := fmt.Sprintf("node %q, %s", node, what)
			rows = append(rows,
				decision{said + ": selected", []any{web(), ep, victim, mine, remote, strict}, lines + " here policed"},
				decision{said + ": no policy", []any{web(), ep, victim, mine, remote}, lines + " here"},
			)
			if node == here {
				rows = append(rows, decision{said + ": the pod is not known yet", []any{web(), ep, mine, strict}, lines + " here policed"})
			}
		}
	}
	other := networkPolicy("other", labels{"app": "db"})
	other.Namespace = "victim"
	rows = append(rows,
		decision{"a policy that selects another pod",
			[]any{web(), sliceOf("s", at("10.1.0.1", "", pod("mine"))), victim, mine, other}, lines + " here"},
		decision{"another namespace's slice, and no policy", []any{web(), sliceOf("s", at("10.1.0.1", here)), mine}, lines + " here"},
		decision{"a Local policy goes by nodeName alone", []any{web(internalLocal), sliceOf("s", at("10.1.0.1", there)), victim},
			"ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside drop inside drop"},
	)
	runDecisions(t, rows)
}

// TestTheNodesAddressIsHereWhateverASliceSays, while and because it is the node's.
func TestTheNodesAddressIsHereWhateverASliceSays(t *testing.T) {
	tr := newTracker(web(), sliceOf("s", at("192.168.0.1", there)))
	free := clusterIPLeadsTo + "-> 192.168.0.1:8080 cluster"
	c := setNodeAddrs(tr, addrs("192.168.0.1"))
	same(t, "changed ports", describe(c.Upserts), free+" here host")
	c = setNodeAddrs(tr, addrs("192.168.0.2"))
	same(t, "ports without the address", describe(c.Upserts), free)
}

// TestAnAddressOfTwoPodsIsNotOpen: one of them is gone, and the do-not-track policy may
// have meant that one.
func TestAnAddressOfTwoPodsIsNotOpen(t *testing.T) {
	tr := newTracker(web(), sliceOf("s", at("10.1.0.1", here)), podObject("old", here, nil, "10.1.0.1"))
	setTraversal(tr, donottrack.Traversal{AllowsAny: []donottrack.Target{{Addr: addr("10.1.0.1"), Protocol: model.TCP,
		First: 8080, Last: 8080}}})
	for _, step := range []struct {
		name string
		d    model.Delta
		open bool
	}{
		{"one pod", model.Delta{}, true},
		{"another one gets the address", delta(podObject("new", here, nil, "10.1.0.1")), false},
		{"the old one is gone", model.Delta{Pods: map[model.Name]*model.Pod{name("old"): nil}}, true},
	} {
		tr.Apply(step.d)
		if got := tr.State().Ports[0].Endpoints[0].AllowsAny; got != step.open {
			t.Errorf("%s: open %v, want %v", step.name, got, step.open)
		}
	}
}

func TestClaimedPods(t *testing.T) {
	tr := newTracker()
	gone := func(n string) model.Delta {
		return model.Delta{Pods: map[model.Name]*model.Pod{name(n): nil}}
	}
	for _, step := range []struct {
		name  string
		delta model.Delta
		want  []string // nil: the node does not change
	}{
		{"a pod that starts has no address", delta(podObject("p", here, nil)), nil},
		{"it gets two", delta(podObject("p", here, nil, "fd00::1", "10.1.0.2")), []string{"10.1.0.2", "fd00::1"}},
		{"its labels change nothing", delta(podObject("p", here, labels{"a": "b"}, "fd00::1", "10.1.0.2")), nil},
		{"a pod of another node", delta(podObject("q", there, nil, "10.1.0.3")), []string{"10.1.0.2", "fd00::1"}},
		{"a pod with the node's address", delta(podObject("h", here, nil, "192.168.0.1"),
			&model.Node{Name: here, Addresses: addrs("192.168.0.1")}), []string{"10.1.0.2", "fd00::1"}},
		{"another gets the address of one that is not gone yet", delta(podObject("r", here, nil, "10.1.0.2")), nil},
		{"the first is gone", gone("p"), []string{"10.1.0.2"}},
		{"the other gets another address", delta(podObject("r", here, nil, "10.1.0.4")), []string{"10.1.0.4"}},
		{"it is another node's", delta(podObject("r", there, nil, "10.1.0.4")), []string{}},
		{"all is forgotten", whole(delta(podObject("s", here, nil, "10.1.0.5"))), []string{"10.1.0.5"}},
	} {
		c := tr.Apply(step.delta)
		if (c.Node != nil) != (step.want != nil) {
			t.Errorf("%s: node changes to %+v, want claimed pods %v", step.name, c.Node, step.want)
		} else if c.Node != nil && !equalStrings(stringsOf(c.Node.KnownPods), step.want) {
			t.Errorf("%s: claimed pods %v, want %v", step.name, c.Node.KnownPods, step.want)
		}
	}
}

func TestUnhookedPods(t *testing.T) {
	tr := newTracker()
	pod := func(n, node, uid string) model.Delta {
		p := podObject(n, node, nil, "10.1.0.2")
		p.UnhookedUID = uid
		return delta(p)
	}
	for _, step := range []struct {
		name  string
		delta model.Delta
		want  []string
	}{
		{"a pod with hooks", pod("p", here, ""), nil},
		{"it is annotated", pod("p", here, "u2"), []string{"u2"}},
		{"another one", pod("q", here, "u1"), []string{"u1", "u2"}},
		{"one of another node", pod("r", there, "u3"), []string{"u1", "u2"}},
		{"the annotation is removed", pod("p", here, ""), []string{"u1"}},
		{"a pod of this name is created again", pod("q", here, "u4"), []string{"u4"}},
		{"the pod is deleted", model.Delta{Pods: map[model.Name]*model.Pod{name("q"): nil}}, nil},
	} {
		tr.Apply(step.delta)
		if got := tr.State().Node.UnhookedPods; !slices.Equal(got, step.want) {
			t.Errorf("%s: unhooked pods %v, want %v", step.name, got, step.want)
		}
	}
}

func TestPoliciesExist(t *testing.T) {
	yes, no := true, false
	gone := model.Delta{NetworkPolicies: map[model.Name]*model.NetworkPolicy{name("np"): nil}}
	tr := newTracker()
	for _, step := range []struct {
		name string
		do   func() Changes
		want bool
	}{
		{"none", func() Changes { return Changes{} }, false},
		{"one of any namespace", func() Changes { return tr.Apply(delta(networkPolicy("np", labels{"app": "web"}))) }, true},
		{"it goes", func() Changes { return tr.Apply(gone) }, false},
		{"one of no direction", func() Changes { return tr.Apply(delta(&model.NetworkPolicy{Name: name("np")})) }, false},
		{"they cannot be read", func() Changes { return tr.Apply(model.Delta{NetworkPoliciesUnknown: &yes}) }, true},
		{"they can", func() Changes { return tr.Apply(model.Delta{NetworkPoliciesUnknown: &no}) }, false},
		{"guards cannot be read", func() Changes { return setTraversal(tr, donottrack.Traversal{Unknown: true}) }, true},
		{"they can", func() Changes { return setTraversal(tr, donottrack.Traversal{}) }, false},
	} {
		before := tr.State().Node.PoliciesExist
		c := step.do()
		if got := tr.State().Node.PoliciesExist; got != step.want {
			t.Errorf("%s: %v, want %v", step.name, got, step.want)
		}
		if before != step.want && (c.Node == nil || c.Node.PoliciesExist != step.want) {
			t.Errorf("%s: not told: %+v", step.name, c.Node)
		}
	}
	tr = New(Config{NodeName: here, IgnoreNetworkPolicies: true})
	if tr.Apply(delta(networkPolicy("np", nil))); tr.State().Node.PoliciesExist {
		t.Error("policies exist that are to be ignored")
	}
}
