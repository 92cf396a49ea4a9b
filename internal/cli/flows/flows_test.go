package flows

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
)

var now = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func flow() *nodev1alpha1.Flow {
	return &nodev1alpha1.Flow{
		Node: "worker-1", Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP,
		Client:         &nodev1alpha1.Peer{Address: "192.0.2.1", Port: 40000},
		ServiceAddress: &nodev1alpha1.Peer{Address: "10.96.0.1", Port: 80},
		Namespace:      "shop", Service: "web", PortName: "http",
		Endpoint: &nodev1alpha1.Peer{Address: "10.1.0.1", Port: 8080, Pod: "shop/web-5d9c7b8f6d-abcde", Node: "worker-2"},
		State:    "established", Opened: timestamppb.New(now.Add(-90 * time.Second)), LastSeen: timestamppb.New(now.Add(-time.Second)),
	}
}

func event(kind nodev1alpha1.EventKind) *nodev1alpha1.FlowEvent {
	return &nodev1alpha1.FlowEvent{Kind: kind, Time: timestamppb.New(now), Flow: flow()}
}

func closed() *nodev1alpha1.FlowEvent {
	e := event(nodev1alpha1.EventKind_EVENT_KIND_CLOSED)
	e.Reason, e.Flow.BytesToEndpoint, e.Flow.BytesToClient = "FIN", 512, 40960
	return e
}

func refused() *nodev1alpha1.FlowEvent {
	e := event(nodev1alpha1.EventKind_EVENT_KIND_REFUSED)
	e.Reason, e.Flow.Endpoint = "drop_source_range", nil
	return e
}

func tableOf(flows ...*nodev1alpha1.Flow) table {
	return table{ListFlowsResponse: &nodev1alpha1.ListFlowsResponse{Flows: flows}, now: now}
}

func TestTable(t *testing.T) {
	unnamed := flow()
	unnamed.Service, unnamed.Namespace, unnamed.Endpoint.Pod = "", "", ""
	unnamed.Client = &nodev1alpha1.Peer{Address: "2001:db8:1234:5678:9abc:def0:1234:5678", Port: 65535}
	resp := &nodev1alpha1.ListFlowsResponse{Flows: []*nodev1alpha1.Flow{flow(), unnamed}}
	clitest.Pages(t, "flows", table{ListFlowsResponse: resp, now: now})
	direct, oneWay := flow(), flow()
	direct.Dsr, oneWay.Dsr, oneWay.OneWay, oneWay.State = true, true, true, "new"
	clitest.Pages(t, "direct", tableOf(direct))
	clitest.Pages(t, "one-way", tableOf(flow(), direct, oneWay))
	out := flow()
	out.Service, out.ServiceAddress, out.Egress = "", nil, true
	out.Client = &nodev1alpha1.Peer{Address: "10.1.0.1", Port: 40000, Pod: "shop/crawler-0"}
	out.Endpoint = &nodev1alpha1.Peer{Address: "198.51.100.7", Port: 443}
	out.Source = &nodev1alpha1.Peer{Address: "192.0.2.1", Port: 20001}
	ping := flow()
	ping.Protocol, ping.Service, ping.ServiceAddress, ping.Egress = nodev1alpha1.Protocol_PROTOCOL_ICMP, "", nil, true
	ping.Client, ping.Endpoint, ping.Source = out.Client, &nodev1alpha1.Peer{Address: "198.51.100.7"}, out.Source
	clitest.Pages(t, "egress", tableOf(flow(), out, ping))
	clitest.Pages(t, "more", table{ListFlowsResponse: &nodev1alpha1.ListFlowsResponse{Flows: resp.Flows[:1], More: true}, now: now})
	clitest.Pages(t, "nodes", table{ListFlowsResponse: resp, now: now, nodes: true})
	clitest.Pages(t, "empty", tableOf())
}

// agent remembers two events, then sends others or ends.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	mode   string
	later  []*nodev1alpha1.WatchFlowsResponse
	silent bool // keeps the stream open
	mu     sync.Mutex
	asked  *nodev1alpha1.WatchFlowsRequest
}

func (a *agent) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	return &nodev1alpha1.StatusResponse{Events: &nodev1alpha1.Events{Mode: a.mode}}, nil
}

func (a *agent) ListFlows(context.Context, *nodev1alpha1.ListFlowsRequest) (*nodev1alpha1.ListFlowsResponse, error) {
	return &nodev1alpha1.ListFlowsResponse{Flows: []*nodev1alpha1.Flow{flow()}}, nil
}

func (a *agent) WatchFlows(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	stream *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	a.mu.Lock()
	a.asked = proto.CloneOf(req)
	a.mu.Unlock()
	first := &nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{closed(), refused()}}
	for _, resp := range append([]*nodev1alpha1.WatchFlowsResponse{first}, a.later...) {
		if err := stream.Send(resp); err != nil {
			return err
		}
	}
	if a.silent && !req.Remembered {
		<-ctx.Done()
	}
	return nil
}

func run(t *testing.T, a nodev1alpha1connect.NodeServiceHandler, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	cmd := NewCommand()
	var out, notes bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&notes)
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(append(args, "--api-socket", nodeclienttest.Serve(t, a)))
	err = cmd.ExecuteContext(t.Context())
	return out.String(), notes.String(), err
}

// TestSince prints what the agent remembers, and ends although flows go on.
func TestSince(t *testing.T) {
	a := &agent{mode: "refused", silent: true}
	out, notes, err := run(t, a, "--since", "5m", "--service", "shop/web", "--event", "closed,refused", "--address",
		"192.0.2.0/24", "--port", "80")
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 2 || !strings.HasSuffix(lines[0],
		"closed   TCP 192.0.2.1:40000 -> shop/web:http -> shop/web-5d9c7b8f6d-abcde:8080 FIN 512 bytes to the endpoint, 40960 back") ||
		!strings.HasSuffix(lines[1], "refused  TCP 192.0.2.1:40000 -> shop/web:http drop_source_range") {
		t.Errorf("printed\n%s", out)
	}
	if !strings.Contains(notes, "--flow-events on-demand") || strings.Contains(notes, "no event that") {
		t.Errorf("notes: %q", notes)
	}
	want := &nodev1alpha1.FlowFilter{Namespace: "shop", Service: "web", Address: "192.0.2.0/24", Port: 80,
		Kinds: []nodev1alpha1.EventKind{nodev1alpha1.EventKind_EVENT_KIND_CLOSED, nodev1alpha1.EventKind_EVENT_KIND_REFUSED}}
	if !proto.Equal(a.asked.Filter, want) {
		t.Errorf("asked for %v, want %v", a.asked.Filter, want)
	}
	if age := time.Since(a.asked.Since.AsTime()); age < 5*time.Minute || age > 6*time.Minute {
		t.Errorf("asked for events since %v ago", age)
	}
}

// silentAgent is of an earlier version, which does not end the stream, and remembers nothing. Its
// answer begins with its first message.
type silentAgent struct{ agent }

func (*silentAgent) WatchFlows(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest,
	_ *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	<-ctx.Done()
	return nil
}

func TestSinceWithoutAnEvent(t *testing.T) {
	out, notes, err := run(t, &silentAgent{agent{mode: "all"}}, "--since", "5m")
	if err != nil || out != "" || notes != "no event that the filters select is remembered\n" {
		t.Errorf("printed %q, noted %q, %v", out, notes, err)
	}
}

// TestFollow says when the agent ends the stream, and what is missing.
func TestFollow(t *testing.T) {
	answered := event(nodev1alpha1.EventKind_EVENT_KIND_ANSWERED)
	answered.Flow.Handshake = durationpb.New(1234567)
	a := &agent{mode: "all", later: []*nodev1alpha1.WatchFlowsResponse{{Events: []*nodev1alpha1.FlowEvent{answered}, Missed: 7}}}
	out, notes, err := run(t, a, "-f", "-o", "json")
	if err == nil || !strings.Contains(err.Error(), "ended the stream") {
		t.Errorf("error %v", err)
	}
	if !strings.HasPrefix(notes, "7 events are missing here") {
		t.Errorf("notes: %q", notes)
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 {
		t.Fatalf("printed\n%s", out)
	}
	var last struct {
		Kind string
		Flow struct{ Handshake string }
	}
	if err := json.Unmarshal([]byte(lines[2]), &last); err != nil || last.Kind != "answered" ||
		last.Flow.Handshake != "0.001234567s" {
		t.Errorf("the last line is %s: %v", lines[2], err)
	}
}

// TestTurnedOn says from when on flows are reported, to the program that has them reported.
func TestTurnedOn(t *testing.T) {
	on := &nodev1alpha1.Reporting{Mode: "on-demand", FlowsSince: timestamppb.New(now), TurnedOn: true}
	const noted = "flows are reported since "
	for _, tt := range []struct {
		reporting *nodev1alpha1.Reporting
		want      string
	}{
		{on, noted + now.Local().Format("15:04:05") + "\n"},
		{&nodev1alpha1.Reporting{Mode: "on-demand", FlowsSince: on.FlowsSince}, ""},
		{&nodev1alpha1.Reporting{Mode: "on-demand", TurnedOn: true}, ""},
		{&nodev1alpha1.Reporting{Mode: "on-demand", TurnedOn: true, Problem: "no\x1broom"}, "flows are not reported yet: no\\x1broom\n"},
	} {
		a := &agent{mode: "on-demand", later: []*nodev1alpha1.WatchFlowsResponse{{Reporting: tt.reporting}}}
		_, notes, _ := run(t, a, "-f")
		if notes != tt.want {
			t.Errorf("%v: noted %q, want %q", tt.reporting, notes, tt.want)
		}
		if a.asked.Remembered {
			t.Error("a program that follows asks for remembered events alone")
		}
	}
}

// A program that reads what is remembered turns nothing on, and ends with the stream.
func TestSinceOnDemand(t *testing.T) {
	a := &agent{mode: "on-demand"}
	_, notes, err := run(t, a, "--since", "5m")
	if err != nil || !a.asked.Remembered || !strings.Contains(notes, "remembers flows only of times") {
		t.Errorf("asked %v, noted %q, %v", a.asked, notes, err)
	}
}

func TestListFlows(t *testing.T) {
	out, _, err := run(t, &agent{})
	if err != nil || !strings.Contains(out, "shop/web:http") {
		t.Errorf("printed %q, %v", out, err)
	}
}

func TestAnAgentThatIsOlder(t *testing.T) {
	_, _, err := run(t, nodev1alpha1connect.UnimplementedNodeServiceHandler{}, "-f")
	if err == nil || !strings.Contains(err.Error(), "older than this program") {
		t.Errorf("error %v", err)
	}
}

func TestNothingFromTheAgentReachesTheTerminal(t *testing.T) {
	bad := closed()
	bad.Reason, bad.Flow.Service, bad.Flow.Endpoint.Pod, bad.Flow.Node = "\x1b[2J", "w\reb", "a\u202eb", "n\a"
	bad.Kind = 99
	for _, nodes := range []bool{false, true} {
		var out, notes bytes.Buffer
		p := newPrinter(&out, &notes, cli.Table)
		p.nodes = nodes
		if err := p.events("", &nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{bad, {}}}); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(out.String(), "\x1b\u202e\r\a") {
			t.Errorf("printed %q", out.String())
		}
	}
	if text := modeHint(&nodev1alpha1.Events{Mode: "x\x1b"}, true); strings.Contains(text, "\x1b") {
		t.Errorf("hint %q", text)
	}
}

func TestWrongFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--event", "born"}, {"--address", "10.0.0.0/99"}, {"--since", "-1s"}, {"--service", ""},
		{"-n", "a", "--service", "b/c"}, {"--port", "70000"}, {"--state", "open"}, {"--state", "new", "-f"},
	} {
		_, _, err := run(t, &agent{}, args...)
		var usage *cli.UsageError
		if err == nil || !errors.As(err, &usage) && !strings.Contains(err.Error(), "invalid argument") {
			t.Errorf("%q: error %v", args, err)
		}
	}
}

// TestWatchEndsWithItsContext, as with Ctrl-C.
func TestWatchEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out, notes bytes.Buffer
	w := &watcher{out: newPrinter(&out, &notes, cli.Table), request: &nodev1alpha1.WatchFlowsRequest{}, follow: true}
	path := nodeclienttest.Serve(t, &agent{mode: "all", silent: true})
	time.AfterFunc(100*time.Millisecond, cancel)
	if err := w.one(ctx, nodeclient.Unix(path)); err != nil {
		t.Error(err)
	}
}
