package ebpf

import (
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// The frontends also contain the endpoints' own addresses and ports, with
// FRONTEND_ENDPOINT: packets between pods to and from these addresses bypass netfilter.
// Several Services may share such an entry. A Service's own address has precedence.

type directAddr struct {
	refs    int // endpoints with this address
	helped  int // those of them that answer from other ports (TFTP)
	written bool
	marked  bool // the written entry has FRONTEND_TFTP
}

func directKey(proto model.Protocol, addr netip.AddrPort) tcFrontendKey {
	return tcFrontendKey{
		Addr: toAddr(addr.Addr()), Port: toPort(addr.Port()),
		Proto: uint8(proto), Family: familyOf(addr.Addr()),
	}
}

func (t *portTable) refDirect(key tcFrontendKey, helped bool) {
	d := t.direct[key]
	d.refs++
	if helped {
		d.helped++
	}
	t.direct[key] = d
	if d.refs == 1 || d.marked != (d.helped > 0) {
		t.writeDirect(key)
	}
}

// unrefDirect removes the entry with its last endpoint.
func (t *portTable) unrefDirect(key tcFrontendKey, helped bool) error {
	d := t.direct[key]
	if helped {
		d.helped--
	}
	if d.refs--; d.refs > 0 {
		t.direct[key] = d
		if d.marked != (d.helped > 0) {
			t.writeDirect(key)
		}
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

// writeDirect writes the entry if an endpoint has the address and no Service does. A
// full map costs only speed.
func (t *portTable) writeDirect(key tcFrontendKey) {
	d, ok := t.direct[key]
	if _, owned := t.owners[key]; !ok || owned || d.refs == 0 {
		return
	}
	flags := tcFrontendFlagsFRONTEND_ENDPOINT
	if d.marked = d.helped > 0; d.marked {
		flags |= tcFrontendFlagsFRONTEND_TFTP
	}
	d.written = t.frontends.Put(key, tcFrontend{Flags: uint8(flags)}) == nil
	t.direct[key] = d
	t.untidy = t.untidy || !d.written
}

// overwroteDirect records that a Service has the address now.
func (t *portTable) overwroteDirect(key tcFrontendKey) {
	if d, ok := t.direct[key]; ok {
		d.written, d.marked = false, false
		t.direct[key] = d
	}
}

// setHelped sets or clears the mark of a port's endpoints that they answer from other
// ports.
func (t *portTable) setHelped(have *port, helped bool) {
	if have.helped == helped {
		return
	}
	have.helped = helped
	for addr := range have.backends {
		key := directKey(have.protocol, addr)
		d := t.direct[key]
		if helped {
			d.helped++
		} else {
			d.helped--
		}
		t.direct[key] = d
		if d.marked != (d.helped > 0) {
			t.writeDirect(key)
		}
	}
}

// countDirect counts an endpoint that was read back.
func (t *portTable) countDirect(key tcFrontendKey, helped bool, by int) {
	d := t.direct[key]
	d.refs += by
	if helped {
		d.helped += by
	}
	if d.refs == 0 && !d.written {
		delete(t.direct, key)
		return
	}
	t.direct[key] = d
}

// tidyDirect repairs the result of a failed write or a killed run: entries without an
// endpoint, and endpoints without an entry.
func (t *portTable) tidyDirect() error {
	t.untidy = false
	for key, d := range t.direct {
		switch {
		case d.refs > 0 && (!d.written || d.marked != (d.helped > 0)):
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
