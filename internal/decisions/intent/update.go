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
	if svc == nil && (e == nil || e.spec == nil && e.next == nil) {
		return
	}
	e = t.serviceNamed(name)
	e.next, e.demand = &nextPlan{spec: svc}, demand{}
	if svc != nil {
		e.next.plan = planService(svc, &t.cfg)
		e.demand = e.next.plan.demand(svc)
	}
	t.markDirty(e)
}

// nextPlan is a plan without ports. A nil spec deletes the Service.
type nextPlan struct {
	spec *model.Service
	plan plan
}

// planDirty plans the dirty Services that have changed, and those that now fit, or no longer do.
// The addresses of a Service times its ports can be many more than its object has: one that does
// not fit requests none.
func (t *Tracker) planDirty() {
	for _, e := range t.dirty[:len(t.dirty):len(t.dirty)] { // replan adds others
		_, refused := t.most.refused[e]
		next := e.next
		if next == nil {
			if e.spec == nil || e.spec.Type == model.HostPorts || refused == e.portless {
				continue
			}
			next = &nextPlan{e.spec, planService(e.spec, &t.cfg)}
		}
		if next.spec != nil && !refused {
			next.plan.addPorts(next.spec, &t.cfg)
		}
		next.plan.addrs = nil
		t.replan(e, next.spec, next.plan)
		e.next, e.portless = nil, refused
	}
}

// replan replaces what a Service requests; a nil spec deletes it.
func (t *Tracker) replan(e *service, svc *model.Service, now plan) {
	t.markDirty(e)
	before := e.plan
	t.redirecting.Remove(before.redirect, e)
	if now.redirect != (model.Name{}) {
		t.redirecting.Add(now.redirect, e)
	}
	if sameRequests(e.spec, svc, &before, &now) {
		now.ports, now.health = before.ports, before.health // those in the table
		e.spec, e.plan = svc, now
		return
	}
	if e.spec != nil {
		t.eachRequest(e, func(key addressKey, c requester) {
			t.addresses.remove(key, c.id())
			if mayConflict(c.kind) {
				t.conflictable.Remove(key.Addr, e)
			}
		})
	}
	e.spec, e.plan = svc, now
	if svc != nil {
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

// sameRequests reports whether a Service requests what it did, with the same rank.
func sameRequests(was, is *model.Service, before, now *plan) bool {
	if was == nil || is == nil || was.Type != is.Type || !was.Created.Equal(is.Created) || (before.health == nil) != (now.health == nil) {
		return false
	}
	return (before.health == nil || *before.health == *now.health) && slices.EqualFunc(before.ports, now.ports, func(p, q portPlan) bool {
		return p.id == q.id && p.helper == q.helper && p.ofFTP == q.ofFTP && slices.Equal(p.requests, q.requests)
	})
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
