package ebpf

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// TestPacketChanges changes Services while flows continue.
func TestPacketChanges(t *testing.T) {
	n := newPacketNode(t)
	for _, tt := range []struct {
		name string
		test func(*packetNode, *testing.T, *plan)
	}{
		{"EndpointUnselected", (*packetNode).endpointUnselected},
		{"AddressMoves", (*packetNode).addressMoves},
		{"AddressMovesWhileAnswersCome", (*packetNode).addressMovesWhileAnswersCome},
		{"ServiceDeleted", (*packetNode).serviceDeleted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) { tt.test(n, t, p) })
		})
	}
}

// endpointUnselected: a flow stays with an endpoint that serves and gets no new flows. It moves when the
// endpoint serves no more.
func (n *packetNode) endpointUnselected(t *testing.T, p *plan) {
	front := ap(p.externalIP, 80)
	old, other := endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here)
	n.serve(t, service(p, protoUDP, old))
	n.datagram(t, inEth0, ap(p.client, 40000), front).wantPath(t, ap(p.client, 40000), old.Addr)

	sp := service(p, protoUDP, other)
	old.ClusterPolicy, old.LocalPolicy = false, false
	sp.ServingUnselected = []intent.Endpoint{old}
	n.serve(t, sp)
	for range 3 {
		n.datagram(t, inEth0, ap(p.client, 40000), front).wantPath(t, ap(p.client, 40000), old.Addr)
	}
	for port := uint16(40001); port < 40010; port++ {
		n.datagram(t, inEth0, ap(p.client, port), front).wantPath(t, ap(p.client, port), other.Addr)
	}

	n.serve(t, service(p, protoUDP, other))
	n.datagram(t, inEth0, ap(p.client, 40000), front).wantPath(t, ap(p.client, 40000), other.Addr)
}

// pair returns two Services, of which the first or the second has all addresses but its clusterIP.
func pair(p *plan, proto uint8, second bool) []*intent.ServicePort {
	a, b := service(p, proto, endpoint(p.pod1, 8080, here)), service(p, proto, endpoint(p.pod2, 8080, here))
	b.ID.Service.Name += "-b"
	b.Frontends[0].Addr = b.Frontends[0].Addr.Next()
	if second {
		a.Frontends = a.Frontends[:1]
	} else {
		b.Frontends = b.Frontends[:1]
	}
	return []*intent.ServicePort{a, b}
}

// addressMoves: a NodePort and an externalIP move from one Service to another. UDP follows, TCP stays.
func (n *packetNode) addressMoves(t *testing.T, p *plan) {
	fronts := []netip.AddrPort{ap(p.externalIP, 80), ap(p.eth0, 30080)}
	servers := map[bool]netip.AddrPort{false: ap(p.pod1, 8080), true: ap(p.pod2, 8080)}
	want := func(second bool) {
		t.Helper()
		for i, front := range fronts {
			for range 2 {
				client := ap(p.client, uint16(40000+i))
				n.datagram(t, inEth0, client, front).wantPath(t, client, servers[second])
			}
		}
		own := ap(p.client, 40002)
		n.datagram(t, inEth0, own, ap(p.clusterIP, 80)).wantPath(t, own, servers[false])
	}
	serve := func(second bool) { n.serve(t, append(pair(p, protoUDP, second), pair(p, protoTCP, second)...)...) }
	serve(false)
	want(false)
	c := n.openTo(t, ap(p.client, 40003), fronts[0], servers[false], inPod1)
	serve(true)
	want(true)
	c.say(t, "P.").wantPath(t, c.client, servers[false])
	serve(false)
	want(false)
}

// addressMovesWhileAnswersCome: the answers of each second come before the client's datagrams.
func (n *packetNode) addressMovesWhileAnswersCome(t *testing.T, p *plan) {
	client, front := ap(p.client, 40000), ap(p.externalIP, 80)
	n.serve(t, pair(p, protoUDP, false)...)
	first := n.datagram(t, inEth0, client, front)
	answer := func() { n.send(t, inPod1, back(first.v, "", []byte("answer"))).wantPath(t, front, client) }
	answer()
	n.datagram(t, inEth0, client, front).wantPath(t, client, ap(p.pod1, 8080))
	n.serve(t, pair(p, protoUDP, true)...)
	answer()
	n.datagram(t, inEth0, client, front).wantPath(t, client, ap(p.pod2, 8080))
}

// serviceDeleted: datagrams to its addresses are no Service's, and a connection stays.
func (n *packetNode) serviceDeleted(t *testing.T, p *plan) {
	front, server := ap(p.externalIP, 80), ap(p.pod1, 8080)
	other := pair(p, protoUDP, false)[1]
	other.Endpoints = []intent.Endpoint{endpoint(p.pod1, 8080, here)} // the pod stays
	n.serve(t, other, service(p, protoUDP, endpoint(p.pod1, 8080, here)), service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: front}
	n.send(t, inEth0, f).wantPath(t, f.src, server)
	n.send(t, inEth0, f).wantPath(t, f.src, server)
	c := n.openTo(t, ap(p.client, 40001), front, server, inPod1)
	n.serve(t, other)
	for range 2 {
		n.untouched(t, "after the Service has gone", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	}
	c.say(t, "P.").wantPath(t, c.client, server)
}
