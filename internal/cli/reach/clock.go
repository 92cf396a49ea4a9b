package reach

import (
	"context"
	"net/http/httptrace"
	"slices"
	"sync"
	"time"
)

// Clock is the difference between a node's clock and this machine's.
type Clock struct {
	Ahead time.Duration // of the node's clock; negative: it is behind
	Error time.Duration // at most: half of the round trip
}

// RoundTrip records when a request left, and when its answer arrived.
type RoundTrip struct {
	mu             sync.Mutex
	sent, received time.Time
}

// Timed returns a context for one request, which it times. Connecting to the agent is not
// part of the time.
func Timed(ctx context.Context) (context.Context, *RoundTrip) {
	t := &RoundTrip{}
	now := func(at *time.Time) {
		t.mu.Lock()
		defer t.mu.Unlock()
		*at = time.Now()
	}
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn:              func(httptrace.GotConnInfo) { now(&t.sent) },
		GotFirstResponseByte: func() { now(&t.received) },
	}), t
}

// Clock returns the difference of a clock that showed a time in the answer.
func (t *RoundTrip) Clock(node time.Time) Clock {
	t.mu.Lock()
	defer t.mu.Unlock()
	half := t.received.Sub(t.sent) / 2
	return Clock{Ahead: node.Sub(t.sent.Add(half)), Error: half}
}

// leastSkew is the least difference that counts: NTP keeps clocks much closer.
const leastSkew = time.Second

// Skews returns how far each clock is ahead of the median of them all, and how far this
// machine's is. A difference that the round trips may explain, or below a second, is 0.
func Skews(clocks []Clock) (nodes []time.Duration, own time.Duration) {
	if len(clocks) == 0 {
		return nil, 0
	}
	sorted := slices.SortedFunc(slices.Values(clocks), func(a, b Clock) int { return int(max(-1, min(1, a.Ahead-b.Ahead))) })
	median := sorted[(len(sorted)-1)/2]
	for _, c := range clocks {
		nodes = append(nodes, beyond(c.Ahead-median.Ahead, c.Error+median.Error))
	}
	return nodes, beyond(-median.Ahead, median.Error)
}

// beyond returns a difference if it is certain and counts, else 0.
func beyond(d, err time.Duration) time.Duration {
	if d.Abs()-err < leastSkew {
		return 0
	}
	return d
}
