package ebpf

import (
	"net/netip"

	"spillway.dev/spillway/internal/model"
)

// An endpoint's own address and port stand among the frontends too, marked
// FRONTEND_ENDPOINT: packets between pods that go to or come from there pass by
// netfilter. Several Services may share one; a Service's address comes first.

type directAddr struct {
	refs    int // endpoints that have this address
	written bool
}

func directKey(proto model.Protocol, addr netip.AddrPort) tcFrontendKey {
	return tcFrontendKey{
		Addr: toAddr(addr.Addr()), Port: toPort(addr.Port()),
		Proto: uint8(proto), Family: familyOf(addr.Addr()),
	}
}

func (t *portTable) refDirect(key tcFrontendKey) {
	d := t.direct[key]
	d.refs++
	t.direct[key] = d
	if d.refs == 1 {
		t.writeDirect(key)
	}
}

// unrefDirect takes the entry away with its last endpoint.
func (t *portTable) unrefDirect(key tcFrontendKey) error {
	d := t.direct[key]
	if d.refs--; d.refs > 0 {
		t.direct[key] = d
		return nil
	}
	if d.written {
		if err := remove(t.frontends, key); err != nil {
			t.direct[key], t.untidy = d, true
			return err
		}
	}
	delete(t.direct, key)
	return nil
}

// writeDirect writes the entry if there is an endpoint and no Service has the
// address. A map without room for it costs speed and nothing else.
func (t *portTable) writeDirect(key tcFrontendKey) {
	d, ok := t.direct[key]
	if _, owned := t.owners[key]; !ok || owned || d.refs == 0 {
		return
	}
	d.written = t.frontends.Put(key, tcFrontend{Flags: uint8(tcFrontendFlagsFRONTEND_ENDPOINT)}) == nil
	t.direct[key] = d
	t.untidy = t.untidy || !d.written
}

// overwroteDirect notes that a Service has the address now.
func (t *portTable) overwroteDirect(key tcFrontendKey) {
	if d, ok := t.direct[key]; ok {
		d.written = false
		t.direct[key] = d
	}
}

// countDirect counts an endpoint that was read back.
func (t *portTable) countDirect(key tcFrontendKey, by int) {
	d := t.direct[key]
	d.refs += by
	if d.refs == 0 && !d.written {
		delete(t.direct, key)
		return
	}
	t.direct[key] = d
}

// tidyDirect mends what a write that failed, or a run that was killed, has left:
// entries without an endpoint, endpoints without an entry.
func (t *portTable) tidyDirect() error {
	t.untidy = false
	for key, d := range t.direct {
		switch {
		case d.refs > 0 && !d.written:
			t.writeDirect(key)
		case d.refs > 0:
		case d.written:
			if err := remove(t.frontends, key); err != nil {
				t.untidy = true
				return err
			}
			fallthrough
		default:
			delete(t.direct, key)
		}
	}
	return nil
}
