package ebpf

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/node"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// TestPacketEgress: what a CNI's masquerade rule would do, with flows of our own.
func TestPacketEgress(t *testing.T) {
	n := newPacketNode(t)
	for name, f := range map[string]func(*testing.T, *plan, uint8){
		"Opens": n.egressOpens, "LeftToNetfilter": n.egressLeft, "Errors": n.egressErrors, "Fragments": n.egressFragments,
		"FragmentsOvertake": n.egressFragmentsOvertake,
		"PortsTaken":        n.egressPortsTaken, "PodReplaced": n.egressPodReplaced, "SwitchedOff": n.egressOff, "Forged": n.egressForged,
		"StackHasPort": n.egressStackHasPort, "Addresses": n.egressAddresses, "PolicySelects": n.egressPolicySelects,
	} {
		t.Run(name, func(t *testing.T) {
			eachTransport(t, n, f)
			t.Run("ICMP", func(t *testing.T) { eachFamily(t, n, func(t *testing.T, p *plan) { f(t, p, p.icmp()) }) })
		})
	}
	t.Run("EchoOfOthers", func(t *testing.T) { eachFamily(t, n, n.egressEchoOfOthers) })
	t.Run("EchoTimeout", func(t *testing.T) { eachFamily(t, n, n.egressEchoTimeout) })
	t.Run("Connection", func(t *testing.T) { eachFamily(t, n, n.egressConnection) })
	t.Run("MTU", func(t *testing.T) { eachFamily(t, n, n.egressMTU) })
	// As where no device has summed up a packet's bytes.
	defer func(before bool) { n.checksComplete = before }(n.checksComplete)
	n.checksComplete = false
	t.Run("EchoWithoutDeviceSum", func(t *testing.T) {
		eachFamily(t, n, func(t *testing.T, p *plan) { n.egressOpens(t, p, p.icmp()) })
	})
	t.Run("OfStack", func(t *testing.T) { eachFamily(t, n, n.egressOfStack) })
}

// leaving has the pods of this node leave with its address until the test ends.
func (n *packetNode) leaving(t testing.TB, change ...func(*intent.Node)) {
	t.Helper()
	n.setNode(t, func(node *intent.Node) {
		for _, p := range plans {
			node.Egress.Sources = append(node.Egress.Sources, hostRange(p.pod1), hostRange(p.pod2))
			node.Egress.Keep = append(node.Egress.Keep, netip.MustParsePrefix(p.farNet), hostRange(p.pod1), hostRange(p.pod2))
		}
		for _, f := range change {
			f(node)
		}
	})
}

func hostRange(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// icmp returns the ICMP of the family.
func (p *plan) icmp() uint8 {
	if p.family == model.IPv6 {
		return protoICMPv6
	}
	return protoICMP
}

// server is what a pod asks at an address outside: port 443, or an echo.
func server(proto uint8, a netip.Addr) netip.AddrPort {
	if isICMP(proto) {
		return ap(a, 0)
	}
	return ap(a, 443)
}

var egressVerdicts = []objects.TCVerdict{objects.TCVerdictFLOW_CREATED, objects.TCVerdictEGRESS_CREATED, objects.TCVerdictTRANSLATED_DIRECT}

// leave sends the first packet of a pod's connection to the outside, and wants it to leave.
func (n *packetNode) leave(t *testing.T, p *plan, proto uint8, port uint16) result {
	t.Helper()
	r := n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, port), dst: server(proto, p.client), flags: first(proto)})
	r.want(t, actRedirect, egressVerdicts...)
	if r.v == nil {
		t.FailNow()
	}
	return r
}

func (n *packetNode) egressOpens(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	ports, used := n.snatPorts(t), map[uint16]bool{}
	for port := uint16(40000); port < 40020; port++ {
		r := n.leave(t, p, proto, port)
		if r.v.src.Addr() != p.eth0 || r.v.dst != server(proto, p.client) || !slices.Contains(ports, r.v.src.Port()) {
			t.Errorf("%s -> %s, want from %s by a port for SNAT", r.v.src, r.v.dst, p.eth0)
		}
		if used[r.v.src.Port()] {
			t.Errorf("port %d is that of two connections", r.v.src.Port())
		}
		used[r.v.src.Port()] = true
		r = n.send(t, inEth0, back(r.v, "S.", []byte("answer")))
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, server(proto, p.client), ap(p.pod1, port))
		if w := n.lastNextHop(t); w.kind != nextHopPod {
			t.Errorf("the answer went %+v, want to the pod", w)
		}
	}
}

func (n *packetNode) egressConnection(t *testing.T, p *plan) {
	n.leaving(t)
	c := n.newConn(ap(p.pod1, 40000), ap(p.client, 443), ap(p.client, 443), inEth0)
	c.in = inPod1
	c.handshake(t)
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.talk(t, ".x", "<.y")
	c.lives(t)
	for _, k := range c.keys() {
		if f, found := n.flow(k); !found || f.Service != objects.ServiceEgress || f.Backend != 0 {
			t.Errorf("entry %+v: Service %#x, endpoint %d", k, f.Service, f.Backend)
		}
	}
}

// egressLeft: what netfilter decides about, as before.
func (n *packetNode) egressLeft(t *testing.T, p *plan, proto uint8) {
	out := func(dst netip.AddrPort, flags string) frame {
		return frame{proto: proto, src: ap(p.pod1, 40000), dst: dst, flags: flags}
	}
	outside := out(server(proto, p.client), first(proto))
	left := func(what string, f frame, verdict objects.TCVerdict) {
		t.Helper()
		n.untouched(t, what, inPod1, f.bytes(n, "pod1"), verdict)
	}
	left("egress off", outside, objects.TCVerdictPASS_OTHER)
	for _, tt := range []struct {
		what   string
		change func(*intent.Node)
	}{
		{"a destination to keep", func(node *intent.Node) { node.Egress.Keep = append(node.Egress.Keep, hostRange(p.client)) }},
		{"a pod of no source range", func(node *intent.Node) { node.Egress.Sources = []netip.Prefix{hostRange(p.pod2)} }},
		{"a pod with a policy", func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod1} }},
		{"unknown policies", func(node *intent.Node) { node.PoliciesUnknown = true }},
	} {
		n.leaving(t, tt.change)
		left(tt.what, outside, objects.TCVerdictPASS_OTHER)
	}
	n.leaving(t)
	left("the node itself", out(server(proto, p.eth0), first(proto)), objects.TCVerdictPASS_OTHER)
	left("another pod", out(server(proto, p.far), first(proto)), objects.TCVerdictPASS_OTHER)
	if proto == protoTCP {
		left("in the middle", out(server(proto, p.client), "."), objects.TCVerdictPASS_OTHER)
	}
	n.hasAddress(t, p.router)
	left("an address of the node that the agent does not name", out(server(proto, p.router), first(proto)), objects.TCVerdictPASS_OTHER)
	n.routeTo(t, p.client2, "pod2")
	left("behind a device of no uplink", out(server(proto, p.client2), first(proto)), objects.TCVerdictPASS_OTHER)
	n.xfrmPolicies(t, kernel.XfrmPolicy{Src: hostRange(p.eth0), Dst: hostRange(p.client), Dir: kernel.XfrmOut})
	left("IPsec", outside, objects.TCVerdictPASS_OTHER)
	n.xfrmPolicies(t)
	if isICMP(proto) {
		return // no function looks up an echo in conntrack
	}
	n.track(t, p, proto, ap(p.pod1, 40000), server(proto, p.client), server(proto, p.client), ap(p.eth0, 40000))
	left("known to netfilter", outside, objects.TCVerdictPASS_CONNTRACK)
	outside.src = ap(p.pod1, 40001)
	n.send(t, inPod1, outside).want(t, actRedirect, egressVerdicts...)
}

// hasAddress gives a device of the node an address until the test ends, as NodeLocal DNSCache does.
func (n *packetNode) hasAddress(t *testing.T, a netip.Addr) {
	t.Helper()
	addr := &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice()), Flags: unix.IFA_F_NODAD}
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: n.ifindex["tun0"]}}
	n.onThread(t, func() error { return netlink.AddrAdd(link, addr) })
	// The kernel makes the local route of an IPv6 address later (addrconf_dad_work).
	await.True(t, "the node has "+a.String(), func() (is bool) {
		n.onThread(t, func() error {
			routes, err := netlink.RouteGet(a.AsSlice())
			is = len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL
			return err
		})
		return is
	})
	t.Cleanup(func() { n.onThread(t, func() error { return netlink.AddrDel(link, addr) }) })
}

// xfrmPolicies makes these the IPsec policies until the test ends.
func (n *packetNode) xfrmPolicies(t *testing.T, list ...kernel.XfrmPolicy) {
	t.Helper()
	n.onThread(t, func() error { n.node.OnXfrm(list); return nil })
	t.Cleanup(func() { n.onThread(t, func() error { n.node.OnXfrm(nil); return nil }) })
}

func (n *packetNode) egressErrors(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	request := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto)}.bytes(n, "pod1")
	seen := n.sendRaw(t, inPod1, request)
	seen.want(t, actRedirect, egressVerdicts...)
	for _, k := range errorKinds {
		for _, from := range []netip.Addr{p.client, p.router} {
			r := n.send(t, inEth0, k.about(p, from, seen.out[14:], 0))
			n.wantError(t, r, k, p, from, p.pod1, request)
		}
	}
	answer := back(seen.v, "S.", []byte("the answer")).bytes(n, "eth0")
	got := n.sendRaw(t, inEth0, answer)
	r := n.send(t, inPod1, errorKinds[0].about(p, p.pod1, got.out[14:], 0))
	n.wantError(t, r, errorKinds[0], p, p.eth0, p.client, answer)
}

func (n *packetNode) egressFragments(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	f := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto)}
	f.id, f.payload = 7, bytes.Repeat([]byte("x"), 1600)
	v := n.sendFragments(t, inPod1, f.fragments(n, "pod1", 800), objects.TCVerdictFLOW_CREATED, objects.TCVerdictEGRESS_CREATED)
	if v.src.Addr() != p.eth0 {
		t.Errorf("the datagram has source %s, want %s", v.src, p.eth0)
	}
	answer := back(v, "S.", f.payload)
	answer.id = 8
	v = n.sendFragments(t, inEth0, answer.fragments(n, "eth0", 800))
	if v.dst != ap(p.pod1, 40000) {
		t.Errorf("the answer is for %s, want the pod", v.dst)
	}
}

// egressFragmentsOvertake: a fragment that comes before the first of its datagram is left to the stack, which knows no
// flow. The other fragments keep the way of the flow.
func (n *packetNode) egressFragmentsOvertake(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	f := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto), id: 7}
	f.payload = bytes.Repeat([]byte("x"), 1600)
	frags := f.fragments(n, "pod1", 800)
	n.untouched(t, "a later fragment of a pod", inPod1, frags[1], objects.TCVerdictPASS_FRAGMENT)
	v := n.sendFragments(t, inPod1, frags, objects.TCVerdictFLOW_CREATED, objects.TCVerdictEGRESS_CREATED)
	answer := back(v, "S.", f.payload)
	answer.id = 8
	frags = answer.fragments(n, "eth0", 800)
	n.untouched(t, "a later fragment of an answer", inEth0, frags[1], objects.TCVerdictPASS_FRAGMENT)
	if v = n.sendFragments(t, inEth0, frags); v.dst != ap(p.pod1, 40000) {
		t.Errorf("the answer is for %s, want the pod", v.dst)
	}
}

// egressPortsTaken: a connection that finds no port is dropped, and one to another destination is not.
func (n *packetNode) egressPortsTaken(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	n.setSNATPorts(t, 50000)
	keep := n.leave(t, p, proto, 40000)
	if proto == protoTCP {
		n.send(t, inEth0, frame{proto: proto, src: keep.v.dst, dst: keep.v.src, flags: "S.", seq: serverISN, ack: 1}).
			want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: ".", seq: 1, ack: serverISN + 1}).
			want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	}
	second := frame{proto: proto, src: ap(p.pod2, 40000), dst: server(proto, p.client), flags: first(proto)}
	r := n.send(t, inPod2, second)
	if proto == protoTCP {
		r.want(t, actDrop, objects.TCVerdictDROP_EGRESS_PORTS)
	}
	second.dst = server(proto, p.client2)
	n.send(t, inPod2, second).want(t, actRedirect, egressVerdicts...)
}

// egressAddresses: a pod has one of the node's addresses, another where that one has no port, and none that the
// node has lost.
func (n *packetNode) egressAddresses(t *testing.T, p *plan, proto uint8) {
	own := []netip.Addr{p.eth0.Next(), p.eth0.Next().Next()} // the pods' addresses end in 5 and 6
	with := func(addresses ...netip.Addr) {
		n.leaving(t, func(node *intent.Node) {
			node.Addrs, node.Egress.Addresses = append(node.Addrs, addresses...), addresses
		})
	}
	with(own...)
	for port := uint16(40000); port < 40005; port++ {
		if seen := n.leave(t, p, proto, port).v.src.Addr(); seen != own[1] {
			t.Errorf("pod 1 leaves as %s, want %s", seen, own[1])
		}
	}
	second := frame{proto: proto, src: ap(p.pod2, 40000), dst: server(proto, p.client), flags: first(proto)}
	r := n.send(t, inPod2, second)
	r.want(t, actRedirect, egressVerdicts...)
	if seen := r.v.src.Addr(); seen != own[0] {
		t.Errorf("pod 2 leaves as %s, want %s", seen, own[0])
	}
	answer := back(r.v, "S.", nil)
	r = n.send(t, inEth0, answer)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, server(proto, p.client), second.src)
	with(own[1])
	n.untouched(t, "an answer to an address that the node has lost", inEth0, answer.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)

	own = append(own, own[1].Next())
	with(own...)
	n.setSNATPorts(t, 50000)
	if proto != protoTCP {
		return // its flows give way to new ones
	}
	for i, want := range []netip.Addr{own[2], own[0], own[1], {}} { // by turns
		c := frame{proto: proto, src: ap(p.pod1, uint16(41000+i)), dst: server(proto, p.client2), flags: "S"}
		r := n.send(t, inPod1, c)
		if !want.IsValid() {
			r.want(t, actDrop, objects.TCVerdictDROP_EGRESS_PORTS)
			return
		}
		r.want(t, actRedirect, egressVerdicts...)
		if r.v.src != ap(want, 50000) {
			t.Errorf("connection %d leaves from %s, want %s", i, r.v.src, ap(want, 50000))
		}
		n.send(t, inEth0, frame{proto: proto, src: r.v.dst, dst: r.v.src, flags: "S.", seq: serverISN, ack: 1}).
			want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		c.flags, c.seq, c.ack = ".", 1, serverISN+1
		n.send(t, inPod1, c).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	}
}

// egressPodReplaced: another pod with the address gets no answer to what the one before has asked.
func (n *packetNode) egressPodReplaced(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	asked := n.leave(t, p, proto, 40000)
	n.ageFlows(t, 2)
	n.node.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{
		p.pod1: {Ifindex: n.ifindex["pod2"], PodMAC: podMAC("pod2"), HostMAC: n.mac["pod2"]},
	}})
	t.Cleanup(func() { n.onThread(t, n.describe) })
	n.send(t, inEth0, back(asked.v, "S.", nil)).want(t, actDrop, objects.TCVerdictDROP_POD_REPLACED)
}

// egressOff: known connections go on, new ones are netfilter's.
func (n *packetNode) egressOff(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	asked := n.leave(t, p, proto, 40000)
	n.setNode(t, func(node *intent.Node) { node.Egress = egress.Plan{} })
	again := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto)}
	r := n.send(t, inPod1, again)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, asked.v.src, asked.v.dst)
	n.send(t, inEth0, back(asked.v, "S.", nil)).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	again.src = ap(p.pod1, 40001)
	n.untouched(t, "a new connection", inPod1, again.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
}

// egressPolicySelects: a connection goes on when a NetworkPolicy selects its pod, and new ones are netfilter's.
func (n *packetNode) egressPolicySelects(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	request := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto)}
	asked := n.leave(t, p, proto, 40000)
	answer := back(asked.v, "S.", []byte("answer"))
	for what, change := range map[string]func(*intent.Node){
		"a policy":         func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod1} },
		"unknown policies": func(node *intent.Node) { node.PoliciesUnknown = true },
		"an unknown pod":   func(node *intent.Node) { node.PoliciesExist = true },
	} {
		n.leaving(t, change)
		for range 2 { // also with a new look at the next hop
			n.ageFlows(t, 2)
			r := n.send(t, inEth0, answer)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, request.dst, request.src)
			r = n.send(t, inPod1, request)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, asked.v.src, asked.v.dst)
		}
		other := request
		other.src = ap(p.pod1, 40001)
		n.untouched(t, "a new connection with "+what, inPod1, other.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
		r := n.send(t, inEth0, errorKinds[0].about(p, p.client, asked.out[14:], 0))
		n.wantError(t, r, errorKinds[0], p, p.client, p.pod1, request.bytes(n, "pod1"))
	}
}

// egressForged: the destination alone answers, and no pod speaks for another.
func (n *packetNode) egressForged(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	asked := n.leave(t, p, proto, 40000)
	answer := back(asked.v, "S.", nil)
	if isICMP(proto) { // netfilter decides about replies of pods, and delivers none to a pod without a request
		n.untouched(t, "an answer of a pod", inPod2, answer.bytes(n, "pod2"), objects.TCVerdictPASS_OTHER)
	} else {
		n.send(t, inPod2, answer).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
	}
	other := answer
	other.src = server(proto, p.client2)
	n.untouched(t, "an answer of another host", inEth0, other.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	forged := frame{proto: proto, src: ap(p.pod1, 40000), dst: server(proto, p.client), flags: first(proto)}
	n.send(t, inPod2, forged).want(t, actDrop, objects.TCVerdictDROP_SOURCE)
	forged.src = ap(p.pod1, 40001)
	n.untouched(t, "another pod's address", inPod2, forged.bytes(n, "pod2"), objects.TCVerdictPASS_SOURCE)
}

// egressStackHasPort: a packet of the node's stack whose port a flow of egress has gets another one,
// and its answer comes back to the stack.
func (n *packetNode) egressStackHasPort(t *testing.T, p *plan, proto uint8) {
	n.leaving(t)
	seen := n.leave(t, p, proto, 40000).v.src
	own := frame{proto: proto, src: seen, dst: server(proto, p.client), flags: first(proto)}
	r := n.send(t, outEth0, own)
	r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictPORT_CHANGED, objects.TCVerdictTRANSLATED_FROM_STACK)
	if r.v.src.Addr() != p.eth0 || r.v.src.Port() == seen.Port() {
		t.Errorf("leaves as %s, want another port than %s", r.v.src, seen)
	}
	r = n.send(t, inEth0, back(r.v, "S.", nil))
	r.wantPath(t, server(proto, p.client), seen)
	if r.code != actNext {
		t.Errorf("the answer: code %d, want the stack", r.code)
	}
}

// egressEchoOfOthers: only echo requests of pods to the outside, and the replies to them, are ours.
func (n *packetNode) egressEchoOfOthers(t *testing.T, p *plan) {
	n.leaving(t)
	proto, pod, out := p.icmp(), ap(p.pod1, 40000), ap(p.client, 0)
	seen := n.leave(t, p, proto, 40000).v.src
	zero := n.leave(t, p, proto, 0).v.src
	r := n.send(t, inEth0, frame{proto: proto, src: out, dst: zero})
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	// The pod knows its identifier 0 again. A frame with port 0 twice is a request.
	reply, request, other := []byte{r.v.icmpType, 0, 0, 0, 0, 0, 0, 1}, uint8(8), uint8(13)
	if p.family == model.IPv6 {
		request, other = 128, 133
	}
	if r.v.dst.Addr() != p.pod1 || r.v.icmpWord != 1 {
		t.Errorf("the reply runs %s -> %s, identifier %d", r.v.src, r.v.dst, r.v.icmpWord>>16)
	}
	for _, tt := range []struct {
		what     string
		hook     at
		src, dst netip.AddrPort
		icmp     []byte
	}{
		{"the outside asks the node", inEth0, ap(p.client, seen.Port()), ap(p.eth0, 0), nil},
		{"the outside asks a pod", inEth0, ap(p.client, 40000), ap(p.pod1, 0), nil},
		{"a pod answers the outside", inPod1, ap(p.pod1, 0), ap(p.client, 40000), nil},
		{"a pod answers the outside with the identifier 0", inPod1, pod, out, reply},
		{"the node answers the outside", outEth0, ap(p.eth0, 0), ap(p.client, seen.Port()), nil},
		{"the node asks with an identifier of its own", outEth0, ap(p.eth0, 65000), out, nil},
		{"the outside answers the node", inEth0, out, ap(p.eth0, 65000), nil},
		{"the outside answers with the identifier 0", inEth0, out, ap(p.eth0, 0), reply},
		{"the outside answers a pod's own address", inEth0, out, pod, nil},
		{"a pod asks the node", inPod1, pod, ap(p.eth0, 0), nil},
		{"a pod asks a pod of another node", inPod1, pod, ap(p.far, 0), nil},
		{"an echo with a code", inPod1, pod, out, []byte{request, 1, 0, 0, 156, 64, 0, 1}},
		{"a timestamp, or router solicitation", inPod1, pod, out, []byte{other, 0, 0, 0, 156, 64, 0, 1}},
	} {
		f := frame{proto: proto, src: tt.src, dst: tt.dst, icmp: tt.icmp}
		n.untouched(t, tt.what, tt.hook, f.bytes(n, tt.hook.iface), objects.TCVerdictPASS_OTHER)
	}
	for _, tt := range []struct {
		what  string
		hook  at
		from  netip.Addr
		about frame
	}{
		{"an error about the node's answer", inEth0, p.client, frame{src: ap(p.eth0, 0), dst: ap(p.client, seen.Port())}},
		{"an error about the node's own request", inEth0, p.client, frame{src: ap(p.eth0, 65000), dst: out}},
		{"a pod's error about a request of the outside", inPod1, p.pod1, frame{src: out, dst: ap(p.pod1, 0)}},
	} {
		tt.about.proto = proto
		k := errorKinds[0].about(p, tt.from, tt.about.bytes(n, "eth0")[14:], 0)
		n.untouched(t, tt.what, tt.hook, k.bytes(n, tt.hook.iface), objects.TCVerdictPASS_OTHER)
	}
	n.send(t, inPod1, frame{proto: proto, src: pod, dst: out}).wantPath(t, seen, out)
}

// egressEchoTimeout: an answered echo keeps its identifier for the timeout of UDP without an answer.
func (n *packetNode) egressEchoTimeout(t *testing.T, p *plan) {
	n.leaving(t)
	asked := n.leave(t, p, p.icmp(), 40000)
	reply := back(asked.v, "", nil)
	n.send(t, inEth0, reply).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	limit := objects.Seconds(objects.DefaultTimeouts.UDPNew)
	n.ageFlows(t, limit-5)
	n.send(t, inEth0, reply).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	n.ageFlows(t, limit+5)
	n.untouched(t, "a reply after the timeout", inEth0, reply.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	n.leave(t, p, p.icmp(), 40000)
}

func (n *packetNode) egressMTU(t *testing.T, p *plan) {
	defer func(before bool) { n.checksComplete = before }(n.checksComplete)
	n.checksComplete = false // see TestPacketAnswers
	n.leaving(t)
	n.setRouteMTUs(t, "eth0", map[string]uint32{p.all: mtuRoute})
	f := n.lengthen(frame{proto: protoUDP, src: ap(p.pod1, 40000), dst: ap(p.client, 443)}, mtuRoute+1)
	n.untouched(t, "the first packet, which the stack answers", inPod1, f.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	n.leave(t, p, protoUDP, 40000)
	r := n.send(t, inPod1, f)
	n.wantAnswer(t, inPod1, f, r, objects.TCVerdictANSWERED_TOO_BIG)
}

// egressOfStack: the stack answers the pod with the node's address where a packet cannot go on.
func (n *packetNode) egressOfStack(t *testing.T, p *plan) {
	n.leaving(t)
	expired := frame{proto: protoTCP, src: ap(p.pod1, 40000), dst: ap(p.client, 443), flags: "S", ttl: 1}
	n.untouched(t, "a packet whose TTL ends", inPod1, expired.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	echo := frame{proto: p.icmp(), src: ap(p.pod1, 40000), dst: ap(p.client, 0), ttl: 1}
	n.untouched(t, "an echo whose TTL ends", inPod1, echo.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	n.leave(t, p, protoTCP, 40001)
	expired.src = ap(p.pod1, 40001)
	n.untouched(t, "a packet of a flow whose TTL ends", inPod1, expired.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	unseen := frame{proto: protoTCP, src: ap(p.pod1, 40000), dst: ap(p.eth0.Next().Next().Next(), 443), flags: "S"}
	n.untouched(t, "an unknown neighbor", inPod1, unseen.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
}

// TestEgressAddressLost: flows with an address that the node loses end, and others go on.
func TestEgressAddressLost(t *testing.T) {
	n := newPacketNode(t)
	n.leaving(t)
	v4, v6 := plans["IPv4"], plans["IPv6"]
	lost, kept := n.leave(t, v4, protoTCP, 40000), n.leave(t, v6, protoTCP, 40000)
	t.Cleanup(func() { n.onThread(t, n.describe) })
	n.node.OnUplinks(map[int]attach.Uplink{
		n.ifindex["eth0"]: {Name: "eth0", V4: addr("192.0.2.2"), V6: v6.eth0},
		n.ifindex["tun0"]: {Name: "tun0", V4: v4.tun0, V6: v6.tun0},
	})
	n.leaving(t, func(node *intent.Node) { node.Addrs[0] = addr("192.0.2.2") })
	again := frame{proto: protoTCP, src: ap(v4.pod1, 40000), dst: ap(v4.client, 443), flags: "."}
	n.untouched(t, "the pod's next packet", inPod1, again.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	n.untouched(t, "a late answer", inEth0, back(lost.v, "S.", nil).bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	n.send(t, inEth0, back(kept.v, "S.", nil)).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	if r := n.leave(t, v4, protoTCP, 40001); r.v.src.Addr() != addr("192.0.2.2") {
		t.Errorf("a new connection has source %s, want the new address", r.v.src)
	}
}

// TestEgressAddressLostMeanwhile: the node loses an address while no agent runs.
func TestEgressAddressLostMeanwhile(t *testing.T) {
	n := newPacketNode(t)
	p := plans["IPv4"]
	own := p.eth0.Next()
	n.leaving(t, func(node *intent.Node) {
		node.Addrs, node.Egress.Addresses = append(node.Addrs, own), []netip.Addr{own}
	})
	lost := n.leave(t, p, protoTCP, 40000)
	t.Cleanup(func() { n.onThread(t, n.describe) })
	w := node.New(&n.cfg, n.objects, n.services.HasAddr, nil)
	w.OnSourcesLost(n.flows.ForgetSources)
	must.Do(t, w.Read(false))
	current := defaultNode()
	n.onThread(t, func() error { return w.Write(&current) })
	n.untouched(t, "a late answer", inEth0, back(lost.v, "S.", nil).bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
}

// TestEgressPortsOfCopiedFlows: flows that other maps had get their answers.
func TestEgressPortsOfCopiedFlows(t *testing.T) {
	n := newPacketNode(t)
	n.leaving(t)
	p := plans["IPv4"]
	asked := n.leave(t, p, protoTCP, 40000)
	port := asked.v.src.Port()
	must.Do(t, n.m(objects.TCMapEgressPorts).Put(uint32(port/8), uint64(0)))
	n.untouched(t, "an answer to a port that was not used", inEth0, back(asked.v, "S.", nil).bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	must.Do(t, n.objects.Filter.Fill(n.objects.Maps))
	n.send(t, inEth0, back(asked.v, "S.", nil)).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
}
