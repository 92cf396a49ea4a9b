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
	near          bool // of the Service in LocalRedirectAnnotation
}

// isReady reports whether the endpoint may take new connections. With publishNotReadyAddresses
// that is so while it terminates, too.
func (c *candidate) isReady() bool { return c.ep.Ready }

// isStaying reports whether the endpoint may take new connections and does not terminate.
func (c *candidate) isStaying() bool { return c.isReady() && !c.ep.Terminating }

// isLastResort reports whether kube-proxy falls back to the endpoint when no ready one is
// left: it terminates, but still serves.
func (c *candidate) isLastResort() bool {
	return !c.isReady() && c.ep.Serving && c.ep.Terminating
}

// isServing reports whether the endpoint may keep the flows that it has.
func (c *candidate) isServing() bool { return c.isReady() || c.ep.Serving }

// serviceSlices is the slices of one Service, sorted by name so that equal facts give equal
// results, and an index of their ports.
type serviceSlices struct {
	slices  []*store.Slice
	ports   []map[portKey][]uint16 // nil: few ports, searched linearly
	weights weightsKnown
}

// portKey is what a slice's port and a Service's port have in common; the numbers differ
// by targetPort.
type portKey struct {
	name     string
	protocol model.Protocol
}

// manyPorts is the number of ports from which on newServiceSlices builds an index of each slice.
// Without it each of thousands of ports would search thousands.
const manyPorts = 32

func newServiceSlices(from []*store.Slice, ports int) *serviceSlices {
	s := &serviceSlices{slices: from}
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
func (s *serviceSlices) numbers(dst []uint16, i int, key portKey) []uint16 {
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
func gather(dst []candidate, from *serviceSlices, id PortID, node string) []candidate {
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
		if !ep.Addr.IsValid() || model.FamilyOf(ep.Addr) != family {
			continue
		}
		dst = append(dst, candidate{
			addr:       netip.AddrPortFrom(ep.Addr, port),
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

// compareCandidates sorts by address, and of two with one address the more useful comes first.
// While an endpoint moves between slices both contain it. And a network may give a pod the
// address of another one that still terminates, on another node perhaps: the one that stays
// counts, as in kube-proxy 1.36 (pkg/proxy/endpointslicecache.go).
func compareCandidates(a, b candidate) int {
	return cmp.Or(
		a.addr.Compare(b.addr),
		trueFirst(!a.ep.Terminating, !b.ep.Terminating),
		trueFirst(a.ep.Ready, b.ep.Ready),
		trueFirst(a.ep.Serving, b.ep.Serving),
		trueFirst(a.onThisNode, b.onThisNode),
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
