package policy

import (
	"net/netip"

	"spillway.dev/spillway/internal/model"
)

// Unseen reports whether conntrack sees no packet between two ends, whichever of them
// asked: because a policy leaves them untracked, or denies them.
func (t *Tracker) Unseen(proto model.Protocol, a, b netip.AddrPort) bool {
	for range 2 {
		if t.unseenAt(Ingress, a, b.Addr(), proto) || t.unseenAt(Egress, netip.AddrPortFrom(a.Addr(), b.Port()), b.Addr(), proto) {
			return true
		}
		a, b = b, a
	}
	return false
}

// unseenAt asks of one side: what holds for an address here, at a port, towards a peer.
func (t *Tracker) unseenAt(side Side, here netip.AddrPort, peer netip.Addr, proto model.Protocol) bool {
	for _, target := range t.targetsOf[here.Addr()] {
		if target.Side != side || target.Protocol != proto || here.Port() < target.First || target.Last < here.Port() {
			continue
		}
		v := t.verdicts.now[t.targets.now[target]]
		for _, name := range v.Rules {
			if t.holding[name].covers(peer) {
				return !v.Track
			}
		}
		return v.Deny && !t.isOwn(peer)
	}
	return false
}
