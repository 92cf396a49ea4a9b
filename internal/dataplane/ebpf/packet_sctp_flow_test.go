package ebpf

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
)

// association is an SCTP association through a Service.
type association struct {
	n                           *packetNode
	client, front, server, seen netip.AddrPort // seen: the client as the endpoint sees it
	out                         at             // where the endpoint's packets arrive
	clientTag, serverTag        uint32
}

func (n *packetNode) associate(p *plan, port uint16, w where) *association {
	a := &association{
		n: n, client: ap(p.client, port), front: ap(p.clusterIP, 80), server: ap(p.pod1, 8080), out: inPod1,
		clientTag: clientTag, serverTag: serverTag,
	}
	if w == elsewhere {
		a.server, a.out = ap(p.far, 8080), inTun0
	}
	return a
}

// say sends the packets of either end, as sctpChunks names them; the endpoint's behind "<".
// The result is the last one's.
func (a *association) say(t *testing.T, packets ...string) (r result) {
	t.Helper()
	for _, flags := range packets {
		answer, byServer := strings.CutPrefix(flags, "<")
		f := frame{proto: protoSCTP, src: a.client, dst: a.front, flags: flags, seq: a.clientTag, ack: a.serverTag}
		hook := inEth0
		if byServer {
			hook = a.out
			f = frame{proto: protoSCTP, src: a.server, dst: a.seen, flags: answer, seq: a.serverTag, ack: a.clientTag}
		}
		if strings.HasSuffix(flags, "T") { // reflects the tag of the other end's packet
			f.ack = f.seq
		}
		r = a.n.send(t, hook, f)
		if flags == "S" && r.v != nil {
			a.seen = r.v.src
		}
		a.onItsWay(t, flags, byServer, r)
	}
	return r
}

// onItsWay fails unless the packet was translated, whatever it did to the flow.
func (a *association) onItsWay(t *testing.T, flags string, byServer bool, r result) {
	t.Helper()
	src, dst := a.seen, a.server
	if byServer {
		src, dst = a.front, a.client
	}
	if r.code != actRedirect || r.v == nil || r.v.src != src || r.v.dst != dst {
		t.Fatalf("%s: code %d, %s: want it to run %s -> %s", flags, r.code, verdictList(r.verdicts), src, dst)
	}
}

var sctpHandshake = []string{"S", "<S.", "cookie-echo", "<cookie-ack"}

func (a *association) keys() []tcTuple {
	return []tcTuple{tupleOf(protoSCTP, a.client, a.front), tupleOf(protoSCTP, a.server, a.seen)}
}

func (a *association) wantState(t *testing.T, state tcFlowState) {
	t.Helper()
	a.n.wantState(t, state, a.keys()...)
}

func (a *association) confirmed(t *testing.T) bool {
	t.Helper()
	f, found := a.n.flow(a.keys()[0])
	if !found {
		t.Fatal("the flow is gone")
	}
	return tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_CONFIRMED != 0
}

func TestPacketSCTPFlows(t *testing.T) {
	n := newPacketNode(t)
	for name, w := range map[string]where{"Here": here, "Elsewhere": elsewhere} {
		each := func(f func(*testing.T, *plan, where)) func(*testing.T) {
			return func(t *testing.T) {
				eachFamily(t, n, func(t *testing.T, p *plan) {
					n.serve(t, service(p, protoSCTP, endpoint(n.associate(p, 1, w).server.Addr(), 8080, w)))
					f(t, p, w)
				})
			}
		}
		t.Run(name, func(t *testing.T) {
			t.Run("States", each(n.sctpStates))
			t.Run("Timeouts", each(n.sctpTimeouts))
			t.Run("Reuse", each(n.sctpReuse))
			t.Run("Forged", each(n.sctpForged))
			t.Run("ForgedINIT", each(n.sctpForgedINIT))
			t.Run("Restart", each(n.sctpRestart))
			t.Run("HalfEvicted", each(n.sctpHalfEvicted))
			t.Run("Share", each(n.sctpShare))
			t.Run("GivenAway", each(n.sctpGivenAway))
		})
	}
	t.Run("Dump", func(t *testing.T) { eachFamily(t, n, n.sctpDump) })
	t.Run("Stray", func(t *testing.T) { eachFamily(t, n, n.sctpStray) })
	t.Run("Netfilter", func(t *testing.T) { eachFamily(t, n, n.sctpNetfilter) })
	t.Run("PodKeepsPort", func(t *testing.T) { eachFamily(t, n, n.sctpPodPort) })
	t.Run("SNATPorts", func(t *testing.T) { eachFamily(t, n, n.sctpSNATPorts) })
	t.Run("Affinity", func(t *testing.T) { eachFamily(t, n, n.sctpAffinity) })
	n.checksComplete = false // see TestPacketAnswers
	t.Run("Unreachable", func(t *testing.T) { eachFamily(t, n, n.sctpUnreachable) })
}

func (n *packetNode) sctpStates(t *testing.T, p *plan, w where) {
	const new, synRecv, established, lastACK, closed = tcFlowStateFLOW_NEW, tcFlowStateFLOW_SYN_RECV,
		tcFlowStateFLOW_ESTABLISHED, tcFlowStateFLOW_LAST_ACK, tcFlowStateFLOW_CLOSED
	open := []step{{"S", new}, {"<S.", synRecv}, {"cookie-echo", established}, {"<cookie-ack", established}}
	for name, steps := range map[string][]step{
		"handshake repeated":      {{"S", new}, {"S", new}, {"<S.", synRecv}, {"<S.", synRecv}, {"cookie-echo", established}, {"cookie-echo", established}},
		"shut down":               append(open, step{".", established}, step{"shutdown", established}, step{"<shutdown-ack", lastACK}, step{"shutdown-complete", closed}),
		"shut down by endpoint":   append(open, step{"<shutdown", established}, step{"shutdown-ack", lastACK}, step{"<shutdown-complete", closed}),
		"last packet lost":        append(open, step{"<shutdown-ack", lastACK}, step{"<shutdown-ack", lastACK}, step{"shutdown-completeT", closed}, step{"<shutdown-ack", closed}),
		"data after a shutdown":   append(open, step{"<shutdown-ack", lastACK}, step{".", established}),
		"aborted":                 append(open, step{"R", closed}),
		"aborted by endpoint":     append(open, step{"<R", closed}),
		"endpoint lost its state": append(open, step{".", established}, step{"<RT", closed}),
		"no such port":            {{"S", new}, {"<R", closed}},
		"aborted in handshake":    {{"S", new}, {"<S.", synRecv}, {"R", closed}},
		"data after an abort":     append(open, step{"R", closed}, step{".", established}, step{"<.", established}),
	} {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			a := n.associate(p, 40000, w)
			for _, s := range steps {
				a.say(t, s.flags)
				a.wantState(t, s.state)
			}
			if !a.confirmed(t) && strings.Contains(name, "shut down") {
				t.Error("the flow of a client that has echoed its cookie is unconfirmed")
			}
		})
	}
}

// sctpDump: of an association, `spillway maps` shows the tags, and no TCP state.
func (n *packetNode) sctpDump(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	a := n.associate(p, 40000, here)
	a.say(t, sctpHandshake...)
	spec, err := loadTc()
	ok(t, err)
	var names []string
	ok(t, dump(n.m(tcMapFlows), spec.Maps[tcMapFlows], func(_, value []Field) error {
		for _, f := range value {
			if f.Name == "sctp.tag" && f.Value != uint64(clientTag) && f.Value != uint64(serverTag) {
				t.Errorf("sctp.tag is %v", f.Value)
			}
			names = append(names, f.Name)
		}
		return nil
	}))
	if !slices.Contains(names, "sctp.tag") || slices.Contains(names, "tcp.end") {
		t.Errorf("an association has %q", names)
	}
}

// sctpTimeouts: an association is over when it has been idle for as long as with conntrack.
func (n *packetNode) sctpTimeouts(t *testing.T, p *plan, w where) {
	for name, tt := range map[string]struct {
		packets []string
		seconds uint32
	}{
		"new":         {[]string{"S"}, seconds(n.cfg.Timeouts.TCPNew)},
		"established": {sctpHandshake, uint32(tcSctpTimeoutSCTP_ESTABLISHED_SECONDS)},
		"closed":      {append(append([]string{}, sctpHandshake...), "R"), seconds(n.cfg.Timeouts.TCPClosed)},
	} {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			a := n.associate(p, 40000, w)
			a.say(t, tt.packets...)
			n.ageFlows(t, tt.seconds-2)
			a.say(t, "<heartbeat")
			n.forget(t)
			a.say(t, tt.packets...)
			n.ageFlows(t, tt.seconds+2)
			r := n.send(t, inEth0, frame{proto: protoSCTP, src: a.client, dst: a.front, flags: ".", ack: a.serverTag})
			r.want(t, actNext, tcVerdictPASS_CONNTRACK)
		})
	}
	// Packets keep an association alive.
	n.forget(t)
	a := n.associate(p, 40000, w)
	a.say(t, sctpHandshake...)
	for range 3 {
		n.ageFlows(t, uint32(tcSctpTimeoutSCTP_ESTABLISHED_SECONDS)-2)
		a.say(t, "heartbeat")
	}
}

// sctpReuse: a client may begin again as soon as an association has ended.
func (n *packetNode) sctpReuse(t *testing.T, p *plan, w where) {
	for _, end := range []string{"R", "<R", "shutdown-complete"} {
		n.forget(t)
		a := n.associate(p, 40000, w)
		a.say(t, sctpHandshake...)
		a.say(t, end)
		if f, _ := n.flow(a.keys()[1]); tcFlowEnd(f.End) != tcFlowEndEND_CLIENT_FIRST {
			t.Errorf("after %s: end %d, want a port that rests", end, f.End)
		}
		a.clientTag, a.serverTag = 77, 78
		if r := a.say(t, "S"); r.verdicts[tcVerdictFLOW_CREATED] != 1 {
			t.Errorf("after %s: %s, want a new flow", end, verdictList(r.verdicts))
		}
		a.say(t, sctpHandshake[1:]...)
		a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	}
}

// sctpForged: a forger does not know the tags. It ends no association, and begins none.
func (n *packetNode) sctpForged(t *testing.T, p *plan, w where) {
	a := n.associate(p, 40000, w)
	forger := *a
	forger.clientTag, forger.serverTag = 1, 2
	a.say(t, "S")
	forger.seen = a.seen
	forger.say(t, "cookie-echo", "R", "RT", "<R", "shutdown-complete", "<cookie-ack")
	a.wantState(t, tcFlowStateFLOW_NEW)
	a.say(t, "<S.")
	forger.say(t, "cookie-echo", ".", "R", "RT", "<R", "shutdown-complete")
	a.wantState(t, tcFlowStateFLOW_SYN_RECV)
	if a.confirmed(t) {
		t.Error("the flow is confirmed before the client has echoed its cookie")
	}
	a.say(t, "cookie-echo", "<cookie-ack")
	forger.say(t, "S", "R", "RT", "<R", "<RT", "shutdown-ack", "<shutdown-ack", "shutdown-complete", "<shutdown-completeT")
	forger.serverTag, forger.clientTag = 0, 0
	forger.say(t, "R", "RT", "<R", "<RT", "shutdown-complete")
	a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	a.say(t, "R")
	forger.serverTag, forger.clientTag = 1, 2
	forger.say(t, ".", "cookie-echo", "<.", "<S.", "<cookie-ack")
	a.wantState(t, tcFlowStateFLOW_CLOSED)
	b := frame{proto: protoSCTP, src: a.client, dst: a.front, flags: "S"}.bytes(n, "eth0")
	l4 := transportOf(b)
	l4[7] = 1 // an INIT has no verification tag
	setCRC(l4)
	n.sendRaw(t, inEth0, b).want(t, actRedirect, tcVerdictTRANSLATED_DIRECT)
	a.wantState(t, tcFlowStateFLOW_CLOSED)
}

// sctpForgedINIT: the endpoint answers every INIT. Forged ones before and after the client's
// own do not hide its handshake. If they do, the association works, unconfirmed.
func (n *packetNode) sctpForgedINIT(t *testing.T, p *plan, w where) {
	handshake := func(forged ...string) *association {
		n.forget(t)
		a := n.associate(p, 40000, w)
		forger := *a
		for i, who := range forged {
			packets := []string{"S", "<S."}
			if i == len(forged)-1 {
				packets = []string{"cookie-echo", "<cookie-ack"}
			}
			if who == "forger" {
				forger.clientTag, forger.serverTag = uint32(100+i), uint32(200+i)
				forger.seen = a.seen
				forger.say(t, packets...)
				a.seen = forger.seen
			} else {
				a.say(t, packets...)
			}
		}
		a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
		n.ageFlows(t, 150)
		a.say(t, ".", "<.")
		n.ageFlows(t, 150)
		a.say(t, ".", "<.")
		return a
	}
	for _, order := range [][]string{{"client", "client"}, {"forger", "client", "client"}, {"client", "forger", "client"}, {"client", "forger", "forger", "client"}} {
		a := handshake(order...)
		if !a.confirmed(t) {
			t.Errorf("%v: the client's flow is unconfirmed", order)
		}
		a.say(t, "<RT")
		a.wantState(t, tcFlowStateFLOW_CLOSED)
	}
	a := handshake("forger", "client", "forger", "client")
	if a.confirmed(t) {
		t.Error("a flow is confirmed whose handshake was not seen")
	}
	// The forger ends its own handshake, and not the client's.
	n.forget(t)
	a = n.associate(p, 40000, w)
	forger := *a
	forger.clientTag, forger.serverTag = 100, 200
	forger.say(t, "S", "<S.")
	a.seen = forger.seen
	a.say(t, "S", "<S.")
	forger.say(t, "RT")
	a.wantState(t, tcFlowStateFLOW_CLOSED)
	a.say(t, "cookie-echo", "<cookie-ack")
	a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	if !a.confirmed(t) {
		t.Error("the client's flow is unconfirmed after the end of a forger's handshake")
	}
}

// sctpRestart: a client that has lost its state begins again by the same port (RFC 9260, 5.2).
// Until then, its earlier association continues.
func (n *packetNode) sctpRestart(t *testing.T, p *plan, w where) {
	a := n.associate(p, 40000, w)
	a.say(t, sctpHandshake...)
	again := *a
	again.clientTag, again.serverTag = 77, 78
	if r := again.say(t, "S"); r.verdicts[tcVerdictFLOW_CREATED] != 0 {
		t.Errorf("an INIT in an association: %s", verdictList(r.verdicts))
	}
	again.say(t, "<S.")
	a.say(t, ".", "<.", "<shutdown-ack")
	a.wantState(t, tcFlowStateFLOW_LAST_ACK)
	again.say(t, "cookie-echo", "<cookie-ack", ".")
	again.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	a.say(t, "R", "<R")
	again.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	again.say(t, "<R")
	again.wantState(t, tcFlowStateFLOW_CLOSED)
}

// sctpHalfEvicted: the kernel may evict either entry. The other one restores it, with the tags.
func (n *packetNode) sctpHalfEvicted(t *testing.T, p *plan, w where) {
	for i, packet := range []string{"<.", "."} {
		a := n.associate(p, 40000, w)
		a.say(t, sctpHandshake...)
		ok(t, n.m(tcMapFlows).Delete(a.keys()[i]))
		n.ageFlows(t, 3)
		if r := a.say(t, packet); r.verdicts[tcVerdictFLOW_REVIVED] != 1 {
			t.Errorf("%s: %s", packet, verdictList(r.verdicts))
		}
		a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
		a.say(t, ".", "<.", "RT")
		a.wantState(t, tcFlowStateFLOW_CLOSED)
		n.forget(t)
	}
	if w == elsewhere {
		return // serve_stray finds no port of the node
	}
	a := n.associate(p, 40000, w)
	a.say(t, sctpHandshake...)
	ok(t, n.m(tcMapFlows).Delete(a.keys()[0]))
	a.say(t, ".")
}

// sctpShare: associations count as flows of their client, until they end.
func (n *packetNode) sctpShare(t *testing.T, p *plan, w where) {
	a := n.associate(p, 40000, w)
	key := a.keys()[0]
	index := clientHash(n.objects.seed, &key) % sources
	want := func(want uint32) {
		t.Helper()
		var count uint32
		if ok(t, n.m(tcMapSources).Lookup(index, &count)); count != want {
			t.Errorf("the client has %d flows, want %d", count, want)
		}
	}
	ok(t, n.m(tcMapSources).Put(index, uint32(0)))
	a.say(t, "S", "<S.")
	want(0)
	a.say(t, "cookie-echo", "<cookie-ack")
	want(1)
	n.seed = n.objects.seed
	ok(t, n.sweep(t.Context()))
	want(1)
	if n.flows.sctp.Load() != 1 || n.flows.udp.Load() != 0 {
		t.Errorf("the sweep counts %d of SCTP, %d of UDP", n.flows.sctp.Load(), n.flows.udp.Load())
	}
	a.say(t, "R")
	want(0)
	ok(t, n.m(tcMapSources).Put(index, n.cfg.clientFlowsMax()))
	b := n.associate(p, 40001, w)
	b.say(t, sctpHandshake...)
	b.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	if b.confirmed(t) {
		t.Error("a client with its share of flows gets one more that is confirmed")
	}
	ok(t, n.m(tcMapSources).Put(index, uint32(0)))
}

// sctpGivenAway: an association continues when another dataplane has got its port. New ones
// belong to that one.
func (n *packetNode) sctpGivenAway(t *testing.T, p *plan, w where) {
	a := n.associate(p, 40000, w)
	a.say(t, sctpHandshake...)
	begun := n.associate(p, 40001, w)
	begun.say(t, "S")
	n.serve(t)
	n.asking(t)
	ok(t, n.objects.filter.fill(n.objects.maps)) // as at the start of an agent
	a.say(t, ".", "<.", "heartbeat", "<heartbeat")
	begun.say(t, sctpHandshake[1:]...)
	n.ageFlows(t, 150)
	a.say(t, ".", "<.")
	another := frame{proto: protoSCTP, src: ap(p.client, 40002), dst: a.front, flags: "S"}
	n.untouched(t, "another", inEth0, another.bytes(n, "eth0"), tcVerdictPASS_OTHER)
	a.say(t, "R")
	a.wantState(t, tcFlowStateFLOW_CLOSED)
	again := frame{proto: protoSCTP, src: a.client, dst: a.front, flags: "S", seq: 77}
	n.untouched(t, "again", inEth0, again.bytes(n, "eth0"), tcVerdictPASS_OTHER)
}

// sctpStray: netfilter may know an association that the programs do not.
func (n *packetNode) sctpStray(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	for flags := range sctpChunks {
		if flags == "S" {
			continue
		}
		f := frame{proto: protoSCTP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: flags, ack: serverTag}
		n.untouched(t, flags, inEth0, f.bytes(n, "eth0"), tcVerdictPASS_CONNTRACK)
	}
}

// sctpNetfilter: packets of endpoints bypass netfilter unless it may translate them.
func (n *packetNode) sctpNetfilter(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod2, 8080, here)))
	client, server := ap(p.pod1, 40000), ap(p.pod2, 8080)
	frames := map[at]frame{}
	for _, flags := range []string{"S", "."} {
		frames[inPod1] = frame{proto: protoSCTP, src: client, dst: server, flags: flags, ack: serverTag}
		frames[inPod2] = frame{proto: protoSCTP, src: server, dst: client, flags: flags, ack: clientTag}
		for hook, f := range frames {
			n.send(t, hook, f).want(t, actRedirect, tcVerdictPASSED_DIRECT)
		}
	}
	n.asking(t)
	for _, flags := range []string{"S", "."} {
		for hook, f := range frames {
			f.flags = flags
			n.untouched(t, flags, hook, f.bytes(n, hook.iface), tcVerdictPASS_CONNTRACK)
		}
	}
}

// sctpPodPort: no socket hook connects a pod's SCTP socket to an endpoint, so its port stays.
func (n *packetNode) sctpPodPort(t *testing.T, p *plan) {
	for _, e := range []where{here, elsewhere} {
		n.forget(t)
		server := map[where]netip.AddrPort{here: ap(p.pod2, 8080), elsewhere: ap(p.far, 8080)}[e]
		n.serve(t, service(p, protoSCTP, endpoint(server.Addr(), 8080, e)))
		client, front := ap(p.pod1, 41000), ap(p.clusterIP, 80)
		r := n.send(t, inPod1, frame{proto: protoSCTP, src: client, dst: front, flags: "S"})
		r.want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
		r.wantPath(t, client, server)
		back := map[where]at{here: inPod2, elsewhere: inTun0}[e]
		n.send(t, back, frame{proto: protoSCTP, src: server, dst: client, flags: "S.", ack: clientTag}).wantPath(t, front, client)
	}
}

// sctpSNATPorts: an association that runs keeps its port, one that has ended gives it up.
func (n *packetNode) sctpSNATPorts(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	a, b := n.associate(p, 40000, elsewhere), n.associate(p, 40001, elsewhere)
	a.say(t, sctpHandshake...)
	b.say(t, sctpHandshake...)
	if a.seen == b.seen {
		t.Fatalf("two associations have one port: %s", a.seen)
	}
	late := frame{proto: protoSCTP, src: ap(p.client2, 40002), dst: a.front, flags: "S"}
	n.send(t, inEth0, late).want(t, actDrop, tcVerdictDROP_SNAT_PORTS)
	b.say(t, "R")
	r := n.send(t, inEth0, late)
	r.want(t, actRedirect, tcVerdictFLOW_REPLACED, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
	r.wantPath(t, b.seen, b.server)
	a.say(t, ".", "<.")
}

// sctpAffinity: a client that is known to exist keeps its endpoint.
func (n *packetNode) sctpAffinity(t *testing.T, p *plan) {
	sp := service(p, protoSCTP, endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here))
	sp.Affinity = 100 * time.Second
	n.serve(t, sp)
	var count int
	counted := func() int {
		count = 0
		ok(t, each(n.m(tcMapAffinities), func(tcAffinityKey, tcAffinity) { count++ }))
		return count
	}
	a := n.associate(p, 40000, here)
	r := n.send(t, inEth0, frame{proto: protoSCTP, src: a.client, dst: a.front, flags: "S"})
	a.server, a.seen = r.v.dst, r.v.src
	if a.server.Addr() == p.pod2 {
		a.out = inPod2
	}
	a.say(t, "<S.")
	if counted() != 0 {
		t.Error("an INIT stores an affinity")
	}
	a.say(t, "cookie-echo")
	if counted() != 1 {
		t.Errorf("%d affinities, want the client's", count)
	}
	for port := uint16(40001); port < 40020; port++ {
		n.send(t, inEth0, frame{proto: protoSCTP, src: ap(p.client, port), dst: a.front, flags: "S"}).wantPath(t, ap(p.client, port), a.server)
	}
}

// sctpUnreachable: without an endpoint the answer is that of kube-proxy's REJECT.
func (n *packetNode) sctpUnreachable(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP))
	in := frame{proto: protoSCTP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", payload: []byte("parameters")}
	r := n.send(t, inEth0, in)
	n.wantAnswer(t, inEth0, in, r, tcVerdictREJECTED_ICMP)
	wantHeader(t, r.v, errorKinds[0], p)
	quotesLike(t, r.v.quoted, in.bytes(n, "eth0"))
}

// TestPacketSCTPFlood: INITs of clients that do not exist end no association.
func TestPacketSCTPFlood(t *testing.T) {
	n := newPacketNode(t, func(c *Config) { c.FlowTableSize = 512 })
	n.enter(t)
	p := plans["IPv4"]
	n.serve(t, service(p, protoSCTP, endpoint(p.far, 8080, elsewhere)))
	var running []*association
	for port := range uint16(20) {
		a := n.associate(p, 1024+port, elsewhere)
		a.say(t, sctpHandshake...)
		running = append(running, a)
	}
	for i := range 1500 {
		f := frame{proto: protoSCTP, src: ap(other(p.client, i), 5000), dst: ap(p.clusterIP, 80), flags: "S"}
		if r := n.send(t, inEth0, f); r.code != actRedirect {
			t.Fatalf("INIT %d: code %d, %s", i, r.code, verdictList(r.verdicts))
		}
	}
	for _, a := range running {
		a.say(t, ".", "<.")
		a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
	}
}
