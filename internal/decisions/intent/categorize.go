package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

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
		return c.isReady() || c.isLastResort()
	})}
	if n.clusterPolicy {
		t := topologyOf(cs, node, zone)
		r.clusterPolicy = selectAll(cs,
			func(c *candidate) bool { return c.isReady() && t.allows(c.ep) },
			func(c *candidate) { c.clusterPolicy = true })
		if !r.clusterPolicy {
			// The topology is not the reason: without a suitable ready endpoint it is
			// ignored. No endpoint is ready at all.
			r.clusterPolicy = selectAll(cs, (*candidate).isLastResort, func(c *candidate) { c.clusterPolicy = true })
		}
	}
	if n.localPolicy {
		r.localPolicy = selectAll(cs,
			func(c *candidate) bool { return c.onThisNode && c.isReady() },
			func(c *candidate) { c.localPolicy = true })
		if !r.localPolicy {
			r.localPolicy = selectAll(cs,
				func(c *candidate) bool { return c.onThisNode && c.isLastResort() },
				func(c *candidate) { c.localPolicy = true })
		}
	}
	return r
}

// selectAll calls set for every candidate that fits, and reports whether one did.
func selectAll(cs []candidate, fits func(*candidate) bool, set func(*candidate)) bool {
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
		return slices.Contains(hintsOf(ep).Nodes, t.node)
	case t.zone != "":
		return slices.Contains(hintsOf(ep).Zones, t.zone)
	}
	return true
}

func hintsOf(ep *model.Endpoint) model.Hints {
	if ep.Hints == nil {
		return model.Hints{}
	}
	return *ep.Hints
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
		if !c.isReady() {
			continue
		}
		h := hintsOf(c.ep)
		allNodes = allNodes && len(h.Nodes) > 0
		allZones = allZones && len(h.Zones) > 0
		forNode = forNode || slices.Contains(h.Nodes, node)
		forZone = forZone || slices.Contains(h.Zones, zone)
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
