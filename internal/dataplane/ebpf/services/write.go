package services

import (
	"errors"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// endpointsEnded reports that endpoints were removed.
func (t *portTable) endpointsEnded() {
	if t.ended != nil {
		t.ended()
	}
}

// write updates one port. After an error it serves its old state or a part of the new
// one, and another call continues.
func (t *portTable) write(p *intent.ServicePort) error {
	one := []*intent.ServicePort{p}
	for _, err := range t.addNew(one) {
		return err
	}
	for _, err := range t.removeOld(one) {
		return err
	}
	return nil
}

// writeOrShrink is write. After an error it also removes from the maps what the port no longer has:
// without room for what is new, removed endpoints get no more connections, and clients outside new
// source ranges are refused.
func (t *portTable) writeOrShrink(p *intent.ServicePort) error {
	err := t.write(p)
	if have := t.byID[p.ID]; err != nil && have != nil {
		err = errors.Join(err, t.write(have.entries.common(have.service, p, t.owners)))
	}
	return err
}

// common returns the part of a decision whose entries are in the maps already.
func (e *portEntries) common(service uint32, p *intent.ServicePort, owners map[objects.TCFrontendKey]uint32) *intent.ServicePort {
	some := *p
	some.Endpoints, some.Weights, some.Table = nil, nil, nil
	index, left := make([]int, len(p.Endpoints)), reach{}
	for i, endpoint := range p.Endpoints {
		if index[i] = -1; !e.has(endpoint.Addr) {
			continue
		}
		index[i] = len(some.Endpoints)
		some.Endpoints = append(some.Endpoints, endpoint)
		left.cluster, left.local = left.cluster || endpoint.ClusterPolicy, left.local || endpoint.LocalPolicy
		if p.Weights != nil {
			some.Weights = append(some.Weights, p.Weights[i])
		}
	}
	for _, i := range p.Table {
		if index[i] >= 0 {
			some.Table = append(some.Table, uint32(index[i]))
		}
	}
	some.ServingUnselected = slices.DeleteFunc(slices.Clone(p.ServingUnselected),
		func(endpoint intent.Endpoint) bool { return !e.has(endpoint.Addr) })
	some.Frontends = nil
	for _, f := range p.Frontends {
		key := objects.FrontendKey(p.ID, f)
		if _, known := e.frontends[key]; !known || owners[key] != service {
			continue
		}
		if f.SourceRanges != nil {
			f.SourceRanges = slices.DeleteFunc(slices.Clone(f.SourceRanges),
				func(r netip.Prefix) bool { return !e.ranges[objects.RangeKey(service, r)] })
		}
		f.ExternalRoute, f.InternalRoute = left.route(f.ExternalRoute), left.route(f.InternalRoute)
		some.Frontends = append(some.Frontends, f)
	}
	return &some
}

// has reports whether an endpoint is in the maps.
func (e *portEntries) has(addr netip.AddrPort) bool {
	_, found := slices.BinarySearchFunc(e.backends, addr, func(b backendEntry, a netip.AddrPort) int { return b.addr.Compare(a) })
	return found
}

// reach says which routes have an endpoint.
type reach struct{ cluster, local bool }

// route returns a route that does not lead to an empty set.
func (r reach) route(to intent.Route) intent.Route {
	if to == intent.ToCluster && !r.cluster || to == intent.ToLocal && !r.local {
		return intent.Drop
	}
	return to
}

// countChange has the programs compare UDP flows and connected UDP sockets with their Services again,
// if one may have lost its address or its endpoint. Call it after the maps are written: a program
// that has read them before then compares once more. The count is never 0.
func (t *portTable) countChange() {
	if !t.changed || t.changes == nil {
		return
	}
	t.changed = objects.CountChange(t.changes) != nil // the next write tries again
}
