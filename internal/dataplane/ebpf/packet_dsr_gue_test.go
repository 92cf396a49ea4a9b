package ebpf

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/dchest/siphash"

	"spillway.dev/spillway/internal/dataplane/ebpf/dsrprobe"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

const gueMTU = 1390

func withDSRPort(c *Config) { c.DSRPort = DefaultDSRPort }

// carry says at a node how packets reach the endpoint elsewhere.
func (n *packetNode) carry(t testing.TB, to netip.Addr, kind objects.TCDsrEncapsulationKind) {
	must.Do(t, n.m(objects.TCMapDsrEncapsulations).Put(objects.AddrKey(to), objects.TCDsrEncapsulation{Kind: uint8(kind), Mtu: gueMTU}))
}

// unpack checks a datagram between nodes, and returns the frame that it would be without.
func (c *dsrConn) unpack(t *testing.T, r result) []byte {
	t.Helper()
	if r.v == nil || r.v.proto != protoUDP || r.v.dst != ap(c.p.far, DefaultDSRPort) || r.v.src.Addr() != c.p.tun0 {
		t.Fatalf("code %d, verdicts %s: sent %+v, want a datagram from %s to %s", r.code, verdictList(r.verdicts), r.v, c.p.tun0, c.p.far)
	}
	room := dsrprobe.Room(c.p.eth0.Is4())
	inside := append(bytes.Clone(r.out[:14]), r.out[14+room:]...)
	if err := checkSums(inside); err != nil {
		t.Errorf("the packet inside: %v", err)
	}
	return inside
}

// askGUE sends the client's next packet, which travels within a datagram.
func (c *dsrConn) askGUE(t *testing.T, by *packetNode, flags string, payload ...byte) result {
	t.Helper()
	hook, f := c.frame(flags, payload)
	sent := by.sendRaw(t, hook, f.bytes(by, hook.iface))
	if sent.verdicts[objects.TCVerdictDSR_ENCAPSULATED] != 1 {
		t.Fatalf("code %d, verdicts %s", sent.code, verdictList(sent.verdicts))
	}
	inside, err := decode(c.unpack(t, sent))
	must.Do(t, err)
	if inside.src != c.client || inside.dst != c.server || inside.ttl != 63 {
		t.Fatalf("the packet inside is from %s to %s, TTL %d", inside.src, inside.dst, inside.ttl)
	}
	got := c.d.pass(t, c.d.home, sent)
	got.wantPath(t, c.client, c.server)
	plain := f.bytes(by, hook.iface)
	if got.code != actRedirect || !bytes.Equal(got.v.ethDst, podMAC("pod1")) || len(got.out) != len(plain) || got.v.flags != flags ||
		!bytes.Equal(got.v.payload, payload) {
		t.Fatalf("%q: code %d, verdicts %s, the endpoint gets %x, want %x but for addresses", flags, got.code,
			verdictList(got.verdicts), got.out, plain)
	}
	c.count(f, false)
	return sent
}

// TestPacketDSRGUE has packets travel within datagrams, to an endpoint's node that may forget the
// connection.
func TestPacketDSRGUE(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		for _, n := range []*packetNode{d.first, d.second} {
			n.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		}
		c := d.conn(p, 40000)
		if syn := c.askGUE(t, d.first, "S"); !announced(syn) {
			t.Error("the SYN is not counted")
		}
		c.answer(t, "S.")
		c.askGUE(t, d.first, ".")
		for range 3 {
			if r := c.askGUE(t, d.first, "P.", []byte("data")...); announced(r) {
				t.Error("a later packet counts as the first")
			}
			c.answer(t, "P.", 'a')
		}
		c.askGUE(t, d.second, "P.", 'x') // a connection that this node does not know
		d.home.forget(t)
		c.askGUE(t, d.second, "P.", 'x')
		c.answer(t, "P.", 'y')

		// The network has changed: neither end loses the connection.
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_OPTION)
		c.ask(t, d.first, "P.", 'x')
		c.answer(t, "P.", 'y')
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_NOTHING)
		c.ask(t, d.first, "P.", 'x')
		d.first.forget(t)
		c.ask(t, d.first, "P.", 'x')

		other := d.conn(p, 40001)
		hook, f := other.frame("S", nil)
		r := d.first.send(t, hook, f)
		if r.v.src.Addr() != p.tun0 || r.v.dst != c.server || announced(r) {
			t.Errorf("without an encapsulation, a SYN goes from %s to %s", r.v.src, r.v.dst)
		}
	})
}

// TestPacketDSRWithoutPort: what an earlier agent with a port found out does not count.
func TestPacketDSRWithoutPort(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		for i, kind := range []objects.TCDsrEncapsulationKind{objects.TCDsrEncapsulationKindDSR_BY_GUE,
			objects.TCDsrEncapsulationKindDSR_BY_NOTHING} {
			d.first.carry(t, p.far, kind)
			if r := d.conn(p, 40000+uint16(i)).ask(t, d.first, "S"); !announced(r) {
				t.Errorf("encapsulation %d: verdicts %s", kind, verdictList(r.verdicts))
			}
		}
	})
}

// TestPacketDSRGUEFragment: a fragment of a flow travels as it is, and the packets after it do not.
func TestPacketDSRGUEFragment(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	for _, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			p := plans[name]
			d.serveUDP(t, p)
			d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
			u := d.udp(p, 40000)
			d.home.sendRaw(t, inTun0, toDevice(d.home, d.first.sendRaw(t, inEth0, u.f.bytes(d.first, "eth0")).out))
			long := u.f
			long.payload = make([]byte, 1000)
			for _, fragment := range long.fragments(d.first, "eth0", 512) {
				sent := d.first.sendRaw(t, inEth0, fragment)
				if r := sent; r.code != actRedirect || r.v.dst.Addr() != p.far || len(r.out) != len(fragment) ||
					r.verdicts[objects.TCVerdictDSR_ENCAPSULATED] > 0 {
					t.Errorf("a fragment: code %d, verdicts %s", r.code, verdictList(r.verdicts))
				}
				// The endpoint's node knows the later one by the first.
				if r := d.home.sendRaw(t, inTun0, toDevice(d.home, sent.out)); r.code != actRedirect || r.v.dst.Addr() != p.far {
					t.Errorf("a fragment at the endpoint's node: code %d, verdicts %s", r.code, verdictList(r.verdicts))
				}
				if r := d.first.sendRaw(t, inEth0, u.f.bytes(d.first, "eth0")); r.verdicts[objects.TCVerdictDSR_ENCAPSULATED] != 1 {
					t.Errorf("after a fragment: code %d, verdicts %s", r.code, verdictList(r.verdicts))
				}
			}
		})
	}
}

// TestPacketDSRGUECongestion: a datagram says that switches must drop, not mark, while its packet may
// say the contrary.
func TestPacketDSRGUECongestion(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		c := d.conn(p, 40000)
		hook, f := c.frame("S", nil)
		in := f.bytes(d.first, hook.iface)
		const class = 46<<2 | 2 // DSCP 46, and the sender can be told of congestion
		if p.eth0.Is4() {
			in[15] = class
			fixIPv4Sum(in)
		} else {
			binary.BigEndian.PutUint16(in[14:], 0x6000|class<<4)
		}
		sent := d.first.sendRaw(t, hook, in)
		inside := c.unpack(t, sent)
		tos := func(b []byte) byte {
			if p.eth0.Is4() {
				return b[15]
			}
			return b[14]<<4 | b[15]>>4
		}
		if inner, outer := tos(inside), tos(sent.out); inner&3 != 2 || outer != inner&^3 {
			t.Errorf("traffic class %#x inside %#x", inner, outer)
		}
	})
}

// TestPacketDSRGUETooBig: a client learns the length that fits within a datagram.
func TestPacketDSRGUETooBig(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	d.first.checksComplete = false // see TestPacketAnswers
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		c := d.conn(p, 40000)
		c.askGUE(t, d.first, "S")
		c.answer(t, "S.")
		c.askGUE(t, d.first, ".")
		room := dsrprobe.Room(p.eth0.Is4())
		fits := gueMTU - room - net4or6(p, 20, 40) - 20
		sent := c.askGUE(t, d.first, "P.", make([]byte, fits)...)
		if len(sent.out)-14 != gueMTU {
			t.Errorf("the longest packet has %d bytes, want %d", len(sent.out)-14, gueMTU)
		}
		for _, df := range []bool{true, false} {
			hook, f := c.frame("P.", make([]byte, fits+1))
			f.df = df
			r := d.first.send(t, hook, f)
			r.want(t, actRedirect, objects.TCVerdictANSWERED_TOO_BIG)
			if got := r.v.icmpWord & 0xffff; got != uint32(gueMTU-room) {
				t.Errorf("the client learns MTU %d, want %d", got, gueMTU-room)
			}
		}
	})
}

// TestPacketDSRGUEForged gives the endpoint's node datagrams that no node of the cluster sent. None
// may start a flow, or reach a pod with another source than the sender's.
func TestPacketDSRGUEForged(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		c := d.conn(p, 40000)
		hook, f := c.frame("S", nil)
		genuine := toDevice(d.home, d.first.sendRaw(t, hook, f.bytes(d.first, "eth0")).out)
		udp := 14 + net4or6(p, 20, 40)
		inner := 14 + dsrprobe.Room(p.eth0.Is4())
		tcp := inner + net4or6(p, 20, 40)
		// What the tag covers, and what says that there is a tag.
		for at := udp; at < tcp+4; at++ {
			switch {
			case at < udp+2, at >= udp+4 && at < udp+8: // source port, length, checksum
				continue
			case at >= inner && at < tcp-net4or6(p, 8, 32): // length, TTL: the network's
				continue
			}
			forged := bytes.Clone(genuine)
			forged[at] ^= 0x40
			r := d.home.sendRaw(t, inTun0, forged)
			if d.home.count(t, objects.TCMapFlows) > 0 {
				t.Fatalf("byte %d is forged, and there is a flow: %s", at-14, verdictList(r.verdicts))
			}
			dropped := r.code == actDrop && r.verdicts[objects.TCVerdictDROP_DSR] == 1
			if header := at < inner-net4or6(p, 14, 26); !dropped && !(header && bytes.Equal(r.out, forged)) {
				t.Errorf("byte %d is forged: code %d, verdicts %s", at-14, r.code, verdictList(r.verdicts))
			}
		}
		for name, change := range map[string]func(b []byte) []byte{
			"to another endpoint": func(b []byte) []byte { b[udp-1] ^= 3; return b },
			"a fragment inside": func(b []byte) []byte {
				b[inner+net4or6(p, 6, 0)] ^= byte(net4or6(p, 0x20, 0))
				b[inner+6] ^= byte(net4or6(p, 0, 44^6))
				return b
			},
			"ICMP inside":       func(b []byte) []byte { b[inner+net4or6(p, 9, 6)] = byte(net4or6(p, protoICMP, protoICMPv6)); return b },
			"cut off":           func(b []byte) []byte { return b[:tcp+2] },
			"nothing inside":    func(b []byte) []byte { return b[:inner] },
			"cut in the option": func(b []byte) []byte { return b[:inner-3] },
			"another family":    func(b []byte) []byte { b[inner] ^= 0x20; return b },
		} {
			forged := change(bytes.Clone(genuine))
			fixIPv4Length(p, forged)
			r := d.home.sendRaw(t, inTun0, forged)
			if r.code == actRedirect || d.home.count(t, objects.TCMapFlows) > 0 || !(r.code == actDrop || bytes.Equal(r.out, forged)) {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		// It is for a pod elsewhere: not this node's business.
		if r := d.second.sendRaw(t, inTun0, toDevice(d.second, genuine)); r.code == actDrop || len(r.out) != len(genuine) {
			t.Errorf("a node on the way: code %d, verdicts %s", r.code, verdictList(r.verdicts))
		}
		// Pods may use the port, also with each other.
		pods := frame{proto: protoUDP, src: ap(p.client, 5), dst: ap(p.far, DefaultDSRPort),
			payload: []byte("not the header of GUE, and longer than all headers are: ................................................")}
		if r := d.home.send(t, inTun0, pods); r.code == actDrop || !bytes.Equal(r.v.payload, pods.payload) {
			t.Errorf("a datagram of something else: code %d, verdicts %s", r.code, verdictList(r.verdicts))
		}
		if r := d.home.sendRaw(t, inTun0, genuine); r.code != actRedirect {
			t.Errorf("the genuine packet: code %d, verdicts %s", r.code, verdictList(r.verdicts))
		}
	})
}

// fixIPv4Length corrects the lengths of a frame that was cut.
func fixIPv4Length(p *plan, b []byte) {
	if p.eth0.Is4() {
		binary.BigEndian.PutUint16(b[16:], uint16(len(b)-14))
		fixIPv4Sum(b)
	} else {
		binary.BigEndian.PutUint16(b[18:], uint16(len(b)-54))
	}
}

// probeFrames are the two kinds of probes, as an agent sends them.
func probeFrames(p *plan, key DSRKey) map[string]frame {
	from, to := ap(p.farGW, 45000), ap(p.far, DefaultDSRPort)
	claim := make([]byte, 56) // without a client
	copy(claim[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(claim[50:], to.Port())
	claim[54], claim[55] = protoUDP, byte(net4or6(p, 4, 6))
	said := make([]byte, net4or6(p, 16, 28))
	said[0], said[1] = byte(net4or6(p, 0x9e, 0x1e)), byte(net4or6(p, 16, 26))
	binary.LittleEndian.PutUint64(said[len(said)-8:],
		siphash.Hash(binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:]), claim))

	plain := frame{proto: protoUDP, src: from, dst: to, payload: []byte("twelve bytes")}
	byOption, byGUE := plain, plain
	if p.eth0.Is4() {
		byOption.options = said
	} else {
		byOption.ext = []extension{{extDestOpts, append(slices.Clone(said), 1, 0)}}
	}
	inside := plain.bytes(&packetNode{mac: map[string]net.HardwareAddr{"tun0": make(net.HardwareAddr, 6)}}, "tun0")[14:]
	byGUE.payload = append(append([]byte{byte(len(said) / 4), byte(net4or6(p, 4, 41)), 0, 0}, said...), inside...)
	return map[string]frame{"option": byOption, "gue": byGUE}
}

func extLen(f frame) (n int) {
	for _, e := range f.ext {
		n += 2 + len(e.body)
	}
	return n
}

// TestPacketDSRProbe has the endpoint's node answer the probes of another node's agent, and nothing
// that only looks like one.
func TestPacketDSRProbe(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		for name, f := range probeFrames(p, dsrKeys[0]) {
			for _, src := range []netip.AddrPort{f.src, ap(p.router, 61234)} { // masqueraded
				f.src = src
				r := d.home.send(t, inTun0, f)
				r.want(t, actRedirect, objects.TCVerdictDSR_PROBED)
				r.wantPath(t, f.dst, f.src)
				if !bytes.Equal(r.v.payload, f.payload) || len(r.v.ip) != len(f.bytes(d.home, "tun0"))-14-len(f.options)-extLen(f) ||
					!bytes.Equal(r.v.ethSrc, d.home.mac["tun0"]) {
					t.Errorf("%s: the answer is %q from %s", name, r.v.payload, r.v.ethSrc)
				}
			}
			if r := d.second.send(t, inTun0, f); r.code == actRedirect || r.verdicts[objects.TCVerdictDSR_PROBED] > 0 {
				t.Errorf("%s: another node answers, code %d", name, r.code)
			}
		}
		for name, f := range probeFrames(p, DSRKey{9}) {
			if r := d.home.sendRaw(t, inTun0, f.bytes(d.home, "tun0")); r.code != actDrop || r.verdicts[objects.TCVerdictDROP_DSR] != 1 {
				t.Errorf("%s with another key: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		for name, f := range probeFrames(p, dsrKeys[0]) {
			f.src = ap(p.eth0, 45000) // the node's own: an answer to it would come back
			if r := d.home.sendRaw(t, inTun0, f.bytes(d.home, "tun0")); r.code != actDrop || r.verdicts[objects.TCVerdictDROP_SOURCE] != 1 {
				t.Errorf("%s with the node's address: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		if n := d.home.count(t, objects.TCMapFlows); n > 0 {
			t.Errorf("probes have made %d flows", n)
		}
	})
}
