package intent

import (
	"maps"
	"reflect"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// onService records the addresses that a Service requests, and marks dirty what they
// conflict with. A Service of another proxy counts as deleted.
func (t *Tracker) onService(name model.Name, _, svc *model.Service) {
	if svc != nil && svc.ProxyName != t.cfg.ProxyName {
		svc = nil
	}
	e := t.services[name]
	if svc == nil && (e == nil || e.spec == nil) {
		return
	}
	p := plan{}
	if svc != nil {
		p = planService(svc, &t.cfg)
	}
	t.replan(name, svc, p)
}

// replan replaces what a Service requests; a nil spec deletes it.
func (t *Tracker) replan(name model.Name, svc *model.Service, now plan) {
	e := t.serviceNamed(name)
	t.markDirty(e)
	if e.spec != nil {
		t.eachRequest(e, func(key addressKey, c requester) {
			t.addresses.remove(key, c.id())
			if mayConflict(c.kind) {
				t.conflictable.Remove(key.Addr, e)
			}
		})
	}
	before := e.plan
	t.redirecting.Remove(before.redirect, e)
	e.spec, e.plan = svc, now
	if svc != nil {
		if e.plan.redirect != (model.Name{}) {
			t.redirecting.Add(e.plan.redirect, e)
		}
		t.eachRequest(e, func(key addressKey, c requester) {
			t.addresses.add(key, c)
			if mayConflict(c.kind) {
				t.conflictable.Add(key.Addr, e)
			}
		})
	}
	t.markConflictingDirty(before)
	t.markConflictingDirty(e.plan)
}

// serviceNamed returns the entry of a Service, and creates it if necessary.
func (t *Tracker) serviceNamed(name model.Name) *service {
	e := t.services[name]
	if e == nil {
		e = &service{name: name}
		t.services[name] = e
	}
	return e
}

// eachRequest calls do with every address and port that a Service requests.
func (t *Tracker) eachRequest(e *service, do func(addressKey, requester)) {
	for i := range e.plan.ports {
		p := &e.plan.ports[i]
		for _, c := range p.requests {
			do(c.key, requester{service: e, port: p, kind: c.kind})
		}
	}
	if c := e.plan.health; c != nil {
		do(c.key, requester{service: e, kind: c.kind})
	}
}

// markConflictingDirty marks the Services dirty that request an address and port of the
// plan, or conflict with it: their address conflict may have appeared or been resolved.
func (t *Tracker) markConflictingDirty(p plan) {
	touch := func(key addressKey) {
		for _, c := range t.addresses.requesters[key] {
			t.markDirty(c.service)
		}
		t.markNodePortConflictsDirty(key)
		t.markHostPortDirty(key)
	}
	for i := range p.ports {
		for _, c := range p.ports[i].requests {
			touch(c.key)
		}
	}
	if p.health != nil {
		touch(p.health.key)
	}
}

// onSlice marks dirty what depends on a slice.
func (t *Tracker) onSlice(name model.Name, before, now *model.EndpointSlice) {
	moved := before == nil || now == nil || !store.SameReferences(before, now)
	for _, s := range []*model.EndpointSlice{before, now} {
		if s == nil {
			continue
		}
		if moved || !slices.Equal(before.Ports, now.Ports) {
			t.markEndpointConflictsDirty(s)
		}
		t.markDirty(t.serviceNamed(s.Service))
	}
	if moved {
		setMustTraverse(t, t.own.mustTraverseOfSlice, name, nil)
	}
}

// onNetworkPolicy marks dirty what depends on a NetworkPolicy.
func (t *Tracker) onNetworkPolicy(name model.Name, before, now *model.NetworkPolicy) {
	if t.cfg.IgnoreNetworkPolicies || before != nil && now != nil && reflect.DeepEqual(before.Selector, now.Selector) {
		return
	}
	if any := t.anyNetworkPolicy(); any != t.own.anyPolicy {
		// Endpoints on this node whose pods are unknown depend on any policy.
		t.own.anyPolicy, t.own.stale = any, true
		for s := range t.facts.SlicesOnNode() {
			t.markDirty(t.serviceNamed(s.Object.Service))
		}
		t.markHostPortsDirty()
	}
	for s := range t.facts.SlicesIn(name.Namespace) {
		t.markDirty(t.serviceNamed(s.Object.Service))
	}
	for pod := range t.facts.PodsIn(name.Namespace) {
		t.markPodDirty(t.facts.Pod(pod))
	}
}

// onPoliciesUnknown marks the Node dirty. No endpoint depends on it.
func (t *Tracker) onPoliciesUnknown() { t.own.stale = true }

// onPod marks dirty what depends on a Pod.
func (t *Tracker) onPod(name model.Name, before, now *model.Pod) {
	t.own.noteUnhooked(t.cfg.NodeName, name, now)
	t.onHostPorts(name, before, now)
	if before != nil && now != nil && before.Node == now.Node && maps.Equal(before.Labels, now.Labels) && slices.Equal(before.IPs, now.IPs) {
		return
	}
	if before != nil {
		t.markPodDirty(before)
		t.own.countPod(t.cfg.NodeName, before, -1)
	}
	if now != nil {
		t.markPodDirty(now)
		t.own.countPod(t.cfg.NodeName, now, 1)
	}
	t.markSlicesDirty(t.facts.SlicesOfPod(name))
}

// markPodDirty marks everything dirty that depends on a pod's labels, apart from the
// slices that name it.
func (t *Tracker) markPodDirty(p *model.Pod) {
	for _, a := range p.IPs {
		t.markEndpointDirty(a.Unmap())
		t.markAddressConflictsDirty(a.Unmap())
	}
	if p.Node == t.cfg.NodeName {
		t.own.dirtyPods[p.Name] = struct{}{}
	}
}
