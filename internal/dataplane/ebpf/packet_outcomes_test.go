package ebpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func watch(p *intent.ServicePort) *intent.ServicePort {
	for i := range p.Endpoints {
		p.Endpoints[i].Watched = true
	}
	return p
}

// wantOutcome fails unless the only endpoint has these numbers.
func (n *packetNode) wantOutcome(t *testing.T, when string, failed, refused uint32, accepted bool) {
	t.Helper()
	list, err := n.Outcomes()
	must.Do(t, err)
	if len(list) != 1 {
		t.Fatalf("%s: %d outcomes: %+v, want 1", when, len(list), list)
	}
	o := list[0]
	if o.Failed != failed || o.Refused != refused || o.Accepted.IsZero() == accepted || o.Since.IsZero() != (failed == 0) {
		t.Errorf("%s: %+v, want %d failed, %d refused, accepted %t", when, o, failed, refused, accepted)
	}
	for _, at := range []time.Time{o.Since, o.Accepted} {
		if age := time.Since(at); !at.IsZero() && (age < 0 || age > time.Minute) {
			t.Errorf("%s: %s ago", when, age)
		}
	}
}

func TestPacketOutcomes(t *testing.T) {
	n := newPacketNode(t)
	n.checksComplete = false // see TestPacketAnswers
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, watch(service(p, protoTCP, endpoint(p.far, 8080, elsewhere))), watch(service(p, protoUDP, endpoint(p.eth0, 53, here))))
		next := uint16(42000)
		open := func(packets ...string) {
			next++
			c := n.newConn(ap(p.client, next), ap(p.clusterIP, 80), ap(p.far, 8080), inTun0)
			c.syn(t)
			c.talk(t, packets...)
		}
		open()
		n.wantOutcome(t, "a SYN", 1, 0, false)
		open("<R.")
		open("<R.")
		n.wantOutcome(t, "two that were refused", 3, 2, false)
		open("<S.")
		n.wantOutcome(t, "a SYN-ACK", 0, 0, true)
		open("<S.", ".", "P.", "<R.")
		n.wantOutcome(t, "an RST in a connection", 0, 0, true)
		open()
		open("R")
		n.wantOutcome(t, "a client that ends its handshake", 2, 0, true)

		ejected := watch(service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		ejected.Endpoints[0].Ejected = true
		n.serve(t, ejected)
		n.wantOutcome(t, "an endpoint that is ejected keeps its id", 2, 0, true)
		n.serve(t, watch(service(p, protoTCP, endpoint(p.eth0, 8080, here))))
		if list, err := n.Outcomes(); err != nil || len(list) > 0 {
			t.Errorf("another endpoint: outcomes %+v, %v", list, err)
		}
		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		open()
		if list, err := n.Outcomes(); err != nil || len(list) > 0 {
			t.Errorf("no endpoint is watched: outcomes %+v, %v", list, err)
		}
	})
}

func TestSocketOutcomes(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOff })
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		n.serve(t, watch(service(p, protoTCP, endpoint(p.eth0, 8080, here))))
		refused := func() {
			fd, closeNow := n.socket(t, domainOf(p), protoTCP)
			if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatalf("connect to a port that does not listen: %v", err)
			}
			closeNow()
		}
		refused()
		refused()
		n.wantOutcome(t, "two refused", 2, 2, false)
		listener := n.listen(t, p)
		d := n.dial(t, domainOf(p), listener, ap(p.clusterIP, 80))
		n.wantOutcome(t, "an accepted connection", 0, 0, true)
		must.Do(t, unix.SetsockoptLinger(d.server, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		d.closeServer()
		waitReset(t, d.client)
		n.wantOutcome(t, "an RST in a connection", 0, 0, true)

		n.serve(t, watch(service(p, protoTCP, endpoint(p.far, 8080, elsewhere))))
		fd, closeNow := n.socket(t, domainOf(p), protoTCP)
		must.Do(t, unix.SetNonblock(fd, true))
		if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.EINPROGRESS) {
			t.Fatalf("connect without waiting: %v", err)
		}
		n.wantOutcome(t, "a SYN", 1, 0, false)
		closeNow()
		n.wantOutcome(t, "a process that has given up", 1, 0, false)
	})
}

// wantFailed waits until the only endpoint whose sockets fail has these numbers; 0 of all: there is none.
func (n *eventNode) wantFailed(t *testing.T, when string, refused, unanswered, segments uint32) (f dataplane.FailedSockets) {
	t.Helper()
	await.NoError(t, func() error {
		list, err := n.FailedSockets()
		must.Do(t, err)
		if len(list) == 0 && refused+unanswered == 0 {
			return nil
		}
		if len(list) != 1 {
			return fmt.Errorf("%s: %d endpoints: %+v, want 1", when, len(list), list)
		}
		f = list[0]
		if f.Refused.Connections != refused || f.Unanswered.Connections != unanswered || f.Unanswered.Segments < segments {
			return fmt.Errorf("%s: %+v, want %d refused, %d unanswered of %d segments", when, f, refused, unanswered, segments)
		}
		return nil
	})
	return f
}

// connectNow begins a connection that gets no answer.
func (n *eventNode) connectNow(t *testing.T, p *plan) (closeNow func()) {
	t.Helper()
	fd, closeNow := n.socket(t, domainOf(p), protoTCP)
	must.Do(t, unix.SetNonblock(fd, true))
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.EINPROGRESS) {
		t.Fatalf("connect without waiting: %v", err)
	}
	return closeNow
}

// With the default flags, failed handshakes of sockets are counted, and only they.
func TestFailedSockets(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOff })
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
		for range 2 {
			fd, closeNow := n.socket(t, domainOf(p), protoTCP)
			if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatalf("connect to a port that does not listen: %v", err)
			}
			closeNow()
		}
		f := n.wantFailed(t, "two refused", 2, 0, 0)
		if f.Endpoint != ap(p.eth0, 8080) || f.Client != p.eth0 || f.Port.Service.Name != "web-6" || !f.Accepted.IsZero() {
			t.Errorf("two refused: %+v", f)
		}
		for _, at := range []time.Time{f.Refused.First, f.Refused.Last} {
			if age := time.Since(at); age < 0 || age > time.Minute {
				t.Errorf("a failure %s ago", age)
			}
		}
		d := n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
		n.wantFailed(t, "an accepted connection", 0, 0, 0)
		must.Do(t, unix.SetsockoptLinger(d.server, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		d.closeServer()
		waitReset(t, d.client)
		n.wantFailed(t, "an RST in a connection", 0, 0, 0)

		n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
		n.connectNow(t, p)()
		n.wantFailed(t, "a process that has given up at once", 0, 0, 0)
		closeFirst := n.connectNow(t, p)
		closeSecond := n.connectNow(t, p)
		n.wantFailed(t, "SYNs that are repeated", 0, 2, 2)
		if !testing.Short() {
			n.wantFailed(t, "SYNs that are repeated twice", 0, 2, 4)
		}
		closeFirst()
		closeSecond()
		if f = n.wantFailed(t, "the end", 0, 2, 2); f.Endpoint != ap(p.far, 8080) || f.Client.IsUnspecified() {
			t.Errorf("SYNs without an answer: %+v", f)
		}
	})
}

// A pod whose connections to many endpoints fail does not hide the next failures of others.
func TestFailedSocketsBeyondTheMap(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOff })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
	refused := func() {
		fd, closeNow := n.socket(t, domainOf(p), protoTCP)
		if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("connect to a port that does not listen: %v", err)
		}
		closeNow()
	}
	m := n.m(objects.TCMapOutcomes)
	fill := func(first uint32) {
		for id := first; id < first+2*m.MaxEntries(); id++ {
			o := objects.TCOutcome{}
			o.Failures[objects.SockHandshakeFailureHANDSHAKE_REFUSED].Segments = 1
			must.Do(t, m.Put(id, o))
		}
	}
	refused()
	fill(1 << 20)
	for range 3 {
		refused()
	}
	list, err := n.FailedSockets()
	must.Do(t, err)
	if len(list) != 1 || list[0].Endpoint != ap(p.eth0, 8080) || list[0].Refused.Connections < 3 { // 4, if the first entry stayed
		t.Errorf("in a full map: %+v", list)
	}
	left := 0
	must.Do(t, objects.Each(m, func(uint32, objects.TCOutcome) { left++ }))
	if left != 1 {
		t.Errorf("%d outcomes remain, want that of the one endpoint that exists", left)
	}
}

// A refused call tells the cgroup of its process: its socket has no address yet.
func TestRefusedSocketsTellTheirCgroup(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsRefused })
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		n.restart(t)
		empty := service(p, protoTCP)
		for i := range empty.Frontends {
			empty.Frontends[i].InternalRoute = intent.Reject
		}
		n.serve(t, empty)
		fd, _ := n.socket(t, domainOf(p), protoTCP)
		if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.EPERM) {
			t.Fatalf("connect to a Service without endpoints: %v", err)
		}
		var cgroup unix.Stat_t
		must.Do(t, unix.Stat(ownCgroup(t), &cgroup))
		e := n.wantSoon(t, "refused socket_refused")[0]
		if f := e.Flow; f.Cgroup != cgroup.Ino || f.Handshake != 0 || f.ServiceAddress != ap(p.clusterIP, 80) || f.Port.Service.Name != "web-6" {
			t.Errorf("flow %+v, want cgroup %d", f, cgroup.Ino)
		}
	})
}

// A process that gives up after a while counts, although no SYN was repeated.
func TestFailedSocketsThatGiveUp(t *testing.T) {
	n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOff })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	fd, _ := n.socket(t, domainOf(p), protoTCP)
	must.Do(t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 1)) // the timer expires after a second
	if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.ETIMEDOUT) {
		t.Fatalf("connect with a timeout: %v", err)
	}
	if f := n.wantFailed(t, "a kernel that has given up", 0, 1, 1); f.Unanswered.Segments != 1 {
		t.Errorf("the last segment counts twice: %+v", f)
	}
	for count := range uint32(2) {
		fd, closeNow := n.socket(t, domainOf(p), protoTCP)
		must.Do(t, unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Usec: 700_000}))
		if err := unix.Connect(fd, sockaddr(ap(p.clusterIP, 80))); !errors.Is(err, unix.EINPROGRESS) {
			t.Fatalf("connect to an endpoint that does not answer: %v", err)
		}
		closeNow()
		n.wantFailed(t, "a process that has given up", 0, count+2, count+2)
	}
}

// countCalls attaches a program to the cgroup that counts calls of sock_ops by op. With asks, it asks
// for calls of state changes when a connection is established, as other programs do.
func countCalls(t *testing.T, cgroup string, asks bool) *ebpf.Map {
	t.Helper()
	const established, stateFlag = 4, 1 << 2 // BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB, BPF_SOCK_OPS_STATE_CB_FLAG
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 32})
	must.Do(t, err)
	t.Cleanup(func() { m.Close() })
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R7, asm.R1, 0, asm.Word),
		asm.StoreMem(asm.R10, -4, asm.R7, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.R10),
		asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
	}
	if asks {
		code = append(code,
			asm.JNE.Imm(asm.R7, established, "end"),
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Imm(asm.R2, stateFlag),
			asm.FnSockOpsCbFlagsSet.Call(),
		)
	}
	code = append(code, asm.Mov.Imm(asm.R0, 1).WithSymbol("end"), asm.Return())
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SockOps, License: "GPL", Instructions: code})
	must.Do(t, err)
	t.Cleanup(func() { prog.Close() })
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupSockOps, Program: prog})
	must.Do(t, err)
	t.Cleanup(func() { l.Close() })
	return m
}

// After the handshake the kernel makes no call for a socket, unless another program asks for it.
func TestCallsEndWithTheHandshake(t *testing.T) {
	const stateCall = 10 // BPF_SOCK_OPS_STATE_CB
	for _, asks := range []bool{false, true} {
		t.Run(fmt.Sprintf("AnotherAsks=%v", asks), func(t *testing.T) {
			n := newSocketNode(t, func(c *Config) { c.FlowEvents = EventsOff })
			p := plans["IPv4"]
			n.serve(t, service(p, protoTCP, endpoint(p.eth0, 8080, here)))
			// Programs of a cgroup below run first: as if theirs were attached there.
			inner := filepath.Join(ownCgroup(t), "inner")
			must.Do(t, os.Mkdir(inner, 0o755))
			outer := ownCgroup(t)
			join(t, inner)
			t.Cleanup(func() { join(t, outer); must.Do(t, os.Remove(inner)) })
			calls := countCalls(t, inner, asks)
			d := n.dial(t, domainOf(p), n.listen(t, p), ap(p.clusterIP, 80))
			must.Do(t, unix.Shutdown(d.client, unix.SHUT_WR))
			waitEnd(t, d.server)
			d.closeServer()
			waitEnd(t, d.client)
			var states uint64
			must.Do(t, calls.Lookup(uint32(stateCall), &states))
			if asks != (states > 1) || states == 0 {
				t.Errorf("%d calls for changes of state", states)
			}
		})
	}
}

// waitReset waits until a socket has seen an RST.
func waitReset(t *testing.T, fd int) {
	t.Helper()
	if _, err := unix.Read(fd, make([]byte, 1)); !errors.Is(err, unix.ECONNRESET) {
		t.Fatalf("%v: want ECONNRESET", err)
	}
}

// With session affinity, an ejected endpoint loses its clients.
func TestPacketAffinityOfAnEjectedEndpoint(t *testing.T) {
	n := newPacketNode(t)
	n.checksComplete = false // see TestPacketAnswers
	eachFamily(t, n, func(t *testing.T, p *plan) {
		first, second := ap(p.far, 8080), ap(p.far, 8081)
		svc := func(ejected bool) *intent.ServicePort {
			s := watch(service(p, protoTCP, endpoint(p.far, 8080, elsewhere), endpoint(p.far, 8081, elsewhere)))
			s.Affinity = time.Hour
			s.Endpoints[0].Ejected = ejected
			return s
		}
		only := svc(false)
		only.Endpoints = only.Endpoints[:1]
		n.serve(t, only)
		n.open(t, p, 45000) // remembered
		n.serve(t, svc(false))
		for i := range uint16(8) {
			n.newConn(ap(p.client, 45001+i), ap(p.clusterIP, 80), first, inTun0).syn(t)
		}
		n.serve(t, svc(true))
		for i := range uint16(8) {
			n.newConn(ap(p.client, 45101+i), ap(p.clusterIP, 80), second, inTun0).syn(t)
		}
	})
}
