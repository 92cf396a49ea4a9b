package reconcile

import (
	"math/rand/v2"
	"time"
)

// deadline returns when a part of the loop has work to do, and whether it has any.
type deadline func() (at time.Time, any bool)

// deadlines returns those of all parts. Before the loop is ready, it only takes what
// arrives, and reports.
func (r *Reconciler) deadlines() []deadline {
	all := []deadline{r.queue.due, r.problems.due}
	if !r.ready() {
		return all
	}
	all = append(all, r.entries.due, r.cfg.Tracker.NextStep, r.handshakesDue, r.checksDue)
	for _, bs := range r.syncs {
		all = append(all, bs.due, bs.drift.due)
	}
	if ps := r.policies; ps != nil {
		all = append(all, ps.due, ps.drift.due)
	}
	return all
}

// nextDue returns when the next work is due if no change arrives before.
func (r *Reconciler) nextDue() time.Time {
	next := time.Now().Add(r.cfg.SyncPeriod)
	if r.ready() {
		next = r.nextFullSync
	}
	for _, due := range r.deadlines() {
		if at, any := due(); any {
			next = earlier(next, at)
		}
	}
	if gate := r.earliestSync(); next.Before(gate) {
		next = gate
	}
	return next
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// orNever returns a time as a deadline, zero as none.
func orNever(at time.Time) (time.Time, bool) { return at, !at.IsZero() }

// passed reports whether a time has come; zero never does.
func passed(at, now time.Time) bool { return !at.IsZero() && !now.Before(at) }

// The wait before the loop retries a failed sync. It doubles each time, with jitter, so
// that the nodes of a cluster do not retry together.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// retry is when to repeat what failed.
type retry struct {
	tries int // consecutive failures
	at    time.Time
}

// failed sets the time of the next try. A new failure does not delay the retry of an
// earlier one.
func (r *retry) failed() {
	now := time.Now()
	if r.at.After(now) {
		return
	}
	r.at = now.Add(backoff(r.tries))
	r.tries++
}

// backoff returns the wait after that many earlier failures: between half and all of
// firstRetry doubled each time.
func backoff(tries int) time.Duration {
	d := lastRetry
	if tries < 16 {
		d = min(firstRetry<<tries, lastRetry)
	}
	return d/2 + rand.N(d/2+1)
}
