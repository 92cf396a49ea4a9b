package ebpf

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/dchest/siphash"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// dsrNodes are two nodes that may receive a connection, and the node of its endpoint, pod1 there.
type dsrNodes struct {
	first, second, home *packetNode
}

var dsrKeys = []DSRKey{{1, 2, 3}, {4, 5, 6}}

func withKeys(keys ...DSRKey) func(*Config) { return func(c *Config) { c.DSRKeys = keys } }

func newDSRNodes(t testing.TB, change ...func(*Config)) *dsrNodes {
	change = append(change, withKeys(dsrKeys...))
	return &dsrNodes{newPacketNode(t, change...), newPacketNode(t, change...), newDSRHome(t, dsrKeys...)}
}

func newDSRHome(t testing.TB, keys ...DSRKey) *packetNode {
	n := newPacketNode(t, withKeys(keys...), withDSRPort)
	pods := map[netip.Addr]attach.Pod{}
	for _, p := range plans {
		pods[p.far] = attach.Pod{Ifindex: n.ifindex["pod1"], PodMAC: podMAC("pod1"), HostMAC: n.mac["pod1"]}
		n.routeTo(t, p.far, "pod1")
	}
	n.node.OnPods(attach.PodChanges{Full: true, Upserts: pods})
	return n
}

// serve makes a Service with DSR on all nodes, and forgets all flows.
func (d *dsrNodes) serve(t testing.TB, p *plan) {
	for _, n := range []*packetNode{d.first, d.second} {
		n.forget(t)
		n.serve(t, dsrService(p, endpoint(p.far, 8080, elsewhere)))
	}
	d.home.forget(t)
	d.home.serve(t, dsrService(p, endpoint(p.far, 8080, here)))
}

func dsrService(p *plan, e ...intent.Endpoint) *intent.ServicePort {
	return dsrServiceOf(p, protoTCP, e...)
}

func dsrServiceOf(p *plan, proto uint8, e ...intent.Endpoint) *intent.ServicePort {
	sp := service(p, proto, e...)
	sp.Balance, sp.DSR = intent.Maglev, true
	for slot := range 251 {
		sp.Table = append(sp.Table, uint32(slot%len(e)))
	}
	return sp
}

// pass gives what left one node to another one, as a device of that one receives it.
func (d *dsrNodes) pass(t testing.TB, to *packetNode, r result) result {
	t.Helper()
	if r.code != actRedirect || r.v == nil {
		t.Fatalf("code %d, verdicts %s: nothing was sent", r.code, verdictList(r.verdicts))
	}
	return to.sendRaw(t, inTun0, toDevice(to, r.out))
}

func toDevice(n *packetNode, out []byte) []byte {
	in := bytes.Clone(out)
	copy(in, n.mac["tun0"])
	return in
}

// room is how much longer a frame is than a plain one.
func room(p *plan) int {
	if p.eth0.Is4() {
		return 16
	}
	return 32
}

// dsrConn is a connection whose packets the nodes see in turn.
type dsrConn struct {
	*conn
	d *dsrNodes
	p *plan
}

func (d *dsrNodes) conn(p *plan, port uint16) *dsrConn {
	c := d.first.newConn(ap(p.client, port), ap(p.externalIP, 80), ap(p.far, 8080), inPod1)
	c.seen = c.client
	return &dsrConn{c, d, p}
}

// ask sends the client's next packet by a node, and checks that the endpoint gets it as it is.
// It returns what that node sent.
func (c *dsrConn) ask(t *testing.T, by *packetNode, flags string, payload ...byte) result {
	t.Helper()
	hook, f := c.frame(flags, payload)
	sent := by.send(t, hook, f)
	sent.wantPath(t, c.client, c.server)
	got := c.d.pass(t, c.d.home, sent)
	got.wantPath(t, c.client, c.server)
	if got.code != actRedirect || !bytes.Equal(got.v.ethDst, podMAC("pod1")) {
		t.Fatalf("the endpoint's node sends %q with code %d to %s, want it with the pod", flags, got.code, got.v.ethDst)
	}
	plain := f.bytes(by, hook.iface)
	if len(got.out) != len(plain) || got.v.flags != flags || !bytes.Equal(got.v.payload, payload) {
		t.Fatalf("the endpoint gets %x, want %x but for addresses", got.out, plain)
	}
	c.count(f, false)
	return sent
}

// answer sends the endpoint's next packet, and checks that the client gets it from the Service.
func (c *dsrConn) answer(t *testing.T, flags string, payload ...byte) {
	t.Helper()
	_, f := c.frame("<"+flags, payload)
	r := c.d.home.send(t, inPod1, f)
	r.wantPath(t, c.front, c.client)
	if r.code != actRedirect {
		t.Fatalf("the answer %q ended with code %d", flags, r.code)
	}
	c.count(f, true)
}

func (c *dsrConn) establish(t *testing.T) {
	t.Helper()
	c.ask(t, c.d.first, "S")
	c.answer(t, "S.")
	c.ask(t, c.d.first, ".")
}

// announced says whether a packet carries the option.
func announced(r result) bool { return r.verdicts[objects.TCVerdictDSR_ANNOUNCED] == 1 }

func eachDSRFamily(t *testing.T, d *dsrNodes, f func(t *testing.T, p *plan)) {
	for _, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			d.serve(t, plans[name])
			f(t, plans[name])
		})
	}
}

// beginSecond waits for the next second of the programs' clock.
func beginSecond(t *testing.T) {
	t.Helper()
	before := objects.BootSeconds()
	await.True(t, "the second ends", func() bool { return objects.BootSeconds() != before })
}

// TestPacketDSR takes connections through the node that receives them and the endpoint's node.
func TestPacketDSR(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		_, f := c.frame("S", nil)
		beginSecond(t) // a SYN that is repeated in a later second gets the node's address
		syn := d.first.send(t, inEth0, f)
		syn.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT, objects.TCVerdictDSR_ANNOUNCED)
		if len(syn.out) != len(f.bytes(d.first, "eth0"))+room(p) {
			t.Errorf("the SYN grows from %d to %d bytes", len(f.bytes(d.first, "eth0")), len(syn.out))
		}
		if repeated := c.ask(t, d.first, "S"); !announced(repeated) {
			t.Error("a repeated SYN has no option")
		}
		c.answer(t, "S.")
		for _, flags := range []string{".", "P.", "P."} {
			var payload []byte
			if flags == "P." {
				payload = []byte("data")
			}
			if r := c.ask(t, d.first, flags, payload...); announced(r) {
				t.Errorf("%q of an established connection has an option", flags)
			}
			c.answer(t, "P.", 'a', 'b')
		}
		flow := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front))
		if flow.State != uint8(objects.TCFlowStateFLOW_ESTABLISHED) || objects.TCFlowFlags(flow.Flags)&objects.TCFlowFlagsFLOW_CONFIRMED == 0 {
			t.Errorf("the endpoint's node has the flow in state %d, flags %#x", flow.State, flow.Flags)
		}
		if one := d.first.flowAt(t, tupleOf(protoTCP, c.client, c.front)); objects.TCFlowFlags(one.Flags)&objects.TCFlowFlagsFLOW_CONFIRMED != 0 {
			t.Error("the receiving node takes the client for proved")
		}
		c.ask(t, d.first, "F.")
		c.answer(t, "F.")
		c.ask(t, d.first, ".")
		if flow := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)); flow.State != uint8(objects.TCFlowStateFLOW_CLOSED) {
			t.Errorf("after both FINs, the endpoint's node has the flow in state %d", flow.State)
		}
	})
}

func (n *packetNode) flowAt(t *testing.T, key objects.TCTuple) (f objects.TCFlow) {
	t.Helper()
	if err := n.m(objects.TCMapFlows).Lookup(key, &f); err != nil {
		t.Fatalf("no flow %v: %v", key, err)
	}
	return f
}

// TestPacketDSROtherNode moves established connections to a node that has never seen them, and
// lets the endpoint's node forget one.
func TestPacketDSROtherNode(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		c.establish(t)
		if r := c.ask(t, d.second, "P.", 'x'); !announced(r) {
			t.Error("the first packet by another node has no option, and has room for it")
		}
		c.answer(t, "P.", 'y')
		if r := c.ask(t, d.second, "P.", 'x'); announced(r) {
			t.Error("the second packet by another node has an option")
		}

		d.second.forget(t)
		full := make([]byte, mtuTun0-len(d.packet(c))+14)
		if r := c.ask(t, d.second, "P.", full...); announced(r) {
			t.Error("a packet of the device's MTU grows")
		}
		c.answer(t, "P.", 'y')

		d.home.forget(t)
		d.second.forget(t)
		c.ask(t, d.second, "P.", 'x')
		c.answer(t, "P.", 'y')
		c.ask(t, d.second, "P.", 'x')
		c.answer(t, "R.")
	})
}

// packet is a frame of the connection without data.
func (d *dsrNodes) packet(c *dsrConn) []byte {
	_, f := c.frame("P.", nil)
	return f.bytes(d.first, "eth0")
}

// TestPacketDSRFlood has forged connections take the places of honest ones at the receiving node.
// Forged FINs, RSTs and SYNs follow. The honest ones must go on.
func TestPacketDSRFlood(t *testing.T) {
	d := newDSRNodes(t, func(c *Config) { c.FlowTableSize = 1024 })
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		var honest []*dsrConn
		for port := range uint16(2 * 4) { // a flow in use moves three times: flow/unconfirmed.h
			c := d.conn(p, 40000+port)
			c.establish(t)
			honest = append(honest, c)
		}
		for port := range 2 * uint16(d.first.cfg.DSRFlows()) {
			f := frame{proto: protoTCP, src: ap(p.client2, 1024+port), dst: honest[0].front, flags: "S", seq: 7}
			d.first.send(t, inEth0, f)
			f.flags, f.seq, f.ack = ".", 8, 1 // as if an endpoint had answered
			d.first.send(t, inEth0, f)
		}
		forgotten := 0
		for _, c := range honest {
			if err := d.first.m(objects.TCMapFlows).Lookup(tupleOf(protoTCP, c.client, c.front), &objects.TCFlow{}); err != nil {
				forgotten++
			}
			c.ask(t, d.first, "P.", 'x')
			c.answer(t, "P.", 'y')
			for _, flags := range []string{"F.", "R", "R.", "S"} {
				c.forge(t, flags, 12345, 54321)
				c.ask(t, d.first, "P.", 'x')
				c.answer(t, "P.", 'y')
			}
		}
		if forgotten == 0 {
			t.Error("the flood has reached no connection: it shows nothing")
		}
	})
}

// TestPacketDSRForged gives the endpoint's node options that no node of the cluster wrote.
func TestPacketDSRForged(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		_, f := c.frame("S", nil)
		genuine := toDevice(d.home, d.first.send(t, inEth0, f).out)
		option := 14 + 20
		if p.eth0.Is6() {
			option = 14 + 40
		}
		last := option + room(p)
		if p.eth0.Is6() {
			last -= 2 // padding
		}
		for at := option; at < last; at++ {
			forged := bytes.Clone(genuine)
			forged[at] ^= 0x40
			fixIPv4Sum(forged)
			r := d.home.sendRaw(t, inTun0, forged)
			if d.home.count(t, objects.TCMapFlows) > 0 {
				t.Fatalf("byte %d of the option is forged, and there is a flow: %s", at-option, verdictList(r.verdicts))
			}
			header := 2
			if p.eth0.Is6() {
				header = 4
			}
			if at >= option+header && r.code != actDrop {
				t.Errorf("byte %d of the option is forged: code %d, verdicts %s", at-option, r.code, verdictList(r.verdicts))
			}
		}
		for name, change := range map[string]func(b []byte){
			"another client": func(b []byte) { b[option-1-net4or6(p, 4, 16)] ^= 1 },
			"another port":   func(b []byte) { b[option+room(p)+1] ^= 1 },
		} {
			forged := bytes.Clone(genuine)
			change(forged)
			fixIPv4Sum(forged)
			if r := d.home.sendRaw(t, inTun0, forged); r.code != actDrop || r.verdicts[objects.TCVerdictDROP_DSR] != 1 {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		// It is for a pod elsewhere, or this node has no keys: not this node's business.
		if r := d.second.sendRaw(t, inTun0, toDevice(d.second, genuine)); r.code == actDrop || len(r.out) != len(genuine) {
			t.Errorf("a node on the way: code %d, verdicts %s", r.code, verdictList(r.verdicts))
		}
		if r := d.home.sendRaw(t, inTun0, genuine); r.code != actRedirect {
			t.Errorf("the genuine packet: code %d, verdicts %s", r.code, verdictList(r.verdicts))
		}
	})
}

func net4or6(p *plan, four, six int) int {
	if p.eth0.Is4() {
		return four
	}
	return six
}

// fixIPv4Sum writes the checksum of an IPv4 header.
func fixIPv4Sum(b []byte) {
	if b[14]>>4 == 4 {
		ihl := int(b[14]&15) * 4
		binary.BigEndian.PutUint16(b[24:], 0)
		binary.BigEndian.PutUint16(b[24:], ^sum16(b[14:14+ihl], 0))
	}
}

// count returns the number of entries of a map.
func (n *packetNode) count(t *testing.T, name string) (entries int) {
	t.Helper()
	it := n.m(name).Iterate()
	var key objects.TCTuple
	var f objects.TCFlow
	for it.Next(&key, &f) {
		entries++
	}
	return entries
}

// TestPacketDSRNotPossible lists first packets of a Service with DSR that get the node's address.
func TestPacketDSRNotPossible(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		snat := func(name string, n *packetNode, f frame) {
			t.Helper()
			if r := n.send(t, inEth0, f); r.v == nil || r.v.src.Addr() != p.tun0 || announced(r) {
				t.Errorf("%s: %s -> %s with %s", name, r.v.src, r.v.dst, verdictList(r.verdicts))
			}
		}
		syn := frame{proto: protoTCP, src: ap(p.client, 40001), dst: ap(p.externalIP, 80), flags: "S", seq: 1}
		options := syn
		options.options, options.ext = []byte{7, 7, 4, 0, 0, 0, 0}, []extension{{extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
		snat("a SYN with options", d.first, options)

		// The same client's port has a connection with the endpoint by another address.
		d.first.forget(t)
		at := syn
		at.dst = ap(p.eth0, 30080)
		if r := d.first.send(t, inEth0, at); !announced(r) {
			t.Fatalf("NodePort: %s", verdictList(r.verdicts))
		}
		snat("a port that is in use", d.first, syn)

		inCluster := syn
		inCluster.src = ap(p.far2, 40002)
		if r := d.first.send(t, inEth0, inCluster); announced(r) {
			t.Error("a client in the cluster gets its answers from another node")
		}
	})
}

// TestPacketDSRUnanswered has clients repeat SYNs, because the network drops those with an option.
// They must get through with the node's address, and later clients at once.
func TestPacketDSRUnanswered(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		empty[uint32, objects.TCDsrPath](t, d.first.m(objects.TCMapDsrPaths))
		syn := func(port uint16) result {
			return d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, port), dst: ap(p.externalIP, 80), flags: "S", seq: 1})
		}
		later := func(port uint16) { // by a second
			key := tupleOf(protoTCP, ap(p.client, port), ap(p.externalIP, 80))
			f := d.first.flowAt(t, key)
			f.Seen--
			must.Do(t, d.first.m(objects.TCMapFlows).Update(key, f, 0))
		}
		unanswered := func(from, n uint16) {
			for port := from; port < from+n; port++ {
				if r := syn(port); !announced(r) {
					t.Fatalf("SYN %d: %s", port-from, verdictList(r.verdicts))
				}
				later(port)
				r := syn(port)
				if announced(r) || r.v.src.Addr() != p.tun0 || r.verdicts[objects.TCVerdictDSR_UNANSWERED] != 1 {
					t.Fatalf("repeated SYN %d from %s: %s", port-from, r.v.src, verdictList(r.verdicts))
				}
				d.first.send(t, inTun0, back(r.v, "S.", nil)).wantPath(t, ap(p.externalIP, 80), ap(p.client, port))
			}
		}
		unanswered(40000, 4)
		c := d.conn(p, 41000)
		c.establish(t) // makes up for one
		unanswered(42000, 1)
		if r := syn(43000); !announced(r) {
			t.Errorf("four clients got no answer more than one that did: %s", verdictList(r.verdicts))
		}
		unanswered(44000, 1)
		var id uint32
		var path objects.TCDsrPath
		change := func(by func(*objects.TCDsrPath)) {
			it := d.first.m(objects.TCMapDsrPaths).Iterate()
			if !it.Next(&id, &path) {
				t.Fatal("nothing is known of the path")
			}
			by(&path)
			must.Do(t, d.first.m(objects.TCMapDsrPaths).Update(id, path, 0))
		}
		if r := syn(44500); announced(r) || r.v.src.Addr() != p.tun0 {
			t.Errorf("after five failures: %s", verdictList(r.verdicts))
		}
		change(func(path *objects.TCDsrPath) { path.Failed -= 61 })
		if r := syn(45000); !announced(r) {
			t.Errorf("a minute later: %s", verdictList(r.verdicts))
		}
	})
}

// TestPacketDSRLateAnswer: the endpoint's first answer was slow, or lost and repeated. Meanwhile the
// client has repeated its SYN, which got the node's address and another answer of another socket.
// The client goes on with the one that it gets first.
func TestPacketDSRLateAnswer(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		// open returns a client that has sent two SYNs, and the second as the endpoint got it.
		open := func(t *testing.T, port uint16) (*dsrConn, result) {
			empty[uint32, objects.TCDsrPath](t, d.first.m(objects.TCMapDsrPaths))
			c := d.conn(p, port)
			c.ask(t, d.first, "S")
			key := tupleOf(protoTCP, c.client, c.front)
			f := d.first.flowAt(t, key)
			f.Seen--
			must.Do(t, d.first.m(objects.TCMapFlows).Update(key, f, 0))
			c.sent = clientISN
			_, again := c.frame("S", nil)
			r := d.first.send(t, inEth0, again)
			if announced(r) || r.v.src.Addr() != p.tun0 {
				t.Fatalf("the repeated SYN: %s", verdictList(r.verdicts))
			}
			c.sent++
			return c, r
		}
		t.Run("First", func(t *testing.T) {
			for i, late := range []bool{false, true} {
				c, repeated := open(t, 40000+uint16(i))
				if late { // the client drops it: it has a connection already
					d.first.send(t, inTun0, back(repeated.v, "S.", nil)).wantPath(t, c.front, c.client)
				}
				c.answer(t, "S.")
				for range 2 {
					c.ask(t, d.first, ".")
					c.ask(t, d.first, "P.", []byte("data")...)
					c.answer(t, "P.", 'x')
				}
			}
		})
		t.Run("Second", func(t *testing.T) {
			c, repeated := open(t, 40010)
			answer := back(repeated.v, "S.", nil)
			answer.seq, answer.ack = 9000, repeated.v.seq+1
			d.first.send(t, inTun0, answer).wantPath(t, c.front, c.client)
			_, ack := c.frame(".", nil)
			ack.ack = 9001
			for range 2 {
				if r := d.first.send(t, inEth0, ack); r.v.src != repeated.v.src || announced(r) {
					t.Errorf("the client has accepted the second answer, and its ACK comes from %s", r.v.src)
				}
			}
			// An ACK of the first answer does not fit any more. The endpoint answers it.
			c.forge(t, ".", c.sent, serverISN+1)
			if r := d.first.send(t, inEth0, ack); r.v.src != repeated.v.src {
				t.Errorf("an ACK of another number has moved the connection to %s", r.v.src)
			}
		})
		t.Run("OtherService", func(t *testing.T) { // a Service with SNAT has no other socket
			snat := dsrService(p, endpoint(p.far, 8080, elsewhere))
			snat.DSR = false
			d.first.forget(t)
			d.first.serve(t, snat)
			c := d.first.newConn(ap(p.client, 40020), ap(p.externalIP, 80), ap(p.far, 8080), inTun0)
			syn := c.syn(t)
			if r := c.forge(t, ".", c.sent, 777); r.v.src != syn.v.src {
				t.Errorf("an ACK of another number comes from %s", r.v.src)
			}
		})
	})
}

// TestPacketDSRLongSYN: a SYN with data may have no room for the option.
func TestPacketDSRLongSYN(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		r := d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.externalIP, 80), flags: "S",
			payload: make([]byte, 1200)})
		if announced(r) || r.v.src.Addr() != p.tun0 {
			t.Errorf("the SYN comes from %s: %s", r.v.src, verdictList(r.verdicts))
		}
	})
}

// TestPacketDSRRings: flows of the two kinds do not end each other.
func TestPacketDSRRings(t *testing.T) {
	d := newDSRNodes(t, func(c *Config) { c.FlowTableSize = 256 })
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		udp := service(p, protoUDP, endpoint(p.far, 8080, elsewhere))
		d.first.serve(t, dsrService(p, endpoint(p.far, 8080, elsewhere)), udp)
		var honest []objects.TCTuple
		for port := range uint16(8) {
			c := d.conn(p, 40000+port)
			c.establish(t)
			datagram := frame{proto: protoUDP, src: c.client, dst: c.front}
			d.first.send(t, inTun0, back(d.first.send(t, inEth0, datagram).v, "", nil))
			honest = append(honest, tupleOf(protoTCP, c.client, c.front), tupleOf(protoUDP, c.client, c.front))
		}
		for _, kind := range []frame{{proto: protoTCP, flags: ".", seq: 8, ack: 1}, {proto: protoUDP}} {
			own := 0
			for port := range uint16(200) {
				kind.src, kind.dst = ap(p.client2, 1024+port), ap(p.externalIP, 80)
				d.first.send(t, inEth0, kind)
			}
			left := honest[:0:0]
			for _, key := range honest {
				err := d.first.m(objects.TCMapFlows).Lookup(key, &objects.TCFlow{})
				if err == nil {
					left = append(left, key)
				}
				if err != nil && key.Proto != kind.proto {
					t.Errorf("packets of protocol %d have ended a flow of protocol %d: %v", kind.proto, key.Proto, err)
				}
				if err == nil && key.Proto == kind.proto {
					own++
				}
			}
			honest = left
			t.Logf("of 8 flows of protocol %d, %d are left", kind.proto, own)
		}
	})
}

// TestPacketDSRLeftOver: a node whose secret was removed has flows of DSR replies. Connections
// go on, and a client's port that had one gets another connection.
func TestPacketDSRLeftOver(t *testing.T) {
	d := newDSRNodes(t)
	without := newPacketNode(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		without.forget(t)
		without.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		c := d.conn(p, 40000)
		c.establish(t)
		key := tupleOf(protoTCP, c.client, c.front)
		flow := d.first.flowAt(t, key)
		var reply objects.TCFlow
		back := tupleOf(protoTCP, c.server, c.client)
		must.Do(t, d.first.m(objects.TCMapFlows).Lookup(back, &reply))
		must.Do(t, without.m(objects.TCMapFlows).Put(key, flow))
		must.Do(t, without.m(objects.TCMapFlows).Put(back, reply))
		_, ask := c.frame("P.", []byte("data"))
		without.send(t, inEth0, ask).wantPath(t, c.client, c.server)
		_, syn := c.frame("S", nil)
		syn.seq, syn.ack = 1, 0
		r := without.send(t, inEth0, syn)
		if r.v.src.Addr() != p.tun0 || r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
			t.Errorf("the next SYN comes from %s: %s", r.v.src, verdictList(r.verdicts))
		}
	})
}

// TestPacketDSRSamePort uses a client's port again, for another address of the Service, when the
// first connection is over and while it is not.
func TestPacketDSRSamePort(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		c.establish(t)
		again := d.conn(p, 40000)
		again.front = ap(p.eth0, 30080)
		_, f := again.frame("S", nil)
		if r := d.first.send(t, inEth0, f); announced(r) || r.v.src.Addr() != p.tun0 {
			t.Fatalf("while the port is in use: %s", verdictList(r.verdicts))
		}
		d.first.forget(t) // the flow with the node's address
		c.ask(t, d.first, "F.")
		c.answer(t, "F.")
		c.ask(t, d.first, ".")
		again.sent += 1 << 20 // beyond the first connection: RFC 6191
		if r := again.ask(t, d.first, "S"); !announced(r) {
			t.Errorf("when the first connection is over: %s", verdictList(r.verdicts))
		}
		again.answer(t, "S.")
		again.ask(t, d.first, ".")
		again.ask(t, d.first, "P.", 'x')
		again.answer(t, "P.", 'y')
	})
}

// TestPacketDSRKeys rotates keys: a node that has the new key takes the old one too, and not a
// third one.
func TestPacketDSRKeys(t *testing.T) {
	old, rotated := newPacketNode(t, withKeys(dsrKeys[0])), newDSRHome(t, dsrKeys[1], dsrKeys[0])
	strange, without := newDSRHome(t, DSRKey{9}), newDSRHome(t)
	p := plans["IPv4"]
	old.serve(t, dsrService(p, endpoint(p.far, 8080, elsewhere)))
	for _, n := range []*packetNode{rotated, strange, without} {
		n.serve(t, dsrService(p, endpoint(p.far, 8080, here)))
	}
	sent := old.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.externalIP, 80), flags: "S", seq: 1})
	if r := rotated.sendRaw(t, inTun0, toDevice(rotated, sent.out)); r.code != actRedirect {
		t.Errorf("the previous key: code %d, verdicts %s", r.code, verdictList(r.verdicts))
	}
	if r := strange.sendRaw(t, inTun0, toDevice(strange, sent.out)); r.verdicts[objects.TCVerdictDROP_DSR] != 1 {
		t.Errorf("a strange key: code %d, verdicts %s", r.code, verdictList(r.verdicts))
	}
	if r := without.sendRaw(t, inTun0, toDevice(without, sent.out)); r.code == actDrop || len(r.out) != len(sent.out) {
		t.Errorf("no key: code %d, verdicts %s", r.code, verdictList(r.verdicts))
	}

	// The tag, by another program for SipHash-2-4.
	claim := make([]byte, 56)
	copy(claim, p.client.AsSlice())
	copy(claim[16:], p.far.AsSlice())
	copy(claim[32:], p.externalIP.AsSlice())
	for i, port := range []uint16{40000, 8080, 80} {
		binary.BigEndian.PutUint16(claim[48+2*i:], port)
	}
	claim[54], claim[55] = protoTCP, 4
	if got, want := binary.LittleEndian.Uint64(sent.out[14+28:]),
		siphash.Hash(binary.LittleEndian.Uint64(dsrKeys[0][:8]), binary.LittleEndian.Uint64(dsrKeys[0][8:]), claim); got != want {
		t.Errorf("tag %#x, want %#x", got, want)
	}
}

// BenchmarkPacketDSR compares the two ways to an endpoint on another node, at the node that gets
// the packets and at the endpoint's node.
func BenchmarkPacketDSR(b *testing.B) {
	d := newDSRNodes(b, withDSRPort)
	empty := func(p *plan) *packetCase {
		return &packetCase{name: "empty program", code: actNext,
			frame: frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.eth0, 22), flags: "P.", payload: []byte{0}}}
	}
	// open establishes a connection of a port.
	open := func(p *plan, port uint16) *dsrConn {
		c := d.conn(p, port)
		for _, flags := range []string{"S", "<S.", "."} {
			hook, f := c.frame(flags, nil)
			if flags == "<S." {
				d.home.send(b, inPod1, f)
			} else {
				d.pass(b, d.home, d.first.send(b, hook, f))
			}
			c.count(f, flags == "<S.")
		}
		return c
	}
	first := func(p *plan) frame {
		return frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.externalIP, 80), flags: "S", payload: []byte{0}}
	}
	// byGUE is the connection of another Service, to another endpoint: its packets travel in datagrams.
	byGUE := func(p *plan) (*intent.ServicePort, frame) {
		sp := dsrService(p, endpoint(p.far2, 8080, elsewhere))
		sp.ID.Service.Name = "gue"
		for i := range sp.Frontends {
			sp.Frontends[i].Port += 2
		}
		d.first.carry(b, p.far2, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		return sp, frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.externalIP, 82), flags: "P.", payload: []byte{0}}
	}
	b.Run("receiving", func(b *testing.B) {
		benchPackets(b, d.first, func(b *testing.B, p *plan) []*packetCase {
			d.serve(b, p)
			_, direct := open(p, 40000).frame("P.", []byte{0})
			snat := dsrService(p, endpoint(p.far, 8080, elsewhere))
			snat.ID.Service.Name, snat.DSR = "snat", false
			for i := range snat.Frontends {
				if f := &snat.Frontends[i]; f.Addr.IsValid() {
					f.Addr = f.Addr.Next()
				}
				snat.Frontends[i].Port += 1
			}
			gue, datagram := byGUE(p)
			d.first.serve(b, dsrService(p, endpoint(p.far, 8080, elsewhere)), snat, gue)
			firstGUE := first(p)
			firstGUE.dst = datagram.dst
			d.first.send(b, inEth0, datagram)
			other := d.first.openTo(b, ap(p.client, 40000), ap(p.externalIP.Next(), 81), ap(p.far, 8080), inTun0)
			_, in := other.frame("P.", []byte{0})
			_, out := other.frame("<P.", []byte{0})
			firstSNAT := first(p)
			firstSNAT.dst = ap(p.externalIP.Next(), 81)
			return []*packetCase{empty(p),
				{name: "SNAT, known flow", hook: inEth0, code: actRedirect, frame: in},
				{name: "SNAT, known flow (A/A)", hook: inEth0, code: actRedirect, frame: in},
				{name: "SNAT, reply", hook: inTun0, code: actRedirect, frame: out},
				{name: "DSR, known flow", hook: inEth0, code: actRedirect, frame: direct},
				{name: "SNAT, first packet", hook: inEth0, code: actRedirect, frame: firstSNAT, fresh: true},
				{name: "DSR, first packet, with the option", hook: inEth0, code: actRedirect, frame: first(p), fresh: true, grows: true},
				{name: "DSR, known flow, in a datagram", hook: inEth0, code: actRedirect, frame: datagram, grows: true},
				{name: "DSR, first packet, in a datagram", hook: inEth0, code: actRedirect, frame: firstGUE, fresh: true, grows: true},
			}
		})
	})
	b.Run("endpoint's", func(b *testing.B) {
		benchPackets(b, d.home, func(b *testing.B, p *plan) []*packetCase {
			d.serve(b, p)
			d.first.carry(b, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
			c := open(p, 40000)
			_, in := c.frame("P.", []byte{0})
			in.dst = c.server
			_, out := c.frame("<P.", []byte{0})
			_, plain := c.frame("P.", []byte{0})
			sent := d.first.send(b, inEth0, plain)
			d.first.carry(b, p.far, objects.TCDsrEncapsulationKindDSR_BY_OPTION)
			datagram := frame{proto: protoUDP, src: sent.v.src, dst: sent.v.dst, payload: sent.v.payload}
			passing := in
			passing.src = ap(p.far2, 1000)
			return []*packetCase{empty(p),
				{name: "pass-through to the pod, as with SNAT", hook: inTun0, code: actRedirect, frame: passing},
				{name: "of a DSR flow, to the pod", hook: inTun0, code: actRedirect, frame: in},
				{name: "of a DSR flow, out of a datagram", hook: inTun0, code: actRedirect, frame: datagram, grows: true},
				{name: "reply of a DSR flow", hook: inPod1, code: actRedirect, frame: out},
			}
		})
	})
}

// TestPacketDSRFalseSlice has an EndpointSlice, which may be false, name the receiving node as that
// of the pod: netfilter here enforces nothing for a pod of another node.
func TestPacketDSRFalseSlice(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		c.establish(t)
		d.first.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.far} })
		c.later(t, d.first, 1)
		c.ask(t, d.first, "P.", 'x')
		c.answer(t, "P.", 'y')
	})
}
