package ebpf

import (
	"bytes"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/intent"
)

func TestPacketOfNoService(t *testing.T) {
	n := newPacketNode(t)
	t.Run("PodToEndpoint", func(t *testing.T) { eachTransport(t, n, n.podToEndpoint) })
	t.Run("ConntrackOwns", func(t *testing.T) { eachTransport(t, n, n.conntrackOwns) })
	t.Run("ConntrackClaims", func(t *testing.T) { eachTransport(t, n, n.conntrackClaims) })
}

// podToEndpoint: packets between a pod and an endpoint, as a socket has
// translated them, are sent on as they are but for a hop.
func (n *packetNode) podToEndpoint(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here), endpoint(p.far, 8080, elsewhere)))
	client := ap(p.pod1, 40000)
	for _, tt := range []struct {
		from at
		src  netip.AddrPort
		dst  netip.AddrPort
		way  uint32
		hops uint8
	}{
		{inPod1, client, ap(p.pod2, 8080), wayPod, 0},
		{inPod2, ap(p.pod2, 8080), client, wayPod, 0},
		{inPod1, client, ap(p.far, 8080), wayOut, 1},
		{inTun0, ap(p.far, 8080), client, wayPod, 0},
	} {
		in := frame{proto: proto, src: tt.src, dst: tt.dst, flags: "S", payload: []byte("abc")}
		r := n.send(t, tt.from, in)
		r.want(t, actRedirect, tcVerdictPASSED_DIRECT)
		r.wantPath(t, tt.src, tt.dst)
		sameBut(t, in.bytes(n, tt.from.iface), r.out, tt.hops)
		if w := n.lastWay(t); w.kind != tt.way {
			t.Errorf("%s -> %s goes %+v", tt.src, tt.dst, w)
		}
	}
	strangers := []frame{
		{src: ap(p.client, 40000), dst: ap(p.pod2, 8080)}, // not of the cluster
		{src: client, dst: ap(p.pod2, 8081)},              // no endpoint
		{src: ap(p.pod2, 8080), dst: ap(p.client, 40000)},
	}
	for _, f := range strangers {
		f.proto, f.flags = proto, "S"
		hook := inPod1
		if f.src.Addr() == p.client {
			hook = inEth0
		}
		n.untouched(t, f.src.String()+" to "+f.dst.String(), hook, f.bytes(n, hook.iface), tcVerdictPASS_OTHER)
	}
	// A NetworkPolicy is enforced by netfilter, and the last hop answered by it.
	n.setNode(t, func(node *intent.Node) { node.PolicedPods = []netip.Addr{p.pod2} })
	n.untouched(t, "policed", inPod1, frame{proto: proto, src: client, dst: ap(p.pod2, 8080), flags: "S"}.bytes(n, "pod1"), tcVerdictPASS_OTHER)
	n.untouched(t, "last hop", inPod1, frame{proto: proto, src: client, dst: ap(p.far, 8080), flags: "S", ttl: 1}.bytes(n, "pod1"), tcVerdictPASS_OTHER)
}

// conntrackOwns: the answer to a connection that was masqueraded from a port
// which is also a NodePort is no request.
func (n *packetNode) conntrackOwns(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here)))
	server, node := ap(p.client, 80), ap(p.eth0, 30080)
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(inet(p)), TimeOut: 60,
		Forward: ipTuple(proto, ap(p.pod1, 5555), server),
		Reverse: ipTuple(proto, server, node),
	}
	if proto == protoTCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3} // TCP_CONNTRACK_ESTABLISHED
	}
	var err error
	n.do(func() { err = netlink.ConntrackCreate(netlink.ConntrackTable, inet(p), flow) })
	if err != nil {
		t.Skipf("needs ctnetlink to make a conntrack entry: %v", err)
	}
	in := frame{proto: proto, src: server, dst: node, flags: ".", payload: []byte("answer")}
	r := n.send(t, inEth0, in)
	if r.verdicts[tcVerdictPASS_CONNTRACK] != 1 || r.code != actNext || !bytes.Equal(r.out, in.bytes(n, "eth0")) {
		t.Errorf("answer to a masqueraded connection: code %d, %s", r.code, verdictList(r.verdicts))
	}
	in.src = ap(p.client, 81)
	n.send(t, inEth0, in).want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
}

// conntrackClaims: a client's port may be that of its earlier connection to the
// same endpoint, which a proxy translated in netfilter.
func (n *packetNode) conntrackClaims(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod2, 8080, here)))
	client, other, server := ap(p.pod1, 40000), ap(p.pod1, 40001), ap(p.pod2, 8080)
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(inet(p)), TimeOut: 60,
		Forward: ipTuple(proto, client, ap(p.clusterIP, 81)),
		Reverse: ipTuple(proto, server, client),
	}
	if proto == protoTCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3} // TCP_CONNTRACK_ESTABLISHED
	}
	var err error
	n.do(func() { err = netlink.ConntrackCreate(netlink.ConntrackTable, inet(p), flow) })
	if err != nil {
		t.Skipf("needs ctnetlink to make a conntrack entry: %v", err)
	}
	n.foreign = true
	n.setNode(t, func(*intent.Node) {})
	defer func() {
		n.foreign = false
		n.setNode(t, func(*intent.Node) {})
	}()
	first := frame{proto: proto, src: client, dst: server, flags: "S"}
	n.untouched(t, "a port in use", inPod1, first.bytes(n, "pod1"), tcVerdictPASS_CONNTRACK)
	first.src = other
	n.send(t, inPod1, first).want(t, actRedirect, tcVerdictPASSED_DIRECT)
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
