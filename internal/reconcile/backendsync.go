package reconcile

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// The wait before a failed sync is tried again: doubled each time, with jitter
// so that the nodes of a cluster do not come back as one.
const (
	firstRetry = 250 * time.Millisecond
	lastRetry  = 30 * time.Second
)

// lane is one backend with what it has still to be told. While full is set the
// whole state will be written, so no single change needs to be remembered.
type backendSync struct {
	backend dataplane.Backend
	// unused: it carries no port, and what it or an earlier run left goes once the
	// last answers are through.
	unused bool
	full   bool
	err    error // why the last sync as a whole failed; nil if it did not
	node   *intent.Node
	// pending holds the newest wish for each port, nil for "take it away".
	pending map[intent.PortID]*intent.ServicePort
	// failed holds the ports that the backend could not write; they are tried
	// again by themselves, so that they hold up nobody else.
	failed  map[intent.PortID]failure
	tries   int // failures in a row
	retryAt time.Time

	drifted   atomic.Bool // the backend heard of a change; see drift.go
	repairAt  time.Time   // when to look what it was; zero: nothing to look for
	repairing bool        // the full sync that is due does so
	calmUntil time.Time   // no such full sync before
}

// failure is a port that could not be written.
type failure struct {
	port *intent.ServicePort // nil: it could not be taken away
	err  error
}

func newBackendSync(b dataplane.Backend) *backendSync {
	return &backendSync{
		backend: b,
		full:    true,
		pending: map[intent.PortID]*intent.ServicePort{},
		failed:  map[intent.PortID]failure{},
	}
}

// enqueue notes the newest wish for a port; nil takes it away.
func (bs *backendSync) enqueue(id intent.PortID, p *intent.ServicePort) {
	delete(bs.failed, id)
	bs.unused = bs.unused && p == nil
	if !bs.full {
		bs.pending[id] = p
	}
}

func (bs *backendSync) setNode(n *intent.Node) {
	if !bs.full {
		bs.node = n
	}
}

// requireFull forgets single changes in favour of the whole state. Ports that
// failed stay known as such until the whole state has been written.
func (bs *backendSync) requireFull() {
	bs.full = true
	bs.node = nil
	clear(bs.pending)
}

// due says when the lane has something to write, and whether it has at all.
func (bs *backendSync) due() (time.Time, bool) {
	switch {
	case bs.full:
		return bs.retryAt, true
	case len(bs.pending) > 0 || bs.node != nil:
		return time.Time{}, true
	case len(bs.failed) > 0:
		return bs.retryAt, true
	}
	return time.Time{}, false
}

// changes is what an incremental sync must write now. Ports that failed join
// when their time has come.
func (bs *backendSync) changes(now time.Time) intent.Changes {
	if !now.Before(bs.retryAt) {
		for id, f := range bs.failed {
			bs.pending[id] = f.port
		}
		clear(bs.failed)
	}
	c := intent.Changes{Node: bs.node}
	for _, id := range slices.SortedFunc(maps.Keys(bs.pending), intent.PortID.Compare) {
		if p := bs.pending[id]; p != nil {
			c.Upserts = append(c.Upserts, p)
		} else {
			c.Deletes = append(c.Deletes, id)
		}
	}
	return c
}

// sync writes to the backend, either the whole state or what changed, and
// notes what is left to do. It returns the ports that are now in the kernel as
// wanted and were part of this sync.
func (bs *backendSync) sync(ctx context.Context, now time.Time, whole func() intent.State) (done []*intent.ServicePort) {
	var err error
	var written []*intent.ServicePort
	tried := bs.pending
	if bs.full {
		s := whole()
		written, tried = s.Ports, byID(s.Ports)
		err = bs.backend.Replace(ctx, s)
	} else {
		c := bs.changes(now)
		written = c.Upserts
		err = bs.backend.Apply(ctx, c)
	}
	if ctx.Err() != nil {
		// Stopped in the middle: nobody retries, and the next start begins
		// with a full sync.
		return nil
	}
	bad, single := portErrors(err)
	if err != nil && !single {
		bs.fail(err)
		return nil
	}
	if bs.full {
		clear(bs.failed)
	}
	bs.full, bs.node, bs.err = false, nil, nil
	bs.pending = map[intent.PortID]*intent.ServicePort{}
	for id, e := range bad {
		// A port that was not part of this sync is not taken for a deleted one.
		if p, ok := tried[id]; ok {
			bs.failed[id] = failure{port: p, err: e}
		}
	}
	bs.reschedule(len(bad) > 0)
	return slices.DeleteFunc(slices.Clone(written), func(p *intent.ServicePort) bool {
		return bad[p.ID] != nil
	})
}

// fail notes that nothing is known about what the kernel holds now.
func (bs *backendSync) fail(err error) {
	bs.requireFull()
	bs.err = err
	bs.reschedule(true)
}

// reschedule sets the time of the next retry.
func (bs *backendSync) reschedule(failed bool) {
	if !failed {
		if len(bs.failed) == 0 {
			bs.tries, bs.retryAt = 0, time.Time{}
		}
		return
	}
	now := time.Now()
	if bs.retryAt.After(now) {
		return // a port that fails only now does not put off the others
	}
	bs.retryAt = now.Add(backoff(bs.tries))
	bs.tries++
}

// backoff is the wait after so many earlier failures: between half and all of
// firstRetry doubled each time.
func backoff(tries int) time.Duration {
	d := lastRetry
	if tries < 16 {
		d = min(firstRetry<<tries, lastRetry)
	}
	return d/2 + rand.N(d/2+1)
}

// portErrors tells errors of single ports from those of a whole sync. A joined
// error that holds both counts as whole, so errors.As would say too much.
func portErrors(err error) (map[intent.PortID]error, bool) {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if pe, ok := e.(*dataplane.PortErrors); ok {
			return pe.Errors, true
		}
	}
	return nil, false
}

func byID(ports []*intent.ServicePort) map[intent.PortID]*intent.ServicePort {
	m := make(map[intent.PortID]*intent.ServicePort, len(ports))
	for _, p := range ports {
		m[p.ID] = p
	}
	return m
}
