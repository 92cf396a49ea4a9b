package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// Which packets must traverse netfilter: those of pods that a NetworkPolicy selects, and
// those of pods with a deny rule. Other packets may bypass it.

// doNotTrack is what do-not-track policies mean for the bypass, by address.
type doNotTrack struct {
	denyRule  map[netip.Addr]struct{}
	allowsAny map[netip.Addr][]donottrack.Target
	unknown   bool
}

// SetTraversal sets what do-not-track policies mean for the bypass of netfilter, complete
// each time.
func (t *Tracker) SetTraversal(now donottrack.Traversal) {
	before := t.doNotTrack
	t.doNotTrack = doNotTrack{denyRule: map[netip.Addr]struct{}{}, allowsAny: map[netip.Addr][]donottrack.Target{}, unknown: now.Unknown}
	for _, a := range now.DenyRulePods {
		t.doNotTrack.denyRule[a] = struct{}{}
	}
	for _, p := range now.AllowsAny {
		t.doNotTrack.allowsAny[p.Addr] = append(t.doNotTrack.allowsAny[p.Addr], p)
	}
	for _, pair := range [][2]doNotTrack{{before, t.doNotTrack}, {t.doNotTrack, before}} {
		for a := range pair[0].denyRule {
			if _, same := pair[1].denyRule[a]; !same {
				t.markEndpointDirty(a)
			}
		}
		for a, ports := range pair[0].allowsAny {
			if !slices.Equal(ports, pair[1].allowsAny[a]) {
				t.markEndpointDirty(a)
			}
		}
	}
	t.own.stale = t.own.stale || before.unknown != now.Unknown
	t.own.denyRulePods = t.replaceMustTraverse(t.own.denyRulePods, slices.Clone(now.DenyRulePods))
}

// anyAllowed reports whether a policy allows any client to reach an endpoint. It is false
// for an address of two Pods: one of them was deleted, and the policy may select that one.
func (t *Tracker) anyAllowed(proto model.Protocol, addr netip.AddrPort) bool {
	return len(t.facts.PodsAt(addr.Addr())) <= 1 && slices.ContainsFunc(t.doNotTrack.allowsAny[addr.Addr()], func(p donottrack.Target) bool {
		return p.Protocol == proto && p.First <= addr.Port() && addr.Port() <= p.Last
	})
}

// mustTraverseNetfilter reports whether packets of an endpoint must traverse netfilter.
func (t *Tracker) mustTraverseNetfilter(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	_, denyRule := t.doNotTrack.denyRule[addr]
	return denyRule || t.selected(namespace, ep, addr)
}

// selected reports whether a NetworkPolicy selects, or may select, the pod that has the
// endpoint's address. Any author of a slice can name any pod, node and Service in it. A
// slice can therefore make an endpoint selected, but never unselected. The namespace is
// the slice's.
func (t *Tracker) selected(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	if !t.anyNetworkPolicy() {
		return false
	}
	known := t.facts.PodsAt(addr)
	switch {
	case slices.ContainsFunc(known, t.podSelected):
		return true
	case ep.Pod.Name != "" && t.podSelected(ep.Pod):
		return true
	case t.podOnThisNode(addr):
		return false
	case onNode(ep, t.cfg.NodeName):
		// A pod of this node, of any namespace, whose object is not known yet.
		return true
	}
	// An endpoint without a node is usually outside the cluster.
	return ep.Pod.Name == "" && len(known) == 0 && ep.Node != "" && len(t.facts.NetworkPolicies(namespace)) > 0
}

// mostSelectorParts is how many parts of the selectors of a namespace are compared with a pod. An
// author of NetworkPolicies can write millions of them.
const mostSelectorParts = 4096

// podSelected reports whether a NetworkPolicy selects, or may select, a pod. One call of Changes
// asks for a pod once, although any number of endpoints can name it.
func (t *Tracker) podSelected(name model.Name) bool {
	selected, known := t.selectedPods[name]
	if !known {
		selected = t.maySelect(name)
		t.selectedPods[name] = selected
	}
	return selected
}

// maySelect compares the selectors of a pod's namespace. Any selector may select a pod whose labels
// are not known, and those past mostSelectorParts any pod.
func (t *Tracker) maySelect(name model.Name) bool {
	policies, pod := t.facts.NetworkPolicies(name.Namespace), t.facts.Pod(name)
	if pod == nil {
		return len(policies) > 0
	}
	parts := 0
	return slices.ContainsFunc(policies, func(p *model.NetworkPolicy) bool {
		parts += 1 + p.Selector.Parts()
		return parts > mostSelectorParts || p.Selector.Matches(pod.Labels)
	})
}

// anyNetworkPolicy reports whether a NetworkPolicy may require netfilter.
func (t *Tracker) anyNetworkPolicy() bool {
	return !t.cfg.IgnoreNetworkPolicies && t.facts.AnyNetworkPolicy()
}

// policiesUnknown reports whether a policy that is not known may require netfilter.
func (t *Tracker) policiesUnknown() bool {
	return t.doNotTrack.unknown || !t.cfg.IgnoreNetworkPolicies && t.facts.NetworkPoliciesUnknown()
}

// podOnThisNode reports whether a Pod of this node has the address.
func (t *Tracker) podOnThisNode(a netip.Addr) bool {
	return slices.ContainsFunc(t.facts.PodsAt(a), t.facts.OnThisNode)
}

// updateSlicePods computes which addresses of this node must traverse netfilter because of
// a slice. A Pod of this node that has the address takes precedence over the slice.
func (t *Tracker) updateSlicePods(s *store.Slice) {
	if !s.MayBeOnNode {
		return
	}
	var now []netip.Addr
	for i := range s.Object.Endpoints {
		ep := &s.Object.Endpoints[i]
		a := ep.Addr
		if a.IsValid() && onNode(ep, t.cfg.NodeName) && !t.podOnThisNode(a) && t.selected(s.Object.Service.Namespace, ep, a) {
			now = append(now, a)
		}
	}
	setMustTraverse(t, t.own.mustTraverseOfSlice, s.Object.Name, now)
}

// updatePods computes which addresses must traverse netfilter because of the dirty pods.
func (t *Tracker) updatePods() {
	for name := range t.own.dirtyPods {
		var now []netip.Addr
		if t.facts.OnThisNode(name) && t.anyNetworkPolicy() && t.podSelected(name) {
			for _, a := range t.facts.Pod(name).IPs {
				now = append(now, a.Unmap())
			}
		}
		setMustTraverse(t, t.own.mustTraverseOfPod, name, now)
	}
	clear(t.own.dirtyPods)
}

// setMustTraverse replaces the addresses that must traverse netfilter because of one pod
// or slice.
func setMustTraverse(t *Tracker, because map[model.Name][]netip.Addr, name model.Name, now []netip.Addr) {
	if now = t.replaceMustTraverse(because[name], now); len(now) > 0 {
		because[name] = now
	} else {
		delete(because, name)
	}
}

// replaceMustTraverse counts the reasons why addresses must traverse netfilter: one reason
// for each address before goes, and one for each address now comes. It returns now.
func (t *Tracker) replaceMustTraverse(before, now []netip.Addr) []netip.Addr {
	if slices.Equal(before, now) {
		return now
	}
	for _, a := range now {
		t.own.mustTraverse[a]++
		t.own.stale = t.own.stale || t.own.mustTraverse[a] <= 2 // the second may be beside a deny rule
	}
	for _, a := range before {
		t.own.mustTraverse[a]--
		t.own.stale = t.own.stale || t.own.mustTraverse[a] < 2
		if t.own.mustTraverse[a] == 0 {
			delete(t.own.mustTraverse, a)
		}
	}
	return now
}
