package intent

import (
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// decide computes the decisions about one Service, whose slices are of.
func (t *Tracker) decide(e *service, of []*store.Slice) ([]*ServicePort, HealthCheck, []model.Problem) {
	before := t.beginStarts(e)
	if e.spec == nil {
		return nil, HealthCheck{Service: e.name}, nil
	}
	problems := append(slices.Clone(e.plan.problems), t.redirectProblems(e)...)
	var others []model.Problem // of other Services, which must not displace those of this one
	t.healthy, t.near = t.healthy[:0], t.near[:0]
	from, near := newServiceSlices(of, len(e.plan.ports)), t.slicesNear(e)
	left := maxEndpoints
	ports := make([]*ServicePort, 0, len(e.plan.ports))
	for i := range e.plan.ports {
		p := &e.plan.ports[i]
		held := make([]addressRequest, 0, len(p.requests))
		for _, c := range p.requests {
			if owner := t.addresses.owner(c.key); owner != p.id {
				if len(problems) <= maxProblems { // capProblems drops the rest
					problems = append(problems, conflict(e.name, c, owner))
				}
				continue
			}
			if t.leavesToNode(c) {
				if p := leftToNode(e.name, c); !slices.Contains(problems, p) { // once for all ports
					problems = append(problems, p)
				}
				continue
			}
			found, ofOthers, served := t.addressConflicts(e, p.id, c)
			problems = append(problems, found...)
			others = append(others, ofOthers...)
			if served {
				held = t.appendHeld(held, c)
			}
		}
		sp, allZero := t.decidePort(e, p, held, from, near, before)
		if sp == nil {
			continue
		}
		problems = append(problems, t.eject(e, sp)...)
		if allZero {
			problems = append(problems, allWeightsZero(e.name, p.id))
		}
		if sp.Balance == Maglev {
			sp.Table = spread(t.cfg.MaglevSize, sp, portOf(e.ports, sp.ID))
			if problem, any := unservedByTable(e.name, sp); any {
				problems = append(problems, problem)
			}
		}
		if left -= max(len(t.candidates)+len(t.near), sp.allShares(), len(sp.Table)); left < 0 {
			problems = append(problems, tooManyEndpoints(e.name, len(ports)))
			break
		}
		ports = append(ports, sp)
	}
	health, problems := t.decideHealth(e, t.healthy, problems)
	return ports, health, append(capProblems(e.name, problems), others[:min(len(others), maxProblems)]...)
}

// decideHealth decides the healthCheckNodePort of a Service, and adds its problem to others.
func (t *Tracker) decideHealth(e *service, healthy []netip.Addr, problems []model.Problem) (HealthCheck, []model.Problem) {
	health, c := HealthCheck{Service: e.name}, e.plan.health
	if c == nil {
		return health, problems
	}
	if owner := t.addresses.owner(c.key); owner != healthCheckID(e.name) {
		return health, append(problems, conflict(e.name, *c, owner))
	}
	health.Port = c.key.Port
	health.Endpoints = countHealthy(healthy)
	return health, problems
}

// portOf returns the port with an id; nil: none has it.
func portOf(ports []*ServicePort, id PortID) *ServicePort {
	i, found := slices.BinarySearchFunc(ports, id, func(p *ServicePort, id PortID) int { return p.ID.Compare(id) })
	if !found {
		return nil
	}
	return ports[i]
}

// decidePort decides one Service port; nil if it has no frontend left. allZero says that
// all of its endpoints have weight 0.
func (t *Tracker) decidePort(e *service, p *portPlan, held []addressRequest, from, near *serviceSlices,
	before starts) (sp *ServicePort, allZero bool) {
	cs := gather(t.candidates[:0], from, p.id, t.cfg.NodeName)
	t.candidates = cs
	for i := range cs {
		if c := &cs[i]; c.onThisNode && c.isStaying() {
			t.healthy = append(t.healthy, c.addr.Addr())
		}
	}
	if len(held) == 0 {
		return nil, false
	}
	cs, r := t.redirect(p.id, cs, near, needOf(e.spec, held))
	if e.starts != nil {
		e.starts.readySince(p.id, before, cs, t.now)
	}
	weights, allZero := t.weights(e, p.id, cs, &from.weights)
	endpoints := t.endpoints(p.id.Protocol, cs)
	return &ServicePort{
		ID:                p.id,
		Frontends:         frontends(e.spec, t.own.withOwn(e.plan.ranges[p.id.Family], held), held, r),
		Endpoints:         endpoints,
		Weights:           weights,
		ServingUnselected: t.servingUnselected(p.id.Protocol, cs),
		Lingering:         t.lingering(cs),
		Affinity:          e.spec.Affinity,
		Balance:           e.plan.balance,
		DSR:               direct(e.plan.forwarding, p.id.Protocol, endpoints),
		SYNLimit:          e.plan.synLimitOf(p.id.Protocol),
		Helper:            p.helper,
		OfFTP:             p.ofFTP,
		Triggered:         newestTrigger(from.slices, p.id.Family),
	}, allZero
}

// endpoints turns the candidates that some policy uses into Endpoints.
func (t *Tracker) endpoints(proto model.Protocol, cs []candidate) []Endpoint {
	out := make([]Endpoint, 0, len(cs))
	for i := range cs {
		if cs[i].selected() {
			out = append(out, t.endpoint(proto, &cs[i]))
		}
	}
	return out
}

// endpoint turns a candidate into an Endpoint. An endpoint without a nodeName, or with another
// node's, does not count for a Local policy. But packets to the node's own address and to a pod of
// this node arrive here whatever the slice says. A Pod whose status has an address of another
// node's podCIDR proves nothing.
func (t *Tracker) endpoint(proto model.Protocol, c *candidate) Endpoint {
	addr := c.addr.Addr()
	hostNetwork := t.own.has(addr)
	onThisNode := c.onThisNode || hostNetwork || t.podOnThisNode(addr) && !t.ranges.ofOthers(t.cfg.NodeName, addr)
	return Endpoint{
		Addr:                  c.addr,
		ClusterPolicy:         c.clusterPolicy,
		LocalPolicy:           c.localPolicy,
		OnThisNode:            onThisNode,
		NodeUnknown:           c.ep.Node == "" && !onThisNode,
		HostNetwork:           hostNetwork,
		MustTraverseNetfilter: t.mustTraverseNetfilter(c.slice.Service.Namespace, c.ep, addr),
		AllowsAny:             t.anyAllowed(proto, c.addr),
	}
}

// servingUnselected lists the candidates that serve and that no policy selects.
func (t *Tracker) servingUnselected(protocol model.Protocol, cs []candidate) []Endpoint {
	if protocol != model.UDP {
		return nil
	}
	var out []Endpoint
	for i := range cs {
		if c := &cs[i]; !c.selected() && !c.near && c.isServing() {
			out = append(out, t.endpoint(protocol, c))
		}
	}
	return out
}

// lingering lists the candidates that serve or terminate and that no policy selects.
func (t *Tracker) lingering(cs []candidate) []netip.AddrPort {
	if !t.cfg.Lingering {
		return nil
	}
	var out []netip.AddrPort
	for _, c := range cs {
		if !c.selected() && (c.isServing() || c.ep.Terminating) {
			out = append(out, c.addr)
		}
	}
	return out
}

// newestTrigger returns the newest trigger time of one family's slices. A slice without
// endpoints counts too: it may just have lost its last one.
func newestTrigger(from []*store.Slice, f model.Family) time.Time {
	var newest time.Time
	for _, s := range from {
		if o := s.Object; o.Family == f && o.Triggered.After(newest) {
			newest = o.Triggered
		}
	}
	return newest
}

// healthCheckID identifies a Service's healthCheckNodePort as a requester.
func healthCheckID(service model.Name) PortID { return PortID{Service: service} }
