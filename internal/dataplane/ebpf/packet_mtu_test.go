package ebpf

import (
	"maps"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsrprobe"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

// mtuRoute is the MTU of a route by tun0 or eth0, which is less than the device's.
const mtuRoute = 1300

// setRouteMTUs has the node know the MTUs of its routes by a device until the test ends.
func (n *packetNode) setRouteMTUs(t *testing.T, dev string, mtus map[string]uint32) {
	t.Helper()
	routes := map[attach.RouteKey]uint32{}
	for dst, mtu := range mtus {
		routes[attach.RouteKey{Dst: netip.MustParsePrefix(dst), Ifindex: n.ifindex[dev]}] = mtu
	}
	n.node.OnRouteMTUs(attach.RouteMTUs{MTUs: routes})
	t.Cleanup(func() { n.node.OnRouteMTUs(attach.RouteMTUs{}) })
}

// lengthen returns the frame with a payload that makes its packet so many bytes long.
func (n *packetNode) lengthen(f frame, size int) frame {
	f.df, f.payload = true, nil
	f.payload = make([]byte, size-(len(f.bytes(n, "eth0"))-14))
	return f
}

// wantMTU fails unless packets of up to so many bytes are sent, and longer ones are answered with it.
func (n *packetNode) wantMTU(t *testing.T, hook at, f frame, mtu int) {
	t.Helper()
	if r := n.send(t, hook, n.lengthen(f, mtu)); r.verdicts[objects.TCVerdictTRANSLATED_DIRECT] != 1 {
		t.Errorf("%d bytes: verdicts %s, want it sent", mtu, verdictList(r.verdicts))
	}
	for _, size := range []int{mtu + 1, mtuEth0} {
		if size <= mtu {
			continue
		}
		long := n.lengthen(f, size)
		r := n.send(t, hook, long)
		n.wantAnswer(t, hook, long, r, objects.TCVerdictANSWERED_TOO_BIG)
		if got := r.v.icmpWord & 0xffff; got != uint32(mtu) {
			t.Errorf("%d bytes: the sender learns MTU %d, want %d", size, got, mtu)
		}
	}
}

// TestPacketRouteMTU: ip_forward and ip6_forward go by the MTU of a route, locked or not.
func TestPacketRouteMTU(t *testing.T) {
	n := newPacketNode(t)
	n.checksComplete = false // see TestPacketAnswers
	t.Run("ToEndpoint", func(t *testing.T) { eachTransport(t, n, n.routeMTUToEndpoint) })
	t.Run("ToClient", func(t *testing.T) { eachFamily(t, n, n.routeMTUToClient) })
	t.Run("GSO", func(t *testing.T) { eachFamily(t, n, n.routeMTUOfSegments) })
	t.Run("MayBeFragmented", func(t *testing.T) { n.forget(t); n.routeMTUWithoutDF(t, plans["IPv4"]) })
	t.Run("UnknownNeighbor", func(t *testing.T) { eachFamily(t, n, n.routeMTUUnknownNeighbor) })
}

func (n *packetNode) routeMTUToEndpoint(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	host := netip.PrefixFrom(p.far, p.far.BitLen()).String()
	other := netip.PrefixFrom(p.far2, p.far2.BitLen()).String()
	for i, tt := range []struct {
		name string
		dev  string
		mtus map[string]uint32
		want int
	}{
		{"none", "tun0", nil, mtuTun0},
		{"of the route", "tun0", map[string]uint32{p.farNet: mtuRoute}, mtuRoute},
		{"of the default route", "tun0", map[string]uint32{p.all: mtuRoute}, mtuRoute},
		{"of a narrower route", "tun0", map[string]uint32{p.farNet: mtuRoute - 10, host: mtuRoute}, mtuRoute},
		{"of a wider route", "tun0", map[string]uint32{p.farNet: mtuRoute, host: 0}, mtuTun0},
		{"of another destination", "tun0", map[string]uint32{other: mtuRoute}, mtuTun0},
		{"of another device", "eth0", map[string]uint32{p.farNet: mtuRoute}, mtuTun0},
		{"more than the device's", "tun0", map[string]uint32{p.farNet: mtuEth0}, mtuTun0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n.setRouteMTUs(t, tt.dev, tt.mtus)
			f := frame{proto: proto, src: ap(p.client, 40000+uint16(i)), dst: ap(p.clusterIP, 80), flags: first(proto)}
			n.wantMTU(t, inEth0, f, tt.want) // the first packet, and packets of a known flow
		})
	}
}

func (n *packetNode) routeMTUToClient(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	n.setRouteMTUs(t, "eth0", map[string]uint32{p.all: mtuRoute})
	first := n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)})
	n.wantMTU(t, inPod1, back(first.v, "", nil), mtuRoute)
}

func (n *packetNode) routeMTUOfSegments(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setRouteMTUs(t, "tun0", map[string]uint32{p.farNet: mtuRoute})
	c := n.open(t, p, 40000)
	_, f := c.frame(".", make([]byte, 2800))
	f.df = true
	fits := uint32(mtuRoute - net4or6(p, 20, 40) - 20)
	for segment, want := range map[uint32]objects.TCVerdict{fits: objects.TCVerdictTRANSLATED_DIRECT,
		fits + 1: objects.TCVerdictANSWERED_TOO_BIG} {
		before := n.counters(t)[want]
		code, _, err := n.run(inEth0, f.bytes(n, "eth0"), segment, 0)
		must.Do(t, err)
		if now := n.counters(t)[want]; code != actRedirect || now != before+1 {
			t.Errorf("segments of %d bytes: code %d, and verdict %d was counted %d times, want once", segment, code, want, now-before)
		}
	}
}

// routeMTUWithoutDF: such a packet is sent, and what was found out for it is no longer MTU for others.
func (n *packetNode) routeMTUWithoutDF(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	n.setRouteMTUs(t, "tun0", map[string]uint32{p.farNet: mtuRoute})
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)}
	for _, size := range []int{mtuRoute + 1, mtuTun0 + 1} {
		long := n.lengthen(f, size)
		long.df = false
		if r := n.send(t, inEth0, long); r.verdicts[objects.TCVerdictTRANSLATED_DIRECT] != 1 {
			t.Errorf("%d bytes: verdicts %s, want it sent", size, verdictList(r.verdicts))
		}
		n.wantMTU(t, inEth0, f, mtuRoute)
	}
}

func (n *packetNode) routeMTUUnknownNeighbor(t *testing.T, p *plan) {
	n.routeTo(t, p.far, "tun0") // without a gateway, whose MAC the node knows
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	n.setRouteMTUs(t, "tun0", map[string]uint32{p.farNet: mtuRoute})
	n.wantMTU(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)}, mtuRoute)
}

// TestPacketXDPRouteMTU: XDP goes by the MTU that tc has found.
func TestPacketXDPRouteMTU(t *testing.T) {
	n := newXDPNode(t)
	n.checksComplete = false // see TestPacketAnswers
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
		n.setRouteMTUs(t, "tun0", map[string]uint32{p.farNet: mtuRoute})
		ask := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80)}
		first := n.send(t, inEth0, ask)
		n.send(t, inTun0, back(first.v, "", []byte("answer")))
		n.sameAsTC(t, xdpEth0, n.lengthen(ask, mtuRoute), xdpRedirect)
		long := n.lengthen(ask, mtuRoute+1)
		if r := n.early(t, xdpEth0, long); r.code != xdpPass {
			t.Errorf("a longer one: code %d, want %d", r.code, xdpPass)
		}
	})
}

// TestPacketDSRGUERouteMTU: the datagrams go by the MTU of the route to the endpoint.
func TestPacketDSRGUERouteMTU(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	d.first.checksComplete = false // see TestPacketAnswers
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		d.first.carry(t, p.far, objects.TCDsrEncapsulationKindDSR_BY_GUE)
		d.first.setRouteMTUs(t, "tun0", map[string]uint32{p.farNet: gueMTU - 50})
		c := d.conn(p, 40000)
		c.askGUE(t, d.first, "S")
		c.answer(t, "S.")
		c.askGUE(t, d.first, ".")
		want := gueMTU - 50 - dsrprobe.Room(p.eth0.Is4())
		for size, verdict := range map[int]objects.TCVerdict{want: objects.TCVerdictDSR_ENCAPSULATED, want + 1: objects.TCVerdictANSWERED_TOO_BIG,
			gueMTU: objects.TCVerdictANSWERED_TOO_BIG} {
			hook, f := c.frame("P.", nil)
			r := d.first.send(t, hook, d.first.lengthen(f, size))
			if r.verdicts[verdict] != 1 {
				t.Errorf("%d bytes: verdicts %s, want %d", size, verdictList(r.verdicts), verdict)
			}
			if got := r.v.icmpWord & 0xffff; verdict == objects.TCVerdictANSWERED_TOO_BIG && got != uint32(want) {
				t.Errorf("%d bytes: the client learns MTU %d, want %d", size, got, want)
			}
		}
	})
}

// TestRouteMTUsAreReplaced: the map has what the node was told last.
func TestRouteMTUsAreReplaced(t *testing.T) {
	n := newPacketNode(t)
	key := func(dst string, ifindex uint32) objects.TCRangeKey {
		return objects.RangeKey(ifindex, netip.MustParsePrefix(dst))
	}
	for _, tt := range []struct {
		told map[attach.RouteKey]uint32
		want map[objects.TCRangeKey]uint32
	}{
		{
			map[attach.RouteKey]uint32{{Dst: netip.MustParsePrefix("10.0.0.0/8"), Ifindex: 5}: 1300,
				{Dst: netip.MustParsePrefix("10.1.0.0/16"), Ifindex: 5}: 0},
			map[objects.TCRangeKey]uint32{key("10.0.0.0/8", 5): 1300, key("10.1.0.0/16", 5): 0},
		},
		{
			map[attach.RouteKey]uint32{{Dst: netip.MustParsePrefix("10.0.0.0/8"), Ifindex: 5}: 0,
				{Dst: netip.MustParsePrefix("fd00::/8"), Ifindex: 6}: 1280},
			map[objects.TCRangeKey]uint32{key("10.0.0.0/8", 5): 0, key("fd00::/8", 6): 1280},
		},
		{nil, map[objects.TCRangeKey]uint32{}},
	} {
		n.node.OnRouteMTUs(attach.RouteMTUs{MTUs: tt.told})
		got := map[objects.TCRangeKey]uint32{}
		must.Do(t, objects.Each(n.m(objects.TCMapRouteMtus), func(k objects.TCRangeKey, v uint32) { got[k] = v }))
		if !maps.Equal(got, tt.want) {
			t.Errorf("told of %v: the map has %v, want %v", tt.told, got, tt.want)
		}
	}
}
