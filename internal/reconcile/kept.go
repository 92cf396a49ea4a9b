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
	// keepSoon is when to look again for connections that must stay tracked: rules of
	// somebody else's may translate for some time yet.
	keepSoon = time.Second
	// keepLast is how often to look while there are any, so that they go when they end.
	keepLast = time.Minute
	// mostKept bounds how many pairs stay tracked.
	mostKept = 65536
)

// keepTranslated has the connections that somebody translates stay tracked, before
// policies are written of which they would know nothing.
func (r *Reconciler) keepTranslated(ctx context.Context, now time.Time) {
	l := r.policies
	entries, can := r.cfg.StaleEntries.(UntrackedEntries)
	if !can {
		return
	}
	if l.keepNext = min(2*l.keepNext, keepLast); l.running || !l.written {
		l.keepNext = keepSoon
	}
	l.keepAt = now.Add(l.keepNext)
	run, err := l.translated(ctx, entries)
	switch {
	case ctx.Err() != nil:
		return
	case err != nil:
		r.log.Warn("Connections that somebody translates may end: policies leave them untracked", "err", err)
		return
	case len(run) == mostKept:
		r.log.Warn("Connections that somebody translates may end: policies leave them untracked, and there are too many", "kept", mostKept)
	case len(run) > 0 && len(l.tracker.State().Kept) == 0:
		r.log.Info("connections that somebody translates stay tracked until they end, although a policy would leave them untracked", "pairs", len(run))
	case len(run) == 0 && l.keepNext == keepLast:
		l.keepAt = time.Time{}
	}
	l.pending.Kept = l.tracker.Keep(run)
	if slices.ContainsFunc(l.pending.Kept, func(c policy.Change[policy.Pair, bool]) bool { return !c.Want }) {
		l.forgetAt = now // what was not translated there was tracked too
	}
}

// translated are the pairs between which somebody translates connections that policies
// would leave untracked. Where there are too many, those that have UDP alone are left out
// first: they make less of what is lost.
func (l *policyLane) translated(ctx context.Context, entries UntrackedEntries) (run map[policy.Pair]bool, err error) {
	run, datagrams := map[policy.Pair]bool{}, map[policy.Pair]bool{}
	if len(l.tracker.State().Targets) == 0 {
		return run, nil
	}
	err = entries.Translated(ctx, func(p model.Protocol, from, to netip.AddrPort) bool {
		list := run
		if p == model.UDP {
			list = datagrams
		}
		pairs := l.tracker.Untracks(p, from, to)
		for _, pair := range pairs {
			if len(list) < mostKept {
				list[pair] = true
			}
		}
		return len(pairs) > 0
	})
	for pair := range datagrams {
		if len(run) == mostKept {
			break
		}
		run[pair] = true
	}
	return run, err
}
