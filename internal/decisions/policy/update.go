package policy

import (
	"maps"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

type podName = model.Name

// onPolicyUpdate stores a policy; nil deletes it.
func (t *Tracker) onPolicyUpdate(name string, spec *model.DoNotTrackPolicy) {
	old := t.policies[name]
	if old == nil && spec == nil {
		return
	}
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
		t.nat, t.pendingRemoval = newNATIndex(), newNATIndex()
	}
}

// countAll fills the index of addresses where netfilter translates.
func (t *Tracker) countAll() {
	t.nat, t.pendingRemoval = newNATIndex(), newNATIndex()
	t.countServices(1)
	for _, p := range t.pods {
		t.countHostPorts(p, 1)
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
		for a, names := range t.podsOnNode {
			if slices.ContainsFunc(names, func(n podName) bool {
				return selects(p.spec.Pods, t.pods[n].Labels, t.namespaceLabels(n.Namespace))
			}) {
				t.dirty[a] = struct{}{}
			}
		}
	}
}

func (t *Tracker) markOwnDirty() {
	for _, a := range t.own {
		t.dirty[a] = struct{}{}
	}
}

func (t *Tracker) namespaceLabels(name string) map[string]string {
	if n := t.namespaces[name]; n != nil {
		return n.Labels
	}
	// Every namespace has this label; its other labels are not known (yet).
	return map[string]string{"kubernetes.io/metadata.name": name}
}

// onNamespaceUpdate stores a Namespace; nil deletes it.
func (t *Tracker) onNamespaceUpdate(name string, n *model.Namespace) {
	old := t.namespaces[name]
	if old != nil && n != nil && maps.Equal(old.Labels, n.Labels) {
		return
	}
	t.mayAffectRunning = true
	t.eachWantedRule(func(r *rule) { t.countNamespace(r, name, -1) })
	if n != nil {
		t.namespaces[name] = n
	} else {
		delete(t.namespaces, name)
	}
	t.eachWantedRule(func(r *rule) { t.countNamespace(r, name, 1) })
	for _, names := range t.podsOnNode {
		for _, pod := range names {
			if pod.Namespace == name {
				t.markPodDirty(t.pods[pod])
			}
		}
	}
}

func (t *Tracker) countNamespace(r *rule, namespace string, by int) {
	if !slices.ContainsFunc(r.pods, func(s *model.PodSelection) bool { return s.Namespaces != nil }) {
		return
	}
	for name := range t.pods {
		if name.Namespace == namespace {
			t.addPeers(r, name, by)
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

// onPodUpdate stores a Pod; nil deletes it.
func (t *Tracker) onPodUpdate(name model.Name, p *model.Pod) {
	old := t.pods[name]
	if old == nil && p == nil || old != nil && p != nil && old.Node == p.Node && maps.Equal(old.Labels, p.Labels) &&
		slices.Equal(old.IPs, p.IPs) && slices.Equal(old.HostPorts, p.HostPorts) {
		return
	}
	t.mayAffectRunning = t.mayAffectRunning || old != nil && p != nil && !maps.Equal(old.Labels, p.Labels)
	if old != nil {
		t.eachWantedRule(func(r *rule) { t.addPeers(r, name, -1) })
		t.setPod(old, false)
		delete(t.pods, name)
	}
	if p != nil {
		t.pods[name] = p
		t.setPod(p, true)
		t.eachWantedRule(func(r *rule) { t.addPeers(r, name, 1) })
	}
}

// setPod adds a pod of this node to the index by address, or removes it.
func (t *Tracker) setPod(p *model.Pod, in bool) {
	if p.Node != t.cfg.NodeName {
		return
	}
	t.markPodDirty(p)
	if len(t.policies) > 0 {
		t.countHostPorts(p, map[bool]int{true: 1, false: -1}[in])
	}
	for _, a := range p.IPs {
		a = a.Unmap()
		names := slices.DeleteFunc(t.podsOnNode[a], func(n podName) bool { return n == p.Name })
		if in {
			names = append(names, p.Name)
		}
		if len(names) > 0 {
			t.podsOnNode[a] = names
		} else {
			delete(t.podsOnNode, a)
		}
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

// onNodeUpdate stores this node; nil deletes it.
func (t *Tracker) onNodeUpdate(n *model.Node) {
	if t.node != nil && n != nil && maps.Equal(t.node.Labels, n.Labels) {
		t.node = n
		return
	}
	t.node = n
	t.markOwnDirty()
}

// onServiceUpdate stores a Service; nil deletes it. Whether this agent serves it decides
// which program translates for its endpoints.
func (t *Tracker) onServiceUpdate(name model.Name, s *model.Service) {
	old := t.services[name]
	if old == nil && s == nil {
		return
	}
	counted := len(t.policies) > 0
	if counted {
		if old != nil {
			t.countService(old, -1)
		}
		t.countSlicesOf(name, -1)
	}
	if s != nil {
		t.services[name] = s
	} else {
		delete(t.services, name)
	}
	if counted {
		if s != nil {
			t.countService(s, 1)
		}
		t.countSlicesOf(name, 1)
	}
}

func (t *Tracker) countSlicesOf(service model.Name, by int) {
	for name := range t.slicesOf[service] {
		t.countSlice(t.slices[name], by)
	}
}

// onSliceUpdate stores an EndpointSlice; nil deletes it.
func (t *Tracker) onSliceUpdate(name model.Name, s *model.EndpointSlice) {
	if old := t.slices[name]; old != nil {
		if len(t.policies) > 0 {
			t.countSlice(old, -1)
		}
		delete(t.slices, name)
		delete(t.slicesOf[old.Service], name)
		if len(t.slicesOf[old.Service]) == 0 {
			delete(t.slicesOf, old.Service)
		}
	}
	if s == nil {
		return
	}
	t.slices[name] = s
	if t.slicesOf[s.Service] == nil {
		t.slicesOf[s.Service] = map[model.Name]struct{}{}
	}
	t.slicesOf[s.Service][name] = struct{}{}
	if len(t.policies) > 0 {
		t.countSlice(s, 1)
	}
}
