package services

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// The stages in which portTable writes ports, in the order that the programs need.

// writes are the batches of a portTable.
type writes struct {
	backends  batch[uint32, objects.TCBackend]
	slots     batch[objects.TCSlotKey, uint32]
	services  batch[uint32, objects.TCService]
	ranges    batch[objects.TCRangeKey, uint8]
	frontends batch[objects.TCFrontendKey, objects.TCFrontend]
	addrs     batch[objects.TCFrontendKey, objects.TCFrontend] // endpoints' own addresses

	noFrontends batch[objects.TCFrontendKey, struct{}]
	noRanges    batch[objects.TCRangeKey, struct{}]
	noServices  batch[uint32, struct{}]
	noSlots     batch[objects.TCSlotKey, struct{}]
	noBackends  batch[uint32, int] // with the index in portEntries.backends
	noAddrs     batch[objects.TCFrontendKey, struct{}]
}

// begin returns the table's batches.
func (t *portTable) begin() *writes {
	if t.writes != nil {
		return t.writes
	}
	w := &writes{}
	w.backends = puts(&t.backends, t.onBackend, func(_ uint32, v objects.TCBackend) (string, any) { return "endpoint", objects.EndpointOf(v) })
	w.slots = puts(&t.slots, onSlot, func(k objects.TCSlotKey, _ uint32) (string, any) { return "slot", k.Service })
	w.services = puts(&t.services, onHeader, func(k uint32, _ objects.TCService) (string, any) { return "Service", k })
	w.ranges = puts(&t.ranges, onRange, func(k objects.TCRangeKey, _ uint8) (string, any) { return "source range", objects.RangePrefix(k) })
	w.frontends = puts(&t.frontends, t.onFrontend, func(k objects.TCFrontendKey, _ objects.TCFrontend) (string, any) {
		return "address", objects.FromAddr(k.Addr, k.Family)
	})
	w.noFrontends = deletes(&t.frontends, t.onNoFrontend)
	w.noRanges = deletes(&t.ranges, func(c *change, k objects.TCRangeKey, _ struct{}) { delete(c.have.entries.ranges, k) })
	w.noServices = deletes(&t.services, func(c *change, _ uint32, _ struct{}) {
		c.have.entries.header, c.have.entries.written = objects.TCService{}, false
	})
	w.noSlots = deletes(&t.slots, onNoSlot)
	w.noBackends = deletes(&t.backends, t.onNoBackend)
	w.addrs = addrWrites[objects.TCFrontend](t, false)
	w.noAddrs = addrWrites[struct{}](t, true)
	t.writes = w
	return w
}

// puts returns a batch that fails the change of an entry that the kernel refuses. name
// describes an entry.
func puts[K, V any](m *objects.Map, written func(*change, K, V), name func(K, V) (what string, which any)) batch[K, V] {
	return batch[K, V]{m: m, written: written, failed: func(c *change, k K, v V, err error) {
		what, which := name(k, v)
		c.err = objects.WriteError(what, which, err)
	}}
}

func deletes[K, V any](m *objects.Map, written func(*change, K, V)) batch[K, V] {
	return batch[K, V]{m: m, delete: true, written: written, failed: func(c *change, k K, _ V, err error) {
		c.err = fmt.Errorf("delete entry %v from eBPF map %s: %w", k, *m, err)
	}}
}

// addrWrites returns a batch of endpoints' own addresses, which fails no port.
func addrWrites[V any](t *portTable, remove bool) batch[objects.TCFrontendKey, V] {
	return batch[objects.TCFrontendKey, V]{m: &t.frontends, delete: remove,
		written: func(_ *change, k objects.TCFrontendKey, _ V) { delete(t.endpoints.outOfSync, k) },
		failed:  func(_ *change, k objects.TCFrontendKey, _ V, err error) { t.endpoints.fail(k, err) },
	}
}

// endpointsEnded reports that endpoints were removed.
func (t *portTable) endpointsEnded() {
	if t.ended != nil {
		t.ended()
	}
}

// release frees the memory that a large write has used.
func (t *portTable) release() {
	if w := t.writes; w != nil {
		w.backends.release()
		w.slots.release()
		w.services.release()
		w.ranges.release()
		w.frontends.release()
		w.addrs.release()
		w.noFrontends.release()
		w.noRanges.release()
		w.noServices.release()
		w.noSlots.release()
		w.noBackends.release()
		w.noAddrs.release()
	}
	t.endpoints.release()
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
				t.writes.backends.add(c, old.id, value)
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
		t.writes.backends.add(c, id, value)
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

// sets returns the sets that a decision wants, if have are those of the port: the ids of the
// endpoints, once for each share, or as the decision's table says.
func (e *portEntries) sets(p *intent.ServicePort, have [2][]uint32) (want [2][]uint32) {
	shares := [2][]int{objects.ClusterSet: p.Shares(intent.ToCluster), objects.LocalSet: p.Shares(intent.ToLocal)}
	ids, next := make([]uint32, len(p.Endpoints)), 0
	for i, endpoint := range p.Endpoints {
		for e.backends[next].addr != endpoint.Addr {
			next++
		}
		ids[i] = e.backends[next].id
	}
	for set := range want {
		if set == objects.ClusterSet && p.Table != nil {
			for _, i := range p.Table {
				want[set] = append(want[set], ids[i])
			}
			continue
		}
		for i, id := range ids {
			for range shares[set][i] {
				want[set] = append(want[set], id)
			}
		}
		want[set] = arrange(have[set], want[set])
	}
	return want
}

const memberFlags = uint8(objects.TCBackendFlagsBACKEND_CLUSTER_POLICY | objects.TCBackendFlagsBACKEND_LOCAL_POLICY)

// writeSets writes the sets of ports. First it writes the slots that readers of the old
// and the new size both use, then the sizes, and then it deletes the rest. With keep, a
// set that becomes empty stays unchanged, because an address may still lead to it.
func (t *portTable) writeSets(cs changes, keep bool) {
	cs.each(func(c *change) { t.addSlots(c, keep) })
	t.writes.slots.flush()
	cs.each(t.addHeader)
	t.writes.services.flush()
	cs.each(t.trimSlots)
	t.writes.noSlots.flush()
}

func (t *portTable) addSlots(c *change, keep bool) {
	have, e := c.have, c.have.entries
	want := e.sets(c.want, have.slots)
	c.header = e.newHeader(c.want)
	for set := range want {
		if keep && len(want[set]) == 0 {
			c.header.Count[set] = e.header.Count[set]
			continue
		}
		next := want[set]
		c.header.Count[set] = uint32(len(next))
		have.slots[set] = slices.Grow(have.slots[set], max(0, len(next)-len(have.slots[set])))
		known := len(have.slots[set])
		for i, id := range next {
			if i >= known || have.slots[set][i] != id {
				t.writes.slots.add(c, slotKey(have.service, set, i), id)
			}
		}
	}
}

func onSlot(c *change, k objects.TCSlotKey, id uint32) {
	slots, i := c.have.slotsOf(k)
	if i < len(*slots) {
		(*slots)[i] = id
	} else {
		*slots = append(*slots, id)
	}
}

// newHeader returns the header of a decision, without the sizes of its sets.
func (e *portEntries) newHeader(p *intent.ServicePort) objects.TCService {
	header := objects.TCService{Affinity: objects.Seconds(p.Affinity), Flags: uint16(objects.BalanceFlags(p)), SynLimit: p.SYNLimit}
	if e.tftp {
		header.Flags |= uint16(objects.TCServiceFlagsSERVICE_TFTP)
	}
	return header
}

func (t *portTable) addHeader(c *change) {
	if e := c.have.entries; !e.written || e.header != c.header {
		t.writes.services.add(c, c.have.service, c.header)
	}
}

func onHeader(c *change, _ uint32, header objects.TCService) {
	c.have.entries.header, c.have.entries.written = header, true
}

// trimSlots removes the slots beyond the sizes of the sets, the last first.
func (t *portTable) trimSlots(c *change) {
	for set := range c.have.slots {
		for i := len(c.have.slots[set]) - 1; i >= int(c.have.entries.header.Count[set]); i-- {
			t.writes.noSlots.add(c, slotKey(c.have.service, set, i), struct{}{})
		}
	}
}

func onNoSlot(c *change, k objects.TCSlotKey, _ struct{}) {
	slots, i := c.have.slotsOf(k)
	*slots = (*slots)[:i]
}

func slotKey(service uint32, set, i int) objects.TCSlotKey {
	key := objects.TCSlotKey{Service: service, Slot: uint32(i)}
	if set == objects.LocalSet {
		key.Slot |= objects.SlotLocal
	}
	return key
}

// slotsOf returns the set of a slot, and its place there.
func (p *port) slotsOf(key objects.TCSlotKey) (set *[]uint32, i int) {
	if key.Slot&objects.SlotLocal != 0 {
		return &p.slots[objects.LocalSet], int(key.Slot &^ objects.SlotLocal)
	}
	return &p.slots[objects.ClusterSet], int(key.Slot)
}

// arrange orders the wanted ids, of which some may repeat, with as few changed slots as
// possible. Existing ids keep their slots, and new ones and the last ones fill the holes.
func arrange(have, want []uint32) []uint32 {
	sorted := slices.Clone(want)
	slices.Sort(sorted)
	placed := make([]int, len(sorted)) // how many of an id are placed, where it is first in sorted
	next := make([]uint32, len(want))
	for i, id := range have[:min(len(have), len(next))] {
		first, wanted := slices.BinarySearch(sorted, id)
		if !wanted {
			continue
		}
		if at := first + placed[first]; at < len(sorted) && sorted[at] == id {
			next[i] = id
			placed[first]++
		}
	}
	hole, first := 0, 0
	for at, id := range sorted {
		if sorted[first] != id {
			first = at
		}
		if at-first < placed[first] {
			continue
		}
		for next[hole] != 0 {
			hole++
		}
		next[hole] = id
	}
	return next
}

// addRanges adds the source ranges, before the addresses that need them.
func (t *portTable) addRanges(c *change) {
	for key := range wantedRanges(c.have.service, c.want) {
		if !c.have.entries.ranges[key] {
			t.writes.ranges.add(c, key, 1)
		}
	}
}

func onRange(c *change, k objects.TCRangeKey, _ uint8) { c.have.entries.ranges[k] = true }

// addFrontends adds and changes addresses.
func (t *portTable) addFrontends(c *change) {
	for _, f := range c.want.Frontends {
		key, value := frontendEntry(c.have.service, c.want, f)
		if old, ok := c.have.entries.frontends[key]; !ok || old != value || t.owners[key] != c.have.service {
			t.writes.frontends.add(c, key, value)
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
	t.writes.noSlots.flush()
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
			t.writes.noFrontends.add(c, key, struct{}{})
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
			t.writes.noRanges.add(c, key, struct{}{})
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
			t.writes.backends.add(c, e.backends[next].id, value)
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
				t.writes.noBackends.add(c, all[i].id, i)
			}
		}
	})
	t.writes.noBackends.flush()
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

// countChange has the programs compare UDP flows and connected UDP sockets with their Services again,
// if one may have lost its address or its endpoint. Call it after the maps are written: a program
// that has read them before then compares once more. The count is never 0.
func (t *portTable) countChange() {
	if !t.changed || t.changes == nil {
		return
	}
	t.changed = objects.CountChange(t.changes) != nil // the next write tries again
}
