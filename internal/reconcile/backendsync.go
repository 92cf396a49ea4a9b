package reconcile

import (
	"context"
	"errors"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// backendSync is the state of one backend's sync. While full is set the next sync writes
// the whole state, so that no single change needs to be stored.
type backendSync struct {
	backend dataplane.Backend
	// unused is set while the backend serves no port. After Linger the next sync removes
	// what this or an earlier run left.
	unused bool
	full   bool
	err    error // error of the last sync as a whole; nil if it succeeded
	node   *intent.Node
	// failedNode is the Node that the backend could not write, and nodeErr why. The loop
	// retries it with the failed ports; everything else is written.
	failedNode *intent.Node
	nodeErr    error
	// pending holds the newest change of each port. One sync may write a part; see next.
	pending map[intent.PortID]pendingPort
	moves   []intent.Move // addresses that pending ports gain and lose
	part    int           // endpoints that one sync writes at most; 0: all
	// failed holds the ports that the backend could not write. The loop retries them on
	// their own, so that they do not delay other ports.
	failed map[intent.PortID]failure
	retry  retry

	drift     drift
	repairing bool // the full sync that is due repairs
}

// failure is a port that the backend could not write.
type failure struct {
	pendingPort
	err error
}

func newBackendSync(b dataplane.Backend) *backendSync {
	bs := &backendSync{
		backend: b,
		full:    true,
		pending: map[intent.PortID]pendingPort{},
		failed:  map[intent.PortID]failure{},
	}
	if p, ok := b.(dataplane.Partial); ok {
		bs.part = p.PartEndpoints()
	}
	return bs
}

// enqueue stores the newest change of a port.
func (bs *backendSync) enqueue(id intent.PortID, p pendingPort) {
	delete(bs.failed, id)
	bs.unused = bs.unused && p.port == nil
	if bs.full {
		return
	}
	if before, ok := bs.pending[id]; ok {
		p.endpoints = max(p.endpoints, before.endpoints)
		p.since = before.since
	}
	bs.pending[id] = p
}

// enqueueMoves stores which pending ports exchange addresses.
func (bs *backendSync) enqueueMoves(moves []intent.Move) {
	if !bs.full && bs.part > 0 {
		bs.moves = append(bs.moves, moves...)
	}
}

func (bs *backendSync) setNode(n *intent.Node) {
	bs.failedNode = nil
	if !bs.full {
		bs.node = n
	}
}

// requireFull replaces single changes by a full sync. Failed ports stay in failed until
// the full sync has succeeded.
func (bs *backendSync) requireFull() {
	bs.full = true
	bs.node, bs.failedNode, bs.moves = nil, nil, nil
	clear(bs.pending)
}

// due returns when the backend has something to write, and whether it has.
func (bs *backendSync) due() (time.Time, bool) {
	switch {
	case bs.full:
		return bs.retry.at, true
	case len(bs.pending) > 0 || bs.node != nil:
		return time.Time{}, true
	case len(bs.failed) > 0 || bs.failedNode != nil:
		return bs.retry.at, true
	}
	return time.Time{}, false
}

// changes returns what an incremental sync must write now, including failed ports that are
// due for a retry.
func (bs *backendSync) changes(now time.Time) (intent.Changes, map[intent.PortID]pendingPort) {
	if !now.Before(bs.retry.at) {
		for id, f := range bs.failed {
			bs.pending[id] = f.pendingPort
		}
		clear(bs.failed)
		if bs.node == nil {
			bs.node = bs.failedNode
		}
	}
	c, next := intent.Changes{Node: bs.node}, bs.next()
	for _, id := range slices.SortedFunc(maps.Keys(next), intent.PortID.Compare) {
		if p := next[id].port; p != nil {
			c.Upserts = append(c.Upserts, p)
		} else {
			c.Deletes = append(c.Deletes, id)
		}
	}
	return c, next
}

// sync writes the whole state or the pending changes to the backend, and records what is
// left to write. It returns the ports of this sync that the kernel now holds as requested.
func (bs *backendSync) sync(ctx context.Context, now time.Time, whole func() intent.State) (done []*intent.ServicePort) {
	var err error
	var written []*intent.ServicePort
	var tried map[intent.PortID]pendingPort
	var node *intent.Node
	if bs.full {
		s := whole()
		written, tried, node = s.Ports, byID(s.Ports), &s.Node
		err = bs.backend.Replace(ctx, s)
	} else {
		var c intent.Changes
		c, tried = bs.changes(now)
		written, node = c.Upserts, c.Node
		err = bs.backend.Apply(ctx, c)
	}
	if ctx.Err() != nil {
		// The context ended during the sync. Nothing retries, and the next start begins
		// with a full sync.
		return nil
	}
	part := partErrors(err)
	if err != nil && part == nil {
		bs.fail(err)
		return nil
	}
	if part == nil {
		part = &dataplane.PortErrors{}
	}
	bad := part.Errors
	if bs.full {
		clear(bs.failed)
	}
	bs.noteNode(node, part.Node)
	bs.full, bs.node, bs.err = false, nil, nil
	bs.forget(tried)
	for id, e := range bad {
		// A port that was not part of this sync must not count as deleted.
		if p, ok := tried[id]; ok {
			p.since = time.Time{} // its Problem reports it from now on
			bs.failed[id] = failure{p, e}
		}
	}
	if len(bad) > 0 || part.Node != nil {
		bs.retry.failed()
	} else if len(bs.failed) == 0 && bs.failedNode == nil {
		bs.retry = retry{}
	}
	return slices.DeleteFunc(slices.Clone(written), func(p *intent.ServicePort) bool {
		return bad[p.ID] != nil
	})
}

// lasting returns the error of the last sync, or of the Node; nil without one.
func (bs *backendSync) lasting() error {
	if bs.err != nil {
		return bs.err
	}
	return bs.nodeErr
}

// noteNode records whether the Node of a sync was written; nil: the sync had none.
func (bs *backendSync) noteNode(node *intent.Node, err error) {
	switch {
	case err != nil:
		bs.failedNode, bs.nodeErr = node, err
	case node != nil:
		bs.failedNode, bs.nodeErr = nil, nil
	}
}

// fail records that the kernel's state is unknown.
func (bs *backendSync) fail(err error) {
	bs.requireFull()
	bs.err = err
	bs.retry.failed()
}

// partErrors returns the errors of ports and of the Node; nil if the whole sync failed. A joined
// error that holds both counts as whole; errors.As would not notice.
func partErrors(err error) *dataplane.PortErrors {
	for e := err; e != nil; e = errors.Unwrap(e) {
		if pe, ok := e.(*dataplane.PortErrors); ok { //nolint:errorlint // errors.As looks into joined errors
			return pe
		}
	}
	return nil
}

func byID(ports []*intent.ServicePort) map[intent.PortID]pendingPort {
	m := make(map[intent.PortID]pendingPort, len(ports))
	for _, p := range ports {
		m[p.ID] = pendingPort{port: p, endpoints: len(p.Endpoints)}
	}
	return m
}
