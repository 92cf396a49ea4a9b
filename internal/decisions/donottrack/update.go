package donottrack

import (
	"maps"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// onPolicy computes the rules of a policy, and marks dirty what it selects.
func (t *Tracker) onPolicy(name string, old, spec *model.DoNotTrackPolicy) {
	t.markPolicyDirty(name)
	if old != nil {
		delete(t.policies, name)
		t.outgoing = slices.DeleteFunc(t.outgoing, func(r *rule) bool { return r.Policy == name })
	}
	if spec != nil {
		p := newPolicy(spec)
		first := len(t.policies) == 0
		t.policies[name] = p
		if first && old == nil {
			t.rulePorts = t.portsOfRules()
			t.countAll()
		}
		for _, r := range p.rules {
			if r.outgoing() {
				t.outgoing = append(t.outgoing, r)
				t.natStale = append(t.natStale, r)
			}
		}
		t.markPolicyDirty(name)
	}
	if len(t.policies) == 0 {
		t.nat, t.pendingRemoval, t.rulePorts = newNATIndex(), newNATIndex(), nil
		return
	}
	if now := t.portsOfRules(); !now.equal(t.rulePorts) {
		t.countLargeSlices(-1)
		t.rulePorts = now
		t.countLargeSlices(1)
	}
}

// countAll fills the index of addresses where netfilter translates.
func (t *Tracker) countAll() {
	t.nat, t.pendingRemoval = newNATIndex(), newNATIndex()
	t.countServices(1)
	for name := range t.podsOnNode {
		t.countHostPorts(t.facts.Pod(name), 1)
	}
}

// markPolicyDirty marks every address dirty that a policy selects or selected.
func (t *Tracker) markPolicyDirty(name string) {
	for a, ps := range t.wantedOf {
		if slices.ContainsFunc(ps, func(p *policy) bool { return p.spec.Name == name }) {
			t.dirty[a] = struct{}{}
		}
	}
	p := t.policies[name]
	switch {
	case p == nil:
	case p.spec.Nodes != nil:
		t.markOwnDirty()
	default:
		for name := range t.podsOnNode {
			if pod := t.facts.Pod(name); t.selectsPod(p.spec.Pods, pod) {
				t.markPodDirty(pod)
			}
		}
	}
}

func (t *Tracker) markOwnDirty() {
	for _, a := range t.own {
		t.dirty[a] = struct{}{}
	}
}

// selectsPod reports whether a selection selects a pod.
func (t *Tracker) selectsPod(s *model.PodSelection, pod *model.Pod) bool {
	return selects(s, pod.Labels, namespaceLabels(pod.Namespace, t.facts.Namespace(pod.Namespace)))
}

// namespaceLabels returns the labels of a namespace; n is nil if it is not known.
func namespaceLabels(name string, n *model.Namespace) map[string]string {
	if n != nil {
		return n.Labels
	}
	// Every namespace has this label; its other labels are not known (yet).
	return map[string]string{"kubernetes.io/metadata.name": name}
}

// onNamespace moves the pods of a namespace into and out of the peers of rules.
func (t *Tracker) onNamespace(name string, before, now *model.Namespace) {
	if before != nil && now != nil && maps.Equal(before.Labels, now.Labels) {
		return
	}
	t.mayAffectRunning = true
	t.eachWantedRule(func(r *rule) {
		if !slices.ContainsFunc(r.pods, func(s *model.PodSelection) bool { return s.Namespaces != nil }) {
			return
		}
		for pod := range t.facts.PodsIn(name) {
			t.addPeers(r, t.facts.Pod(pod), before, -1)
			t.addPeers(r, t.facts.Pod(pod), now, 1)
		}
	})
	for pod := range t.podsOnNode {
		if pod.Namespace == name {
			t.markPodDirty(t.facts.Pod(pod))
		}
	}
}

func (t *Tracker) eachWantedRule(do func(*rule)) {
	seen := map[*rule]bool{}
	for _, ps := range t.wantedOf {
		for _, p := range ps {
			for _, r := range p.rules {
				if !seen[r] && len(r.pods) > 0 {
					seen[r] = true
					do(r)
				}
			}
		}
	}
}

// onPod moves a pod into and out of the peers of rules, and marks its addresses dirty.
func (t *Tracker) onPod(name model.Name, before, now *model.Pod) {
	if before != nil && now != nil && before.Node == now.Node && maps.Equal(before.Labels, now.Labels) &&
		slices.Equal(before.IPs, now.IPs) && slices.Equal(before.HostPorts, now.HostPorts) {
		return
	}
	t.mayAffectRunning = t.mayAffectRunning || before != nil && now != nil && !maps.Equal(before.Labels, now.Labels)
	namespace := t.facts.Namespace(name.Namespace)
	for _, change := range []struct {
		pod *model.Pod
		by  int
	}{{before, -1}, {now, 1}} {
		if change.pod == nil {
			continue
		}
		t.eachWantedRule(func(r *rule) { t.addPeers(r, change.pod, namespace, change.by) })
		t.markPodDirty(change.pod)
		if len(t.policies) > 0 {
			t.countHostPorts(change.pod, change.by)
		}
	}
	if t.facts.OnThisNode(name) {
		t.podsOnNode[name] = struct{}{}
	} else {
		delete(t.podsOnNode, name)
	}
}

// markPodDirty marks the addresses of a pod of this node dirty, if there is a policy.
func (t *Tracker) markPodDirty(p *model.Pod) {
	if len(t.policies) == 0 || p.Node != t.cfg.NodeName {
		return
	}
	for _, a := range p.IPs {
		t.dirty[a.Unmap()] = struct{}{}
	}
}

// onNode marks this node's addresses dirty when its labels change.
func (t *Tracker) onNode(name string, before, now *model.Node) {
	if name != t.cfg.NodeName || before != nil && now != nil && maps.Equal(before.Labels, now.Labels) {
		return
	}
	t.markOwnDirty()
}

// onService counts where netfilter translates for a Service. Whether this agent serves it
// decides which program translates for its endpoints.
func (t *Tracker) onService(name model.Name, before, now *model.Service) {
	if len(t.policies) == 0 {
		return
	}
	if before != nil {
		t.countService(before, -1)
	}
	t.countSlicesOf(name, before, -1)
	if now != nil {
		t.countService(now, 1)
	}
	t.countSlicesOf(name, now, 1)
}

func (t *Tracker) countSlicesOf(name model.Name, service *model.Service, by int) {
	for _, s := range t.facts.SlicesOf(name, nil) {
		t.countSlice(s.Object, service, by)
	}
}

// onSlice counts where netfilter translates for the endpoints of a slice.
func (t *Tracker) onSlice(_ model.Name, before, now *model.EndpointSlice) {
	if len(t.policies) == 0 {
		return
	}
	if before != nil {
		t.countSlice(before, t.facts.Service(before.Service), -1)
	}
	if now != nil {
		t.countSlice(now, t.facts.Service(now.Service), 1)
	}
}
