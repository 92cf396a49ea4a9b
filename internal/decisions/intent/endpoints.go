package intent

import (
	"cmp"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// candidate is an endpoint of a Service port before intent decides which traffic may use
// it.
type candidate struct {
	addr          netip.AddrPort
	ep            *model.Endpoint
	slice         *model.EndpointSlice
	onThisNode    bool
	clusterPolicy bool // usable by policy Cluster
	localPolicy   bool // usable by policy Local
}

// lastResort reports whether kube-proxy falls back to the endpoint when no ready one is
// left: it terminates, but still serves.
func (c *candidate) lastResort() bool {
	return !c.ep.Ready && c.ep.Serving && c.ep.Terminating
}

// source is the slices of one Service, sorted by name so that equal facts give equal
// results, and an index of their ports.
type source struct {
	slices []*store.Slice
	ports  []map[portKey][]uint16 // nil: few ports, searched linearly
}

// portKey is what a slice's port and a Service's port have in common; the numbers differ
// by targetPort.
type portKey struct {
	name     string
	protocol model.Protocol
}

// manyPorts is the number of ports from which on newSource builds an index of each slice.
// Without it each of thousands of ports would search thousands.
const manyPorts = 32

func newSource(from []*store.Slice, ports int) *source {
	s := &source{slices: from}
	if ports < manyPorts {
		return s
	}
	for _, one := range from {
		index := make(map[portKey][]uint16, len(one.Object.Ports))
		for _, p := range one.Object.Ports {
			key := portKey{p.Name, p.Protocol}
			index[key] = append(index[key], p.Port)
		}
		s.ports = append(s.ports, index)
	}
	return s
}

// numbers appends to dst the ports of slice i that a Service port leads to.
func (s *source) numbers(dst []uint16, i int, key portKey) []uint16 {
	if s.ports != nil {
		return append(dst, s.ports[i][key]...)
	}
	for _, p := range s.slices[i].Object.Ports {
		if p.Name == key.name && p.Protocol == key.protocol {
			dst = append(dst, p.Port)
		}
	}
	return dst
}

// gather appends to dst the endpoints of a Service port from the slices of its
// Service, sorted by address, one entry an address.
func gather(dst []candidate, from *source, id PortID, node string) []candidate {
	var few [4]uint16
	for i, s := range from.slices {
		if s.Object.Family != id.Family {
			continue
		}
		for _, port := range from.numbers(few[:0], i, portKey{id.Port, id.Protocol}) {
			if port != 0 { // "all ports", which no Service can ask for
				dst = appendSlice(dst, s.Object, port, id.Family, node)
			}
		}
	}
	slices.SortStableFunc(dst, compareCandidates)
	return slices.CompactFunc(dst, func(a, b candidate) bool { return a.addr == b.addr })
}

func appendSlice(dst []candidate, s *model.EndpointSlice, port uint16, family model.Family, node string) []candidate {
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		addr := store.EndpointAddr(ep)
		if !addr.IsValid() || model.FamilyOf(addr) != family {
			continue
		}
		dst = append(dst, candidate{
			addr:       netip.AddrPortFrom(addr, port),
			ep:         ep,
			slice:      s,
			onThisNode: onNode(ep, node),
		})
	}
	return dst
}

func onNode(ep *model.Endpoint, node string) bool {
	return node != "" && ep.Node == node
}

// compareCandidates sorts by address. While an endpoint moves between slices both contain
// it, so of two with one address the more useful comes first: the one on this node, as in
// kube-proxy, then by conditions.
func compareCandidates(a, b candidate) int {
	return cmp.Or(
		a.addr.Compare(b.addr),
		trueFirst(a.onThisNode, b.onThisNode),
		trueFirst(a.ep.Ready, b.ep.Ready),
		trueFirst(a.ep.Serving, b.ep.Serving),
		trueFirst(!a.ep.Terminating, !b.ep.Terminating),
		trueFirst(a.ep.Pod.Name != "", b.ep.Pod.Name != ""),
	)
}

func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// need is the traffic policies that the frontends of a Service port use.
type need struct{ clusterPolicy, localPolicy bool }

// reach is the policies that the endpoints of a Service port can serve.
type reach struct {
	clusterPolicy bool // policy Cluster has an endpoint
	localPolicy   bool // policy Local has an endpoint on this node
	any           bool // there is a usable endpoint somewhere in the cluster
}

// categorize marks the candidates that each traffic policy uses: the ready ones or,
// without any, those that serve while they terminate. It decides for each policy on its
// own.
func categorize(cs []candidate, n need, node, zone string) reach {
	r := reach{any: slices.ContainsFunc(cs, func(c candidate) bool {
		return c.ep.Ready || c.lastResort()
	})}
	if n.clusterPolicy {
		t := topologyOf(cs, node, zone)
		r.clusterPolicy = mark(cs,
			func(c *candidate) bool { return c.ep.Ready && t.allows(c.ep) },
			func(c *candidate) { c.clusterPolicy = true })
		if !r.clusterPolicy {
			// The topology is not the reason: without a suitable ready endpoint it is
			// ignored. No endpoint is ready at all.
			r.clusterPolicy = mark(cs, (*candidate).lastResort, func(c *candidate) { c.clusterPolicy = true })
		}
	}
	if n.localPolicy {
		r.localPolicy = mark(cs,
			func(c *candidate) bool { return c.onThisNode && c.ep.Ready },
			func(c *candidate) { c.localPolicy = true })
		if !r.localPolicy {
			r.localPolicy = mark(cs,
				func(c *candidate) bool { return c.onThisNode && c.lastResort() },
				func(c *candidate) { c.localPolicy = true })
		}
	}
	return r
}

// mark calls set for every candidate that fits, and reports whether one did.
func mark(cs []candidate, fits func(*candidate) bool, set func(*candidate)) bool {
	found := false
	for i := range cs {
		if fits(&cs[i]) {
			set(&cs[i])
			found = true
		}
	}
	return found
}

// topology is the preference that the hints of a Service port's endpoints
// express for this node; the zero value is none.
type topology struct {
	node string // only endpoints hinted for this node
	zone string // only endpoints hinted for this zone
}

func (t topology) allows(ep *model.Endpoint) bool {
	switch {
	case t.node != "":
		return slices.Contains(ep.HintNodes, t.node)
	case t.zone != "":
		return slices.Contains(ep.HintZones, t.zone)
	}
	return true
}

// topologyOf reads the hints. They count only if every ready endpoint has one and at least
// one is for this node or zone. Otherwise the control plane is in the middle of a change,
// and following the hints would overload the few endpoints that have one. Hints for nodes
// take precedence over hints for zones. The control plane turns trafficDistribution into
// hints.
func topologyOf(cs []candidate, node, zone string) topology {
	allNodes, allZones := true, true
	forNode, forZone := false, false
	for _, c := range cs {
		if !c.ep.Ready {
			continue
		}
		allNodes = allNodes && len(c.ep.HintNodes) > 0
		allZones = allZones && len(c.ep.HintZones) > 0
		forNode = forNode || slices.Contains(c.ep.HintNodes, node)
		forZone = forZone || slices.Contains(c.ep.HintZones, zone)
	}
	switch {
	case node != "" && allNodes && forNode:
		return topology{node: node}
	case zone != "" && allZones && forZone:
		return topology{zone: zone}
	}
	return topology{}
}

// countHealthy counts endpoints for a health check: addresses on this node that are ready
// and do not terminate. A load balancer must leave a node whose last endpoint terminates,
// even while that endpoint still serves.
func countHealthy(addrs []netip.Addr) int {
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	v4 := 0
	for _, a := range addrs {
		if a.Is4() {
			v4++
		}
	}
	// A pod of a dual-stack Service has an address in each family, and counts once.
	return max(v4, len(addrs)-v4)
}
