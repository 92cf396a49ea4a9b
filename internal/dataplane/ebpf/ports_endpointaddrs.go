package ebpf

import (
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// The frontends also contain the endpoints' own addresses and ports, with
// FRONTEND_ENDPOINT: packets between pods to and from these addresses bypass netfilter.
// Several Services may share such an entry. A Service's own address has precedence.

type endpointAddr struct {
	refs        int // endpoints with this address
	tftp        int // of these, endpoints that answer from other ports (TFTP)
	written     bool
	writtenTFTP bool // the written entry has FRONTEND_TFTP
}

func endpointKey(proto model.Protocol, addr netip.AddrPort) tcFrontendKey {
	return tcFrontendKey{
		Addr: toAddr(addr.Addr()), Port: toPort(addr.Port()),
		Proto: uint8(proto), Family: familyOf(addr.Addr()),
	}
}

func (t *portTable) refEndpoint(key tcFrontendKey, tftp bool) {
	d := t.endpointAddrs[key]
	d.refs++
	if tftp {
		d.tftp++
	}
	t.endpointAddrs[key] = d
	if d.refs == 1 || d.writtenTFTP != (d.tftp > 0) {
		t.writeEndpointAddr(key)
	}
}

// unrefEndpoint removes the entry with its last endpoint.
func (t *portTable) unrefEndpoint(key tcFrontendKey, tftp bool) error {
	d := t.endpointAddrs[key]
	if tftp {
		d.tftp--
	}
	if d.refs--; d.refs > 0 {
		t.endpointAddrs[key] = d
		if d.writtenTFTP != (d.tftp > 0) {
			t.writeEndpointAddr(key)
		}
		return nil
	}
	if d.written {
		if err := remove(t.frontends, key); err != nil {
			t.endpointAddrs[key], t.endpointAddrsDirty = d, true
			return err
		}
	}
	delete(t.endpointAddrs, key)
	return nil
}

// writeEndpointAddr writes the entry if an endpoint has the address and no Service does. A
// full map costs only speed.
func (t *portTable) writeEndpointAddr(key tcFrontendKey) {
	d, ok := t.endpointAddrs[key]
	if _, owned := t.owners[key]; !ok || owned || d.refs == 0 {
		return
	}
	flags := tcFrontendFlagsFRONTEND_ENDPOINT
	if d.writtenTFTP = d.tftp > 0; d.writtenTFTP {
		flags |= tcFrontendFlagsFRONTEND_TFTP
	}
	d.written = t.frontends.Put(key, tcFrontend{Flags: uint8(flags)}) == nil
	t.endpointAddrs[key] = d
	t.endpointAddrsDirty = t.endpointAddrsDirty || !d.written
}

// endpointOverwritten records that a Service has the address now.
func (t *portTable) endpointOverwritten(key tcFrontendKey) {
	if d, ok := t.endpointAddrs[key]; ok {
		d.written, d.writtenTFTP = false, false
		t.endpointAddrs[key] = d
	}
}

// setTFTP sets or clears the mark of a port's endpoints that they answer from other
// ports.
func (t *portTable) setTFTP(have *port, tftp bool) {
	if have.tftp == tftp {
		return
	}
	have.tftp = tftp
	for addr := range have.backends {
		key := endpointKey(have.protocol, addr)
		d := t.endpointAddrs[key]
		if tftp {
			d.tftp++
		} else {
			d.tftp--
		}
		t.endpointAddrs[key] = d
		if d.writtenTFTP != (d.tftp > 0) {
			t.writeEndpointAddr(key)
		}
	}
}

// countEndpoint counts an endpoint that was read back.
func (t *portTable) countEndpoint(key tcFrontendKey, tftp bool, by int) {
	d := t.endpointAddrs[key]
	d.refs += by
	if tftp {
		d.tftp += by
	}
	if d.refs == 0 && !d.written {
		delete(t.endpointAddrs, key)
		return
	}
	t.endpointAddrs[key] = d
}

// repairEndpointAddrs repairs the result of a failed write or a killed run: entries without an
// endpoint, and endpoints without an entry.
func (t *portTable) repairEndpointAddrs() error {
	t.endpointAddrsDirty = false
	for key, d := range t.endpointAddrs {
		switch {
		case d.refs > 0 && (!d.written || d.writtenTFTP != (d.tftp > 0)):
			t.writeEndpointAddr(key)
		case d.refs > 0:
		case d.written:
			if err := remove(t.frontends, key); err != nil {
				t.endpointAddrsDirty = true
				return err
			}
			fallthrough
		default:
			delete(t.endpointAddrs, key)
		}
	}
	return nil
}
