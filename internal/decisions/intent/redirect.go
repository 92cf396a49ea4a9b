package intent

import (
	"cmp"
	"fmt"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// LocalRedirectAnnotation names another Service of the namespace. While an endpoint of that
// Service on this node is ready, it gets the flows of this one: a cache on every node is used in
// front of the Service behind it. Ports correspond by name and protocol.
const LocalRedirectAnnotation = "spillway.dev/local-redirect"

// RedirectOf returns the Service that a Service redirects to; see LocalRedirectAnnotation.
func RedirectOf(svc *model.Service) model.Name { return redirectOf(svc, func(string, string) {}) }

// redirectOf reads LocalRedirectAnnotation.
func redirectOf(svc *model.Service, complain func(field, what string)) model.Name {
	to, set := svc.Annotations[LocalRedirectAnnotation]
	if to == svc.Name.Name {
		complain(annotationField(LocalRedirectAnnotation), "names this Service itself, and nothing is redirected; name the Service of the cache")
		return model.Name{}
	}
	if !set {
		return model.Name{}
	}
	return model.Name{Namespace: svc.Name.Namespace, Name: to}
}

// redirectProblems returns the Problem of a Service that redirects to none that this agent knows.
// Agents do not read the EndpointSlices of headless Services.
func (t *Tracker) redirectProblems(e *service) []model.Problem {
	to := e.plan.redirect
	if known := t.services[to]; to == (model.Name{}) || known != nil && known.spec != nil && len(known.spec.ClusterIPs) > 0 {
		return nil
	}
	return []model.Problem{model.ServiceProblem(e.name, annotationField(LocalRedirectAnnotation),
		fmt.Sprintf("names %q, which is no Service of this namespace with a cluster IP, and nothing is redirected; create it, or name another",
			to.Name))}
}

// slicesNear returns the slices of the Service that a Service redirects to; nil if none has an
// endpoint on this node. Each port would read them all for nothing.
func (t *Tracker) slicesNear(e *service) *serviceSlices {
	if e.plan.redirect == (model.Name{}) {
		return nil
	}
	t.nearSlices = t.facts.SlicesOf(e.plan.redirect, t.nearSlices)
	for _, s := range t.nearSlices {
		t.updateSlicePods(s)
	}
	if !slices.ContainsFunc(t.nearSlices, t.reachesNode) {
		return nil
	}
	return newServiceSlices(t.nearSlices, len(e.plan.ports))
}

// reachesNode reports whether a slice has an endpoint on this node.
func (t *Tracker) reachesNode(s *store.Slice) bool {
	return s.MayBeOnNode && slices.ContainsFunc(s.Object.Endpoints, func(ep model.Endpoint) bool { return onNode(&ep, t.cfg.NodeName) })
}

// redirect categorizes the candidates of a port, or those of the Service that it redirects to,
// if one of them is ready on this node. It returns both, sorted. A cache that ends gets no packet
// more: unlike the endpoints of the Service, it does not keep UDP flows.
func (t *Tracker) redirect(id PortID, cs []candidate, near *serviceSlices, n need) ([]candidate, reach) {
	if near == nil {
		return cs, categorize(cs, n, t.cfg.NodeName, t.own.zone)
	}
	t.near = gather(t.near[:0], near, id, t.cfg.NodeName)
	var ready, rest []candidate
	for _, c := range t.near {
		c.near = true
		switch {
		case !c.onThisNode:
		case c.isStaying():
			ready = append(ready, c)
		default:
			rest = append(rest, c)
		}
	}
	use := cs
	if len(ready) > 0 {
		use = ready
	}
	r := categorize(use, n, t.cfg.NodeName, t.own.zone)
	cs = slices.Concat(cs, ready, rest)
	slices.SortStableFunc(cs, func(a, b candidate) int {
		return cmp.Or(a.addr.Compare(b.addr), trueFirst(a.selected(), b.selected()), trueFirst(!a.near, !b.near))
	})
	return slices.CompactFunc(cs, func(a, b candidate) bool { return a.addr == b.addr }), r
}

// selected reports whether a route uses the candidate.
func (c *candidate) selected() bool { return c.clusterPolicy || c.localPolicy }
