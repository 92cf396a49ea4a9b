package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/model"
)

// portTable is what the maps of Services hold, and the only one who writes them.
//
//	frontends[address:port] -> service id
//	services[id]            -> size of each set
//	slots[id, n]            -> backend id, n < size
//	backends[id]            -> address, port, flags
//
// Every order of writes below leaves each lookup of a program, at any moment,
// with an endpoint that is right before or after the change.
type portTable struct {
	frontends, services, slots, backends, ranges *ebpf.Map

	byID map[intent.PortID]*port
	// orphans are Services found in the maps at start that no PortID claims yet.
	orphans map[uint32]*port
	// direct are the endpoints' own addresses, see direct.go.
	direct map[tcFrontendKey]directAddr
	// owners says which Service has a frontend, so that one that moves is not
	// taken away from its new owner.
	owners      map[tcFrontendKey]uint32
	nextService uint32
	nextBackend uint32 // never used twice: flows and sockets remember them
}

// port is one Service port as the maps hold it.
type port struct {
	service   uint32
	protocol  model.Protocol
	frontends map[tcFrontendKey]tcFrontend
	header    tcService
	written   bool // header is in the map
	backends  map[netip.AddrPort]backendEntry
	slots     [2][]uint32
	ranges    map[tcRangeKey]bool
	source    *intent.ServicePort // what it was made from; nil after a restart
}

type backendEntry struct {
	id    uint32
	value tcBackend
}

func newPort(service uint32) *port {
	return &port{
		service:   service,
		frontends: map[tcFrontendKey]tcFrontend{},
		backends:  map[netip.AddrPort]backendEntry{},
		ranges:    map[tcRangeKey]bool{},
	}
}

// replace makes the maps hold these ports and no others. Only ports that differ
// cost anything.
func (t *portTable) replace(ctx context.Context, ports []*intent.ServicePort) (map[intent.PortID]error, error) {
	want := make(map[intent.PortID]bool, len(ports))
	failed := map[intent.PortID]error{}
	for _, p := range ports {
		want[p.ID] = true
		t.adopt(p)
	}
	for id := range t.byID {
		if !want[id] {
			if err := t.remove(id); err != nil {
				failed[id] = err
			}
		}
	}
	for id, o := range t.orphans {
		if err := t.erase(o); err != nil {
			return failed, fmt.Errorf("remove Service left by an earlier run: %w", err)
		}
		delete(t.orphans, id)
	}
	for _, p := range ports {
		if err := ctx.Err(); err != nil {
			return failed, err
		}
		if err := t.write(p); err != nil {
			failed[p.ID] = err
		}
	}
	return failed, t.tidyDirect()
}

// adopt finds the entries that an earlier run wrote for this port: those that
// one of its addresses leads to. Endpoints keep their ids, and so do flows.
func (t *portTable) adopt(p *intent.ServicePort) {
	if t.byID[p.ID] != nil || len(t.orphans) == 0 {
		return
	}
	for _, f := range p.Frontends {
		service, ok := t.owners[frontendKey(p.ID, f)]
		if !ok {
			continue
		}
		if o := t.orphans[service]; o != nil {
			delete(t.orphans, service)
			t.byID[p.ID] = o
			return
		}
	}
}

// write brings one port up to date. On an error the port serves what fitted;
// writing it again goes on from there.
func (t *portTable) write(p *intent.ServicePort) error {
	have := t.byID[p.ID]
	if have == nil {
		t.nextService++
		have = newPort(t.nextService)
		have.protocol = p.ID.Protocol
		t.byID[p.ID] = have
	}
	if have.source == p {
		return nil // the very same decision: immutable
	}
	have.source = nil
	if err := t.writeEndpoints(have, p); err != nil {
		return err
	}
	if err := t.writeFrontends(have, p); err != nil {
		return err
	}
	if err := t.dropEndpoints(have, p); err != nil {
		return err
	}
	have.source = p
	return nil
}

// writeEndpoints adds what is new and lets the sets name just the wanted ones.
func (t *portTable) writeEndpoints(have *port, p *intent.ServicePort) error {
	var sets [2][]uint32
	for _, e := range p.Endpoints {
		flags := backendFlags(e)
		old, known := have.backends[e.Addr]
		if !known {
			t.nextBackend++
			old.id = t.nextBackend
		}
		// Member of both its old and its new sets, until these are written.
		value := tcBackend{
			Addr: toAddr(e.Addr.Addr()), Port: toPort(e.Addr.Port()),
			Family: familyOf(e.Addr.Addr()), Flags: uint8(flags) | old.value.Flags&memberFlags,
			Service: have.service,
		}
		if !known || value != old.value {
			if err := t.backends.Put(old.id, value); err != nil {
				return full("endpoint", e.Addr, err)
			}
			have.backends[e.Addr] = backendEntry{old.id, value}
			if !known {
				t.refDirect(directKey(p.ID.Protocol, e.Addr))
			}
		}
		if e.Cluster {
			sets[clusterSet] = append(sets[clusterSet], old.id)
		}
		if e.Local {
			sets[localSet] = append(sets[localSet], old.id)
		}
	}
	return t.writeSets(have, sets, seconds(p.Affinity))
}

const memberFlags = uint8(tcBackendFlagsBACKEND_CLUSTER | tcBackendFlagsBACKEND_LOCAL)

// writeSets writes both sets: first the slots that every reader, by the old
// size or the new, finds filled; then the sizes; then the rest is taken away.
func (t *portTable) writeSets(have *port, want [2][]uint32, affinity uint32) error {
	header := tcService{Affinity: affinity}
	for set := range want {
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
	for set := range want {
		for i := len(have.slots[set]) - 1; i >= int(header.Count[set]); i-- {
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

// arrange orders the wanted ids so that as few slots as can be change: who
// stays keeps its place, new ones and the last fill the holes.
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

// writeFrontends adds and changes addresses, then takes away those gone. Source
// ranges come before the address that asks for them and go after it.
func (t *portTable) writeFrontends(have *port, p *intent.ServicePort) error {
	ranges := map[tcRangeKey]bool{}
	want := map[tcFrontendKey]tcFrontend{}
	for _, f := range p.Frontends {
		want[frontendKey(p.ID, f)] = tcFrontend{
			Service: have.service, Outside: uint8(f.Outside), Inside: uint8(f.Inside),
			Flags: uint8(frontendFlags(f)),
		}
		for _, r := range f.SourceRanges {
			ranges[rangeKey(have.service, r)] = true
		}
	}
	for key := range ranges {
		if !have.ranges[key] {
			if err := t.ranges.Put(key, uint8(1)); err != nil {
				return full("source range", have.service, err)
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
		t.owners[key] = have.service
	}
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

// dropFrontend takes an address away unless another port has taken it over.
func (t *portTable) dropFrontend(have *port, key tcFrontendKey) error {
	if t.owners[key] == have.service {
		if err := remove(t.frontends, key); err != nil {
			return err
		}
		delete(t.owners, key)
		t.writeDirect(key)
	}
	delete(have.frontends, key)
	return nil
}

// dropEndpoints takes away what no set names any more, and membership in sets
// that an endpoint has left.
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
	return t.unrefDirect(directKey(have.protocol, addr))
}

// remove takes a port away.
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
	have.written = false
	for set, slots := range have.slots {
		for i := range slices.Backward(slots) {
			if err := remove(t.slots, slotKey(have.service, set, i)); err != nil {
				return err
			}
			have.slots[set] = have.slots[set][:i]
		}
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

// remove deletes a key; one that is not there is no error.
func remove[K any](m *ebpf.Map, key K) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete from eBPF map: %w", err)
	}
	return nil
}

// full says which map had no room, and for what.
func full(what string, which any, err error) error {
	return fmt.Errorf("write %s %v to eBPF map: %w", what, which, err)
}
