package reconcile

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// StaleEntries deletes conntrack entries that contradict what the dataplanes have
// written; the agent uses conntrack/stale. Reconcile calls it only after the dataplanes
// have written, so that no dataplane creates such an entry again.
type StaleEntries interface {
	// Apply deletes the entries that contradict the changed Service ports. Upserts may
	// include ports that did not change. After an error the next Apply, even with empty
	// Changes, deletes what is left.
	Apply(context.Context, intent.Changes) error

	// Recheck returns when Apply has to be called again, even with empty Changes: an entry
	// that contradicts the changes may be waiting for an answer. Zero: it does not have to.
	Recheck() time.Time

	// Forget deletes untranslated entries for which untracked(from, to) is true, and
	// translated entries for which denied(replySource, replyDestination) is true. It
	// returns how many it deleted, and whether there may be more.
	Forget(ctx context.Context, untracked, denied func(p model.Protocol, from, to netip.AddrPort) bool) (deleted int, more bool, err error)

	// Translated calls keeps with both directions of each translated connection, as its
	// packets arrive; a direction may come twice. Where keeps returns true, Translated
	// deletes entries of connections that have ended.
	Translated(ctx context.Context, keeps func(p model.Protocol, from, to netip.AddrPort) bool) error
}

// pendingStale is what the loop has yet to pass to StaleEntries.
type pendingStale struct {
	gone    map[intent.PortID]struct{} // deleted ports; passed on once all backends have deleted them
	node    *intent.Node
	err     error
	retry   retry
	recheck time.Time // see StaleEntries.Recheck
}

// due returns when to call Apply without a change, and whether to.
func (e *pendingStale) due() (time.Time, bool) {
	if e.err != nil {
		return e.retry.at, true
	}
	return orNever(e.recheck)
}

// noteGone records that a port is deleted.
func (r *Reconciler) noteGone(id intent.PortID) {
	if r.cfg.StaleEntries != nil {
		r.entries.gone[id] = struct{}{}
	}
}

// cleanEntries passes to StaleEntries what a sync wrote: the ports that the kernel holds
// as requested, and those that every backend has deleted.
func (r *Reconciler) cleanEntries(ctx context.Context, done []*intent.ServicePort) {
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
	e.recheck = r.cfg.StaleEntries.Recheck()
	if e.err = err; err == nil {
		e.retry = retry{}
		return
	}
	e.retry.failed()
}

// written reports whether every backend has written the last change of a port.
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

// entryProblems returns why stale entries may be left.
func (r *Reconciler) entryProblems() []model.Problem {
	if r.entries.err == nil {
		return nil
	}
	return []model.Problem{{
		Where: "conntrack",
		What:  fmt.Sprintf("%v; UDP clients may keep talking to endpoints that are gone, and this is tried again", r.entries.err),
	}}
}
