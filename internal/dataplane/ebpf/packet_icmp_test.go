package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// An errorKind is an ICMP error in both families.
type errorKind struct {
	name       string
	typ4, typ6 uint8
	code4      uint8
	code6      uint8
	word       uint32
}

var errorKinds = []errorKind{
	{"PortUnreachable", 3, 1, 3, 4, 0},
	{"FragmentationNeeded", 3, 2, 4, 0, 1380},
	{"TimeExceeded", 11, 3, 0, 0, 0},
	{"ParameterProblem", 12, 4, 0, 1, 6 << 24},
}

func (k errorKind) about(p *plan, from netip.Addr, ip []byte, limit int) frame {
	if p.family == model.IPv4 {
		return icmpError(from, k.typ4, k.code4, k.word, ip, limit)
	}
	return icmpError(from, k.typ6, k.code6, k.word, ip, limit)
}

// conversation is one request and its answer, as each side sent and saw them.
type conversation struct {
	client, front, endpoint, seen netip.AddrPort // seen: the client as the endpoint knows it
	request, answer               []byte         // frames as sent
	requestSeen, answerSeen       []byte         // as received
	fromEndpoint                  at             // hook where the endpoint's packets arrive
}

func (n *packetNode) converse(t *testing.T, p *plan, proto uint8, w where, port uint16) conversation {
	t.Helper()
	c := conversation{client: ap(p.client, port), front: ap(p.clusterIP, 80), endpoint: ap(p.pod1, 8080), fromEndpoint: inPod1}
	if w == elsewhere {
		c.endpoint, c.fromEndpoint = ap(p.far, 8080), inTun0
	}
	n.serve(t, service(p, proto, endpoint(c.endpoint.Addr(), 8080, w)))
	c.request = frame{proto: proto, src: c.client, dst: c.front, flags: first(proto), seq: 100, payload: []byte("request")}.bytes(n, "eth0")
	r := n.sendRaw(t, inEth0, c.request)
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	c.requestSeen, c.seen = r.out, r.v.src
	c.answer = back(r.v, "S.", []byte("the answer")).bytes(n, c.fromEndpoint.iface)
	r = n.sendRaw(t, c.fromEndpoint, c.answer)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	c.answerSeen = r.out
	return c
}

// quotesLike fails unless the quote is the packet that was sent, as far as it
// goes, but for hops that have been spent on the way.
func quotesLike(t *testing.T, quoted, sent []byte) {
	t.Helper()
	want := append([]byte{}, sent[14:]...)
	if want[0]>>4 == 4 {
		want[8] = quoted[8]
		want[10], want[11] = 0, 0
		binary.BigEndian.PutUint16(want[10:], ^sum16(want[:20], 0))
	} else {
		want[7] = quoted[7]
	}
	if len(quoted) > len(want) || !bytes.Equal(quoted, want[:len(quoted)]) {
		t.Errorf("the error quotes\n     %x\nsent %x", quoted, want)
	}
}

func TestPacketICMPErrors(t *testing.T) {
	n := newPacketNode(t)
	for name, w := range map[string]where{"EndpointHere": here, "EndpointElsewhere": elsewhere} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, n, func(t *testing.T, p *plan, proto uint8) { n.relayedErrors(t, p, proto, w) })
		})
	}
	t.Run("ThroughTheStack", func(t *testing.T) { eachTransport(t, n, n.errorsBehindStack) })
	t.Run("QuoteTooShort", func(t *testing.T) { eachTransport(t, n, n.shortQuotes) })
	t.Run("OfOthers", func(t *testing.T) { eachFamily(t, n, n.errorsOfOthers) })
	t.Run("QuotedWithoutSum", func(t *testing.T) { n.forget(t); n.quotedWithoutSum(t, plans["IPv4"]) })
}

// relayedErrors: both ways, from the peer itself and from a router, with quotes
// of several lengths.
func (n *packetNode) relayedErrors(t *testing.T, p *plan, proto uint8, w where) {
	c := n.converse(t, p, proto, w, 40000)
	minimum := 28
	if p.family == model.IPv6 {
		minimum = 48
	}
	for _, k := range errorKinds {
		for _, limit := range []int{minimum, minimum + 3, minimum + 7, minimum + 10, 0} {
			t.Run(fmt.Sprintf("%s/%d", k.name, limit), func(t *testing.T) {
				for _, from := range []netip.Addr{c.endpoint.Addr(), p.router} {
					if from == p.router && w == here {
						continue // no router is behind a pod's device
					}
					r := n.send(t, c.fromEndpoint, k.about(p, from, c.requestSeen[14:], limit))
					source := from
					if from != p.router {
						source = c.front.Addr() // the client knows no other
					}
					n.wantError(t, r, k, p, source, c.client.Addr(), c.request)
				}
				for _, from := range []netip.Addr{c.client.Addr(), p.router} {
					r := n.send(t, inEth0, k.about(p, from, c.answerSeen[14:], limit))
					source := from
					if from != p.router {
						source = c.seen.Addr()
					}
					n.wantError(t, r, k, p, source, c.endpoint.Addr(), c.answer)
				}
			})
		}
	}
}

func (n *packetNode) wantError(t *testing.T, r result, k errorKind, p *plan, src, dst netip.Addr, sent []byte) {
	t.Helper()
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	r.wantPath(t, ap(src, 0), ap(dst, 0))
	wantHeader(t, r.v, k, p)
	quotesLike(t, r.v.quoted, sent)
	w := n.lastNextHop(t)
	if w.kind != nextHopPod && w.kind != nextHopNeigh {
		t.Errorf("error was sent the way %+v", w)
	}
}

func wantHeader(t *testing.T, v *view, k errorKind, p *plan) {
	t.Helper()
	typ, code := k.typ4, k.code4
	if p.family == model.IPv6 {
		typ, code = k.typ6, k.code6
	}
	if v.icmpType != typ || v.icmpCode != code || v.icmpWord != k.word {
		t.Errorf("ICMP %d/%d %#x, want %d/%d %#x", v.icmpType, v.icmpCode, v.icmpWord, typ, code, k.word)
	}
}

// errorsBehindStack: an error of a policed pod is translated at egress.
func (n *packetNode) errorsBehindStack(t *testing.T, p *plan, proto uint8) {
	e := endpoint(p.pod1, 8080, here)
	e.MustTraverseNetfilter = true
	n.serve(t, service(p, proto, e))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	request := frame{proto: proto, src: client, dst: front, flags: first(proto)}.bytes(n, "eth0")
	seen := n.sendRaw(t, inEth0, request)
	seen.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
	k := errorKinds[0]
	f := k.about(p, e.Addr.Addr(), seen.out[14:], 0)
	n.send(t, inPod1, f).want(t, actNext, objects.TCVerdictPASS_OTHER)
	r := n.send(t, outEth0, f)
	r.want(t, actNext, objects.TCVerdictTRANSLATED_ICMP)
	r.wantPath(t, ap(front.Addr(), 0), ap(client.Addr(), 0))
	quotesLike(t, r.v.quoted, request)

	answer := back(seen.v, "S.", []byte("x")).bytes(n, "eth0")
	sent := n.sendRaw(t, outEth0, answer)
	r = n.send(t, inEth0, k.about(p, p.router, sent.out[14:], 0))
	r.want(t, actNext, objects.TCVerdictTRANSLATED_ICMP)
	r.wantPath(t, ap(p.router, 0), ap(e.Addr.Addr(), 0))
	quotesLike(t, r.v.quoted, answer)
}

// shortQuotes: without both ports, no flow can be found.
func (n *packetNode) shortQuotes(t *testing.T, p *plan, proto uint8) {
	c := n.converse(t, p, proto, elsewhere, 40000)
	ipLen := 20
	if p.family == model.IPv6 {
		ipLen = 40
	}
	for limit := 1; limit < ipLen+8; limit++ {
		for _, pad := range []int{0, 40} {
			f := errorKinds[0].about(p, p.router, c.requestSeen[14:], limit)
			f.pad = pad
			r := n.send(t, inTun0, f)
			r.want(t, actNext, objects.TCVerdictPASS_OTHER)
			if !bytes.Equal(r.out, f.bytes(n, "tun0")) {
				t.Errorf("error with %d quoted bytes was changed", limit)
			}
		}
	}
}

// errorsOfOthers: everything that only looks like one of ours.
func (n *packetNode) errorsOfOthers(t *testing.T, p *plan) {
	c := n.converse(t, p, protoUDP, elsewhere, 40000)
	k := errorKinds[0]
	echoType, proto := uint8(8), uint8(protoICMP)
	if p.family == model.IPv6 {
		echoType, proto = 128, protoICMPv6
	}
	echo := func(src, dst netip.Addr) frame {
		return frame{proto: proto, src: ap(src, 0), dst: ap(dst, 0), icmp: []byte{echoType, 0, 0, 0, 1, 2, 3, 4, 5, 6}}
	}
	stranger := frame{proto: protoUDP, src: ap(p.tun0, 5), dst: ap(p.far, 9)}.bytes(n, "tun0")
	later := frame{proto: protoUDP, src: c.seen, dst: c.endpoint, payload: make([]byte, 100)}.fragments(n, "tun0", 64)[1]
	tests := map[string]frame{
		"echo to a Service":       echo(p.client, p.clusterIP),
		"echo to the node":        echo(p.client, p.eth0),
		"about another flow":      k.about(p, p.far, stranger[14:], 0),
		"about a later fragment":  k.about(p, p.far, later[14:], 0),
		"about an echo":           k.about(p, p.far, echo(p.tun0, p.far).bytes(n, "tun0")[14:], 0),
		"about a packet not sent": k.about(p, p.far, c.answer[14:], 0),
	}
	for name, f := range tests {
		r := n.send(t, inTun0, f)
		if r.code != actNext || r.verdicts[objects.TCVerdictPASS_OTHER] != 1 || !bytes.Equal(r.out, f.bytes(n, "tun0")) {
			t.Errorf("%s: code %d, %s", name, r.code, verdictList(r.verdicts))
		}
	}
	n.serve(t, []*intent.ServicePort{}...)
	n.forget(t)
	n.send(t, inTun0, k.about(p, p.far, c.requestSeen[14:], 0)).want(t, actNext, objects.TCVerdictPASS_OTHER)
}

// quotedWithoutSum: a datagram quoted that had no checksum has none still.
func (n *packetNode) quotedWithoutSum(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	request := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), noSum: true}.bytes(n, "eth0")
	seen := n.sendRaw(t, inEth0, request)
	r := n.send(t, inTun0, errorKinds[0].about(p, p.far, seen.out[14:], 0))
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	quotesLike(t, r.v.quoted, request)
}
