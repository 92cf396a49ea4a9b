package ebpf

import (
	"bytes"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// where says on which machine an endpoint is.
type where int

const (
	here where = iota
	elsewhere
)

// service builds a ServicePort of one family: ClusterIP and externalIP, port 80,
// NodePort 30080, routed to its endpoints.
func service(p *plan, proto uint8, endpoints ...intent.Endpoint) *intent.ServicePort {
	route := intent.ToCluster
	if len(endpoints) == 0 {
		route = intent.Reject
	}
	sp := &intent.ServicePort{
		ID: intent.PortID{
			Service: model.Name{Namespace: "default", Name: fmt.Sprintf("web-%d", proto)}, Number: 80,
			Protocol: model.Protocol(proto), Family: p.family,
		},
		Frontends: []intent.Frontend{
			{Kind: intent.ClusterIP, Addr: p.clusterIP, Port: 80, ExternalRoute: route, InternalRoute: route},
			{Kind: intent.NodePort, Port: 30080, ExternalRoute: route, InternalRoute: route},
			{Kind: intent.ExternalIP, Addr: p.externalIP, Port: 80, ExternalRoute: route, InternalRoute: route},
		},
		Endpoints: endpoints,
	}
	return sp
}

func endpoint(a netip.Addr, port uint16, w where) intent.Endpoint {
	return intent.Endpoint{Addr: ap(a, port), ClusterPolicy: true, LocalPolicy: w == here, OnThisNode: w == here}
}

// want fails unless the packet ended with this code and these verdicts, each once.
func (r result) want(t *testing.T, code int, verdicts ...objects.TCVerdict) {
	t.Helper()
	got := slices.Sorted(maps.Keys(r.verdicts))
	slices.Sort(verdicts)
	once := !slices.ContainsFunc(got, func(v objects.TCVerdict) bool { return r.verdicts[v] != 1 })
	if r.code != code || !slices.Equal(got, verdicts) || !once {
		t.Fatalf("packet ended with code %d and verdicts %s, want %d and %s",
			r.code, verdictList(r.verdicts), code, names(verdicts))
	}
}

func verdictList(m map[objects.TCVerdict]uint64) string {
	s := ""
	for _, v := range slices.Sorted(maps.Keys(m)) {
		s += fmt.Sprintf("%s×%d ", verdictName(v), m[v])
	}
	return s
}

func names(vs []objects.TCVerdict) string {
	s := ""
	for _, v := range vs {
		s += verdictName(v) + " "
	}
	return s
}

var verdictLabels = sync.OnceValues(func() ([]string, error) {
	spec, err := objects.LoadTC()
	if err != nil {
		return nil, err
	}
	return objects.VerdictNames(spec)
})

func verdictName(v objects.TCVerdict) string {
	labels, err := verdictLabels()
	if err != nil || int(v) >= len(labels) {
		return fmt.Sprint(int(v))
	}
	return labels[v]
}

// wantPath fails unless the packet now runs from src to dst.
func (r result) wantPath(t *testing.T, src, dst netip.AddrPort) {
	t.Helper()
	if r.v == nil {
		t.Fatalf("packet out cannot be read: %x", r.out)
	}
	if r.v.src != src || r.v.dst != dst {
		t.Fatalf("packet out runs %s -> %s, want %s -> %s", r.v.src, r.v.dst, src, dst)
	}
}

// sameBut fails unless out is in but for addresses, ports, sums, and TTL.
func sameBut(t *testing.T, in, out []byte, ttlLess uint8) {
	t.Helper()
	a, err := decode(in)
	must.Do(t, err)
	b, err := decode(out)
	must.Do(t, err)
	if a.ttl-ttlLess != b.ttl {
		t.Errorf("TTL %d became %d, want %d less", a.ttl, b.ttl, ttlLess)
	}
	if !bytes.Equal(a.payload, b.payload) || a.flags != b.flags || a.seq != b.seq || a.ack != b.ack || len(in) != len(out) {
		t.Errorf("more than the addresses changed:\n in  %x\n out %x", in, out)
	}
}

var transports = map[string]uint8{"TCP": protoTCP, "UDP": protoUDP}

// eachTransport runs a test for TCP and UDP in both families.
func eachTransport(t *testing.T, n *packetNode, f func(t *testing.T, p *plan, proto uint8)) {
	for _, name := range []string{"TCP", "UDP"} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) { f(t, p, transports[name]) })
		})
	}
}

func frontends(p *plan) map[string]netip.AddrPort {
	return map[string]netip.AddrPort{
		"ClusterIP": ap(p.clusterIP, 80), "NodePort": ap(p.eth0, 30080), "ExternalIP": ap(p.externalIP, 80),
	}
}

func first(proto uint8) string {
	if proto != protoUDP {
		return "S"
	}
	return ""
}

// A packet whose bytes a device has summed up is rewritten by helpers, any other
// in place.
func TestPacketTranslation(t *testing.T) {
	n := newPacketNode(t)
	if n.checksComplete {
		t.Run("ByHelpers", n.translation)
	}
	n.checksComplete = false
	t.Run("InPlace", n.translation)
}

func (n *packetNode) translation(t *testing.T) {
	t.Run("EndpointHere", func(t *testing.T) { eachTransport(t, n, n.endpointHere) })
	t.Run("NeighbourKnown", func(t *testing.T) { eachFamily(t, n, n.neighbourKnown) })
	t.Run("EndpointElsewhere", func(t *testing.T) { eachTransport(t, n, n.endpointElsewhere) })
	t.Run("FromPod", func(t *testing.T) { eachTransport(t, n, n.fromPod) })
	t.Run("EndpointBeyondPodNetwork", func(t *testing.T) { eachTransport(t, n, n.beyondPodNetwork) })
	t.Run("Hairpin", func(t *testing.T) { eachTransport(t, n, n.hairpin) })
	t.Run("OneClientPortTwoFrontends", func(t *testing.T) { eachTransport(t, n, n.sharedClientPort) })
	t.Run("MasqueradeAll", func(t *testing.T) { eachTransport(t, n, n.masqueradeAll) })
	t.Run("ThroughTheStack", func(t *testing.T) { eachTransport(t, n, n.throughTheStack) })
	t.Run("NoUDPChecksum", func(t *testing.T) { n.forget(t); n.noUDPChecksum(t, plans["IPv4"]) })
	t.Run("UDPChecksumThatBecomesZero", func(t *testing.T) { eachFamily(t, n, n.zeroResult) })
	t.Run("LongHeaders", func(t *testing.T) { eachTransport(t, n, n.longHeaders) })
	t.Run("FrameLongerThanPacket", func(t *testing.T) { eachTransport(t, n, n.padded) })
}

// endpointHere: the client's address stays; the packet goes into the pod by
// redirect_peer, and its answer out by the neighbor.
func (n *packetNode) endpointHere(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	port := uint16(40000)
	for kind, front := range frontends(p) {
		for size := range 4 {
			port++
			client, pod := ap(p.client, port), ap(p.pod1, 8080)
			in := frame{proto: proto, src: client, dst: front, flags: first(proto), seq: 7, payload: []byte("odd")[:size]}
			r := n.send(t, inEth0, in)
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, client, pod)
			sameBut(t, in.bytes(n, "eth0"), r.out, 0)
			if w := n.lastNextHop(t); w.kind != nextHopPod || w.ifindex != n.ifindex["pod1"] {
				t.Errorf("%s: way %+v, want into pod1", kind, w)
			}
			if r.v.ethDst.String() != podMAC("pod1").String() || r.v.ethSrc.String() != n.mac["pod1"].String() {
				t.Errorf("%s: frame from %s to %s, want the pod's", kind, r.v.ethSrc, r.v.ethDst)
			}

			answer := back(r.v, "S.", []byte("answer"))
			r = n.send(t, inPod1, answer)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, front, client)
			sameBut(t, answer.bytes(n, "pod1"), r.out, 1)
			if w := n.lastNextHop(t); w.kind != nextHopNeigh || w.ifindex != n.ifindex["eth0"] || w.gateway != p.gateway {
				t.Errorf("%s: way %+v, want out by eth0 over %s", kind, w, p.gateway)
			}

			r = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: ".", payload: []byte("more")})
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, client, pod)
		}
	}
}

// neighbourKnown: a flow remembers its next hop's address for one second, and
// the packet that asks for it anew goes by the kernel's neighbor table.
func (n *packetNode) neighbourKnown(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	in := n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: front, flags: "S"})
	answer := back(in.v, ".", nil)
	// byNeighbourTable: the kernel fills the addresses in; they are not in the frame yet.
	byNeighbourTable := func() {
		t.Helper()
		r := n.send(t, inPod1, answer)
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, front, client)
		if w := n.lastNextHop(t); w.kind != nextHopNeigh || w.ifindex != n.ifindex["eth0"] {
			t.Errorf("way %+v, want out by eth0", w)
		}
		if r.v.ethDst.String() != n.mac["pod1"].String() {
			t.Errorf("frame to %s, want its address unchanged", r.v.ethDst)
		}
	}
	straight := func(mac string) {
		t.Helper()
		r := n.send(t, inPod1, answer)
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, front, client)
		if r.v.ethDst.String() != mac || r.v.ethSrc.String() != n.mac["eth0"].String() {
			t.Errorf("frame from %s to %s, want from eth0 to %s", r.v.ethSrc, r.v.ethDst, mac)
		}
		var f objects.TCFlow
		must.Do(t, n.m(objects.TCMapFlows).Lookup(tupleOf(protoTCP, answer.src, answer.dst), &f))
		if f.NextHopKind != nextHopLink || int(f.NextHopIfindex) != n.ifindex["eth0"] {
			t.Errorf("the flow remembers way %d by device %d, want %d by eth0", f.NextHopKind, f.NextHopIfindex, nextHopLink)
		}
	}
	n.setNeighbour(t, "eth0", p.gateway, "")
	byNeighbourTable()
	byNeighbourTable() // the neighbor is unknown
	const one, two = "02:00:00:00:0a:01", "02:00:00:00:0a:02"
	for _, mac := range []string{one, two} {
		n.setNeighbour(t, "eth0", p.gateway, mac)
		n.ageFlows(t, 3)
		byNeighbourTable()
		straight(mac)
		straight(mac)
	}
	n.setNeighbour(t, "eth0", p.gateway, "")
	straight(two)
	n.ageFlows(t, 3)
	byNeighbourTable()
	byNeighbourTable()
	n.setNeighbour(t, "eth0", p.gateway, "02:00:00:00:09:09") // for the tests after this one
}

// setNeighbour makes a neighbor known for good; without an address it is
// forgotten.
func (n *packetNode) setNeighbour(t *testing.T, iface string, ip netip.Addr, mac string) {
	t.Helper()
	neighbor := &netlink.Neigh{LinkIndex: n.ifindex[iface], IP: ip.AsSlice(), State: netlink.NUD_PERMANENT}
	n.onThread(t, func() error {
		if mac == "" {
			return netlink.NeighDel(neighbor)
		}
		var err error
		if neighbor.HardwareAddr, err = net.ParseMAC(mac); err != nil {
			return err
		}
		return netlink.NeighSet(neighbor)
	})
}

// endpointElsewhere: the source becomes the address of the interface that
// leads there, with a port of the list.
func (n *packetNode) endpointElsewhere(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	ports := n.snatPorts(t)
	for kind, front := range frontends(p) {
		for size := range 4 {
			client, pod := ap(p.client, uint16(40000+size)), ap(p.far, 8080)
			in := frame{proto: proto, src: client, dst: front, flags: first(proto), payload: []byte("odd")[:size]}
			r := n.send(t, inEth0, in)
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
			if port := r.v.src.Port(); r.v.src.Addr() != p.tun0 || !slices.Contains(ports, port) {
				t.Errorf("%s: source %s, want %s and a port of the list", kind, r.v.src, p.tun0)
			}
			r.wantPath(t, r.v.src, pod)
			sameBut(t, in.bytes(n, "eth0"), r.out, 1)
			if w := n.lastNextHop(t); w.kind != nextHopNeigh || w.ifindex != n.ifindex["tun0"] || w.gateway != p.farGW {
				t.Errorf("%s: way %+v, want out by tun0 over %s", kind, w, p.farGW)
			}
			snat := r.v.src

			answer := back(r.v, "S.", []byte("answer"))
			r = n.send(t, inTun0, answer)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, front, client)
			sameBut(t, answer.bytes(n, "tun0"), r.out, 1)

			r = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: ".", payload: []byte("more")})
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, snat, pod)
		}
	}
}

// fromPod: a pod's packets to a Service. Its address stays, as the answer comes
// back through here anyhow; its port changes if its own sockets may use it.
func (n *packetNode) fromPod(t *testing.T, p *plan, proto uint8) {
	for _, e := range []intent.Endpoint{endpoint(p.pod2, 8080, here), endpoint(p.far, 8080, elsewhere)} {
		n.forget(t)
		n.serve(t, service(p, proto, e))
		for i, port := range []uint16{41000, 123} {
			client, front := ap(p.pod1, port), ap(p.clusterIP, 80)
			r := n.send(t, inPod1, frame{proto: proto, src: client, dst: front, flags: first(proto)})
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
			got := r.v.src
			if keeps := got.Port() == port; got.Addr() != p.pod1 || keeps != (port < 1024) {
				t.Errorf("packet %d from %s leaves from %s", i, client, got)
			}
			r.wantPath(t, got, e.Addr)
			from := inTun0
			if e.OnThisNode {
				from = inPod2
			}
			r = n.send(t, from, back(r.v, "S.", []byte("x")))
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, front, client)
			if w := n.lastNextHop(t); w.kind != nextHopPod || w.ifindex != n.ifindex["pod1"] {
				t.Errorf("answer goes %+v, want into pod1", w)
			}
		}
	}
}

// beyondPodNetwork: an endpoint that is no pod. The CNI may masquerade a pod
// towards it, in netfilter, so that the answer comes back in another way.
func (n *packetNode) beyondPodNetwork(t *testing.T, p *plan, proto uint8) {
	outside := ap(p.client2, 8080)
	n.serve(t, service(p, proto, endpoint(outside.Addr(), 8080, elsewhere)))
	client, front := ap(p.pod1, 41000), ap(p.clusterIP, 80)
	r := n.send(t, inPod1, frame{proto: proto, src: client, dst: front, flags: first(proto)})
	r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
	r.wantPath(t, ap(p.pod1, r.v.src.Port()), outside)
	r = n.send(t, outPod1, back(r.v, "S.", nil))
	r.want(t, actNext, objects.TCVerdictTRANSLATED_FROM_STACK)
	r.wantPath(t, front, client)
}

// hairpin: the endpoint is the client. It must see another address than its own.
func (n *packetNode) hairpin(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.pod1, 41000), ap(p.clusterIP, 80)
	r := n.send(t, inPod1, frame{proto: proto, src: client, dst: front, flags: first(proto)})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, ap(p.eth0, r.v.src.Port()), ap(p.pod1, 8080))
	r = n.send(t, inPod1, back(r.v, "S.", nil))
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, front, client)
}

// sharedClientPort: a client uses one port towards two addresses of a Service;
// at the endpoint they would be one connection, and must not be.
func (n *packetNode) sharedClientPort(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	client := ap(p.client, 40000)
	seen := map[netip.AddrPort]netip.AddrPort{}
	for _, front := range frontends(p) {
		r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto)})
		r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
		if other, ok := seen[r.v.src]; ok {
			t.Errorf("flows to %s and %s both reach the endpoint from %s", front, other, r.v.src)
		}
		seen[r.v.src] = front
	}
	for src, front := range seen {
		r := n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, 8080), dst: src, flags: "S."})
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, front, client)
	}
}

func (n *packetNode) masqueradeAll(t *testing.T, p *plan, proto uint8) {
	n.setNode(t, func(node *intent.Node) { node.MasqueradeAll = true })
	n.serve(t, service(p, proto, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.eth0, 30080)
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: first(proto)})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, ap(p.eth0, r.v.src.Port()), ap(p.pod1, 8080))
	r = n.send(t, inPod1, back(r.v, "S.", nil))
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, front, client)
}

// throughTheStack: policed pods and the node's own processes. The packet is
// translated and left to the stack; so is its answer, at egress and not before.
func (n *packetNode) throughTheStack(t *testing.T, p *plan, proto uint8) {
	policed := endpoint(p.pod1, 8080, here)
	policed.MustTraverseNetfilter = true
	host := endpoint(p.eth0, 8080, here)
	host.HostNetwork = true
	for i, e := range []intent.Endpoint{policed, host} {
		n.serve(t, service(p, proto, e))
		client, front := ap(p.client, uint16(40000+i)), ap(p.externalIP, 80)
		in := frame{proto: proto, src: client, dst: front, flags: first(proto), payload: []byte("abc")}
		r := n.send(t, inEth0, in)
		r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_STACK)
		r.wantPath(t, client, e.Addr)
		sameBut(t, in.bytes(n, "eth0"), r.out, 0)
		answer := back(r.v, "S.", []byte("abc"))
		if e.MustTraverseNetfilter {
			r = n.send(t, inPod1, answer)
			r.want(t, actNext, objects.TCVerdictPASS_OTHER)
			r.wantPath(t, e.Addr, client)
		}
		r = n.send(t, outEth0, answer)
		r.want(t, actNext, objects.TCVerdictTRANSLATED_FROM_STACK)
		r.wantPath(t, front, client)
		sameBut(t, answer.bytes(n, "eth0"), r.out, 0)
	}
}

// noUDPChecksum: 0 means none over IPv4 (RFC 768), and stays 0.
func (n *packetNode) noUDPChecksum(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	r := n.send(t, inEth0, frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), noSum: true})
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.sum != 0 {
		t.Errorf("UDP checksum 0 became %#x", r.v.sum)
	}
	answer := back(r.v, "", []byte("x"))
	answer.noSum = true
	r = n.send(t, inTun0, answer)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.sum != 0 {
		t.Errorf("UDP checksum 0 of the answer became %#x", r.v.sum)
	}
}

// zeroResult: a sum that comes out as 0 must be written as 0xffff.
func (n *packetNode) zeroResult(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: []byte{0, 0}}
	r := n.send(t, inEth0, f)
	// With the sum as payload the whole adds up to 0xffff.
	f.payload = []byte{byte(r.v.sum >> 8), byte(r.v.sum)}
	r = n.send(t, inEth0, f)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.sum != 0xffff {
		t.Errorf("UDP checksum became %#x, want 0xffff", r.v.sum)
	}
}

// longHeaders: IPv4 options, IPv6 extension headers.
func (n *packetNode) longHeaders(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	six := []byte{1, 4, 0, 0, 0, 0} // PadN
	variants := []frame{
		{options: []byte{7, 7, 4, 0, 0, 0, 0}},
		{options: bytes.Repeat([]byte{0x94, 4, 0, 0}, 10)},
	}
	if p.family == model.IPv6 {
		variants = []frame{
			{ext: []extension{{extHopByHop, six}}},
			{ext: []extension{{extDestOpts, six}}},
			{ext: []extension{{extRouting, []byte{0, 0, 0, 0, 0, 0}}}},
			{ext: []extension{{extHopByHop, append(six, 1, 6, 0, 0, 0, 0, 0, 0)}, {extDestOpts, six},
				{extRouting, []byte{4, 0, 0, 0, 0, 0}}, {extDestOpts, six}}},
		}
	}
	for i, f := range variants {
		client, front := ap(p.client, uint16(40000+i)), ap(p.clusterIP, 80)
		f.proto, f.src, f.dst, f.flags, f.payload = proto, client, front, first(proto), []byte("abc")
		r := n.send(t, inEth0, f)
		r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, r.v.src, ap(p.far, 8080))
		sameBut(t, f.bytes(n, "eth0"), r.out, 1)
		answer := back(r.v, "S.", []byte("abc"))
		answer.proto, answer.options, answer.ext = proto, f.options, f.ext
		r = n.send(t, inTun0, answer)
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, front, client)
	}
	if p.family == model.IPv6 {
		// An unfinished route: the address in the header is not the receiver's, nor
		// the one that the checksum covers.
		r := n.send(t, inEth0, frame{proto: proto, src: ap(p.client, 45000), dst: ap(p.clusterIP, 80), flags: first(proto),
			ext: []extension{{extRouting, append([]byte{4, 1, 0, 0, 0, 0}, p.far.AsSlice()...)}}})
		r.want(t, actNext, objects.TCVerdictPASS_OTHER)
	}
}

// padded: Ethernet pads short frames; the padding is no part of the packet.
func (n *packetNode) padded(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	for pad := range 5 {
		in := frame{proto: proto, src: ap(p.client, uint16(40000+pad)), dst: ap(p.clusterIP, 80), flags: first(proto),
			pad: pad, payload: []byte("z")}
		r := n.send(t, inEth0, in)
		r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
		sameBut(t, in.bytes(n, "eth0"), r.out, 1)
	}
}
