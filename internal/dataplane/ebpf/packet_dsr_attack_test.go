package ebpf

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// forgerISN is the number of a forger's own SYNs. It does not know those of the client.
const forgerISN = 0x1000

// forgery is a packet in a client's name. own: it fits the forger's own SYN.
type forgery struct {
	flags string
	own   bool
}

func (f forgery) String() string {
	if f.own {
		return "own " + f.flags
	}
	return f.flags
}

// forgeries are what a forger sends at one moment.
type forgeries []forgery

func (list forgeries) String() string {
	var names []string
	for _, f := range list {
		names = append(names, f.String())
	}
	return strings.Join(names, ",")
}

// forgeryLists has each kind of packet alone, and connections that a forger begins and goes on with.
var forgeryLists = []forgeries{
	nil, {{".", false}}, {{"P.", false}}, {{"F.", false}}, {{"R", false}}, {{"R.", false}}, {{"S.", false}}, {{"S", true}},
	{{".", true}}, {{"R", true}},
	{{"S", true}, {".", true}}, {{"S", true}, {"F.", true}}, {{"S", true}, {"R", true}},
	{{".", false}, {"S", true}, {".", true}, {"P.", false}},
}

// forge sends them by a node.
func (c *dsrConn) forgeAll(t *testing.T, by *packetNode, list forgeries) {
	t.Helper()
	for i, kind := range list {
		var data []byte
		if strings.Contains(kind.flags, "P") {
			data = []byte("forged")
		}
		hook, f := c.frame(kind.flags, data)
		f.seq, f.ack = 0x70000000+uint32(i), 0x60000000
		switch {
		case kind.flags == "S":
			f.seq, f.ack = forgerISN, 0
		case kind.own:
			f.seq = forgerISN + 1
		}
		by.sendRaw(t, hook, f.bytes(by, hook.iface))
	}
}

// later makes the client's flow at a node older.
func (c *dsrConn) later(t *testing.T, by *packetNode, seconds uint32) {
	t.Helper()
	key := tupleOf(protoTCP, c.client, c.front)
	f, found := by.flow(key)
	if !found {
		return
	}
	f.Opened -= seconds
	f.Seen -= seconds
	f.NextHopSeen -= seconds
	must.Do(t, by.m(objects.TCMapFlows).Update(key, f, 0))
}

// send sends the client's next packet by a node, which answers and drops nothing.
func (c *dsrConn) send(t *testing.T, by *packetNode, flags string) result {
	t.Helper()
	hook, f := c.frame(flags, nil)
	r := by.sendRaw(t, hook, f.bytes(by, hook.iface))
	if r.code != actRedirect || r.v == nil {
		t.Fatalf("%q of the client: code %d, verdicts %s", flags, r.code, verdictList(r.verdicts))
	}
	return r
}

// translated says whether a packet has the node's address.
func (c *dsrConn) translated(r result) bool {
	return r.v.proto == protoTCP && r.v.src.Addr() == c.p.tun0 && r.v.dst == c.server
}

// awaitRoomInSecond waits until the second of the programs (now in bpf/lib/base.h) lasts an eighth
// longer: connects moves the flow's time itself.
func awaitRoomInSecond(t *testing.T) {
	t.Helper()
	await.True(t, "a new second", func() bool {
		var now unix.Timespec
		must.Do(t, unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
		const second = 1 << 20
		return (uint64(now.Nano())>>20)*1099%second < second/8*7
	})
}

// connects has the client begin, on a network that drops DSR replies. It sends its SYN at once, and
// after 1 and 3 seconds (RFC 6298), while a forger sends packets in each second. One of the three must
// go with the node's address, and lead to a connection.
func (c *dsrConn) connects(t *testing.T, before, after forgeries) {
	t.Helper()
	awaitRoomInSecond(t)
	n := c.d.first
	for second := range 4 {
		c.forgeAll(t, n, before)
		if second != 2 {
			if r := c.send(t, n, "S"); c.translated(r) {
				c.completes(t, r, before, after)
				return
			}
		}
		c.forgeAll(t, n, after)
		c.later(t, n, 1)
	}
	t.Fatalf("forged %s before, %s after: no SYN of the client has the node's address", before, after)
}

// completes takes the handshake of a SYN with the node's address to its end.
func (c *dsrConn) completes(t *testing.T, syn result, before, after forgeries) {
	t.Helper()
	n := c.d.first
	c.forgeAll(t, n, after)
	c.sent++
	synAck := back(syn.v, "S.", nil)
	synAck.seq, synAck.ack = serverISN, c.sent
	n.send(t, inTun0, synAck).wantPath(t, c.front, c.client)
	c.forgeAll(t, n, before)
	c.forgeAll(t, n, after)
	_, ack := c.frame(".", nil)
	ack.ack = serverISN + 1
	for range 2 {
		if r := n.send(t, inEth0, ack); r.v.src != syn.v.src {
			t.Fatalf("forged %s before, %s after: the client's ACK comes from %s, its SYN from %s", before, after, r.v.src, syn.v.src)
		}
		c.forgeAll(t, n, after)
	}
	f := n.flowAt(t, tupleOf(protoTCP, c.client, c.front))
	if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_CONFIRMED == 0 {
		t.Fatalf("forged %s before, %s after: the client's flow has state %d, flags %#x", before, after, f.State, f.Flags)
	}
}

var dsrEncapsulations = map[string]objects.TCDsrEncapsulationKind{"option": objects.TCDsrEncapsulationKindDSR_BY_OPTION,
	"datagram": objects.TCDsrEncapsulationKindDSR_BY_GUE}

// eachDSREncapsulation is eachDSRFamily, for both ways in which packets tell the endpoint's node.
func eachDSREncapsulation(t *testing.T, d *dsrNodes, f func(t *testing.T, p *plan, byGUE bool)) {
	for name, kind := range dsrEncapsulations {
		t.Run(name, func(t *testing.T) {
			eachDSRFamily(t, d, func(t *testing.T, p *plan) {
				for _, n := range []*packetNode{d.first, d.second} {
					n.carry(t, p.far, kind)
					empty[uint32, objects.TCDsrPath](t, n.m(objects.TCMapDsrPaths))
				}
				f(t, p, kind == objects.TCDsrEncapsulationKindDSR_BY_GUE)
			})
		})
	}
}

// TestPacketDSRForgedStart forges packets of a client that begins a connection, on a network that drops
// DSR replies. The client must still get the node's address.
func TestPacketDSRForgedStart(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, _ bool) {
		port := uint16(20000)
		for _, before := range forgeryLists {
			for _, after := range forgeryLists {
				port++
				empty[uint32, objects.TCDsrPath](t, d.first.m(objects.TCMapDsrPaths))
				c := d.conn(p, port)
				if c.connects(t, before, after); t.Failed() {
					return
				}
			}
		}
	})
}

// TestPacketDSRForgedLong has a forger's flow be in use for a long time before the client begins.
func TestPacketDSRForgedLong(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, _ bool) {
		for i, list := range forgeryLists {
			c := d.conn(p, 20000+uint16(i))
			for range 5 {
				c.forgeAll(t, d.first, list)
				c.later(t, d.first, 1)
				c.forgeAll(t, d.first, list)
				c.later(t, d.first, 50)
			}
			empty[uint32, objects.TCDsrPath](t, d.first.m(objects.TCMapDsrPaths))
			c.connects(t, nil, list)
		}
	})
}

// TestPacketDSRForgedBroken: where a path is known to be broken, a forged packet does not lead the
// client to it.
func TestPacketDSRForgedBroken(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, _ bool) {
		for port := range uint16(objects.TCDsrPathLimitDSR_FAILURES) {
			d.conn(p, 30000+port).connects(t, nil, nil)
		}
		failures := func() uint32 {
			var id uint32
			var path objects.TCDsrPath
			if !d.first.m(objects.TCMapDsrPaths).Iterate().Next(&id, &path) {
				t.Fatal("nothing is known of the path")
			}
			return path.Failures
		}
		was := failures()
		for i, flags := range []string{".", "P.", "F.", "R", "S."} {
			c := d.conn(p, 20000+uint16(i))
			c.forgeAll(t, d.first, forgeries{{flags, false}})
			if r := c.send(t, d.first, "S"); !c.translated(r) {
				t.Errorf("after a forged %q, the SYN goes from %s: %s", flags, r.v.src, verdictList(r.verdicts))
			}
		}
		if now := failures(); now != was {
			t.Errorf("forged packets count as answers: %d failures, and %d before", now, was)
		}
	})
}

// TestPacketDSRForgedAnswer: only an ACK that fits the client's SYN counts as an answer.
func TestPacketDSRForgedAnswer(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, _ bool) {
		c := d.conn(p, 20000)
		c.send(t, d.first, "S")
		c.sent++
		key := tupleOf(protoTCP, c.client, c.front)
		for _, list := range forgeryLists {
			if !slices.Contains(list, forgery{"S", true}) {
				c.forgeAll(t, d.first, list)
			}
		}
		d.first.wantState(t, objects.TCFlowStateFLOW_NEW, key)
		if d.first.m(objects.TCMapDsrPaths).Iterate().Next(new(uint32), new(objects.TCDsrPath)) {
			t.Error("forged packets count as answers")
		}
		c.send(t, d.first, ".")
		d.first.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED, key)
		if !d.first.m(objects.TCMapDsrPaths).Iterate().Next(new(uint32), new(objects.TCDsrPath)) {
			t.Error("the client's ACK does not count as an answer")
		}
	})
}

// says sends the client's next packet by a node, and checks that the endpoint gets it from the client.
func (c *dsrConn) says(t *testing.T, by *packetNode, byGUE bool, flags string, payload ...byte) {
	t.Helper()
	if byGUE {
		c.askGUE(t, by, flags, payload...)
	} else {
		c.ask(t, by, flags, payload...)
	}
}

// TestPacketDSRForgedMiddle forges packets of a client whose connection has DSR replies, also SYNs
// that it repeats, as if the client had got no answer. The connection goes on.
func TestPacketDSRForgedMiddle(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, byGUE bool) {
		for i, list := range forgeryLists {
			empty[uint32, objects.TCDsrPath](t, d.first.m(objects.TCMapDsrPaths))
			c := d.conn(p, 20000+uint16(i))
			c.says(t, d.first, byGUE, "S")
			c.answer(t, "S.")
			c.says(t, d.first, byGUE, ".")
			for second := range 6 {
				c.forgeAll(t, d.first, append(list, forgery{"S", true}))
				if f := d.first.flowAt(t, tupleOf(protoTCP, c.client, c.front)); objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_SNAT != 0 &&
					second%2 == 0 {
					// The endpoint answers the forger's SYN. The client challenges that (RFC 9293, 3.10.7.4).
					synAck := frame{proto: protoTCP, src: c.server,
						dst: netip.AddrPortFrom(objects.FromAddr(f.Saddr, objects.FamilyOf(p.far)), objects.ToPort(f.Sport)), flags: "S.",
						seq: 777, ack: forgerISN + 1}
					d.first.send(t, inTun0, synAck).wantPath(t, c.front, c.client)
				}
				c.says(t, d.first, byGUE, ".")
				c.says(t, d.first, byGUE, "P.", []byte("data")...)
				c.answer(t, "P.", 'x')
				c.later(t, d.first, 1)
				c.says(t, d.first, byGUE, "P.", 'x')
			}
			c.later(t, d.first, 100)
			c.says(t, d.first, byGUE, "P.", 'x')
			c.answer(t, "P.", 'x')
			c.forgeAll(t, d.first, forgeries{{"S", true}})
			c.later(t, d.first, 1)
			c.forgeAll(t, d.first, forgeries{{"S", true}})
			c.says(t, d.first, byGUE, "R.")
		}
	})
}

// TestPacketDSRMoved takes a connection to a node that has not seen its SYN. Whatever its flow there
// is, and whenever it ends, the endpoint gets all packets.
func TestPacketDSRMoved(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, byGUE bool) {
		c := d.conn(p, 20000)
		c.says(t, d.first, byGUE, "S")
		c.answer(t, "S.")
		c.says(t, d.first, byGUE, ".")
		key := tupleOf(protoTCP, c.client, c.front)
		c.says(t, d.second, byGUE, "P.", 'x')
		c.answer(t, "P.", 'y')
		d.second.wantState(t, objects.TCFlowStateFLOW_SYN_RECV, key)
		c.later(t, d.second, objects.Seconds(d.second.cfg.Timeouts.TCPNew)+1)
		slot := d.second.flowAt(t, key).Slot
		c.says(t, d.second, byGUE, "P.", 'x')
		c.answer(t, "P.", 'y')
		if d.second.flowAt(t, key).Slot == slot {
			t.Error("a flow whose SYN was not seen has no short timeout")
		}
		for range 2 {
			c.later(t, d.second, 1)
			c.says(t, d.second, byGUE, "P.", 'x')
		}
		d.second.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED, key)
		c.later(t, d.second, objects.Seconds(d.second.cfg.Timeouts.TCPEstablished)-1)
		slot = d.second.flowAt(t, key).Slot
		c.says(t, d.second, byGUE, "P.", 'x')
		if d.second.flowAt(t, key).Slot != slot {
			t.Error("a connection that goes on has a short timeout")
		}

		// Its SYN came here, and everything else by another node.
		half := d.conn(p, 20001)
		half.says(t, d.first, byGUE, "S")
		half.answer(t, "S.")
		half.says(t, d.second, byGUE, ".")
		half.later(t, d.first, 1000)
		half.says(t, d.first, byGUE, "P.", 'x')
		half.answer(t, "P.", 'y')
	})
}

// TestPacketDSRForgedOtherAddress forges packets of a client's port to another address of the Service,
// while the node knows the client's flow, and when it has lost it.
func TestPacketDSRForgedOtherAddress(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	d.first.checksComplete = false // see TestPacketAnswers
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, byGUE bool) {
		for i, list := range forgeryLists {
			c := d.conn(p, 20000+uint16(i))
			c.says(t, d.first, byGUE, "S")
			c.answer(t, "S.")
			c.says(t, d.first, byGUE, ".")
			forger := d.conn(p, 20000+uint16(i))
			forger.front = ap(p.eth0, 30080)
			for range 3 {
				forger.forgeAll(t, d.first, list)
				c.says(t, d.first, byGUE, "P.", 'x')
				c.answer(t, "P.", 'y')
				d.first.forget(t)
			}
		}
	})
}

// TestPacketDSRForgedFlood has forged segments of other clients come while a client waits for an
// answer. The node still knows that there was none.
func TestPacketDSRForgedFlood(t *testing.T) {
	d := newDSRNodes(t, withDSRPort, func(c *Config) { c.FlowTableSize = 256 })
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, _ bool) {
		c := d.conn(p, 20000)
		c.send(t, d.first, "S")
		for port := range 4 * uint16(d.first.cfg.DSRFlows()) {
			other := d.conn(p, 1024+port)
			other.client = ap(p.client2, 1024+port)
			other.forgeAll(t, d.first, forgeries{{".", false}})
		}
		c.later(t, d.first, 1)
		if r := c.send(t, d.first, "S"); !c.translated(r) {
			t.Errorf("the repeated SYN comes from %s: %s", r.v.src, verdictList(r.verdicts))
		}
	})
}

// TestPacketDSRRace has a CPU forge segments while another one forwards a client's SYNs, the second and
// the third one seconds after the first. A race may cost the client one of them: it gets the node's
// address with the third one at the latest.
func TestPacketDSRRace(t *testing.T) {
	d := newDSRNodes(t)
	p := plans["IPv4"]
	d.serve(t, p)
	for round := range uint16(150) {
		c := d.conn(p, 20000+round)
		var f objects.TCFlow
		for range 3 {
			f = c.raceSYN(t)
			c.later(t, d.first, 2)
		}
		if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_SNAT == 0 {
			t.Fatalf("round %d: the flow of the third SYN has state %d, flags %#x", round, f.State, f.Flags)
		}
	}
}

// raceSYN forwards a SYN and forged segments on two CPUs, and returns the client's flow.
func (c *dsrConn) raceSYN(t *testing.T) objects.TCFlow {
	t.Helper()
	n := c.d.first
	empty[uint32, objects.TCDsrPath](t, n.m(objects.TCMapDsrPaths))
	hook, syn := c.frame("S", nil)
	var forged [][]byte
	for i := range 40 {
		_, f := c.frame([]string{".", "F.", "R"}[i%3], nil)
		f.seq = uint32(i) << 20
		forged = append(forged, f.bytes(n, hook.iface))
	}
	var racers sync.WaitGroup
	start := make(chan struct{})
	racers.Go(func() { n.race(t, 0, start, forged) })
	racers.Go(func() { n.race(t, 1, start, [][]byte{syn.bytes(n, hook.iface)}) })
	close(start)
	racers.Wait()
	n.last = nil // they have counted
	f, _ := n.flow(tupleOf(protoTCP, c.client, c.front))
	return f
}
