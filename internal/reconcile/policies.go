package reconcile

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// Guard is a Tracker that can be told which pods must not pass by netfilter, and
// which of their ports may, whoever asks.
type Guard interface {
	SetGuarded([]netip.Addr) intent.Changes
	SetGuardsUnknown(bool) intent.Changes
	SetOpened([]intent.OpenPorts) intent.Changes
}

// UntrackedEntries is a StaleEntries that can also take away what conntrack remembers of
// connections that it sees no more, and so never sees end.
type UntrackedEntries interface {
	// Forget deletes the entries of which unseen says so by their two ends, and of those
	// that somebody translates the ones of which denied says so by who answers whom. It
	// returns how many it deleted, and whether there may be more.
	Forget(ctx context.Context, unseen, denied func(p model.Protocol, from, to netip.AddrPort) bool) (deleted int, more bool, err error)

	// Translated gives both directions of each connection that somebody translates, as
	// its packets come; one may come twice. Of those of which keeps says so it deletes
	// the entries of what has ended.
	Translated(ctx context.Context, keeps func(p model.Protocol, from, to netip.AddrPort) bool) error
}

// policyLane writes do-not-track policies. It stands beside the lanes of Services:
// what fails here holds up none of them.
type policyLane struct {
	tracker *policy.Tracker
	table   dataplane.Policies
	bypass  dataplane.Bypass // nil: there is none
	full    bool             // the whole state is to be written
	pending policy.Changes   // of one turn
	err     error
	tries   int
	retryAt time.Time

	told bool // OnPolicies knows how things stand

	// unread is what could not be read; see model.Delta. Until something was written,
	// that may be what the kernel holds.
	unread  model.Unread
	written bool
	lacks   bool // what was written first, without what could not be read

	running  bool      // what is to be written may be about connections that run
	forgetAt time.Time // when to look for entries of what is not tracked any more; zero: not
	keepAt   time.Time // when to look for what must stay tracked; zero: not
	keepNext time.Duration

	drifted  atomic.Bool
	repairAt time.Time
}

// planPolicies has the whole state written again at a resync, and soon after
// somebody else changed the table.
func (r *Reconciler) planPolicies(now time.Time, resync bool) {
	l := r.policies
	if l == nil {
		return
	}
	if l.drifted.Swap(false) && l.repairAt.IsZero() {
		l.repairAt = now.Add(driftQuiet)
	}
	if due := !l.repairAt.IsZero() && !now.Before(l.repairAt); due || resync {
		l.repairAt, l.full = time.Time{}, true
	}
}

// takePolicies notes what is to be written, and tells who else has to know.
func (r *Reconciler) takePolicies(c policy.Changes) {
	l := r.policies
	if !c.Empty() {
		l.full = l.full || !l.pending.Empty() // two changes of one turn: rare, and not added up
		l.pending = c
		l.running = l.running || c.Running
	}
	g, guards := r.cfg.Tracker.(Guard)
	if c.Guarded != nil && guards {
		r.absorb(g.SetGuarded(c.Guarded))
	}
	if c.Opened != nil && guards {
		ports := make([]intent.OpenPorts, 0, len(c.Opened))
		for _, t := range c.Opened {
			ports = append(ports, intent.OpenPorts{Addr: t.Addr, Protocol: t.Protocol, First: t.First, Last: t.Last})
		}
		r.absorb(g.SetOpened(ports))
	}
	if c.Refusals != nil {
		ps, reasons := make([]model.Problem, 0, len(c.Refusals)), map[string]int{}
		for _, ref := range c.Refusals {
			ps = append(ps, ref.Problem())
			reasons[ref.Reason]++
		}
		r.metrics.SetRefused(reasons)
		r.problems.set(fromPolicies, ps)
		l.told = false
	}
}

// takeUnread notes what could not be read. What an earlier agent denied may be in it,
// and nothing may pass by that until more is known.
func (r *Reconciler) takeUnread(d *model.Delta) {
	l := r.policies
	switch {
	case d.Unread != nil:
		l.unread = *d.Unread
	case d.Full:
		l.unread = model.Unread{}
	default:
		return
	}
	l.lacks = l.lacks && l.unread.Any()
	r.problems.set(fromPolicyLane, l.problem())
	if !l.written {
		l.full, l.retryAt = true, time.Time{} // it may have been mended
		r.setGuardsUnknown(l.unread.Any())
	}
}

func (r *Reconciler) setGuardsUnknown(unknown bool) {
	if g, guards := r.cfg.Tracker.(Guard); guards {
		r.absorb(g.SetGuardsUnknown(unknown))
	}
}

// leave reports, as an error, that what the kernel holds is left alone: what could not
// be read may be some of it. A kernel that holds nothing gets what is known.
func (l *policyLane) leave(ctx context.Context) error {
	if l.written || !l.unread.Any() {
		return nil
	}
	holds, err := l.table.Holds(ctx)
	if err == nil && holds {
		err = fmt.Errorf("the kernel holds what an earlier agent wrote, and %s cannot be read, which may be some of it", l.unread.Text)
	}
	if err != nil {
		return fmt.Errorf("write policies: %w", err)
	}
	return nil
}

// due says when there is something to write, and whether at all.
func (l *policyLane) due() (time.Time, bool) {
	if l == nil {
		return time.Time{}, false
	}
	if l.full || !l.pending.Empty() {
		return l.retryAt, true
	}
	at, any := time.Time{}, false
	for _, due := range []time.Time{l.repairAt, l.forgetAt, l.keepAt} {
		if !due.IsZero() && (!any || due.Before(at)) {
			at, any = due, true
		}
	}
	return at, any
}

// syncPolicies writes what is due.
func (r *Reconciler) syncPolicies(ctx context.Context, now time.Time) {
	l := r.policies
	if l == nil || now.Before(l.retryAt) {
		return
	}
	if l.running || !l.written || !l.keepAt.IsZero() && !now.Before(l.keepAt) {
		r.keepTranslated(ctx, now)
	}
	if l.full || !l.pending.Empty() {
		r.writePolicies(ctx)
	}
	if !l.forgetAt.IsZero() && !now.Before(l.forgetAt) && l.err == nil {
		r.forgetUntracked(ctx, now)
	}
	if !l.told && r.cfg.OnPolicies != nil && ctx.Err() == nil {
		l.told = true
		r.cfg.OnPolicies(l.tracker.Refusals(), l.err)
	}
}

// releasePolicies has policies hold where netfilter has ceased to translate: after
// Services are written, as what a new Service is in the way of comes before.
func (r *Reconciler) releasePolicies(ctx context.Context, now time.Time) {
	l := r.policies
	if l == nil || ctx.Err() != nil {
		return
	}
	switch {
	case r.lanesWritten():
		r.takePolicies(l.tracker.ServicesWritten())
	case slices.ContainsFunc(r.lanes, func(l *lane) bool { return l.err != nil }):
		r.takePolicies(l.tracker.Tell()) // it may take long
	}
	r.syncPolicies(ctx, now)
}

func (r *Reconciler) writePolicies(ctx context.Context) {
	l, before := r.policies, r.policies.err
	start := time.Now()
	l.err = l.write(ctx)
	if ctx.Err() != nil {
		return
	}
	l.pending = policy.Changes{}
	if l.err != nil {
		l.full = true
		l.retryAt = time.Now().Add(backoff(l.tries))
		l.tries++
		if !l.written && l.unread.Any() {
			r.metrics.SetPoliciesHeld(len(l.tracker.Policies()))
		}
	} else {
		whole := l.full
		if !l.written || l.running {
			l.running, l.forgetAt = false, start
		}
		l.full, l.tries, l.retryAt = false, 0, time.Time{}
		if !l.written && l.unread.Any() {
			r.setGuardsUnknown(false)
			l.lacks = !l.unread.OnlyPolicies()
		}
		l.written = true
		state := l.tracker.State()
		r.metrics.SetPolicies(len(l.tracker.Policies()), len(state.Targets), len(state.Kept))
		r.log.Debug("policies written", "whole", whole, "took", time.Since(start))
	}
	r.problems.set(fromPolicyLane, l.problem())
	l.told = l.told && (before == nil) == (l.err == nil)
	if rep := l.table.Repaired(); rep.Any() {
		r.metrics.AuditDifferences("policies", rep.Missing+rep.Foreign)
		r.log.Warn("somebody else had changed what was written; it is restored", "dataplane", "policies",
			"missing", rep.Missing, "foreign", rep.Foreign, "found", rep.Found)
	}
}

// write has nothing pass by the table that it is about to deny, and what it allows
// only when it does.
func (l *policyLane) write(ctx context.Context) error {
	if err := l.leave(ctx); err != nil {
		return err
	}
	state, changes := l.tracker.State(), &l.pending
	if l.full {
		changes = nil
	}
	if l.bypass != nil {
		if err := l.bypass.Narrow(state, changes); err != nil {
			return err
		}
	}
	var err error
	if l.full {
		err = l.table.Replace(ctx, state)
	} else {
		err = l.table.Apply(ctx, l.pending)
	}
	if err != nil || l.bypass == nil {
		return err
	}
	return l.bypass.Widen(state, changes)
}

// forgetRetry is when entries that could not be deleted are looked for again.
const forgetRetry = 30 * time.Second

// forgetUntracked has conntrack forget connections that it sees no more.
func (r *Reconciler) forgetUntracked(ctx context.Context, now time.Time) {
	l := r.policies
	l.forgetAt = time.Time{}
	entries, can := r.cfg.StaleEntries.(UntrackedEntries)
	if !can || len(l.tracker.State().Targets) == 0 {
		return
	}
	deleted, more, err := entries.Forget(ctx, l.tracker.Unseen, l.tracker.Denies)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		r.log.Warn("Forget connections that are not tracked any more", "err", err)
		l.forgetAt = now.Add(forgetRetry)
	case more:
		l.forgetAt = now // after what else is due
	}
	if deleted > 0 {
		r.log.Info("conntrack forgets connections that policies leave untracked now", "entries", deleted)
	}
}

func (l *policyLane) problem() []model.Problem {
	what := ""
	switch {
	case l.err != nil:
		what = fmt.Sprintf("%v; what was written before holds, and this is tried again", l.err)
	case l.lacks:
		what = fmt.Sprintf("%s cannot be read, and the kernel had nothing of an earlier agent: what can be read is applied, "+
			"without what is said there of policies, pods, namespaces and nodes%s", l.unread.Text, l.known())
	default:
		return nil
	}
	return []model.Problem{{Where: "do-not-track policies", What: what}}
}

// known names the policies that may lack something, as far as a line has room.
func (l *policyLane) known() string {
	const most = 10
	names := slices.Sorted(maps.Keys(l.tracker.Policies()))
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d more", len(names)-most))
	}
	if len(names) == 0 {
		return ""
	}
	return "; so may lack something: " + strings.Join(names, ", ")
}
