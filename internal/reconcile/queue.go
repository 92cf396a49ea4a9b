package reconcile

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// queue holds what arrived and was not taken in yet. It is bounded by the
// number of objects that exist or went away since the last take: of each, only
// the newest state is kept.
type queue struct {
	wake chan struct{} // holds one token while mail waits

	mu      sync.Mutex
	pending pendingChanges
}

// mail is the content of an inbox; a nil field holds nothing new.
type pendingChanges struct {
	delta    *model.Delta
	problems *[]model.Problem
	addrs    *[]netip.Addr
	since    time.Time // arrival of the oldest part
}

func newQueue() *queue {
	return &queue{wake: make(chan struct{}, 1)}
}

func (q *queue) deliver(d model.Delta, problems []model.Problem, now time.Time) {
	q.update(now, func(pending *pendingChanges) {
		if pending.delta == nil {
			pending.delta = &model.Delta{}
		}
		mergeDelta(pending.delta, d)
		if problems != nil {
			ps := slices.Clone(problems)
			pending.problems = &ps
		}
	})
}

func (q *queue) setAddrs(addrs []netip.Addr, now time.Time) {
	q.update(now, func(pending *pendingChanges) {
		a := slices.Clone(addrs)
		pending.addrs = &a
	})
}

func (q *queue) update(now time.Time, change func(*pendingChanges)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	change(&q.pending)
	if q.pending.since.IsZero() {
		q.pending.since = now
	}
	q.wakeUp()
}

// wakeUp wakes the loop.
func (q *queue) wakeUp() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// drain empties the inbox.
func (q *queue) drain() pendingChanges {
	q.mu.Lock()
	defer q.mu.Unlock()
	pending := q.pending
	q.pending = pendingChanges{}
	return pending
}

// waiting reports whether there is mail.
func (q *queue) waiting() bool { return !q.oldest().IsZero() }

// oldest is the arrival of the oldest mail, zero if there is none.
func (q *queue) oldest() time.Time {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending.since
}

// sizes counts the Services and slices that wait.
func (q *queue) sizes() (services, endpointSlices int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending.delta == nil {
		return 0, 0
	}
	return len(q.pending.delta.Services), len(q.pending.delta.Slices)
}

// mergeDelta makes dst what dst followed by src means. The maps of src stay
// the source's own: they are read, never kept.
func mergeDelta(dst *model.Delta, src model.Delta) {
	if src.Full {
		*dst = model.Delta{Full: true}
	}
	if src.PoliciesUnknown != nil {
		dst.PoliciesUnknown = src.PoliciesUnknown
	}
	if src.Unread != nil {
		dst.Unread = src.Unread
	}
	mergeMap(&dst.Services, src.Services, dst.Full)
	mergeMap(&dst.Slices, src.Slices, dst.Full)
	mergeMap(&dst.Nodes, src.Nodes, dst.Full)
	mergeMap(&dst.Pods, src.Pods, dst.Full)
	mergeMap(&dst.NetworkPolicies, src.NetworkPolicies, dst.Full)
	mergeMap(&dst.Namespaces, src.Namespaces, dst.Full)
	mergeMap(&dst.DoNotTrackPolicies, src.DoNotTrackPolicies, dst.Full)
}

// mergeMap puts src over dst. In a full delta what is gone is simply not named.
func mergeMap[K comparable, V any](dst *map[K]*V, src map[K]*V, full bool) {
	if *dst == nil {
		*dst = make(map[K]*V, len(src))
	}
	maps.Copy(*dst, src)
	if !full {
		return
	}
	for k, v := range src {
		if v == nil {
			delete(*dst, k)
		}
	}
}
