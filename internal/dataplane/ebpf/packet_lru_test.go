package ebpf

import (
	"net/netip"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
	"testing"
	"time"
)

// A full table: which flows are replaced, and which must not be (bpf/lib/flow/unconfirmed.h).

// TestPacketFlowTableBusy: where every flow of a full table is in use, requests that
// come at once are all answered, and the transfers that this begins go on.
func TestPacketFlowTableBusy(t *testing.T) {
	const size, burst = 8192, 32
	n := newPacketNode(t, func(c *Config) { c.FlowTableSize = size })
	p := plans["IPv4"]
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	n.enter(t)
	front, server := ap(p.clusterIP, 80), p.pod1
	data := ap(front.Addr(), tid)
	next := uint16(2000)
	for range size { // twice what there is room for
		client := ap(p.client, next)
		n.datagram(t, inEth0, client, front)
		for range 2 {
			n.datagram(t, inPod1, ap(server, tid), client)
			n.datagram(t, inEth0, client, data)
		}
		next++
	}
	n.useAll(t, p, front, netip.AddrPortFrom(server, 1069))
	n.useAll(t, p, data, netip.AddrPortFrom(server, tid))
	for range 12 {
		begin := next
		for ; next < begin+burst; next++ {
			n.datagram(t, inEth0, ap(p.client, next), front)
		}
		for port := begin; port < next; port++ {
			n.datagram(t, inPod1, ap(server, tid), ap(p.client, port)).wantPath(t, data, ap(p.client, port))
		}
		for port := begin; port < next; port++ {
			n.datagram(t, inEth0, ap(p.client, port), data).wantPath(t, ap(p.client, port), ap(server, tid))
		}
	}
}

// useAll sends a packet each way of every flow of the table between the client and
// one address of the Service.
func (n *packetNode) useAll(t *testing.T, p *plan, front, server netip.AddrPort) {
	t.Helper()
	var ports []uint16
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(k objects.TCTuple, _ objects.TCFlow) {
		if k == tupleOf(protoUDP, ap(p.client, objects.ToPort(k.Sport)), front) {
			ports = append(ports, objects.ToPort(k.Sport))
		}
	}))
	for _, port := range ports {
		n.datagram(t, inEth0, ap(p.client, port), front)
		n.datagram(t, inPod1, server, ap(p.client, port))
	}
}

// TestPacketFlowTableFlood: connections that are idle outlive more first packets than
// the table has room for.
func TestPacketFlowTableFlood(t *testing.T) {
	const size, idle = 8192, 1000
	n := newPacketNode(t, func(c *Config) { c.FlowTableSize = size })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.enter(t)
	for i := range idle {
		n.open(t, p, uint16(1024+i))
	}
	front := ap(p.clusterIP, 80)
	for i := range 2 * size {
		// Answered or not: what a forger does not have is the last packet of the handshake.
		c := n.newConn(ap(p.client2, uint16(1024+i)), front, ap(p.far, 8080), inTun0)
		if c.syn(t); i%2 > 0 {
			c.say(t, "<S.")
		}
	}
	left := 0
	for i := range idle {
		if _, found := n.flow(tupleOf(protoTCP, ap(p.client, uint16(1024+i)), front)); found {
			left++
		}
	}
	if left < idle {
		t.Errorf("%d of %d idle connections are left after %d SYNs to a table of %d flows", left, idle, 2*size, size)
	}
}

// TestPacketManyRequests: hundreds of thousands of requests without an answer
// are what the table has room for, none is refused, and each is answered when its
// turn comes.
func TestPacketManyRequests(t *testing.T) {
	const every = 997
	open := 200_000
	if testing.Short() {
		open = 50_000 // the others are more of the same, by other addresses
	}
	n := newPacketNode(t, func(c *Config) {
		c.FlowTableSize, c.Timeouts = uint32(objects.UnconfirmedShare*open), DefaultTimeouts
		c.Timeouts.UDPNew = time.Hour // slow machines ask for longer than the default
	})
	p := plans["IPv4"]
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	n.enter(t)
	front := ap(p.clusterIP, 80)
	client := func(i int) netip.AddrPort { // 50,000 of each address
		a := p.client.As4()
		a[3] += byte(i / 50_000)
		return ap(netip.AddrFrom4(a), uint16(10_000+i%50_000))
	}
	for i := range open {
		if r := n.datagram(t, inEth0, client(i), front); r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
			t.Fatalf("request %d: code %d, %s", i, r.code, verdictList(r.verdicts))
		}
	}
	for i := 0; i < open; i += every {
		n.datagram(t, inPod1, ap(p.pod1, tid), client(i)).wantPath(t, ap(front.Addr(), tid), client(i))
		n.datagram(t, inEth0, client(i), ap(front.Addr(), tid)).wantPath(t, client(i), ap(p.pod1, tid))
	}
}
