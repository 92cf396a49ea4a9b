package ebpf

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

var (
	xdpEth0 = at{objects.XDPProgXdpFromNetwork, "eth0"}
	xdpTun0 = at{objects.XDPProgXdpFromNetwork, "tun0"}
)

// What the XDP program returns.
const (
	xdpDrop     = 1
	xdpPass     = 2
	xdpTx       = 3
	xdpRedirect = 4
)

// newXDPNode is a node whose two external devices run the program. Only tun0 sends frames of
// others.
func newXDPNode(t testing.TB, change ...func(*Config)) *packetNode {
	t.Helper()
	n := newPacketNode(t, append(change, func(c *Config) { c.XDP = XDPAuto })...)
	n.setXDPDevices("tun0")
	return n
}

// setXDPDevices gives both devices the program. Those named send frames of others.
func (n *packetNode) setXDPDevices(redirect ...string) {
	devices := map[int]attach.XDPDevice{}
	for _, name := range []string{"eth0", "tun0"} {
		devices[n.ifindex[name]] = attach.XDPDevice{MAC: [6]byte(n.mac[name]), Redirects: slices.Contains(redirect, name)}
	}
	n.node.OnXDPDevices(devices)
}

// early gives a frame to the XDP program, right after tc has seen one of the same flow in the same
// second: a frame that XDP passes although it need not gets another try.
func (n *packetNode) early(t testing.TB, hook at, f frame) result {
	t.Helper()
	var r result
	for range 5 {
		n.send(t, at{objects.TCProgFromNetwork, hook.iface}, f)
		if r = n.send(t, hook, f); r.code != xdpPass {
			break
		}
	}
	return r
}

// sameAsTC fails unless XDP sends what tc sends.
func (n *packetNode) sameAsTC(t *testing.T, hook at, f frame, code int) {
	t.Helper()
	r := n.early(t, hook, f)
	r.want(t, code, objects.TCVerdictTRANSLATED_XDP)
	if by := n.send(t, at{objects.TCProgFromNetwork, hook.iface}, f); by.code != actRedirect || !bytes.Equal(by.out[12:], r.out[12:]) {
		t.Errorf("tc sends %x, XDP sends %x", by.out, r.out)
	}
	if neighbor := (net.HardwareAddr{2, 0, 0, 0, 9, 9}); !bytes.Equal(r.v.ethDst, neighbor) {
		t.Errorf("the frame is for %s, want %s", r.v.ethDst, neighbor)
	}
}

// TestPacketXDP: packets of known flows leave as tc would send them.
func TestPacketXDP(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		c := n.open(t, p, 40000)
		_, ask := c.frame("P.", []byte("data"))
		_, answer := c.frame("<P.", []byte("data"))
		n.sameAsTC(t, xdpEth0, ask, xdpRedirect)
		if r := n.early(t, xdpTun0, answer); r.code != xdpPass {
			t.Errorf("code %d: eth0 does not send frames of others", r.code)
		}
		n.setXDPDevices("eth0", "tun0")
		n.sameAsTC(t, xdpTun0, answer, xdpRedirect)
		n.setXDPDevices("tun0")
	})
}

// TestPacketXDPUDP is the same for datagrams.
func TestPacketXDPUDP(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
		ask := frame{proto: protoUDP, src: ap(p.client, 41000), dst: ap(p.clusterIP, 80), payload: []byte("ask")}
		first := n.send(t, inEth0, ask)
		if r := n.send(t, xdpEth0, ask); r.code != xdpPass {
			t.Errorf("code %d before the endpoint has answered", r.code)
		}
		n.send(t, inTun0, back(first.v, "", []byte("answer")))
		n.sameAsTC(t, xdpEth0, ask, xdpRedirect)
		n.serve(t, service(p, protoUDP, endpoint(p.far2, 8080, elsewhere)))
		if r := n.send(t, xdpEth0, ask); r.code != xdpPass {
			t.Errorf("code %d after the endpoint is gone", r.code)
		}
	})
}

// TestPacketXDPSameDevice: the next hop is on the device that the packet came by.
func TestPacketXDPSameDevice(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.router, 8080, elsewhere)))
		c := n.openTo(t, ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.router, 8080), inEth0)
		_, ask := c.frame("P.", []byte("data"))
		n.sameAsTC(t, xdpEth0, ask, xdpTx)
	})
}

// TestPacketXDPPasses: what needs a decision, or a stack, is for tc. XDP leaves it as it is.
func TestPacketXDPPasses(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		c := n.open(t, p, 40000)
		_, ask := c.frame("P.", []byte("data"))
		n.sameAsTC(t, xdpEth0, ask, xdpRedirect)
		with := func(change func(*frame)) frame {
			f := ask
			change(&f)
			return f
		}
		cases := map[string]frame{
			"FIN":                with(func(f *frame) { f.flags = "F." }),
			"RST":                with(func(f *frame) { f.flags = "R" }),
			"SYN":                with(func(f *frame) { f.flags = "S" }),
			"outside the window": with(func(f *frame) { f.seq += 1 << 30 }),
			"TTL 1":              with(func(f *frame) { f.ttl = 1 }),
			"too long":           with(func(f *frame) { f.payload = make([]byte, mtuTun0) }),
			"for another host":   with(func(f *frame) { f.ethDst = net.HardwareAddr{2, 9, 9, 9, 9, 9} }),
			"another client":     with(func(f *frame) { f.src = ap(p.client2, 40000) }),
			"of no Service":      with(func(f *frame) { f.dst = ap(p.eth0, 22) }),
			"with an IP option": with(func(f *frame) {
				f.options, f.ext = []byte{1, 4, 0, 0}, []extension{{extDestOpts, []byte{1, 4, 0, 0, 0, 0}}}
			}),
			"first packet":        {proto: protoTCP, src: ap(p.client, 40001), dst: ap(p.clusterIP, 80), flags: "S"},
			"stray":               {proto: protoTCP, src: ap(p.client, 40002), dst: ap(p.clusterIP, 80), flags: "."},
			"stray RST":           {proto: protoTCP, src: ap(p.client, 40002), dst: ap(p.clusterIP, 80), flags: "R", seq: 1},
			"datagram, not known": {proto: protoUDP, src: ap(p.client, 40003), dst: ap(p.clusterIP, 80)},
		}
		if p.eth0.Is4() {
			cases["with an IP option"] = with(func(f *frame) { f.options = []byte{0x94, 4, 0, 0} })
		}
		for name, f := range cases {
			in := f.bytes(n, "eth0")
			n.send(t, inEth0, ask)
			r := n.sendRaw(t, xdpEth0, in)
			if r.code != xdpPass || !bytes.Equal(r.out, in) || len(r.verdicts) > 0 {
				t.Errorf("%s: code %d, verdicts %s", name, r.code, verdictList(r.verdicts))
			}
		}
		for i, cut := range ask.fragments(n, "eth0", 8) {
			if r := n.sendRaw(t, xdpEth0, cut); r.code != xdpPass {
				t.Errorf("fragment %d: code %d", i, r.code)
			}
		}
		whole := ask.bytes(n, "eth0")
		for length := 14; length < len(whole); length++ {
			if r := n.sendRaw(t, xdpEth0, whole[:length:length]); r.code != xdpPass {
				t.Errorf("cut to %d bytes: code %d", length, r.code)
			}
		}
		tagged := append(append(bytes.Clone(whole[:12]), 0x81, 0, 0, 5), whole[12:]...)
		if r := n.sendRaw(t, xdpEth0, tagged); r.code != xdpPass {
			t.Errorf("VLAN: code %d", r.code)
		}
	})
}

// TestPacketXDPDrops: a SYN that tc would drop is dropped, and counted for the Service.
func TestPacketXDPDrops(t *testing.T) {
	n := newXDPNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.onThread(t, n.describe) // an agent runs
		sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
		for i := range sp.Frontends {
			sp.Frontends[i].SourceRanges = []netip.Prefix{netip.PrefixFrom(p.client2, p.client2.BitLen())}
		}
		n.serve(t, sp)
		syn := func(from netip.Addr) frame {
			return frame{proto: protoTCP, src: ap(from, 40000), dst: ap(p.externalIP, 80), flags: "S"}
		}
		n.send(t, xdpEth0, syn(p.client)).want(t, xdpDrop, objects.TCVerdictDROP_SOURCE_RANGE)
		n.send(t, xdpEth0, syn(p.client2)).want(t, xdpPass)
		n.send(t, xdpEth0, syn(p.pod1)).want(t, xdpDrop, objects.TCVerdictDROP_SOURCE)
		n.send(t, xdpEth0, syn(p.eth0)).want(t, xdpDrop, objects.TCVerdictDROP_SOURCE)
		datagram := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.externalIP, 80), flags: "."}
		n.send(t, xdpEth0, datagram).want(t, xdpPass) // it may be of a connection of netfilter
		sp = service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
		for i := range sp.Frontends {
			sp.Frontends[i].ExternalRoute = intent.Drop
		}
		n.serve(t, sp)
		n.send(t, xdpEth0, syn(p.client)).want(t, xdpDrop, objects.TCVerdictDROP_POLICY_LOCAL)
	})
}

// TestPacketXDPWithoutAgent: maps that no agent writes any more decide nothing.
func TestPacketXDPWithoutAgent(t *testing.T) {
	n := newXDPNode(t)
	p := plans["IPv4"]
	sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
	for i := range sp.Frontends {
		sp.Frontends[i].ExternalRoute = intent.Drop
	}
	n.serve(t, sp)
	syn := frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.externalIP, 80), flags: "S"}
	n.send(t, xdpEth0, syn).want(t, xdpDrop, objects.TCVerdictDROP_POLICY_LOCAL)
	var s objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
	s.AgentSeen -= 61
	must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), s))
	n.send(t, xdpEth0, syn).want(t, xdpPass)
	n.onThread(t, n.describe) // an agent runs
	n.send(t, xdpEth0, syn).want(t, xdpDrop, objects.TCVerdictDROP_POLICY_LOCAL)
}

// TestPacketXDPBesideNAT: where netfilter translates destinations, XDP drops nothing, and filters
// floods all the same.
func TestPacketXDPBesideNAT(t *testing.T) {
	n := newXDPNode(t)
	p := plans["IPv4"]
	n.onThread(t, func() error { n.node.OnNAT(true, "a test"); return nil })
	sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
	sp.SYNLimit = 1
	n.serve(t, sp)
	challenged := 0
	for i := range 20 {
		if n.send(t, xdpEth0, frame{proto: protoTCP, src: ap(p.client, uint16(40000+i)), dst: ap(p.clusterIP, 80), flags: "S"}).code == xdpTx {
			challenged++
		}
	}
	if challenged == 0 {
		t.Error("no SYN of a flood was challenged")
	}
	sp = service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
	for i := range sp.Frontends {
		sp.Frontends[i].ExternalRoute = intent.Drop
	}
	n.serve(t, sp)
	n.send(t, xdpEth0, frame{proto: protoTCP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}).want(t, xdpPass)
}

// TestPacketXDPAgreesWithTC gives random frames to both: what XDP sends or drops, tc sends or drops.
func TestPacketXDPAgreesWithTC(t *testing.T) {
	n := newXDPNode(t)
	g := rand.New(rand.NewPCG(1, 2))
	seen := map[int]int{}
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
		var c *conn
		for i := range 20000 {
			if i%100 == 0 {
				c = n.open(t, p, uint16(40000+i/100))
				for port := range uint16(3) {
					first := n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, port), dst: ap(p.clusterIP, 80)})
					n.send(t, inTun0, back(first.v, "", nil))
				}
			}
			var f frame
			switch g.IntN(3) {
			case 0:
				_, f = c.frame([]string{"P.", ".", "F.", "R", "S", "S."}[g.IntN(6)*g.IntN(2)], make([]byte, g.IntN(1500)))
			case 1:
				f = frame{proto: protoUDP, src: ap(p.client, uint16(g.IntN(3))), dst: ap(p.clusterIP, 80), payload: make([]byte, g.IntN(1500))}
			case 2:
				f = frame{proto: protoTCP, src: ap(p.client, uint16(40000+g.IntN(3))), dst: ap(p.clusterIP, 80), flags: "S"}
			}
			in := f.bytes(n, "eth0")
			if g.IntN(4) == 0 {
				in[g.IntN(len(in))] ^= 1 << g.IntN(8)
			}
			if g.IntN(8) == 0 {
				in = in[:14+g.IntN(len(in)-13)]
			}
			early := bytes.Clone(in)
			code, out, err := n.run(xdpEth0, early, 0, 0)
			must.Do(t, err)
			seen[code]++
			if code == xdpPass {
				if !bytes.Equal(out, in) {
					t.Fatalf("passed, but changed:\n in  %x\n out %x", in, out)
				}
				if len(in) >= 34 {
					_, _, _ = n.run(inEth0, in, 0, 0)
				}
				continue
			}
			tc, by, err := n.run(inEth0, in, 0, 0)
			must.Do(t, err)
			// In another second, the kernel fills in the addresses of tc's frame.
			if !bytes.Equal(by[12:], out[12:]) || (code == xdpDrop) != (tc == actDrop) {
				t.Fatalf("XDP ends with %d, tc with %d:\n in  %x\n XDP %x\n tc  %x", code, tc, in, out, by)
			}
			if code == xdpRedirect && binary.BigEndian.Uint16(out[12:]) == 0x8100 {
				t.Fatalf("a tagged frame was sent: %x", out)
			}
		}
	})
	t.Logf("codes: %v", seen)
	if seen[xdpRedirect] < 1000 || seen[xdpPass] < 1000 {
		t.Errorf("codes %v: the test does not reach that far", seen)
	}
}

// BenchmarkPacketXDP compares XDP with tc for the packets of flows to an endpoint elsewhere. What
// XDP saves the kernel, an skb and GRO, is not in it.
func BenchmarkPacketXDP(b *testing.B) {
	n := newXDPNode(b, withKeys(dsrKeys...))
	n.setXDPDevices("eth0", "tun0")
	run := func(b *testing.B, xdp bool) {
		benchPackets(b, n, func(b *testing.B, p *plan) []*packetCase {
			n.serve(b, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
			c := n.open(b, p, 40000)
			_, in := c.frame("P.", []byte{0})
			_, out := c.frame("<P.", []byte{0})
			direct := dsrService(p, endpoint(p.far, 8080, elsewhere))
			direct.ID.Service.Name = "direct"
			for i := range direct.Frontends {
				direct.Frontends[i].Port++
				if f := &direct.Frontends[i]; f.Addr.IsValid() {
					f.Addr = f.Addr.Next()
				}
			}
			closed := service(p, protoTCP, endpoint(p.far, 8080, elsewhere))
			closed.ID.Service.Name = "closed"
			for i := range closed.Frontends {
				closed.Frontends[i].Port += 2
				closed.Frontends[i].ExternalRoute = intent.Drop
			}
			n.serve(b, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), direct, closed)
			syn := frame{proto: protoTCP, src: ap(p.client, 41000), dst: ap(p.externalIP.Next(), 81), flags: "S", seq: 1}
			n.send(b, inEth0, syn)
			ack := syn
			ack.flags, ack.seq, ack.payload = "P.", 2, []byte{0}
			n.send(b, inEth0, ack)
			notOurs := frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.eth0, 22), flags: "P.", payload: []byte{0}}
			dropped := frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.externalIP, 82), flags: "S", payload: []byte{0}}
			cases := []*packetCase{
				{name: "empty program", code: actNext, frame: notOurs},
				{name: "not ours", hook: inEth0, code: actNext, frame: notOurs},
				{name: "known flow, SNAT", hook: inEth0, code: actRedirect, frame: in},
				{name: "reply, SNAT", hook: inTun0, code: actRedirect, frame: out},
				{name: "known flow, DSR", hook: inEth0, code: actRedirect, frame: ack},
				{name: "SYN that a Local policy drops", hook: inEth0, code: actDrop, frame: dropped},
			}
			if !xdp {
				return cases
			}
			for _, c := range cases {
				tc := c.hook
				c.xdp = true
				c.code = map[int]int{actNext: xdpPass, actRedirect: xdpRedirect, actDrop: xdpDrop}[c.code]
				if tc.prog == "" {
					continue
				}
				c.hook = at{objects.XDPProgXdpFromNetwork, tc.iface}
				if c.code == xdpRedirect {
					c.keep = func() { n.freshen(b, tc, c.frame) }
				}
			}
			return cases
		})
	}
	b.Run("tc", func(b *testing.B) { run(b, false) })
	b.Run("XDP", func(b *testing.B) { run(b, true) })
	b.Run("tc again", func(b *testing.B) { run(b, false) })
}

// freshen waits for the start of a second, and gives tc a frame in it.
func (n *packetNode) freshen(b *testing.B, hook at, f frame) {
	key := tupleOf(f.proto, f.src, f.dst)
	if time.Since(n.freshened) < 700*time.Millisecond && n.freshFor == key {
		return
	}
	second := objects.BootSeconds()
	await.True(b, "the next second", func() bool { return objects.BootSeconds() != second })
	for range 2 { // the first one looks up the next hop
		n.send(b, hook, f)
	}
	n.freshened, n.freshFor = time.Now(), key
}
