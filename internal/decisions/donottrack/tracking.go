package donottrack

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// packetVerdict is the verdict on packets between two ends, in either direction.
type packetVerdict uint8

const (
	tracked   packetVerdict = iota // by conntrack
	untracked                      // allowed
	denied
)

// NotTracked reports whether conntrack sees no packet between two ends, because a policy
// denies them or leaves them untracked, without a tracked exception.
func (t *Tracker) NotTracked(proto model.Protocol, a, b netip.AddrPort) bool {
	kept := func(p Pair) bool { return t.trackedExceptions.now[p] }
	return t.verdict(proto, a, b) != tracked && !slices.ContainsFunc(t.Untracks(proto, a, b), kept)
}

// Denies reports whether all packets between two ends are denied.
func (t *Tracker) Denies(proto model.Protocol, a, b netip.AddrPort) bool {
	return t.verdict(proto, a, b) == denied
}

// Untracks returns the pairs by which a policy leaves packets between two ends untracked,
// if it does.
func (t *Tracker) Untracks(proto model.Protocol, a, b netip.AddrPort) (pairs []Pair) {
	if t.verdict(proto, a, b) != untracked {
		return nil
	}
	for _, q := range questions(a, b) {
		if t.verdictAt(q.side, q.local, q.peer, proto) == untracked {
			pairs = append(pairs, Pair{q.local.Addr(), q.peer, proto, q.local.Port()})
		}
	}
	return pairs
}

// SetTracked replaces the tracked exceptions: the pairs whose traffic stays tracked. They
// are the pairs of translated connections, which only conntrack can continue. Such
// connections run when the reason ends for which a policy did not hold, for example with
// another --proxy-mode or after a Service was deleted.
//
// A pair covers all connections of the peer to the port. If the peer connects to the port
// itself from the source port of its connection to the Service, conntrack assigns another
// source port.
func (t *Tracker) SetTracked(pairs map[Pair]bool) []Change[Pair, bool] {
	for p := range pairs {
		t.trackedExceptions.set(p, true)
	}
	for p := range t.trackedExceptions.now {
		if !pairs[p] {
			t.trackedExceptions.remove(p)
		}
	}
	return t.trackedExceptions.changes()
}

// question asks for the verdict of one side: at a local address and a port of the target,
// towards a peer.
type question struct {
	side  Side
	local netip.AddrPort
	peer  netip.Addr
}

func questions(a, b netip.AddrPort) [4]question {
	return [4]question{
		{Ingress, a, b.Addr()}, {Egress, netip.AddrPortFrom(a.Addr(), b.Port()), b.Addr()},
		{Ingress, b, a.Addr()}, {Egress, netip.AddrPortFrom(b.Addr(), a.Port()), a.Addr()},
	}
}

func (t *Tracker) verdict(proto model.Protocol, a, b netip.AddrPort) (f packetVerdict) {
	for _, q := range questions(a, b) {
		f = max(f, t.verdictAt(q.side, q.local, q.peer, proto))
	}
	return f
}

// verdictAt returns the verdict of one side at a local address and port, towards a peer.
func (t *Tracker) verdictAt(side Side, local netip.AddrPort, peer netip.Addr, proto model.Protocol) packetVerdict {
	for _, target := range t.targetsOf[local.Addr()] {
		if target.Side != side || target.Protocol != proto || local.Port() < target.First || target.Last < local.Port() {
			continue
		}
		v := t.verdicts.now[t.targets.now[target]]
		for _, name := range v.Rules {
			switch covers := t.installed[name].covers(peer); {
			case covers && v.Track:
				return tracked
			case covers:
				return untracked
			}
		}
		if v.Deny && !t.isOwn(peer) {
			return denied
		}
	}
	return tracked
}
