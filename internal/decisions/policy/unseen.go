package policy

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// fate is what becomes of packets between two ends, whichever of them asked.
type fate uint8

const (
	seen      fate = iota // by conntrack
	untracked             // allowed
	denied
)

// Unseen reports whether conntrack sees no packet between two ends: because a policy
// leaves them untracked, and they are not kept, or denies them.
func (t *Tracker) Unseen(proto model.Protocol, a, b netip.AddrPort) bool {
	kept := func(p Pair) bool { return t.kept.now[p] }
	return t.fate(proto, a, b) != seen && !slices.ContainsFunc(t.Untracks(proto, a, b), kept)
}

// Denies reports whether all packets between two ends are denied.
func (t *Tracker) Denies(proto model.Protocol, a, b netip.AddrPort) bool {
	return t.fate(proto, a, b) == denied
}

// Untracks returns by which pairs a policy leaves packets between two ends untracked:
// none if it does not.
func (t *Tracker) Untracks(proto model.Protocol, a, b netip.AddrPort) (pairs []Pair) {
	if t.fate(proto, a, b) != untracked {
		return nil
	}
	for _, q := range questions(a, b) {
		if t.fateAt(q.side, q.here, q.peer, proto) == untracked {
			pairs = append(pairs, Pair{q.here.Addr(), q.peer, proto, q.here.Port()})
		}
	}
	return pairs
}

// Keep has what goes between these pairs stay tracked, and nothing else. They are those of
// connections that somebody translates, whom only conntrack knows: these run when the
// reason ends for which a policy did not hold, with another --proxy-mode or when a
// Service goes.
//
// All that the peer asks of the port is meant: where he asks the port itself from the
// port that he has asked the Service from, conntrack gives him another one.
func (t *Tracker) Keep(pairs map[Pair]bool) []Change[Pair, bool] {
	for p := range pairs {
		t.kept.set(p, true)
	}
	for p := range t.kept.now {
		if !pairs[p] {
			t.kept.drop(p)
		}
	}
	return t.kept.changes()
}

// question is what a policy is asked about packets between two ends: of which side the
// address here is, at which port of the target's.
type question struct {
	side Side
	here netip.AddrPort
	peer netip.Addr
}

func questions(a, b netip.AddrPort) [4]question {
	return [4]question{
		{Ingress, a, b.Addr()}, {Egress, netip.AddrPortFrom(a.Addr(), b.Port()), b.Addr()},
		{Ingress, b, a.Addr()}, {Egress, netip.AddrPortFrom(b.Addr(), a.Port()), a.Addr()},
	}
}

func (t *Tracker) fate(proto model.Protocol, a, b netip.AddrPort) (f fate) {
	for _, q := range questions(a, b) {
		f = max(f, t.fateAt(q.side, q.here, q.peer, proto))
	}
	return f
}

// fateAt asks of one side: what holds for an address here, at a port, towards a peer.
func (t *Tracker) fateAt(side Side, here netip.AddrPort, peer netip.Addr, proto model.Protocol) fate {
	for _, target := range t.targetsOf[here.Addr()] {
		if target.Side != side || target.Protocol != proto || here.Port() < target.First || target.Last < here.Port() {
			continue
		}
		v := t.verdicts.now[t.targets.now[target]]
		for _, name := range v.Rules {
			switch covers := t.holding[name].covers(peer); {
			case covers && v.Track:
				return seen
			case covers:
				return untracked
			}
		}
		if v.Deny && !t.isOwn(peer) {
			return denied
		}
	}
	return seen
}
