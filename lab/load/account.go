package load

import (
	"errors"
	"fmt"
	"time"
)

var (
	errClosed  = errors.New("closed")
	errTimeout = errors.New("timeout")
)

// drainTime bounds how long a run waits after its end for what is under way.
const drainTime = int64(2 * time.Second)

// finish takes a complete response.
func (l *loop) finish(i int32, s *slot, closes bool) {
	now := l.now()
	if closes {
		l.drop(s)
	}
	s.state = idle
	l.ready.push(i)
	if l.cfg.Kind != UDP && (s.resp.status < 200 || s.resp.status > 299) {
		l.count(s.intended, now, fmt.Sprintf("status %d", s.resp.status))
		return
	}
	l.count(s.intended, now, "")
}

// fail gives a request up. Its socket is closed in any case: a late answer
// must not be taken for that of the next request.
func (l *loop) fail(i int32, s *slot, err error) {
	now := l.now()
	l.drop(s)
	s.state = resting
	s.sent = now
	l.resters++
	l.count(s.intended, now, errorKind(err))
}

// count notes one request that ended, unless it belongs to the warm-up.
func (l *loop) count(intended, now int64, failure string) {
	if intended < l.warm || !l.shared.take() {
		return
	}
	if failure == "" {
		l.answered++
	} else {
		l.errors[failure]++
		if l.cfg.Rate == 0 {
			return
		}
	}
	// The histogram's upper end is minutes away: no error to handle.
	_ = l.hist.RecordValue(now - intended)
}

// sweep fails requests that took too long and wakes slots that rested.
func (l *loop) sweep(now int64) {
	if now-l.swept < sweepEvery {
		return
	}
	l.swept = now
	for i := range l.slots {
		s := &l.slots[i]
		switch s.state {
		case connecting, waiting:
			if now-s.sent > int64(l.cfg.Timeout) {
				l.fail(int32(i), s, errTimeout)
			}
		case resting:
			if now-s.sent > restAfter {
				s.state = idle
				l.resters--
				l.ready.push(int32(i))
			}
		}
	}
}

// busy is the number of requests under way.
func (l *loop) busy() int { return len(l.slots) - l.ready.len() - l.resters }

// drain ends a run at the time end. A closed loop forgets what is under way. An
// open loop waits for it, because its slowest requests are among it, and counts
// those that were due but found no free connection.
func (l *loop) drain(end int64) {
	if l.cfg.Rate == 0 {
		return
	}
	if !l.shared.stop.Load() {
		l.issue(end - 1) // fell due while the loop was on its way here
	}
	for ; l.due() < end; l.issued++ {
		l.count(l.due(), end, "not sent")
	}
	limit := end + min(drainTime, int64(l.cfg.Timeout)+sweepEvery)
	for now := l.now(); l.busy() > 0 && now < limit; now = l.now() {
		l.handleEvents(min(sweepEvery, limit-now))
		l.sweep(l.now())
	}
	for i := range l.slots {
		if s := &l.slots[i]; s.state == connecting || s.state == waiting {
			l.fail(int32(i), s, errTimeout)
		}
	}
}

// ring is a queue of slot numbers of fixed capacity.
type ring struct {
	items      []int32
	head, size int
}

func newRing(capacity int) ring { return ring{items: make([]int32, capacity)} }

func (r *ring) len() int { return r.size }

// push adds at the end. The caller never holds more slots than there are.
func (r *ring) push(v int32) {
	r.items[(r.head+r.size)%len(r.items)] = v
	r.size++
}

// pop takes the one that waited longest.
func (r *ring) pop() int32 {
	v := r.items[r.head]
	r.head = (r.head + 1) % len(r.items)
	r.size--
	return v
}
