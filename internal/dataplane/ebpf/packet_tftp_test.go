package ebpf

import (
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// TFTP: what a server answers from a port of its own belongs to the request.

func TestPacketTFTP(t *testing.T) {
	n := newPacketNode(t)
	t.Run("Here", func(t *testing.T) { eachFamily(t, n, func(t *testing.T, p *plan) { n.transfer(t, p, here) }) })
	t.Run("Elsewhere", func(t *testing.T) { eachFamily(t, n, func(t *testing.T, p *plan) { n.transfer(t, p, elsewhere) }) })
	t.Run("ThirdHost", func(t *testing.T) { eachFamily(t, n, n.thirdHost) })
	t.Run("NodeTupleIsOneClients", func(t *testing.T) { eachFamily(t, n, n.oneNodeTuple) })
	t.Run("AnsweredRequestsMakeRoom", func(t *testing.T) { eachFamily(t, n, n.answeredMakeRoom) })
	t.Run("ManyAnswers", func(t *testing.T) { eachFamily(t, n, n.manyAnswers) })
	t.Run("ManyServersOneClientPort", func(t *testing.T) { eachFamily(t, n, n.manyServers) })
	t.Run("AnswerFromAServicesPort", func(t *testing.T) { eachFamily(t, n, n.answerFromServicesPort) })
	t.Run("FromPod", func(t *testing.T) { eachFamily(t, n, n.transferFromPod) })
	t.Run("RequestRefused", func(t *testing.T) { eachFamily(t, n, n.requestRefused) })
	t.Run("EndpointGone", func(t *testing.T) { eachFamily(t, n, n.transferOutlivesEndpoint) })
	t.Run("NoReply", func(t *testing.T) { eachFamily(t, n, n.noReply) })
	t.Run("HalfEvicted", func(t *testing.T) { eachFamily(t, n, n.requestHalfEvicted) })
	t.Run("SamePortAgain", func(t *testing.T) { eachFamily(t, n, n.sameTIDAgain) })
	t.Run("Policed", func(t *testing.T) { eachFamily(t, n, n.transferOfPoliced) })
	t.Run("Direct", func(t *testing.T) { eachFamily(t, n, n.transferDirect) })
	t.Run("NoHelper", func(t *testing.T) { eachFamily(t, n, n.noHelper) })
}

// tid is the port that a server answers from.
const tid = 43210

func tftp(p *plan, endpoints ...intent.Endpoint) *intent.ServicePort {
	sp := service(p, protoUDP, endpoints...)
	sp.Helper = intent.TFTP
	return sp
}

func (n *packetNode) datagram(t *testing.T, hook at, src, dst netip.AddrPort) result {
	t.Helper()
	return n.send(t, hook, frame{proto: protoUDP, src: src, dst: dst, payload: []byte("\x00\x01file\x00octet\x00")})
}

// transfer: request, retransmitted request, answers from two ports, and what the
// client says to each.
func (n *packetNode) transfer(t *testing.T, p *plan, w where) {
	server, back := p.pod1, inPod1
	if w == elsewhere {
		server, back = p.far, inTun0
	}
	n.serve(t, tftp(p, endpoint(server, 1069, w)))
	for name, front := range frontends(p) {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			client := ap(p.client, 40000)
			r := n.datagram(t, inEth0, client, front)
			r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictHELPER_ASKED, objects.TCVerdictTRANSLATED_DIRECT)
			seen := r.v.src
			r.wantPath(t, seen, ap(server, 1069))
			if (w == here) != (seen == client) {
				t.Errorf("the server sees %s", seen)
			}
			r = n.datagram(t, inEth0, client, front)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT) // no second flow
			r.wantPath(t, seen, ap(server, 1069))
			for _, port := range []uint16{tid, tid + 1} {
				r = n.datagram(t, back, ap(server, port), seen)
				if port == tid {
					r.want(t, actRedirect, objects.TCVerdictHELPER_ANSWERED, objects.TCVerdictTRANSLATED_DIRECT)
				} else { // one request is answered once
					r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
				}
				r.wantPath(t, ap(front.Addr(), port), client)
				r = n.datagram(t, inEth0, client, ap(front.Addr(), port))
				r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
				r.wantPath(t, seen, ap(server, port))
				r = n.datagram(t, back, ap(server, port), seen)
				r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
				r.wantPath(t, ap(front.Addr(), port), client)
			}
			// A server of one port answers from it.
			r = n.datagram(t, back, ap(server, 1069), seen)
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
			r.wantPath(t, front, client)
			if got := n.flowCount(t); got != 6 {
				t.Errorf("%d entries for a request and two answers, want 6", got)
			}
		})
	}
}

func (n *packetNode) flowCount(t *testing.T) (count int) {
	t.Helper()
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(objects.TCTuple, objects.TCFlow) { count++ }))
	return count
}

// thirdHost: others may not send into a transfer, and the client may speak to no
// port of the server that has not answered.
func (n *packetNode) thirdHost(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here), endpoint(p.far, 1069, elsewhere)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	for range 20 { // to both of them
		n.forget(t)
		r := n.datagram(t, inEth0, client, front)
		server, seen, back, other, elsewhere := r.v.dst.Addr(), r.v.src, inPod1, p.pod2, inPod2
		if server == p.far {
			back, other, elsewhere = inTun0, p.far2, inTun0
		}
		n.datagram(t, back, ap(server, tid), seen).wantPath(t, ap(front.Addr(), tid), client)
		for what, f := range map[string]frame{
			"another host, the same port": {src: ap(other, tid), dst: seen},
			"another host, the Service's": {src: ap(other, 1069), dst: seen},
			"another port of the client":  {src: ap(server, tid), dst: ap(seen.Addr(), seen.Port()^1)},
		} {
			f.proto = protoUDP
			hook := elsewhere
			if f.src.Addr() == server {
				hook = back
			}
			n.untouched(t, what, hook, f.bytes(n, hook.iface), objects.TCVerdictPASS_OTHER)
		}
		f := frame{proto: protoUDP, src: client, dst: ap(front.Addr(), 22)}
		n.untouched(t, "a port that has not answered", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
		f = frame{proto: protoUDP, src: ap(p.client2, 40000), dst: ap(front.Addr(), tid)}
		n.untouched(t, "another client", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
	}
}

// oneNodeTuple: with SNAT, a node's address and port is one client's for every
// port of an endpoint.
func (n *packetNode) oneNodeTuple(t *testing.T, p *plan) {
	second := tftp(p, endpoint(p.far, 2069, elsewhere))
	second.ID.Service.Name, second.ID.Number = "second", 81
	second.Frontends = []intent.Frontend{{Kind: intent.ClusterIP, Addr: p.clusterIP, Port: 81, ExternalRoute: intent.ToCluster,
		InternalRoute: intent.ToCluster}}
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)), second)
	n.setSNATPorts(t, 50000, 50001, 50002, 50003)
	seen := map[netip.AddrPort][2]netip.AddrPort{}
	for i := range 5 {
		client, front := ap(p.client, uint16(40000+i)), ap(p.clusterIP, uint16(80+i%2))
		r := n.datagram(t, inEth0, client, front)
		if i == 4 {
			r.want(t, actDrop, objects.TCVerdictHELPER_ASKED, objects.TCVerdictDROP_SNAT_PORTS)
			break
		}
		if other, taken := seen[r.v.src]; taken {
			t.Fatalf("%s and %s both go out as %s", other, client, r.v.src)
		}
		seen[r.v.src] = [2]netip.AddrPort{client, front}
	}
	for src, who := range seen {
		n.datagram(t, inTun0, ap(p.far, tid), src).wantPath(t, ap(who[1].Addr(), tid), who[0])
	}
}

// answeredMakeRoom: when all of the node's ports are taken towards an endpoint, a
// request that was answered some seconds ago gives up its own; its transfer goes on.
func (n *packetNode) answeredMakeRoom(t *testing.T, p *plan) {
	const rest = 5 // HELPER_IDLE_SECONDS
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	front, first := ap(p.clusterIP, 80), ap(p.client, 40000)
	seen := n.datagram(t, inEth0, first, front).v.src
	n.datagram(t, inTun0, ap(p.far, tid), seen).wantPath(t, ap(front.Addr(), tid), first)
	dead := n.datagram(t, inEth0, ap(p.client, 40001), front).v.src // no server answers it
	full := func(when string) {
		t.Helper()
		t.Log(when)
		n.datagram(t, inEth0, ap(p.client, 40002), front).want(t, actDrop, objects.TCVerdictHELPER_ASKED, objects.TCVerdictDROP_SNAT_PORTS)
	}
	n.ageFlows(t, rest-1)
	full("the answer is fresh")
	n.ageFlows(t, 1)
	second := ap(p.client, 40003)
	if got := n.datagram(t, inEth0, second, front).v.src; got != seen {
		t.Fatalf("the port of the request that was answered is %s, of the new one %s, of one that was not answered %s", seen, got, dead)
	}
	// Of the first transfer, or has the server ended that and uses its port again?
	n.datagram(t, inTun0, ap(p.far, tid), seen).want(t, actDrop, objects.TCVerdictDROP_HELPER_CONFLICT)
	n.datagram(t, inTun0, ap(p.far, tid+1), seen).wantPath(t, ap(front.Addr(), tid+1), second)
	// The first transfer goes on, if its client does.
	n.datagram(t, inEth0, first, ap(front.Addr(), tid)).wantPath(t, seen, ap(p.far, tid))
	n.datagram(t, inTun0, ap(p.far, tid), seen).wantPath(t, ap(front.Addr(), tid), first)
	// Its client asks anew, by the same port, and gets another of the node's.
	n.ageFlows(t, rest)
	r := n.datagram(t, inEth0, first, front)
	if got := r.v.src; got == dead {
		t.Errorf("asked again, it goes out as %s, which waits for an answer", got)
	}
}

// manyAnswers: a request is not answered from any number of ports, for any client, and
// each time that the client asks again from as many.
func (n *packetNode) manyAnswers(t *testing.T, p *plan) {
	const most = 16 // TFTP_ANSWERS_MAX
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	front := ap(p.clusterIP, 80)
	for name, asked := range map[string]netip.AddrPort{"the Service": front, "the endpoint": ap(p.far, 1069)} {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			client, hook := ap(p.pod1, 40000), inPod1
			var seen netip.AddrPort
			ask := func() { seen = n.datagram(t, hook, client, asked).v.src }
			answer := func(port uint16) result { return n.datagram(t, inTun0, ap(p.far, port), seen) }
			for round := range uint16(3) {
				ask()
				for i := range uint16(most) {
					port := tid + round*100 + i
					answer(port).wantPath(t, ap(asked.Addr(), port), client)
				}
				for range 2 {
					answer(tid+99+round*100).want(t, actDrop, objects.TCVerdictDROP_HELPER_ANSWERS)
				}
				answer(tid+round*100).wantPath(t, ap(asked.Addr(), tid+round*100), client) // goes on
			}
		})
	}
}

// manyServers: requests from one client port to several addresses stay apart.
func (n *packetNode) manyServers(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	client := ap(p.client, 40000)
	seen := map[string]netip.AddrPort{}
	for name, front := range frontends(p) {
		r := n.datagram(t, inEth0, client, front)
		r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictHELPER_ASKED, objects.TCVerdictTRANSLATED_DIRECT)
		seen[name] = r.v.src
	}
	for name, front := range frontends(p) {
		n.datagram(t, inPod1, ap(p.pod1, tid), seen[name]).wantPath(t, ap(front.Addr(), tid), client)
		n.datagram(t, inEth0, client, ap(front.Addr(), tid)).wantPath(t, seen[name], ap(p.pod1, tid))
	}
}

// answerFromServicesPort: the server answers from a port that another Service has at the same address, and
// the client has a flow of that Service. The flow stays, and the answer is dropped.
func (n *packetNode) answerFromServicesPort(t *testing.T, p *plan) {
	second := service(p, protoUDP, endpoint(p.pod2, 5300, here))
	second.ID.Service.Name, second.ID.Number = "second", tid
	second.Frontends = []intent.Frontend{{Kind: intent.ClusterIP, Addr: p.clusterIP, Port: tid, ExternalRoute: intent.ToCluster,
		InternalRoute: intent.ToCluster}}
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)), second)
	client, front := ap(p.client, 40000), ap(p.clusterIP, tid)
	n.datagram(t, inEth0, client, front).wantPath(t, client, ap(p.pod2, 5300))
	n.datagram(t, inEth0, client, ap(p.clusterIP, 80)).wantPath(t, client, ap(p.pod1, 1069))
	n.datagram(t, inPod1, ap(p.pod1, tid), client).want(t, actDrop, objects.TCVerdictHELPER_ANSWERED, objects.TCVerdictDROP_HELPER_CONFLICT)
	n.datagram(t, inEth0, client, front).wantPath(t, client, ap(p.pod2, 5300))
	n.datagram(t, inPod1, ap(p.pod1, tid+1), client).wantPath(t, ap(p.clusterIP, tid+1), client)
}

// transferFromPod: the client is a pod whose sockets no hook sees.
func (n *packetNode) transferFromPod(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	client, front := ap(p.pod1, 40000), ap(p.clusterIP, 80)
	r := n.datagram(t, inPod1, client, front)
	seen := r.v.src
	r.wantPath(t, ap(p.pod1, seen.Port()), ap(p.far, 1069))
	n.datagram(t, inTun0, ap(p.far, tid), seen).wantPath(t, ap(p.clusterIP, tid), client)
	if w := n.lastNextHop(t); w.kind != nextHopPod {
		t.Errorf("the answer goes %+v", w)
	}
	n.datagram(t, inPod1, client, ap(p.clusterIP, tid)).wantPath(t, seen, ap(p.far, tid))
}

// requestRefused: the client gets the error that no server listens.
func (n *packetNode) requestRefused(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	request := frame{proto: protoUDP, src: client, dst: front, payload: []byte("\x00\x01x\x00octet\x00")}.bytes(n, "eth0")
	sent := n.sendRaw(t, inEth0, request)
	e := errorKinds[0].about(p, p.far, sent.out[14:], 28)
	if p.far.Is6() {
		e = errorKinds[0].about(p, p.far, sent.out[14:], 1200)
	}
	e.dst = ap(sent.v.src.Addr(), 0)
	r := n.send(t, inTun0, e)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_ICMP)
	r.wantPath(t, ap(front.Addr(), 0), ap(client.Addr(), 0))
	quotesLike(t, r.v.quoted, request)
}

// transferOutlivesEndpoint: an endpoint that leaves the Service may end what it has
// begun; no other could. The next request goes to another.
func (n *packetNode) transferOutlivesEndpoint(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	n.datagram(t, inEth0, client, front)
	n.datagram(t, inPod1, ap(p.pod1, tid), client).wantPath(t, ap(front.Addr(), tid), client)
	n.serve(t, tftp(p, endpoint(p.pod2, 1069, here)))
	n.datagram(t, inEth0, client, ap(front.Addr(), tid)).wantPath(t, client, ap(p.pod1, tid))
	n.datagram(t, inPod1, ap(p.pod1, tid), client).wantPath(t, ap(front.Addr(), tid), client)
	n.datagram(t, inEth0, client, front).wantPath(t, client, ap(p.pod2, 1069))
	n.datagram(t, inPod2, ap(p.pod2, tid+1), client).wantPath(t, ap(front.Addr(), tid+1), client)
}

// noReply: a request is forgotten when its time has come, and its answer with it.
func (n *packetNode) noReply(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	answer := frame{proto: protoUDP, src: ap(p.pod1, tid), dst: client}.bytes(n, "pod1")
	n.datagram(t, inEth0, client, front)
	n.ageFlows(t, objects.Seconds(n.cfg.Timeouts.UDPNew)+1)
	n.untouched(t, "a late answer", inPod1, answer, objects.TCVerdictPASS_OTHER)
	// Asked again, it is waited for again.
	n.datagram(t, inEth0, client, front).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictHELPER_ASKED,
		objects.TCVerdictTRANSLATED_DIRECT)
	n.ageFlows(t, objects.Seconds(n.cfg.Timeouts.UDPNew)-2)
	n.sendRaw(t, inPod1, answer).wantPath(t, ap(front.Addr(), tid), client)
}

// requestHalfEvicted: a full table has lost one of the two entries of a request.
func (n *packetNode) requestHalfEvicted(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.far, 1069, elsewhere)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	seen := n.datagram(t, inEth0, client, front).v.src
	expected := tupleOf(protoUDP, ap(p.far, 0), seen)
	forward := tupleOf(protoUDP, client, front)
	for _, key := range []objects.TCTuple{expected, forward} {
		n.ageFlows(t, 2)
		must.Do(t, n.m(objects.TCMapFlows).Delete(key))
		if key == forward {
			n.datagram(t, inTun0, ap(p.far, 1069), seen).wantPath(t, front, client)
		} else {
			n.datagram(t, inEth0, client, front).wantPath(t, seen, ap(p.far, 1069))
		}
		if f, found := n.flow(key); !found || f.Helper == 0 || objects.ToPort(objects.UDPOf(&f).HelperPort) != 1069 {
			t.Fatalf("the entry that was lost: %+v, %v", f, found)
		}
	}
	n.datagram(t, inTun0, ap(p.far, tid), seen).wantPath(t, ap(front.Addr(), tid), client)
	n.datagram(t, inEth0, client, front).wantPath(t, seen, ap(p.far, 1069))
}

// sameTIDAgain: another server happens to answer from the port that an earlier one
// had answered from.
func (n *packetNode) sameTIDAgain(t *testing.T, p *plan) {
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	n.serve(t, tftp(p, endpoint(p.pod1, 1069, here)))
	n.datagram(t, inEth0, client, front)
	n.datagram(t, inPod1, ap(p.pod1, tid), client).wantPath(t, ap(front.Addr(), tid), client)
	n.serve(t, tftp(p, endpoint(p.pod2, 1069, here)))
	n.datagram(t, inEth0, client, front)
	n.datagram(t, inPod2, ap(p.pod2, tid), client).wantPath(t, ap(front.Addr(), tid), client)
	n.datagram(t, inEth0, client, ap(front.Addr(), tid)).wantPath(t, client, ap(p.pod2, tid))
}

// transferOfPoliced: netfilter sees the request; the answer bypasses it only if it allowed
// the request.
func (n *packetNode) transferOfPoliced(t *testing.T, p *plan) {
	e := endpoint(p.pod1, 1069, here)
	e.MustTraverseNetfilter = true
	n.serve(t, tftp(p, e))
	client, front := ap(p.client, 40000), ap(p.externalIP, 80)
	r := n.datagram(t, inEth0, client, front)
	r.want(t, actNext, objects.TCVerdictFLOW_CREATED, objects.TCVerdictHELPER_ASKED, objects.TCVerdictTRANSLATED_STACK)
	answer := frame{proto: protoUDP, src: ap(p.pod1, tid), dst: client}
	n.untouched(t, "netfilter knows no request", inPod1, answer.bytes(n, "pod1"), objects.TCVerdictPASS_OTHER)
	// Through the stack it is translated behind it.
	r = n.send(t, outEth0, answer)
	r.want(t, actNext, objects.TCVerdictHELPER_ANSWERED, objects.TCVerdictTRANSLATED_FROM_STACK)
	r.wantPath(t, ap(front.Addr(), tid), client)
	n.datagram(t, inEth0, client, ap(front.Addr(), tid)).want(t, actNext, objects.TCVerdictTRANSLATED_STACK)

	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(inet(p)), TimeOut: 60,
		Forward: ipTuple(protoUDP, client, ap(p.pod1, 1069)), Reverse: ipTuple(protoUDP, ap(p.pod1, 1069), client),
	}
	var err error
	n.do(func() { err = netlink.ConntrackCreate(netlink.ConntrackTable, inet(p), flow) })
	if err != nil {
		t.Skipf("needs ctnetlink to make a conntrack entry: %v", err)
	}
	answer.src = ap(p.pod1, tid+1)
	r = n.send(t, inPod1, answer)
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, ap(front.Addr(), tid+1), client)
	r = n.datagram(t, inEth0, client, ap(front.Addr(), tid+1))
	r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, client, ap(p.pod1, tid+1))
}

// transferDirect: what a socket or another node has translated. Nothing is
// rewritten, and netfilter sees none of it.
func (n *packetNode) transferDirect(t *testing.T, p *plan) {
	n.serve(t, tftp(p, endpoint(p.pod2, 1069, here), endpoint(p.far, 1069, elsewhere)))
	peer := ap(p.client2, 40000)
	n.setNode(t, func(node *intent.Node) { node.Peers = []netip.Addr{peer.Addr()} })
	for _, tt := range []struct {
		from, back   at
		client       netip.AddrPort
		server       netip.Addr
		there, again uint32 // the ways of client's and server's packets
	}{
		{inPod1, inPod2, ap(p.pod1, 40000), p.pod2, nextHopPod, nextHopPod},
		{inPod1, inTun0, ap(p.pod1, 40000), p.far, nextHopNeigh, nextHopPod},
		{inEth0, inPod2, peer, p.pod2, nextHopPod, nextHopNeigh},
	} {
		n.forget(t)
		client := tt.client
		for range 2 {
			n.datagram(t, tt.from, client, ap(tt.server, 1069)).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
		}
		r := n.datagram(t, tt.back, ap(tt.server, tid), client)
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT) // counted where it was asked
		r.wantPath(t, ap(tt.server, tid), client)
		if w := n.lastNextHop(t); w.kind != tt.again {
			t.Errorf("%s -> %s goes %+v", tt.server, client, w)
		}
		r = n.datagram(t, tt.from, client, ap(tt.server, tid))
		r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		r.wantPath(t, client, ap(tt.server, tid))
		if w := n.lastNextHop(t); w.kind != tt.there {
			t.Errorf("%s -> %s goes %+v", client, tt.server, w)
		}
		n.datagram(t, tt.back, ap(tt.server, 1069), client).want(t, actRedirect, objects.TCVerdictPASSED_DIRECT)
		if got := n.flowCount(t); got != 3 {
			t.Errorf("%d entries, want 3", got)
		}
	}
	// Where netfilter must see the request, it sees the answer.
	n.forget(t)
	n.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.pod2} })
	n.datagram(t, inPod1, ap(p.pod1, 40000), ap(p.pod2, 1069)).want(t, actNext, objects.TCVerdictPASS_OTHER)
	f := frame{proto: protoUDP, src: ap(p.pod2, tid), dst: ap(p.pod1, 40000)}
	n.untouched(t, "answer of a policed pod", inPod2, f.bytes(n, "pod2"), objects.TCVerdictPASS_OTHER)
}

// noHelper: a Service that is not TFTP's has one port and no other.
func (n *packetNode) noHelper(t *testing.T, p *plan) {
	sp := tftp(p, endpoint(p.pod1, 1069, here))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	answer := frame{proto: protoUDP, src: ap(p.pod1, tid), dst: client}.bytes(n, "pod1")
	n.serve(t, sp)
	n.datagram(t, inEth0, client, front)
	n.sendRaw(t, inPod1, answer).wantPath(t, ap(front.Addr(), tid), client)
	n.forget(t)
	without := *sp
	without.Helper = intent.NoHelper
	n.serve(t, &without)
	n.datagram(t, inEth0, client, front)
	n.untouched(t, "without a helper", inPod1, answer, objects.TCVerdictPASS_OTHER)
	for key, f := range objectstest.ReadAll[objects.TCFrontendKey, objects.TCFrontend](t, n.m(objects.TCMapFrontends)) {
		if objects.TCFrontendFlags(f.Flags)&objects.TCFrontendFlagsFRONTEND_TFTP != 0 {
			t.Errorf("%v is still marked", key)
		}
	}
}
