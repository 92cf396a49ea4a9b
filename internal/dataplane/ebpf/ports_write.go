package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"

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
	have.source, have.grown = nil, nil
	err := t.addEndpoints(have, p)
	if err == nil {
		err = t.addFrontends(have, p)
	}
	if err != nil {
		t.giveBack(p.ID, have)
		return err
	}
	have.grown = p
	return nil
}

// addEndpoints adds new endpoints and updates the sets. A set that becomes empty stays
// until no address leads to it.
func (t *portTable) addEndpoints(have *port, p *intent.ServicePort) error {
	t.setTFTP(have, p.Helper == intent.TFTP)
	for _, e := range p.Endpoints {
		old, known := have.backends[e.Addr]
		if !known {
			id, err := t.newID(backendID)
			if err != nil {
				return err
			}
			old.id = id
		}
		// A member of both its old and its new sets, until these are written.
		value := tcBackend{
			Addr: toAddr(e.Addr.Addr()), Port: toPort(e.Addr.Port()),
			Family: familyOf(e.Addr.Addr()), Flags: uint8(backendFlags(e)) | old.value.Flags&memberFlags,
			Service: have.service,
		}
		if !known || value != old.value {
			if err := t.backends.Put(old.id, value); err != nil {
				return full("endpoint", e.Addr, err)
			}
			have.backends[e.Addr] = backendEntry{old.id, value}
			if !known {
				t.refEndpoint(endpointKey(have.protocol, e.Addr), have.tftp)
			}
		}
	}
	return t.writeSets(have, have.sets(p), seconds(p.Affinity), true)
}

// sets returns the ids of the wanted endpoints, by set.
func (have *port) sets(p *intent.ServicePort) [2][]uint32 {
	var sets [2][]uint32
	for _, e := range p.Endpoints {
		id := have.backends[e.Addr].id
		if e.ClusterPolicy {
			sets[clusterSet] = append(sets[clusterSet], id)
		}
		if e.LocalPolicy {
			sets[localSet] = append(sets[localSet], id)
		}
	}
	return sets
}

const memberFlags = uint8(tcBackendFlagsBACKEND_CLUSTER_POLICY | tcBackendFlagsBACKEND_LOCAL_POLICY)

// writeSets writes both sets. First it writes the slots that readers of the old and the
// new size both use, then the sizes, and then it deletes the rest. With keep, a set
// that becomes empty stays unchanged.
func (t *portTable) writeSets(have *port, want [2][]uint32, affinity uint32, keep bool) error {
	header := tcService{Affinity: affinity}
	if have.tftp {
		header.Flags = uint32(tcServiceFlagsSERVICE_TFTP)
	}
	for set := range want {
		if keep && len(want[set]) == 0 {
			header.Count[set] = have.header.Count[set]
			continue
		}
		next := arrange(have.slots[set], want[set])
		header.Count[set] = uint32(len(next))
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
	if !have.written || have.header != header {
		if err := t.services.Put(have.service, header); err != nil {
			return full("Service", have.service, err)
		}
		have.header, have.written = header, true
	}
	return t.trimSlots(have)
}

// trimSlots removes the slots beyond the sizes of the sets.
func (t *portTable) trimSlots(have *port) error {
	for set := range have.slots {
		for i := len(have.slots[set]) - 1; i >= int(have.header.Count[set]); i-- {
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
	wanted := make(map[uint32]bool, len(want))
	for _, id := range want {
		wanted[id] = true
	}
	next := make([]uint32, len(want))
	placed := make(map[uint32]bool, len(want))
	for i, id := range have {
		if i < len(next) && wanted[id] && !placed[id] {
			next[i] = id
			placed[id] = true
		}
	}
	hole := 0
	for _, id := range want {
		if placed[id] {
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
	want, ranges := wantedFrontends(have.service, p)
	for key := range ranges {
		if !have.ranges[key] {
			if err := t.ranges.Put(key, uint8(1)); err != nil {
				return full("source range", rangePrefix(key), err)
			}
			have.ranges[key] = true
		}
	}
	for key, value := range want {
		if old, ok := have.frontends[key]; ok && old == value && t.owners[key] == have.service {
			continue
		}
		if err := t.frontends.Put(key, value); err != nil {
			return full("address", fromAddr(key.Addr, key.Family), err)
		}
		have.frontends[key] = value
		if _, owned := t.owners[key]; !owned {
			t.addrs.count(key, 1)
		}
		t.owners[key] = have.service
		t.endpointOverwritten(key)
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
	if len(have.frontends) == 0 {
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
	for addr, entry := range have.backends {
		if !named[entry.id] && t.dropBackend(have, addr) != nil {
			return
		}
	}
}

// removeOld removes the entries of the old state that addNew has kept.
func (t *portTable) removeOld(p *intent.ServicePort) error {
	have := t.byID[p.ID]
	if have == nil || have.grown != p {
		return nil
	}
	if err := t.dropFrontends(have, p); err != nil {
		return err
	}
	if err := t.writeSets(have, have.sets(p), seconds(p.Affinity), false); err != nil {
		return err
	}
	if err := t.dropEndpoints(have, p); err != nil {
		return err
	}
	have.source, have.grown = p, nil
	return nil
}

// dropFrontends removes addresses, and then their source ranges.
func (t *portTable) dropFrontends(have *port, p *intent.ServicePort) error {
	want, ranges := wantedFrontends(have.service, p)
	for key := range maps.Clone(have.frontends) {
		if _, ok := want[key]; !ok {
			if err := t.dropFrontend(have, key); err != nil {
				return err
			}
		}
	}
	for key := range have.ranges {
		if !ranges[key] {
			if err := remove(t.ranges, key); err != nil {
				return err
			}
			delete(have.ranges, key)
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
		t.writeEndpointAddr(key)
	}
	delete(have.frontends, key)
	return nil
}

// dropEndpoints removes endpoints that no set contains any more, and the memberships
// that an endpoint has lost.
func (t *portTable) dropEndpoints(have *port, p *intent.ServicePort) error {
	want := make(map[netip.AddrPort]tcBackendFlags, len(p.Endpoints))
	for _, e := range p.Endpoints {
		want[e.Addr] = backendFlags(e)
	}
	for addr, entry := range have.backends {
		flags, ok := want[addr]
		switch {
		case !ok:
			if err := t.dropBackend(have, addr); err != nil {
				return err
			}
		case entry.value.Flags != uint8(flags):
			entry.value.Flags = uint8(flags)
			if err := t.backends.Put(entry.id, entry.value); err != nil {
				return full("endpoint", addr, err)
			}
			have.backends[addr] = entry
		}
	}
	return nil
}

func (t *portTable) dropBackend(have *port, addr netip.AddrPort) error {
	if err := remove(t.backends, have.backends[addr].id); err != nil {
		return err
	}
	delete(have.backends, addr)
	return t.unrefEndpoint(endpointKey(have.protocol, addr), have.tftp)
}

// remove removes a port.
func (t *portTable) remove(id intent.PortID) error {
	have := t.byID[id]
	if have == nil {
		return nil
	}
	have.source = nil
	if err := t.erase(have); err != nil {
		return err
	}
	delete(t.byID, id)
	return nil
}

// erase removes a port's entries, addresses first.
func (t *portTable) erase(have *port) error {
	for key := range maps.Clone(have.frontends) {
		if err := t.dropFrontend(have, key); err != nil {
			return err
		}
	}
	if err := remove(t.services, have.service); err != nil {
		return err
	}
	have.header, have.written = tcService{}, false
	if err := t.trimSlots(have); err != nil {
		return err
	}
	for addr := range have.backends {
		if err := t.dropBackend(have, addr); err != nil {
			return err
		}
	}
	for key := range have.ranges {
		if err := remove(t.ranges, key); err != nil {
			return err
		}
		delete(have.ranges, key)
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
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		err = errFull
	}
	return fmt.Errorf("write %s %v: %w", what, which, err)
}
