package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsrprobe"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/test/must"
)

// The endpoint's node reads a packet with an option or within a datagram, and changes it. What these
// tests compare is only right if it knows the packet after the change.

// through sends a client's frame by the first node to the endpoint's.
func (d *dsrNodes) through(t *testing.T, f frame) result {
	t.Helper()
	return d.pass(t, d.home, d.first.send(t, inEth0, f))
}

// wantEndpointGets fails unless a pod gets the client's frame but for its destination and one hop.
func (d *dsrNodes) wantEndpointGets(t *testing.T, p *plan, f frame, r result) {
	t.Helper()
	f.dst, f.ttl = ap(p.far, 8080), 63
	if want := f.bytes(d.home, "pod1")[14:]; r.code != actRedirect || !bytes.Equal(r.out[14:], want) {
		t.Fatalf("code %d, verdicts %s: the endpoint gets\n     %x\nwant %x", r.code, verdictList(r.verdicts), r.out[14:], want)
	}
}

// TestPacketDSRState: the endpoint's node has the state of a connection as if it had received the packets
// first: the window scale of the SYN, and the numbers after the data.
func TestPacketDSRState(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, byGUE bool) {
		c := d.conn(p, 40000)
		state := func() objects.TCTcpSide { return d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)).Tcp }
		say := func(flags string, pad int, payload ...byte) {
			t.Helper()
			_, f := c.frame(flags, payload)
			f.scale = 8
			sent := d.first.send(t, inEth0, f)
			padded := append(toDevice(d.home, sent.out), make([]byte, pad)...)
			r := d.home.sendRaw(t, inTun0, padded)
			r.out = r.out[:len(r.out)-pad]
			d.wantEndpointGets(t, p, f, r)
			c.count(f, false)
		}
		say("S", 3)
		if s := state(); s.Scale != 7 || s.FirstScale != 7 || s.Isn != c.sent-1 || s.End != c.sent || s.Window != 1000 {
			t.Errorf("after the SYN: %+v, want scale 7, end %d", s, c.sent)
		}
		_, f := c.frame("<S.", nil)
		f.scale = 4
		d.home.send(t, inPod1, f).wantPath(t, c.front, c.client)
		c.count(f, true)
		say(".", 3)
		for _, size := range []int{0, 1, 100, 500} {
			say("P.", 3, make([]byte, size)...)
			if s := state(); byGUE && (s.End != c.sent || s.Window != 1000<<7) {
				t.Errorf("after %d bytes: %+v, want end %d", size, s, c.sent)
			}
		}
		say("F.", 0)
		c.answer(t, "F.")
		say(".", 0)
		if f := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)); f.State != uint8(objects.TCFlowStateFLOW_CLOSED) {
			t.Errorf("after both FINs, the flow has state %d", f.State)
		}
	})
}

// withIPOptions returns the frame with IPv4 options, or with an extension header.
func withIPOptions(p *plan, f frame) frame {
	if p.eth0.Is4() {
		f.options = []byte{7, 7, 4, 0, 0, 0, 0} // record route
	} else {
		f.ext = []extension{{extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
	}
	return f
}

// TestPacketDSRClientOptions: packets of a DSR flow may have IP options of their own. The endpoint gets
// them, and its node finds the TCP header behind them.
func TestPacketDSRClientOptions(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSREncapsulation(t, d, func(t *testing.T, p *plan, byGUE bool) {
		c := d.conn(p, 40000)
		c.says(t, d.first, byGUE, "S")
		c.answer(t, "S.")
		c.says(t, d.first, byGUE, ".")
		_, f := c.frame("P.", []byte("data"))
		f = withIPOptions(p, f)
		d.wantEndpointGets(t, p, f, d.through(t, f))
		c.count(f, false)
		if s := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)).Tcp; s.End != c.sent {
			t.Errorf("end %d, want %d", s.End, c.sent)
		}
		c.answer(t, "P.", 'a')
	})
	for name, kind := range dsrEncapsulations {
		for _, family := range []string{"IPv4", "IPv6"} {
			t.Run("UDP/"+name+"/"+family, func(t *testing.T) {
				p := plans[family]
				d.serveUDP(t, p)
				d.first.carry(t, p.far, kind)
				u := d.udp(p, 40000)
				d.through(t, u.f)
				f := withIPOptions(p, u.f)
				d.wantEndpointGets(t, p, f, d.through(t, f))
			})
		}
	}
}

// behindStack makes the endpoint's node route packets to its pod, as it does while it does not know the
// pod's MAC address.
func (d *dsrNodes) behindStack(t *testing.T, p *plan, mtu uint32) {
	pods := func(mac bool) {
		pod := attach.Pod{Ifindex: d.home.ifindex["pod1"]}
		if mac {
			pod.PodMAC, pod.HostMAC = podMAC("pod1"), d.home.mac["pod1"]
		}
		d.home.node.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{p.far: pod}})
	}
	pods(false)
	t.Cleanup(func() { pods(true) })
	for key, f := range objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, d.home.m(objects.TCMapFlows)) {
		f.NextHopSeen = 0
		must.Do(t, d.home.m(objects.TCMapFlows).Put(key, f))
	}
	d.home.setRouteMTUs(t, "pod1", map[string]uint32{netip.PrefixFrom(p.far, p.far.BitLen()).String(): mtu})
}

// eachDSRAnswer has a flow of each kind that the endpoint's node knows, and must route.
func eachDSRAnswer(t *testing.T, mtu uint32, f func(t *testing.T, d *dsrNodes, p *plan, next frame)) {
	d := newDSRNodes(t, withDSRPort)
	d.first.checksComplete, d.home.checksComplete = false, false // see TestPacketAnswers
	for _, family := range []string{"IPv4", "IPv6"} {
		for name, kind := range dsrEncapsulations {
			for _, proto := range transports {
				if proto == protoTCP && kind == objects.TCDsrEncapsulationKindDSR_BY_OPTION {
					continue // only its SYN has the option
				}
				t.Run(fmt.Sprintf("%s/%s/%d", family, name, proto), func(t *testing.T) {
					p := plans[family]
					d.serve(t, p)
					if proto == protoUDP {
						d.serveUDP(t, p)
					}
					d.first.carry(t, p.far, kind)
					c := d.conn(p, 40000)
					next := d.udp(p, 40000).f
					if proto == protoTCP {
						c.askGUE(t, d.first, "S")
						c.answer(t, "S.")
						c.askGUE(t, d.first, ".")
						_, next = c.frame("P.", nil)
					} else {
						d.through(t, next)
					}
					d.behindStack(t, p, mtu)
					f(t, d, p, next)
				})
			}
		}
	}
}

// wantClientLearns fails unless the endpoint's node answers the client's frame with an ICMP error, which
// quotes the packet as it was for the endpoint. The first node makes that the client's own packet.
func (d *dsrNodes) wantClientLearns(t *testing.T, p *plan, f frame, k errorKind, verdict objects.TCVerdict) {
	t.Helper()
	r := d.through(t, f)
	r.want(t, actRedirect, verdict)
	r.wantPath(t, ap(f.dst.Addr(), 0), ap(f.src.Addr(), 0))
	wantHeader(t, r.v, k, p)
	if !bytes.Equal(r.v.ethDst, []byte{2, 0, 0, 0, 9, 9}) && !bytes.Equal(r.v.ethSrc, d.home.mac["tun0"]) {
		t.Errorf("the answer goes from %s to %s", r.v.ethSrc, r.v.ethDst)
	}
	seen := f
	seen.dst, seen.ttl = ap(p.far, 8080), max(f.ttl, 64)-1
	if f.ttl > 0 {
		seen.ttl = f.ttl - 1
	}
	if want := seen.bytes(d.home, "tun0")[14:][:net4or6(p, 28, 48)]; !bytes.Equal(r.v.quoted, want) {
		t.Errorf("the answer quotes\n     %x\nwant %x", r.v.quoted, want)
	}
	back := d.first.sendRaw(t, inTun0, toDevice(d.first, r.out))
	back.want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	quotesLike(t, back.v.quoted, f.bytes(d.first, "eth0"))
}

// TestPacketDSRTooBig: the length and the "don't fragment" flag that count are those of the packet without
// what the first node added.
func TestPacketDSRTooBig(t *testing.T) {
	const mtu = 900
	eachDSRAnswer(t, mtu, func(t *testing.T, d *dsrNodes, p *plan, next frame) {
		fits := d.first.lengthen(next, mtu)
		r := d.through(t, fits)
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		fits.dst, fits.ttl = ap(p.far, 8080), 62
		if !bytes.Equal(r.out[14:], fits.bytes(d.home, "pod1")[14:]) {
			t.Errorf("the endpoint gets %x", r.out[14:])
		}
		long := d.first.lengthen(next, mtu+1)
		d.wantClientLearns(t, p, long, errorKind{"TooBig", 3, 2, 4, 0, mtu}, objects.TCVerdictANSWERED_TOO_BIG)
		if long.df = false; p.eth0.Is4() {
			d.through(t, long).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		}
	})
}

// TestPacketDSRHops: the hops that count are those of the client's packet.
func TestPacketDSRHops(t *testing.T) {
	eachDSRAnswer(t, mtuEth0, func(t *testing.T, d *dsrNodes, p *plan, next frame) {
		next.payload, next.df = []byte("data"), true
		for ttl, want := range map[uint8]uint8{3: 1, 64: 62, 255: 253} {
			next.ttl = ttl
			r := d.through(t, next) // send checks the sum of the header
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			if r.v.ttl != want {
				t.Errorf("TTL %d becomes %d, want %d", ttl, r.v.ttl, want)
			}
		}
		next.ttl = 2
		d.wantClientLearns(t, p, next, errorKind{"TimeExceeded", 11, 3, 0, 0, 0}, objects.TCVerdictANSWERED_TTL)
	})
}

// TestPacketDSRNotForHere: a node reads no option and no datagram of a packet for a Service. It answers
// the packet itself, or nothing if it has IP options.
func TestPacketDSRNotForHere(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	d.first.checksComplete = false // see TestPacketAnswers
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		_, f := c.frame("S", nil)
		said := dsrOption(p)
		d.first.serve(t, service(p, protoTCP), service(p, protoUDP))
		for _, proto := range transports {
			f.proto = proto
			marked := said(f)
			r := d.first.send(t, inEth0, marked)
			if p.eth0.Is4() || proto == protoTCP {
				r.want(t, actDrop, objects.TCVerdictDROP_REJECTED_SILENT)
				continue
			}
			d.first.wantAnswer(t, inEth0, marked, r, objects.TCVerdictREJECTED_ICMP)
			if want := marked.bytes(d.first, "eth0")[14:][:40+32+8]; !bytes.Equal(r.v.quoted, want) {
				t.Errorf("the answer quotes\n     %x\nwant %x", r.v.quoted, want)
			}
		}
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		d.serve(t, p)
		sent := d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, 40001), dst: ap(p.externalIP, 80), flags: "S"})
		sp := service(p, protoUDP)
		sp.Frontends[0].Port = DefaultDSRPort
		d.first.serve(t, sp)
		datagram := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, DefaultDSRPort),
			payload: sent.out[14+net4or6(p, 20, 40)+8:]}
		r := d.first.send(t, inEth0, datagram)
		d.first.wantAnswer(t, inEth0, datagram, r, objects.TCVerdictREJECTED_ICMP)
		if want := datagram.bytes(d.first, "eth0")[14:][:net4or6(p, 28, 48)]; !bytes.Equal(r.v.quoted, want) {
			t.Errorf("the answer quotes\n     %x\nwant %x", r.v.quoted, want)
		}
	})
}

// dsrOption adds an option that no node of the cluster wrote.
func dsrOption(p *plan) func(frame) frame {
	return func(f frame) frame {
		if p.eth0.Is4() {
			f.options = append([]byte{0x9e, 16}, make([]byte, 14)...)
		} else {
			f.ext = []extension{{extDestOpts, append(append([]byte{0x1e, 26}, make([]byte, 26)...), 1, 0)}}
		}
		return f
	}
}

// TestPacketDSRForgedOption: a datagram with an option that this node does not read leaves the flow of
// its client as it is: any host can send one in the client's name.
func TestPacketDSRForgedOption(t *testing.T) {
	d := newDSRNodes(t)
	for _, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			p := plans[name]
			d.serveUDP(t, p)
			sp, closed := dsrServiceOf(p, protoUDP, endpoint(p.far, 8080, elsewhere)), service(p, protoTCP)
			d.first.serve(t, sp, closed)
			u := d.udp(p, 40000)
			u.ask(t, d.first)
			key := tupleOf(protoUDP, u.f.src, u.f.dst)
			before := d.first.flowAt(t, key)
			// An answer to another packet is written where a node writes what an option says.
			d.first.checksComplete = false // see TestPacketAnswers
			d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client2, 1), dst: ap(p.clusterIP, 80), flags: "S"}).
				want(t, actRedirect, objects.TCVerdictREJECTED_RST)
			d.first.send(t, inEth0, dsrOption(p)(u.f))
			if after := d.first.flowAt(t, key); after.Slot != before.Slot || after.Flags != before.Flags {
				t.Errorf("the flow was %+v, and is %+v", before, after)
			}
			u.ask(t, d.first)
		})
	}
}

// cutIPv4 fragments a frame as a router does: each part has the options (RFC 791, copied flag).
func cutIPv4(b []byte, size int) (first, later []byte) {
	header := 14 + int(b[14]&15)*4
	first, later = bytes.Clone(b[:header+size]), append(bytes.Clone(b[:header]), b[header+size:]...)
	first[20] |= 0x20
	binary.BigEndian.PutUint16(later[20:], uint16(size/8))
	for _, f := range [][]byte{first, later} {
		binary.BigEndian.PutUint16(f[16:], uint16(len(f)-14))
		fixIPv4Sum(f)
	}
	return first, later
}

// TestPacketDSRFragmentedOnTheWay: a router may fragment a datagram with an option. The option of the
// first part is removed. The other parts, which have no ports, are left to the stack.
func TestPacketDSRFragmentedOnTheWay(t *testing.T) {
	d, p := newDSRNodes(t), plans["IPv4"]
	d.serveUDP(t, p)
	u := d.udp(p, 40000)
	u.f.payload = bytes.Repeat([]byte("question"), 100)
	sent := d.first.send(t, inEth0, u.f)
	if !announced(sent) {
		t.Fatalf("verdicts %s", verdictList(sent.verdicts))
	}
	first, later := cutIPv4(toDevice(d.home, sent.out), 400)
	r := d.home.sendRaw(t, inTun0, first)
	if r.code != actRedirect || r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
		t.Fatalf("the first part: code %d, verdicts %s", r.code, verdictList(r.verdicts))
	}
	u.f.ttl, u.f.dst = 63, ap(p.far, 8080)
	if want := u.f.fragments(d.home, "pod1", 400)[0]; !bytes.Equal(r.out[14:], want[14:]) {
		t.Errorf("the endpoint gets\n     %x\nwant %x", r.out[14:], want[14:])
	}
	if r := d.home.sendRaw(t, inTun0, later); r.code != actNext || !bytes.Equal(r.out, later) {
		t.Errorf("the other part: code %d, verdicts %s", r.code, verdictList(r.verdicts))
	}
}

// TestPacketDSRMalformedInside gives the endpoint's node datagrams with a true tag and a packet inside
// that is broken. None may reach the pod, or change the flow.
func TestPacketDSRMalformedInside(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		c := d.conn(p, 40000)
		c.askGUE(t, d.first, "S")
		c.answer(t, "S.")
		c.askGUE(t, d.first, ".")
		_, f := c.frame("P.", []byte("data"))
		genuine := toDevice(d.home, d.first.send(t, inEth0, f).out)
		ip := 14 + dsrprobe.Room(p.eth0.Is4())
		tcp := ip + net4or6(p, 20, 40)
		length := ip + net4or6(p, 2, 4)
		before := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front))
		for name, change := range map[string]func(b []byte){
			"longer than the datagram":    func(b []byte) { binary.BigEndian.PutUint16(b[length:], binary.BigEndian.Uint16(b[length:])+1) },
			"shorter than its header":     func(b []byte) { binary.BigEndian.PutUint16(b[length:], uint16(net4or6(p, 19, 7))) },
			"shorter than the TCP header": func(b []byte) { binary.BigEndian.PutUint16(b[length:], uint16(net4or6(p, 39, 19))) },
			"a short TCP header":          func(b []byte) { b[tcp+12] = 4 << 4 },
			"a long TCP header":           func(b []byte) { b[tcp+12] = 15 << 4 },
			"another version":             func(b []byte) { b[ip] ^= 0x10 },
			"a later fragment":            func(b []byte) { b[ip+net4or6(p, 7, 6)] = byte(net4or6(p, 1, 44)) },
			"another protocol":            func(b []byte) { b[ip+net4or6(p, 9, 6)] = 132 },
		} {
			b := bytes.Clone(genuine)
			change(b)
			if r := d.home.sendRaw(t, inTun0, b); r.code != actDrop || r.verdicts[objects.TCVerdictDROP_DSR] != 1 {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		if after := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)); after.Tcp != before.Tcp || after.State != before.State {
			t.Errorf("the flow was %+v, and is %+v", before, after)
		}
		// Behind the packet inside there may be padding.
		padded := append(bytes.Clone(genuine), 1, 2, 3)
		fixIPv4Length(p, padded)
		d.home.sendRaw(t, inTun0, padded).wantPath(t, c.client, c.server)
		c.count(f, false)
		if s := d.home.flowAt(t, tupleOf(protoTCP, c.client, c.front)).Tcp; s.End != c.sent {
			t.Errorf("after a padded packet: end %d, want %d", s.End, c.sent)
		}
		c.answer(t, "P.", 'a')
		c.askGUE(t, d.first, "P.", 'x')
	})
}
