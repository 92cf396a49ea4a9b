package hostile

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"spillway.dev/spillway/test/flows"
)

// forgeries are attacks on one connection. Each must leave it working.
var forgeries = []forgery{
	{"An RST with a wrong number, then silence", 13 * time.Second, func(f *forger) {
		f.client("R", f.clientNext+1<<30, 0)
	}},
	{"An RST of the server with a wrong number, then silence", 13 * time.Second, func(f *forger) {
		f.server("R", f.serverNext+1<<30, 0)
	}},
	{"RSTs in the window that are not exact, then silence", 13 * time.Second, func(f *forger) {
		f.client("R", f.clientNext+1000, 0)
		f.server("R", f.serverNext+1000, 0)
	}},
	{"An RST with a wrong number, then a SYN", 0, func(f *forger) {
		f.client("R", f.clientNext+1<<30, 0)
		f.client("S", 4242, 0)
	}},
	{"FINs of both ends with wrong numbers, then a SYN", 0, func(f *forger) {
		f.client("FA", f.clientNext+1<<30, f.serverNext+1<<30)
		f.server("FA", f.serverNext+1<<30, f.clientNext+1<<30)
		f.client("S", 4242, 0)
	}},
	{"A FIN, an RST and a SYN with wrong numbers", 0, func(f *forger) {
		f.client("FA", f.clientNext+1<<30, f.serverNext+1<<30)
		f.client("R", f.clientNext+1<<30, 0)
		f.client("S", 4242, 0)
	}},
	{"A SYN in the middle of a connection, then silence", 13 * time.Second, func(f *forger) {
		f.client("S", 4242, 0)
	}},
	{"Segments of the client with random numbers", 0, func(f *forger) {
		r := rand.New(rand.NewPCG(uint64(f.clientNext), 0)) // as the victim chose its first number
		for range 40 {
			f.client(someFlags[r.IntN(len(someFlags))], r.Uint32(), r.Uint32())
		}
	}},
	{"Segments of the server with random numbers", 0, func(f *forger) {
		r := rand.New(rand.NewPCG(uint64(f.serverNext), 0)) // as the server chose its first number
		f.server("S", 4242, 0)
		for range 40 {
			f.server(someFlags[r.IntN(len(someFlags))], r.Uint32(), r.Uint32())
		}
	}},
	{"Data with a wrong number", 0, func(f *forger) {
		f.clientData(f.clientNext+1<<30, f.serverNext+1<<30, "foreign\n")
		f.clientData(f.clientNext-1<<30, f.serverNext-1<<30, "foreign\n")
	}},
}

// someFlags are combinations of TCP flags, some of which no host sends.
var someFlags = []string{"S", "SA", "A", "PA", "R", "RA", "F", "FA", "SR", "SF", ""}

// forgery is an attack on a connection by forged segments.
type forgery struct {
	name    string
	silence time.Duration // after it, without any packet
	attack  func(*forger)
}

// play attacks the victim of a forger, whose connection must work afterwards.
func (a forgery) play(t *testing.T, f *forger) {
	t.Helper()
	a.attack(f)
	time.Sleep(max(a.silence, 50*time.Millisecond))
	f.wantWorking(t)
}

// sequenceScenarios are the forgeries, each as a scenario.
var sequenceScenarios = func() (list []scenario) {
	for _, a := range forgeries {
		list = append(list, scenario{name: a.name, together: true, run: func(t *testing.T, e *env, v variant) {
			a.play(t, e.forger(t, v))
		}})
	}
	list = append(list, scenario{name: "RSTs in the window whose challenge the endpoints skip, then silence", together: true,
		unless: func(mode string, _ variant) bool { return mode != "ebpf" }, run: unchallenged})
	return append(list, scenario{name: "A reply that netfilter does not translate", together: true, places: []string{"here"},
		unless: func(mode string, _ variant) bool { return mode == "ebpf" }, run: untranslated})
}()

// challengeInterval is longer than the time after a challenge ACK in which a socket sends no
// other (net.ipv4.tcp_invalid_ratelimit). An answer to a keepalive counts as a challenge ACK.
const challengeInterval = 600 * time.Millisecond

// unchallenged: conntrack shortens the timeout of an entry to 10 s when it sees an RST in the
// window (net/netfilter/nf_conntrack_proto_tcp.c), and the endpoint's challenge ACK restores
// it. A second RST gets no challenge ACK.
func unchallenged(t *testing.T, e *env, v variant) {
	f := e.forger(t, v)
	for range 2 {
		f.client("R", f.clientNext+1000, 0)
		f.server("R", f.serverNext+1000, 0)
		time.Sleep(challengeInterval / 6) // the challenge ACK of the first has arrived
	}
	time.Sleep(13 * time.Second)
	f.wantWorking(t)
}

// untranslated: netfilter does not translate an endpoint's reply outside the window, so the
// client gets it from the endpoint's address and answers with an RST, which must not end the
// connection (kubernetes/kubernetes#74839).
func untranslated(t *testing.T, e *env, v variant) {
	dst, client := e.target(t, flows.ClusterIP.Of(v.place), "tcp", v), "a1"
	watch := e.capture(t, client, func(p packet) bool { return p.proto == "tcp" && p.src == dst })
	victim, err := e.connect(client, v, dst)
	if err != nil {
		t.Fatal(err)
	}
	defer victim.Close()
	var last packet
	for _, p := range watch.settled() {
		last = p
	}
	reply := packet{src: e.backend(v, endpointUp), dst: victim.seenAs(), proto: "tcp", flags: "A", seq: last.seq + 1<<30, ack: last.ack}
	seen := e.capture(t, client, func(p packet) bool { return p.src == reply.src && p.seq == reply.seq })
	e.sender(t, v.endpoint()).send(t, reply)
	if len(seen.settled()) == 0 {
		t.Log("the reply was dropped or translated") // as kube-proxy does
	}
	if err := victim.ask(); err != nil {
		t.Error(err)
	}
}

// wantWorking asks through the victim's connection, and through a new one.
func (f *forger) wantWorking(t *testing.T) {
	t.Helper()
	for range 5 {
		if err := f.victim.ask(); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.again(); err != nil {
		t.Error(err)
	}
}

// forger sends segments that claim to be of a victim's connection.
type forger struct {
	t          *testing.T
	v          variant
	outside    *sender
	beside     *sender        // where the endpoint's packets come from
	dst        netip.AddrPort // the NodePort
	backend    netip.AddrPort
	victim     *connection
	clientNext uint32 // the next sequence number of the client
	serverNext uint32
	again      func() error // a new connection as the victim's
}

// client forges a segment of the client.
func (f *forger) client(flags string, seq, ack uint32) {
	f.outside.send(f.t, packet{src: f.victim.local(), dst: f.dst, proto: "tcp", flags: flags, seq: seq, ack: ack})
}

func (f *forger) clientData(seq, ack uint32, data string) {
	f.outside.send(f.t, packet{src: f.victim.local(), dst: f.dst, proto: "tcp", flags: "PA", seq: seq, ack: ack, payload: []byte(data)})
}

// server forges a segment of the endpoint.
func (f *forger) server(flags string, seq, ack uint32) {
	f.beside.send(f.t, packet{src: f.backend, dst: f.victim.seenAs(), proto: "tcp", flags: flags, seq: seq, ack: ack})
}

// forger opens a victim's connection and learns its numbers, which is more than
// an attacker can do.
func (e *env) forger(t *testing.T, v variant) *forger {
	t.Helper()
	f := &forger{t: t, v: v, outside: e.sender(t, outsider), dst: e.nodePort(t, v.place, "tcp", v), backend: e.backend(v, endpointUp)}
	f.beside, f.again = f.outside, func() error { return e.probe(v, f.dst) }
	if v.place == "here" {
		f.beside = e.sender(t, "a1")
	}
	watch := e.capture(t, honest, func(p packet) bool { return p.proto == "tcp" && p.src == f.dst })
	f.victim = e.mustConnect(t, v, f.dst)
	f.learn(t, watch)
	return f
}

// learn learns the numbers of the victim's connection from packets to it.
func (f *forger) learn(t *testing.T, watch *capture) {
	t.Helper()
	for range 3 {
		if err := f.victim.ask(); err != nil {
			t.Fatal(err)
		}
	}
	for _, p := range watch.settled() {
		if p.dst == f.victim.local() {
			f.clientNext, f.serverNext = p.ack, p.seq+uint32(len(p.payload))
		}
	}
	if f.clientNext == 0 {
		t.Fatal("no packet of the victim's connection was seen")
	}
}
