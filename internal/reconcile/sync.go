package reconcile

import (
	"context"
	"fmt"
	"sync"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// syncLanes writes to every backend that has something due.
func (r *Reconciler) syncLanes(ctx context.Context, now time.Time) {
	state := sync.OnceValue(r.cfg.Tracker.State)
	worked, full, start := false, false, time.Now()
	var done []*intent.ServicePort
	for i, l := range r.lanes {
		at, any := l.due()
		if !any || at.After(now) || ctx.Err() != nil {
			continue
		}
		if r.helpsNobody(i) && r.lingers(l, now) {
			continue
		}
		worked, full = true, full || l.full
		whole, began := l.full, time.Now()
		wrote := l.sync(ctx, now, func() intent.State { return r.stateOf(i, state()) })
		if ctx.Err() != nil {
			return
		}
		if l.err != nil {
			r.metrics.SyncFailed(l.backend.Name())
		} else {
			r.repaired(l, whole, time.Since(began))
		}
		r.measure(wrote, time.Now())
		done = append(done, wrote...)
	}
	if worked {
		r.lastStart = now
		r.metrics.SyncDone(full, time.Since(start))
	}
	if at, again := r.entries.due(); worked || again && !at.After(now) {
		r.cleanEntries(ctx, done, now)
	}
	r.settle(ctx)
}

// Linger is how long a dataplane that is no longer needed stays in the kernel
// while the one that took over serves: answers to what it has translated last are
// still under way.
const Linger = 2 * time.Second

// helpsNobody reports whether a lane is there to help out and has no port.
func (r *Reconciler) helpsNobody(i int) bool { return i > 0 && r.tally.lanes[i] == 0 }

// lingers reports whether an idle lane has to wait before it takes away what is
// there. What it writes then is the whole of nothing: a dataplane without ports
// leaves no trace.
func (r *Reconciler) lingers(l *lane, now time.Time) bool {
	l.demandFull()
	if first := r.lanes[0]; l.idle && !first.full && first.err == nil {
		return false
	}
	l.idle, l.retryAt = true, now.Add(Linger)
	return true
}

// settle notes whether all that was taken in is in the kernel now. Single
// ports that a backend could not write do not count: they are problems of
// their own, and a node is not unhealthy for one Service that does not fit.
func (r *Reconciler) settle(ctx context.Context) {
	if !r.lanesWritten() {
		return
	}
	if r.pendingSince.IsZero() && r.synced {
		return
	}
	if !r.synced {
		r.synced = true
		r.log.Info("first sync done", "ports", len(r.places))
		if r.cfg.OnFirstSync != nil {
			r.cfg.OnFirstSync(ctx)
		}
	}
	now := time.Now()
	r.pendingSince, r.pendingSvcs, r.pendingEps = time.Time{}, 0, 0
	r.mu.Lock()
	r.status.LastSynced = now
	r.mu.Unlock()
	r.metrics.SyncSucceeded(now)
}

func (r *Reconciler) lanesWritten() bool {
	for i, l := range r.lanes {
		if !r.helpsNobody(i) && (l.full || l.err != nil || len(l.pending) > 0 || l.node != nil) {
			return false
		}
	}
	return true
}

// planResync makes every lane write its whole state, after an audit of what
// the kernel holds, and chooses backends afresh: a kernel module may have been
// loaded since. It runs before new mail is taken in, when a lane without open
// ends is the same as the kernel.
func (r *Reconciler) planResync(ctx context.Context, now time.Time) {
	r.nextResync = now.Add(r.cfg.SyncPeriod)
	state := r.cfg.Tracker.State()
	for i, l := range r.lanes {
		if _, watched := l.backend.(dataplane.Watcher); watched {
			continue // its Replace compares, and tells
		}
		if _, open := l.due(); !open {
			r.audit(ctx, l, r.stateOf(i, state))
		}
	}
	for _, p := range state.Ports {
		r.place(p)
	}
	for _, l := range r.lanes {
		if l.err == nil {
			l.demandFull()
			l.retryAt = time.Time{} // single ports that failed do not hold it up
		}
	}
	if r.pendingSince.IsZero() {
		r.pendingSince = now
	}
}

// audit compares which ports the kernel serves with those it should serve. The
// resync that follows repairs the difference; the audit tells that there was
// one, because somebody else is then at work in the same place.
func (r *Reconciler) audit(ctx context.Context, l *lane, want intent.State) {
	have, err := l.backend.Applied(ctx)
	if err != nil {
		if ctx.Err() == nil {
			r.log.Warn("audit failed", "dataplane", l.backend.Name(), "err", err)
		}
		return
	}
	var first string
	missing, foreign := 0, 0
	left := byID(have.Ports)
	for _, p := range want.Ports {
		if _, ok := left[p.ID]; !ok {
			missing++
			first = firstOf(first, p.ID)
		}
		delete(left, p.ID)
	}
	for id := range left {
		foreign++
		first = firstOf(first, id)
	}
	r.metrics.AuditDifferences(l.backend.Name(), missing+foreign)
	if missing+foreign > 0 {
		r.log.Warn("the kernel does not hold what was written; writing it again",
			"dataplane", l.backend.Name(), "missing", missing, "foreign", foreign, "first", first)
	}
}

func firstOf(first string, id intent.PortID) string {
	if first != "" {
		return first
	}
	return id.String()
}

// laneProblems are the problems of backends and of single ports.
func (r *Reconciler) laneProblems() []model.Problem {
	var ps []model.Problem
	for _, l := range r.lanes {
		if l.err != nil {
			ps = append(ps, model.Problem{
				Where: "dataplane " + l.backend.Name(),
				What:  fmt.Sprintf("%v; the kernel serves what it served before, and this is tried again", l.err),
			})
		}
		for id, f := range l.failed {
			ps = append(ps, portProblem(id, fmt.Sprintf("%v (%s)", f.err, l.backend.Name())))
		}
	}
	for id, reason := range r.tally.nowhere {
		ps = append(ps, portProblem(id, fmt.Sprintf("not served on this node: %v", reason)))
	}
	return ps
}
