package hostile

import (
	"net/netip"
	"testing"
)

var takeoverScenarios = []scenario{
	{name: "Takeover of a connection by its SNAT port", run: takeover},
}

// halfOpen is how many SYNs exhaust the SNAT ports of an endpoint: a port is
// drawn at random, so the last ones take many draws.
const halfOpen = 8 * snatPorts

// takeover: the attacker exhausts the SNAT ports of the endpoint, ends the
// victim's flow with an RST, and hopes that one of its own SYNs gets the port
// of the victim, whose connection still exists at the endpoint.
func takeover(t *testing.T, e *env, v variant) {
	dst := e.nodePort(t, v.place, "tcp", v)
	victim := e.mustConnect(t, v, dst)
	attacker := e.sender(t, outsider)
	attacker.flood(t, halfOpen, func(i int) packet {
		return packet{src: stranger(v, i), dst: dst, proto: "tcp", flags: "S", seq: attackerISN + uint32(i)}
	})
	foreign := e.capture(t, outsider, func(p packet) bool {
		return p.proto == "tcp" && p.src == dst && !answersAttacker(p)
	})
	attacker.send(t, packet{src: victim.local(), dst: dst, proto: "tcp", flags: "R", seq: 12345})
	own := e.addr(outsider, v)
	for port := range uint16(140) {
		attacker.send(t, packet{src: netip.AddrPortFrom(own, 20000+port), dst: dst, proto: "tcp", flags: "S", seq: attackerISN})
	}
	for _, p := range foreign.settled() {
		t.Fatalf("the attacker received a packet of a connection that is not its own: flags %s, seq %d, ack %d", p.flags, p.seq, p.ack)
	}
	if err := victim.ask(); err != nil {
		t.Error(err)
	}
	if err := e.probe(v, dst); err != nil {
		t.Error(err)
	}
}

// attackerISN begins the sequence numbers of an attacker's SYNs, also of SYNs
// from forged sources. It sends fewer than attackerISNs SYNs.
const (
	attackerISN  = 77_000_000
	attackerISNs = 1 << 20
)

// answersAttacker tells whether a packet belongs to a connection that the
// attacker has asked for: it acknowledges one of its SYNs. An endpoint may answer
// for a forged SYN whose port another one has by now.
func answersAttacker(p packet) bool {
	return p.ack-attackerISN-1 < attackerISNs || p.flags == "R"
}
