package ebpf

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// TestPacketConntrack is about packets that netfilter may know, too.
func TestPacketConntrack(t *testing.T) {
	n := newPacketNode(t)
	t.Run("Owns", func(t *testing.T) { eachTransport(t, n, n.conntrackOwns) })
	t.Run("Claims", func(t *testing.T) { eachTransport(t, n, n.conntrackClaims) })
	t.Run("PortInUse", func(t *testing.T) { eachTransport(t, n, n.conntrackHasPort) })
	t.Run("TupleTaken", func(t *testing.T) { eachFamily(t, n, n.connectionElsewhere) })
	t.Run("Drains", func(t *testing.T) { eachTransport(t, n, n.conntrackMeetsWhatRuns) })
	t.Run("PortTaken", func(t *testing.T) { eachTransport(t, n, n.conntrackTakesPort) })
	t.Run("PortTakenOnTheWayOut", func(t *testing.T) { eachTransport(t, n, n.stackTakesPort) })
	t.Run("PortOfARequestTaken", func(t *testing.T) { eachFamily(t, n, n.stackTakesRequestsPort) })
}

// track makes the entry of a connection that netfilter has translated: from src to
// whatever address, and the answers come from server to seen.
func (n *packetNode) track(t *testing.T, p *plan, proto uint8, src, dst, server, seen netip.AddrPort) {
	t.Helper()
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(inet(p)), TimeOut: 60,
		Forward: ipTuple(proto, src, dst), Reverse: ipTuple(proto, server, seen),
	}
	if proto == protoTCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3} // TCP_CONNTRACK_ESTABLISHED
	}
	var err error
	n.do(func() { err = netlink.ConntrackCreate(netlink.ConntrackTable, inet(p), flow) })
	if err != nil {
		t.Skipf("needs ctnetlink to make a conntrack entry: %v", err)
	}
	t.Cleanup(func() {
		n.do(func() { err = netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		must.Do(t, err)
	})
}

// asking has the programs ask conntrack about packets of endpoints, as long as
// netfilter translates connections of its own.
func (n *packetNode) asking(t *testing.T) {
	set := func(asking bool) {
		n.onThread(t, func() error { n.node.OnNAT(asking, "a test"); return nil })
	}
	set(true)
	t.Cleanup(func() { set(false) })
}

// conntrackOwns: the answer to a connection that was masqueraded from a port
// which is also a NodePort is no request.
func (n *packetNode) conntrackOwns(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here)))
	server, node := ap(p.client, 80), ap(p.eth0, 30080)
	n.track(t, p, proto, ap(p.pod1, 5555), server, server, node)
	in := frame{proto: proto, src: server, dst: node, flags: ".", payload: []byte("answer")}
	r := n.send(t, inEth0, in)
	if r.verdicts[objects.TCVerdictPASS_CONNTRACK] != 1 || r.code != actNext || !bytes.Equal(r.out, in.bytes(n, "eth0")) {
		t.Errorf("answer to a masqueraded connection: code %d, %s", r.code, verdictList(r.verdicts))
	}
	in.src, in.flags = ap(p.client, 81), "S"
	n.send(t, inEth0, in).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
}

// conntrackClaims: a client's port may be that of its earlier connection to the
// same endpoint, which a proxy translated in netfilter.
func (n *packetNode) conntrackClaims(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here)))
	client, other, server := ap(p.pod1, 40000), ap(p.pod1, 40001), ap(p.pod2, 8080)
	n.track(t, p, proto, client, ap(p.clusterIP, 81), server, client)
	n.asking(t)
	first := frame{proto: proto, src: client, dst: server, flags: "S"}
	n.untouched(t, "a port in use", inPod1, first.bytes(n, "pod1"), objects.TCVerdictPASS_CONNTRACK)
	first.src = other
	n.send(t, inPod1, first).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
}

// conntrackMeetsWhatRuns: before the programs go, netfilter sees a question of each
// connection that bypassed it. An answer that it saw first would be masqueraded by a
// CNI, as the first packet of a pod.
func (n *packetNode) conntrackMeetsWhatRuns(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here)))
	client, server := ap(p.pod1, 40000), ap(p.pod2, 8080)
	ask := frame{proto: proto, src: client, dst: server, flags: ".", payload: []byte("question")}
	answer := frame{proto: proto, src: server, dst: client, flags: ".", payload: []byte("answer")}
	n.send(t, inPod1, ask).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
	t.Cleanup(func() { n.setNode(t, func(*intent.Node) {}) })
	must.Do(t, upgrade.StartDraining(n.m(objects.TCMapNodeSettings)))
	n.send(t, inPod2, answer).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT) // to the question before
	n.untouched(t, "the next question", inPod1, ask.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	n.track(t, p, proto, client, server, server, client)
	n.untouched(t, "the answer to it", inPod2, answer.bytes(n, "pod2"), objects.TCVerdictPASS_CONNTRACK)
}

// conntrackHasPort: a port that MASQUERADE has given to a connection with the same
// endpoint is not free for SNAT.
func (n *packetNode) conntrackHasPort(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	front, far := ap(p.clusterIP, 80), ap(p.far, 8080)
	n.track(t, p, proto, ap(p.client2, 5555), front, far, ap(p.tun0, 50000))
	r := n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40000), dst: front, flags: "S"})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if want := ap(p.tun0, 50001); r.v.src != want {
		t.Errorf("goes out as %s, want %s: netfilter has the other port", r.v.src, want)
	}
	// The other one is the first client's, which is being served: the second takes its place.
	r = n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 40001), dst: front, flags: "S"})
	r.want(t, actRedirect, objects.TCVerdictFLOW_REPLACED, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if want := ap(p.tun0, 50001); r.v.src != want {
		t.Errorf("goes out as %s, want %s: netfilter has the other port", r.v.src, want)
	}
}

// conntrackTakesPort: MASQUERADE knows nothing of the flow table and may choose
// the port of a flow that is over, or seems so. The answer is then netfilter's, and
// the flow, if it was not over, goes on by another port. A connection that runs
// keeps its port.
func (n *packetNode) conntrackTakesPort(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	client, front, far := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	ask := frame{proto: proto, src: client, dst: front, flags: "S"}
	var seen netip.AddrPort
	if proto == protoTCP {
		c := n.open(t, p, 40000)
		seen = c.seen
		n.track(t, p, proto, ap(p.client2, 5555), front, far, seen)
		c.say(t, "<.").wantPath(t, front, client)
		n.ageFlows(t, 2)
		c.say(t, "<.").wantPath(t, front, client)
		c.say(t, "R")
	} else {
		seen = n.send(t, inEth0, ask).v.src
		n.track(t, p, proto, ap(p.client2, 5555), front, far, seen)
	}
	answer := frame{proto: proto, src: far, dst: seen, flags: "."}
	n.ageFlows(t, 2)
	n.untouched(t, "an answer in a later second", inTun0, answer.bytes(n, "tun0"), objects.TCVerdictPASS_OTHER)
	r := n.send(t, inEth0, ask)
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.src == seen {
		t.Errorf("goes out as %s again, which netfilter has", seen)
	}
}

// stackTakesPort: what the node itself sends has a port that a flow to the same
// endpoint has, because MASQUERADE chose it, or a socket. Both are answered.
func (n *packetNode) stackTakesPort(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	client, front, far := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	seen := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "S"}).v.src
	free := ap(seen.Addr(), seen.Port()^1)
	ask := frame{proto: proto, src: seen, dst: far, flags: "S", payload: []byte("node's")}
	r := n.send(t, outTun0, ask)
	r.want(t, actNext, objects.TCVerdictPORT_CHANGED, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_FROM_STACK)
	r.wantPath(t, free, far)
	answered := func(to, from, at netip.AddrPort, code int, verdict objects.TCVerdict) {
		t.Helper()
		r := n.send(t, inTun0, frame{proto: proto, src: far, dst: to, flags: "S.", payload: []byte("answer")})
		r.want(t, code, verdict)
		r.wantPath(t, from, at)
	}
	answered(free, far, seen, actNext, objects.TCVerdictTRANSLATED_STACK)
	answered(seen, front, client, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	ask.flags = "."
	r = n.send(t, outTun0, ask)
	r.want(t, actNext, objects.TCVerdictTRANSLATED_FROM_STACK)
	r.wantPath(t, free, far)
	// That netfilter expects answers at its port is no reason to give them up to it.
	n.track(t, p, proto, ap(p.client2, 5555), far, far, seen)
	n.asking(t)
	n.ageFlows(t, 2)
	answered(seen, front, client, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	answered(free, far, seen, actNext, objects.TCVerdictTRANSLATED_STACK)
	// A port that no flow has stays.
	ask.src, ask.flags = ap(seen.Addr(), 50002), "S"
	n.untouched(t, "a port of nobody", outTun0, ask.bytes(n, "tun0"), objects.TCVerdictPASS_OTHER)
}

// stackTakesRequestsPort: the same of a TFTP request, which any port may answer.
func (n *packetNode) stackTakesRequestsPort(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	seen := n.datagram(t, inEth0, ap(p.client, 40000), ap(p.clusterIP, 80)).v.src
	other := ap(p.far, 5353)
	r := n.send(t, outTun0, frame{proto: protoUDP, src: seen, dst: other})
	r.want(t, actNext, objects.TCVerdictPORT_CHANGED, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_FROM_STACK)
	free := ap(seen.Addr(), seen.Port()^1)
	r.wantPath(t, free, other)
	r = n.send(t, inTun0, frame{proto: protoUDP, src: other, dst: free})
	r.want(t, actNext, objects.TCVerdictTRANSLATED_STACK)
	r.wantPath(t, other, seen)
}

// connectionElsewhere: a client uses a port again, and the Service has been left to
// another dataplane meanwhile. Not only the SYN is that one's.
func (n *packetNode) connectionElsewhere(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod2, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	c := n.openTo(t, client, front, ap(p.pod2, 8080), inPod2)
	c.say(t, "R")
	packet := frame{proto: protoTCP, src: client, dst: front, seq: c.sent + 1000}
	n.serve(t)
	for _, flags := range []string{"S", "."} {
		packet.flags = flags
		n.untouched(t, "after the Service has gone: "+flags, inEth0, packet.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	}
}

func inet(p *plan) netlink.InetFamily {
	if p.eth0.Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}

func ipTuple(proto uint8, src, dst netip.AddrPort) netlink.IPTuple {
	return netlink.IPTuple{
		Protocol: proto, SrcIP: src.Addr().AsSlice(), DstIP: dst.Addr().AsSlice(),
		SrcPort: src.Port(), DstPort: dst.Port(),
	}
}
