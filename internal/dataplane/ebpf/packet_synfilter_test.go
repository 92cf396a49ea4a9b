package ebpf

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

// synLimit is how many SYNs a second the Service takes unproved.
const synLimit = 10

// synNode is a node with a Service that has a SYN filter.
type synNode struct {
	*packetNode
	p *plan
}

func eachSYNFilter(t *testing.T, run func(t *testing.T, n *synNode)) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.onThread(t, n.describe) // an agent runs
		sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
		sp.SYNLimit = synLimit
		n.serve(t, sp)
		run(t, &synNode{n, p})
	})
}

func (n *synNode) syn(from netip.Addr, port uint16) frame {
	return frame{proto: protoTCP, src: ap(from, port), dst: ap(n.p.clusterIP, 80), flags: "S", seq: 7000, scale: 8}
}

// inFlood calls f in a second in which the Service has got too many SYNs.
func (n *synNode) inFlood(t *testing.T, f func()) {
	t.Helper()
	for second := uint32(0); second != objects.BootSeconds(); { // until all are of one second
		second = objects.BootSeconds()
		for i := range 2 * synLimit {
			n.send(t, xdpEth0, n.syn(n.p.router, uint16(1000+i)))
		}
		f()
	}
}

// flood returns what happens to a SYN in a flood.
func (n *synNode) flood(t *testing.T, f frame) (r result) {
	t.Helper()
	n.inFlood(t, func() { r = n.send(t, xdpEth0, f) })
	return r
}

// proof is the RST of a client that has got the answer to its SYN.
func (n *synNode) proof(t *testing.T, syn frame) frame {
	t.Helper()
	r := n.flood(t, syn)
	r.want(t, xdpTx, objects.TCVerdictSYN_CHALLENGED)
	return frame{proto: protoTCP, src: syn.src, dst: syn.dst, flags: "R", seq: r.v.ack}
}

// TestPacketSYNFilter: in a flood, a client gets a connection after it has answered for it.
func TestPacketSYNFilter(t *testing.T) {
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		p := n.p
		for i := range synLimit / 2 {
			n.send(t, xdpEth0, n.syn(p.client, uint16(100+i))).want(t, xdpPass)
		}
		syn := n.syn(p.client, 40000)
		r := n.flood(t, syn)
		r.want(t, xdpTx, objects.TCVerdictSYN_CHALLENGED)
		r.wantPath(t, ap(p.clusterIP, 80), ap(p.client, 40000))
		if r.v.flags != "S." || r.v.ack == 7001 || len(r.out) > len(syn.bytes(n.packetNode, "eth0")) {
			t.Fatalf("the answer is %s with ack %d and %d bytes", r.v.flags, r.v.ack, len(r.out))
		}
		proof := n.proof(t, syn)
		if proof.seq != r.v.ack {
			t.Logf("the cookie has changed with its period")
		}
		for name, change := range map[string]func(*frame){
			"another number":  func(f *frame) { f.seq++ },
			"another client":  func(f *frame) { f.src = ap(p.router, 40000) },
			"another port":    func(f *frame) { f.src = ap(p.client, 40001) },
			"another Service": func(f *frame) { f.dst = ap(p.externalIP, 80) },
			"no RST":          func(f *frame) { f.flags = "." },
			"a SYN":           func(f *frame) { f.flags = "SR" },
		} {
			f := proof
			change(&f)
			if r := n.send(t, xdpEth0, f); r.code != xdpPass {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		n.flood(t, syn).want(t, xdpTx, objects.TCVerdictSYN_CHALLENGED)
		n.send(t, xdpEth0, proof).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
		n.flood(t, syn).want(t, xdpPass)
		n.flood(t, syn).want(t, xdpPass) // repeated
		for name, other := range map[string]frame{
			"another port": n.syn(p.client, 40001), "another client": n.syn(p.router, 40000), "a neighbor of the client": n.syn(p.client2, 40000),
		} {
			if r := n.flood(t, other); r.code != xdpTx {
				t.Errorf("%s, which has proved nothing: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		proof = n.proof(t, n.syn(p.client, 40002))
		proof.flags, proof.ack = "R.", 7001 // as lwIP does
		n.send(t, xdpEth0, proof).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
		n.flood(t, n.syn(p.client, 40002)).want(t, xdpPass)
	})
}

// TestPacketSYNFilterForgedClient: a flood in the name of a client, and of its /64, does not use up
// what the client has proved, and does not pass for it.
func TestPacketSYNFilterForgedClient(t *testing.T) {
	const many = 500
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		names := []netip.Addr{n.p.client, n.p.client2} // of IPv6, in one /64
		honest := n.syn(n.p.client, 40000)
		n.send(t, xdpEth0, n.proof(t, honest)).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
		var passed int // in the last call, whose SYNs are of one second
		var last result
		n.inFlood(t, func() {
			passed = 0
			for i := range uint16(many) {
				if n.send(t, xdpEth0, n.syn(names[i%2], 1000+i)).code != xdpTx {
					passed++
				}
			}
			guessed := honest
			guessed.seq = 99
			n.send(t, xdpEth0, guessed)
			last = n.send(t, xdpEth0, honest)
		})
		if passed > 0 {
			t.Errorf("%d of %d forged SYNs are not challenged", passed, many)
		}
		last.want(t, xdpPass)
	})
}

// TestPacketSYNFilterManyProofs: the client's host resets the answers to forged SYNs too. Its own
// connection is begun all the same. A proof takes the place of another one by chance alone.
func TestPacketSYNFilterManyProofs(t *testing.T) {
	const many, tries = 500, 5
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		honest := n.syn(n.p.client, 40000)
		for range tries {
			n.send(t, xdpEth0, n.proof(t, honest)).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
			for i := range uint16(many) {
				forged := n.syn(n.p.client, 1000+i)
				n.send(t, xdpEth0, n.proof(t, forged)).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
			}
			if n.flood(t, honest).code == xdpPass {
				return
			}
		}
		t.Errorf("%d times, %d proofs took the place of the client's", tries, many)
	})
}

// The neighbors of the node, and the sender of all frames.
var (
	senderMAC  = net.HardwareAddr{2, 0, 0, 0, 0xfe, 0xfe}
	gatewayMAC = net.HardwareAddr{2, 0, 0, 0, 9, 9}
	clientMAC  = net.HardwareAddr{2, 0, 0, 0, 8, 8}
)

// onLink returns addresses in the network of eth0.
func onLink(p *plan) (known, unknown netip.Addr) {
	if p.eth0.Is4() {
		return addr("192.0.2.50"), addr("192.0.2.51")
	}
	return addr("2001:db8:1::50"), addr("2001:db8:1::51")
}

func (n *synNode) setNeighbor(t *testing.T, a netip.Addr, mac net.HardwareAddr) {
	t.Helper()
	neighbor := &netlink.Neigh{LinkIndex: n.ifindex["eth0"], State: netlink.NUD_STALE, IP: a.AsSlice(), HardwareAddr: mac}
	n.onThread(t, func() error { return netlink.NeighSet(neighbor) })
	t.Cleanup(func() { n.onThread(t, func() error { return netlink.NeighDel(neighbor) }) })
}

// TestPacketSYNFilterNeighbor: the answer goes to the neighbor of the address, not to the sender of
// the SYN.
func TestPacketSYNFilterNeighbor(t *testing.T) {
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		known, _ := onLink(n.p)
		n.setNeighbor(t, known, clientMAC)
		for name, c := range map[string]struct {
			client netip.Addr
			mac    net.HardwareAddr
		}{"behind the gateway": {n.p.client, gatewayMAC}, "on the link": {known, clientMAC}} {
			r := n.flood(t, n.syn(c.client, 40000))
			r.want(t, xdpTx, objects.TCVerdictSYN_CHALLENGED)
			if !bytes.Equal(r.v.ethDst, c.mac) || !bytes.Equal(r.v.ethSrc, n.mac["eth0"]) {
				t.Errorf("%s: the answer goes from %s to %s, want it to go to %s; %s has sent the SYN", name, r.v.ethSrc, r.v.ethDst, c.mac, senderMAC)
			}
		}
	})
}

// TestPacketSYNFilterUnknownNeighbor: where XDP knows no neighbor, tc answers, and the kernel asks for
// it. So no answer goes to the sender of the frame, and an honest client gets one.
func TestPacketSYNFilterUnknownNeighbor(t *testing.T) {
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		// A packet that is made longer or shorter has no CHECKSUM_COMPLETE: see TestPacketAnswers.
		n.checksComplete = false
		_, unknown := onLink(n.p)
		far := n.p.client2
		n.routeTo(t, far, "tun0")
		clients := map[netip.Addr]nextHop{
			unknown: {nextHopNeigh, n.ifindex["eth0"], unknown},
			far:     {nextHopNeigh, n.ifindex["tun0"], far},
		}
		if n.p.eth0.Is6() {
			clients[addr("fe80::51")] = nextHop{kind: nextHopStack} // the kernel finds the route
		}
		for client, hop := range clients {
			syn := n.syn(client, 40000)
			out := n.left(t, syn)
			r := n.sendRaw(t, inEth0, out)
			r.want(t, actRedirect, objects.TCVerdictSYN_CHALLENGED)
			r.wantPath(t, syn.dst, syn.src)
			if err := checkSums(r.out); err != nil || r.v.flags != "S." || len(r.out) > len(out) {
				t.Errorf("%s: the answer is %s with %d bytes, sums: %v", client, r.v.flags, len(r.out), err)
			}
			if got := n.lastNextHop(t); got.kind != hop.kind || hop.kind != nextHopStack && got != hop {
				t.Errorf("the answer to %s goes to %+v, want %+v", client, got, hop)
			}
			proof := frame{proto: protoTCP, src: syn.src, dst: syn.dst, flags: "R", seq: r.v.ack}
			n.send(t, xdpEth0, proof).want(t, xdpDrop, objects.TCVerdictSYN_PROVED)
			n.flood(t, syn).want(t, xdpPass)
		}
	})
}

// left returns a SYN of a flood that XDP leaves to tc.
func (n *synNode) left(t *testing.T, syn frame) (out []byte) {
	t.Helper()
	n.inFlood(t, func() {
		code, passed, err := n.run(xdpEth0, syn.bytes(n.packetNode, "eth0"), 0, 0)
		must.Do(t, err)
		if code != xdpPass {
			t.Errorf("XDP ends with %d, want it to leave the answer to tc", code)
		}
		out = passed
	})
	return out
}

// TestPacketSYNFilterForgedCookie: tc answers only what XDP has left to it.
func TestPacketSYNFilterForgedCookie(t *testing.T) {
	eachSYNFilter(t, func(t *testing.T, n *synNode) {
		_, unknown := onLink(n.p)
		syn := n.syn(unknown, 40000)
		left, err := decode(n.left(t, syn))
		must.Do(t, err)
		syn.ack = left.ack
		for name, change := range map[string]func(*frame){
			"another number": func(f *frame) { f.ack++ },
			"another port":   func(f *frame) { f.src = ap(unknown, 40001) },
			"no number":      func(f *frame) { f.ack = 0 },
		} {
			f := syn
			change(&f)
			if r := n.send(t, inEth0, f); r.verdicts[objects.TCVerdictSYN_CHALLENGED] > 0 || r.code != actRedirect {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		n.forget(t)
		options := syn
		options.options, options.ext = []byte{1, 4, 0, 0}, []extension{{extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
		if n.p.eth0.Is4() {
			options.options = []byte{0x94, 4, 0, 0}
		}
		n.send(t, inEth0, options).want(t, actDrop, objects.TCVerdictDROP_SYN_FORM)
	})
}

// TestPacketSYNFilterForms: a SYN that XDP does not parse does not evade the filter. Without one,
// the Service takes it.
func TestPacketSYNFilterForms(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		syn := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", payload: make([]byte, 40)}
		option := syn
		option.options = []byte{0x94, 4, 0, 0}
		if p.eth0.Is6() {
			option.options, option.ext = nil, []extension{{extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
		}
		forms := map[string][]byte{"option": option.bytes(n, "eth0"), "fragment": syn.fragments(n, "eth0", 24)[0]}
		for _, limit := range []uint16{0, 1} {
			sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
			sp.SYNLimit = limit
			n.serve(t, sp)
			for name, in := range forms {
				n.forget(t)
				if r := n.sendRaw(t, xdpEth0, in); r.code != xdpPass {
					t.Errorf("%s: XDP ends with %d", name, r.code)
				}
				r := n.sendRaw(t, inEth0, in)
				if dropped := r.verdicts[objects.TCVerdictDROP_SYN_FORM] == 1; dropped != (limit > 0) {
					t.Errorf("limit %d, %s: %s", limit, name, verdictList(r.verdicts))
				}
			}
		}
	})
}
