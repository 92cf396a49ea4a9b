package flowlog

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

const (
	// ownersMax is the maximum number of addresses whose owners are cached.
	ownersMax = 8192
	// ownerFresh is how long an answer is used. A Pod's address may get another Pod.
	ownerFresh = 10 * time.Second
	// ownersWait is how long a batch of events waits for the names of its addresses.
	ownersWait = 100 * time.Millisecond
	// ownersPause is the time without questions after one that got no answer.
	ownersPause = time.Second
)

// owners caches what has an address. An owner that is deleted is still named until another
// one has its address.
type owners struct {
	ask func(context.Context, []netip.Addr) ([]Owner, error)

	mu     *sync.Mutex
	known  map[netip.Addr]cachedOwner
	paused time.Time
}

type cachedOwner struct {
	Owner
	at time.Time
}

func newOwners(ask func(context.Context, []netip.Addr) ([]Owner, error)) owners {
	return owners{ask: ask, mu: &sync.Mutex{}, known: map[netip.Addr]cachedOwner{}}
}

// of returns the owners of addresses. It asks for those that the cache does not have. Without
// an answer, older ones remain.
func (o *owners) of(addrs []netip.Addr) []Owner {
	out := make([]Owner, len(addrs))
	if o.ask == nil {
		return out
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.learn(addrs)
	for i, a := range addrs {
		out[i] = o.known[a].Owner
	}
	return out
}

// learn asks for the owners that the cache does not have. The caller holds mu.
func (o *owners) learn(addrs []netip.Addr) {
	now := time.Now()
	if now.Before(o.paused) {
		return
	}
	var unknown []netip.Addr
	seen := map[netip.Addr]bool{}
	for _, a := range addrs {
		if a.IsValid() && !seen[a] && now.Sub(o.known[a].at) > ownerFresh {
			seen[a], unknown = true, append(unknown, a)
		}
	}
	if len(unknown) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), ownersWait)
	defer cancel()
	found, err := o.ask(ctx, unknown)
	if err != nil || len(found) != len(unknown) {
		o.paused = now.Add(ownersPause)
		return
	}
	for i, a := range unknown {
		o.put(a, found[i], now)
	}
}

// put stores an answer. An answer without an owner does not replace one with an owner, but
// counts as an answer.
func (o *owners) put(a netip.Addr, owner Owner, now time.Time) {
	last, cached := o.known[a]
	if owner == (Owner{}) {
		owner = last.Owner
	}
	if !cached && len(o.known) >= ownersMax {
		o.evict(now)
	}
	o.known[a] = cachedOwner{owner, now}
}

// evict makes room: it removes old answers, or all if there are none.
func (o *owners) evict(now time.Time) {
	for a, owner := range o.known {
		if now.Sub(owner.at) > ownerFresh {
			delete(o.known, a)
		}
	}
	if len(o.known) >= ownersMax {
		clear(o.known)
	}
}
