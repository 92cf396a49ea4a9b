package intent

import (
	"maps"
	"reflect"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// forget drops every object that a full Delta does not name.
func (t *Tracker) forget(d model.Delta) {
	for name := range t.world.nodes {
		if d.Nodes[name] == nil {
			t.takeNode(name, nil)
		}
	}
	for namespace := range t.world.policies {
		for name := range t.world.policies[namespace] {
			if d.NetworkPolicies[name] == nil {
				t.takePolicy(name, nil)
			}
		}
	}
	for name := range t.world.pods {
		if d.Pods[name] == nil {
			t.takePod(name, nil)
		}
	}
	for name := range t.services {
		if d.Services[name] == nil {
			t.takeService(name, nil)
		}
	}
	for name := range t.world.slices {
		if d.Slices[name] == nil {
			t.takeSlice(name, nil)
		}
	}
}

// takeService takes in a Service, nil for one that is gone. One that asks for
// another proxy is as good as gone.
func (t *Tracker) takeService(name model.Name, svc *model.Service) {
	if svc != nil && svc.ProxyName != t.cfg.ProxyName {
		svc = nil
	}
	e := t.services[name]
	if svc == nil && (e == nil || e.spec == nil) {
		return
	}
	e = t.serviceNamed(name)
	t.touch(e)
	if e.spec != nil {
		t.eachClaim(e, func(key claimKey, c claimant) {
			t.claims.remove(key, c.id)
			if mayHide(c.kind) {
				removeFrom(t.claiming, key.Addr, e)
			}
		})
	}
	before := e.plan
	e.spec, e.plan = svc, plan{}
	if svc != nil {
		e.plan = planService(svc, t.cfg.RefuseExternalIPs)
		t.eachClaim(e, func(key claimKey, c claimant) {
			t.claims.add(key, c)
			if mayHide(c.kind) {
				addTo(t.claiming, key.Addr, e)
			}
		})
	}
	t.touchRivals(before)
	t.touchRivals(e.plan)
}

// serviceNamed returns the entry of a Service, making it if need be.
func (t *Tracker) serviceNamed(name model.Name) *service {
	e := t.services[name]
	if e == nil {
		e = &service{name: name, health: HealthCheck{Service: name}}
		t.services[name] = e
	}
	return e
}

// eachClaim calls do with every claim of a Service.
func (t *Tracker) eachClaim(e *service, do func(claimKey, claimant)) {
	for i := range e.plan.ports {
		p := &e.plan.ports[i]
		for _, c := range p.claims {
			do(c.key, claimant{id: p.id, kind: c.kind, created: e.spec.Created})
		}
	}
	if c := e.plan.health; c != nil {
		do(c.key, claimant{id: healthID(e.name), kind: c.kind, created: e.spec.Created})
	}
}

// touchRivals touches whoever else claims something that the plan claims, or
// hides it: it may have won or lost it, or lost it to somebody else.
func (t *Tracker) touchRivals(p plan) {
	touch := func(key claimKey) {
		for _, c := range t.claims.claimants[key] {
			t.touch(t.services[c.id.Service])
		}
		t.touchHiding(key)
	}
	for i := range p.ports {
		for _, c := range p.ports[i].claims {
			touch(c.key)
		}
	}
	if p.health != nil {
		touch(p.health.key)
	}
}

// takeSlice takes in an EndpointSlice, nil for one that is gone.
func (t *Tracker) takeSlice(name model.Name, object *model.EndpointSlice) {
	s := t.world.slices[name]
	if s != nil && object != nil && indexedAlike(s.object, object) {
		if !slices.Equal(s.object.Ports, object.Ports) {
			t.touchHidingEndpoints(object)
		}
		s.object = object
		t.touch(s.service)
		return
	}
	if s != nil {
		t.world.detach(s)
		t.touchHidingEndpoints(s.object)
		t.setPoliced(&s.policed, nil)
		s.service.slices = slices.DeleteFunc(s.service.slices, func(o *slice) bool { return o == s })
		t.touch(s.service)
		delete(t.world.slices, name)
	}
	if object == nil {
		return
	}
	s = &slice{object: object, service: t.serviceNamed(object.Service)}
	t.world.slices[name] = s
	t.world.attach(s)
	t.touchHidingEndpoints(object)
	at, _ := slices.BinarySearchFunc(s.service.slices, name, func(o *slice, n model.Name) int {
		return compareNames(o.object.Name, n)
	})
	s.service.slices = slices.Insert(s.service.slices, at, s)
	t.touch(s.service)
}

// takePolicy takes in a NetworkPolicy, nil for one that is gone.
func (t *Tracker) takePolicy(name model.Name, p *model.NetworkPolicy) {
	if !polices(p) {
		p = nil
	}
	set := t.world.policies[name.Namespace]
	old := set[name]
	if p == old || p != nil && old != nil && reflect.DeepEqual(p.Selector, old.Selector) {
		return
	}
	had := len(t.world.policies) > 0
	switch {
	case p != nil && set == nil:
		t.world.policies[name.Namespace] = policySet{name: p}
	case p != nil:
		set[name] = p
	default:
		delete(set, name)
		if len(set) == 0 {
			delete(t.world.policies, name.Namespace)
		}
	}
	if has := len(t.world.policies) > 0; has != had {
		// Endpoints here whose pods are not known depend on any policy.
		t.own.stale = true
		for s := range t.world.slicesNear {
			t.touch(s.service)
		}
	}
	for s := range t.world.slicesOfNS[name.Namespace] {
		t.touch(s.service)
	}
	for pod := range t.world.podsOfNS[name.Namespace] {
		t.touchPod(t.world.pods[pod])
	}
}

// takePoliciesUnknown takes in whether all policies are known. What any pod may
// be is the Node's business: no single endpoint need be decided again.
func (t *Tracker) takePoliciesUnknown(unknown bool) {
	t.own.stale = t.own.stale || unknown != t.world.policiesUnknown
	t.world.policiesUnknown = unknown
}

// takePod takes in a Pod, nil for one that is gone.
func (t *Tracker) takePod(name model.Name, p *model.Pod) {
	old := t.world.pods[name]
	if p == nil && old == nil {
		return
	}
	if p != nil && old != nil && p.Node == old.Node && maps.Equal(p.Labels, old.Labels) && slices.Equal(p.IPs, old.IPs) {
		t.world.pods[name] = p
		return
	}
	if old != nil {
		t.touchPod(old)
		t.world.removePod(old)
		t.own.claim(t.cfg.NodeName, old, -1)
	}
	if p != nil {
		t.world.addPod(p)
		t.touchPod(p)
		t.own.claim(t.cfg.NodeName, p, 1)
	}
	for _, s := range t.world.slicesOfPod[name] {
		t.touch(s.service)
	}
}

// touchPod has everything decided again that depends on a pod's labels, apart
// from the slices that name it.
func (t *Tracker) touchPod(p *model.Pod) {
	for _, a := range p.IPs {
		for _, s := range t.world.slicesOfAddr[a.Unmap()] {
			t.touch(s.service)
		}
	}
	if p.Node == t.cfg.NodeName {
		t.own.pods[p.Name] = struct{}{}
	}
}
