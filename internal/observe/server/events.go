package server

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/observe/flowlog"
)

// FlowEvents are the Events of a dataplane whose events are in a flowlog.Log.
type FlowEvents struct {
	Mode     string // the value of --flow-events
	Log      *flowlog.Log
	Reporter dataplane.FlowReporter
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
	return out
}

// Watch implements Events.
func (f FlowEvents) Watch(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest, send func(*nodev1alpha1.WatchFlowsResponse) error) error {
	filter, err := eventFilter(req.Filter)
	if err != nil {
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	var since time.Time
	if req.Since != nil {
		since = req.Since.AsTime()
	}
	reader, err := f.Log.Watch(filter, since)
	if err != nil {
		return connect.NewError(connect.CodeResourceExhausted, err)
	}
	defer reader.Close()
	// The headers say that events are watched: the first event may be hours away.
	if err := send(nil); err != nil {
		return err
	}
	for {
		events, missed, err := reader.Next(ctx)
		if err != nil {
			return err
		}
		resp := &nodev1alpha1.WatchFlowsResponse{Missed: missed}
		for i := range events {
			resp.Events = append(resp.Events, convertEvent(&events[i]))
		}
		if err := send(resp); err != nil {
			return err
		}
	}
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

func convertEvent(e *flowlog.Event) *nodev1alpha1.FlowEvent {
	f := &e.Flow
	flow := &nodev1alpha1.Flow{
		Node: f.Node, Protocol: protocol(f.Protocol), Client: eventPeer(f.Client), ServiceAddress: eventPeer(f.ServiceAddress),
		Namespace: f.Namespace, Service: f.Service, PortName: f.PortName, Endpoint: eventPeer(f.Endpoint), BySocket: f.BySocket,
		Opened: timestamp(f.Opened), LastSeen: timestamp(f.LastSeen), State: f.State,
		BytesToEndpoint: f.BytesToEndpoint, BytesToClient: f.BytesToClient,
		PacketsToEndpoint: f.PacketsToEndpoint, PacketsToClient: f.PacketsToClient,
		Handshake: duration(f.Handshake), SmoothedRtt: duration(f.SmoothedRTT),
	}
	return &nodev1alpha1.FlowEvent{Kind: nodev1alpha1.EventKind(e.Kind), Time: timestamp(e.Time), Flow: flow, Reason: e.Reason}
}

// eventPeer is nil for an unknown address.
func eventPeer(p flowlog.Peer) *nodev1alpha1.Peer {
	if p.Address == (netip.AddrPort{}) {
		return nil
	}
	return &nodev1alpha1.Peer{Address: p.Address.Addr().String(), Port: uint32(p.Address.Port()), Pod: p.Pod, Node: p.Node}
}

// duration is nil for 0.
func duration(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}
