package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// The entries that portTable writes for one port, in the order that the programs need.

// write updates one port. After an error it serves its old state or a part of the new
// one, and another call continues.
func (t *portTable) write(p *intent.ServicePort) error {
	if err := t.addNew(p); err != nil {
		return err
	}
	return t.removeOld(p)
}

// addNew adds new entries, endpoints before the addresses that lead to them.
func (t *portTable) addNew(p *intent.ServicePort) error {
	t.adopt(p)
	have := t.byID[p.ID]
	if have == nil {
		id, err := t.newID(serviceID)
		if err != nil {
			return err
		}
		have = newPort(id)
		have.protocol = p.ID.Protocol
		t.byID[p.ID] = have
	}
	if have.source == p {
		return nil // the same immutable decision
	}
	e := have.unsettle()
	e.grown = nil
	err := t.addEndpoints(have, p)
	if err == nil {
		err = t.addFrontends(have, p)
	}
	if err != nil {
		t.giveBack(p.ID, have)
		return err
	}
	e.grown = p
	return nil
}

// addEndpoints adds new endpoints and updates the sets. A set that becomes empty stays
// until no address leads to it.
func (t *portTable) addEndpoints(have *port, p *intent.ServicePort) error {
	t.setTFTP(have, p.Helper == intent.TFTP)
	if err := t.addBackends(have, p); err != nil {
		return err
	}
	return t.writeSets(have, p, true)
}

// addBackends writes the wanted endpoints.
func (t *portTable) addBackends(have *port, p *intent.ServicePort) error {
	e := have.entries
	known := len(e.backends)
	defer func() {
		if len(e.backends) > known {
			slices.SortFunc(e.backends, compareBackends)
		}
	}()
	next := 0
	for _, endpoint := range p.Endpoints {
		for next < known && e.backends[next].addr.Compare(endpoint.Addr) < 0 {
			next++
		}
		value := backendOf(have.service, endpoint)
		if next < known && e.backends[next].addr == endpoint.Addr {
			// A member of both its old and its new sets, until these are written.
			old := &e.backends[next]
			value.Flags |= old.value.Flags & memberFlags
			if value == old.value {
				continue
			}
			if err := t.backends.Put(old.id, value); err != nil {
				return full("endpoint", endpoint.Addr, err)
			}
			old.value = value
			continue
		}
		id, err := t.newID(backendID)
		if err != nil {
			return err
		}
		if err := t.backends.Put(id, value); err != nil {
			return full("endpoint", endpoint.Addr, err)
		}
		if len(e.backends) == cap(e.backends) {
			e.backends = slices.Grow(e.backends, len(p.Endpoints))
		}
		e.backends = append(e.backends, backendEntry{endpoint.Addr, id, value})
		_ = t.countEndpoint(endpointKey(have.protocol, endpoint.Addr), e.tftp, 1) // only a removal fails
	}
	return nil
}

// compareBackends sorts by address. Maps that were damaged may have an address twice.
func compareBackends(a, b backendEntry) int {
	return cmp.Or(a.addr.Compare(b.addr), cmp.Compare(a.id, b.id))
}

// backendOf returns the entry of an endpoint.
func backendOf(service uint32, e intent.Endpoint) tcBackend {
	return tcBackend{
		Addr: toAddr(e.Addr.Addr()), Port: toPort(e.Addr.Port()),
		Family: familyOf(e.Addr.Addr()), Flags: uint8(backendFlags(e)), Service: service,
	}
}

// sets returns the ids of the wanted endpoints, by set.
func (e *portEntries) sets(p *intent.ServicePort) [2][]uint32 {
	var sets [2][]uint32
	next := 0
	for _, endpoint := range p.Endpoints {
		for e.backends[next].addr != endpoint.Addr {
			next++
		}
		id := e.backends[next].id
		if endpoint.ClusterPolicy {
			sets[clusterSet] = append(sets[clusterSet], id)
		}
		if endpoint.LocalPolicy {
			sets[localSet] = append(sets[localSet], id)
		}
	}
	return sets
}

const memberFlags = uint8(tcBackendFlagsBACKEND_CLUSTER_POLICY | tcBackendFlagsBACKEND_LOCAL_POLICY)

// writeSets writes both sets. First it writes the slots that readers of the old and the
// new size both use, then the sizes, and then it deletes the rest. With keep, a set
// that becomes empty stays unchanged.
func (t *portTable) writeSets(have *port, p *intent.ServicePort, keep bool) error {
	e := have.entries
	header, want := e.newHeader(p), e.sets(p)
	for set := range want {
		if keep && len(want[set]) == 0 {
			header.Count[set] = e.header.Count[set]
			continue
		}
		next := arrange(have.slots[set], want[set])
		header.Count[set] = uint32(len(next))
		have.slots[set] = slices.Grow(have.slots[set], max(0, len(next)-len(have.slots[set])))
		for i, id := range next {
			if i < len(have.slots[set]) && have.slots[set][i] == id {
				continue
			}
			if err := t.slots.Put(slotKey(have.service, set, i), id); err != nil {
				return full("slot", have.service, err)
			}
			if i < len(have.slots[set]) {
				have.slots[set][i] = id
			} else {
				have.slots[set] = append(have.slots[set], id)
			}
		}
	}
	if !e.written || e.header != header {
		if err := t.services.Put(have.service, header); err != nil {
			return full("Service", have.service, err)
		}
		e.header, e.written = header, true
	}
	return t.trimSlots(have)
}

// newHeader returns the header of a decision, without the sizes of its sets.
func (e *portEntries) newHeader(p *intent.ServicePort) tcService {
	header := tcService{Affinity: seconds(p.Affinity)}
	if e.tftp {
		header.Flags = uint32(tcServiceFlagsSERVICE_TFTP)
	}
	return header
}

// trimSlots removes the slots beyond the sizes of the sets.
func (t *portTable) trimSlots(have *port) error {
	for set := range have.slots {
		for i := len(have.slots[set]) - 1; i >= int(have.entries.header.Count[set]); i-- {
			if err := remove(t.slots, slotKey(have.service, set, i)); err != nil {
				return err
			}
			have.slots[set] = have.slots[set][:i]
		}
	}
	return nil
}

func slotKey(service uint32, set, i int) tcSlotKey {
	key := tcSlotKey{Service: service, Slot: uint32(i)}
	if set == localSet {
		key.Slot |= slotLocal
	}
	return key
}

// arrange orders the wanted ids with as few changed slots as possible. Existing ids
// keep their slots, and new ones and the last ones fill the holes.
func arrange(have, want []uint32) []uint32 {
	sorted := slices.Clone(want)
	slices.Sort(sorted)
	placed := make([]bool, len(sorted))
	next := make([]uint32, len(want))
	for i, id := range have[:min(len(have), len(next))] {
		if at, wanted := slices.BinarySearch(sorted, id); wanted && !placed[at] {
			next[i], placed[at] = id, true
		}
	}
	hole := 0
	for at, id := range sorted {
		if placed[at] {
			continue
		}
		for next[hole] != 0 {
			hole++
		}
		next[hole] = id
	}
	return next
}

// addFrontends adds and changes addresses, after the source ranges that they need.
func (t *portTable) addFrontends(have *port, p *intent.ServicePort) error {
	e := have.entries
	want, ranges := wantedFrontends(have.service, p)
	for key := range ranges {
		if !e.ranges[key] {
			if err := t.ranges.Put(key, uint8(1)); err != nil {
				return full("source range", rangePrefix(key), err)
			}
			e.ranges[key] = true
		}
	}
	for key, value := range want {
		if old, ok := e.frontends[key]; ok && old == value && t.owners[key] == have.service {
			continue
		}
		if err := t.frontends.Put(key, value); err != nil {
			return full("address", fromAddr(key.Addr, key.Family), err)
		}
		e.frontends[key] = value
		if _, owned := t.owners[key]; !owned {
			t.addrs.count(key, 1)
		}
		t.owners[key] = have.service
	}
	return nil
}

// wantedFrontends returns the entries of a port's addresses and source ranges.
func wantedFrontends(service uint32, p *intent.ServicePort) (map[tcFrontendKey]tcFrontend, map[tcRangeKey]bool) {
	frontends := make(map[tcFrontendKey]tcFrontend, len(p.Frontends))
	ranges := map[tcRangeKey]bool{}
	for _, f := range p.Frontends {
		flags := frontendFlags(f)
		if p.Helper == intent.TFTP {
			flags |= tcFrontendFlagsFRONTEND_TFTP
		}
		frontends[frontendKey(p.ID, f)] = tcFrontend{
			Service: service, ExternalRoute: uint8(f.ExternalRoute), InternalRoute: uint8(f.InternalRoute),
			Flags: uint8(flags),
		}
		for _, r := range f.SourceRanges {
			ranges[rangeKey(service, r)] = true
		}
	}
	return frontends, ranges
}

// giveBack frees the map entries of a port that did not fit.
func (t *portTable) giveBack(id intent.PortID, have *port) {
	if len(have.entries.frontends) == 0 {
		if t.erase(have) == nil {
			delete(t.byID, id)
		}
		return
	}
	if t.trimSlots(have) != nil {
		return
	}
	named := map[uint32]bool{}
	for _, ids := range have.slots {
		for _, id := range ids {
			named[id] = true
		}
	}
	_ = t.dropBackends(have, func(b *backendEntry) bool { return !named[b.id] })
}

// removeOld removes the entries of the old state that addNew has kept.
func (t *portTable) removeOld(p *intent.ServicePort) error {
	have := t.byID[p.ID]
	if have == nil || have.entries == nil || have.entries.grown != p {
		return nil
	}
	if err := t.dropFrontends(have, p); err != nil {
		return err
	}
	if err := t.writeSets(have, p, false); err != nil {
		return err
	}
	if err := t.dropEndpoints(have, p); err != nil {
		return err
	}
	have.settle(p)
	return nil
}

// dropFrontends removes addresses, and then their source ranges.
func (t *portTable) dropFrontends(have *port, p *intent.ServicePort) error {
	e := have.entries
	want, ranges := wantedFrontends(have.service, p)
	for key := range e.frontends {
		if _, ok := want[key]; !ok {
			if err := t.dropFrontend(have, key); err != nil {
				return err
			}
		}
	}
	for key := range e.ranges {
		if !ranges[key] {
			if err := remove(t.ranges, key); err != nil {
				return err
			}
			delete(e.ranges, key)
		}
	}
	return nil
}

// dropFrontend removes an address, unless another port has taken it over.
func (t *portTable) dropFrontend(have *port, key tcFrontendKey) error {
	if t.owners[key] == have.service {
		if err := remove(t.frontends, key); err != nil {
			return err
		}
		delete(t.owners, key)
		t.addrs.count(key, -1)
		if _, wanted := t.endpointEntry(key); wanted {
			_ = t.writeEndpointAddr(key) // only a removal fails
		}
	}
	delete(have.entries.frontends, key)
	return nil
}

// dropEndpoints removes endpoints that no set contains any more, and the memberships
// that an endpoint has lost.
func (t *portTable) dropEndpoints(have *port, p *intent.ServicePort) error {
	e := have.entries
	next := 0
	for i := range p.Endpoints {
		for e.backends[next].addr != p.Endpoints[i].Addr {
			next++
		}
		b := &e.backends[next]
		if flags := uint8(backendFlags(p.Endpoints[i])); b.value.Flags != flags {
			value := b.value
			value.Flags = flags
			if err := t.backends.Put(b.id, value); err != nil {
				return full("endpoint", b.addr, err)
			}
			b.value = value
		}
	}
	if len(e.backends) == len(p.Endpoints) {
		return nil
	}
	next = 0
	return t.dropBackends(have, func(b *backendEntry) bool {
		if next < len(p.Endpoints) && p.Endpoints[next].Addr == b.addr {
			next++
			return false
		}
		return true
	})
}

// dropBackends removes the endpoints for which gone is true. It asks in their order.
func (t *portTable) dropBackends(have *port, gone func(*backendEntry) bool) error {
	e := have.entries
	defer func() {
		e.backends = slices.DeleteFunc(e.backends, func(b backendEntry) bool { return b.id == 0 })
	}()
	for i := range e.backends {
		b := &e.backends[i]
		if !gone(b) {
			continue
		}
		if err := remove(t.backends, b.id); err != nil {
			return err
		}
		b.id = 0
		if err := t.countEndpoint(endpointKey(have.protocol, b.addr), e.tftp, -1); err != nil {
			return err
		}
	}
	return nil
}

// remove removes a port.
func (t *portTable) remove(id intent.PortID) error {
	have := t.byID[id]
	if have == nil {
		return nil
	}
	if err := t.erase(have); err != nil {
		return err
	}
	delete(t.byID, id)
	return nil
}

// erase removes a port's entries, addresses first.
func (t *portTable) erase(have *port) error {
	e := have.unsettle()
	for key := range e.frontends {
		if err := t.dropFrontend(have, key); err != nil {
			return err
		}
	}
	if err := remove(t.services, have.service); err != nil {
		return err
	}
	e.header, e.written = tcService{}, false
	if err := t.trimSlots(have); err != nil {
		return err
	}
	if err := t.dropBackends(have, func(*backendEntry) bool { return true }); err != nil {
		return err
	}
	for key := range e.ranges {
		if err := remove(t.ranges, key); err != nil {
			return err
		}
		delete(e.ranges, key)
	}
	return nil
}

// remove deletes a key. A missing key is no error.
func remove[K any](m kernelMap, key K) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete from eBPF map: %w", err)
	}
	return nil
}

// errFull replaces the kernel's "argument list too long".
var errFull = errors.New("its eBPF map is full; the other Services are served")

// full adds the entry to an error, and replaces the cause if the map is full.
func full(what string, which any, err error) error {
	if isFull(err) {
		err = errFull
	}
	return fmt.Errorf("write %s %v: %w", what, which, err)
}

func isFull(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) }
