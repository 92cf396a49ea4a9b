package ebpf

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

func TestPacketOfNoService(t *testing.T) {
	n := newPacketNode(t)
	t.Run("PodToEndpoint", func(t *testing.T) { eachTransport(t, n, n.podToEndpoint) })
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
		{inPod1, client, ap(p.pod2, 8080), nextHopPod, 0},
		{inPod2, ap(p.pod2, 8080), client, nextHopPod, 0},
		{inPod1, client, ap(p.far, 8080), nextHopNeigh, 1},
		{inTun0, ap(p.far, 8080), client, nextHopPod, 0},
	} {
		in := frame{proto: proto, src: tt.src, dst: tt.dst, flags: "S", payload: []byte("abc")}
		r := n.send(t, tt.from, in)
		r.want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
		r.wantPath(t, tt.src, tt.dst)
		sameBut(t, in.bytes(n, tt.from.iface), r.out, tt.hops)
		if w := n.lastNextHop(t); w.kind != tt.way {
			t.Errorf("%s -> %s goes %+v", tt.src, tt.dst, w)
		}
	}
	strangers := []frame{
		{src: ap(p.client, 40000), dst: ap(p.pod2, 8080)}, // not of the cluster
		{src: client, dst: ap(p.pod2, 8081)},              // no endpoint
		{src: ap(p.pod2, 8080), dst: ap(p.client, 40000)},
	}
	hooks := map[netip.Addr]at{p.client: inEth0, p.pod1: inPod1, p.pod2: inPod2}
	for _, f := range strangers {
		f.proto, f.flags = proto, "S"
		hook := hooks[f.src.Addr()]
		n.untouched(t, f.src.String()+" to "+f.dst.String(), hook, f.bytes(n, hook.iface), objects.TCVerdictPASS_OTHER)
	}
	// A NetworkPolicy is enforced by netfilter, and the last hop answered by it.
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod2} })
	n.untouched(t, "policed", inPod1, frame{proto: proto, src: client, dst: ap(p.pod2, 8080), flags: "S"}.bytes(n, "pod1"),
		objects.TCVerdictPASS_OTHER)
	n.untouched(t, "last hop", inPod1, frame{proto: proto, src: client, dst: ap(p.far, 8080), flags: "S", ttl: 1}.bytes(n, "pod1"),
		objects.TCVerdictPASS_OTHER)
}
