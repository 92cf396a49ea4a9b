package flows

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// eventBatch is the maximum number of events that one call of the reporter gets.
const eventBatch = 512

// The agent reads at these intervals: the longer one while there are no events.
const (
	eventsInterval    = 50 * time.Millisecond
	maxEventsInterval = 400 * time.Millisecond
)

// eventQueue are the events on their path from the kernel to the reporter.
type eventQueue struct {
	open     openFlows
	demand   demand
	received [dataplane.FlowDropped + 1]atomic.Uint64 // by kind

	mu    sync.Mutex
	swept []dataplane.FlowEvent // of finished sweeps
	read  chan struct{}         // closed, and made anew, when the ring was read to its end; nil: none waits
}

var _ dataplane.FlowReporter = (*Table)(nil)

// ReportFlows implements dataplane.FlowReporter. With EventsOff it waits for ctx.
func (t *Table) ReportFlows(ctx context.Context, report func([]dataplane.FlowEvent)) error {
	if t.cfg.FlowEvents == objects.EventsOff {
		<-ctx.Done()
		return ctx.Err()
	}
	ring, err := ringbuf.NewReader(t.m(objects.TCMapEvents))
	if err != nil {
		return fmt.Errorf("read flow events: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = ring.Close() })()
	defer ring.Close()
	batch := make([]dataplane.FlowEvent, 0, eventBatch)
	var record ringbuf.Record
	wait := eventsInterval
	for ctx.Err() == nil {
		clock := newEventClock()
		ring.SetDeadline(time.Now().Add(wait))
		for len(batch) < eventBatch && err == nil {
			if err = ring.ReadInto(&record); err == nil {
				batch = t.decodeEvent(batch, record.RawSample, clock)
			}
		}
		atEnd := errors.Is(err, os.ErrDeadlineExceeded)
		if err != nil && !atEnd {
			if ctx.Err() != nil {
				break
			}
			return fmt.Errorf("read flow events: %w", err)
		}
		err = nil
		batch = t.events.takeSwept(batch)
		if wait = min(2*wait, maxEventsInterval); len(batch) > 0 {
			wait = eventsInterval
			t.events.count(batch)
			report(batch)
		}
		if atEnd {
			t.events.wakeWaiting()
		}
		batch = batch[:0]
	}
	return ctx.Err()
}

// CatchUp implements dataplane.FlowReporter. The end of the ring that is reached first may be older
// than the call.
func (t *Table) CatchUp(ctx context.Context) {
	if t.cfg.FlowEvents == objects.EventsOff {
		return
	}
	for range 2 {
		select {
		case <-t.events.nextEnd():
		case <-ctx.Done():
			return
		}
	}
}

// nextEnd returns a channel that is closed when the ring was read to its end, and that was reported.
func (e *eventQueue) nextEnd() <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.read == nil {
		e.read = make(chan struct{})
	}
	return e.read
}

func (e *eventQueue) wakeWaiting() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.read != nil {
		close(e.read)
		e.read = nil
	}
}

func (e *eventQueue) count(batch []dataplane.FlowEvent) {
	for i := range batch {
		if kind := batch[i].Kind; int(kind) < len(e.received) {
			e.received[kind].Add(1)
		}
	}
}

// addSwept stores the events of a finished sweep for the reader, if there is one.
func (e *eventQueue) addSwept(events []dataplane.FlowEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	room := max(openFlowsMax-len(e.swept), 0)
	e.open.lost.Add(uint64(max(len(events)-room, 0)))
	e.swept = append(e.swept, events[:min(room, len(events))]...)
}

// takeSwept appends the events of finished sweeps.
func (e *eventQueue) takeSwept(batch []dataplane.FlowEvent) []dataplane.FlowEvent {
	e.mu.Lock()
	defer e.mu.Unlock()
	batch = append(batch, e.swept...)
	e.swept = nil
	return batch
}

// decodeEvent appends the event of a record, and the end of the flow that it replaces. A record of
// another layout, which an older program has written, is left out.
func (t *Table) decodeEvent(batch []dataplane.FlowEvent, raw []byte, clock eventClock) []dataplane.FlowEvent {
	var e objects.TCEvent
	if len(raw) < len(objects.Bytes(&e)) {
		return batch
	}
	copy(objects.Bytes(&e), raw)
	event := t.flowEvent(&e, clock)
	if !event.Flow.BySocket {
		key := flowKey{event.Flow.Protocol, event.Flow.Client, event.Flow.ServiceAddress}
		switch event.Kind {
		case dataplane.FlowOpened:
			if former, replaced := t.events.open.add(key, &event.Flow); replaced {
				batch = append(batch, ended(former, dataplane.EndEvicted, event.Time))
			}
		case dataplane.FlowAnswered:
			t.events.open.answered(key, event.Flow.Handshake)
		case dataplane.FlowClosed:
			event.Flow.Handshake = t.events.open.remove(key, &event.Flow)
		}
	}
	return append(batch, event)
}

// Decode appends the event of a record of the ring, and the end of the flow that it replaces.
func (t *Table) Decode(batch []dataplane.FlowEvent, record []byte) []dataplane.FlowEvent {
	return t.decodeEvent(batch, record, newEventClock())
}

// TakeSwept appends the events of finished sweeps, which the reader has not taken yet.
func (t *Table) TakeSwept(batch []dataplane.FlowEvent) []dataplane.FlowEvent {
	return t.events.takeSwept(batch)
}

func ended(f dataplane.EventFlow, reason string, at time.Time) dataplane.FlowEvent {
	return dataplane.FlowEvent{Kind: dataplane.FlowClosed, Time: at, Reason: reason, Flow: f}
}

// flowEvent converts an event. The names of verdicts are those of the counters.
func (t *Table) flowEvent(e *objects.TCEvent, clock eventClock) dataplane.FlowEvent {
	addr := func(a objects.TCAddr, port uint16) netip.AddrPort {
		if a == (objects.TCAddr{}) && port == 0 {
			return netip.AddrPort{}
		}
		return netip.AddrPortFrom(objects.FromAddr(a, e.Family), objects.ToPort(port))
	}
	out := dataplane.FlowEvent{Kind: dataplane.FlowEventKind(e.Kind), Time: clock.wall(int64(e.Time))}
	f := &out.Flow
	f.Protocol, f.BySocket = model.Protocol(e.Proto), e.BySocket != 0
	f.Client, f.ServiceAddress, f.Endpoint = addr(e.Client, e.ClientPort), addr(e.ServiceAddr, e.ServicePort), addr(e.Endpoint, e.EndpointPort)
	f.Port, _ = t.services.Port(e.Service)
	f.LastSeen = out.Time
	f.Handshake, f.SmoothedRTT = time.Duration(e.Handshake), time.Duration(e.Srtt)*time.Microsecond
	f.PacketsToEndpoint, f.PacketsToClient = e.Packets[0], e.Packets[1]
	f.BytesToEndpoint, f.BytesToClient = e.Bytes[0], e.Bytes[1]
	switch out.Kind {
	case dataplane.FlowOpened:
		f.Opened = out.Time
	case dataplane.FlowAnswered:
		f.Opened = out.Time.Add(-f.Handshake)
	case dataplane.FlowClosed:
		out.Reason = endReason(objects.TCEventEnd(e.End))
		if e.Opened != 0 {
			f.Opened = clock.coarse(e.Opened)
		} else if f.BySocket && e.Lasted < math.MaxUint32 {
			f.Opened = out.Time.Add(-time.Duration(e.Lasted) * time.Millisecond)
		}
	default:
		if f.BySocket { // a union: struct event of bpf/abi.h
			f.Cgroup, f.Handshake = e.Handshake, 0
		}
		if int(e.Verdict) < len(t.objects.Verdicts) {
			out.Reason = t.objects.Verdicts[e.Verdict]
		}
	}
	return out
}

func endReason(end objects.TCEventEnd) string {
	switch end {
	case objects.TCEventEndEVENT_END_FIN:
		return dataplane.EndFIN
	case objects.TCEventEndEVENT_END_RST:
		return dataplane.EndRST
	case objects.TCEventEndEVENT_END_TIMEOUT:
		return dataplane.EndTimeout
	case objects.TCEventEndEVENT_END_MOVED:
		return dataplane.EndEndpointGone
	case objects.TCEventEndEVENT_END_SOCKET:
		return dataplane.EndSocketClosed
	}
	return ""
}

// eventClock converts the kernel's clocks to the wall clock. A new one for each batch follows
// a clock that is set.
type eventClock struct {
	offset  int64 // from CLOCK_MONOTONIC to the wall clock, in nanoseconds
	seconds uint32
	now     time.Time
}

func newEventClock() eventClock {
	var precise unix.Timespec
	// It fails only for a clock that does not exist.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &precise)
	now := time.Now()
	return eventClock{offset: now.UnixNano() - precise.Nano(), seconds: objects.BootSeconds(), now: now}
}

// wall converts a time of bpf_ktime_get_ns.
func (c eventClock) wall(ns int64) time.Time { return time.Unix(0, ns+c.offset) }

// coarse converts a time of the flow table, in seconds since boot.
func (c eventClock) coarse(seconds uint32) time.Time {
	return c.now.Add(-time.Duration(int32(c.seconds-seconds)) * time.Second)
}

// FlowEventCounts implements dataplane.FlowReporter.
func (t *Table) FlowEventCounts() dataplane.FlowEventCounts {
	counts := objects.SumPerCPU(t.m(objects.TCMapEventCounts), int(objects.TCEventCountEVENT_COUNTS))
	received := map[dataplane.FlowEventKind]uint64{}
	for _, kind := range dataplane.FlowEventKinds {
		if n := t.events.received[kind].Load(); n > 0 {
			received[kind] = n
		}
	}
	return dataplane.FlowEventCounts{
		Received: received,
		Lost:     counts[objects.TCEventCountEVENTS_LOST] + t.events.open.lost.Load(),
		LeftOut:  counts[objects.TCEventCountEVENTS_LEFT_OUT],
	}
}

// StopEvents clears the settings, since no agent reads the ring from now on.
func (t *Table) StopEvents() error {
	t.events.demand.close()
	var s objects.TCSettings
	settings := t.m(objects.TCMapNodeSettings)
	if err := settings.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	s.Flags &^= uint32(objects.EventSettings)
	if err := settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}
