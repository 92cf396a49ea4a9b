package intent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// An externalIP or a LoadBalancer IP may be a node's own address or a pod's: Kubernetes
// allows it, people use it, and Spillway serves it. As in kube-proxy, the more specific
// address wins, so a NodePort or an endpoint at that address and port cannot be reached.
// Intent reports this as a Problem of the Service with the externalIP or LoadBalancer IP.
//
// An externalIP that is an address of a pod is not served. Anyone who may write a Service
// chooses it, and it would take the packets to the pod. With the eBPF dataplane it would also
// take those that a socket hook has translated to the endpoint. A controller writes
// LoadBalancer IPs.
//
// An EndpointSlice alone hides no address of another namespace, because its author may name
// any address. Intent then serves the externalIP, and reports the slice's Service. The slice
// that the API servers write of themselves counts.

// mayConflict reports whether a person or a load balancer chose a frontend's address. A
// clusterIP cannot conflict: the API server allocates it from its own range.
func mayConflict(kind FrontendKind) bool { return kind == ExternalIP || kind == LoadBalancerIP }

// addressConflicts returns the Problems of an address and port that a Service holds and
// that make a NodePort, a healthCheckNodePort or an endpoint of another Service
// unreachable. served is false for an externalIP that is a pod's address, or an endpoint of
// another Service of its namespace, and for a port of the nodes' own.
// others are the Problems of other Services.
func (t *Tracker) addressConflicts(e *service, id PortID, c addressRequest) (out, others []model.Problem, served bool) {
	if c.ofPod {
		out, served = t.hostPortConflicts(e, c)
		return out, nil, served
	}
	if !mayConflict(c.kind) {
		return nil, nil, true
	}
	report := func(what string) {
		out = append(out, model.ServiceProblem(e.name, c.field(), what))
	}
	if what, served := t.reservedConflict(c); what != "" {
		report(what)
		if !served {
			return out, nil, false
		}
	}
	pod := t.ofPod(c.key.Addr)
	at := t.endpointAt(c.key, e.name, pod != "")
	if hidden := hiddenBy(at, pod); hidden != "" && c.kind == ExternalIP {
		report(fmt.Sprintf("%s is %s, and is not served; remove it", c.key, hidden))
		return out, nil, false
	}
	if t.own.has(c.key.Addr) && t.servesNodePorts(c.key.Addr) {
		for _, wide := range nodePortsAt(c.key) {
			// A port's own NodePort has the same endpoints.
			if owner := t.addresses.owner(wide); owner != (PortID{}) && owner != id {
				report(fmt.Sprintf("%s is an address of this node, where it hides %s of %s; change one of the two",
					c.key, wide, model.OwnerText(owner.Service)))
			}
		}
	}
	switch {
	case at.slice == nil:
	case at.believed:
		report(fmt.Sprintf("%s hides an endpoint of Service %s, which has this address and port; change one of the two", c.key, at.slice.Service))
	default:
		others = append(others, model.Problem{
			Object: model.ObjectRef{Kind: model.KindService, Name: at.slice.Service},
			Where:  "EndpointSlice " + at.slice.Name.String(), Field: "endpoints",
			What: fmt.Sprintf("%s is an address of Service %s (%s), which may get its connections; change one of the two", c.key, e.name, c.field()),
		})
	}
	return out, others, true
}

// hiddenBy describes what an externalIP would hide; "" for nothing that counts.
func hiddenBy(at foundSlice, pod string) string {
	switch {
	case !at.believed:
		return pod
	case pod == "":
		return "an endpoint of Service " + at.slice.Service.String()
	}
	return "an endpoint of Service " + at.slice.Service.String() + " and " + pod
}

// nodePortsAt lists what the node would serve at an address and port without the Service
// that has this address. An address may be that of a NodePort: any of the node's.
func nodePortsAt(k addressKey) []addressKey {
	wide := addressKey{Family: k.Family, Protocol: k.Protocol, Port: k.Port}
	if k.Addr.IsValid() {
		wide.Family = model.FamilyOf(k.Addr)
	}
	out := []addressKey{wide}
	if k.Protocol == model.TCP {
		out = append(out, addressKey{Port: k.Port})
	}
	return out
}

// foundSlice is an EndpointSlice with an endpoint of an address and port.
type foundSlice struct {
	slice    *model.EndpointSlice // nil: there is none
	believed bool                 // of the same namespace, of a pod's address, or the API servers'
}

// endpointAt returns the first slice of another Service, by name, with an endpoint of this
// address and port. Slices of the Service's own namespace come first. A Service's own endpoint
// (for example an ingress controller in the node's network) is reachable either way.
func (t *Tracker) endpointAt(k addressKey, but model.Name, ofPod bool) (first foundSlice) {
	for _, s := range t.slicesAt(k.Addr) {
		if s.Service == but || !s.hasPort(k) {
			continue
		}
		if ofPod || s.Service.Namespace == but.Namespace || ofAPIServers(s.EndpointSlice) {
			return foundSlice{s.EndpointSlice, true}
		}
		if first.slice == nil {
			first.slice = s.EndpointSlice
		}
	}
	return first
}

// addrSlice is a slice with an endpoint of an address.
type addrSlice struct {
	*model.EndpointSlice
	ports map[socket]struct{} // nil: few ports, searched linearly
}

// hasPort reports whether the endpoints of a slice have the port of a key.
func (c *addrSlice) hasPort(k addressKey) bool {
	if c.ports != nil {
		_, found := c.ports[socket{k.Protocol, k.Port}]
		return found
	}
	return slices.ContainsFunc(c.Ports, func(p model.EndpointPort) bool { return p.Port == k.Port && p.Protocol == k.Protocol })
}

// addrSlices are the slices at the addresses that one call of Changes asks for. It asks once for
// each port of each Service there.
type addrSlices struct {
	at    map[netip.Addr][]addrSlice
	ports map[*model.EndpointSlice]map[socket]struct{} // of slices with many
}

// Of the slices of a namespace at one address, no more than maxSlicesAt count, with maxPortsAt
// ports together: any number of slices may name the address of a Service, which asks them at each
// of its ports.
const (
	maxSlicesAt = 64
	maxPortsAt  = 20000 // of one slice, as in the API server
)

// slicesAt returns the slices with an endpoint of an address, sorted by Service and name: the
// first of each namespace, and those of the API servers.
func (t *Tracker) slicesAt(a netip.Addr) []addrSlice {
	if list, known := t.addrSlices.at[a]; known {
		return list
	}
	at := t.facts.SlicesAt(a)
	slices.SortFunc(at, func(a, b *store.Slice) int {
		return cmp.Or(a.Object.Service.Compare(b.Object.Service), a.Object.Name.Compare(b.Object.Name))
	})
	var list []addrSlice
	namespace, count, ports := "", 0, 0
	for _, s := range at {
		if s.Object.Service.Namespace != namespace {
			namespace, count, ports = s.Object.Service.Namespace, 0, 0
		}
		count, ports = count+1, ports+len(s.Object.Ports)
		if count <= maxSlicesAt && ports <= maxPortsAt || ofAPIServers(s.Object) {
			list = append(list, addrSlice{s.Object, t.addrSlices.portsOf(s.Object)})
		}
	}
	if t.addrSlices.at == nil {
		t.addrSlices.at = map[netip.Addr][]addrSlice{}
	}
	t.addrSlices.at[a] = list
	return list
}

// portsOf returns the ports of a slice; nil if it has few.
func (c *addrSlices) portsOf(s *model.EndpointSlice) map[socket]struct{} {
	if len(s.Ports) < manyPorts {
		return nil
	}
	if set := c.ports[s]; set != nil {
		return set
	}
	set := make(map[socket]struct{}, len(s.Ports))
	for _, p := range s.Ports {
		set[socket{p.Protocol, p.Port}] = struct{}{}
	}
	if c.ports == nil {
		c.ports = map[*model.EndpointSlice]map[socket]struct{}{}
	}
	c.ports[s] = set
	return set
}

// markNodePortConflictsDirty marks the Services dirty whose address may conflict with a
// NodePort or healthCheckNodePort.
func (t *Tracker) markNodePortConflictsDirty(wide addressKey) {
	if wide.Addr.IsValid() {
		return
	}
	protocol := wide.Protocol
	if wide.Family == 0 {
		protocol = model.TCP // a healthCheckNodePort
	}
	for _, a := range t.own.addrs {
		for _, c := range t.addresses.requesters[addressKey{Addr: a, Protocol: protocol, Port: wide.Port}] {
			t.markDirty(c.service)
		}
	}
}

// markAddressConflictsDirty marks the Services dirty that have the address as an
// externalIP or LoadBalancer IP.
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
		t.markAddressConflictsDirty(s.Endpoints[i].Addr)
	}
}
