package server

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/observe/flowlog"
)

// catchUpPatience bounds a wait that takes some 0.5 s.
const catchUpPatience = 5 * time.Second

// FlowEvents are the Events of a dataplane whose events are in a flowlog.Log.
type FlowEvents struct {
	Mode     string // the value of --flow-events
	Log      *flowlog.Log
	Reporter dataplane.FlowReporter
	Demand   *flowlog.Demand // nil: flows are reported always or never
}

var _ Events = FlowEvents{}

// Counts implements Events.
func (f FlowEvents) Counts() *nodev1alpha1.Events {
	counts := f.Reporter.FlowEventCounts()
	out := &nodev1alpha1.Events{
		Enabled: f.Mode != "off", Mode: f.Mode, Lost: counts.Lost, SampledOut: counts.LeftOut,
	}
	for _, n := range counts.Received {
		out.Received += n
	}
	out.FlowsSince = timeOf(f.Demand.Since())
	return out
}

// Watch implements Events.
func (f FlowEvents) Watch(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	send func(*nodev1alpha1.WatchFlowsResponse) error) error {
	filter, err := eventFilter(req.Filter)
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	var since time.Time
	if req.Since != nil {
		since = req.Since.AsTime()
	}
	if req.Remembered {
		f.catchUp(ctx)
	}
	reader, err := f.Log.Watch(filter, since)
	if err != nil {
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	defer reader.Close()
	var messages eventMessages
	forward := func(events []flowlog.Event, missed uint64) error {
		return send(&nodev1alpha1.WatchFlowsResponse{Missed: missed, Events: messages.of(events)})
	}
	if req.Remembered {
		return reader.Remembered(forward)
	}
	watching := f.Demand.Watch(filter)
	defer watching.Close()
	var sent *nodev1alpha1.Reporting
	for {
		now, changed := f.reporting(watching)
		if !proto.Equal(now, sent) {
			// The first one says that events are watched: the first event may be hours away.
			if err := send(&nodev1alpha1.WatchFlowsResponse{Reporting: now}); err != nil {
				return err
			}
			sent = now
		}
		events, missed, err := reader.NextOr(ctx, changed)
		if err != nil {
			return err
		}
		if len(events) == 0 && missed == 0 {
			continue
		}
		if err := forward(events, missed); err != nil {
			return err
		}
	}
}

// catchUp waits until the kernel's events are in the log. A reader that fails keeps it waiting for
// catchUpPatience: what is in the log is better than nothing.
func (f FlowEvents) catchUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, catchUpPatience)
	defer cancel()
	f.Reporter.CatchUp(ctx)
}

// reporting returns what is reported to a watcher, and a channel that is closed when that may change.
func (f FlowEvents) reporting(w *flowlog.Watching) (*nodev1alpha1.Reporting, <-chan struct{}) {
	since, problem, changed := w.State()
	return &nodev1alpha1.Reporting{
		Mode: f.Mode, FlowsSince: timeOf(since), TurnedOn: w != nil && w.TurnedOn, Problem: problem,
	}, changed
}

// timeOf returns nil for the zero time.
func timeOf(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

// Visit implements Events.
func (f FlowEvents) Visit(filter flowlog.Filter, since time.Time, visit func(*flowlog.Event)) error {
	return f.Log.Visit(filter, since, visit)
}

func eventFilter(f *nodev1alpha1.FlowFilter) (out flowlog.Filter, err error) {
	if f == nil {
		return out, nil
	}
	if f.Port > math.MaxUint16 {
		return out, errors.New("filter.port: must be at most 65535")
	}
	out = flowlog.Filter{Namespace: f.Namespace, Service: f.Service, Pod: f.Pod, Port: uint16(f.Port)}
	for _, k := range f.Kinds {
		out.Kinds = append(out.Kinds, dataplane.FlowEventKind(k))
	}
	out.Prefix, err = parsePrefix(f)
	return out, err
}

// eventMessages converts events. It uses the same memory for all: a dozen allocations for each
// event would cost more than all else that the agent does with it.
type eventMessages struct {
	memory []eventMemory
	out    []*nodev1alpha1.FlowEvent
	texts  map[netip.Addr]string // of addresses that were written before
}

// maxTexts is the maximum number of addresses whose texts are kept.
const maxTexts = 1024

// of returns the messages of events. They are valid until the next call.
func (m *eventMessages) of(events []flowlog.Event) []*nodev1alpha1.FlowEvent {
	if len(events) > len(m.memory) {
		m.memory = make([]eventMemory, len(events))
	}
	if m.texts == nil || len(m.texts) > maxTexts {
		m.texts = map[netip.Addr]string{}
	}
	m.out = m.out[:0]
	for i := range events {
		m.out = append(m.out, m.memory[i].convert(&events[i], m.texts))
	}
	return m.out
}

// eventMemory holds the messages of one event.
type eventMemory struct {
	event                            nodev1alpha1.FlowEvent
	flow                             nodev1alpha1.Flow
	client, serviceAddress, endpoint nodev1alpha1.Peer
	time, opened, lastSeen           timestamppb.Timestamp
	handshake, smoothedRTT           durationpb.Duration
}

// convert sets all fields of the messages.
func (m *eventMemory) convert(e *flowlog.Event, texts map[netip.Addr]string) *nodev1alpha1.FlowEvent {
	f, out := &e.Flow, &m.flow
	out.Node, out.Protocol, out.BySocket, out.State = f.Node, protocol(f.Protocol), f.BySocket, f.State
	out.Namespace, out.Service, out.PortName = f.Namespace, f.Service, f.PortName
	out.Client = setPeer(&m.client, f.Client, texts)
	out.ServiceAddress = setPeer(&m.serviceAddress, f.ServiceAddress, texts)
	out.Endpoint = setPeer(&m.endpoint, f.Endpoint, texts)
	out.Opened, out.LastSeen = setTime(&m.opened, f.Opened), setTime(&m.lastSeen, f.LastSeen)
	out.BytesToEndpoint, out.BytesToClient = f.BytesToEndpoint, f.BytesToClient
	out.PacketsToEndpoint, out.PacketsToClient = f.PacketsToEndpoint, f.PacketsToClient
	out.Handshake, out.SmoothedRtt = setDuration(&m.handshake, f.Handshake), setDuration(&m.smoothedRTT, f.SmoothedRTT)
	m.event.Kind, m.event.Time = nodev1alpha1.EventKind(e.Kind), setTime(&m.time, e.Time)
	m.event.Flow, m.event.Reason = out, e.Reason
	return &m.event
}

// setPeer returns nil for an unknown address.
func setPeer(m *nodev1alpha1.Peer, p flowlog.Peer, texts map[netip.Addr]string) *nodev1alpha1.Peer {
	if p.Address == (netip.AddrPort{}) {
		return nil
	}
	addr := p.Address.Addr()
	text, ok := texts[addr]
	if !ok {
		text = addr.String()
		texts[addr] = text
	}
	m.Address, m.Port, m.Pod, m.Node = text, uint32(p.Address.Port()), p.Pod, p.Node
	return m
}

// setTime returns nil for the zero time.
func setTime(m *timestamppb.Timestamp, t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	m.Seconds, m.Nanos = t.Unix(), int32(t.Nanosecond())
	return m
}

// setDuration returns nil for 0.
func setDuration(m *durationpb.Duration, d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	m.Seconds, m.Nanos = int64(d/time.Second), int32(d%time.Second)
	return m
}
