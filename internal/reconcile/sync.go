package reconcile

import (
	"context"
	"fmt"
	"sync"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// syncBackends writes to every backend that has something due.
func (r *Reconciler) syncBackends(ctx context.Context, now time.Time) {
	state := sync.OnceValue(r.cfg.Tracker.State)
	worked, full, start := false, false, time.Now()
	var done []*intent.ServicePort
	for i, bs := range r.syncs {
		at, any := bs.due()
		if !any || at.After(now) || ctx.Err() != nil {
			continue
		}
		if r.isUnused(i) && r.awaitLinger(bs, now) {
			continue
		}
		worked, full = true, full || bs.full
		whole, began := bs.full, time.Now()
		wrote := bs.sync(ctx, now, func() intent.State { return r.stateOf(i, state()) })
		if ctx.Err() != nil {
			return
		}
		if bs.lasting() != nil {
			r.metrics.SyncFailed(bs.backend.Name())
		} else {
			r.repaired(bs, whole, time.Since(began))
		}
		r.measure(wrote, time.Now())
		done = append(done, wrote...)
	}
	if worked {
		r.lastStart = now
		r.metrics.SyncDone(full, time.Since(start))
	}
	if at, again := r.entries.due(); worked || again && !at.After(now) {
		r.cleanEntries(ctx, done)
	}
	r.markSynced(ctx)
}

// Linger is how long an unused dataplane stays in the kernel while another one serves:
// replies to the last packets that it translated are still in flight.
const Linger = 2 * time.Second

// isUnused reports whether a backend is not the first and has no port.
func (r *Reconciler) isUnused(i int) bool { return i > 0 && r.counters.perBackend[i] == 0 }

// awaitLinger reports whether an unused backend has to wait before it removes its objects.
// It then writes an empty state, which leaves nothing in the kernel.
func (r *Reconciler) awaitLinger(bs *backendSync, now time.Time) bool {
	bs.requireFull()
	if first := r.syncs[0]; bs.unused && !first.full && first.err == nil {
		return false
	}
	bs.unused, bs.retry.at = true, now.Add(Linger)
	return true
}

// markSynced records that the kernel holds all drained changes, if it does. Ports that a
// backend could not write do not count: each has its own Problem, and one Service that
// does not fit does not make the node unhealthy.
func (r *Reconciler) markSynced(ctx context.Context) {
	if !r.allWritten() {
		if oldest, known := r.oldestPending(); known {
			r.pendingSince = oldest
		}
		return
	}
	if r.pendingSince.IsZero() && r.synced {
		return
	}
	if !r.synced {
		r.synced = true
		r.log.Info("first sync done", "ports", len(r.assignments))
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

func (r *Reconciler) allWritten() bool {
	for i, bs := range r.syncs {
		if !r.isUnused(i) && (bs.full || bs.lasting() != nil || len(bs.pending) > 0 || bs.node != nil) {
			return false
		}
	}
	return true
}

// planFullSync makes every backend write its whole state, and chooses the backend of each
// port again: a kernel module may have been loaded since.
func (r *Reconciler) planFullSync(now time.Time) {
	r.nextFullSync = now.Add(r.cfg.SyncPeriod)
	for _, p := range r.cfg.Tracker.State().Ports {
		r.assign(p)
	}
	for _, bs := range r.syncs {
		if bs.err == nil {
			bs.requireFull()
			bs.retry.at = time.Time{} // failed ports do not delay the full sync
		}
	}
	if r.pendingSince.IsZero() {
		r.pendingSince = now
	}
}

// backendProblems returns the Problems of backends and of single ports.
func (r *Reconciler) backendProblems() []model.Problem {
	var ps []model.Problem
	for _, bs := range r.syncs {
		if bs.err != nil {
			ps = append(ps, model.Problem{
				Where: "dataplane " + bs.backend.Name(),
				What:  fmt.Sprintf("%v; the kernel serves what it served before, and this is tried again", bs.err),
			})
		}
		if bs.nodeErr != nil {
			ps = append(ps, model.Problem{
				Where: "dataplane " + bs.backend.Name(),
				What:  fmt.Sprintf("%v; Services are served, and this is tried again", bs.nodeErr),
			})
		}
		for id, f := range bs.failed {
			ps = append(ps, portProblem(id, fmt.Sprintf("%v (%s)", f.err, bs.backend.Name())))
		}
	}
	for id, reason := range r.counters.unassigned {
		ps = append(ps, portProblem(id, fmt.Sprintf("not served on this node: %v", reason)))
	}
	return ps
}
