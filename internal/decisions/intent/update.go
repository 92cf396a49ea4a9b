package intent

import (
	"maps"
	"reflect"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// forget deletes every object that a full Delta does not name.
func (t *Tracker) forget(d model.Delta) {
	for name := range t.store.nodes {
		if d.Nodes[name] == nil {
			t.onNodeUpdate(name, nil)
		}
	}
	for namespace := range t.store.policies {
		for name := range t.store.policies[namespace] {
			if d.NetworkPolicies[name] == nil {
				t.onNetworkPolicyUpdate(name, nil)
			}
		}
	}
	for name := range t.store.pods {
		if d.Pods[name] == nil {
			t.onPodUpdate(name, nil)
		}
	}
	for name := range t.services {
		if d.Services[name] == nil {
			t.onServiceUpdate(name, nil)
		}
	}
	for name := range t.store.slices {
		if d.Slices[name] == nil {
			t.onSliceUpdate(name, nil)
		}
	}
}

// onServiceUpdate stores a Service; nil deletes it. A Service of another proxy counts as
// deleted.
func (t *Tracker) onServiceUpdate(name model.Name, svc *model.Service) {
	if svc != nil && svc.ProxyName != t.cfg.ProxyName {
		svc = nil
	}
	e := t.services[name]
	if svc == nil && (e == nil || e.spec == nil) {
		return
	}
	e = t.serviceNamed(name)
	t.markDirty(e)
	if e.spec != nil {
		t.eachRequest(e, func(key addressKey, c requester) {
			t.addresses.remove(key, c.id)
			if mayConflict(c.kind) {
				removeFrom(t.conflictable, key.Addr, e)
			}
		})
	}
	before := e.plan
	e.spec, e.plan = svc, plan{}
	if svc != nil {
		e.plan = planService(svc, t.cfg.RefuseExternalIPs)
		t.eachRequest(e, func(key addressKey, c requester) {
			t.addresses.add(key, c)
			if mayConflict(c.kind) {
				addTo(t.conflictable, key.Addr, e)
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
		e = &service{name: name, health: HealthCheck{Service: name}}
		t.services[name] = e
	}
	return e
}

// eachRequest calls do with every address and port that a Service requests.
func (t *Tracker) eachRequest(e *service, do func(addressKey, requester)) {
	for i := range e.plan.ports {
		p := &e.plan.ports[i]
		for _, c := range p.requests {
			do(c.key, requester{id: p.id, kind: c.kind, created: e.spec.Created})
		}
	}
	if c := e.plan.health; c != nil {
		do(c.key, requester{id: healthCheckID(e.name), kind: c.kind, created: e.spec.Created})
	}
}

// markConflictingDirty marks the Services dirty that request an address and port of the
// plan, or conflict with it: their address conflict may have appeared or been resolved.
func (t *Tracker) markConflictingDirty(p plan) {
	touch := func(key addressKey) {
		for _, c := range t.addresses.requesters[key] {
			t.markDirty(t.services[c.id.Service])
		}
		t.markNodePortConflictsDirty(key)
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

// onSliceUpdate stores an EndpointSlice; nil deletes it.
func (t *Tracker) onSliceUpdate(name model.Name, object *model.EndpointSlice) {
	s := t.store.slices[name]
	if s != nil && object != nil && indexedAlike(s.object, object) {
		if !slices.Equal(s.object.Ports, object.Ports) {
			t.markEndpointConflictsDirty(object)
		}
		s.object = object
		t.markDirty(s.service)
		return
	}
	if s != nil {
		t.store.removeFromIndexes(s)
		t.markEndpointConflictsDirty(s.object)
		t.setMustTraverse(&s.mustTraverse, nil)
		s.service.slices = slices.DeleteFunc(s.service.slices, func(o *slice) bool { return o == s })
		t.markDirty(s.service)
		delete(t.store.slices, name)
	}
	if object == nil {
		return
	}
	s = &slice{object: object, service: t.serviceNamed(object.Service)}
	t.store.slices[name] = s
	t.store.addToIndexes(s)
	t.markEndpointConflictsDirty(object)
	at, _ := slices.BinarySearchFunc(s.service.slices, name, func(o *slice, n model.Name) int {
		return compareNames(o.object.Name, n)
	})
	s.service.slices = slices.Insert(s.service.slices, at, s)
	t.markDirty(s.service)
}

// onNetworkPolicyUpdate stores a NetworkPolicy; nil deletes it.
func (t *Tracker) onNetworkPolicyUpdate(name model.Name, p *model.NetworkPolicy) {
	if !hasRules(p) {
		p = nil
	}
	set := t.store.policies[name.Namespace]
	old := set[name]
	if p == old || p != nil && old != nil && reflect.DeepEqual(p.Selector, old.Selector) {
		return
	}
	had := len(t.store.policies) > 0
	switch {
	case p != nil && set == nil:
		t.store.policies[name.Namespace] = policySet{name: p}
	case p != nil:
		set[name] = p
	default:
		delete(set, name)
		if len(set) == 0 {
			delete(t.store.policies, name.Namespace)
		}
	}
	if has := len(t.store.policies) > 0; has != had {
		// Endpoints on this node whose pods are unknown depend on any policy.
		t.own.stale = true
		for s := range t.store.slicesOnNode {
			t.markDirty(s.service)
		}
	}
	for s := range t.store.slicesOfNS[name.Namespace] {
		t.markDirty(s.service)
	}
	for pod := range t.store.podsOfNS[name.Namespace] {
		t.markPodDirty(t.store.pods[pod])
	}
}

// onPoliciesUnknownUpdate records whether all policies are known. Only the Node depends on
// it, so no endpoint becomes dirty.
func (t *Tracker) onPoliciesUnknownUpdate(unknown bool) {
	t.own.stale = t.own.stale || unknown != t.store.policiesUnknown
	t.store.policiesUnknown = unknown
}

// onPodUpdate stores a Pod; nil deletes it.
func (t *Tracker) onPodUpdate(name model.Name, p *model.Pod) {
	old := t.store.pods[name]
	if p == nil && old == nil {
		return
	}
	if p != nil && old != nil && p.Node == old.Node && maps.Equal(p.Labels, old.Labels) && slices.Equal(p.IPs, old.IPs) {
		t.store.pods[name] = p
		return
	}
	if old != nil {
		t.markPodDirty(old)
		t.store.removePod(old)
		t.own.countPod(t.cfg.NodeName, old, -1)
	}
	if p != nil {
		t.store.addPod(p)
		t.markPodDirty(p)
		t.own.countPod(t.cfg.NodeName, p, 1)
	}
	for _, s := range t.store.slicesOfPod[name] {
		t.markDirty(s.service)
	}
}

// markPodDirty marks everything dirty that depends on a pod's labels, apart from the
// slices that name it.
func (t *Tracker) markPodDirty(p *model.Pod) {
	for _, a := range p.IPs {
		for _, s := range t.store.slicesOfAddr[a.Unmap()] {
			t.markDirty(s.service)
		}
	}
	if p.Node == t.cfg.NodeName {
		t.own.dirtyPods[p.Name] = struct{}{}
	}
}
