package ebpf

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// Packets that claim to be of an honest client's connection, or of any. Their sender may
// know all addresses and ports, but not the sequence numbers.
func TestPacketForged(t *testing.T) {
	n := newPacketNode(t)
	n.checksComplete = false // see TestPacketAnswers
	for _, c := range []struct {
		name string
		test func(t *testing.T, c *conn)
	}{
		{"RST", forgedRST},
		{"RSTThenRest", forgedRSTThenRest},
		{"RSTInWindow", forgedRSTInWindow},
		{"RSTIsUndone", exactRSTIsUndone},
		{"FIN", forgedFIN},
		{"FINInWindow", forgedFINInWindow},
		{"SYN", forgedSYN},
		{"SYNACK", forgedSYNACK},
		{"Data", forgedData},
		{"ACKMovesNothing", forgedACK},
		{"KeepsNothingAlive", forgedKeepsNothingAlive},
	} {
		t.Run(c.name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) {
				for _, where := range []string{"Here", "Elsewhere"} {
					t.Run(where, func(t *testing.T) {
						n.forget(t)
						c.test(t, n.established(t, p, where))
					})
				}
			})
		})
	}
	t.Run("NoFlow", func(t *testing.T) { eachFamily(t, n, n.strayPackets) })
	t.Run("HalfOpen", func(t *testing.T) { eachFamily(t, n, n.halfOpen) })
	t.Run("SYNFirst", func(t *testing.T) { eachFamily(t, n, n.synFirst) })
	t.Run("SYNACKOfNoSYN", func(t *testing.T) { eachFamily(t, n, n.forgedAccept) })
	t.Run("WindowScale", func(t *testing.T) { eachFamily(t, n, n.windowScale) })
	t.Run("OtherISN", func(t *testing.T) { eachFamily(t, n, n.otherISN) })
	t.Run("OldConnectionOfPort", func(t *testing.T) { eachFamily(t, n, n.oldConnectionOfPort) })
	t.Run("EndpointGone", func(t *testing.T) { eachFamily(t, n, n.synToGoneEndpoint) })
	t.Run("OwnAddress", func(t *testing.T) { eachTransport(t, n, n.ownAddress) })
	t.Run("OtherDevice", func(t *testing.T) { eachTransport(t, n, n.otherDevice) })
	t.Run("OuterDestination", func(t *testing.T) { eachFamily(t, n, n.outerDestination) })
	t.Run("ErrorSource", func(t *testing.T) { eachFamily(t, n, n.errorSource) })
	t.Run("ICMPRate", func(t *testing.T) { eachFamily(t, n, n.icmpRate) })
	t.Run("GSOTooBig", func(t *testing.T) { eachFamily(t, n, n.gsoTooBig) })
	t.Run("RSTAfterForgedData", func(t *testing.T) { eachFamily(t, n, n.rstAfterForgedData) })
	t.Run("RSTWithDataInFlight", func(t *testing.T) { eachFamily(t, n, n.rstWithDataInFlight) })
	t.Run("MovedWindow", func(t *testing.T) { eachFamily(t, n, n.movedWindow) })
	t.Run("SourceShare", func(t *testing.T) { eachFamily(t, n, n.sourceShare) })
	t.Run("PortShare", func(t *testing.T) { eachFamily(t, n, n.portShare) })
	t.Run("WrongNode", func(t *testing.T) { eachTransport(t, n, n.wrongNode) })
	t.Run("UnknownPod", func(t *testing.T) { eachTransport(t, n, n.unknownPod) })
	t.Run("OwnConnection", func(t *testing.T) { eachTransport(t, n, n.ownConnections) })
	t.Run("AddressOfAnotherPod", func(t *testing.T) { eachFamily(t, n, n.addressOfAnotherPod) })
	t.Run("PolicyComes", func(t *testing.T) { eachTransport(t, n, n.policyComes) })
	t.Run("IPsec", func(t *testing.T) { eachTransport(t, n, n.ipsec) })
	t.Run("AffinityChurn", func(t *testing.T) { eachFamily(t, n, n.affinityChurn) })
}

// established makes an honest connection to an endpoint on this node or on another.
func (n *packetNode) established(t *testing.T, p *plan, where string) *conn {
	t.Helper()
	if where == "Here" {
		n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
		return n.openHere(t, p, 40000)
	}
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	return n.open(t, p, 40000)
}

// guesses are sequence numbers that a blind attacker may try; off by more than any
// window that the connection has had.
func guesses(right uint32) []uint32 {
	return []uint32{right + 1<<16, right - 1<<16, right + 1<<20, right - 1<<20, right + 1<<31, right + 3<<30}
}

func forgedRST(t *testing.T, c *conn) {
	for _, seq := range guesses(c.sent) {
		c.forge(t, "R", seq, 0)
		c.forge(t, "R.", seq, c.answered)
	}
	for _, seq := range guesses(c.answered) {
		c.forge(t, "<R", seq, 0)
		c.forge(t, "<R.", seq, c.sent)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

func forgedRSTThenRest(t *testing.T, c *conn) {
	c.forge(t, "R", c.sent+1<<20, 0)
	c.n.ageFlows(t, 13)
	c.lives(t)
	c.forge(t, "<R", c.answered+1<<20, 0)
	c.n.ageFlows(t, objects.Seconds(c.n.cfg.Timeouts.TCPEstablished)-10)
	c.lives(t)
}

// forgedRSTInWindow: in the window is not enough (RFC 5961, 3.2).
func forgedRSTInWindow(t *testing.T, c *conn) {
	for _, off := range []uint32{1, 10, 500, 0xffffffff, 0xffffff00} {
		c.forge(t, "R", c.sent+off, 0)
		c.forge(t, "<R", c.answered+off, 0)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// exactRSTIsUndone: an RST that fits may still be forged; what goes on lives on. The other end
// accepts an RST with the number that it expects (RFC 5961, 3.2), so only new data of its sender
// undo it: other packets may have been under way. A number after bytes that are not acknowledged
// yet may be another than that end expects: it challenges such an RST.
func exactRSTIsUndone(t *testing.T, c *conn) {
	c.talk(t, "R", "<.", ".")
	c.say(t, "<P.", 'd')
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	c.say(t, "P.", 'd')
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.talk(t, "<.", ".", "<R.", ".", "<.")
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	c.say(t, "<P.", 'd')
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.talk(t, ".")
	c.say(t, "P.", 'd')
	c.say(t, "R")
	c.wantState(t, objects.TCFlowStateFLOW_LAST_ACK)
	c.say(t, "<.")
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.n.ageFlows(t, 100)
	c.lives(t)
}

// wantNoPort: a new client finds no port, though it may repeat its SYN.
func (n *packetNode) wantNoPort(t *testing.T, p *plan, from uint16) {
	t.Helper()
	n.newConn(ap(other(p.client, 7), from), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0).
		syn(t).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
}

// rstAfterForgedData: a forged byte in the window moves what seems to be the client's last
// one. An RST there gives the connection's port to no other client, also after a rest.
func (n *packetNode) rstAfterForgedData(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	victim := n.open(t, p, 40000)
	n.open(t, p, 40001)
	victim.lives(t)
	victim.forge(t, "P.", victim.sent+500, 0, 'x')
	victim.forge(t, "R", victim.sent+501, 0)
	n.wantNoPort(t, p, 666)
	n.ageFlows(t, 10)
	n.wantNoPort(t, p, 667)
	victim.lives(t)
}

// rstWithDataInFlight: what the endpoint has sent before it got the client's RST reaches
// no other client.
func (n *packetNode) rstWithDataInFlight(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	victim := n.open(t, p, 40000)
	n.open(t, p, 40001)
	victim.say(t, "R")
	n.wantNoPort(t, p, 666)
	victim.say(t, "<P.", 'a').wantPath(t, victim.front, victim.client)
}

// movedWindow: forged segments that skip bytes do not move the window away from an honest
// connection, and so no RST ends it.
func (n *packetNode) movedWindow(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	victim := n.open(t, p, 40000)
	victim.lives(t)
	sweep := func(flags string, from uint32) uint32 {
		for range 300 {
			victim.forge(t, flags, from, 0, 'x')
			from += 900
		}
		return from - 900 + 1
	}
	end := sweep("P.", victim.sent-50*900+123)
	sweep("<P.", victim.answered-50*900+123)
	victim.forge(t, "R", end, 0)
	for range 20 {
		victim.lives(t)
		n.ageFlows(t, 3)
	}
	victim.lives(t)
	victim.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
}

func forgedFIN(t *testing.T, c *conn) {
	for i, seq := range guesses(c.sent) {
		c.forge(t, "F.", seq, c.answered)
		c.forge(t, "<F.", guesses(c.answered)[i], c.sent)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.forge(t, "S", 77, 0)
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// forgedFINInWindow: both FINs may fit, but neither end acknowledges one that it has
// not got, and neither is silent after one that it has not sent.
func forgedFINInWindow(t *testing.T, c *conn) {
	c.forge(t, "F.", c.sent+100, c.answered)
	c.forge(t, "<F.", c.answered+100, c.sent)
	c.wantState(t, objects.TCFlowStateFLOW_LAST_ACK)
	c.forge(t, "S", c.sent+5000, 0).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	c.say(t, "P.", make([]byte, 200)...).wantPath(t, c.seen, c.server)
	c.say(t, "<P.", make([]byte, 200)...).wantPath(t, c.front, c.client)
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// forgedSYN: it goes to the endpoint, which challenges it; the connection stays.
func forgedSYN(t *testing.T, c *conn) {
	for _, seq := range append(guesses(c.sent), c.sent, c.sent+1) {
		c.forge(t, "S", seq, 0).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

func forgedSYNACK(t *testing.T, c *conn) {
	for _, seq := range guesses(c.answered) {
		c.forge(t, "<S.", seq, c.sent)
		c.forge(t, "<S.", seq, clientISN+1)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
	c.talk(t, "F.", "<F.", ".")
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
}

// forgedData does not move the window: the honest FINs still count.
func forgedData(t *testing.T, c *conn) {
	for i, seq := range guesses(c.sent) {
		c.forge(t, "P.", seq, guesses(c.answered)[i], 'x')
		c.forge(t, "<P.", guesses(c.answered)[i], seq, 'x')
	}
	c.lives(t)
	c.talk(t, "F.", "<F.", ".")
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
}

// forgedACK with the right sequence number and a wrong acknowledgment, then an RST
// there in the other direction.
func forgedACK(t *testing.T, c *conn) {
	c.forge(t, ".", c.sent, c.answered+1<<20)
	c.forge(t, "<R", c.answered+1<<20, 0)
	c.forge(t, "<.", c.answered, c.sent+1<<20)
	c.forge(t, "R", c.sent+1<<20, 0)
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// forgedKeepsNothingAlive: of what has ended no packet makes the memory last.
func forgedKeepsNothingAlive(t *testing.T, c *conn) {
	c.talk(t, "F.", "<F.", ".")
	for range 4 {
		c.n.ageFlows(t, objects.Seconds(c.n.cfg.Timeouts.TCPClosed)/2)
		c.forge(t, ".", c.sent+1<<20, c.answered)
		c.forge(t, "<.", c.answered+1<<20, c.sent)
	}
	c.say(t, ".").want(t, actRedirect, objects.TCVerdictREJECTED_NO_FLOW)
}

// strayPackets: what is not a SYN makes no flow, and takes no port.
func (n *packetNode) strayPackets(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	for i, flags := range []string{"R", "R.", ".", "P.", "F.", "S.", "", "SR", "FS."} {
		f := frame{proto: protoTCP, src: ap(p.client, uint16(1000+i)), dst: ap(p.clusterIP, 80), flags: flags, seq: 5, ack: 6}
		r := n.send(t, inEth0, f)
		if slices.Contains([]string{"R", "R.", "SR"}, flags) {
			r.want(t, actDrop, objects.TCVerdictDROP_NO_FLOW)
		} else {
			r.want(t, actRedirect, objects.TCVerdictREJECTED_NO_FLOW)
			r.wantPath(t, f.dst, f.src)
		}
	}
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(k objects.TCTuple, f objects.TCFlow) {
		t.Errorf("an entry is left: %+v %+v", k, f)
	}))
}

// halfOpen: whatever a forger sends as client, it cannot acknowledge a SYN-ACK that it
// has not seen.
func (n *packetNode) halfOpen(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.syn(t)
	c.say(t, "<S.")
	for _, ack := range guesses(c.answered) {
		c.forge(t, ".", c.sent, ack)
		c.forge(t, "P.", c.sent, ack, 'x')
		c.forge(t, "F.", c.sent, ack)
	}
	c.wantState(t, objects.TCFlowStateFLOW_SYN_RECV)
	// It can end what it began, and that is all.
	c.forge(t, "R", c.sent, 0)
	c.forge(t, ".", c.sent, 12345)
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	n.forget(t)
	c.answered, c.sent = serverISN, clientISN
	c.syn(t)
	c.say(t, "<S.")
	// It lasts a minute, whatever comes.
	for range 3 {
		n.ageFlows(t, 25)
		c.forge(t, ".", c.sent, 12345)
	}
	c.say(t, ".").want(t, actRedirect, objects.TCVerdictREJECTED_NO_FLOW)
}

// synFirst: a forger has sent a SYN from the client's port before the client does. The
// endpoint takes one of the two, and the client gets its connection either way.
func (n *packetNode) synFirst(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	// a and b are a forger's SYNs, r its RST to the last one; c is the client's SYN.
	for _, order := range []string{"ac", "ca", "acb", "abcab", "acbr", "carbr"} {
		n.forget(t)
		c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		isn := map[rune]uint32{'a': 0x12345678, 'b': 0x56789012}
		last := uint32(0)
		for _, what := range order {
			switch what {
			case 'c':
				c.syn(t)
			case 'r':
				c.forge(t, "R", last+1, 0)
			default:
				last = isn[what]
				c.forge(t, "S", last, 0)
			}
		}
		c.talk(t, "<S.", ".")
		c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
		c.lives(t)
	}
}

// forgedAccept: a SYN-ACK that acknowledges no SYN of the client is no answer to it.
func (n *packetNode) forgedAccept(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.syn(t)
	forge := func() {
		for _, ack := range guesses(c.sent) {
			c.forge(t, "<S.", 0x11111111, ack)
		}
	}
	forge()
	c.say(t, "<S.")
	forge()
	for range 2 { // they do not agree, and then they do
		c.say(t, "P.", 'q').wantPath(t, c.seen, c.server)
		c.say(t, "<P.", 'a').wantPath(t, c.front, c.client)
	}
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// windowScale: windows are scaled if both ends offer it, by what the SYN said that the
// endpoint has taken. The window in test packets is 1,000.
func (n *packetNode) windowScale(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	for _, tt := range []struct {
		forged, client, server int // scales, plus one
		serverMay              uint32
	}{
		{0, 8, 8, 1000 << 7}, {0, 8, 0, 1000}, {0, 0, 8, 1000}, {0, 1, 1, 1000}, {15, 8, 8, 1000 << 7}, {1, 8, 8, 1000 << 7},
	} {
		n.forget(t)
		c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		scaled := func(flags string, scale int, seq uint32) {
			hook, f := c.frame(flags, nil)
			if f.scale = scale; seq != 0 {
				f.seq = seq
			} else {
				c.count(f, hook == c.out)
			}
			if r := n.send(t, hook, f); flags == "S" {
				c.seen = r.v.src
			}
		}
		if tt.forged > 0 {
			scaled("S", tt.forged, 0x12345678)
		}
		scaled("S", tt.client, 0)
		scaled("<S.", tt.server, 0)
		c.talk(t, ".", ".") // the first window that is scaled is that of the second
		n.ageFlows(t, 2)
		c.talk(t, ".")
		c.forge(t, "<F.", c.answered+tt.serverMay+1, c.sent)
		c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
		c.forge(t, "<F.", c.answered+tt.serverMay-1, c.sent)
		c.wantState(t, objects.TCFlowStateFLOW_CLOSING)
	}
}

// otherISN: the endpoint took the forger's SYN. It challenges the client's, whose RST
// clears that, and the client's next SYN is served.
func (n *packetNode) otherISN(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	const forged = 0x12345678
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.seen = c.forge(t, "S", forged, 0).v.src
	c.forge(t, "<S.", serverISN, forged+1)
	c.forge(t, "S", clientISN, 0)
	c.forge(t, "<.", serverISN+1, forged+1)
	c.forge(t, "R", forged+1, 0)
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	c.handshake(t)
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.lives(t)
}

// oldConnectionOfPort: the endpoint still has a connection, or a half-open one, from the
// source port of a new flow. The client's RST clears that, and its repeated SYN goes to the
// same port: a flood leaves half-open connections on all ports of an endpoint.
func (n *packetNode) oldConnectionOfPort(t *testing.T, p *plan) {
	const old = 0x12345678
	for _, answer := range []string{"<.", "<S."} {
		n.forget(t)
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		first := c.forge(t, "S", clientISN, 0)
		c.seen = first.v.src
		c.forge(t, answer, serverISN-1000, old)
		c.forge(t, "R", old, 0)
		again := c.syn(t)
		again.wantPath(t, first.v.src, c.server)
		if again.verdicts[objects.TCVerdictFLOW_CREATED] != 0 {
			t.Errorf("after %s, a repeated SYN made a new flow", answer)
		}
		c.say(t, "<S.")
		c.say(t, ".")
		c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
		c.lives(t)
	}
}

// synToGoneEndpoint: an endpoint that is no longer one may still serve its connections. No
// SYN, however often it comes unanswered, ends one, or keeps it alive.
func (n *packetNode) synToGoneEndpoint(t *testing.T, p *plan) {
	for _, where := range []string{"Here", "Elsewhere"} {
		n.forget(t)
		c := n.established(t, p, where)
		n.serve(t, service(p, protoTCP, endpoint(p.far2, 8080, elsewhere)))
		was, _ := n.flow(c.keys()[0])
		for range 4 {
			n.ageFlows(t, 3)
			was.Seen -= 3
			c.forge(t, "S", c.sent+1000, 0).wantPath(t, c.seen, c.server)
		}
		if now, _ := n.flow(c.keys()[0]); now.Seen != was.Seen {
			t.Errorf("%s: SYNs keep the flow alive: seen %d, then %d", where, was.Seen, now.Seen)
		}
		c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
		c.lives(t)
	}
}

// ownAddress: no packet from outside has an address of the node as its source.
func (n *packetNode) ownAddress(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	f := frame{proto: proto, src: ap(p.eth0, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
	n.send(t, inEth0, f).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
	f.dst = ap(p.pod1, 8080)
	n.untouched(t, "to an endpoint", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_SOURCE)
}

// otherDevice: an address is that of the device behind which it is, for first packets
// and for those of a connection.
func (n *packetNode) otherDevice(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here), endpoint(p.far, 8080, elsewhere)))
	// As after a TFTP request, which any datagram may answer.
	must.Do(t, n.m(objects.TCMapFeaturesSeen).Put(uint32(0), uint32(objects.TCFeatureFEATURE_HELPER)))
	for _, tt := range []struct {
		what string
		hook at
		src  netip.Addr
	}{
		{"another pod's", inPod2, p.pod1}, {"a client's, by a pod", inPod1, p.client}, {"a far pod's, by a pod", inPod1, p.far},
		{"the node's, by a pod", inPod1, p.eth0}, {"a pod's, from the network", inEth0, p.pod1},
	} {
		f := frame{proto: proto, src: ap(tt.src, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
		n.send(t, tt.hook, f).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
		for _, dst := range []netip.AddrPort{ap(p.far, 8080), ap(p.pod1, 8080)} {
			f.dst = dst
			n.untouched(t, tt.what+" to "+dst.String(), tt.hook, f.bytes(n, tt.hook.iface), objects.TCVerdictPASS_SOURCE)
		}
	}
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	client, front, pod := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.pod1, 8080)
	n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "S", seq: 10}).wantPath(t, client, pod)
	answer := frame{proto: proto, src: pod, dst: client, flags: "S.", seq: 20, ack: 11}
	for _, hook := range []at{inPod2, inEth0, inTun0} {
		n.send(t, hook, answer).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
	}
	ask := frame{proto: proto, src: client, dst: front, flags: ".", seq: 11, ack: 21}
	n.send(t, inPod2, ask).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
	n.send(t, inPod1, answer).wantPath(t, front, client)
	n.send(t, inTun0, ask).wantPath(t, client, pod) // another device of the network
}

// outerDestination: an error is about a packet of who gets it.
func (n *packetNode) outerDestination(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	sent := n.datagram(t, inEth0, ap(p.client, 40000), ap(p.clusterIP, 80))
	good := errorKinds[0].about(p, p.router, sent.out[14:], 0)
	bad := good
	bad.dst = ap(p.eth0, 0)
	if bad.dst == good.dst {
		bad.dst = ap(p.tun0, 0)
	}
	n.untouched(t, "an error to another address", inTun0, bad.bytes(n, "tun0"), objects.TCVerdictPASS_OTHER)
	n.send(t, inTun0, good).want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
}

// errorSource: an error about a flow has a source that belongs to its device, and another pod
// than the flow's sends none past the policy that selects it.
func (n *packetNode) errorSource(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod2} })
	sent := n.datagram(t, inEth0, ap(p.client, 40000), ap(p.clusterIP, 80))
	about := func(from netip.Addr) frame { return errorKinds[0].about(p, from, sent.out[14:], 0) }
	loopback := netip.MustParseAddr("127.0.0.1")
	if p.family == model.IPv6 {
		loopback = netip.IPv6Loopback()
	}
	for _, tt := range []struct {
		what string
		hook at
		from netip.Addr
		want objects.TCVerdict
	}{
		{"a pod's, by another pod", inPod2, p.pod1, objects.TCVerdictPASS_SOURCE},
		{"a pod's, from the network", inEth0, p.pod1, objects.TCVerdictPASS_SOURCE},
		{"a router's, by a pod", inPod1, p.router, objects.TCVerdictPASS_SOURCE},
		{"the node's, from the network", inEth0, p.eth0, objects.TCVerdictPASS_SOURCE},
		{"loopback's, from the network", inEth0, loopback, objects.TCVerdictPASS_SOURCE},
		{"another pod's own, which a policy selects", inPod2, p.pod2, objects.TCVerdictPASS_OTHER},
	} {
		n.untouched(t, tt.what, tt.hook, about(tt.from).bytes(n, tt.hook.iface), tt.want)
	}
	n.send(t, inPod1, about(p.pod1)).want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	n.send(t, inEth0, about(p.router)).want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod1} })
	n.send(t, inPod1, about(p.pod1)).want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	n.send(t, inPod2, about(p.pod2)).want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
}

// setICMPRate sets the least time between two ICMP errors to one address, and to all.
func (n *packetNode) setICMPRate(t *testing.T, one, all time.Duration) {
	t.Helper()
	var s objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
	was := s
	s.IcmpIntervalV4, s.IcmpIntervalV6, s.IcmpIntervalAll = uint64(one), uint64(one), uint64(all)
	must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), s))
	t.Cleanup(func() {
		must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), was))
		empty[objects.TCAddrKey, objects.TCIcmpRate](t, n.m(objects.TCMapIcmpRates))
	})
}

// icmpRate: of many questions few are refused with an ICMP error, as in the kernel.
func (n *packetNode) icmpRate(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP))
	count := func(from func(i int) netip.Addr) (answers int) {
		for i := range 300 {
			r := n.send(t, inEth0, frame{proto: protoUDP, src: ap(from(i), 40000), dst: ap(p.clusterIP, 80)})
			if r.verdicts[objects.TCVerdictREJECTED_ICMP] > 0 {
				answers++
			} else {
				r.want(t, actDrop, objects.TCVerdictDROP_ICMP_RATE)
			}
		}
		return answers
	}
	n.setICMPRate(t, time.Hour, 0)
	if got := count(func(int) netip.Addr { return p.client }); got != 6 {
		t.Errorf("%d answers to one address, want 6", got)
	}
	n.setICMPRate(t, 0, time.Hour)
	if got := count(func(i int) netip.Addr { return other(p.client, i) }); got != 50 {
		t.Errorf("%d answers to all, want 50", got)
	}
}

// other gives one of 65,536 addresses of a family.
func other(a netip.Addr, i int) netip.Addr {
	b := a.AsSlice()
	binary.BigEndian.PutUint16(b[len(b)-3:], uint16(i))
	o, _ := netip.AddrFromSlice(b)
	return o
}

// gsoTooBig: the segments of a large packet are what must fit.
func (n *packetNode) gsoTooBig(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	c := n.open(t, p, 40000)
	headers := uint32(40)
	if p.eth0.Is6() {
		headers = 60
	}
	for _, tt := range []struct {
		gso    uint32
		tooBig bool
	}{{mtuTun0 - headers, false}, {mtuTun0 - headers + 1, true}, {1460, true}} {
		for range 2 { // by the routing table, and by the flow's memory
			hook, f := c.frame("P.", make([]byte, 2900))
			f.df = true
			before := n.counters(t)
			_, _, err := n.run(hook, f.bytes(n, hook.iface), tt.gso, 0)
			must.Do(t, err)
			if got := n.counters(t)[objects.TCVerdictANSWERED_TOO_BIG] > before[objects.TCVerdictANSWERED_TOO_BIG]; got != tt.tooBig {
				t.Errorf("segments of %d bytes: answered too big: %v", tt.gso+headers, got)
			}
		}
	}
}

// sourceShare: what a client has beyond its share of the table takes no room from others.
func (n *packetNode) sourceShare(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	key := tupleOf(protoTCP, ap(p.client, 1), ap(p.clusterIP, 80))
	index := objects.ClientHash(n.objects.Seed, &key) % objects.Sources
	must.Do(t, n.m(objects.TCMapSources).Put(index, uint32(0)))
	n.openHere(t, p, 40000)
	var count uint32
	must.Do(t, n.m(objects.TCMapSources).Lookup(index, &count))
	if count != 1 {
		t.Errorf("one connection counts %d", count)
	}
	for i, ending := range [][]string{{"R"}, {"F.", "<F.", "."}, {"R", "<.", "<R."}} {
		n.openHere(t, p, uint16(41000+i)).talk(t, ending...)
	}
	must.Do(t, n.m(objects.TCMapSources).Lookup(index, &count))
	if count != 1 {
		t.Errorf("one connection, and three that are over, count %d", count)
	}
	// Who has its share, or seems to, is served, but its flows yield like those of a flood.
	full := func(src netip.Addr, port uint16) bool {
		t.Helper()
		c := n.openTo(t, ap(src, port), ap(p.clusterIP, 80), ap(p.pod1, 8080), inPod1)
		c.lives(t)
		f, _ := n.flow(c.keys()[0])
		return objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_CONFIRMED == 0
	}
	must.Do(t, n.m(objects.TCMapSources).Put(index, n.cfg.ClientFlowsMax()))
	if !full(p.client, 40001) {
		t.Error("a client with its share of flows gets one more that is confirmed")
	}
	if full(p.client2, 40001) || full(p.router, 40001) {
		t.Error("another client does not get its own share")
	}
	if p.eth0.Is6() {
		must.Do(t, n.m(objects.TCMapSources).Put(objects.ClientNetworkHash(n.objects.Seed, &key)%objects.Sources, n.cfg.ClientFlowsMax()*3/2))
		if !full(p.client2, 40003) {
			t.Error("a network with its share of flows gets one more that is confirmed")
		}
	}
	// The sweep counts anew.
	must.Do(t, n.flows.Sweep(t.Context()))
	must.Do(t, n.m(objects.TCMapSources).Lookup(index, &count))
	if count != 1 {
		t.Errorf("after the sweep one confirmed connection counts %d", count)
	}
	if full(p.client, 40002) {
		t.Error("after the sweep the share still counts as full")
	}
	// A sweep writes the counts only if a flow may have changed them.
	must.Do(t, n.flows.Sweep(t.Context()))
	must.Do(t, n.m(objects.TCMapSources).Put(index, uint32(77)))
	must.Do(t, n.flows.Sweep(t.Context()))
	if must.Do(t, n.m(objects.TCMapSources).Lookup(index, &count)); count != 77 {
		t.Error("the sweep of an idle node writes all counts again")
	}
	n.openHere(t, p, 40004)
	must.Do(t, n.flows.Sweep(t.Context()))
	if must.Do(t, n.m(objects.TCMapSources).Lookup(index, &count)); count == 77 {
		t.Error("after a new flow the sweep does not write the counts")
	}
}

// portShare: one client cannot use all ports towards an endpoint.
func (n *packetNode) portShare(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	var list []uint16
	for i := range uint16(portsShared) {
		list = append(list, 40000+i)
	}
	n.setSNATPorts(t, list...)
	used := 0
	for i := range uint16(2 * portsShared) {
		c := n.newConn(ap(p.client, 1024+i), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		if r := c.syn(t); r.code == actRedirect {
			c.talk(t, "<S.", ".")
			used++
		}
	}
	if used < portsShared*5/10 || used > portsShared*9/10 {
		t.Errorf("one client has %d of %d ports, want three quarters", used, portsShared)
	}
	for i := range uint16(20) {
		c := n.newConn(ap(p.router, 1024+i), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		if r := c.syn(t); r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
			t.Errorf("another client: code %d, %s", r.code, verdictList(r.verdicts))
		}
		c.talk(t, "<S.", ".")
	}
}

// portsShared is PORTS_SHARED of bpf/lib/flow/create.h.
const portsShared = 256

// wrongNode: an EndpointSlice may name any node, or none; what counts is the address.
func (n *packetNode) wrongNode(t *testing.T, p *plan, proto uint8) {
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod1} })
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, elsewhere)))
	r := n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"})
	r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
	r.wantPath(t, ap(p.client, 40000), ap(p.pod1, 8080))
}

// unknownPod: behind a pod's device is a pod that no entry is known of yet. A policy may
// select it.
func (n *packetNode) unknownPod(t *testing.T, p *plan, proto uint8) {
	fresh := addr("10.244.0.99")
	if p.eth0.Is6() {
		fresh = addr("fd00:10:244::99")
	}
	n.routeTo(t, fresh, "pod2")
	n.setNode(t, func(node *intent.Node) {
		node.ClusterCIDRs = append(node.ClusterCIDRs, netip.PrefixFrom(fresh, fresh.BitLen()))
	})
	n.serve(t, service(p, proto, endpoint(fresh, 8080, elsewhere)))
	for hook, src := range map[at]netip.Addr{inEth0: p.client, inPod1: p.pod1} {
		n.forget(t)
		r := n.send(t, hook, frame{proto: proto, src: ap(src, 40000), dst: ap(p.clusterIP, 80), flags: "S"})
		r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
	}
	f := frame{proto: proto, src: ap(p.pod1, 40000), dst: ap(fresh, 8080), flags: "S"}
	n.untouched(t, "to the endpoint itself", inPod1, f.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	f = frame{proto: proto, src: ap(fresh, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
	n.send(t, inPod2, f).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
}

// ownConnections: a pod's socket, or another node, speaks to the endpoint directly, and
// nothing here knows of it. A forged first packet to a NodePort, by the same address and
// port, does not get its answers.
func (n *packetNode) ownConnections(t *testing.T, p *plan, proto uint8) {
	peer := p.farGW
	n.setNode(t, func(node *intent.Node) { node.Peers = []netip.Addr{peer} })
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	pod := ap(p.pod1, 8080)
	var lists objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &lists))
	for _, src := range []netip.Addr{p.far, peer} {
		client := ap(src, 40000)
		direct := frame{proto: proto, src: client, dst: pod, flags: ".", seq: 10, ack: 20}
		answer := frame{proto: proto, src: pod, dst: client, flags: ".", seq: 20, ack: 10}
		n.send(t, inTun0, direct).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
		for _, front := range []netip.AddrPort{ap(p.clusterIP, 80), ap(p.eth0, 30080)} {
			r := n.send(t, inTun0, frame{proto: proto, src: client, dst: front, flags: "S"})
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
			if r.v.src.Addr() != src || r.v.src.Port()%8 != 6 { // networkPortOf8 of package node
				t.Errorf("goes to the endpoint as %s, want another port of the list, and the address", r.v.src)
			}
			n.send(t, inPod1, answer).wantPath(t, pod, client)
		}
	}
	// A connection through the stack is known to conntrack.
	client := ap(p.client, 40000)
	n.track(t, p, proto, client, pod, pod, client)
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: ap(p.clusterIP, 80), flags: "S"})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.src == client {
		t.Errorf("goes to the endpoint as %s, which speaks to it directly", client)
	}
}

// addressOfAnotherPod: the endpoint is gone, and a pod that never was one has its address.
// The client's next connection by the same port is not led there.
func (n *packetNode) addressOfAnotherPod(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	c := n.openHere(t, p, 40000)
	n.serve(t, service(p, protoTCP, endpoint(p.pod2, 8080, here)))
	n.movePod(t, p.pod1, "pod2")
	if r := c.forge(t, "S", c.sent+1000, 0); r.v.dst != ap(p.pod2, 8080) {
		t.Errorf("the SYN goes to %s, want the endpoint that there is", r.v.dst)
	}
	n.forget(t)
	n.movePod(t, p.pod1, "pod1")
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	c = n.openHere(t, p, 40000)
	n.serve(t, service(p, protoTCP))
	n.movePod(t, p.pod1, "pod2")
	defer func(was bool) { n.checksComplete = was }(n.checksComplete)
	n.checksComplete = false
	c.forge(t, "S", c.sent+1000, 0).want(t, actRedirect, objects.TCVerdictREJECTED_RST)
}

// movePod puts an address behind another device until the test ends.
func (n *packetNode) movePod(t *testing.T, a netip.Addr, dev string) {
	t.Helper()
	move := func(dev string) {
		n.node.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{
			a: {Ifindex: n.ifindex[dev], PodMAC: podMAC(dev), HostMAC: n.mac[dev]},
		}})
	}
	move(dev)
	t.Cleanup(func() { move("pod1") })
}

// policyComes: a policy selects a pod that flows lead to. From the client's next packet on,
// at most a second later, netfilter sees them.
func (n *packetNode) policyComes(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.pod1, 8080), inPod1)
	ask := func() result {
		if proto == protoTCP {
			return c.say(t, "P.", 'q')
		}
		return n.datagram(t, inEth0, c.client, c.front)
	}
	if proto == protoTCP {
		c.handshake(t)
	} else {
		c.seen = ask().v.src
	}
	ask().want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod1} })
	n.ageFlows(t, 2)
	answer := frame{proto: proto, src: c.server, dst: c.seen, flags: ".", seq: c.answered, ack: c.sent}
	n.send(t, inPod1, answer).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT) // to the question before
	r := ask()
	r.want(t, actNext, objects.TCVerdictTRANSLATED_STACK)
	r.wantPath(t, c.seen, c.server)
	n.untouched(t, "the answer at the pod", inPod1, answer.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	r = n.send(t, outEth0, answer)
	r.want(t, actNext, objects.TCVerdictTRANSLATED_FROM_STACK)
	r.wantPath(t, c.front, c.client)
}

// ipsec: what an IPsec policy selects goes through the stack, or not at all.
func (n *packetNode) ipsec(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	direct := frame{proto: proto, src: ap(p.pod1, 40000), dst: ap(p.far, 8080), flags: "S"}
	outside := frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
	inside := frame{proto: proto, src: ap(p.pod1, 40001), dst: ap(p.clusterIP, 80), flags: "S"}
	n.send(t, inPod1, direct).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
	n.selectIPsec(t, p.all, p.farNet)
	n.untouched(t, "direct", inPod1, direct.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	back := frame{proto: proto, src: direct.dst, dst: direct.src, flags: "S."}
	n.untouched(t, "direct, back", inTun0, back.bytes(n, "tun0"), objects.TCVerdictPASS_OTHER)
	n.send(t, inPod1, inside).want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
	n.send(t, inEth0, outside).want(t, actDrop, objects.TCVerdictDROP_XFRM)
}

// selectIPsec has an IPsec policy for these prefixes until the test ends.
func (n *packetNode) selectIPsec(t *testing.T, src, dst string) {
	t.Helper()
	keys := []objects.TCRangeKey{objects.RangeKey(objects.RangeXfrmSrc, netip.MustParsePrefix(src)),
		objects.RangeKey(objects.RangeXfrmDst, netip.MustParsePrefix(dst))}
	var s objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
	was := s
	s.Flags |= uint32(objects.TCSettingsFlagsSETTING_XFRM)
	for _, k := range keys {
		must.Do(t, n.m(objects.TCMapClusterRanges).Put(k, uint8(1)))
	}
	must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), s))
	t.Cleanup(func() {
		must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), was))
		for _, k := range keys {
			must.Do(t, n.m(objects.TCMapClusterRanges).Delete(k))
		}
	})
}

// affinityChurn: SYNs of unproved clients evict no other client.
func (n *packetNode) affinityChurn(t *testing.T, p *plan) {
	sp := service(p, protoTCP, endpoint(p.pod1, 8080, here))
	sp.Affinity = time.Hour
	n.serve(t, sp)
	n.openHere(t, p, 40000)
	for i := range 100 {
		n.send(t, inEth0, frame{proto: protoTCP, src: ap(other(p.client, 1000+i), 40000), dst: ap(p.clusterIP, 80), flags: "S"})
	}
	count := 0
	must.Do(t, objects.Each(n.m(objects.TCMapAffinities), func(objects.TCAffinityKey, objects.TCAffinity) { count++ }))
	if count != 1 {
		t.Errorf("%d clients are remembered, want the one that exists", count)
	}
}

// TestPacketFlood: half-open connections of any number leave idle ones alone, and the
// ports of the node to clients that exist.
func TestPacketFlood(t *testing.T) {
	const size, idle = 4096, 500
	flood := 16_000
	if testing.Short() {
		flood = 6000 // more than all entries already, if only by little
	}
	for _, where := range []string{"Here", "Elsewhere"} {
		t.Run(where, func(t *testing.T) {
			n := newPacketNode(t, func(c *Config) { c.FlowTableSize = size })
			n.enter(t)
			for _, p := range plans {
				n.forget(t)
				n.flood(t, p, where, idle, flood)
			}
		})
	}
}

func (n *packetNode) flood(t *testing.T, p *plan, where string, idle, flood int) {
	var conns []*conn
	for i := range idle {
		if i == 0 {
			conns = append(conns, n.established(t, p, where))
		} else {
			conns = append(conns, n.another(t, p, where, uint16(1024+i)))
		}
	}
	for i := range flood {
		c := n.newConn(ap(other(p.client, i), uint16(1024+i)), ap(p.clusterIP, 80), conns[0].server, conns[0].out)
		if r := c.syn(t); r.code != actRedirect {
			t.Fatalf("SYN %d: code %d, %s", i, r.code, verdictList(r.verdicts))
		}
		c.say(t, "<S.")
		if i%100 == 0 { // while it goes on an honest client connects
			n.another(t, p, where, uint16(20000+i/100)).lives(t)
		}
	}
	for _, c := range conns {
		c.lives(t)
	}
}

// another makes one more connection like that of established.
func (n *packetNode) another(t *testing.T, p *plan, where string, port uint16) *conn {
	t.Helper()
	if where == "Here" {
		return n.openHere(t, p, port)
	}
	return n.open(t, p, port)
}

// TestPacketSeed: which endpoint a client gets is not the same on every node.
func TestPacketSeed(t *testing.T) {
	var spreads []string
	for range 2 {
		n := newPacketNode(t)
		p := plans["IPv4"]
		n.serve(t, service(p, protoUDP, endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here)))
		var spread string
		for i := range uint16(64) {
			spread += fmt.Sprint(n.datagram(t, inEth0, ap(p.client, 1024+i), ap(p.clusterIP, 80)).v.dst.Addr(), " ")
		}
		spreads = append(spreads, spread)
	}
	if spreads[0] == spreads[1] {
		t.Errorf("two nodes spread clients alike: %s", spreads[0])
	}
}
