package intent

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// An externalIP or a LoadBalancer IP may be a node's own address or a pod's:
// Kubernetes allows it, people use it, and it is served. But the more exact
// address wins everywhere, so what else answers at that address and port is
// hidden by it, as by kube-proxy. That is reported, on the Service that hides.

// mayConflict reports whether a frontend is one whose address a person or a load
// balancer chose. Nobody has to answer for a clusterIP: the API server hands
// it out from a range of its own.
func mayConflict(kind FrontendKind) bool { return kind == ExternalIP || kind == LoadBalancerIP }

// addressConflicts words the Problems of a claim that a Service holds and that hides a
// NodePort, a healthCheckNodePort or an endpoint of somebody else.
func (t *Tracker) addressConflicts(e *service, id PortID, c addressRequest) []model.Problem {
	if !mayConflict(c.kind) {
		return nil
	}
	var out []model.Problem
	report := func(what string) {
		out = append(out, model.ServiceProblem(e.name, c.field, what))
	}
	if t.own.has(c.key.Addr) && t.servesNodePorts(c.key.Addr) {
		for _, wide := range nodePortsAt(c.key) {
			// A port's own NodePort leads to the same endpoints.
			if holder := t.claims.holder(wide); holder != (PortID{}) && holder != id {
				report(fmt.Sprintf("%s is an address of this node, where it hides %s of Service %s; change one of the two",
					c.key, wide, holder.Service))
			}
		}
	}
	if owner, ok := t.store.endpointAt(c.key, e); ok {
		report(fmt.Sprintf("%s hides an endpoint of Service %s, which has this address and port; change one of the two", c.key, owner))
	}
	return out
}

// nodePortsAt lists what the node would serve at an address and port but for a
// Service of just that address.
func nodePortsAt(k addressKey) []addressKey {
	out := []addressKey{{Family: model.FamilyOf(k.Addr), Protocol: k.Protocol, Port: k.Port}}
	if k.Protocol == model.TCP {
		out = append(out, addressKey{Port: k.Port})
	}
	return out
}

// endpointAt finds another Service with an endpoint of this address and port:
// the first by name. A Service's own endpoint (an ingress controller in the
// node's network, say) is reached either way.
func (st *store) endpointAt(k addressKey, but *service) (model.Name, bool) {
	var owner *service
	for _, s := range st.slicesOfAddr[k.Addr] {
		if s.service == but || owner != nil && compareNames(owner.name, s.service.name) <= 0 {
			continue
		}
		if slices.ContainsFunc(s.object.Ports, func(p model.EndpointPort) bool { return p.Port == k.Port && p.Protocol == k.Protocol }) {
			owner = s.service
		}
	}
	if owner == nil {
		return model.Name{}, false
	}
	return owner.name, true
}

// markNodePortConflictsDirty touches whoever may hide a NodePort or healthCheckNodePort.
func (t *Tracker) markNodePortConflictsDirty(wide addressKey) {
	if wide.Addr.IsValid() {
		return
	}
	protocol := wide.Protocol
	if wide.Family == 0 {
		protocol = model.TCP // a healthCheckNodePort
	}
	for _, a := range t.own.addrs {
		for _, c := range t.claims.requesters[addressKey{Addr: a, Protocol: protocol, Port: wide.Port}] {
			t.markDirty(t.services[c.id.Service])
		}
	}
}

// markAddressConflictsDirty touches the Services that have the address for an externalIP
// or LoadBalancer IP.
func (t *Tracker) markAddressConflictsDirty(a netip.Addr) {
	for e := range t.conflictable[a] {
		t.markDirty(e)
	}
}

// markEndpointConflictsDirty does so for each endpoint of a slice.
func (t *Tracker) markEndpointConflictsDirty(s *model.EndpointSlice) {
	if len(t.conflictable) == 0 {
		return
	}
	for i := range s.Endpoints {
		t.markAddressConflictsDirty(endpointAddr(&s.Endpoints[i]))
	}
}
