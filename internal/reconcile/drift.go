package reconcile

import (
	"context"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/dataplane"
)

// Repair starts driftQuiet after the last change by another program. It uses at most
// 1/driftShare of wall time, but waits no longer than driftLimit, so that Services are not
// without rules for longer.
const (
	driftQuiet = 50 * time.Millisecond
	driftPause = time.Second
	driftShare = 10
	driftLimit = 3 * time.Second
)

// watch waits for a dataplane to report changes by another program.
func (r *Reconciler) watch(ctx context.Context, w dataplane.Watcher, drifted *atomic.Bool) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Drifted():
			drifted.Store(true)
			r.queue.wakeUp()
		}
	}
}

// planRepairs schedules a full sync of each backend that another program changed, when it
// is due.
func (r *Reconciler) planRepairs(now time.Time) {
	for _, bs := range r.syncs {
		if bs.drifted.Swap(false) && bs.repairAt.IsZero() {
			bs.repairAt = now.Add(driftQuiet)
			if bs.calmUntil.After(bs.repairAt) {
				bs.repairAt = bs.calmUntil
			}
		}
		if bs.repairAt.IsZero() || now.Before(bs.repairAt) {
			continue
		}
		bs.repairAt = time.Time{}
		if bs.err == nil {
			bs.requireFull()
			bs.repairing = true
		}
	}
}

// repaired reports what the last sync of a backend repaired.
func (r *Reconciler) repaired(bs *backendSync, whole bool, took time.Duration) {
	if whole && bs.repairing {
		bs.repairing, bs.calmUntil = false, time.Now().Add(max(driftPause, min(driftShare*took, driftLimit)))
	}
	rep := bs.backend.Repaired()
	r.metrics.AuditDifferences(bs.backend.Name(), rep.Missing+rep.Foreign)
	if rep.Any() {
		r.log.Warn("another program changed what was written; it is restored", "dataplane", bs.backend.Name(),
			"missing", rep.Missing, "foreign", rep.Foreign, "found", rep.Found)
	}
}
