package reconcile

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/telemetry"
)

// doNotTrackSync is the controller of do-not-track policies. Its failures do not delay the
// syncs of Services. A turn runs sync before the Services are written, so that no policy
// leaves untracked what netfilter translates from then on. It runs sync again after they
// are written, for the policies that they had blocked. The phases of sync:
//
//	keepTracked  connections that netfilter translates stay tracked until they end
//	write        revoke the bypass, write the table, grant the bypass
//	forget       conntrack deletes the entries of connections that it no longer sees
//	report       parts of policies that do not hold, and the error of the write
type doNotTrackSync struct {
	tracker *donottrack.Tracker
	table   dataplane.DoNotTrack
	bypass  dataplane.Bypass // nil: no backend bypasses netfilter
	entries StaleEntries     // nil: conntrack keeps its entries
	metrics *telemetry.Metrics
	log     *slog.Logger
	report  func(refused []model.PolicyRefusal, failed error) // nil: nothing is reported

	stage  doNotTrackStage
	unread model.Unread // what the source could not read; see model.Delta

	whole   bool               // the next write is of the whole state
	pending donottrack.Changes // of the next write, unless it is of the whole state
	changed bool               // the state differs from what the last successful write wrote
	owned   bool               // the table is of this agent
	err     error              // of the last write
	retry   retry
	drift   drift

	running  runningConnections
	refused  []model.Problem
	reported bool // report has the current result
}

// doNotTrackStage is how far the sync has come since the agent started.
type doNotTrackStage uint8

const (
	policiesUnwritten  doNotTrackStage = iota // the kernel may hold what an earlier agent wrote
	policiesIncomplete                        // written without what the source could not read
	policiesWritten
)

func newDoNotTrackSync(cfg *Config) *doNotTrackSync {
	return &doNotTrackSync{
		tracker: cfg.Tracker.Policies(), table: cfg.Policies, bypass: cfg.Bypass, entries: cfg.StaleEntries,
		metrics: cfg.Metrics, log: cfg.Logger, report: cfg.OnDoNotTrack, whole: true, changed: true,
	}
}

// enqueue stores what the tracker changed.
func (ps *doNotTrackSync) enqueue(c donottrack.Changes) {
	if !c.Empty() {
		ps.whole = ps.whole || !ps.pending.Empty() // two changes in one turn are rare, and not merged
		ps.pending, ps.changed = c, true
		ps.running.affected = ps.running.affected || c.MayAffectRunning
	}
	if c.Refusals != nil {
		ps.refused = make([]model.Problem, 0, len(c.Refusals))
		reasons := map[string]int{}
		for _, ref := range c.Refusals {
			ps.refused = append(ps.refused, ref.Problem())
			reasons[ref.Reason]++
		}
		ps.metrics.SetRefused(reasons)
		ps.reported = false
	}
}

// onUnread records what the source could not read.
func (ps *doNotTrackSync) onUnread(d *model.Delta) {
	switch {
	case d.Unread != nil:
		ps.unread = *d.Unread
	case d.Full:
		ps.unread = model.Unread{}
	default:
		return
	}
	switch {
	case ps.stage == policiesUnwritten:
		ps.whole, ps.retry.at = true, time.Time{} // the input may be fixed
	case !ps.unread.Any():
		ps.stage = policiesWritten
	}
}

// denyRulesUnknown reports whether an earlier agent may have denied something because of
// what the source cannot read. No packet may bypass netfilter then.
func (ps *doNotTrackSync) denyRulesUnknown() bool {
	return ps.stage == policiesUnwritten && ps.unread.Any()
}

// plan schedules a write of the whole state at a full sync, and soon after another program
// changed the table.
func (ps *doNotTrackSync) plan(now time.Time, fullSync bool) {
	if ps.drift.repair(now) || fullSync {
		ps.drift.repairAt, ps.whole = time.Time{}, true
	}
}

// due returns when there is something to do, and whether there is. Nothing else is done
// before the retry of a write.
func (ps *doNotTrackSync) due() (time.Time, bool) {
	if ps.writeDue() {
		return ps.retry.at, true
	}
	return ps.running.due()
}

func (ps *doNotTrackSync) writeDue() bool { return ps.whole || !ps.pending.Empty() }

// sync does what is due.
func (ps *doNotTrackSync) sync(ctx context.Context, now time.Time) {
	if now.Before(ps.retry.at) {
		return
	}
	if ps.running.affected || ps.stage == policiesUnwritten || passed(ps.running.lookAt, now) {
		ps.keepTracked(ctx, now)
	}
	if ps.writeDue() {
		ps.write(ctx)
	}
	if passed(ps.running.forgetAt, now) && ps.err == nil {
		ps.forget(ctx, now)
	}
	if !ps.reported && ps.report != nil && ctx.Err() == nil {
		ps.reported = true
		ps.report(ps.tracker.Refusals(), ps.err)
	}
}

// write writes the policies, and records the result.
func (ps *doNotTrackSync) write(ctx context.Context) {
	before, start := ps.err, time.Now()
	ps.err = ps.writeTable(ctx)
	if ctx.Err() != nil {
		return
	}
	ps.pending = donottrack.Changes{}
	ps.reported = ps.reported && (before == nil) == (ps.err == nil)
	if ps.err == nil {
		ps.written(start)
	} else {
		ps.whole = true
		ps.retry.failed()
		if ps.denyRulesUnknown() {
			ps.metrics.SetPoliciesHeld(len(ps.tracker.Policies()))
		}
	}
	if rep := ps.table.Repaired(); rep.Any() {
		ps.metrics.AuditDifferences("policies", rep.Missing+rep.Foreign)
		ps.log.Warn("another program changed what was written; it is restored", "dataplane", "policies",
			"missing", rep.Missing, "foreign", rep.Foreign, "found", rep.Found)
	}
}

// written records that the kernel holds the policies.
func (ps *doNotTrackSync) written(start time.Time) {
	ps.log.Debug("policies written", "whole", ps.whole, "took", time.Since(start))
	first := ps.stage == policiesUnwritten
	if first || ps.running.affected {
		ps.running.affected, ps.running.forgetAt = false, start
	}
	if first {
		ps.stage = policiesWritten
		if ps.unread.Any() && !ps.unread.OnlyPolicies() {
			ps.stage = policiesIncomplete
		}
	}
	ps.whole, ps.changed, ps.retry = false, false, retry{}
	state := ps.tracker.State()
	ps.metrics.SetPolicies(len(ps.tracker.Policies()), len(state.Targets), len(state.Tracked))
}

// writeTable revokes the bypass before the table denies, and grants it after the table
// allows.
func (ps *doNotTrackSync) writeTable(ctx context.Context) error {
	if err := ps.checkUnread(ctx); err != nil {
		return err
	}
	state, changes := ps.tracker.State(), &ps.pending
	if ps.whole {
		changes = nil
	}
	if ps.bypass != nil {
		if err := ps.bypass.Revoke(state, changes); err != nil {
			return err
		}
	}
	var err error
	switch {
	case !ps.whole:
		err = ps.table.Apply(ctx, ps.pending)
	case ps.changed:
		err = ps.table.Replace(ctx, state)
	default:
		err = ps.table.Repair(ctx, state)
	}
	if err != nil {
		return err
	}
	ps.owned = true
	if ps.bypass == nil {
		return nil
	}
	return ps.bypass.Grant(state, changes)
}

// checkUnread returns an error if the agent must leave the kernel's policies alone,
// because they may include what the source could not read. If the kernel has no policies,
// the agent writes those it knows.
func (ps *doNotTrackSync) checkUnread(ctx context.Context) error {
	if ps.owned || !ps.denyRulesUnknown() {
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

// problem returns the Problem of the sync itself; nil if there is none.
func (ps *doNotTrackSync) problem() []model.Problem {
	what := ""
	switch {
	case ps.err != nil:
		what = fmt.Sprintf("%v; what was written before holds, and this is tried again", ps.err)
	case ps.stage == policiesIncomplete:
		what = fmt.Sprintf("%s cannot be read, and the kernel had nothing of an earlier agent: everything else is applied%s",
			ps.unread.Text, ps.knownPolicies())
	default:
		return nil
	}
	return []model.Problem{{Where: "do-not-track policies", What: what}}
}

// knownPolicies names the first policies that may be incomplete.
func (ps *doNotTrackSync) knownPolicies() string {
	const most = 10
	names := slices.Sorted(maps.Keys(ps.tracker.Policies()))
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("%d more", len(names)-most))
	}
	if len(names) == 0 {
		return ""
	}
	return "; these policies may be incomplete: " + strings.Join(names, ", ")
}
