package reconcile

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/policy"
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
)

// keepTracked makes translated connections tracked exceptions before the agent writes
// policies that would leave them untracked.
func (r *Reconciler) keepTracked(ctx context.Context, now time.Time) {
	ps := r.policies
	entries := r.cfg.StaleEntries
	if entries == nil {
		return
	}
	if ps.checkTrackedEvery = min(2*ps.checkTrackedEvery, trackedInterval); ps.mayAffectRunning || !ps.written {
		ps.checkTrackedEvery = trackedRetry
	}
	ps.checkTrackedAt = now.Add(ps.checkTrackedEvery)
	run, err := ps.translated(ctx, entries)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		r.log.Warn("Connections that somebody translates may end: policies leave them untracked", "err", err)
		return
	case len(run) == maxTracked:
		r.log.Warn("Connections that somebody translates may end: policies leave them untracked, and there are too many", "kept", maxTracked)
	case len(run) > 0 && len(ps.tracker.State().Tracked) == 0:
		r.log.Info("connections that somebody translates stay tracked until they end, although a policy would leave them untracked", "pairs", len(run))
	case len(run) == 0 && ps.checkTrackedEvery == trackedInterval:
		ps.checkTrackedAt = time.Time{}
	}
	ps.pending.Tracked = ps.tracker.SetTracked(run)
	if slices.ContainsFunc(ps.pending.Tracked, func(c policy.Change[policy.Pair, bool]) bool { return !c.Want }) {
		ps.forgetAt = now // untranslated connections of the pair were tracked too
	}
}

// translated returns the pairs of translated connections that policies would leave
// untracked. If there are more than maxTracked, it drops pairs that have only UDP first:
// their loss costs less.
func (ps *policySync) translated(ctx context.Context, entries StaleEntries) (run map[policy.Pair]bool, err error) {
	run, datagrams := map[policy.Pair]bool{}, map[policy.Pair]bool{}
	if len(ps.tracker.State().Targets) == 0 {
		return run, nil
	}
	err = entries.Translated(ctx, func(p model.Protocol, from, to netip.AddrPort) bool {
		list := run
		if p == model.UDP {
			list = datagrams
		}
		pairs := ps.tracker.Untracks(p, from, to)
		for _, pair := range pairs {
			if len(list) < maxTracked {
				list[pair] = true
			}
		}
		return len(pairs) > 0
	})
	for pair := range datagrams {
		if len(run) == maxTracked {
			break
		}
		run[pair] = true
	}
	return run, err
}
