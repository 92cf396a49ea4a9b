package reconcile

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// inbox holds what arrived and was not taken in yet. It is bounded by the
// number of objects that exist or went away since the last take: of each, only
// the newest state is kept.
type inbox struct {
	wake chan struct{} // holds one token while mail waits

	mu   sync.Mutex
	mail mail
}

// mail is the content of an inbox; a nil field holds nothing new.
type mail struct {
	delta    *model.Delta
	problems *[]model.Problem
	addrs    *[]netip.Addr
	since    time.Time // arrival of the oldest part
}

func newInbox() *inbox {
	return &inbox{wake: make(chan struct{}, 1)}
}

func (b *inbox) deliver(d model.Delta, problems []model.Problem, now time.Time) {
	b.put(now, func(m *mail) {
		if m.delta == nil {
			m.delta = &model.Delta{}
		}
		mergeDelta(m.delta, d)
		if problems != nil {
			ps := slices.Clone(problems)
			m.problems = &ps
		}
	})
}

func (b *inbox) setAddrs(addrs []netip.Addr, now time.Time) {
	b.put(now, func(m *mail) {
		a := slices.Clone(addrs)
		m.addrs = &a
	})
}

func (b *inbox) put(now time.Time, change func(*mail)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	change(&b.mail)
	if b.mail.since.IsZero() {
		b.mail.since = now
	}
	b.nudge()
}

// nudge wakes the loop.
func (b *inbox) nudge() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// take empties the inbox.
func (b *inbox) take() mail {
	b.mu.Lock()
	defer b.mu.Unlock()
	m := b.mail
	b.mail = mail{}
	return m
}

// waiting reports whether there is mail.
func (b *inbox) waiting() bool { return !b.oldest().IsZero() }

// oldest is the arrival of the oldest mail, zero if there is none.
func (b *inbox) oldest() time.Time {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mail.since
}

// sizes counts the Services and slices that wait.
func (b *inbox) sizes() (services, endpointSlices int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mail.delta == nil {
		return 0, 0
	}
	return len(b.mail.delta.Services), len(b.mail.delta.Slices)
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
