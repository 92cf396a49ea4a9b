// Package flowlog keeps the last flow events of a node in memory, with names, and hands them
// to readers. Its memory does not depend on the number of events or on the speed of readers:
//
//	dataplane.FlowReporter ──Add──> names ──> ring of the last events ──Next──> readers
//
// A reader has a position in the ring and no queue of its own. A reader that is too slow
// misses events, and learns how many of those that its filter selects.
package flowlog

import (
	"context"
	"errors"
	"net/netip"
	"sync"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	// defaultEvents is the number of events in memory, of some 400 bytes each.
	defaultEvents = 16384
	// maxReaders is the maximum number of readers at a time.
	maxReaders = 64
	// atOnce is the maximum number of events that Next returns, and of events that it looks
	// at while writers wait.
	atOnce       = 256
	mostLookedAt = 2048
)

// errTooManyReaders is the error of Watch beyond the maximum number of readers.
var errTooManyReaders = errors.New("watch flow events: 64 readers watch already: end one of them")

// Peer is an end of a flow.
type Peer struct {
	Address netip.AddrPort // invalid: unknown
	Owner
}

// Owner is what has an address.
type Owner struct {
	Pod  string // namespace/name; "": unknown
	Node string // "": unknown
}

// Event is an event with names. The fields are those of FlowEvent and Flow in
// api/proto/spillway/node/v1alpha1/node.proto.
type Event struct {
	Kind   dataplane.FlowEventKind
	Time   time.Time
	Reason string
	Flow   Flow
}

// Flow is a flow of a Service's client.
type Flow struct {
	Node                   string // that made the decision
	Protocol               model.Protocol
	Client                 Peer
	ServiceAddress         Peer
	Namespace, Service     string // "": unknown
	PortName               string
	Endpoint               Peer // its address is invalid if none was chosen
	BySocket               bool
	Cgroup                 uint64    // as in dataplane.EventFlow
	Opened, LastSeen       time.Time // zero: unknown
	State                  string
	BytesToEndpoint        uint64
	BytesToClient          uint64
	PacketsToEndpoint      uint64
	PacketsToClient        uint64
	Handshake, SmoothedRTT time.Duration // 0: unknown
}

// Config configures a Log.
type Config struct {
	Node   string // name of this node
	Events int    // in memory; 0: 16,384
	// Owners returns what has the addresses, in their order. It must not wait long: the
	// kernel's ring fills meanwhile. Nil: owners are unknown.
	Owners func(ctx context.Context, addrs []netip.Addr) ([]Owner, error)
}

// Log has the last events. Any goroutine may call its methods.
type Log struct {
	cfg   Config
	names owners

	mu      sync.Mutex
	ring    []Event
	next    uint64 // number of the next event; event n is at ring[n % len(ring)]
	readers map[*Reader]struct{}
}

// New returns an empty log.
func New(cfg Config) *Log {
	if cfg.Events <= 0 {
		cfg.Events = defaultEvents
	}
	return &Log{
		cfg: cfg, names: newOwners(cfg.Owners), ring: make([]Event, cfg.Events),
		readers: map[*Reader]struct{}{},
	}
}

// Add adds events in the order in which they happened.
func (l *Log) Add(events []dataplane.FlowEvent) {
	addrs := make([]netip.Addr, 0, 2*len(events))
	for i := range events {
		addrs = append(addrs, events[i].Flow.Client.Addr(), events[i].Flow.Endpoint.Addr())
	}
	owners := l.names.of(addrs)
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range events {
		l.makeRoom()
		l.write(&l.ring[l.next%uint64(len(l.ring))], &events[i], owners[2*i], owners[2*i+1])
		l.next++
	}
	for r := range l.readers {
		select {
		case r.wake <- struct{}{}:
		default:
		}
	}
}

// makeRoom counts the oldest event for those who have not read it. The caller holds mu.
func (l *Log) makeRoom() {
	if l.next < uint64(len(l.ring)) {
		return
	}
	oldest := l.next - uint64(len(l.ring))
	for r := range l.readers {
		if r.next > oldest {
			continue
		}
		if r.filter.matches(&l.ring[oldest%uint64(len(l.ring))]) {
			r.missed++
		}
		r.next = oldest + 1
	}
}

// write stores an event, with the owners of the client and of the endpoint.
func (l *Log) write(to *Event, e *dataplane.FlowEvent, client, endpoint Owner) {
	f := &e.Flow
	*to = Event{Kind: e.Kind, Time: e.Time, Reason: e.Reason, Flow: Flow{
		Node: l.cfg.Node, Protocol: f.Protocol,
		Client: Peer{f.Client, client}, ServiceAddress: Peer{Address: f.ServiceAddress}, Endpoint: Peer{f.Endpoint, endpoint},
		Namespace: f.Port.Service.Namespace, Service: f.Port.Service.Name, PortName: f.Port.Port,
		BySocket: f.BySocket, Cgroup: f.Cgroup, Opened: f.Opened, LastSeen: f.LastSeen,
		BytesToEndpoint: f.BytesToEndpoint, BytesToClient: f.BytesToClient,
		PacketsToEndpoint: f.PacketsToEndpoint, PacketsToClient: f.PacketsToClient,
		Handshake: f.Handshake, SmoothedRTT: f.SmoothedRTT,
	}}
}

// Reader reads events from one position on. One goroutine at a time may call its methods.
type Reader struct {
	log    *Log
	filter Filter
	wake   chan struct{}

	// Guarded by Log.mu.
	next   uint64
	end    uint64 // Log.next when the reader was made
	missed uint64
	events []Event // memory of the last answer
}

// Watch returns a reader of the events that a filter selects: those in memory since a time,
// or, if that is zero, those to come. The caller must close it.
func (l *Log) Watch(filter Filter, since time.Time) (*Reader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.readers) >= maxReaders {
		return nil, errTooManyReaders
	}
	r := &Reader{log: l, filter: filter, wake: make(chan struct{}, 1), next: l.next, end: l.next}
	if !since.IsZero() {
		// Events of sweeps are late, so times are not sorted: all are compared.
		r.next = l.next - min(l.next, uint64(len(l.ring)))
		r.filter.since = since
	}
	l.readers[r] = struct{}{}
	return r, nil
}

// Close ends the reader.
func (r *Reader) Close() {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	delete(r.log.readers, r)
}

// Missed returns the number of events that the reader has missed since the last call of
// Missed or Next.
func (r *Reader) Missed() (missed uint64) {
	r.log.mu.Lock()
	defer r.log.mu.Unlock()
	missed, r.missed = r.missed, 0
	return missed
}

// Next waits for events, and returns some, and the number of events that the reader has
// missed since the last call. The events are valid until the next call. It may return no events
// if there are missed ones. The error is that of ctx.
func (r *Reader) Next(ctx context.Context) (events []Event, missed uint64, err error) {
	return r.NextOr(ctx, nil)
}

// NextOr is Next, and returns without events when another channel is closed.
func (r *Reader) NextOr(ctx context.Context, other <-chan struct{}) (events []Event, missed uint64, err error) {
	for {
		var more bool
		events, missed, more = r.take()
		if len(events) > 0 || missed > 0 {
			return events, missed, nil
		}
		if more {
			continue
		}
		select {
		case <-r.wake:
		case <-other:
			return nil, 0, nil
		case <-ctx.Done():
			return nil, 0, ctx.Err()
		}
	}
}

// Remembered calls visit with the events that were in memory when the reader was made, some at a time,
// and with the number that it has missed. The events are valid during the call.
func (r *Reader) Remembered(visit func(events []Event, missed uint64) error) error {
	for more := true; more; {
		var events []Event
		var missed uint64
		events, missed, _ = r.take()
		if len(events) > 0 || missed > 0 {
			if err := visit(events, missed); err != nil {
				return err
			}
		}
		r.log.mu.Lock()
		more = r.next < r.end
		r.log.mu.Unlock()
	}
	return nil
}

// Visit calls visit with the events in memory since a time that a filter selects. The events
// are valid during the call. Visit does not wait for more events, and keeps writers waiting
// no longer than a reader does.
func (l *Log) Visit(filter Filter, since time.Time, visit func(*Event)) error {
	r, err := l.Watch(filter, since)
	if err != nil {
		return err
	}
	defer r.Close()
	// Writers may be faster than this reader, so it reads as many events as fit into memory.
	for range len(l.ring)/atOnce + 1 {
		events, _, more := r.take()
		for i := range events {
			visit(&events[i])
		}
		if !more {
			break
		}
	}
	return nil
}

// take returns the next events. more says that there are events that it has not looked at.
func (r *Reader) take() (events []Event, missed uint64, more bool) {
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	r.events = r.events[:0]
	for range mostLookedAt {
		if r.next >= l.next || len(r.events) == atOnce {
			break
		}
		if e := &l.ring[r.next%uint64(len(l.ring))]; r.filter.matches(e) {
			r.events = append(r.events, *e)
		}
		r.next++
	}
	missed, r.missed = r.missed, 0
	return r.events, missed, r.next < l.next
}
