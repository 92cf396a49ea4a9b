package services

import (
	"errors"
	"net/netip"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// The frontends also contain the endpoints' own addresses and ports, with
// FRONTEND_ENDPOINT: packets between pods to and from these addresses bypass netfilter.
// Several Services may share such an entry. A Service's own address has precedence.

// endpointAddrs counts the endpoints of each address. A large cluster has many of them, so
// the entry in the map follows from the counts, with few exceptions.
type endpointAddrs struct {
	refs      map[objects.TCFrontendKey]uint32   // endpoints with this address
	tftp      map[objects.TCFrontendKey]uint32   // of these, endpoints that answer from other ports (TFTP)
	outOfSync map[objects.TCFrontendKey]struct{} // the map may hold another entry than the counts say
	// retry says that a write failed. Entries for which the map has no room wait for the
	// next full sync instead: there may be many.
	retry bool
	dirty []objects.TCFrontendKey // to write; see markAddr
}

func newEndpointAddrs() endpointAddrs {
	return endpointAddrs{refs: map[objects.TCFrontendKey]uint32{}, tftp: map[objects.TCFrontendKey]uint32{},
		outOfSync: map[objects.TCFrontendKey]struct{}{}}
}

func endpointKey(proto model.Protocol, addr netip.AddrPort) objects.TCFrontendKey {
	return objects.TCFrontendKey{
		Addr: objects.ToAddr(addr.Addr()), Port: objects.ToPort(addr.Port()),
		Proto: uint8(proto), Family: objects.FamilyOf(addr.Addr()),
	}
}

// count adds 1 or -1 to the endpoints of an address, and reports whether its entry may
// differ now.
func (a *endpointAddrs) count(key objects.TCFrontendKey, tftp bool, by int) (differs bool) {
	differs = add(a.refs, key, by)
	return tftp && add(a.tftp, key, by) || differs
}

// add adds to a count, and reports whether it was 0 or is.
func add[K comparable](counts map[K]uint32, key K, by int) (differs bool) {
	before := int(counts[key])
	if before+by > 0 {
		counts[key] = uint32(before + by)
		return before == 0
	}
	delete(counts, key)
	return before > 0
}

// release frees the memory that a large write has used.
func (a *endpointAddrs) release() { a.dirty = nil }

// fail records that an entry was not written. A full map costs only speed.
func (a *endpointAddrs) fail(key objects.TCFrontendKey, err error) {
	a.outOfSync[key] = struct{}{}
	a.retry = a.retry || !objects.IsFull(err)
}

// endpointEntry returns the entry that an address has: one if an endpoint has the address
// and no Service does.
func (t *portTable) endpointEntry(key objects.TCFrontendKey) (v objects.TCFrontend, ok bool) {
	if _, owned := t.owners[key]; owned || t.endpoints.refs[key] == 0 {
		return v, false
	}
	flags := objects.TCFrontendFlagsFRONTEND_ENDPOINT
	if t.endpoints.tftp[key] > 0 {
		flags |= objects.TCFrontendFlagsFRONTEND_TFTP
	}
	return objects.TCFrontend{Flags: uint8(flags)}, true
}

// countEndpoint adds 1 or -1 to the endpoints of an address.
func (t *portTable) countEndpoint(key objects.TCFrontendKey, tftp bool, by int) {
	if t.endpoints.count(key, tftp, by) {
		t.markAddr(key)
	}
}

// readEndpoint counts an endpoint that was read back. repairEndpointAddrs writes the entry.
func (t *portTable) readEndpoint(key objects.TCFrontendKey, tftp bool, by int) {
	t.endpoints.count(key, tftp, by)
	t.endpoints.outOfSync[key] = struct{}{}
}

// markAddr makes the next writeEndpointAddrs write the entry of an address.
func (t *portTable) markAddr(key objects.TCFrontendKey) {
	t.endpoints.dirty = append(t.endpoints.dirty, key)
	if len(t.endpoints.dirty) == batchEntries {
		t.writeEndpointAddrs()
	}
}

// writeEndpointAddrs writes or deletes the entries of marked addresses. A Service's address
// may come between: its entry is written later, or its owner is known.
func (t *portTable) writeEndpointAddrs() {
	w := t.begin()
	for _, key := range t.endpoints.dirty {
		if _, owned := t.owners[key]; owned { // the entry is the Service's
			delete(t.endpoints.outOfSync, key)
		} else if value, wanted := t.endpointEntry(key); wanted {
			w.addrs.add(&t.ofNone, key, value)
		} else {
			w.noAddrs.add(&t.ofNone, key, struct{}{})
		}
	}
	t.endpoints.dirty = t.endpoints.dirty[:0]
	w.addrs.flush()
	w.noAddrs.flush()
}

// setTFTP sets or clears the mark of a port's endpoints that they answer from other
// ports.
func (t *portTable) setTFTP(have *port, tftp bool) {
	e := have.entries
	if e.tftp == tftp {
		return
	}
	e.tftp = tftp
	by := 1
	if !tftp {
		by = -1
	}
	for i := range e.backends {
		if key := endpointKey(have.protocol, e.backends[i].addr); add(t.endpoints.tftp, key, by) {
			t.markAddr(key)
		}
	}
}

// repairEndpointAddrs repairs the result of a failed write or a killed run: entries without
// an endpoint, and endpoints without an entry.
func (t *portTable) repairEndpointAddrs() error {
	t.endpoints.retry = false
	for key := range t.endpoints.outOfSync {
		t.markAddr(key)
	}
	t.writeEndpointAddrs()
	if t.endpoints.retry {
		return errors.New("write the entries of endpoints' own addresses: the kernel has refused some")
	}
	return nil
}
