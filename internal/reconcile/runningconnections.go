package reconcile

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	// trackedRetry is the first interval between checks for connections that must stay
	// tracked: rules of another program may translate for some time.
	trackedRetry = time.Second
	// trackedInterval is the longest interval between checks while such connections exist,
	// so that the agent deletes exceptions of ended connections.
	trackedInterval = time.Minute
	// maxTracked bounds how many pairs stay tracked.
	maxTracked = 65536
	// forgetRetry is the wait before the agent retries to delete entries.
	forgetRetry = 30 * time.Second
)

// runningConnections says what the policies' sync has yet to do about connections that run.
type runningConnections struct {
	affected  bool          // changes that are not written yet may affect them
	forgetAt  time.Time     // when to delete entries of untracked connections; zero: not due
	lookAt    time.Time     // when to look for translated connections; zero: not due
	lookEvery time.Duration // the interval before lookAt
}

// due returns when to look or delete, and whether to.
func (c *runningConnections) due() (time.Time, bool) {
	if c.forgetAt.IsZero() || !c.lookAt.IsZero() && c.lookAt.Before(c.forgetAt) {
		return orNever(c.lookAt)
	}
	return c.forgetAt, true
}

// keepTracked makes translated connections tracked exceptions before the agent writes
// policies that would leave them untracked.
func (ps *doNotTrackSync) keepTracked(ctx context.Context, now time.Time) {
	if ps.entries == nil {
		return
	}
	c := &ps.running
	if c.lookEvery = min(2*c.lookEvery, trackedInterval); c.affected || ps.stage == policiesUnwritten {
		c.lookEvery = trackedRetry
	}
	c.lookAt = now.Add(c.lookEvery)
	pairs, err := ps.translated(ctx, ps.entries)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		ps.log.Warn("Connections that netfilter translates may end: policies leave them untracked", "err", err)
		return
	case len(pairs) == maxTracked:
		ps.log.Warn("Connections that netfilter translates may end: policies leave them untracked, and there are too many", "kept", maxTracked)
	case len(pairs) > 0 && len(ps.tracker.State().Tracked) == 0:
		ps.log.Info("connections that netfilter translates stay tracked until they end, although a policy would leave them untracked", "pairs",
			len(pairs))
	case len(pairs) == 0 && c.lookEvery == trackedInterval:
		c.lookAt = time.Time{}
	}
	ps.pending.Tracked = ps.tracker.SetTracked(pairs)
	ps.changed = ps.changed || len(ps.pending.Tracked) > 0
	if slices.ContainsFunc(ps.pending.Tracked, func(c donottrack.Change[donottrack.Pair, bool]) bool { return !c.Want }) {
		c.forgetAt = now // untranslated connections of the pair were tracked too
	}
}

// translated returns the pairs of translated connections that policies would leave
// untracked. If there are more than maxTracked, it drops pairs that have only UDP first:
// their loss costs less.
func (ps *doNotTrackSync) translated(ctx context.Context, entries StaleEntries) (pairs map[donottrack.Pair]bool, err error) {
	pairs, datagrams := map[donottrack.Pair]bool{}, map[donottrack.Pair]bool{}
	if len(ps.tracker.State().Targets) == 0 {
		return pairs, nil
	}
	err = entries.Translated(ctx, func(p model.Protocol, from, to netip.AddrPort) bool {
		list := pairs
		if p == model.UDP {
			list = datagrams
		}
		found := ps.tracker.Untracks(p, from, to)
		for _, pair := range found {
			if len(list) < maxTracked {
				list[pair] = true
			}
		}
		return len(found) > 0
	})
	for pair := range datagrams {
		if len(pairs) == maxTracked {
			break
		}
		pairs[pair] = true
	}
	return pairs, err
}

// forget deletes conntrack entries of connections that conntrack no longer sees.
func (ps *doNotTrackSync) forget(ctx context.Context, now time.Time) {
	c := &ps.running
	c.forgetAt = time.Time{}
	if ps.entries == nil || len(ps.tracker.State().Targets) == 0 {
		return
	}
	deleted, more, err := ps.entries.Forget(ctx, ps.tracker.NotTracked, ps.tracker.Denies)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		ps.log.Warn("Forget connections that are not tracked any more", "err", err)
		c.forgetAt = now.Add(forgetRetry)
	case more:
		c.forgetAt = now // after other due work
	}
	if deleted > 0 {
		ps.log.Info("conntrack forgets connections that policies leave untracked now", "entries", deleted)
	}
}
