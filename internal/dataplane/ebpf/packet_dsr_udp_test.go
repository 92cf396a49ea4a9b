package ebpf

import (
	"bytes"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
	"testing"
)

// serveUDP makes a Service for UDP with DSR on all nodes, and forgets all flows.
func (d *dsrNodes) serveUDP(t testing.TB, p *plan) {
	for _, n := range []*packetNode{d.first, d.second} {
		n.forget(t)
		n.serve(t, dsrServiceOf(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	}
	d.home.forget(t)
	d.home.serve(t, dsrServiceOf(p, protoUDP, endpoint(p.far, 8080, here)))
}

// udpFlow is a client's flow to a Service for UDP.
type udpFlow struct {
	d *dsrNodes
	p *plan
	f frame
}

func (d *dsrNodes) udp(p *plan, port uint16) *udpFlow {
	return &udpFlow{d, p, frame{proto: protoUDP, src: ap(p.client, port), dst: ap(p.externalIP, 80), payload: []byte("question")}}
}

// ask sends a datagram by a node, and checks that the endpoint gets it as it is. It reports whether
// that node sent it with the option.
func (u *udpFlow) ask(t *testing.T, by *packetNode) bool {
	t.Helper()
	sent := by.send(t, inEth0, u.f)
	sent.wantPath(t, u.f.src, ap(u.p.far, 8080))
	got := u.d.pass(t, u.d.home, sent)
	got.wantPath(t, u.f.src, ap(u.p.far, 8080))
	if got.code != actRedirect || !bytes.Equal(got.v.payload, u.f.payload) || len(got.out) != len(u.f.bytes(by, "eth0")) {
		t.Fatalf("code %d, the endpoint gets %x", got.code, got.out)
	}
	return announced(sent)
}

// answer sends the endpoint's datagram, and checks that the client gets it from the Service.
func (u *udpFlow) answer(t *testing.T) {
	t.Helper()
	r := u.d.home.send(t, inPod1, frame{proto: protoUDP, src: ap(u.p.far, 8080), dst: u.f.src, payload: []byte("answer")})
	r.wantPath(t, u.f.dst, u.f.src)
	if r.code != actRedirect {
		t.Fatalf("the answer ended with code %d", r.code)
	}
}

// grow makes the flow older at a node. seen: its last packet too.
func (u *udpFlow) grow(t *testing.T, n *packetNode, seconds uint32, seen bool) {
	t.Helper()
	key := tupleOf(protoUDP, u.f.src, u.f.dst)
	f := n.flowAt(t, key)
	f.Opened -= seconds
	if seen {
		f.Seen -= seconds
		f.NextHopSeen -= seconds
	}
	must.Do(t, n.m(objects.TCMapFlows).Update(key, f, 0))
}

// TestPacketDSRUDP: the datagrams of the first seconds say which Service they are for, and later one a
// second. So a lost one costs no more than that.
func TestPacketDSRUDP(t *testing.T) {
	d := newDSRNodes(t)
	for _, name := range []string{"IPv4", "IPv6"} {
		p := plans[name]
		t.Run(name, func(t *testing.T) {
			d.serveUDP(t, p)
			u := d.udp(p, 40000)
			lost := d.first.send(t, inEth0, u.f)
			lost.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT, objects.TCVerdictDSR_ANNOUNCED)
			for range 3 {
				if !u.ask(t, d.first) {
					t.Error("a datagram of the first seconds has no option")
				}
				u.answer(t)
			}
			u.grow(t, d.first, 10, false)
			u.ask(t, d.first) // the next hop is looked up
			if first, second := u.ask(t, d.first), u.ask(t, d.first); first && second {
				t.Error("a later datagram of the same second has an option")
			}
			u.answer(t)
			u.grow(t, d.first, 1, true)
			if !u.ask(t, d.first) {
				t.Error("the first datagram of a second has no option")
			}
			u.answer(t)

			t.Run("OtherNode", func(t *testing.T) {
				if !u.ask(t, d.second) {
					t.Error("a node that does not know the flow sends no option")
				}
				u.answer(t)
			})
			t.Run("FlowLostAtHome", func(t *testing.T) {
				d.home.forget(t)
				u.grow(t, d.first, 1, true)
				u.ask(t, d.first)
				u.answer(t)
			})
			t.Run("NoChecksum", func(t *testing.T) {
				if p.eth0.Is6() {
					return // RFC 8200, 8.1
				}
				u := d.udp(p, 40001)
				u.f.noSum = true
				u.ask(t, d.first)
				u.answer(t)
			})
			t.Run("Long", func(t *testing.T) {
				u := d.udp(p, 40002)
				u.f.payload = make([]byte, 1250)
				if r := d.first.send(t, inEth0, u.f); announced(r) || r.v.src.Addr() != p.tun0 {
					t.Errorf("a datagram without room comes from %s: %s", r.v.src, verdictList(r.verdicts))
				}
			})
			t.Run("LongLater", func(t *testing.T) {
				u := d.udp(p, 40003)
				u.ask(t, d.first)
				u.answer(t)
				u.f.payload = make([]byte, mtuTun0-room(p)/2-len(u.f.bytes(d.first, "eth0"))+14+len(u.f.payload))
				if u.ask(t, d.first) {
					t.Error("a datagram without room has an option")
				}
				u.answer(t)
			})
			t.Run("EndpointGone", func(t *testing.T) {
				d.first.serve(t, dsrServiceOf(p, protoUDP, endpoint(p.far2, 8080, elsewhere)))
				r := d.first.send(t, inEth0, u.f)
				r.wantPath(t, u.f.src, ap(p.far2, 8080))
				if !announced(r) {
					t.Errorf("the new endpoint's node is not told: %s", verdictList(r.verdicts))
				}
			})
			t.Run("OtherEndpointOfTheNode", func(t *testing.T) {
				d.serveUDP(t, p)
				u := d.udp(p, 40005)
				u.ask(t, d.first)
				u.answer(t)
				d.home.serve(t, dsrServiceOf(p, protoUDP, endpoint(p.far, 8080, here), endpoint(p.far, 9090, here)))
				d.first.serve(t, dsrServiceOf(p, protoUDP, endpoint(p.far, 9090, elsewhere)))
				for range 2 {
					got := d.pass(t, d.home, d.first.send(t, inEth0, u.f))
					got.wantPath(t, u.f.src, ap(p.far, 9090))
				}
				r := d.home.send(t, inPod1, frame{proto: protoUDP, src: ap(p.far, 9090), dst: u.f.src, payload: []byte("answer")})
				r.wantPath(t, u.f.dst, u.f.src)
			})
			t.Run("OtherProtocol", func(t *testing.T) {
				d.serveUDP(t, p)
				sent := d.first.send(t, inEth0, d.udp(p, 40004).f)
				forged := toDevice(d.home, sent.out)
				at := 14 + 9 // the protocol
				if p.eth0.Is6() {
					at = 14 + 40 // next header of the option's header
				}
				forged[at] = protoTCP
				if r := d.home.sendRaw(t, inTun0, forged); r.v != nil && r.code == actRedirect {
					t.Errorf("the option of a datagram counts for TCP: %s", verdictList(r.verdicts))
				}
			})
		})
	}
}
