package server

import (
	"context"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
)

type fakeReporter struct {
	counts dataplane.FlowEventCounts
	late   func() // reports what was in the kernel
}

func (fakeReporter) ReportFlows(context.Context, func([]dataplane.FlowEvent)) error { return nil }
func (f fakeReporter) CatchUp(context.Context) {
	if f.late != nil {
		f.late()
	}
}
func (f fakeReporter) FlowEventCounts() dataplane.FlowEventCounts { return f.counts }

// TestWatchFlows sends remembered and new events with all their names, and counts them.
func TestWatchFlows(t *testing.T) {
	web := intent.PortID{Service: model.Name{Namespace: "shop", Name: "web"}, Port: "http", Number: 80, Protocol: model.TCP}
	event := func(kind dataplane.FlowEventKind, reason string) dataplane.FlowEvent {
		return dataplane.FlowEvent{Kind: kind, Time: time.Unix(1000, 0), Reason: reason, Flow: dataplane.EventFlow{
			Port: web, Protocol: model.TCP, Client: netip.MustParseAddrPort("192.0.2.1:4000"),
			ServiceAddress: netip.MustParseAddrPort("10.96.0.1:80"), Endpoint: netip.MustParseAddrPort("10.244.0.2:8080"),
			Handshake: 3 * time.Millisecond, BytesToClient: 7,
		}}
	}
	flows := flowlog.New(flowlog.Config{Node: "n1", Owners: func(_ context.Context, addrs []netip.Addr) ([]flowlog.Owner, error) {
		owners := make([]flowlog.Owner, len(addrs))
		for i, a := range addrs {
			if a == netip.MustParseAddr("10.244.0.2") {
				owners[i] = flowlog.Owner{Pod: "shop/web-0", Node: "n2"}
			}
		}
		return owners, nil
	}})
	counts := dataplane.FlowEventCounts{Received: map[dataplane.FlowEventKind]uint64{dataplane.FlowOpened: 4, dataplane.FlowClosed: 1},
		Lost: 2, LeftOut: 3}
	h := start(t, func(c *Config) {
		c.Events = FlowEvents{Mode: "all", Log: flows, Reporter: fakeReporter{counts: counts}}
	}).wait(t)
	flows.Add([]dataplane.FlowEvent{event(dataplane.FlowOpened, ""), event(dataplane.FlowClosed, dataplane.EndRST)})

	stream, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{
		Since: timestamppb.New(time.Unix(1000, 0)),
		Filter: &nodev1alpha1.FlowFilter{Namespace: "shop", Pod: "shop/web-0",
			Kinds: []nodev1alpha1.EventKind{nodev1alpha1.EventKind_EVENT_KIND_CLOSED}},
	})
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	if first := stream.Msg(); first.Reporting.GetMode() != "all" || first.Reporting.FlowsSince != nil || len(first.Events) > 0 {
		t.Errorf("the stream begins with %v", first)
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	resp := stream.Msg()
	if len(resp.Events) != 1 {
		t.Fatalf("received %v", resp)
	}
	e := resp.Events[0]
	if e.Kind != nodev1alpha1.EventKind_EVENT_KIND_CLOSED || e.Reason != "RST" || e.Time.AsTime().Unix() != 1000 {
		t.Errorf("event %v", e)
	}
	f := e.Flow
	if f.Namespace != "shop" || f.Service != "web" || f.PortName != "http" || f.Node != "n1" || f.BytesToClient != 7 ||
		f.Endpoint.GetPod() != "shop/web-0" || f.Endpoint.GetNode() != "n2" || f.Client.GetAddress() != "192.0.2.1" ||
		f.Handshake.AsDuration() != 3*time.Millisecond || f.SmoothedRtt != nil {
		t.Errorf("flow %v", f)
	}

	quiet, stop := context.WithCancel(t.Context())
	defer time.AfterFunc(20*time.Second, stop).Stop() // ends a client that hangs
	none, err := h.client.WatchFlows(quiet, &nodev1alpha1.WatchFlowsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if none.ResponseHeader(); quiet.Err() != nil {
		t.Error("a client learns only with the first event that events are watched")
	}
	stop()

	status, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if got := status.Events; !got.Enabled || got.Mode != "all" || got.Received != 5 || got.Lost != 2 || got.SampledOut != 3 {
		t.Errorf("Status counts %v", got)
	}

	for _, bad := range []*nodev1alpha1.FlowFilter{{Port: 65536}, {Address: "no address"}} {
		stream, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{Filter: bad})
		if err == nil && !stream.Receive() {
			err = stream.Err()
		}
		wantCode(t, "a wrong filter", err, connect.CodeInvalidArgument, "")
	}
}

// fakeSwitch receives what is reported.
type fakeSwitch chan dataplane.FlowSelection

func (s fakeSwitch) SwitchFlows(of dataplane.FlowSelection) error {
	s <- of
	return nil
}

// With on-demand, a stream says from when on flows are reported. A reader of remembered events has no
// flows reported: it gets what has happened, also what is still in the kernel, and its stream ends.
func TestWatchFlowsOnDemand(t *testing.T) {
	flows, switched := flowlog.New(flowlog.Config{Node: "n1"}), make(fakeSwitch)
	demand := flowlog.NewDemand(switched, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { demand.Run(ctx); close(done) }()
	defer func() { cancel(); <-done }()
	one := []dataplane.FlowEvent{{Kind: dataplane.FlowRefused, Time: time.Now()}}
	reporter := fakeReporter{late: func() { flows.Add(one) }}
	h := start(t, func(c *Config) {
		c.Events = FlowEvents{Mode: "on-demand", Log: flows, Reporter: reporter, Demand: demand}
	}).wait(t)
	flows.Add(one)

	remembered, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{
		Remembered: true, Since: timestamppb.New(time.Unix(1000, 0))})
	if err != nil || !remembered.Receive() || len(remembered.Msg().Events) != 2 || remembered.Receive() || remembered.Err() != nil {
		t.Errorf("remembered %v, %v", remembered.Msg(), remembered.Err())
	}
	status, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if err != nil || status.Events.FlowsSince != nil {
		t.Errorf("flows are reported without a watcher: %v, %v", status.Events, err)
	}

	stream, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	if r := stream.Msg().Reporting; r.GetMode() != "on-demand" || r.FlowsSince != nil || !r.TurnedOn {
		t.Errorf("before they are reported: %v", r)
	}
	if of := <-switched; !of.All {
		t.Errorf("a watcher of all Services has %v reported", of)
	}
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	since := stream.Msg().Reporting.GetFlowsSince()
	if status, err = h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil || since == nil ||
		!proto.Equal(status.Events.FlowsSince, since) {
		t.Errorf("reported since %v, in Status %v, %v", since, status.Events, err)
	}
}

// The messages of an event hold nothing of the event that used their memory before.
func TestEventMessagesAreNew(t *testing.T) {
	at := time.Unix(1_700_000_000, 5)
	peer := func(addr, pod string) flowlog.Peer {
		return flowlog.Peer{Address: netip.MustParseAddrPort(addr), Owner: flowlog.Owner{Pod: pod, Node: "node"}}
	}
	full := flowlog.Event{Kind: dataplane.FlowClosed, Time: at, Reason: "FIN", Flow: flowlog.Flow{
		Node: "node", Protocol: model.TCP, Client: peer("10.0.0.1:1", "a/b"), ServiceAddress: peer("10.0.0.2:2", "c/d"),
		Namespace: "e", Service: "f", PortName: "g", Endpoint: peer("[2001:db8::1]:3", "h/i"), BySocket: true,
		Opened: at, LastSeen: at.Add(time.Second), State: "open", BytesToEndpoint: 1, BytesToClient: 2,
		PacketsToEndpoint: 3, PacketsToClient: 4, Handshake: time.Millisecond, SmoothedRTT: 1500 * time.Millisecond,
	}}
	less := flowlog.Event{Kind: dataplane.FlowRefused, Time: at, Flow: flowlog.Flow{Client: peer("10.0.0.1:4", "")}}
	less.Flow.Client.Node = ""
	var messages eventMessages
	for _, e := range []flowlog.Event{full, less, full} {
		var fresh eventMessages
		got, want := messages.of([]flowlog.Event{e})[0], fresh.of([]flowlog.Event{e})[0]
		if !proto.Equal(got, want) {
			t.Errorf("messages of an event differ in used memory:\n%v\n%v", got, want)
		}
	}
	got := messages.of([]flowlog.Event{full})[0]
	if f := got.Flow; !f.Opened.AsTime().Equal(at) || f.SmoothedRtt.AsDuration() != 1500*time.Millisecond ||
		f.Endpoint.Address != "2001:db8::1" || f.Endpoint.Port != 3 || f.Endpoint.Pod != "h/i" {
		t.Errorf("converted to %v", got)
	}
}
