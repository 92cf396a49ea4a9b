package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

func TestPacketFlows(t *testing.T) {
	n := newPacketNode(t)
	t.Run("TCPStates", func(t *testing.T) { eachFamily(t, n, n.tcpStates) })
	t.Run("SYNReopens", func(t *testing.T) { eachFamily(t, n, n.synReopens) })
	t.Run("Timeouts", func(t *testing.T) { eachFamily(t, n, n.timeouts) })
	t.Run("EndpointGone", func(t *testing.T) { eachTransport(t, n, n.endpointGone) })
	t.Run("HalfEvicted", func(t *testing.T) { eachTransport(t, n, n.halfEvicted) })
	t.Run("Opened", func(t *testing.T) { eachTransport(t, n, n.opened) })
	t.Run("HalfTaken", func(t *testing.T) { eachTransport(t, n, n.halfTaken) })
	t.Run("SNATPorts", func(t *testing.T) { eachTransport(t, n, n.snatUnique) })
	for _, c := range endings {
		t.Run("Yields/"+c.name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) { n.snatYields(t, p, c) })
		})
	}
	t.Run("YoungStays", func(t *testing.T) { eachFamily(t, n, n.youngStays) })
	t.Run("OldestYields", func(t *testing.T) { eachFamily(t, n, n.oldestYields) })
	t.Run("QuestionYields", func(t *testing.T) { eachFamily(t, n, n.questionYields) })
	t.Run("StrayPacketOfAFlowThatYielded", func(t *testing.T) { eachFamily(t, n, n.strayOfYielded) })
	t.Run("DSRSYNForgets", func(t *testing.T) { eachFamily(t, n, n.dsrSYN) })
	t.Run("DSRDatagramForgets", func(t *testing.T) { eachFamily(t, n, n.dsrDatagram) })
}

func tupleOf(proto uint8, src, dst netip.AddrPort) objects.TCTuple {
	return objects.TCTuple{
		Saddr: objects.ToAddr(src.Addr()), Daddr: objects.ToAddr(dst.Addr()),
		Sport: objects.ToPort(src.Port()), Dport: objects.ToPort(dst.Port()),
		Proto: proto, Family: objects.FamilyOf(src.Addr()),
	}
}

// flow reads one entry; ok is false when there is none.
func (n *packetNode) flow(key objects.TCTuple) (f objects.TCFlow, found bool) {
	return f, n.m(objects.TCMapFlows).Lookup(key, &f) == nil
}

// opened: both entries know when the flow began, and a dump shows its age.
func (n *packetNode) opened(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	before := objects.BootSeconds()
	c := n.running(t, p, proto)
	const age = 100
	for _, key := range []objects.TCTuple{tupleOf(proto, c.client, c.front), tupleOf(proto, c.server, c.seen)} {
		f, found := n.flow(key)
		if !found || f.Opened < before || f.Opened > objects.BootSeconds() {
			t.Fatalf("found %v, opened at %d, and the packet came after %d", found, f.Opened, before)
		}
		f.Opened -= age
		must.Do(t, n.m(objects.TCMapFlows).Put(key, f))
	}
	spec, err := objects.LoadTC()
	must.Do(t, err)
	shown := 0
	must.Do(t, inspect.DumpMap(n.m(objects.TCMapFlows), spec.Maps[objects.TCMapFlows], func(_, value []inspect.Field) error {
		tcp := slices.ContainsFunc(value, func(f inspect.Field) bool { return f.Name == "tcp.end" })
		for _, f := range value {
			if seconds, _ := f.Value.(uint64); f.Name == "age_seconds" && seconds >= age && seconds < age+60 && tcp == (proto == protoTCP) {
				shown++
			}
		}
		return nil
	}))
	if shown != 2 {
		t.Errorf("a dump shows the age of %d entries, want both", shown)
	}
}

// ageFlows lets every flow be this many seconds older.
func (n *packetNode) ageFlows(t *testing.T, by uint32) {
	t.Helper()
	all := map[objects.TCTuple]objects.TCFlow{}
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(k objects.TCTuple, f objects.TCFlow) { all[k] = f }))
	for k, f := range all {
		f.Seen -= by
		f.NextHopSeen -= by
		must.Do(t, n.m(objects.TCMapFlows).Put(k, f))
	}
}

func (n *packetNode) wantState(t *testing.T, state objects.TCFlowState, keys ...objects.TCTuple) {
	t.Helper()
	for i, k := range keys {
		f, found := n.flow(k)
		if !found || objects.TCFlowState(f.State) != state {
			t.Fatalf("entry %d of the flow: found %v, state %d, want %d", i, found, f.State, state)
		}
	}
}

// a step says which packet comes, as conn.say takes it, and the state it leads to.
type step struct {
	flags string
	state objects.TCFlowState
}

func (n *packetNode) tcpStates(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	dialogues := map[string][]step{
		"client closes": {
			{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {".", objects.TCFlowStateFLOW_ESTABLISHED},
			{"P.", objects.TCFlowStateFLOW_ESTABLISHED}, {"F.", objects.TCFlowStateFLOW_CLOSING}, {"<.", objects.TCFlowStateFLOW_CLOSING},
			{"<F.", objects.TCFlowStateFLOW_LAST_ACK}, {".", objects.TCFlowStateFLOW_CLOSED},
		},
		"endpoint closes": {
			{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {".", objects.TCFlowStateFLOW_ESTABLISHED},
			{"<F.", objects.TCFlowStateFLOW_CLOSING}, {"P.", objects.TCFlowStateFLOW_CLOSING}, {"F.", objects.TCFlowStateFLOW_LAST_ACK},
			{"<.", objects.TCFlowStateFLOW_CLOSED},
		},
		"FIN with the last ACK of the handshake": {
			{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {"F.", objects.TCFlowStateFLOW_CLOSING},
		},
		"refused":         {{"S", objects.TCFlowStateFLOW_NEW}, {"<R.", objects.TCFlowStateFLOW_CLOSED}},
		"client gives up": {{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {"R", objects.TCFlowStateFLOW_CLOSED}},
		"reset": {
			{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {".", objects.TCFlowStateFLOW_ESTABLISHED},
			{"R", objects.TCFlowStateFLOW_CLOSED},
		},
		"reset by the endpoint": {
			{"S", objects.TCFlowStateFLOW_NEW}, {"<S.", objects.TCFlowStateFLOW_SYN_RECV}, {".", objects.TCFlowStateFLOW_ESTABLISHED},
			{"<R.", objects.TCFlowStateFLOW_CLOSED},
		},
	}
	for name, steps := range dialogues {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
			for i, s := range steps {
				var r result
				if i == 0 {
					r = c.syn(t)
				} else {
					r = c.say(t, s.flags)
				}
				if s.flags[0] == '<' {
					r.wantPath(t, c.front, c.client)
				} else {
					r.wantPath(t, c.seen, c.server)
				}
				c.wantState(t, s.state)
			}
		})
	}
}

// synReopens: a client that uses a port again soon is a new connection, if the former
// one is over and the SYN is beyond its numbers.
func (n *packetNode) synReopens(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	c := n.openHere(t, p, 40000)
	again := func(seq uint32, verdicts ...objects.TCVerdict) {
		t.Helper()
		c.forge(t, "S", seq, 0).want(t, actRedirect, append(verdicts, objects.TCVerdictTRANSLATED_DIRECT)...)
	}
	again(c.sent + 1000) // while it is open: the endpoint says what of it
	c.wantState(t, objects.TCFlowStateFLOW_ESTABLISHED)
	c.talk(t, "<F.", ".", "F.", "<.")
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	again(c.sent - 1) // an old duplicate
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	again(c.sent+1, objects.TCVerdictFLOW_CREATED)
	c.wantState(t, objects.TCFlowStateFLOW_NEW)
	again(c.sent + 1) // repeated
	c.forge(t, "<R.", 0, c.sent+2)
	c.wantState(t, objects.TCFlowStateFLOW_CLOSED)
	again(7, objects.TCVerdictFLOW_CREATED)
	c.wantState(t, objects.TCFlowStateFLOW_NEW)
}

// timeouts: a flow ends after the timeout of its state.
func (n *packetNode) timeouts(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)), service(p, protoUDP, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	limits := n.cfg.Timeouts
	tests := []struct {
		proto uint8
		do    func(*conn)
		limit uint32
	}{
		{protoTCP, func(*conn) {}, objects.Seconds(limits.TCPNew)},
		{protoTCP, func(c *conn) { c.talk(t, "<S.") }, objects.Seconds(limits.TCPNew)},
		{protoTCP, func(c *conn) { c.talk(t, "<S.", ".") }, objects.Seconds(limits.TCPEstablished)},
		{protoTCP, func(c *conn) { c.talk(t, "<S.", ".", "<F.") }, objects.Seconds(limits.TCPClosing)},
		{protoTCP, func(c *conn) { c.talk(t, "<S.", ".", "<F.", "F.") }, objects.Seconds(limits.TCPNew)},
		{protoTCP, func(c *conn) { c.talk(t, "<S.", ".", "<R.") }, objects.Seconds(limits.TCPClosed)},
		{protoUDP, func(*conn) {}, objects.Seconds(limits.UDPNew)},
		{protoUDP, func(c *conn) { n.datagram(t, inPod1, c.server, client) }, objects.Seconds(limits.UDP)},
	}
	for i, tt := range tests {
		// A second of margin: the clock goes on.
		for _, late := range []bool{false, true} {
			n.forget(t)
			c := n.newConn(client, front, ap(p.pod1, 8080), inPod1)
			again := func() result { return c.forge(t, "S", c.sent+1000, 0) }
			if tt.proto == protoUDP {
				again = func() result { return n.datagram(t, inEth0, client, front) }
				again()
			} else {
				c.syn(t)
			}
			tt.do(c)
			if late {
				n.ageFlows(t, tt.limit+2)
				again().want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
				continue
			}
			n.ageFlows(t, tt.limit-2)
			if f, found := n.flow(tupleOf(tt.proto, client, front)); !found ||
				n.cfg.Timeouts.Dead(&objects.TCTuple{Proto: tt.proto}, &f, objects.BootSeconds()) {
				t.Errorf("case %d: flow is dead before its time", i)
			}
			if tt.limit != objects.Seconds(limits.TCPClosed) && again().verdicts[objects.TCVerdictFLOW_CREATED] > 0 {
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
	hooks := map[netip.Addr]at{p.pod1: inPod1, p.pod2: inPod2}
	c := n.newConn(client, front, netip.AddrPort{}, at{})
	send := func() result {
		if proto == protoTCP {
			return c.say(t, ".")
		}
		return n.datagram(t, inEth0, client, front)
	}
	gone := c.syn(t).v.dst
	if proto == protoUDP {
		gone = send().v.dst
	} else {
		c.server, c.out = gone, hooks[gone.Addr()]
		c.talk(t, "<S.", ".")
	}
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
	r.want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, client, both[0].Addr)
	n.serve(t, service(p, proto))
	defer func(was bool) { n.checksComplete = was }(n.checksComplete)
	n.checksComplete = false // see TestPacketAnswers
	n.send(t, inEth0, frame{proto: proto, src: client, dst: front}).want(t, actRedirect, objects.TCVerdictREJECTED_ICMP)
}

// halfEvicted: the map is an LRU and may lose one half of a flow.
func (n *packetNode) halfEvicted(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	c := n.running(t, p, proto)
	seen, front, far, client := c.seen, c.front, c.server, c.client
	forward, reply := tupleOf(proto, client, front), tupleOf(proto, far, seen)

	was, _ := n.flow(reply)
	must.Do(t, n.m(objects.TCMapFlows).Delete(reply))
	n.ageFlows(t, 3)
	r := n.send(t, inEth0, frame{proto: proto, src: client, dst: front, flags: ".", seq: c.sent, ack: c.answered})
	r.want(t, actRedirect, objects.TCVerdictFLOW_REVIVED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, seen, far)
	now, found := n.flow(reply)
	if !found || lasting(now) != lasting(was) {
		t.Errorf("reply entry was %+v, is %+v", was, now)
	}

	was, _ = n.flow(forward)
	must.Do(t, n.m(objects.TCMapFlows).Delete(forward))
	n.ageFlows(t, 3)
	r = n.send(t, inTun0, frame{proto: proto, src: far, dst: seen, flags: ".", seq: c.answered, ack: c.sent})
	r.want(t, actRedirect, objects.TCVerdictFLOW_REVIVED, objects.TCVerdictTRANSLATED_DIRECT)
	r.wantPath(t, front, client)
	now, found = n.flow(forward)
	if proto == protoUDP {
		objects.UDPOf(&was).Checked = 0 // a restored entry is compared with its Service again
	}
	if !found || lasting(now) != lasting(was) {
		t.Errorf("forward entry was %+v, is %+v", was, now)
	}
}

// running makes a flow that has been answered, of TCP one that is established.
func (n *packetNode) running(t *testing.T, p *plan, proto uint8) *conn {
	t.Helper()
	if proto == protoTCP {
		return n.open(t, p, 40000)
	}
	c := n.newConn(ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.seen = n.datagram(t, inEth0, c.client, c.front).v.src
	n.datagram(t, inTun0, c.server, c.seen)
	return c
}

// lasting takes out of a flow what is learned from packets.
func lasting(f objects.TCFlow) objects.TCFlow {
	f = withoutWay(f)
	f.Seen, f.Tcp.Isn, f.Tcp.FirstScale = 0, 0, 0
	return f
}

// withoutWay takes out of a flow what it remembers of its way.
func withoutWay(f objects.TCFlow) objects.TCFlow {
	f.NextHopMtu, f.NextHopSeen, f.NextHopIfindex, f.NextHopKind, f.NextHopMacs = 0, 0, 0, 0, [12]uint8{}
	return f
}

// halfTaken: the lost half's tuple was given to another flow meanwhile.
func (n *packetNode) halfTaken(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	c := n.running(t, p, proto)
	other := ap(p.client2, 40000)
	reply := tupleOf(proto, c.server, c.seen)
	foreign, _ := n.flow(reply)
	foreign.Daddr, foreign.Slot = objects.ToAddr(other.Addr()), foreign.Slot+1
	must.Do(t, n.m(objects.TCMapFlows).Put(reply, foreign))
	n.ageFlows(t, 3)
	ask := frame{proto: proto, src: c.client, dst: c.front, flags: ".", seq: c.sent, ack: c.answered}
	answer := frame{proto: proto, src: c.server, dst: c.seen, flags: ".", seq: c.answered, ack: c.sent}
	if proto == protoTCP {
		// A connection cannot go on by another port.
		defer func(was bool) { n.checksComplete = was }(n.checksComplete)
		n.checksComplete = false // see TestPacketAnswers
		n.send(t, inEth0, ask).want(t, actRedirect, objects.TCVerdictFLOW_CONFLICT, objects.TCVerdictREJECTED_NO_FLOW)
		n.send(t, inTun0, answer).wantPath(t, c.front, other)
		return
	}
	r := n.send(t, inEth0, ask)
	r.want(t, actRedirect, objects.TCVerdictFLOW_CONFLICT, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	if r.v.src == c.seen {
		t.Errorf("packet shares the tuple %s with another flow", c.seen)
	}
	n.send(t, inTun0, answer).wantPath(t, c.front, other)
	answer.dst = r.v.src
	n.send(t, inTun0, answer).wantPath(t, c.front, c.client)
}

// setSNATPorts leaves just these ports for SNAT, until the test ends.
func (n *packetNode) setSNATPorts(t *testing.T, ports ...uint16) {
	t.Helper()
	var s objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
	was := s
	all := n.snatPorts(t)
	for i, p := range ports {
		must.Do(t, n.m(objects.TCMapSnatPorts).Put(uint32(i), p))
	}
	s.SnatPorts, s.NetworkPorts = uint32(len(ports)), 0
	must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), s))
	t.Cleanup(func() {
		for i := range ports {
			must.Do(t, n.m(objects.TCMapSnatPorts).Put(uint32(i), all[i]))
		}
		must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), was))
	})
}

// snatUnique: towards one endpoint a port serves one flow, and no flow goes out
// without one.
func (n *packetNode) snatUnique(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	const ports = 12
	var list []uint16
	for i := range uint16(ports) {
		list = append(list, 50000+i)
	}
	n.setSNATPorts(t, list...)
	front, far := ap(p.clusterIP, 80), ap(p.far, 8080)
	seen := map[netip.AddrPort]netip.AddrPort{}
	for port := uint16(40000); port < 40000+ports; port++ {
		from := n.goOn(t, p, proto, port)
		if other, taken := seen[from]; taken {
			t.Fatalf("%s and %d both go out as %s", other, port, from)
		}
		if from.Port() < 50000 || from.Port() >= 50000+ports {
			t.Errorf("port %d is not of the list", from.Port())
		}
		seen[from] = ap(p.client, port)
	}
	for port := uint16(40000 + ports); port < 40100; port++ {
		n.send(t, inEth0, frame{proto: proto, src: ap(p.client, port), dst: front, flags: "S"}).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
	}
	for src, client := range seen {
		n.send(t, inTun0, frame{proto: proto, src: far, dst: src, flags: ".", seq: serverISN + 1, ack: clientISN + 1}).wantPath(t, front, client)
	}
	// A dead flow's port is free again.
	n.ageFlows(t, objects.Seconds(n.cfg.Timeouts.TCPEstablished)+5)
	n.send(t, inEth0, frame{proto: proto, src: ap(p.client2, 4), dst: front, flags: "S"}).
		want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
}

// goOn makes a flow that keeps its port: a connection, or datagrams that go on.
func (n *packetNode) goOn(t *testing.T, p *plan, proto uint8, port uint16) netip.AddrPort {
	t.Helper()
	if proto == protoTCP {
		return n.open(t, p, port).seen
	}
	client, front := ap(p.client, port), ap(p.clusterIP, 80)
	from := n.datagram(t, inEth0, client, front).v.src
	n.datagram(t, inTun0, ap(p.far, 8080), from)
	key := tupleOf(protoUDP, client, front)
	f, _ := n.flow(key)
	f.Seen--
	must.Do(t, n.m(objects.TCMapFlows).Put(key, f))
	n.datagram(t, inEth0, client, front)
	return from
}

// ending is how a connection closes, as conn.talk takes it, and whether its port may be
// given to another connection, and is preferred to one that has not rested. A FIN of the
// client's has three bytes with it.
type ending struct {
	name     string
	dialogue []string
	syn      uint32 // sequence number of the new connection's SYN
	port     portState
}

type portState int

const (
	portRested portState = iota
	portClosed           // at once, if there is no rested one
	portReset            // at once for the same client, after a second for others
	portHeld
)

// seqEnd is the number behind the client's FIN.
const seqEnd = clientISN + 1 + 3 + 1 - 1<<32

var endings = []ending{
	{"open", []string{".", "<."}, 9, portHeld},
	{"half closed by the client", []string{"F.", "<."}, 9, portHeld},
	{"half closed by the endpoint", []string{"<F.", "."}, 9, portHeld},
	{"reset by the client", []string{"R"}, 9, portReset},
	{"reset by the endpoint", []string{"<R."}, 9, portReset},
	{"reset, an ACK of the endpoint's under way", []string{"R", "<."}, 9, portReset},
	{"reset, an ACK of the client's under way", []string{"R", "."}, 9, portReset},
	{"reset, and it goes on", []string{"R", "F.", "<."}, 9, portHeld},
	{"reset after TIME-WAIT", []string{"<F.", "F.", "<.", "R"}, 1<<32 + seqEnd - 9, portReset},
	{"client first, last ACK under way", []string{"F.", "<F."}, 9, portHeld},
	{"client first, an ACK of the endpoint's", []string{"F.", "<F.", "<."}, 9, portHeld},
	{"client first", []string{"F.", "<F.", "."}, 1<<32 + seqEnd - 9, portRested},
	{"client first, last ACK lost", []string{"F.", "<F.", ".", "<F again."}, 9, portHeld},
	{"client first, last ACK repeated", []string{"F.", "<F.", ".", "<F again.", "."}, 9, portRested},
	{"endpoint first, last ACK under way", []string{"<F.", "F."}, 9, portHeld},
	{"endpoint first, a SYN beyond", []string{"<F.", "F.", "<."}, seqEnd + 1, portRested},
	{"endpoint first, a SYN far beyond", []string{"<F.", "F.", "<."}, seqEnd + 1<<31 - 1, portRested},
	{"endpoint first, a SYN at the end", []string{"<F.", "F.", "<."}, seqEnd, portClosed},
	{"endpoint first, a SYN before", []string{"<F.", "F.", "<."}, clientISN + 1, portClosed},
}

// end closes a connection in this way.
func (c *conn) end(t *testing.T, e ending) {
	t.Helper()
	for _, flags := range e.dialogue {
		switch flags {
		case "F.":
			c.say(t, flags, []byte("end")...)
		case "<F again.":
			c.answered--
			c.say(t, "<F.")
		default:
			c.say(t, flags)
		}
	}
}

// snatYields: where ports are short, a closed flow gives its port back before its
// timeout and before one that is being opened, a rested one first; an open one never does.
func (n *packetNode) snatYields(t *testing.T, p *plan, e ending) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	front := ap(p.clusterIP, 80)
	client := p.client
	syn := func(port uint16) result {
		return n.send(t, inEth0, frame{proto: protoTCP, src: ap(client, port), dst: front, flags: "S", seq: e.syn})
	}
	given := func(port uint16, want netip.AddrPort, when string) {
		t.Helper()
		r := syn(port)
		if r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 || r.v.src != want {
			t.Fatalf("%s: the new flow goes out as %s, verdicts %v; want %s", when, r.v.src, r.verdicts, want)
		}
	}
	n.setSNATPorts(t, 50000, 50001)
	closed, open := n.open(t, p, 40000), n.open(t, p, 40001)
	closed.end(t, e)
	if e.port == portHeld {
		syn(40002).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
		n.ageFlows(t, 2)
		syn(40003).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
		open.lives(t)
		return
	}
	if e.port == portReset {
		client = p.client2
		syn(40002).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
		n.ageFlows(t, 2)
		given(40003, closed.seen, "later")
		client = p.client
		n.forget(t)
		n.setSNATPorts(t, 50030, 50031)
		closed, open = n.open(t, p, 40030), n.open(t, p, 40031)
		closed.end(t, e)
		given(40032, closed.seen, "at once, to the same client")
		open.lives(t)
		return
	}
	given(40002, closed.seen, "at once")
	given(40004, closed.seen, "in place of one that is being opened")
	open.lives(t)

	n.setSNATPorts(t, 50010, 50011)
	closed = n.open(t, p, 40010)
	n.newConn(ap(p.client, 40011), front, ap(p.far, 8080), inTun0).syn(t)
	closed.end(t, e)
	given(40012, closed.seen, "rather than one that is being opened")
	if e.port == portRested {
		return
	}
	n.setSNATPorts(t, 50020, 50021)
	rested, closed := n.open(t, p, 40020), n.open(t, p, 40021)
	rested.talk(t, "F.", "<F.", ".")
	closed.end(t, e)
	given(40022, rested.seen, "rather than one that has not rested")
}

// youngStays: a handshake is not replaced while few flows are newer.
func (n *packetNode) youngStays(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	var ports []uint16
	for i := range uint16(48) {
		ports = append(ports, 50000+i)
	}
	n.setSNATPorts(t, ports...)
	for i := range uint16(47) {
		n.open(t, p, 40000+i)
	}
	c := n.newConn(ap(p.client, 40050), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
	c.synUntilCreated(t)
	n.newConn(ap(p.client, 40051), c.front, c.server, inTun0).syn(t).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
	last := n.newConn(ap(p.client, 40052), c.front, c.server, inTun0)
	last.synUntilCreated(t)
	if last.seen != c.seen {
		t.Errorf("the new connection goes out as %s, want %s", last.seen, c.seen)
	}
}

// questionYields: where ports are short, what is not known to go on gives its own
// back, the oldest first: a question that waits for its answer, or has it. What goes on
// does not.
func (n *packetNode) questionYields(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001, 50002)
	front, server := ap(p.clusterIP, 80), ap(p.far, 8080)
	ask := func(port uint16) result { return n.datagram(t, inEth0, ap(p.client, port), front) }
	answer := func(to netip.AddrPort) result { return n.datagram(t, inTun0, server, to) }
	stream := n.goOn(t, p, protoUDP, 40002)
	ask(40000)
	answer(ask(40001).v.src)
	first := ask(40003)
	if first.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
		t.Fatalf("a new question: code %d, %s", first.code, verdictList(first.verdicts))
	}
	if got := first.v.src; got == stream {
		t.Fatalf("a new question goes out as %s, which is in use", got)
	}
	answer(first.v.src).wantPath(t, front, ap(p.client, 40003))
	answer(stream).wantPath(t, front, ap(p.client, 40002))
	// Who had the port comes back, with another one or in place of another.
	for _, port := range []uint16{40000, 40001, 40000, 40001} {
		r := ask(port)
		if r.v.src == stream {
			t.Fatalf("goes out as %s, which is in use", stream)
		}
		answer(r.v.src).wantPath(t, front, ap(p.client, port))
	}
	// What has gone on is the last to go, and only when it rests.
	n.setSNATPorts(t, stream.Port())
	ask(40010).want(t, actDrop, objects.TCVerdictDROP_SNAT_PORTS)
	n.ageFlows(t, streamRest+2)
	if got := ask(40011).v.src; got != stream {
		t.Errorf("goes out as %s, want %s, which rests", got, stream)
	}
}

// streamRest is STREAM_IDLE_SECONDS of bpf/lib/flow/unconfirmed.h.
const streamRest = 10

// oldestYields: of two connections that are being opened the older one gives its port.
func (n *packetNode) oldestYields(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000, 50001)
	conns := map[uint16]*conn{}
	for port := uint16(40000); port < 40010; port++ {
		c := n.newConn(ap(p.client, port), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
		c.syn(t)
		if conns[port] = c; port < 40002 {
			continue
		}
		if old := conns[port-2]; old.seen != c.seen {
			t.Fatalf("connection %d goes out as %s, want %s, of the oldest that is being opened", port, c.seen, old.seen)
		}
	}
}

// strayOfYielded: a late packet of a flow whose port another has got, in the same
// second, must not take part in the other's connection.
func (n *packetNode) strayOfYielded(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000)
	old := n.open(t, p, 40000)
	old.talk(t, "F.", "<F.", ".")
	c := n.open(t, p, 40001)
	if c.seen != old.seen {
		t.Fatalf("the new connection goes out as %s, want %s", c.seen, old.seen)
	}
	defer func(was bool) { n.checksComplete = was }(n.checksComplete)
	n.checksComplete = false // see TestPacketAnswers
	for range 2 {
		r := old.say(t, "P.", []byte("old")...)
		r.want(t, actRedirect, objects.TCVerdictREJECTED_NO_FLOW)
		r.wantPath(t, old.front, old.client)
	}
	old.say(t, "R").want(t, actDrop, objects.TCVerdictDROP_NO_FLOW)
	c.lives(t)
}

// dsrSYN: a client that spoke to a Service now connects to the endpoint by
// the same ports. The answer is not the Service's.
func (n *packetNode) dsrSYN(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	client, front, pod := ap(p.client, 40000), ap(p.clusterIP, 80), ap(p.pod1, 8080)
	c := n.newConn(client, front, pod, inPod1)
	c.syn(t)
	c.say(t, "<R.")
	n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: pod, flags: "S"})
	r := n.send(t, inPod1, frame{proto: protoTCP, src: pod, dst: client, flags: "S."})
	r.wantPath(t, pod, client)
	// But not of a connection that lives.
	n.forget(t)
	c = n.openHere(t, p, 40000)
	n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: pod, flags: "S"})
	c.lives(t)
	c.talk(t, "F.")
	n.send(t, inEth0, frame{proto: protoTCP, src: client, dst: pod, flags: "S"})
	c.say(t, "<P.", 'a').wantPath(t, front, client)
}

// dsrDatagram: the same by UDP, whose flows do not say when they end. The
// flow goes on after all, and is answered again.
func (n *packetNode) dsrDatagram(t *testing.T, p *plan) {
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
		if r.code != actRedirect || r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
			t.Fatalf("packet %d: code %d, %s", i, r.code, verdictList(r.verdicts))
		}
		// The newest is there still, both ways.
		if from := r.v.src; proto == protoUDP {
			n.send(t, inTun0, frame{proto: proto, src: ap(p.far, 8080), dst: from}).wantPath(t, ap(p.clusterIP, 80), client)
		} else {
			n.send(t, inPod1, frame{proto: proto, src: ap(p.pod1, 8080), dst: from, flags: "S."}).wantPath(t, ap(p.clusterIP, 80), client)
		}
	}
	count := 0
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(objects.TCTuple, objects.TCFlow) { count++ }))
	if count > 2*2048*5/4 {
		t.Errorf("%d entries in a table of 2048 flows", count)
	}
}

// TestPacketOnePortForServiceAndEndpoint has a client's port reach one endpoint twice: through a
// Service, and by the endpoint's own address.
func TestPacketOnePortForServiceAndEndpoint(t *testing.T) {
	n := newPacketNode(t)
	for name, p := range plans {
		t.Run(name, func(t *testing.T) {
			n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
			c := n.openHere(t, p, 40000)
			plain := n.openTo(t, c.client, c.server, c.server, inPod1)
			if plain.seen.Addr() != c.client.Addr() || plain.seen.Port() == c.client.Port() {
				t.Errorf("the endpoint sees the second connection from %s", plain.seen)
			}
			plain.lives(t)
			c.lives(t)
			plain.lives(t)
			other := n.newConn(ap(p.client, 40001), c.server, c.server, inPod1)
			if r := other.syn(t); r.verdicts[objects.TCVerdictFLOW_CREATED] != 0 || other.seen != other.client {
				t.Errorf("a port that no Service has: %s, seen as %s", verdictList(r.verdicts), other.seen)
			}
			c.talk(t, "F.", "<F.", ".")
			again := n.openTo(t, ap(p.client, 40002), c.front, c.server, inPod1)
			again.lives(t)
			plain.lives(t)
		})
	}
}
