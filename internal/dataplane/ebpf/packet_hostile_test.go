package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

func TestPacketHostile(t *testing.T) {
	n := newPacketNode(t)
	t.Run("Truncated", func(t *testing.T) { eachFamily(t, n, n.truncated) })
	t.Run("CutWithLengthsRight", func(t *testing.T) { eachTransport(t, n, n.cutShort) })
	t.Run("BadFields", func(t *testing.T) { eachTransport(t, n, n.badFields) })
	t.Run("OtherProtocols", func(t *testing.T) { eachFamily(t, n, n.otherProtocols) })
	t.Run("Groups", func(t *testing.T) { eachTransport(t, n, n.groups) })
	t.Run("FramesForOthers", func(t *testing.T) { eachTransport(t, n, n.framesForOthers) })
	t.Run("ExtensionHeaders", func(t *testing.T) { n.forget(t); n.badExtensions(t, plans["IPv6"]) })
}

// untouched fails unless the frame is passed on as it came.
func (n *packetNode) untouched(t *testing.T, what string, hook at, in []byte, verdicts ...objects.TCVerdict) {
	t.Helper()
	r := n.sendRaw(t, hook, in)
	if r.code != actNext || !bytes.Equal(r.out, in) {
		t.Errorf("%s: code %d, verdicts %s, want it untouched", what, r.code, verdictList(r.verdicts))
		return
	}
	for _, v := range verdicts {
		if r.verdicts[v] != 1 || len(r.verdicts) != 1 {
			t.Errorf("%s: verdicts %s, want %s", what, verdictList(r.verdicts), verdictName(v))
		}
	}
}

// samples are frames of all kinds that the programs act on.
func (n *packetNode) samples(t testing.TB, p *plan) map[string][]byte {
	t.Helper()
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	base := frame{src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", payload: []byte("hello")}
	tcp, udp := base, base
	tcp.proto, udp.proto = protoTCP, protoUDP
	long := tcp
	long.options = []byte{7, 7, 4, 0, 0, 0, 0}
	if p.family == model.IPv6 {
		long.ext = []extension{{extHopByHop, []byte{1, 4, 0, 0, 0, 0}}, {extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
	}
	big := udp
	big.payload = make([]byte, 100)
	seen := n.send(t, inEth0, udp)
	n.forget(t)
	return map[string][]byte{
		"TCP":            tcp.bytes(n, "eth0"),
		"UDP":            udp.bytes(n, "eth0"),
		"long header":    long.bytes(n, "eth0"),
		"first fragment": big.fragments(n, "eth0", 64)[0],
		"later fragment": big.fragments(n, "eth0", 64)[1],
		"ICMP error":     errorKinds[0].about(p, p.far, seen.out[14:], 0).bytes(n, "eth0"),
	}
}

// tooShort tells whether BPF_PROG_RUN refuses a frame by itself: newer kernels
// want the whole of the IP header that the EtherType promises.
func tooShort(b []byte) bool {
	if len(b) < 15 {
		return true
	}
	switch binary.BigEndian.Uint16(b[12:]) {
	case 0x0800:
		return len(b) < 34
	case 0x86dd:
		return len(b) < 54
	}
	return false
}

// truncated: the frame ends at any byte, the lengths in its headers do not.
func (n *packetNode) truncated(t *testing.T, p *plan) {
	for name, b := range n.samples(t, p) {
		for size := 15; size < len(b); size++ {
			if tooShort(b[:size]) {
				continue
			}
			n.untouched(t, fmt.Sprintf("%s of %d bytes cut to %d", name, len(b), size), inEth0, b[:size], objects.TCVerdictPASS_MALFORMED)
		}
	}
}

// setLength writes the datagram's length to fit the frame.
func setLength(b []byte) {
	if b[14]>>4 == 4 {
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
		b[24], b[25] = 0, 0
		binary.BigEndian.PutUint16(b[24:], ^sum16(b[14:14+int(b[14]&15)*4], 0))
	} else {
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
	}
}

// cutShort: the datagram itself is short; its transport header must be whole.
func (n *packetNode) cutShort(t *testing.T, p *plan, proto uint8) {
	name, need := "TCP", 20
	if proto == protoUDP {
		name, need = "UDP", 8
	}
	b := n.samples(t, p)[name]
	ip := 34
	if p.family == model.IPv6 {
		ip = 54
	}
	for size := ip; size < len(b); size++ {
		cut := bytes.Clone(b[:size])
		setLength(cut)
		// The same with the rest of the frame behind it.
		padded := append(bytes.Clone(cut), b[size:]...)
		if size < ip+need {
			n.untouched(t, fmt.Sprintf("%s of %d bytes", name, size), inEth0, cut, objects.TCVerdictPASS_MALFORMED)
			n.untouched(t, fmt.Sprintf("%s of %d bytes, padded", name, size), inEth0, padded, objects.TCVerdictPASS_MALFORMED)
			continue
		}
		for _, in := range [][]byte{cut, padded} {
			if r := n.sendRaw(t, inEth0, in); r.code != actRedirect || r.verdicts[objects.TCVerdictTRANSLATED_DIRECT] != 1 {
				t.Errorf("%s of %d bytes: code %d, %s", name, size, r.code, verdictList(r.verdicts))
			}
		}
	}
}

func (n *packetNode) badFields(t *testing.T, p *plan, proto uint8) {
	name := map[uint8]string{protoTCP: "TCP", protoUDP: "UDP"}[proto]
	good := n.samples(t, p)[name]
	try := func(what string, change func(b []byte) []byte) {
		t.Helper()
		n.untouched(t, what, inEth0, change(bytes.Clone(good)), objects.TCVerdictPASS_MALFORMED)
	}
	l4 := 34
	if p.family == model.IPv6 {
		l4 = 54
		try("version 4", func(b []byte) []byte { b[14] = 0x45; return b })
		try("payload length 0", func(b []byte) []byte { b[18], b[19] = 0, 0; return b })
		try("payload length too large", func(b []byte) []byte { b[19]++; return b })
		try("payload length 65535", func(b []byte) []byte { b[18], b[19] = 0xff, 0xff; return b })
	} else {
		for ihl := range byte(5) {
			try(fmt.Sprintf("ihl %d", ihl), func(b []byte) []byte { b[14] = 0x40 | ihl; return b })
		}
		try("ihl 15", func(b []byte) []byte { b[14] = 0x4f; return b })
		try("version 6", func(b []byte) []byte { b[14] = 0x65; return b })
		try("total length too large", func(b []byte) []byte { b[17]++; return b })
		for _, total := range []byte{0, 1, 19, 20, 27} {
			try(fmt.Sprintf("total length %d", total), func(b []byte) []byte { b[16], b[17] = 0, total; return b })
		}
	}
	if proto == protoTCP {
		for doff := range byte(5) {
			try(fmt.Sprintf("doff %d", doff), func(b []byte) []byte { b[l4+12] = doff << 4; return b })
		}
		try("doff 15", func(b []byte) []byte { b[l4+12] = 0xf0; return b })
		return
	}
	for size := range byte(8) {
		try(fmt.Sprintf("UDP length %d", size), func(b []byte) []byte { b[l4+4], b[l4+5] = 0, size; return b })
	}
}

func (n *packetNode) otherProtocols(t *testing.T, p *plan) {
	n.samples(t, p)
	for _, proto := range []uint8{0, 2, 4, 41, 47, 50, 51, 59, 89, 132, 255} {
		if p.family == model.IPv6 && proto == extHopByHop {
			continue
		}
		f := frame{proto: proto, src: ap(p.client, 0), dst: ap(p.clusterIP, 0), payload: bytes.Repeat([]byte{0, 80}, 30)}
		n.untouched(t, fmt.Sprintf("protocol %d", proto), inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	}
	b := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}.bytes(n, "eth0")
	for _, etherType := range []uint16{0x0806, 0x8100, 0x88a8, 0x8847, 0x88cc, 0x0000, 0x05dc} {
		other := bytes.Clone(b)
		binary.BigEndian.PutUint16(other[12:], etherType)
		n.untouched(t, fmt.Sprintf("EtherType %#x", etherType), inEth0, other, objects.TCVerdictPASS_OTHER)
	}
	tagged := append(append(bytes.Clone(b[:12]), 0x81, 0x00, 0x00, 0x05), b[12:]...)
	n.untouched(t, "VLAN tag", inEth0, tagged, objects.TCVerdictPASS_OTHER)
}

// groups: no Service is there, whatever port.
func (n *packetNode) groups(t *testing.T, p *plan, proto uint8) {
	n.samples(t, p)
	dsts := []string{"127.0.0.1", "224.0.0.1", "255.255.255.255", "0.0.0.0"}
	if p.family == model.IPv6 {
		dsts = []string{"::1", "ff02::1", "::", "fe80::1"}
	}
	for _, dst := range dsts {
		for _, port := range []uint16{80, 30080, 0} {
			for _, hook := range []at{inEth0, inPod1, outEth0, outPod1} {
				f := frame{proto: proto, src: ap(p.client, 40000), dst: ap(addr(dst), port), flags: "S"}
				if hook == inPod1 {
					f.src = ap(p.pod1, 40000)
				}
				n.untouched(t, dst, hook, f.bytes(n, hook.iface), objects.TCVerdictPASS_OTHER)
			}
		}
	}
}

// framesForOthers: a frame that another machine is meant to get is not ours on
// an external device. On a bridge's port it is (see from_pod). These are the
// only ones that no verdict counts.
func (n *packetNode) framesForOthers(t *testing.T, p *plan, proto uint8) {
	n.samples(t, p)
	f := frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
	for i, mac := range []net.HardwareAddr{{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {1, 0, 0x5e, 0, 0, 1}, {2, 9, 9, 9, 9, 9}} {
		f.ethDst = mac
		r := n.send(t, inEth0, f)
		r.want(t, actNext)
		f.src = ap(p.pod1, 40000)
		if r = n.send(t, inPod1, f); i < 2 {
			r.want(t, actNext)
		} else {
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
		}
	}
}

func (n *packetNode) badExtensions(t *testing.T, p *plan) {
	n.samples(t, p)
	six := []byte{1, 4, 0, 0, 0, 0}
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: []byte("x")}
	for range 12 {
		f.ext = append(f.ext, extension{extDestOpts, six})
		r := n.send(t, inEth0, f)
		if len(f.ext) < 6 && r.code != actRedirect {
			t.Errorf("%d extension headers: code %d, %s", len(f.ext), r.code, verdictList(r.verdicts))
		} else if len(f.ext) > 6 {
			n.untouched(t, "too many extension headers", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
		}
	}
	f.ext = []extension{{extHopByHop, six}}
	b := f.bytes(n, "eth0")
	for _, units := range []byte{2, 3, 50, 255} {
		b[14+41] = units
		n.untouched(t, "extension header longer than the packet", inEth0, b, objects.TCVerdictPASS_MALFORMED)
	}
}
