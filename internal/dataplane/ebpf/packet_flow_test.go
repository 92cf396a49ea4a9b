package ebpf

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/intent"
)

func TestPacketFlows(t *testing.T) {
	n := newPacketNode(t)
	t.Run("TCPStates", func(t *testing.T) { eachFamily(t, n, n.tcpStates) })
	t.Run("SYNReopens", func(t *testing.T) { eachFamily(t, n, n.synReopens) })
	t.Run("Timeouts", func(t *testing.T) { eachFamily(t, n, n.timeouts) })
	t.Run("EndpointGone", func(t *testing.T) { eachTransport(t, n, n.endpointGone) })
	t.Run("HalfEvicted", func(t *testing.T) { eachTransport(t, n, n.halfEvicted) })
	t.Run("HalfTaken", func(t *testing.T) { eachTransport(t, n, n.halfTaken) })
	t.Run("SNATPorts", func(t *testing.T) { eachTransport(t, n, n.snatUnique) })
	for _, c := range endings {
		t.Run("Yields/"+c.name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) { n.snatYields(t, p, c) })
		})
	}
	t.Run("AnsweredQuestionYields", func(t *testing.T) { eachFamily(t, n, n.questionYields) })
	t.Run("StrayPacketOfAFlowThatYielded", func(t *testing.T) { eachFamily(t, n, n.strayOfYielded) })
	t.Run("DirectSYNForgets", func(t *testing.T) { eachFamily(t, n, n.directSYN) })
	t.Run("DirectDatagramForgets", func(t *testing.T) { eachFamily(t, n, n.directDatagram) })
}

func tupleOf(proto uint8, src, dst netip.AddrPort) tcTuple {
	return tcTuple{
		Saddr: toAddr(src.Addr()), Daddr: toAddr(dst.Addr()),
		Sport: toPort(src.Port()), Dport: toPort(dst.Port()),
		Proto: proto, Family: familyOf(src.Addr()),
	}
}

// flow reads one entry; ok is false when there is none.
func (n *packetNode) flow(key tcTuple) (f tcFlow, found bool) {
	return f, n.m(tcMapFlows).Lookup(key, &f) == nil
}

// ageFlows lets every flow be this many seconds older.
func (n *packetNode) ageFlows(t *testing.T, by uint32) {
	t.Helper()
	all := map[tcTuple]tcFlow{}
	ok(t, each(n.m(tcMapFlows), func(k tcTuple, f tcFlow) { all[k] = f }))
	for k, f := range all {
		f.Seen -= by
		f.WaySeen -= by
		ok(t, n.m(tcMapFlows).Put(k, f))
	}
}

func (n *packetNode) wantState(t *testing.T, state tcFlowState, keys ...tcTuple) {
	t.Helper()
	for i, k := range keys {
		f, found := n.flow(k)
		if !found || tcFlowState(f.State) != state {
			t.Fatalf("entry %d of the flow: found %v, state %d, want %d", i, found, f.State, state)
		}
	}
}

// a dialogue says who sends which flags, and the state it leads to.
type step struct {
	fromClient bool
	flags      string
	state      tcFlowState
}

func (n *packetNode) tcpStates(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	dialogues := map[string][]step{
		"client closes": {
			{true, "S", tcFlowStateFLOW_NEW}, {true, "S", tcFlowStateFLOW_NEW}, {false, "S.", tcFlowStateFLOW_ESTABLISHED},
			{true, ".", tcFlowStateFLOW_ESTABLISHED}, {true, "F.", tcFlowStateFLOW_CLOSING}, {true, "F.", tcFlowStateFLOW_CLOSING},
			{false, ".", tcFlowStateFLOW_CLOSING}, {false, "F.", tcFlowStateFLOW_CLOSED}, {true, ".", tcFlowStateFLOW_CLOSED},
		},
		"endpoint closes": {
			{true, "S", tcFlowStateFLOW_NEW}, {false, "S.", tcFlowStateFLOW_ESTABLISHED}, {false, "F.", tcFlowStateFLOW_CLOSING},
			{true, "P.", tcFlowStateFLOW_CLOSING}, {true, "F.", tcFlowStateFLOW_CLOSED},
		},
		"refused": {{true, "S", tcFlowStateFLOW_NEW}, {false, "R.", tcFlowStateFLOW_CLOSED}},
		"reset, then a late FIN": {
			{true, "S", tcFlowStateFLOW_NEW}, {false, "S.", tcFlowStateFLOW_ESTABLISHED}, {true, "R", tcFlowStateFLOW_CLOSED},
			{false, "F.", tcFlowStateFLOW_CLOSED}, {true, ".", tcFlowStateFLOW_CLOSED},
		},
		"found in the middle": {{true, ".", tcFlowStateFLOW_NEW}, {false, ".", tcFlowStateFLOW_ESTABLISHED}},
	}
	for name, steps := range dialogues {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
			var seen netip.AddrPort
			for i, s := range steps {
				if s.fromClient {
					r := n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: front, flags: s.flags})
					r.wantPath(t, r.v.src, ap(p.far, 8080))
					if i > 0 && r.v.src != seen {
						t.Fatalf("step %d: source changed from %s to %s", i, seen, r.v.src)
					}
					seen = r.v.src
				} else {
					r := n.send(t, inTun0, frame{proto: protoTCP, src: ap(p.far, 8080), dst: seen, flags: s.flags})
					r.wantPath(t, front, client)
				}
				n.wantState(t, s.state, tupleOf(protoTCP, client, front), tupleOf(protoTCP, ap(p.far, 8080), seen))
			}
		})
	}
}

// synReopens: a client that uses a port again soon is a new connection.
func (n *packetNode) synReopens(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	send := func(flags string) result {
		return n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: front, flags: flags})
	}
	keys := []tcTuple{tupleOf(protoTCP, client, front), tupleOf(protoTCP, ap(p.pod1, 8080), client)}
	send("S").want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
	for _, end := range []string{"F.", "R"} {
		send(end)
		send("S").want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
		n.wantState(t, tcFlowStateFLOW_NEW, keys...)
	}
	// A SYN repeated, or with an ACK, reopens nothing.
	send("S").want(t, actRedirect, tcVerdictTRANSLATED_DIRECT)
	send("R")
	send("S.").want(t, actRedirect, tcVerdictTRANSLATED_DIRECT)
	n.wantState(t, tcFlowStateFLOW_CLOSED, keys...)
}

// timeouts: a flow that is too old is none, by the time-out of its state.
func (n *packetNode) timeouts(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)), service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	limits := n.cfg.Timeouts
	tests := []struct {
		proto uint8
		do    func(frame)
		limit uint32
	}{
		{protoTCP, func(frame) {}, seconds(limits.TCPNew)},
		{protoTCP, func(a frame) { n.send(t, inPod1, a) }, seconds(limits.TCPEstablished)},
		{protoTCP, func(a frame) { a.flags = "F."; n.send(t, inPod1, a) }, seconds(limits.TCPClosing)},
		{protoTCP, func(a frame) { a.flags = "R"; n.send(t, inPod1, a) }, seconds(limits.TCPClosed)},
		{protoUDP, func(frame) {}, seconds(limits.UDPNew)},
		{protoUDP, func(a frame) { n.send(t, inPod1, a) }, seconds(limits.UDP)},
	}
	for i, tt := range tests {
		// A second of margin: the clock goes on.
		for _, late := range []bool{false, true} {
			n.forget(t)
			in := frame{proto: tt.proto, src: client, dst: front, flags: "S"}
			r := n.send(t, inEth0, in)
			tt.do(back(r.v, "S.", nil))
			in.flags = "."
			if late {
				n.ageFlows(t, tt.limit+2)
				n.send(t, inEth0, in).want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
				continue
			}
			n.ageFlows(t, tt.limit-2)
			if r := n.send(t, inEth0, in); r.verdicts[tcVerdictFLOW_CREATED] > 0 {
				t.Errorf("case %d: flow was forgotten before its time", i)
			}
		}
	}
}

// endpointGone: datagrams go to another endpoint; a connection would not survive
// that and stays.
func (n *packetNode) endpointGone(t *testing.T, p *plan, proto uint8) {
	both := []intent.Endpoint{endpoint(p.pod1, 8080, here), endpoint(p.pod2, 8080, here)}
	n.serve(t, service(p, proto, both...))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	send := func() result {
		return n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "."})
	}
	gone := send().v.dst
	for i, e := range both {
		if e.Addr == gone {
			both = []intent.Endpoint{both[1-i]}
			break
		}
	}
	n.serve(t, service(p, proto, both...))
	if proto == protoTCP {
		send().wantPath(t, client, gone)
		return
	}
	r := send()
	r.want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
	r.wantPath(t, client, both[0].Addr)
	n.serve(t, service(p, proto))
	defer func(was bool) { n.checksComplete = was }(n.checksComplete)
	n.checksComplete = false // see TestPacketAnswers
	n.send(t, inEth0, frame{proto: proto, src: client, dst: front}).want(t, actRedirect, tcVerdictREJECTED_ICMP)
}

// halfEvicted: the map is an LRU and may lose one half of a flow.
func (n *packetNode) halfEvicted(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	client, front, far := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "S"})
	seen := r.v.src
	forward, reply := tupleOf(proto, client, front), tupleOf(proto, far, seen)
	n.send(t, inTun0, frame{proto: proto, src: far, dst: seen, flags: "S."})

	was, _ := n.flow(reply)
	ok(t, n.m(tcMapFlows).Delete(reply))
	n.ageFlows(t, 3)
	r = n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "."})
	r.want(t, actRedirect, tcVerdictFLOW_REVIVED, tcVerdictTRANSLATED_DIRECT)
	r.wantPath(t, seen, far)
	now, found := n.flow(reply)
	now.Seen = was.Seen
	if !found || withoutWay(now) != withoutWay(was) {
		t.Errorf("reply entry was %+v, is %+v", was, now)
	}

	was, _ = n.flow(forward)
	ok(t, n.m(tcMapFlows).Delete(forward))
	n.ageFlows(t, 3)
	r = n.send(t, inTun0, frame{proto: proto, src: far, dst: seen, flags: "."})
	r.want(t, actRedirect, tcVerdictFLOW_REVIVED, tcVerdictTRANSLATED_DIRECT)
	r.wantPath(t, front, client)
	now, found = n.flow(forward)
	now.Seen = was.Seen
	if !found || withoutWay(now) != withoutWay(was) {
		t.Errorf("forward entry was %+v, is %+v", was, now)
	}
}

// withoutWay takes out of a flow what it remembers of its way.
func withoutWay(f tcFlow) tcFlow {
	f.WayMtu, f.WaySeen, f.WayIfindex, f.WayKind, f.WayMacs = 0, 0, 0, 0, [12]uint8{}
	return f
}

// halfTaken: the lost half's tuple was given to another flow meanwhile.
func (n *packetNode) halfTaken(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	client, front, far := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080)
	other := ap(p.client2, 40000)
	seen := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "S"}).v.src
	reply := tupleOf(proto, far, seen)
	foreign, _ := n.flow(reply)
	foreign.Daddr = toAddr(other.Addr())
	ok(t, n.m(tcMapFlows).Put(reply, foreign))
	n.ageFlows(t, 3)
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "."})
	r.want(t, actRedirect, tcVerdictFLOW_CONFLICT, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
	if r.v.src == seen {
		t.Errorf("packet shares the tuple %s with another flow", seen)
	}
	second := r.v.src
	n.send(t, inTun0, frame{proto: proto, src: far, dst: seen, flags: "."}).wantPath(t, front, other)
	n.send(t, inTun0, frame{proto: proto, src: far, dst: second, flags: "."}).wantPath(t, front, client)
}

// setSNATPorts leaves just these ports for SNAT, until the test ends.
func (n *packetNode) setSNATPorts(t *testing.T, ports ...uint16) {
	t.Helper()
	var s tcSettings
	ok(t, n.m(tcMapNodeSettings).Lookup(uint32(0), &s))
	was := s
	for i, p := range ports {
		ok(t, n.m(tcMapSnatPorts).Put(uint32(i), p))
	}
	s.SnatPorts = uint32(len(ports))
	ok(t, n.m(tcMapNodeSettings).Put(uint32(0), s))
	t.Cleanup(func() {
		for i := range ports {
			ok(t, n.m(tcMapSnatPorts).Put(uint32(i), n.snatPorts[i]))
		}
		ok(t, n.m(tcMapNodeSettings).Put(uint32(0), was))
	})
}

// snatUnique: towards one endpoint a port serves one flow, and no flow goes out
// without one.
func (n *packetNode) snatUnique(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001, 50002, 50003, 50004, 50005, 50006, 50007, 50008, 50009, 50010, 50011)
	front := ap(p.clusterIP, 80)
	seen := map[netip.AddrPort]netip.AddrPort{}
	refused := 0
	for port := uint16(40000); port < 40100; port++ {
		client := ap(p.client, port)
		r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: "S"})
		if r.verdicts[tcVerdictDROP_SNAT_PORTS] > 0 {
			r.want(t, actDrop, tcVerdictDROP_SNAT_PORTS)
			refused++
			continue
		}
		r.want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
		if other, taken := seen[r.v.src]; taken {
			t.Fatalf("%s and %s both go out as %s", other, client, r.v.src)
		}
		if r.v.src.Port() < 50000 || r.v.src.Port() > 50011 {
			t.Errorf("port %d is not of the list", r.v.src.Port())
		}
		seen[r.v.src] = client
	}
	if len(seen) != 12 || refused != 88 {
		t.Errorf("12 ports served %d flows, and %d were refused", len(seen), refused)
	}
	for src, client := range seen {
		n.send(t, inTun0, frame{proto: proto, src: ap(p.far, 8080), dst: src, flags: "."}).wantPath(t, front, client)
	}
	// A dead flow's port is free again.
	n.ageFlows(t, seconds(n.cfg.Timeouts.TCPEstablished)+5)
	n.send(t, inEth0, frame{proto: proto, src: ap(p.client2, 4), dst: front, flags: "S"}).
		want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
}

// ending is how a connection closes, and when its port may be given to another.
// A dialogue's packets are the client's, or begin with < and are the endpoint's.
type ending struct {
	name     string
	dialogue []frame
	syn      uint32 // sequence number of the new connection's SYN
	at       when
}

type when int

const (
	noWait when = iota
	nextSecond
	never
)

// The client's sequence numbers; its FIN has three bytes with it.
const (
	finSeq = 0xfffffffe
	seqEnd = 2 // finSeq + 3 + 1
)

var (
	clientFIN = frame{flags: "F.", seq: finSeq, payload: []byte("end")}
	endings   = []ending{
		{"open", []frame{{flags: "."}, {flags: "<."}}, 9, never},
		{"half closed by the client", []frame{clientFIN, {flags: "<."}}, 9, never},
		{"half closed by the endpoint", []frame{{flags: "<F."}, {flags: "."}}, 9, never},
		{"reset by the client", []frame{{flags: "R"}}, 9, noWait},
		{"reset by the endpoint", []frame{{flags: "<R."}}, 9, noWait},
		{"reset, and nobody minds", []frame{{flags: "R"}, {flags: "<."}}, 9, nextSecond},
		{"reset after TIME-WAIT", []frame{{flags: "<F."}, clientFIN, {flags: "<."}, {flags: "R"}}, 1<<32 + seqEnd - 9, noWait},
		{"client first, last ACK under way", []frame{clientFIN, {flags: "<F."}}, 9, nextSecond},
		{"client first, an ACK of the endpoint's", []frame{clientFIN, {flags: "<F."}, {flags: "<."}}, 9, nextSecond},
		{"client first", []frame{clientFIN, {flags: "<F."}, {flags: "."}}, 1<<32 + seqEnd - 9, noWait},
		{"client first, last ACK lost", []frame{clientFIN, {flags: "<F."}, {flags: "."}, {flags: "<F."}}, 9, nextSecond},
		{"endpoint first, last ACK under way", []frame{{flags: "<F."}, clientFIN}, 9, nextSecond},
		{"endpoint first, a SYN beyond", []frame{{flags: "<F."}, clientFIN, {flags: "<."}}, seqEnd + 1, noWait},
		{"endpoint first, a SYN far beyond", []frame{{flags: "<F."}, clientFIN, {flags: "<."}}, seqEnd + 1<<31 - 1, noWait},
		{"endpoint first, a SYN at the end", []frame{{flags: "<F."}, clientFIN, {flags: "<."}}, seqEnd, nextSecond},
		{"endpoint first, a SYN before", []frame{{flags: "<F."}, clientFIN, {flags: "<."}}, finSeq, nextSecond},
	}
)

// snatYields: where ports are short, a closed flow gives its own back before its
// time-out, as soon as the endpoint can do with a new connection; an open one
// never does.
func (n *packetNode) snatYields(t *testing.T, p *plan, c ending) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	front := ap(p.clusterIP, 80)
	syn := func(port uint16) result {
		return n.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, port), dst: front, flags: "S", seq: c.syn})
	}
	closed := n.connect(t, p, 40000)
	open := n.connect(t, p, 40001)
	n.talk(t, p, 40000, closed, c.dialogue)
	given := func(port uint16, when string) {
		t.Helper()
		r := syn(port)
		if r.verdicts[tcVerdictFLOW_CREATED] != 1 || r.v.src != closed {
			t.Fatalf("%s: the new flow goes out as %s, verdicts %v; want %s: %s is in use", when, r.v.src, r.verdicts, closed, open)
		}
	}
	if c.at == noWait {
		given(40002, "at once")
	} else {
		syn(40002).want(t, actDrop, tcVerdictDROP_SNAT_PORTS)
		n.ageFlows(t, 2)
		if c.at == nextSecond {
			given(40003, "later")
		}
	}
	syn(40004).want(t, actDrop, tcVerdictDROP_SNAT_PORTS)
}

// questionYields: where ports are short, a question by UDP that was answered, and
// that nothing has followed, gives its own back; one without an answer, and what
// goes on for longer, does not.
func (n *packetNode) questionYields(t *testing.T, p *plan) {
	const rest = 2 // ANSWER_REST
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001, 50002)
	front, server := ap(p.clusterIP, 80), ap(p.far, 8080)
	ask := func(port uint16) result { return n.datagram(t, inEth0, ap(p.client, port), front) }
	answer := func(to netip.AddrPort) result { return n.datagram(t, inTun0, server, to) }
	silent, question, stream := ask(40000).v.src, ask(40001).v.src, ask(40002).v.src
	answer(question)
	answer(stream)
	n.ageFlows(t, 1)
	if got := ask(40002).v.src; got != stream {
		t.Fatalf("what goes on goes out as %s, then as %s", stream, got)
	}
	ask(40003).want(t, actDrop, tcVerdictDROP_SNAT_PORTS)
	n.ageFlows(t, rest-1)
	if got := ask(40004).v.src; got != question {
		t.Fatalf("a new question goes out as %s, want %s; %s waits, %s goes on", got, question, silent, stream)
	}
	for range 2 { // who had it before does not speak by it
		ask(40001).want(t, actDrop, tcVerdictFLOW_CONFLICT, tcVerdictDROP_SNAT_PORTS)
	}
	answer(question).wantPath(t, front, ap(p.client, 40004))
	answer(stream).wantPath(t, front, ap(p.client, 40002))
	answer(silent).wantPath(t, front, ap(p.client, 40000))
	// Who comes back gets another port, and not the other's answers.
	n.ageFlows(t, rest)
	if got := ask(40001).v.src; got == stream {
		t.Errorf("the next question goes out as %s, which is in use", got)
	}
}

// connect opens a connection of a client's port, and gives the source that the
// endpoint sees.
func (n *packetNode) connect(t *testing.T, p *plan, port uint16) netip.AddrPort {
	t.Helper()
	src := n.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, port), dst: ap(p.clusterIP, 80), flags: "S"}).v.src
	n.send(t, inTun0, frame{proto: protoTCP, src: ap(p.far, 8080), dst: src, flags: "S."})
	return src
}

// talk sends the packets of a connection.
func (n *packetNode) talk(t *testing.T, p *plan, port uint16, seen netip.AddrPort, dialogue []frame) {
	t.Helper()
	for _, f := range dialogue {
		hook := inEth0
		f.proto, f.src, f.dst = protoTCP, ap(p.client, port), ap(p.clusterIP, 80)
		if f.flags[0] == '<' {
			f.flags, hook, f.src, f.dst = f.flags[1:], inTun0, ap(p.far, 8080), seen
		}
		n.send(t, hook, f)
	}
}

// strayOfYielded: a late packet of a flow whose port another has got, in the same
// second, must not take part in the other's connection.
func (n *packetNode) strayOfYielded(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000)
	front := ap(p.clusterIP, 80)
	seen := n.connect(t, p, 40000)
	n.talk(t, p, 40000, seen, []frame{{flags: "R"}})
	if got := n.connect(t, p, 40001); got != seen {
		t.Fatalf("the new connection goes out as %s, want %s", got, seen)
	}
	for range 2 {
		stray := n.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, 40000), dst: front, flags: "P.", payload: []byte("old")})
		stray.want(t, actDrop, tcVerdictFLOW_CONFLICT, tcVerdictDROP_SNAT_PORTS)
	}
	n.send(t, inTun0, frame{proto: protoTCP, src: ap(p.far, 8080), dst: seen, flags: "."}).wantPath(t, front, ap(p.client, 40001))
}

// directSYN: a client that spoke to a Service now connects to the endpoint by
// the same ports. The answer is not the Service's.
func (n *packetNode) directSYN(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	client, front, pod := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.pod1, 8080)
	n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: front, flags: "S"})
	n.send(t, inPod1, frame{proto: protoTCP, src: pod, dst: client, flags: "R."})
	n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: pod, flags: "S"})
	r := n.send(t, inPod1, frame{proto: protoTCP, src: pod, dst: client, flags: "S."})
	r.wantPath(t, pod, client)
}

// directDatagram: the same by UDP, whose flows do not say when they end. The
// flow goes on after all, and is answered again.
func (n *packetNode) directDatagram(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	client, front, pod := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.pod1, 8080)
	ask := func(dst netip.AddrPort) {
		n.send(t, inEth0, frame{proto: protoUDP, src: client, dst: dst})
	}
	answered := func(from netip.AddrPort) {
		t.Helper()
		n.send(t, inPod1, frame{proto: protoUDP, src: pod, dst: client}).wantPath(t, from, client)
	}
	ask(front)
	answered(front)
	for range 3 { // in one second, or not: who asked last gets the answer
		ask(pod)
		answered(pod)
		ask(front)
		answered(front)
	}
}

// TestPacketFlowTableFull: the oldest flows go, and no packet is refused.
func TestPacketFlowTableFull(t *testing.T) {
	n := newPacketNode(t, func(c *Config) { c.FlowTableSize = 2048 })
	p := plans["IPv4"]
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)), service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	for i := range 6000 {
		proto, client := uint8(protoUDP), ap(p.client, uint16(10000+i))
		if i%2 > 0 {
			proto = protoTCP
		}
		r := n.send(t, inEth0, frame{proto: proto, src: client, dst: ap(p.clusterIP, 80), flags: "S"})
		r.want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
		// The newest is there still, both ways.
		if from := r.v.src; proto == protoUDP {
			n.send(t, inTun0, frame{proto: proto, src: ap(p.far, 8080), dst: from}).wantPath(t, ap(p.clusterIP, 80), client)
		} else {
			n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, 8080), dst: from, flags: "S."}).wantPath(t, ap(p.clusterIP, 80), client)
		}
	}
	count := 0
	ok(t, each(n.m(tcMapFlows), func(tcTuple, tcFlow) { count++ }))
	if count > 2*2048 {
		t.Errorf("%d entries in a table of 2048 flows", count)
	}
}
