package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// SetGuarded tells the addresses of pods here of which a do-not-track policy denies
// something, sorted, all of them each time: their packets must pass by whoever
// denies, as those of pods that a NetworkPolicy selects.
func (t *Tracker) SetGuarded(addrs []netip.Addr) Changes {
	before := t.world.guarded
	now := make(map[netip.Addr]struct{}, len(addrs))
	for _, a := range addrs {
		now[a] = struct{}{}
	}
	t.world.guarded = now
	for _, list := range []map[netip.Addr]struct{}{before, now} {
		for a := range list {
			_, was := before[a]
			_, is := now[a]
			if was == is {
				continue
			}
			for _, s := range t.world.slicesOfAddr[a] {
				t.touch(s.service)
			}
		}
	}
	t.setPoliced(&t.own.guarded, slices.Clone(addrs))
	return t.settle()
}

// SetGuardsUnknown tells whether it is not known which pods are guarded, so that any may
// be.
func (t *Tracker) SetGuardsUnknown(unknown bool) Changes {
	t.own.stale = t.own.stale || unknown != t.world.guardsUnknown
	t.world.guardsUnknown = unknown
	return t.settle()
}

// OpenPorts are ports of an address that anybody may reach without tracking.
type OpenPorts struct {
	Addr        netip.Addr
	Protocol    model.Protocol
	First, Last uint16
}

// SetOpened tells the ports of pods here that a do-not-track policy opens to anybody,
// all of them each time: Service packets to there need not pass by netfilter, even if
// a NetworkPolicy selects the pod.
func (t *Tracker) SetOpened(ports []OpenPorts) Changes {
	before := t.world.opened
	now := map[netip.Addr][]OpenPorts{}
	for _, p := range ports {
		now[p.Addr] = append(now[p.Addr], p)
	}
	t.world.opened = now
	for _, list := range []map[netip.Addr][]OpenPorts{before, now} {
		for a := range list {
			if slices.Equal(before[a], now[a]) {
				continue
			}
			for _, s := range t.world.slicesOfAddr[a] {
				t.touch(s.service)
			}
		}
	}
	return t.settle()
}

// open reports whether a policy opens an endpoint to anybody. An address that two
// Pods have is never open: one of them is gone, and the policy may select that one.
func (w *world) open(proto model.Protocol, addr netip.AddrPort) bool {
	return len(w.podsOfAddr[addr.Addr()]) <= 1 && slices.ContainsFunc(w.opened[addr.Addr()], func(p OpenPorts) bool {
		return p.Protocol == proto && p.First <= addr.Port() && addr.Port() <= p.Last
	})
}
