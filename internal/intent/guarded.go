package intent

import (
	"net/netip"
	"slices"
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
