package ebpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func TestPacketAnswers(t *testing.T) {
	n := newPacketNode(t)
	t.Run("TailIsKept", func(t *testing.T) { eachFamily(t, n, n.answersKeepTail) })
	// A packet that is made longer or shorter has no CHECKSUM_COMPLETE any more
	// (__skb_trim_rcsum), but BPF_PROG_RUN would look at it all the same.
	n.checksComplete = false
	t.Run("RST", func(t *testing.T) { eachFamily(t, n, n.answersRST) })
	t.Run("PortUnreachable", func(t *testing.T) { eachFamily(t, n, n.answersUnreachable) })
	t.Run("Silence", func(t *testing.T) { eachFamily(t, n, n.answersNothing) })
	t.Run("NotToGroups", func(t *testing.T) { eachTransport(t, n, n.martianSources) })
	t.Run("TooBig", func(t *testing.T) { eachTransport(t, n, n.answersTooBig) })
	t.Run("ChecksumPartial", func(t *testing.T) { eachFamily(t, n, n.answersUnfinished) })
	t.Run("TooBigFragment", func(t *testing.T) { n.forget(t); n.answersTooBigFragment(t, plans["IPv6"]) })
	t.Run("TooBigMayBeFragmented", func(t *testing.T) { n.forget(t); n.bigWithoutDF(t, plans["IPv4"]) })
	t.Run("GSOIsNotTooBig", func(t *testing.T) { eachFamily(t, n, n.bigGSO) })
	t.Run("TimeExceeded", func(t *testing.T) { eachTransport(t, n, n.answersTTL) })
}

// wantAnswer fails unless the frame goes back where it came from.
func (n *packetNode) wantAnswer(t *testing.T, hook at, in frame, r result, verdict objects.TCVerdict) {
	t.Helper()
	r.want(t, actRedirect, verdict)
	if r.v.src.Addr() != in.dst.Addr() || r.v.dst.Addr() != in.src.Addr() {
		t.Errorf("answer runs %s -> %s", r.v.src, r.v.dst)
	}
	if r.v.ethSrc.String() != n.mac[hook.iface].String() || r.v.ethDst.String() != "02:00:00:00:fe:fe" {
		t.Errorf("answer's frame goes from %s to %s", r.v.ethSrc, r.v.ethDst)
	}
	if err := checkSums(r.out); err != nil {
		t.Errorf("answer: %v", err)
	}
}

// answersRST follows RFC 9293, 3.10.7.1.
func (n *packetNode) answersRST(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP))
	data := []byte("some data that the answer has not")
	tests := []struct {
		flags    string
		payload  []byte
		want     string
		seq, ack uint32
	}{
		{"S", nil, "R.", 0, 1001},
		{"S", data[:5], "R.", 0, 1006},
		{"F", nil, "R.", 0, 1001},
		{"FS", data, "R.", 0, 1002 + uint32(len(data))},
		{"", data, "R.", 0, 1000 + uint32(len(data))},
		{".", nil, "R", 2000, 0},
		{"P.", data, "R", 2000, 0},
		{"F.", nil, "R", 2000, 0},
		{"S.", nil, "R", 2000, 0},
	}
	sources := map[at]netip.Addr{inEth0: p.client, inPod1: p.pod1}
	for hook, src := range sources {
		for _, tt := range tests {
			for _, front := range frontends(p) {
				in := frame{proto: protoTCP, src: ap(src, 40000), dst: front, flags: tt.flags, seq: 1000, ack: 2000, payload: tt.payload, pad: 3}
				r := n.send(t, hook, in)
				n.wantAnswer(t, hook, in, r, objects.TCVerdictREJECTED_RST)
				r.wantPath(t, front, in.src)
				if r.v.flags != tt.want || r.v.seq != tt.seq || r.v.ack != tt.ack || len(r.v.payload) > 0 {
					t.Errorf("%q was answered with %q seq %d ack %d and %d bytes, want %q %d %d",
						tt.flags, r.v.flags, r.v.seq, r.v.ack, len(r.v.payload), tt.want, tt.seq, tt.ack)
				}
			}
		}
	}
}

// answersKeepTail: the one length that needs no cut at the tail, so that the
// packet still has the sum that its device made.
func (n *packetNode) answersKeepTail(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP))
	in := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", payload: make([]byte, answerCut)}
	n.wantAnswer(t, inEth0, in, n.send(t, inEth0, in), objects.TCVerdictREJECTED_RST)
}

// answerCut is ANSWER_CUT of bpf/lib/answer/answer.h.
const answerCut = 256

// answersUnfinished: a pod's packet comes with the sum of its pseudo header. It
// is quoted as it is, and the answer's own sums are complete.
// BPF_PROG_RUN has no CHECKSUM_PARTIAL: what the kernel makes of that is seen
// with real sockets (TestPathMTU of test/e2e).
func (n *packetNode) answersUnfinished(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)), service(p, protoTCP))
	l4 := 34
	if p.family == model.IPv6 {
		l4 = 54
	}
	for _, tt := range []struct {
		proto   uint8
		payload int
		verdict objects.TCVerdict
	}{{protoUDP, bigEnough, objects.TCVerdictANSWERED_TOO_BIG}, {protoTCP, 5, objects.TCVerdictREJECTED_RST}} {
		in := frame{proto: tt.proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", df: true, payload: make([]byte, tt.payload)}
		b, off := in.bytes(n, "eth0"), l4+6
		if tt.proto == protoTCP {
			off = l4 + 16
		}
		binary.BigEndian.PutUint16(b[off:], pseudoSum(in.src.Addr(), in.dst.Addr(), tt.proto, len(b)-l4))
		r := n.sendRaw(t, inEth0, b)
		n.wantAnswer(t, inEth0, in, r, tt.verdict)
		if tt.proto == protoUDP && !bytes.Equal(r.v.quoted, b[14:l4+8]) {
			t.Errorf("answer quotes %x, want %x", r.v.quoted, b[14:l4+8])
		}
	}
}

// answersTooBigFragment: the first one names the ports, so it is answered, and
// its fragment header is quoted; the others are not answered (RFC 1122).
func (n *packetNode) answersTooBigFragment(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	in := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 4000), id: 7}
	small := in.fragments(n, "eth0", 512)[0]
	for _, known := range []bool{false, true} {
		frags := in.fragments(n, "eth0", 1448, 1448)
		r := n.sendRaw(t, inEth0, frags[0])
		n.wantAnswer(t, inEth0, in, r, objects.TCVerdictANSWERED_TOO_BIG)
		wantHeader(t, r.v, errorKind{"TooBig", 3, 2, 4, 0, mtuTun0}, p)
		if !bytes.Equal(r.v.quoted, frags[0][14:14+40+8+8]) {
			t.Errorf("answer quotes %x", r.v.quoted)
		}
		if known {
			n.sendRaw(t, inEth0, frags[1]).want(t, actDrop, objects.TCVerdictDROP_REJECTED_SILENT)
			continue
		}
		n.sendRaw(t, inEth0, frags[1]).want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
		n.sendRaw(t, inEth0, small).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	}
}

func (n *packetNode) answersUnreachable(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP))
	for size := range 20 {
		in := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, size)}
		r := n.send(t, inEth0, in)
		n.wantAnswer(t, inEth0, in, r, objects.TCVerdictREJECTED_ICMP)
		wantHeader(t, r.v, errorKinds[0], p)
		quotesLike(t, r.v.quoted, in.bytes(n, "eth0"))
		if len(r.v.quoted) < 28 {
			t.Errorf("answer quotes %d bytes", len(r.v.quoted))
		}
	}
	// The first fragment may be answered, the others not.
	in := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 100)}
	frags := in.fragments(n, "eth0", 64)
	r := n.sendRaw(t, inEth0, frags[0])
	n.wantAnswer(t, inEth0, in, r, objects.TCVerdictREJECTED_ICMP)
	if len(r.v.quoted) < 28 || !bytes.Equal(r.v.quoted, frags[0][14:14+len(r.v.quoted)]) {
		t.Errorf("answer quotes %x", r.v.quoted)
	}
	n.sendRaw(t, inEth0, frags[1]).want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
}

// answersNothing: what must not be answered, or cannot.
func (n *packetNode) answersNothing(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP), service(p, protoUDP))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	for _, flags := range []string{"R", "R.", "SR"} {
		n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: front, flags: flags}).want(t, actDrop, objects.TCVerdictDROP_REJECTED_SILENT)
	}
	for _, proto := range transports {
		f := frame{proto: proto, src: client, dst: front, flags: "S", options: []byte{7, 7, 4, 0, 0, 0, 0}}
		if p.family == model.IPv6 {
			// Longer than what is quoted.
			f.ext = []extension{{extDestOpts, append([]byte{1, 68}, make([]byte, 68)...)}}
		}
		n.send(t, inEth0, f).want(t, actDrop, objects.TCVerdictDROP_REJECTED_SILENT)
	}
	for _, k := range errorKinds {
		sent := frame{proto: protoUDP, src: front, dst: client}.bytes(n, "eth0")
		n.send(t, inEth0, k.about(p, p.router, sent[14:], 0)).want(t, actNext, objects.TCVerdictPASS_OTHER)
	}
}

// martianSources: an answer would go to a group or to the node itself, and an
// endpoint would be given a packet that any stack throws away (RFC 1812, 5.3.7).
func (n *packetNode) martianSources(t *testing.T, p *plan, proto uint8) {
	sources := []string{"0.0.0.0", "0.1.2.3", "127.0.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"}
	if p.family == model.IPv6 {
		sources = []string{"::", "::1", "ff02::1", "ff0e::1:2"}
	}
	for _, sp := range []struct{ endpoints int }{{0}, {1}} {
		s := service(p, proto)
		if sp.endpoints > 0 {
			s = service(p, proto, endpoint(p.pod1, 8080, here))
		}
		n.serve(t, s)
		for _, src := range sources {
			f := frame{proto: proto, src: ap(addr(src), 40000), dst: ap(p.clusterIP, 80), flags: first(proto)}
			n.send(t, inEth0, f).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
		}
	}
}

// bigEnough is a payload that fits eth0 and not tun0.
const bigEnough = mtuTun0

func (n *packetNode) answersTooBig(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	k := errorKind{"TooBig", 3, 2, 4, 0, mtuTun0}
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	in := frame{proto: proto, src: client, dst: front, flags: first(proto), df: true, payload: make([]byte, bigEnough)}
	r := n.send(t, inEth0, in)
	r.want(t, actRedirect, objects.TCVerdictANSWERED_TOO_BIG)
	n.wantAnswer(t, inEth0, in, r, objects.TCVerdictANSWERED_TOO_BIG)
	wantHeader(t, r.v, k, p)
	quotesLike(t, r.v.quoted, in.bytes(n, "eth0"))

	// Such a packet must not leave a flow of the wrong source behind.
	r = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto)})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.src.Addr() != p.tun0 {
		t.Errorf("source is %s, want tun0's %s", r.v.src.Addr(), p.tun0)
	}
	r = n.send(t, inEth0, in)
	n.wantAnswer(t, inEth0, in, r, objects.TCVerdictANSWERED_TOO_BIG)
}

// bigWithoutDF: a tunnel fragments what it wraps.
func (n *packetNode) bigWithoutDF(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	in := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, mtuTun0)}
	r := n.send(t, inEth0, in)
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, ap(p.tun0, r.v.src.Port()), ap(p.far, 8080))
	sameBut(t, in.bytes(n, "eth0"), r.out, 1)
	if w := n.lastNextHop(t); w.kind != nextHopNeigh || w.ifindex != n.ifindex["tun0"] || w.gateway != p.farGW {
		t.Errorf("way %+v, want out by tun0 over %s", w, p.farGW)
	}
}

// bigGSO: the segments of a large packet are small.
func (n *packetNode) bigGSO(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.open(t, p, 40000)
	b := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: ".", df: true,
		payload: make([]byte, 2800)}.bytes(n, "eth0")
	code, out, err := n.run(inEth0, b, 1300, 0)
	must.Do(t, err)
	if code != actRedirect {
		t.Errorf("code %d, want a redirect", code)
	}
	must.Do(t, checkSums(out))
	// BIG TCP: a length of 0 says that it does not fit into 16 bits.
	if p.family == model.IPv4 {
		b[16], b[17] = 0, 0
	} else {
		b[18], b[19] = 0, 0
	}
	if code, _, err = n.run(inEth0, b, 1300, 0); err != nil || code != actRedirect {
		t.Errorf("a length of 0 in a GSO packet: code %d, %v, want a redirect", code, err)
	}
	if code, _, err = n.run(inEth0, b, 0, 0); err != nil || code != actNext {
		t.Errorf("a length of 0 in an ordinary packet: code %d, %v, want it left alone", code, err)
	}
}

func (n *packetNode) answersTTL(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	k := errorKind{"TimeExceeded", 11, 3, 0, 0, 0}
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	for _, known := range []bool{false, true} {
		in := frame{proto: proto, src: client, dst: front, flags: first(proto), ttl: 1, payload: []byte("abc")}
		r := n.send(t, inEth0, in)
		n.wantAnswer(t, inEth0, in, r, objects.TCVerdictANSWERED_TTL)
		wantHeader(t, r.v, k, p)
		quotesLike(t, r.v.quoted, in.bytes(n, "eth0"))

		in.ttl = 2
		r = n.send(t, inEth0, in)
		if !known {
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
		}
		r.wantPath(t, ap(p.tun0, r.v.src.Port()), ap(p.far, 8080))
		if r.v.ttl != 1 {
			t.Errorf("TTL 2 became %d", r.v.ttl)
		}
	}
	// Into a pod of this node it is no hop.
	n.forget(t)
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto), ttl: 1})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	answer := back(r.v, "S.", nil)
	answer.ttl = 1
	r = n.send(t, inPod1, answer)
	n.wantAnswer(t, inPod1, answer, r, objects.TCVerdictANSWERED_TTL)
	wantHeader(t, r.v, k, p)
	quotesLike(t, r.v.quoted, answer.bytes(n, "pod1"))
}
