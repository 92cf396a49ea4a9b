package reconcile

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// policySync is the state of the sync of do-not-track policies. Its failures do not delay
// the syncs of Services.
type policySync struct {
	tracker *policy.Tracker
	table   dataplane.Policies
	bypass  dataplane.Bypass // nil: no backend bypasses netfilter
	full    bool             // the next write is of the whole state
	pending policy.Changes   // of one turn
	err     error
	tries   int
	retryAt time.Time

	reported bool // OnPolicies has the current result

	// unread is what the source could not read; see model.Delta. Until the first write the
	// kernel may hold it.
	unread     model.Unread
	written    bool
	incomplete bool // the first write left out what could not be read

	mayAffectRunning  bool      // pending changes may affect running connections
	forgetAt          time.Time // when to delete entries of untracked connections; zero: not due
	checkTrackedAt    time.Time // when to check for tracked exceptions; zero: not due
	checkTrackedEvery time.Duration

	drifted  atomic.Bool
	repairAt time.Time
}

// planPolicies schedules a full write at a resync, and soon after another program changed
// the table.
func (r *Reconciler) planPolicies(now time.Time, resync bool) {
	ps := r.policies
	if ps == nil {
		return
	}
	if ps.drifted.Swap(false) && ps.repairAt.IsZero() {
		ps.repairAt = now.Add(driftQuiet)
	}
	if due := !ps.repairAt.IsZero() && !now.Before(ps.repairAt); due || resync {
		ps.repairAt, ps.full = time.Time{}, true
	}
}

// onPolicyChanges stores what to write, and passes on what the Service tracker and the
// reports need.
func (r *Reconciler) onPolicyChanges(c policy.Changes) {
	ps := r.policies
	if !c.Empty() {
		ps.full = ps.full || !ps.pending.Empty() // two changes in one turn are rare, and not merged
		ps.pending = c
		ps.mayAffectRunning = ps.mayAffectRunning || c.MayAffectRunning
	}
	if c.DenyRulePods != nil {
		r.enqueue(r.cfg.Tracker.SetDenyRulePods(c.DenyRulePods))
	}
	if c.AllowsAny != nil {
		ports := make([]intent.AllowedPorts, 0, len(c.AllowsAny))
		for _, t := range c.AllowsAny {
			ports = append(ports, intent.AllowedPorts{Addr: t.Addr, Protocol: t.Protocol, First: t.First, Last: t.Last})
		}
		r.enqueue(r.cfg.Tracker.SetAllowsAny(ports))
	}
	if c.Refusals != nil {
		refused, reasons := make([]model.Problem, 0, len(c.Refusals)), map[string]int{}
		for _, ref := range c.Refusals {
			refused = append(refused, ref.Problem())
			reasons[ref.Reason]++
		}
		r.metrics.SetRefused(reasons)
		r.problems.set(fromPolicies, refused)
		ps.reported = false
	}
}

// onUnreadUpdate records what the source could not read. An earlier agent may have denied
// something because of it, so no packet may bypass netfilter until the source reads it or
// the agent has written its policies.
func (r *Reconciler) onUnreadUpdate(d *model.Delta) {
	ps := r.policies
	switch {
	case d.Unread != nil:
		ps.unread = *d.Unread
	case d.Full:
		ps.unread = model.Unread{}
	default:
		return
	}
	ps.incomplete = ps.incomplete && ps.unread.Any()
	r.problems.set(fromPolicySync, ps.problem())
	if !ps.written {
		ps.full, ps.retryAt = true, time.Time{} // the input may be fixed
		r.enqueue(r.cfg.Tracker.SetDenyRulesUnknown(ps.unread.Any()))
	}
}

// checkUnread returns an error if the agent must leave the kernel's policies alone,
// because they may include what the source could not read. If the kernel has no policies,
// the agent writes those it knows.
func (ps *policySync) checkUnread(ctx context.Context) error {
	if ps.written || !ps.unread.Any() {
		return nil
	}
	holds, err := ps.table.HasPolicies(ctx)
	if err == nil && holds {
		err = fmt.Errorf("the kernel holds what an earlier agent wrote, and %s cannot be read, which may be some of it", ps.unread.Text)
	}
	if err != nil {
		return fmt.Errorf("write policies: %w", err)
	}
	return nil
}

// due returns when there is something to write, and whether there is.
func (ps *policySync) due() (time.Time, bool) {
	if ps == nil {
		return time.Time{}, false
	}
	if ps.full || !ps.pending.Empty() {
		return ps.retryAt, true
	}
	at, any := time.Time{}, false
	for _, due := range []time.Time{ps.repairAt, ps.forgetAt, ps.checkTrackedAt} {
		if !due.IsZero() && (!any || due.Before(at)) {
			at, any = due, true
		}
	}
	return at, any
}

// syncPolicies writes what is due.
func (r *Reconciler) syncPolicies(ctx context.Context, now time.Time) {
	ps := r.policies
	if ps == nil || now.Before(ps.retryAt) {
		return
	}
	if ps.mayAffectRunning || !ps.written || !ps.checkTrackedAt.IsZero() && !now.Before(ps.checkTrackedAt) {
		r.keepTracked(ctx, now)
	}
	if ps.full || !ps.pending.Empty() {
		r.writePolicies(ctx)
	}
	if !ps.forgetAt.IsZero() && !now.Before(ps.forgetAt) && ps.err == nil {
		r.forgetUntracked(ctx, now)
	}
	if !ps.reported && r.cfg.OnPolicies != nil && ctx.Err() == nil {
		ps.reported = true
		r.cfg.OnPolicies(ps.tracker.Refusals(), ps.err)
	}
}

// releasePolicies applies policies that a Service's NAT had blocked. It runs after the
// Service sync; conflicts from new Services are handled before it.
func (r *Reconciler) releasePolicies(ctx context.Context, now time.Time) {
	ps := r.policies
	if ps == nil || ctx.Err() != nil {
		return
	}
	switch {
	case r.allWritten():
		r.onPolicyChanges(ps.tracker.ServicesWritten())
	case slices.ContainsFunc(r.syncs, func(bs *backendSync) bool { return bs.err != nil }):
		r.onPolicyChanges(ps.tracker.ReportRefusals()) // the takeover may take long
	}
	r.syncPolicies(ctx, now)
}

func (r *Reconciler) writePolicies(ctx context.Context) {
	ps, before := r.policies, r.policies.err
	start := time.Now()
	ps.err = ps.write(ctx)
	if ctx.Err() != nil {
		return
	}
	ps.pending = policy.Changes{}
	if ps.err != nil {
		ps.full = true
		ps.retryAt = time.Now().Add(backoff(ps.tries))
		ps.tries++
		if !ps.written && ps.unread.Any() {
			r.metrics.SetPoliciesHeld(len(ps.tracker.Policies()))
		}
	} else {
		whole := ps.full
		if !ps.written || ps.mayAffectRunning {
			ps.mayAffectRunning, ps.forgetAt = false, start
		}
		ps.full, ps.tries, ps.retryAt = false, 0, time.Time{}
		if !ps.written && ps.unread.Any() {
			r.enqueue(r.cfg.Tracker.SetDenyRulesUnknown(false))
			ps.incomplete = !ps.unread.OnlyPolicies()
		}
		ps.written = true
		state := ps.tracker.State()
		r.metrics.SetPolicies(len(ps.tracker.Policies()), len(state.Targets), len(state.Tracked))
		r.log.Debug("policies written", "whole", whole, "took", time.Since(start))
	}
	r.problems.set(fromPolicySync, ps.problem())
	ps.reported = ps.reported && (before == nil) == (ps.err == nil)
	if rep := ps.table.Repaired(); rep.Any() {
		r.metrics.AuditDifferences("policies", rep.Missing+rep.Foreign)
		r.log.Warn("somebody else had changed what was written; it is restored", "dataplane", "policies",
			"missing", rep.Missing, "foreign", rep.Foreign, "found", rep.Found)
	}
}

// write writes the policies. It revokes the bypass before the table denies, and grants it
// after the table allows.
func (ps *policySync) write(ctx context.Context) error {
	if err := ps.checkUnread(ctx); err != nil {
		return err
	}
	state, changes := ps.tracker.State(), &ps.pending
	if ps.full {
		changes = nil
	}
	if ps.bypass != nil {
		if err := ps.bypass.Revoke(state, changes); err != nil {
			return err
		}
	}
	var err error
	if ps.full {
		err = ps.table.Replace(ctx, state)
	} else {
		err = ps.table.Apply(ctx, ps.pending)
	}
	if err != nil || ps.bypass == nil {
		return err
	}
	return ps.bypass.Grant(state, changes)
}

// forgetRetry is the wait before the agent retries to delete entries.
const forgetRetry = 30 * time.Second

// forgetUntracked deletes conntrack entries of connections that conntrack no longer sees.
func (r *Reconciler) forgetUntracked(ctx context.Context, now time.Time) {
	ps := r.policies
	ps.forgetAt = time.Time{}
	entries := r.cfg.StaleEntries
	if entries == nil || len(ps.tracker.State().Targets) == 0 {
		return
	}
	deleted, more, err := entries.Forget(ctx, ps.tracker.NotTracked, ps.tracker.Denies)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		r.log.Warn("Forget connections that are not tracked any more", "err", err)
		ps.forgetAt = now.Add(forgetRetry)
	case more:
		ps.forgetAt = now // after other due work
	}
	if deleted > 0 {
		r.log.Info("conntrack forgets connections that policies leave untracked now", "entries", deleted)
	}
}

func (ps *policySync) problem() []model.Problem {
	what := ""
	switch {
	case ps.err != nil:
		what = fmt.Sprintf("%v; what was written before holds, and this is tried again", ps.err)
	case ps.incomplete:
		what = fmt.Sprintf("%s cannot be read, and the kernel had nothing of an earlier agent: what can be read is applied, "+
			"without what is said there of policies, pods, namespaces and nodes%s", ps.unread.Text, ps.knownPolicies())
	default:
		return nil
	}
	return []model.Problem{{Where: "do-not-track policies", What: what}}
}

// knownPolicies names the first policies that may be incomplete.
func (ps *policySync) knownPolicies() string {
	const most = 10
	names := slices.Sorted(maps.Keys(ps.tracker.Policies()))
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d more", len(names)-most))
	}
	if len(names) == 0 {
		return ""
	}
	return "; so may lack something: " + strings.Join(names, ", ")
}
