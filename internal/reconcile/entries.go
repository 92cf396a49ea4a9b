package reconcile

import (
	"context"
	"fmt"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// StaleEntries takes away what the kernel's connection tracking remembers of
// Service ports as they were; conntrack/stale is the one in use. It is told only
// what the dataplanes have already written, so that nothing makes such an entry
// again. No dataplane knows of it.
type StaleEntries interface {
	// Apply is told what the kernel serves otherwise than before. Ports that did
	// not change may be among the Upserts. After an error nothing is forgotten:
	// the next Apply, of empty Changes too, does what is left.
	Apply(context.Context, intent.Changes) error
}

// entries is what the loop has still to tell StaleEntries.
type entries struct {
	gone    map[intent.PortID]struct{} // served no more, once their lanes have written that
	node    *intent.Node
	err     error
	tries   int // failures in a row
	retryAt time.Time
}

// due says when Apply must be tried again, and whether it must.
func (e *entries) due() (time.Time, bool) { return e.retryAt, e.err != nil }

// noteGone notes that a port is to be served no more.
func (r *Reconciler) noteGone(id intent.PortID) {
	if r.cfg.StaleEntries != nil {
		r.entries.gone[id] = struct{}{}
	}
}

// cleanEntries tells StaleEntries what a sync brought into the kernel: the ports
// that are there as wanted, and those that are gone from every lane.
func (r *Reconciler) cleanEntries(ctx context.Context, done []*intent.ServicePort, now time.Time) {
	e := &r.entries
	if r.cfg.StaleEntries == nil || ctx.Err() != nil {
		return
	}
	c := intent.Changes{Upserts: done}
	for id := range e.gone {
		if r.written(id) {
			c.Deletes = append(c.Deletes, id)
			delete(e.gone, id)
		}
	}
	slices.SortFunc(c.Deletes, intent.PortID.Compare)
	if e.node != nil && r.nodeWritten() {
		c.Node, e.node = e.node, nil
	}
	err := r.cfg.StaleEntries.Apply(ctx, c)
	if ctx.Err() != nil {
		return
	}
	if e.err = err; err == nil {
		e.tries = 0
		return
	}
	e.retryAt = now.Add(backoff(e.tries))
	e.tries++
}

// written reports whether every lane has done what it was last asked of a port.
func (r *Reconciler) written(id intent.PortID) bool {
	for _, bs := range r.syncs {
		_, pending := bs.pending[id]
		_, failed := bs.failed[id]
		if bs.full || pending || failed {
			return false
		}
	}
	return true
}

func (r *Reconciler) nodeWritten() bool {
	for _, bs := range r.syncs {
		if bs.full || bs.node != nil {
			return false
		}
	}
	return true
}

// entryProblems is why stale entries are left, if some may be.
func (r *Reconciler) entryProblems() []model.Problem {
	if r.entries.err == nil {
		return nil
	}
	return []model.Problem{{
		Where: "conntrack",
		What:  fmt.Sprintf("%v; UDP clients may keep talking to endpoints that are gone, and this is tried again", r.entries.err),
	}}
}
