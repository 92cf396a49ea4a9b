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
	delete(t.direct, key)
	if _, owned := t.owners[key]; owned || !d.written {
		return nil
	}
	return remove(t.frontends, key)
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
}

// countDirect counts the endpoints that were read back.
func (t *portTable) countDirect() {
	for _, p := range t.orphans {
		for addr := range p.backends {
			key := directKey(p.protocol, addr)
			d := t.direct[key]
			d.refs++
			t.direct[key] = d
		}
	}
}

// tidyDirect mends what a run that was killed has left: entries without an
// endpoint, endpoints without an entry.
func (t *portTable) tidyDirect() error {
	for key, d := range t.direct {
		switch {
		case d.refs == 0:
			delete(t.direct, key)
			if err := remove(t.frontends, key); err != nil {
				return err
			}
		case !d.written:
			t.writeDirect(key)
		}
	}
	return nil
}
