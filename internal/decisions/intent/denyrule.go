package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// SetDenyRulePods sets the addresses of this node's pods that have a deny rule of a
// do-not-track policy, sorted, complete each time. Their packets must traverse netfilter,
// as those of pods that a NetworkPolicy selects.
func (t *Tracker) SetDenyRulePods(addrs []netip.Addr) Changes {
	before := t.store.hasDenyRule
	now := make(map[netip.Addr]struct{}, len(addrs))
	for _, a := range addrs {
		now[a] = struct{}{}
	}
	t.store.hasDenyRule = now
	for _, list := range []map[netip.Addr]struct{}{before, now} {
		for a := range list {
			_, was := before[a]
			_, is := now[a]
			if was == is {
				continue
			}
			for _, s := range t.store.slicesOfAddr[a] {
				t.markDirty(s.service)
			}
		}
	}
	t.setMustTraverse(&t.own.denyRulePods, slices.Clone(addrs))
	return t.recompute()
}

// SetDenyRulesUnknown sets whether any pod may have a deny rule, because the policies
// could not be read.
func (t *Tracker) SetDenyRulesUnknown(unknown bool) Changes {
	t.own.stale = t.own.stale || unknown != t.store.denyRulesUnknown
	t.store.denyRulesUnknown = unknown
	return t.recompute()
}

// AllowedPorts are ports of an address that any client may reach untracked.
type AllowedPorts struct {
	Addr        netip.Addr
	Protocol    model.Protocol
	First, Last uint16
}

// SetAllowsAny sets the ports of this node's pods that a do-not-track policy allows any
// client to reach, complete each time. Service packets to them may bypass netfilter, even
// if a NetworkPolicy selects the pod.
func (t *Tracker) SetAllowsAny(ports []AllowedPorts) Changes {
	before := t.store.allowsAny
	now := map[netip.Addr][]AllowedPorts{}
	for _, p := range ports {
		now[p.Addr] = append(now[p.Addr], p)
	}
	t.store.allowsAny = now
	for _, list := range []map[netip.Addr][]AllowedPorts{before, now} {
		for a := range list {
			if slices.Equal(before[a], now[a]) {
				continue
			}
			for _, s := range t.store.slicesOfAddr[a] {
				t.markDirty(s.service)
			}
		}
	}
	return t.recompute()
}

// anyAllowed reports whether a policy allows any client to reach an endpoint. It is false
// for an address of two Pods: one of them was deleted, and the policy may select that one.
func (st *store) anyAllowed(proto model.Protocol, addr netip.AddrPort) bool {
	return len(st.podsOfAddr[addr.Addr()]) <= 1 && slices.ContainsFunc(st.allowsAny[addr.Addr()], func(p AllowedPorts) bool {
		return p.Protocol == proto && p.First <= addr.Port() && addr.Port() <= p.Last
	})
}
