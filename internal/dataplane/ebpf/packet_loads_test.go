package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func byLoad(c *Config) { c.FlowEvents, c.BalanceByLoad = EventsOff, true }

// newLoadNode is an eventNode without events whose Services choose by load.
func newLoadNode(t *testing.T, socketHooks bool) (n *eventNode) {
	t.Helper()
	if socketHooks {
		n = newSocketNode(t, byLoad)
	} else {
		n = newEventNode(t, byLoad)
	}
	n.checksComplete = false // see TestPacketAnswers
	n.onThread(t, func() error { n.flows.Open(); return nil })
	t.Cleanup(n.flows.Close)
	return n
}

// balanced is a service that chooses by load.
func balanced(sp *intent.ServicePort, by intent.Balance) *intent.ServicePort {
	sp.Balance = by
	return sp
}

// loadOf returns what the programs take for the load of an endpoint.
func (n *eventNode) loadOf(t *testing.T, a netip.AddrPort) (active int, l objects.TCLoad) {
	t.Helper()
	must.Do(t, n.m(objects.TCMapLoads).Lookup(n.idOf(t, a)%objects.MaxLoads, &l))
	return int(int32(l.Flows - l.LostFlows + l.Sockets - l.LostSockets)), l
}

func (n *eventNode) wantLoads(t *testing.T, when string, want map[netip.AddrPort]int) {
	t.Helper()
	for a, active := range want {
		if have, l := n.loadOf(t, a); have != active {
			t.Fatalf("%s: endpoint %s has %d active flows, want %d: %+v", when, a, have, active, l)
		}
	}
}

func TestPacketLeastConnections(t *testing.T) {
	n := newLoadNode(t, false)
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		far, far2 := ap(p.far, 8080), ap(p.far2, 8080)
		n.serve(t, balanced(service(p, protoTCP, endpoint(p.far, 8080, elsewhere), endpoint(p.far2, 8080, elsewhere)), intent.LeastConnections))
		next := uint16(42000)
		open := func(packets ...string) (c *conn) {
			before, _ := n.loadOf(t, far)
			next++
			c = n.newConn(ap(p.client, next), ap(p.clusterIP, 80), far2, inTun0)
			c.syn(t)
			if after, _ := n.loadOf(t, far); after > before {
				c.server = far
			}
			c.talk(t, packets...)
			return c
		}
		var conns []*conn
		for range 10 {
			conns = append(conns, open("<S.", "."))
		}
		n.wantLoads(t, "10 connections", map[netip.AddrPort]int{far: 5, far2: 5})
		conns = slices.DeleteFunc(conns, func(c *conn) bool {
			if c.server == far {
				return false
			}
			c.talk(t, "F.", "<F.", ".")
			c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
			return true
		})
		n.wantLoads(t, "those of one endpoint have ended", map[netip.AddrPort]int{far: 5, far2: 0})
		for range 4 { // the fifth may get either
			if c := open("<S.", "."); c.server != far2 {
				t.Fatalf("a flow got the endpoint with more flows")
			}
		}
		open("<S.", ".")
		conns[0].talk(t, "R")
		n.wantLoads(t, "an RST", map[netip.AddrPort]int{far: 4, far2: 5})
		conns[0].talk(t, "S")
		n.wantLoads(t, "a SYN after the RST", map[netip.AddrPort]int{far: 5, far2: 5})
		n.sweepNow(t)
		n.wantLoads(t, "a sweep", map[netip.AddrPort]int{far: 5, far2: 5})
		for _, c := range conns[1:] { // as the kernel evicts them
			for _, key := range c.keys() {
				must.Do(t, n.m(objects.TCMapFlows).Delete(key))
			}
		}
		n.wantLoads(t, "evicted flows", map[netip.AddrPort]int{far: 5, far2: 5})
		n.sweepNow(t)
		n.wantLoads(t, "a sweep after evictions", map[netip.AddrPort]int{far: 1, far2: 5})
		n.sweepNow(t)
		n.wantLoads(t, "another sweep", map[netip.AddrPort]int{far: 1, far2: 5})
	})
}

func (n *eventNode) sweepNow(t *testing.T) {
	t.Helper()
	must.Do(t, n.flows.Sweep(t.Context()))
}

// TestPacketLeastAmongMany: the endpoint with most flows of many gets a new one only if both
// choices are that endpoint.
func TestPacketLeastAmongMany(t *testing.T) {
	n := newLoadNode(t, false)
	p := plans["IPv4"]
	var list []intent.Endpoint
	for port := range uint16(8) {
		list = append(list, endpoint(p.far, 8080+port, elsewhere))
	}
	n.serve(t, balanced(service(p, protoUDP, list...), intent.LeastConnections))
	for port := range uint16(800) {
		n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 20000+port), dst: ap(p.clusterIP, 80)})
	}
	sum := 0
	for _, e := range list {
		active, _ := n.loadOf(t, e.Addr)
		// Two random endpoints are compared for each flow, so one in some thousand runs differs by 4. Of
		// random shares, whose standard deviation is 9.4, at least one differs by more than 8 in 98 of 100.
		if sum += active; active < 92 || active > 108 {
			t.Errorf("endpoint %s has %d of 800 flows", e.Addr, active)
		}
	}
	if sum != 800 {
		t.Errorf("%d flows, want 800", sum)
	}
}

// TestPacketLeastFlood sends SYNs from many forged clients, more than the flow table keeps: all
// endpoints must look equally busy, to the attacker's profit or not.
func TestPacketLeastFlood(t *testing.T) {
	n := newLoadNode(t, false)
	p := plans["IPv4"]
	endpoints := []intent.Endpoint{endpoint(p.far, 8080, elsewhere), endpoint(p.far, 8081, elsewhere), endpoint(p.far2, 8080, elsewhere)}
	n.serve(t, balanced(service(p, protoTCP, endpoints...), intent.LeastConnections))
	for i := range 3000 {
		client := netip.AddrFrom4([4]byte{203, 0, byte(113 + i>>8), byte(i)})
		n.newConn(ap(client, uint16(1024+i)), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0).syn(t)
	}
	n.sweepNow(t)
	var loads []int
	for _, e := range endpoints {
		active, _ := n.loadOf(t, e.Addr)
		loads = append(loads, active)
	}
	if least, most := slices.Min(loads), slices.Max(loads); least == 0 || most-least > max(5, most/5) {
		t.Errorf("after the flood the endpoints have %v active flows", loads)
	}
}

func TestPacketLatency(t *testing.T) {
	n := newLoadNode(t, false)
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		far, far2 := ap(p.far, 8080), ap(p.far2, 8080)
		n.serve(t, balanced(service(p, protoTCP, endpoint(p.far, 8080, elsewhere), endpoint(p.far2, 8080, elsewhere)), intent.Latency))
		port := uint16(42000)
		connect := func() (at netip.AddrPort) {
			before, _ := n.loadOf(t, far)
			port++
			c := n.newConn(ap(p.client, port), ap(p.clusterIP, 80), far2, inTun0)
			c.syn(t)
			if after, _ := n.loadOf(t, far); after > before {
				c.server = far
				time.Sleep(50 * time.Millisecond) // far is slow
			}
			c.talk(t, "<S.", ".")
			return c.server
		}
		shares := map[netip.AddrPort]int{}
		for range 40 {
			shares[connect()]++
		}
		_, slow := n.loadOf(t, far)
		_, fast := n.loadOf(t, far2)
		if slow.Handshake < 40_000 || fast.Handshake == 0 || fast.Handshake > slow.Handshake/2 {
			t.Errorf("handshakes of %d µs and %d µs", slow.Handshake, fast.Handshake)
		}
		if shares[far2] <= shares[far] {
			t.Errorf("the slow endpoint got %d flows, the fast one %d", shares[far], shares[far2])
		}
		// One slow handshake, as on a busy machine, says nothing about the endpoint.
		n.serve(t, balanced(service(p, protoTCP, endpoint(p.far2, 8080, elsewhere)), intent.Latency))
		port++
		c := n.newConn(ap(p.client, port), ap(p.clusterIP, 80), far2, inTun0)
		c.syn(t)
		time.Sleep(50 * time.Millisecond)
		c.talk(t, "<S.", ".")
		if _, after := n.loadOf(t, far2); after.Handshake > fast.Handshake {
			t.Errorf("the handshake of an endpoint is %d µs after a slow one, was %d µs", after.Handshake, fast.Handshake)
		}
	})
}

// TestPacketByLoadOff: without Config.BalanceByLoad nothing is counted.
func TestPacketByLoadOff(t *testing.T) {
	n := newPacketNode(t)
	p := plans["IPv4"]
	n.serve(t, balanced(service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), intent.LeastConnections))
	n.open(t, p, 42001)
	var f objects.TCFlow
	must.Do(t, n.m(objects.TCMapFlows).Lookup(tupleOf(protoTCP, ap(p.client, 42001), ap(p.clusterIP, 80)), &f))
	if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_COUNTED != 0 {
		t.Error("a flow is counted")
	}
}

func TestSocketLoads(t *testing.T) {
	n := newLoadNode(t, true)
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		at := ap(p.eth0, 8080)
		n.serve(t, balanced(service(p, protoTCP, endpoint(p.eth0, 8080, here)), intent.LeastConnections))
		listener := n.listen(t, p)
		var list []dialed
		for range 3 {
			list = append(list, n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80)))
		}
		n.wantLoads(t, "3 sockets", map[netip.AddrPort]int{at: 3})
		if _, l := n.loadOf(t, at); l.Handshake == 0 || l.Measured == 0 {
			t.Errorf("no handshake is measured: %+v", l)
		}
		n.sweepNow(t)
		n.wantLoads(t, "a sweep", map[netip.AddrPort]int{at: 3})
		list[0].closeClient()
		list[0].closeServer()
		must.Do(t, unix.SetsockoptLinger(list[1].client, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		list[1].closeClient()
		n.loadSoon(t, at, 1)
		n.serve(t, balanced(service(p, protoUDP, endpoint(p.eth0, 8080, here)), intent.LeastConnections))
		fd, closeNow := n.socket(t, domainOf(p), protoUDP)
		for range 2 {
			must.Do(t, unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))))
			n.wantLoads(t, "a UDP socket that connects", map[netip.AddrPort]int{at: 1})
		}
		closeNow()
		n.loadSoon(t, at, 0)
	})
}

// TestSocketLoadsAreCorrected: a count is wrong, as if another program had taken the calls of
// the kernel.
func TestSocketLoadsAreCorrected(t *testing.T) {
	needSocketIterators(t)
	n := newLoadNode(t, true)
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		at := ap(p.eth0, 8080)
		n.serve(t, balanced(service(p, protoTCP, endpoint(p.eth0, 8080, here)), intent.LeastConnections))
		n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
		_, l := n.loadOf(t, at)
		l.LostSockets = 7
		must.Do(t, n.m(objects.TCMapLoads).Put(n.idOf(t, at)%objects.MaxLoads, l))
		n.wantLoads(t, "a wrong count", map[netip.AddrPort]int{at: -6})
		n.sweepNow(t)
		n.wantLoads(t, "a sweep after it", map[netip.AddrPort]int{at: 1})
	})
}

// needSocketIterators skips a test where a security module refuses iterators of sockets.
func needSocketIterators(t *testing.T) {
	t.Helper()
	err := kernel.ProbeSocketIterators()
	if errors.Is(err, unix.EPERM) {
		t.Skip(err)
	}
	must.Do(t, err)
}

// idOf returns the id of an endpoint, which must be the only one with the address.
func (n *eventNode) idOf(t *testing.T, a netip.AddrPort) uint32 {
	t.Helper()
	var id uint32
	var b objects.TCBackend
	for entries := n.m(objects.TCMapBackends).Iterate(); entries.Next(&id, &b); {
		if objects.EndpointOf(b) == a {
			return id
		}
	}
	t.Fatalf("no endpoint %s", a)
	return 0
}

// loadSoon waits for a load: the kernel may close a socket after close() has returned.
func (n *eventNode) loadSoon(t *testing.T, a netip.AddrPort, want int) {
	t.Helper()
	await.NoError(t, func() error {
		if active, _ := n.loadOf(t, a); active != want {
			return fmt.Errorf("%s has %d active flows, want %d", a, active, want)
		}
		return nil
	})
}
