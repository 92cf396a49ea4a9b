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

// drift is what another program did to what a dataplane wrote.
type drift struct {
	reported  atomic.Bool // by the dataplane, in another goroutine
	repairAt  time.Time   // when to write everything because of it; zero: not due
	calmUntil time.Time   // no repair before
}

// watch waits for a dataplane to report changes by another program.
func (r *Reconciler) watch(ctx context.Context, w dataplane.Watcher, d *drift) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Drifted():
			d.reported.Store(true)
			r.queue.wakeUp()
		}
	}
}

// due returns when to look at a report, or to repair.
func (d *drift) due() (time.Time, bool) {
	if d.reported.Load() {
		return time.Time{}, true
	}
	return orNever(d.repairAt)
}

// repair reports whether a repair is due now.
func (d *drift) repair(now time.Time) bool {
	if d.reported.Swap(false) && d.repairAt.IsZero() {
		d.repairAt = now.Add(driftQuiet)
		if d.calmUntil.After(d.repairAt) {
			d.repairAt = d.calmUntil
		}
	}
	if !passed(d.repairAt, now) {
		return false
	}
	d.repairAt = time.Time{}
	return true
}

// planRepairs schedules a full sync of each backend that another program changed, when it
// is due.
func (r *Reconciler) planRepairs(now time.Time) {
	for _, bs := range r.syncs {
		if bs.drift.repair(now) && bs.err == nil {
			bs.requireFull()
			bs.repairing = true
		}
	}
}

// repaired reports what the last sync of a backend repaired.
func (r *Reconciler) repaired(bs *backendSync, whole bool, took time.Duration) {
	if whole && bs.repairing {
		bs.repairing, bs.drift.calmUntil = false, time.Now().Add(max(driftPause, min(driftShare*took, driftLimit)))
	}
	rep := bs.backend.Repaired()
	r.metrics.AuditDifferences(bs.backend.Name(), rep.Missing+rep.Foreign)
	if rep.Any() {
		r.log.Warn("another program changed what was written; it is restored", "dataplane", bs.backend.Name(),
			"missing", rep.Missing, "foreign", rep.Foreign, "found", rep.Found)
	}
}
