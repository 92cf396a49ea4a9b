package services

import (
	"cmp"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// addNew adds new entries of ports, endpoints before the addresses that lead to them. An
// endpoint's own address is written before a slot may lead to the endpoint: without it the
// filter would not let the endpoint's answers pass. It returns the ports that failed.
func (t *portTable) addNew(ports []*intent.ServicePort) map[*intent.ServicePort]error {
	w, failed := t.begin(), map[*intent.ServicePort]error{}
	cs := make(changes, 0, len(ports))
	for _, p := range ports {
		switch c, err := t.prepare(p); {
		case err != nil:
			failed[p] = err
		case c.have != nil:
			cs = append(cs, c)
		}
	}
	cs.each(t.addBackends)
	w.backends.flush()
	for i := range cs {
		if e := cs[i].have.entries; len(e.backends) > cs[i].known {
			slices.SortFunc(e.backends, compareBackends)
		}
	}
	t.writeEndpointAddrs()
	t.writeSets(cs, true)
	cs.each(t.addRanges)
	w.ranges.flush()
	cs.each(t.addFrontends)
	w.frontends.flush()
	var unwritten changes
	for i := range cs {
		switch c := &cs[i]; {
		case c.err != nil:
			failed[c.want] = c.err
			unwritten = append(unwritten, change{want: c.want, have: c.have})
		case c.isNew:
			c.have.commitUpdate(c.want)
		default:
			c.have.entries.added = c.want
		}
	}
	t.rollBack(unwritten)
	t.writeEndpointAddrs()
	t.countChange()
	return failed
}

// prepare begins a change of a port; its have is nil if the maps hold this decision.
func (t *portTable) prepare(p *intent.ServicePort) (c change, err error) {
	t.matchByFrontend(p)
	have := t.byID[p.ID]
	if have == nil {
		id, err := t.newID(serviceID)
		if err != nil {
			return c, err
		}
		have, c.isNew = newPort(id), true
		have.protocol = p.ID.Protocol
		t.byID[p.ID] = have
		t.names.set(have.service, p.ID)
	}
	if have.source == p {
		return c, nil // the same immutable decision
	}
	if have.source != nil && !slices.Equal(have.source.Lingering, p.Lingering) {
		t.endpointsEnded()
	}
	e := have.beginUpdate()
	e.added = nil
	t.setTFTP(have, p.Helper == intent.TFTP)
	c.want, c.have, c.known = p, have, len(e.backends)
	return c, nil
}

// servedBy returns the endpoints of a port that the map backends has, sorted. A UDP flow ends when
// its endpoint leaves the map: those that only keep the flows they have are there, too, in no set.
func servedBy(p *intent.ServicePort) []intent.Endpoint {
	if len(p.ServingUnselected) == 0 {
		return p.Endpoints
	}
	all := slices.Concat(p.Endpoints, p.ServingUnselected)
	slices.SortFunc(all, func(a, b intent.Endpoint) int { return a.Addr.Compare(b.Addr) })
	return all
}

// addBackends adds the wanted endpoints.
func (t *portTable) addBackends(c *change) {
	e, next, want := c.have.entries, 0, servedBy(c.want)
	if c.isNew {
		e.backends = make([]backendEntry, 0, len(want))
	}
	for _, endpoint := range want {
		for next < c.known && e.backends[next].addr.Compare(endpoint.Addr) < 0 {
			next++
		}
		value := backendOf(c.have.service, endpoint)
		if next < c.known && e.backends[next].addr == endpoint.Addr {
			// A member of both its old and its new sets, until these are written.
			old := &e.backends[next]
			if value.Flags |= old.value.Flags & memberFlags; value != old.value {
				t.batches.backends.add(c, old.id, value)
			}
			continue
		}
		if len(e.backends) == cap(e.backends) {
			e.backends = slices.Grow(e.backends, len(want))
		}
		id, err := t.newID(backendID)
		if err != nil {
			c.err = err
			return
		}
		t.batches.backends.add(c, id, value)
	}
}

// onBackend records an endpoint that was added or changed.
func (t *portTable) onBackend(c *change, id uint32, v objects.TCBackend) {
	e, b := c.have.entries, backendEntry{objects.EndpointOf(v), id, v}
	if at, found := slices.BinarySearchFunc(e.backends[:c.known], b, compareBackends); found {
		e.backends[at].value = v
		return
	}
	e.backends = append(e.backends, b)
	t.countEndpoint(endpointKey(c.have.protocol, b.addr), e.tftp, 1)
}

// compareBackends sorts by address. Maps that were damaged may have an address twice.
func compareBackends(a, b backendEntry) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.id, b.id))
}

// backendOf returns the entry of an endpoint.
func backendOf(service uint32, e intent.Endpoint) objects.TCBackend {
	return objects.TCBackend{
		Addr: objects.ToAddr(e.Addr.Addr()), Port: objects.ToPort(e.Addr.Port()),
		Family: objects.FamilyOf(e.Addr.Addr()), Flags: uint8(objects.BackendFlags(e)), Service: service,
	}
}

// addRanges adds the source ranges, before the addresses that need them.
func (t *portTable) addRanges(c *change) {
	for key := range wantedRanges(c.have.service, c.want) {
		if !c.have.entries.ranges[key] {
			t.batches.ranges.add(c, key, 1)
		}
	}
}

func onRange(c *change, k objects.TCRangeKey, _ uint8) { c.have.entries.ranges[k] = true }

// addFrontends adds and changes addresses.
func (t *portTable) addFrontends(c *change) {
	for _, f := range c.want.Frontends {
		key, value := frontendEntry(c.have.service, c.want, f)
		if old, ok := c.have.entries.frontends[key]; !ok || old != value || t.owners[key] != c.have.service {
			t.batches.frontends.add(c, key, value)
		}
	}
}

func (t *portTable) onFrontend(c *change, key objects.TCFrontendKey, value objects.TCFrontend) {
	t.changed = t.changed || c.have.protocol == model.UDP
	c.have.entries.frontends[key] = value
	if _, owned := t.owners[key]; !owned {
		t.addrs.count(key, 1)
	}
	t.owners[key] = c.have.service
}

// frontendEntry returns the entry of an address.
func frontendEntry(service uint32, p *intent.ServicePort, f intent.Frontend) (objects.TCFrontendKey, objects.TCFrontend) {
	var flags objects.TCFrontendFlags
	if f.SourceRanges != nil {
		flags |= objects.TCFrontendFlagsFRONTEND_RANGES
	}
	if p.Helper == intent.TFTP {
		flags |= objects.TCFrontendFlagsFRONTEND_TFTP
	}
	return objects.FrontendKey(p.ID, f), objects.TCFrontend{
		Service: service, ExternalRoute: uint8(f.ExternalRoute), InternalRoute: uint8(f.InternalRoute),
		Flags: uint8(flags),
	}
}

// wantedFrontends returns the entries of a port's addresses.
func wantedFrontends(service uint32, p *intent.ServicePort) map[objects.TCFrontendKey]objects.TCFrontend {
	frontends := make(map[objects.TCFrontendKey]objects.TCFrontend, len(p.Frontends))
	for _, f := range p.Frontends {
		key, value := frontendEntry(service, p, f)
		frontends[key] = value
	}
	return frontends
}

// wantedRanges returns the entries of a port's source ranges.
func wantedRanges(service uint32, p *intent.ServicePort) map[objects.TCRangeKey]bool {
	ranges := map[objects.TCRangeKey]bool{}
	for _, f := range p.Frontends {
		for _, r := range f.SourceRanges {
			ranges[objects.RangeKey(service, r)] = true
		}
	}
	return ranges
}

// rollBack removes the entries that addNew wrote for ports that did not fit.
func (t *portTable) rollBack(cs changes) {
	if len(cs) == 0 {
		return
	}
	var unserved changes
	var ids []intent.PortID
	cs = slices.DeleteFunc(cs, func(c change) bool {
		if len(c.have.entries.frontends) > 0 {
			return false
		}
		unserved, ids = append(unserved, change{have: c.have}), append(ids, c.want.ID)
		return true
	})
	t.erase(unserved)
	for i, id := range ids {
		if unserved[i].err == nil {
			t.names.remove(t.byID[id].service)
			delete(t.byID, id)
		}
	}
	cs.each(t.trimSlots)
	t.batches.noSlots.flush()
	t.dropBackends(cs, func(c *change) func(*backendEntry) bool {
		named := map[uint32]bool{}
		for _, ids := range c.have.slots {
			for _, id := range ids {
				named[id] = true
			}
		}
		return func(b *backendEntry) bool { return !named[b.id] }
	})
}
