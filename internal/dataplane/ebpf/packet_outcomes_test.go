package ebpf

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
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
	n := newSocketNode(t, func(c *Config) { c.FlowEvents, c.OutlierEjection = EventsOff, true })
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
