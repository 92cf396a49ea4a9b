package ebpf

import (
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// The frontends also contain the endpoints' own addresses and ports, with
// FRONTEND_ENDPOINT: packets between pods to and from these addresses bypass netfilter.
// Several Services may share such an entry. A Service's own address has precedence.

// endpointAddrs counts the endpoints of each address. A large cluster has many of them, so
// the entry in the map follows from the counts, with few exceptions.
type endpointAddrs struct {
	refs map[tcFrontendKey]uint32   // endpoints with this address
	tftp map[tcFrontendKey]uint32   // of these, endpoints that answer from other ports (TFTP)
	odd  map[tcFrontendKey]struct{} // the map may hold another entry than the counts say
	// retry says that a write failed. Entries for which the map has no room wait for the
	// next full sync instead: there may be many.
	retry bool
}

func newEndpointAddrs() endpointAddrs {
	return endpointAddrs{refs: map[tcFrontendKey]uint32{}, tftp: map[tcFrontendKey]uint32{}, odd: map[tcFrontendKey]struct{}{}}
}

func endpointKey(proto model.Protocol, addr netip.AddrPort) tcFrontendKey {
	return tcFrontendKey{
		Addr: toAddr(addr.Addr()), Port: toPort(addr.Port()),
		Proto: uint8(proto), Family: familyOf(addr.Addr()),
	}
}

// count adds 1 or -1 to the endpoints of an address.
func (a *endpointAddrs) count(key tcFrontendKey, tftp bool, by int) {
	add(a.refs, key, by)
	if tftp {
		add(a.tftp, key, by)
	}
}

func add[K comparable](counts map[K]uint32, key K, by int) {
	if n := int(counts[key]) + by; n > 0 {
		counts[key] = uint32(n)
	} else {
		delete(counts, key)
	}
}

// endpointEntry returns the entry that an address has: one if an endpoint has the address
// and no Service does.
func (t *portTable) endpointEntry(key tcFrontendKey) (v tcFrontend, ok bool) {
	if _, owned := t.owners[key]; owned || t.endpoints.refs[key] == 0 {
		return v, false
	}
	flags := tcFrontendFlagsFRONTEND_ENDPOINT
	if t.endpoints.tftp[key] > 0 {
		flags |= tcFrontendFlagsFRONTEND_TFTP
	}
	return tcFrontend{Flags: uint8(flags)}, true
}

// countEndpoint adds 1 or -1 to the endpoints of an address, and updates its entry.
func (t *portTable) countEndpoint(key tcFrontendKey, tftp bool, by int) error {
	before, had := t.endpointEntry(key)
	t.endpoints.count(key, tftp, by)
	if now, has := t.endpointEntry(key); had == has && before == now {
		return nil
	}
	return t.writeEndpointAddr(key)
}

// readEndpoint counts an endpoint that was read back. repairEndpointAddrs writes the entry.
func (t *portTable) readEndpoint(key tcFrontendKey, tftp bool, by int) {
	t.endpoints.count(key, tftp, by)
	t.endpoints.odd[key] = struct{}{}
}

// writeEndpointAddr writes or removes the entry of an address. A full map costs only speed.
func (t *portTable) writeEndpointAddr(key tcFrontendKey) error {
	_, owned := t.owners[key]
	value, wanted := t.endpointEntry(key)
	var removed, put error
	switch {
	case owned: // the entry is the Service's
	case wanted:
		put = t.frontends.Put(key, value)
	default:
		removed = remove(t.frontends, key)
	}
	if removed == nil && put == nil {
		delete(t.endpoints.odd, key)
		return nil
	}
	t.endpoints.odd[key] = struct{}{}
	t.endpoints.retry = t.endpoints.retry || removed != nil || !isFull(put)
	return removed
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
		key := endpointKey(have.protocol, e.backends[i].addr)
		before, _ := t.endpointEntry(key)
		add(t.endpoints.tftp, key, by)
		if now, has := t.endpointEntry(key); has && now != before {
			_ = t.writeEndpointAddr(key) // only a removal fails
		}
	}
}

// repairEndpointAddrs repairs the result of a failed write or a killed run: entries without an
// endpoint, and endpoints without an entry.
func (t *portTable) repairEndpointAddrs() error {
	t.endpoints.retry = false
	for key := range t.endpoints.odd {
		if err := t.writeEndpointAddr(key); err != nil {
			return err
		}
	}
	return nil
}
