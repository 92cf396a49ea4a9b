package reconcile

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
)

// queue holds changes until the loop drains it. It keeps only the newest state of each
// object, so that the number of existing and recently deleted objects bounds it.
type queue struct {
	wake chan struct{} // holds one token while changes wait

	mu      sync.Mutex
	pending pendingChanges
}

// pendingChanges is the content of a queue; a nil field holds no change.
type pendingChanges struct {
	delta    *model.Delta
	problems *[]model.Problem
	addrs    *[]netip.Addr
	serving  *[]model.Problem // of the agent's own servers
	egress   *egressFacts
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

func (q *queue) setServing(problems []model.Problem, now time.Time) {
	q.update(now, func(pending *pendingChanges) {
		ps := slices.Clone(problems)
		pending.serving = &ps
	})
}

// egressFacts are what SetEgress was called with.
type egressFacts struct {
	mode  egress.Mode
	facts egress.Facts
}

func (q *queue) setEgress(mode egress.Mode, facts egress.Facts, now time.Time) {
	q.update(now, func(pending *pendingChanges) { pending.egress = &egressFacts{mode, facts} })
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

// drain removes and returns all changes.
func (q *queue) drain() pendingChanges {
	q.mu.Lock()
	defer q.mu.Unlock()
	pending := q.pending
	q.pending = pendingChanges{}
	return pending
}

// due returns a time in the past if the queue holds changes, and whether it does.
func (q *queue) due() (time.Time, bool) { return orNever(q.oldest()) }

// oldest returns the arrival of the oldest change; zero if there is none.
func (q *queue) oldest() time.Time {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pending.since
}

// sizes counts the Services and slices in the queue.
func (q *queue) sizes() (services, endpointSlices int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pending.delta == nil {
		return 0, 0
	}
	return len(q.pending.delta.Services), len(q.pending.delta.Slices)
}

// mergeDelta merges src into dst, as if dst came first. It reads the maps of src and does
// not keep them.
func mergeDelta(dst *model.Delta, src model.Delta) {
	if src.Full {
		*dst = model.Delta{Full: true}
	}
	if src.NetworkPoliciesUnknown != nil {
		dst.NetworkPoliciesUnknown = src.NetworkPoliciesUnknown
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

// mergeMap merges src into dst. A full Delta does not list deleted objects.
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
