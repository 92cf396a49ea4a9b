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

// drainTime limits how long a run waits after its end for active requests.
const drainTime = int64(2 * time.Second)

// finish handles a complete response.
func (l *loop) finish(i int32, s *slot, closes bool) {
	now := l.now()
	failure := ""
	switch {
	case l.cfg.datagrams():
	case l.cfg.AnyStatus:
		if s.intended >= l.warm {
			l.statuses[s.resp.status]++
		}
	case s.resp.status < 200 || s.resp.status > 299:
		failure = fmt.Sprintf("status %d", s.resp.status)
	}
	l.count(s, now, failure)
	if closes {
		l.drop(s)
	}
	if l.cfg.Delay > 0 {
		l.pause(s, now, int64(l.cfg.Delay))
		return
	}
	s.state = idle
	l.ready.push(i)
}

// fail ends a request without an answer. It always closes the socket: a late answer must
// not count for the next request.
func (l *loop) fail(s *slot, err error) {
	now := l.now()
	l.count(s, now, errorKind(err))
	l.drop(s)
	l.pause(s, now, max(restAfter, int64(l.cfg.Delay)))
}

// pause keeps a slot from its next request for a while.
func (l *loop) pause(s *slot, now, rest int64) {
	s.state, s.sent, s.rest = resting, now, rest
	l.resters++
}

// count records one ended request, unless it belongs to the warm-up.
func (l *loop) count(s *slot, now int64, failure string) {
	if s.intended < l.warm || !l.shared.take() {
		return
	}
	if now-s.intended >= int64(time.Second) {
		l.countSlow(s, now, failure)
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
	_ = l.hist.RecordValue(now - s.intended)
}

// countSlow records a request that a lost packet or two may have delayed. The kernel
// sends a SYN again after 1 s and after 3 s.
func (l *loop) countSlow(s *slot, now int64, failure string) {
	took := time.Duration(now - s.intended)
	l.slow[0]++
	if took >= 3*time.Second {
		l.slow[1]++
	}
	if len(l.slowList) == maxSlow {
		return
	}
	l.slowList = append(l.slowList, SlowRequest{
		At: time.Duration(s.intended - l.warm).Seconds(), Seconds: took.Seconds(), Source: localAddr(s.fd), Error: failure})
}

// sweep fails requests that took too long and wakes slots that rested.
func (l *loop) sweep(now int64) {
	if now-l.swept < sweepEvery {
		return
	}
	l.swept = now
	if l.cfg.Progress != nil {
		l.showProgress()
	}
	for i := range l.slots {
		s := &l.slots[i]
		switch s.state {
		case connecting, waiting:
			if now-s.sent > int64(l.cfg.Timeout) {
				l.fail(s, errTimeout)
			}
		case resting:
			if now-s.sent > s.rest {
				s.state = idle
				l.resters--
				l.ready.push(int32(i))
			}
		}
	}
}

// busy returns the number of active requests.
func (l *loop) busy() int { return len(l.slots) - l.ready.len() - l.resters }

// abandon records the unanswered requests at the end of a closed loop. Such a request is
// neither answered nor failed, but it is slow if it has taken more than a second.
func (l *loop) abandon(end int64) {
	for i := range l.slots {
		s := &l.slots[i]
		if s.state != connecting && s.state != waiting || s.intended < l.warm {
			continue
		}
		l.underWay++
		if end-s.intended >= int64(time.Second) {
			l.countSlow(s, end, "under way at the end")
		}
	}
}

// drain ends a run at the time end. A closed loop abandons pending requests. An open
// loop waits for them, because they include its slowest requests, and counts due
// requests that found no free connection.
func (l *loop) drain(end int64) {
	if l.cfg.Rate == 0 {
		l.abandon(end)
		return
	}
	if !l.shared.stop.Load() {
		l.issue(end - 1) // fell due meanwhile
	}
	for ; l.due() < end; l.issued++ {
		l.count(&slot{fd: -1, intended: l.due()}, end, "not sent")
	}
	limit := end + min(drainTime, int64(l.cfg.Timeout)+sweepEvery)
	for now := l.now(); l.busy() > 0 && now < limit; now = l.now() {
		l.handleEvents(min(sweepEvery, limit-now))
		l.sweep(l.now())
	}
	for i := range l.slots {
		if s := &l.slots[i]; s.state == connecting || s.state == waiting {
			l.fail(s, errTimeout)
		}
	}
}

func (l *loop) showProgress() {
	l.seenAnswered.Store(l.answered)
	var failed int64
	for _, n := range l.errors {
		failed += n
	}
	l.seenFailed.Store(failed)
}

// ring is a queue of slot numbers of fixed capacity.
type ring struct {
	items      []int32
	head, size int
}

func newRing(capacity int) ring { return ring{items: make([]int32, capacity)} }

func (r *ring) len() int { return r.size }

// push adds at the end. The caller never has more slots than the capacity.
func (r *ring) push(v int32) {
	r.items[(r.head+r.size)%len(r.items)] = v
	r.size++
}

// pop removes the slot that waited longest.
func (r *ring) pop() int32 {
	v := r.items[r.head]
	r.head = (r.head + 1) % len(r.items)
	r.size--
	return v
}
