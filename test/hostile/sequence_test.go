package hostile

import (
	"net/netip"
	"testing"
	"time"
)

var sequenceScenarios = []scenario{
	forgery("An RST with a wrong number, then silence", 13*time.Second, func(f *forger) {
		f.client("R", f.clientNext+1<<30, 0)
	}),
	forgery("An RST of the server with a wrong number, then silence", 13*time.Second, func(f *forger) {
		f.server("R", f.serverNext+1<<30, 0)
	}),
	forgery("RSTs in the window that are not exact, then silence", 13*time.Second, func(f *forger) {
		f.client("R", f.clientNext+100, 0)
		f.server("R", f.serverNext+100, 0)
	}),
	forgery("An RST with a wrong number, then a SYN", 0, func(f *forger) {
		f.client("R", f.clientNext+1<<30, 0)
		f.client("S", 4242, 0)
	}),
	forgery("FINs of both ends with wrong numbers, then a SYN", 0, func(f *forger) {
		f.client("FA", f.clientNext+1<<30, f.serverNext+1<<30)
		f.server("FA", f.serverNext+1<<30, f.clientNext+1<<30)
		f.client("S", 4242, 0)
	}),
	forgery("A SYN in the middle of a connection, then silence", 13*time.Second, func(f *forger) {
		f.client("S", 4242, 0)
	}),
	forgery("Data with a wrong number", 0, func(f *forger) {
		f.clientData(f.clientNext+1<<30, f.serverNext+1<<30, "foreign\n")
		f.clientData(f.clientNext-1<<30, f.serverNext-1<<30, "foreign\n")
	}),
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

// forgery is a scenario: a victim's connection works after forged segments, and
// after a time without any packet.
func forgery(name string, silence time.Duration, attack func(*forger)) scenario {
	run := func(t *testing.T, e *env, v variant) {
		f := e.forger(t, v)
		attack(f)
		time.Sleep(max(silence, 50*time.Millisecond))
		for range 5 {
			if err := f.victim.ask(); err != nil {
				t.Fatal(err)
			}
		}
		if err := e.probe(v, f.dst); err != nil {
			t.Error(err)
		}
	}
	return scenario{name: name, together: true, run: run}
}

// forger opens a victim's connection and learns its numbers, which is more than
// an attacker can do.
func (e *env) forger(t *testing.T, v variant) *forger {
	t.Helper()
	f := &forger{t: t, v: v, outside: e.sender(t, outsider), dst: e.nodePort(t, v.place, "tcp", v), backend: e.backend(v, endpointUp)}
	f.beside = f.outside
	if v.place == "here" {
		f.beside = e.sender(t, "a1")
	}
	watch := e.capture(t, honest, func(p packet) bool { return p.proto == "tcp" && p.src == f.dst })
	f.victim = e.mustConnect(t, v, f.dst)
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
	return f
}
