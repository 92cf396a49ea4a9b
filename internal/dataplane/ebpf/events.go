package ebpf

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

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/facts/model"
)

// eventBatch is the maximum number of events that one call of the reporter gets.
const eventBatch = 512

// flowEvents are the events on their path from the kernel to the reporter.
type flowEvents struct {
	open     openFlows
	received [dataplane.FlowDropped + 1]atomic.Uint64 // by kind

	mu    sync.Mutex
	swept []dataplane.FlowEvent // of finished sweeps
}

var _ dataplane.FlowReporter = (*Backend)(nil)

// ReportFlows implements dataplane.FlowReporter. With EventsOff it waits for ctx.
func (b *Backend) ReportFlows(ctx context.Context, report func([]dataplane.FlowEvent)) error {
	if b.cfg.FlowEvents == EventsOff {
		<-ctx.Done()
		return ctx.Err()
	}
	ring, err := ringbuf.NewReader(b.m(tcMapEvents))
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
				batch = b.decodeEvent(batch, record.RawSample, clock)
			}
		}
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			if ctx.Err() != nil {
				break
			}
			return fmt.Errorf("read flow events: %w", err)
		}
		err = nil
		batch = b.events.takeSwept(batch)
		if wait = min(2*wait, maxEventsInterval); len(batch) > 0 {
			wait = eventsInterval
			b.events.count(batch)
			report(batch)
		}
		batch = batch[:0]
	}
	return ctx.Err()
}

func (e *flowEvents) count(batch []dataplane.FlowEvent) {
	for i := range batch {
		if kind := batch[i].Kind; int(kind) < len(e.received) {
			e.received[kind].Add(1)
		}
	}
}

// addSwept stores the events of a finished sweep for the reader, if there is one.
func (e *flowEvents) addSwept(events []dataplane.FlowEvent) {
	e.mu.Lock()
	defer e.mu.Unlock()
	room := max(openFlowsMax-len(e.swept), 0)
	e.open.lost.Add(uint64(max(len(events)-room, 0)))
	e.swept = append(e.swept, events[:min(room, len(events))]...)
}

// takeSwept appends the events of finished sweeps.
func (e *flowEvents) takeSwept(batch []dataplane.FlowEvent) []dataplane.FlowEvent {
	e.mu.Lock()
	defer e.mu.Unlock()
	batch = append(batch, e.swept...)
	e.swept = nil
	return batch
}

// decode appends the event of a record, and the end of the flow that it replaces. A record of
// another layout, which an older program has written, is left out.
func (b *Backend) decodeEvent(batch []dataplane.FlowEvent, raw []byte, clock eventClock) []dataplane.FlowEvent {
	var e tcEvent
	if len(raw) < len(memory(&e)) {
		return batch
	}
	copy(memory(&e), raw)
	event := b.flowEvent(&e, clock)
	if !event.Flow.BySocket {
		key := flowKey{event.Flow.Protocol, event.Flow.Client, event.Flow.ServiceAddress}
		switch event.Kind {
		case dataplane.FlowOpened:
			if former, replaced := b.events.open.add(key, &event.Flow); replaced {
				batch = append(batch, ended(former, dataplane.EndEvicted, event.Time))
			}
		case dataplane.FlowAnswered:
			b.events.open.answered(key, event.Flow.Handshake)
		case dataplane.FlowClosed:
			event.Flow.Handshake = b.events.open.remove(key, &event.Flow)
		}
	}
	return append(batch, event)
}

func ended(f dataplane.EventFlow, reason string, at time.Time) dataplane.FlowEvent {
	return dataplane.FlowEvent{Kind: dataplane.FlowClosed, Time: at, Reason: reason, Flow: f}
}

// flowEvent converts an event. The names of verdicts are those of the counters.
func (b *Backend) flowEvent(e *tcEvent, clock eventClock) dataplane.FlowEvent {
	addr := func(a tcAddr, port uint16) netip.AddrPort {
		if a == (tcAddr{}) && port == 0 {
			return netip.AddrPort{}
		}
		return netip.AddrPortFrom(fromAddr(a, e.Family), toPort(port))
	}
	out := dataplane.FlowEvent{Kind: dataplane.FlowEventKind(e.Kind), Time: clock.wall(int64(e.Time))}
	f := &out.Flow
	f.Protocol, f.BySocket = model.Protocol(e.Proto), e.BySocket != 0
	f.Client, f.ServiceAddress, f.Endpoint = addr(e.Client, e.ClientPort), addr(e.ServiceAddr, e.ServicePort), addr(e.Endpoint, e.EndpointPort)
	f.Port, _ = b.services.port(e.Service)
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
		out.Reason = endReason(tcEventEnd(e.End))
		if e.Opened != 0 {
			f.Opened = clock.coarse(e.Opened)
		} else if f.BySocket && e.Lasted < math.MaxUint32 {
			f.Opened = out.Time.Add(-time.Duration(e.Lasted) * time.Millisecond)
		}
	default:
		if int(e.Verdict) < len(b.objects.verdicts) {
			out.Reason = b.objects.verdicts[e.Verdict]
		}
	}
	return out
}

func endReason(end tcEventEnd) string {
	switch end {
	case tcEventEndEVENT_END_FIN:
		return dataplane.EndFIN
	case tcEventEndEVENT_END_RST:
		return dataplane.EndRST
	case tcEventEndEVENT_END_TIMEOUT:
		return dataplane.EndTimeout
	case tcEventEndEVENT_END_MOVED:
		return dataplane.EndEndpointGone
	case tcEventEndEVENT_END_SOCKET:
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
	return eventClock{offset: now.UnixNano() - precise.Nano(), seconds: bootSeconds(), now: now}
}

// wall converts a time of bpf_ktime_get_ns.
func (c eventClock) wall(ns int64) time.Time { return time.Unix(0, ns+c.offset) }

// coarse converts a time of the flow table, in seconds since boot.
func (c eventClock) coarse(seconds uint32) time.Time {
	return c.now.Add(-time.Duration(int32(c.seconds-seconds)) * time.Second)
}

// FlowEventCounts implements dataplane.FlowReporter.
func (b *Backend) FlowEventCounts() dataplane.FlowEventCounts {
	counts := sumPerCPU(b.m(tcMapEventCounts), int(tcEventCountEVENT_COUNTS))
	received := map[dataplane.FlowEventKind]uint64{}
	for _, kind := range dataplane.FlowEventKinds {
		if n := b.events.received[kind].Load(); n > 0 {
			received[kind] = n
		}
	}
	return dataplane.FlowEventCounts{
		Received: received,
		Lost:     counts[tcEventCountEVENTS_LOST] + b.events.open.lost.Load(),
		LeftOut:  counts[tcEventCountEVENTS_LEFT_OUT],
	}
}

// sumPerCPU returns the first n counters of a per-CPU array, summed over all CPUs.
func sumPerCPU(m *ebpf.Map, n int) []uint64 {
	out := make([]uint64, n)
	var perCPU []uint64
	for i := range out {
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, v := range perCPU {
			out[i] += v
		}
	}
	return out
}

// stopEvents clears the settings, since no agent reads the ring from now on.
func (b *Backend) stopEvents() error {
	var s tcSettings
	settings := b.m(tcMapNodeSettings)
	if err := settings.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	s.Flags &^= uint32(tcSettingsFlagsSETTING_EVENTS_REFUSED | tcSettingsFlagsSETTING_EVENTS_FLOWS)
	if err := settings.Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}
