package ebpf

import (
	"net/netip"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func TestPacketPolicy(t *testing.T) {
	n := newPacketNode(t)
	t.Run("Drop", func(t *testing.T) { eachTransport(t, n, n.dropRoute) })
	t.Run("Local", func(t *testing.T) { eachTransport(t, n, n.localRoute) })
	t.Run("SourceRanges", func(t *testing.T) { eachTransport(t, n, n.sourceRanges) })
	t.Run("NodePortAddresses", func(t *testing.T) { eachTransport(t, n, n.nodePortAddresses) })
	t.Run("Affinity", func(t *testing.T) { eachTransport(t, n, n.affinity) })
	t.Run("Spread", func(t *testing.T) { eachTransport(t, n, n.spread) })
	t.Run("NoAddressForSNAT", func(t *testing.T) { eachTransport(t, n, n.noSNATAddress) })
}

func route(sp *intent.ServicePort, kind intent.FrontendKind, outside, inside intent.Route) {
	for i := range sp.Frontends {
		if sp.Frontends[i].Kind == kind {
			sp.Frontends[i].ExternalRoute, sp.Frontends[i].InternalRoute = outside, inside
		}
	}
}

// dropRoute: a local policy without an endpoint here; pods take the short cut.
func (n *packetNode) dropRoute(t *testing.T, p *plan, proto uint8) {
	sp := service(p, proto, endpoint(p.far, 8080, elsewhere))
	route(sp, intent.NodePort, intent.Drop, intent.ToCluster)
	n.serve(t, sp)
	front := ap(p.eth0, 30080)
	n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000), dst: front, flags: first(proto)}).want(t, actDrop,
		objects.TCVerdictDROP_POLICY_LOCAL)
	n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, 40000), dst: front, flags: first(proto)}).
		want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
}

// localRoute: from outside only endpoints here, from inside all.
func (n *packetNode) localRoute(t *testing.T, p *plan, proto uint8) {
	sp := service(p, proto, endpoint(p.pod2, 8080, here), endpoint(p.far, 8080, elsewhere), endpoint(p.far2, 8080, elsewhere))
	route(sp, intent.NodePort, intent.ToLocal, intent.ToCluster)
	n.serve(t, sp)
	front := ap(p.eth0, 30080)
	inside := map[netip.Addr]bool{}
	for port := uint16(40000); port < 40060; port++ {
		r := n.send(t, inEth0, frame{proto: proto, src: ap(p.client, port), dst: front, flags: first(proto)})
		r.wantPath(t, ap(p.client, port), ap(p.pod2, 8080))
		r = n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, port), dst: front, flags: first(proto)})
		inside[r.v.dst.Addr()] = true
	}
	if len(inside) != 3 {
		t.Errorf("60 flows from inside used %d endpoints of 3", len(inside))
	}
}

func (n *packetNode) sourceRanges(t *testing.T, p *plan, proto uint8) {
	sp := service(p, proto, endpoint(p.pod1, 8080, here))
	host := netip.PrefixFrom(p.client, p.client.BitLen())
	send := func(src netip.Addr, dst netip.AddrPort) result {
		n.forget(t)
		return n.send(t, inEth0, frame{proto: proto, src: ap(src, 40000), dst: dst, flags: first(proto)})
	}
	set := func(r []netip.Prefix) {
		again := service(p, proto, endpoint(p.pod1, 8080, here))
		again.Frontends[2].Kind, again.Frontends[2].SourceRanges = intent.LoadBalancerIP, r
		*sp = *again
		n.serve(t, again)
	}
	in := []objects.TCVerdict{objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT}
	front := ap(p.externalIP, 80)
	set([]netip.Prefix{host})
	send(p.client, front).want(t, actRedirect, in...)
	send(p.client2, front).want(t, actDrop, objects.TCVerdictDROP_SOURCE_RANGE)
	send(p.client2, ap(p.clusterIP, 80)).want(t, actRedirect, in...)
	wide, err := p.client.Prefix(p.client.BitLen() - 1)
	must.Do(t, err)
	set([]netip.Prefix{wide})
	send(p.client, front).want(t, actRedirect, in...)
	send(p.client2, front).want(t, actRedirect, in...)
	send(p.router, front).want(t, actDrop, objects.TCVerdictDROP_SOURCE_RANGE)
	set([]netip.Prefix{netip.MustParsePrefix(p.all)})
	send(p.router, front).want(t, actRedirect, in...)
	set([]netip.Prefix{})
	send(p.client, front).want(t, actDrop, objects.TCVerdictDROP_SOURCE_RANGE)
	set(nil)
	send(p.client, front).want(t, actRedirect, in...)
}

// nodePortAddresses: only the node's addresses that serve NodePorts do. Loopback never does for
// packets, although the node's processes have NodePorts there (CVE-2020-8558).
func (n *packetNode) nodePortAddresses(t *testing.T, p *plan, proto uint8) {
	n.setNode(t, func(node *intent.Node) {
		node.NodePortAddrs, node.LoopbackNodePorts = []netip.Addr{p.eth0}, []model.Family{model.IPv4, model.IPv6}
	})
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	send := func(dst netip.Addr) result {
		return n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000), dst: ap(dst, 30080), flags: first(proto)})
	}
	send(p.eth0).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	for _, a := range []netip.Addr{p.tun0, p.client2, addr("127.0.0.1"), addr("::1"), addr("224.0.0.1"), addr("255.255.255.255")} {
		if a.Is4() == p.eth0.Is4() {
			send(a).want(t, actNext, objects.TCVerdictPASS_OTHER)
		}
	}
	other := protoTCP + protoUDP - proto
	n.send(t, inEth0, frame{proto: uint8(other), src: ap(p.client, 40000), dst: ap(p.eth0, 30080), flags: "S"}).want(t, actNext,
		objects.TCVerdictPASS_OTHER)
}

func (n *packetNode) affinity(t *testing.T, p *plan, proto uint8) {
	sp := service(p, proto, endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here), endpoint(p.far, 8080, elsewhere),
		endpoint(p.far2, 8080, elsewhere))
	sp.Affinity = 100 * time.Second
	n.serve(t, sp)
	port := uint16(40000)
	send := func() netip.Addr {
		port++
		if proto == protoUDP {
			return n.datagram(t, inEth0, ap(p.client, port), ap(p.clusterIP, 80)).v.dst.Addr()
		}
		// Only a client that is known to exist sticks.
		c := n.newConn(ap(p.client, port), ap(p.clusterIP, 80), netip.AddrPort{}, inTun0)
		c.server = c.syn(t).v.dst
		if c.server.Addr() == p.pod1 {
			c.out = inPod1
		} else if c.server.Addr() == p.pod2 {
			c.out = inPod2
		}
		c.talk(t, "<S.", ".")
		return c.server.Addr()
	}
	many := func(f func()) map[netip.Addr]bool {
		used := map[netip.Addr]bool{}
		for range 40 {
			f()
			used[send()] = true
		}
		return used
	}
	if used := many(func() {}); len(used) != 1 {
		t.Errorf("one client was given %d endpoints", len(used))
	}
	if used := many(func() { n.age(t, 99) }); len(used) != 1 {
		t.Errorf("one client was given %d endpoints within the time-out", len(used))
	}
	late := uint32(101)
	if used := many(func() { late++; n.age(t, late) }); len(used) < 3 {
		t.Errorf("one client was given %d endpoints of 4 after the time-out", len(used))
	}
	// An endpoint that is gone is no longer stuck to.
	gone := send()
	rest := *sp
	rest.Endpoints = nil
	for _, e := range sp.Endpoints {
		if e.Addr.Addr() != gone {
			rest.Endpoints = append(rest.Endpoints, e)
		}
	}
	n.serve(t, &rest)
	if used := many(func() {}); len(used) != 1 || used[gone] {
		t.Errorf("client was given %v after %s had gone", used, gone)
	}
	n.fillAffinities(t)
	if used := many(func() {}); len(used) != 1 {
		t.Errorf("one client was given %d endpoints while another Service has many clients", len(used))
	}
}

// fillAffinities has as many clients of another Service as there is room for.
func (n *packetNode) fillAffinities(t *testing.T) {
	t.Helper()
	m := n.m(objects.TCMapAffinities)
	for i := range m.MaxEntries() {
		must.Do(t, m.Put(objects.TCAffinityKey{Client: objects.TCAddr{W: [4]uint32{i}}, Service: 1 << 30, Family: 4},
			objects.TCAffinity{Backend: 1 << 30, Seen: objects.BootSeconds()}))
	}
}

// age lets every affinity be this many seconds old.
func (n *packetNode) age(t *testing.T, by uint32) {
	t.Helper()
	var last []objects.TCAffinityKey
	must.Do(t, objects.Each(n.m(objects.TCMapAffinities), func(k objects.TCAffinityKey, _ objects.TCAffinity) { last = append(last, k) }))
	for _, k := range last {
		var a objects.TCAffinity
		must.Do(t, n.m(objects.TCMapAffinities).Lookup(k, &a))
		a.Seen = objects.BootSeconds() - by
		must.Do(t, n.m(objects.TCMapAffinities).Put(k, a))
	}
}

// spread: without affinity the flows of a client go to all endpoints alike.
func (n *packetNode) spread(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here), endpoint(p.far, 8080, elsewhere),
		endpoint(p.far2, 8080, elsewhere)))
	used := map[netip.Addr]int{}
	for i := range uint16(400) {
		r := n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000+i), dst: ap(p.clusterIP, 80), flags: first(proto)})
		used[r.v.dst.Addr()]++
	}
	for a, count := range used {
		if count < 60 || count > 140 { // 100 ± 4.6 standard deviations
			t.Errorf("%s was given %d of 400 flows", a, count)
		}
	}
	if len(used) != 4 {
		t.Errorf("flows went to %d endpoints of 4", len(used))
	}
}

// noSNATAddress: better no packet than one from nowhere.
func (n *packetNode) noSNATAddress(t *testing.T, p *plan, proto uint8) {
	n.onThread(t, func() error {
		n.node.OnUplinks(map[int]attach.Uplink{n.ifindex["eth0"]: {Name: "eth0"}, n.ifindex["tun0"]: {Name: "tun0"}})
		return nil
	})
	t.Cleanup(func() { n.onThread(t, n.describe) })
	n.setNode(t, func(node *intent.Node) { node.Addrs = nil })
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: first(proto)}).
		want(t, actDrop, objects.TCVerdictDROP_NO_SNAT_ADDR)
}
