package policy

import (
	"net/netip"

	"spillway.dev/spillway/internal/model"
)

// fate is what becomes of packets between two ends, whichever of them asked.
type fate uint8

const (
	seen      fate = iota // by conntrack
	untracked             // allowed
	denied
)

// Unseen reports whether conntrack sees no packet between two ends: because a policy
// leaves them untracked, or denies them.
func (t *Tracker) Unseen(proto model.Protocol, a, b netip.AddrPort) bool {
	return t.fate(proto, a, b) != seen
}

// Denies reports whether all packets between two ends are denied.
func (t *Tracker) Denies(proto model.Protocol, a, b netip.AddrPort) bool {
	return t.fate(proto, a, b) == denied
}

// Untracks reports whether a policy leaves what somebody translates untracked, so that
// nobody would translate it any more.
func (t *Tracker) Untracks(c Translated) bool { return t.fate(c.Protocol, c.Src, c.Dst) == untracked }

// Keep has those stay tracked, of those that Untracks, and none but them. Nobody but
// conntrack knows such connections: they run when the reason ends for which a policy did
// not hold, with another --proxy-mode or when a Service goes.
//
// Packets the other way between the same ends stay tracked too: who asks the port itself,
// from the port that he has asked the Service from, must get another port from conntrack,
// or would get answers of the connection that is kept.
func (t *Tracker) Keep(list map[Translated]bool) []Change[Translated, bool] {
	want := map[Translated]bool{}
	for c := range list {
		if t.Untracks(c) {
			want[c], want[c.back()] = true, true
		}
	}
	for c := range want {
		t.kept.set(c, true)
	}
	for c := range t.kept.now {
		if !want[c] {
			t.kept.drop(c)
		}
	}
	return t.kept.changes()
}

func (c Translated) back() Translated { return Translated{c.Protocol, c.Dst, c.Src} }

func (t *Tracker) fate(proto model.Protocol, a, b netip.AddrPort) (f fate) {
	for range 2 {
		f = max(f, t.fateAt(Ingress, a, b.Addr(), proto), t.fateAt(Egress, netip.AddrPortFrom(a.Addr(), b.Port()), b.Addr(), proto))
		a, b = b, a
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
