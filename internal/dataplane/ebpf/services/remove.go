package services

import (
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// removeOld removes the entries of old states that addNew has kept. It returns the ports
// that failed.
func (t *portTable) removeOld(ports []*intent.ServicePort) map[intent.PortID]error {
	w := t.begin()
	cs := make(changes, 0, len(ports))
	for _, p := range ports {
		if have := t.byID[p.ID]; have != nil && have.entries != nil && have.entries.added == p {
			cs = append(cs, change{want: p, have: have, known: len(have.entries.backends)})
		}
	}
	cs.each(t.dropFrontends)
	w.noFrontends.flush()
	cs.each(t.dropRanges)
	w.noRanges.flush()
	t.writeSets(cs, false)
	cs.each(t.endMemberships)
	w.backends.flush()
	t.dropBackends(cs, unwanted)
	t.writeEndpointAddrs()
	t.countChange()
	failed := map[intent.PortID]error{}
	for i := range cs {
		if c := &cs[i]; c.err != nil {
			failed[c.want.ID] = c.err
		} else {
			c.have.commitUpdate(c.want)
		}
	}
	return failed
}

// dropFrontends removes addresses.
func (t *portTable) dropFrontends(c *change) {
	var want map[objects.TCFrontendKey]objects.TCFrontend
	if c.want != nil {
		want = wantedFrontends(c.have.service, c.want)
	}
	for key := range c.have.entries.frontends {
		if _, ok := want[key]; ok {
			continue
		}
		if t.owners[key] == c.have.service {
			t.batches.noFrontends.add(c, key, struct{}{})
		} else { // another port has taken it over
			delete(c.have.entries.frontends, key)
		}
	}
}

func (t *portTable) onNoFrontend(c *change, key objects.TCFrontendKey, _ struct{}) {
	t.changed = t.changed || c.have.protocol == model.UDP
	delete(c.have.entries.frontends, key)
	delete(t.owners, key)
	t.addrs.count(key, -1)
	if t.endpoints.refs[key] > 0 {
		t.markAddr(key)
	}
}

// dropRanges removes source ranges.
func (t *portTable) dropRanges(c *change) {
	var want map[objects.TCRangeKey]bool
	if c.want != nil {
		want = wantedRanges(c.have.service, c.want)
	}
	for key := range c.have.entries.ranges {
		if !want[key] {
			t.batches.noRanges.add(c, key, struct{}{})
		}
	}
}

// endMemberships clears the memberships that endpoints have lost.
func (t *portTable) endMemberships(c *change) {
	e, next := c.have.entries, 0
	for _, endpoint := range servedBy(c.want) {
		for e.backends[next].addr != endpoint.Addr {
			next++
		}
		if flags := uint8(objects.BackendFlags(endpoint)); e.backends[next].value.Flags != flags {
			value := e.backends[next].value
			value.Flags = flags
			t.batches.backends.add(c, e.backends[next].id, value)
		}
	}
}

// unwanted returns which endpoints the port no longer has; nil: none. Call the result in their order.
func unwanted(c *change) func(*backendEntry) bool {
	want, next := servedBy(c.want), 0
	if len(c.have.entries.backends) == len(want) {
		return nil
	}
	return func(b *backendEntry) bool {
		if next < len(want) && want[next].Addr == b.addr {
			next++
			return false
		}
		return true
	}
}

// dropBackends removes the endpoints for which gone is true.
func (t *portTable) dropBackends(cs changes, gone func(*change) func(*backendEntry) bool) {
	cs.each(func(c *change) {
		is, all := gone(c), c.have.entries.backends
		for i := range all {
			if is != nil && is(&all[i]) {
				t.batches.noBackends.add(c, all[i].id, i)
			}
		}
	})
	t.batches.noBackends.flush()
	for i := range cs {
		e := cs[i].have.entries
		e.backends = slices.DeleteFunc(e.backends, func(b backendEntry) bool { return b.id == 0 })
	}
}

func (t *portTable) onNoBackend(c *change, _ uint32, i int) {
	e := c.have.entries
	e.backends[i].id = 0
	t.endpointsEnded()
	t.changed = t.changed || c.have.protocol == model.UDP
	t.countEndpoint(endpointKey(c.have.protocol, e.backends[i].addr), e.tftp, -1)
}

// remove removes ports. It returns those that failed.
func (t *portTable) remove(ids []intent.PortID) map[intent.PortID]error {
	cs, of := make(changes, 0, len(ids)), make([]intent.PortID, 0, len(ids))
	for _, id := range ids {
		if have := t.byID[id]; have != nil {
			cs, of = append(cs, change{have: have}), append(of, id)
		}
	}
	t.erase(cs)
	failed := map[intent.PortID]error{}
	for i, id := range of {
		if err := cs[i].err; err != nil {
			failed[id] = err
		} else {
			t.names.remove(t.byID[id].service)
			delete(t.byID, id)
		}
	}
	return failed
}

// erase removes all entries of ports, addresses first.
func (t *portTable) erase(cs changes) {
	w := t.begin()
	for i := range cs {
		if s := cs[i].have.source; s != nil && len(s.Lingering) > 0 {
			t.endpointsEnded()
		}
		cs[i].have.beginUpdate().added = nil
	}
	cs.each(t.dropFrontends)
	w.noFrontends.flush()
	cs.each(func(c *change) { w.noServices.add(c, c.have.service, struct{}{}) })
	w.noServices.flush()
	cs.each(t.trimSlots)
	w.noSlots.flush()
	t.dropBackends(cs, func(*change) func(*backendEntry) bool { return func(*backendEntry) bool { return true } })
	cs.each(t.dropRanges)
	w.noRanges.flush()
	t.writeEndpointAddrs()
	t.countChange()
}
