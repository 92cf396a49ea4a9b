package server

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
)

// fakeState has Services of one port.
type fakeState struct {
	status   reconcile.Status
	pods     []intent.Pod
	services []reconcile.Service // sorted by name
	busy     bool
	asked    func() // before an answer; may be nil
}

func (f *fakeState) Status() reconcile.Status { return f.status }

func (f *fakeState) answer(ctx context.Context) error {
	if f.asked != nil {
		f.asked()
	}
	if f.busy {
		<-ctx.Done()
		return fmt.Errorf("%w (%w)", reconcile.ErrBusy, ctx.Err())
	}
	return nil
}

func (f *fakeState) Services(ctx context.Context, namespace string, after model.Name, limit int) (list []reconcile.Service, err error) {
	for _, s := range f.services {
		if (namespace == "" || s.Spec.Namespace == namespace) && s.Spec.Name.Compare(after) > 0 && len(list) < limit {
			list = append(list, s)
		}
	}
	return list, f.answer(ctx)
}

func (f *fakeState) Service(ctx context.Context, name model.Name) (reconcile.Service, bool, error) {
	for _, s := range f.services {
		if s.Spec.Name == name {
			return s, true, f.answer(ctx)
		}
	}
	return reconcile.Service{}, false, f.answer(ctx)
}

func (f *fakeState) Names(ctx context.Context, addrs []reconcile.Address) error {
	for i := range addrs {
		a := &addrs[i]
		for _, s := range f.services {
			for _, p := range s.Ports {
				if a.EndpointOfMax > 0 && slices.ContainsFunc(p.Endpoints, func(e intent.Endpoint) bool { return e.Addr == a.AddrPort }) {
					a.EndpointOf = append(a.EndpointOf, p.ID)
				}
				if p.Frontends[0].Addr == a.AddrPort.Addr() && p.Frontends[0].Port == a.AddrPort.Port() {
					a.Service = p.ID
				}
			}
		}
		if a.AddrPort.Addr().As4()[1] == 1 {
			a.Pod, a.Node = model.Name{Namespace: "default", Name: "pod-" + a.AddrPort.Addr().String()}, "n2"
		}
	}
	return f.answer(ctx)
}

func (f *fakeState) Pods(ctx context.Context, namespace, name string) ([]intent.Pod, error) {
	pods := slices.DeleteFunc(slices.Clone(f.pods), func(p intent.Pod) bool {
		return namespace != "" && p.Namespace != namespace || name != "" && p.Name.Name != name
	})
	return pods, f.answer(ctx)
}

// fakePlane is a dataplane that can be read.
type fakePlane struct {
	dataplane.Backend
	differences []string
	flows       []dataplane.Flow
	read        int // flows
}

func (f *fakePlane) Name() string { return "ebpf" }
func (f *fakePlane) Tables() []dataplane.Table {
	return []dataplane.Table{{Name: "flows", Used: 3, Size: 10}}
}
func (f *fakePlane) Hooks() []dataplane.Hook {
	return []dataplane.Hook{{Place: "eth0 ingress", Program: "from_network", Mechanism: "tcx"},
		{Place: "eth1 ingress", Err: errors.New("busy")}}
}
func (f *fakePlane) Features() []dataplane.Feature {
	return []dataplane.Feature{{Name: "tcx", Present: true}}
}
func (f *fakePlane) Drops() []dataplane.Drop {
	return []dataplane.Drop{{Reason: "drop_no_route", Meaning: "dropped: no route to the endpoint", Packets: 7}}
}
func (f *fakePlane) Differences(_ context.Context, _ intent.PortID, limit int) ([]string, error) {
	return f.differences[:min(limit, len(f.differences))], nil
}
func (f *fakePlane) Flows(_ context.Context, each func(dataplane.Flow) bool) error {
	for _, flow := range f.flows {
		f.read++
		if !each(flow) {
			break
		}
	}
	return nil
}

func serviceOf(namespace, name string, i int) reconcile.Service {
	n := model.Name{Namespace: namespace, Name: name}
	id := intent.PortID{Service: n, Port: "http", Number: 80, Protocol: model.TCP, Family: model.IPv4}
	ep := func(last byte) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i), last}) }
	spec := &model.Service{Name: n, Type: model.NodePort, Ports: []model.ServicePort{{Name: "http", Port: 80, Protocol: model.TCP}}}
	slice := func(endpoints ...model.Endpoint) *model.EndpointSlice {
		return &model.EndpointSlice{Family: model.IPv4,
			Ports:     []model.EndpointPort{{Name: "http", Protocol: model.TCP, Port: 8080}, {Name: "other", Protocol: model.TCP, Port: 1}},
			Endpoints: endpoints}
	}
	return reconcile.Service{
		Inspected: intent.Inspected{Spec: spec,
			Ports: []*intent.ServicePort{{ID: id, Affinity: time.Minute,
				Frontends: []intent.Frontend{{Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80, InternalRoute: intent.ToCluster,
					ExternalRoute: intent.ToCluster},
					{Kind: intent.NodePort, Port: 30080, InternalRoute: intent.ToCluster, ExternalRoute: intent.ToCluster,
						SourceRanges: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}}},
				Endpoints: []intent.Endpoint{{Addr: netip.AddrPortFrom(ep(1), 8080), ClusterPolicy: true},
					{Addr: netip.AddrPortFrom(ep(3), 8080), LocalPolicy: true}}}},
			Slices: []*model.EndpointSlice{slice(model.Endpoint{Addr: ep(2), Serving: true, Terminating: true}, model.Endpoint{Addr: ep(1)}),
				slice(model.Endpoint{Addr: ep(1), Ready: true, Serving: true, Node: "n2", Pod: n},
					model.Endpoint{Addr: ep(3), Ready: true, Serving: true}),
				{Family: model.IPv6, Ports: slice().Ports, Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("fd00::1"), Ready: true}}}},
		},
		Sync: []reconcile.PortSync{{Dataplane: "ebpf"}},
	}
}

// harness is a server on a Unix socket, and a client.
type harness struct {
	*Server
	client   nodev1alpha1connect.NodeServiceClient
	socket   string
	problems chan []model.Problem
	log      *safeBuffer
	stop     func()
}

// safeBuffer is a buffer for several goroutines.
type safeBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *safeBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *safeBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func start(t *testing.T, change func(*Config)) *harness {
	t.Helper()
	h := &harness{socket: filepath.Join(t.TempDir(), "api.sock"), problems: make(chan []model.Problem, 16), log: &safeBuffer{}}
	cfg := Config{retry: 50 * time.Millisecond, watchPause: time.Hour,
		Node: "n1", Version: "0.1.0", ProxyMode: "ebpf", State: &fakeState{}, Socket: h.socket,
		OnProblems: func(p []model.Problem) { h.problems <- p }, Logger: slog.New(slog.NewTextHandler(h.log, nil))}
	cfg.listeners = func() ([]kernel.Listener, error) { return nil, nil }
	cfg.addrs = func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("10.2.0.1")}, nil }
	if change != nil {
		change(&cfg)
	}
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	h.Server, h.client = s, dial(cfg.Socket)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	})
	t.Cleanup(h.stop)
	return h
}

// wait waits until the socket answers.
func (h *harness) wait(t *testing.T) *harness {
	t.Helper()
	await.True(t, "the socket answers", func() bool {
		conn, err := net.Dial("unix", h.socket)
		if err == nil {
			conn.Close()
		}
		return err == nil
	})
	return h
}

func overSocket(path string, http2 bool) *http.Client {
	protocols := &http.Protocols{}
	protocols.SetHTTP1(!http2)
	protocols.SetUnencryptedHTTP2(http2)
	return &http.Client{Transport: &http.Transport{Protocols: protocols,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}}}
}

func dial(path string, options ...connect.ClientOption) nodev1alpha1connect.NodeServiceClient {
	return nodev1alpha1connect.NewNodeServiceClient(overSocket(path, len(options) > 0), "http://node", options...)
}

func wantCode(t *testing.T, what string, err error, code connect.Code, text string) {
	t.Helper()
	if connect.CodeOf(err) != code || !strings.Contains(fmt.Sprint(err), text) {
		t.Errorf("%s: error %v, want %v with %q", what, err, code, text)
	}
}

func TestEachProtocolAnswers(t *testing.T) {
	h := start(t, nil).wait(t)
	for name, client := range map[string]nodev1alpha1connect.NodeServiceClient{
		"Connect": h.client, "gRPC": dial(h.socket, connect.WithGRPC()), "gRPC-Web": dial(h.socket, connect.WithGRPCWeb()),
		"JSON": dial(h.socket, connect.WithProtoJSON()),
	} {
		resp, err := client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
		if err != nil || resp.Node != "n1" || resp.Kernel == "" || resp.Time == nil {
			t.Errorf("%s: %v, %v", name, resp, err)
		}
	}
	resp, err := overSocket(h.socket, false).Post("http://node/spillway.node.v1alpha1.NodeService/Status", "application/json",
		strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, _ := io.ReadAll(resp.Body); !bytes.Contains(text, []byte(`"node":"n1"`)) {
		t.Errorf("JSON is %s", text)
	}
	stream := grpcreflect.NewClient(overSocket(h.socket, true), "http://node", connect.WithGRPC()).NewStream(t.Context())
	names, err := stream.ListServices()
	if err != nil || !slices.Contains(names, "spillway.node.v1alpha1.NodeService") {
		t.Errorf("reflection: %v, %v", names, err)
	}
	_, _ = stream.Close()
}

func TestStatus(t *testing.T) {
	state := &fakeState{status: reconcile.Status{
		Listed: true, LastSynced: time.Now(), Services: 2, Endpoints: 5, Ports: map[string]int{"ebpf": 3, "nftables": 9},
		Errors: map[string]string{"ebpf": "no memory"},
	}}
	for i := range maxProblems + 7 {
		state.status.Problems = append(state.status.Problems, model.Problem{Where: fmt.Sprint("p", i), Field: "f", What: "w"})
	}
	h := start(t, func(c *Config) { c.State, c.Backends = state, []dataplane.Backend{&fakePlane{}} }).wait(t)
	resp, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if s := resp.Sync; !s.Listed || s.LastSynced == nil || s.PendingSince != nil || s.Services != 2 || s.Ports != 3 || s.Endpoints != 5 {
		t.Errorf("sync %v", s)
	}
	if d := resp.Dataplanes; len(d) != 1 || d[0].Error != "no memory" || d[0].Ports != 3 {
		t.Errorf("dataplanes %v", d)
	}
	if len(resp.Problems) != maxProblems || resp.MoreProblems != 7 || resp.Problems[0].What != "f: w" {
		t.Errorf("%d problems and %d more: %v", len(resp.Problems), resp.MoreProblems, resp.Problems[0])
	}
	if resp.Tables[0].Name != "ebpf flows" || resp.Tables[0].Used != 3 || len(resp.Hooks) != 2 || resp.Hooks[1].Error != "busy" ||
		!resp.Features[0].Present {
		t.Errorf("kernel: %v %v %v", resp.Tables, resp.Hooks, resp.Features)
	}
}

func TestPages(t *testing.T) {
	state := &fakeState{}
	for i := range 25 {
		state.services = append(state.services, serviceOf([]string{"a", "b"}[i/20], fmt.Sprintf("s%02d", i), i))
	}
	h := start(t, func(c *Config) { c.State = state }).wait(t)
	for _, c := range []struct {
		namespace         string
		size, pages, want int
	}{{"", 10, 3, 25}, {"", 25, 1, 25}, {"", 24, 2, 25}, {"a", 7, 3, 20}, {"none", 7, 1, 0}, {"", 0, 1, 25}, {"", 1 << 30, 1, 25}} {
		req, seen, pages := &nodev1alpha1.ListServicesRequest{Namespace: c.namespace, PageSize: uint32(c.size)}, map[string]bool{}, 0
		for {
			resp, err := h.client.ListServices(t.Context(), req)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range resp.Services {
				seen[s.Namespace+"/"+s.Name] = true
			}
			pages++
			if req.PageToken = resp.NextPageToken; req.PageToken == "" {
				break
			}
		}
		if len(seen) != c.want || pages != c.pages {
			t.Errorf("%+v: %d Services in %d pages", c, len(seen), pages)
		}
	}
	_, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{PageToken: "x"})
	wantCode(t, "a wrong token", err, connect.CodeInvalidArgument, "page_token")
}

// TestALargePageIsCut: by bytes, and each page has one Service at least.
func TestALargePageIsCut(t *testing.T) {
	state := &fakeState{}
	for i := range 5 {
		s := serviceOf("a", fmt.Sprint("s", i), i)
		for n := range 40_000 {
			s.Ports[0].Frontends[0].SourceRanges = append(s.Ports[0].Frontends[0].SourceRanges,
				netip.PrefixFrom(netip.AddrFrom4([4]byte{11, 0, byte(n >> 8), byte(n)}), 32))
		}
		state.services = append(state.services, s)
	}
	h := start(t, func(c *Config) { c.State = state }).wait(t)
	resp, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{})
	if err != nil || len(resp.Services) >= 5 || len(resp.Services) == 0 || resp.NextPageToken == "" {
		t.Errorf("%d Services, next %q, %v", len(resp.GetServices()), resp.GetNextPageToken(), err)
	}
}

func TestGetService(t *testing.T) {
	one := serviceOf("default", "web", 1)
	one.Spec.ExternalLocal, one.Ports[0].DSR = true, true
	one.Spec.Ports = append(one.Spec.Ports, model.ServicePort{Name: "lost", Port: 81, Protocol: model.TCP})
	state := &fakeState{services: []reconcile.Service{one}, status: reconcile.Status{Problems: []model.Problem{
		model.ServiceProblem(one.Spec.Name, "spec", "is odd"), model.ServiceProblem(model.Name{Namespace: "default", Name: "other"}, "", "no"),
	}}}
	plane := &fakePlane{differences: slices.Repeat([]string{"the kernel lacks it"}, 99)}
	h := start(t, func(c *Config) { c.State, c.Backends = state, []dataplane.Backend{plane} }).wait(t)
	get := func() *nodev1alpha1.Service {
		t.Helper()
		resp, err := h.client.GetService(t.Context(), &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web"})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Service
	}
	s := get()
	if s.Type != "NodePort" || len(s.Problems) != 1 || s.Problems[0].What != "spec: is odd" || len(s.Ports) != 2 ||
		s.Ports[1].Name != "lost" || s.Ports[1].Dataplane != "" {
		t.Errorf("Service %v", s)
	}
	p := s.Ports[0]
	if p.ExternalTrafficPolicy != "Local" || p.InternalTrafficPolicy != "Cluster" || p.Affinity.AsDuration() != time.Minute ||
		p.Family != "IPv4" || p.Forwarding != "hybrid" ||
		p.Frontends[0].Address != "10.96.0.1" || p.Frontends[1].Kind != "nodePort" || p.Frontends[1].SourceRanges[0] != "192.0.2.0/24" {
		t.Errorf("port %v", p)
	}
	var endpoints []string
	for _, e := range p.Endpoints {
		endpoints = append(endpoints, fmt.Sprintf("%s:%d %s %s ready=%v terminating=%v used=%v", e.Address, e.Port, e.Pod, e.Node, e.Ready,
			e.Terminating, e.InUse))
	}
	want := []string{
		"10.1.1.1:8080 default/web n2 ready=true terminating=false used=true",
		"10.1.1.2:8080   ready=false terminating=true used=false",
		"10.1.1.3:8080   ready=true terminating=false used=false",
	}
	if !slices.Equal(endpoints, want) {
		t.Errorf("endpoints\n%s\nwant\n%s", strings.Join(endpoints, "\n"), strings.Join(want, "\n"))
	}
	if p.Endpoints[0].Shares != 0 {
		t.Errorf("%d shares without weights", p.Endpoints[0].Shares)
	}
	one.Ports[0].Weights = []uint16{3, 5}
	if e := get().Ports[0].Endpoints; e[0].Shares != 3 || e[2].Shares != 0 {
		t.Errorf("shares %d and %d, want 3, and 0 of an endpoint to which no frontend leads", e[0].Shares, e[2].Shares)
	}
	one.Ports[0].Weights = nil
	if !p.Compared || len(p.Differences) != maxDifferences {
		t.Errorf("compared %v, %d differences", p.Compared, len(p.Differences))
	}
	for _, c := range []struct {
		sync reconcile.PortSync
		want string
	}{
		{reconcile.PortSync{Dataplane: "nftables"}, ""},
		{reconcile.PortSync{Dataplane: "nftables", Err: errors.New("no memory")}, "the last write failed, and is tried again: no memory"},
		{reconcile.PortSync{Dataplane: "nftables", Waits: true, Since: time.Unix(0, 0)},
			"a change waits for the next write, since 1970-01-01T00:00:00Z"},
		{reconcile.PortSync{Err: errors.New("no SCTP")}, "not served on this node: no SCTP"},
	} {
		one.Sync[0] = c.sync
		if p := get().Ports[0]; p.Compared || strings.Join(p.Differences, "; ") != c.want {
			t.Errorf("%+v: compared %v, differences %q", c.sync, p.Compared, p.Differences)
		}
	}
	if f := get().Ports[0].Endpoints[0].Flows; f != nil {
		t.Errorf("flows were counted without a request: %v", f)
	}
	_, err := h.client.GetService(t.Context(), &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "none"})
	wantCode(t, "a Service that is not known", err, connect.CodeNotFound, "default/none")
}

func TestFlowsOfEndpointsAreCounted(t *testing.T) {
	otherPort, otherService, udp := trafficFlow(4, "established", 0), trafficFlow(5, "established", 0), trafficFlow(6, "established", 0)
	otherPort.Endpoint = netip.MustParseAddrPort("10.1.1.1:9090")
	otherService.Service = netip.MustParseAddrPort("10.96.0.2:80")
	udp.Protocol = model.UDP
	nodePort := trafficFlow(7, "closing", 0)
	nodePort.Service = netip.MustParseAddrPort("192.0.2.9:30080")
	plane := &fakePlane{flows: []dataplane.Flow{trafficFlow(1, "new", 0), trafficFlow(2, "established", 0), nodePort,
		otherPort, otherService, udp}}
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}, []dataplane.Backend{plane}
	}).wait(t)
	resp, err := h.client.GetService(t.Context(), &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web", CountFlows: true})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range resp.Service.Ports[0].Endpoints {
		got = append(got, fmt.Sprintf("%s %d %d", e.Address, e.Flows.GetAnswered(), e.Flows.GetWaiting()))
	}
	if want := []string{"10.1.1.1 2 1", "10.1.1.2 0 0", "10.1.1.3 0 0"}; !slices.Equal(got, want) {
		t.Errorf("counts %q, want %q", got, want)
	}
	h.counting <- struct{}{} // another client counts
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := h.client.GetService(ctx, &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web", CountFlows: true}); err == nil {
		t.Error("two clients count at once")
	}
	<-h.counting
}

func TestListFlows(t *testing.T) {
	plane := &fakePlane{}
	for i := range 3000 {
		plane.flows = append(plane.flows, dataplane.Flow{Protocol: model.TCP, State: "established", LastSeen: time.Now(),
			Client:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 9, byte(i % 3)}), uint16(i+1)),
			Service:  netip.MustParseAddrPort("10.96.0." + fmt.Sprint(i%2+1) + ":80"),
			Endpoint: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i%2 + 1), 1}), 8080)})
	}
	h := start(t, func(c *Config) {
		c.State = &fakeState{services: []reconcile.Service{serviceOf("default", "one", 1), serviceOf("default", "two", 2)}}
		c.Backends = []dataplane.Backend{plane}
	}).wait(t)
	for _, c := range []struct {
		what   string
		filter *nodev1alpha1.FlowFilter
		limit  uint32
		want   int
		more   bool
	}{
		{"all", nil, 5000, 3000, false},
		{"the agent's choice", nil, 0, usualFlows, true},
		{"a Service", &nodev1alpha1.FlowFilter{Namespace: "default", Service: "two"}, 5000, 1500, false},
		{"as many as the limit", &nodev1alpha1.FlowFilter{Service: "two"}, 1500, 1500, false},
		{"one more than the limit", &nodev1alpha1.FlowFilter{Service: "two"}, 1499, 1499, true},
		{"a namespace without flows", &nodev1alpha1.FlowFilter{Namespace: "other"}, 5000, 0, false},
		{"a client", &nodev1alpha1.FlowFilter{Address: "10.1.9.1"}, 5000, 1000, false},
		{"a prefix", &nodev1alpha1.FlowFilter{Address: "10.1.9.0/31"}, 5000, 2000, false},
		{"an endpoint", &nodev1alpha1.FlowFilter{Address: "10.1.2.1"}, 5000, 1500, false},
		{"a pod", &nodev1alpha1.FlowFilter{Pod: "default/pod-10.1.9.2"}, 5000, 1000, false},
		{"a port", &nodev1alpha1.FlowFilter{Port: 8080}, 5000, 3000, false},
		{"another port", &nodev1alpha1.FlowFilter{Port: 81}, 5000, 0, false},
		{"flows that were closed", &nodev1alpha1.FlowFilter{Kinds: []nodev1alpha1.EventKind{nodev1alpha1.EventKind_EVENT_KIND_CLOSED}}, 5000, 0,
			false},
	} {
		resp, err := h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{Filter: c.filter, Limit: c.limit})
		if err != nil || len(resp.Flows) != c.want || resp.More != c.more {
			t.Errorf("%s: %d flows, more %v, %v", c.what, len(resp.GetFlows()), resp.GetMore(), err)
		}
	}
	opened := time.Now()
	plane.flows[5].Opened, plane.flows[8].Opened, plane.flows[8].Reset = opened.Add(-time.Hour), opened, true
	if resp, err := h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{}); err != nil || resp.Flows[0].Client.Port != 9 ||
		!resp.Flows[0].ClosedByRst || resp.Flows[1].Client.Port != 6 {
		t.Errorf("the newest flows are not in front: %v, %v", resp.GetFlows()[:2], err)
	}
	plane.flows[5].DSR, plane.flows[8].DSR, plane.flows[8].OneWay = true, true, true
	if resp, err := h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{}); err != nil || !resp.Flows[0].Dsr ||
		!resp.Flows[0].OneWay ||
		!resp.Flows[1].Dsr || resp.Flows[1].OneWay || resp.Flows[2].Dsr {
		t.Errorf("direct flows: %v, %v", resp.GetFlows()[:3], err)
	}
	plane.flows[5].Opened, plane.flows[8].Opened = time.Time{}, time.Time{}
	plane.flows[7].State = "new"
	resp, err := h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{State: "new"})
	if err != nil || len(resp.Flows) != 1 || resp.Flows[0].State != "new" {
		t.Errorf("flows of a state: %v, %v", resp, err)
	}
	// Those of egress are behind many others.
	for i := range 2 {
		plane.flows[2990+i].Egress = true
	}
	resp, err = h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{Egress: true, Limit: 2})
	if err != nil || len(resp.Flows) != 2 || resp.More || !resp.Flows[0].Egress || !resp.Flows[1].Egress {
		t.Errorf("flows of egress: %v, more %v, %v", resp.GetFlows(), resp.GetMore(), err)
	}
	resp, err = h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{Limit: 1})
	if err != nil {
		t.Fatal(err)
	}
	if f := resp.Flows[0]; f.Node != "n1" || f.Service != "one" || f.PortName != "http" || f.Client.Pod != "default/pod-10.1.9.0" ||
		f.Endpoint.Node != "n2" || f.State != "established" || f.Opened != nil {
		t.Errorf("flow %v", f)
	}
	if plane.read = 0; true {
		_, _ = h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{Limit: 1})
		if plane.read > namedAtOnce {
			t.Errorf("one flow was asked for, and %d were read", plane.read)
		}
	}
	_, err = h.client.ListFlows(t.Context(), &nodev1alpha1.ListFlowsRequest{Filter: &nodev1alpha1.FlowFilter{Address: "here"}})
	wantCode(t, "an address that is none", err, connect.CodeInvalidArgument, "filter.address")
}

func TestDropsAndFindings(t *testing.T) {
	h := start(t, func(c *Config) {
		c.Backends = []dataplane.Backend{&fakePlane{}}
		c.examine = func(context.Context) (*doctor.Node, error) {
			return &doctor.Node{Problems: []doctor.Problem{{What: "cannot be read", Namespaces: []string{"a", "b"}}},
				Log: map[conntrack.LogKind]conntrack.LogCount{conntrack.TableFull: {
					ByNetns: map[uint64]conntrack.LogCount{0: {Lines: 1}}}}}, nil
		}
	}).wait(t)
	drops, err := h.client.Drops(t.Context(), &nodev1alpha1.DropsRequest{})
	if err != nil || len(drops.Drops) != 1 || drops.Drops[0].Packets != 7 || drops.Drops[0].Meaning == "" {
		t.Errorf("drops %v, %v", drops, err)
	}
	findings, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil || len(findings.Findings) != 1 || len(findings.Problems) != 1 || findings.Problems[0].Where != "a, b" {
		t.Errorf("findings %v, %v", findings, err)
	} else if f := findings.Findings[0]; f.Documentation != "https://spillway.dev/docs/runbooks/"+f.Id+"/" {
		t.Errorf("the runbook of %s is %q", f.Id, f.Documentation)
	}
}

// countingPlane counts connections, and remembers which ports it was asked for.
type countingPlane struct {
	fakePlane
	asked []intent.PortID
}

func (p *countingPlane) ServiceCounters() (map[intent.PortID]*dataplane.ServiceCounters, error) {
	return nil, errors.New("reads the counters of all Services")
}

func (p *countingPlane) ServiceCountersOf(ports []intent.PortID) (map[intent.PortID]*dataplane.ServiceCounters, error) {
	p.asked = ports
	out := map[intent.PortID]*dataplane.ServiceCounters{}
	for _, id := range ports {
		out[id] = &dataplane.ServiceCounters{Connections: 7}
	}
	return out, nil
}

func TestCountersAreReadForThePageOnly(t *testing.T) {
	state, plane := &fakeState{}, &countingPlane{}
	for i := range 5 {
		state.services = append(state.services, serviceOf("default", fmt.Sprint("web", i), i))
	}
	h := start(t, func(c *Config) { c.State, c.Backends = state, []dataplane.Backend{plane} }).wait(t)
	resp, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{PageSize: 2, PageToken: "default/web1"})
	if err != nil || len(resp.Services) != 2 || resp.Services[1].Ports[0].Counters.GetConnections() != 7 {
		t.Errorf("page %v, %v", resp, err)
	}
	if len(plane.asked) != 2 || plane.asked[0].Service.Name != "web2" || plane.asked[1].Service.Name != "web3" {
		t.Errorf("counters were read of %v", plane.asked)
	}
	one, err := h.client.GetService(t.Context(), &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web4"})
	if err != nil || one.Service.Ports[0].Counters.GetConnections() != 7 || len(plane.asked) != 1 || plane.asked[0].Service.Name != "web4" {
		t.Errorf("one Service: %v, %v; counters were read of %v", one, err, plane.asked)
	}
}

func TestNames(t *testing.T) {
	state := &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}
	h := start(t, func(c *Config) { c.State = state }).wait(t)
	tcp := func(addr string, port uint32) *nodev1alpha1.Address {
		return &nodev1alpha1.Address{Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP, Address: addr, Port: port}
	}
	names := func(a ...*nodev1alpha1.Address) ([]*nodev1alpha1.AddressNames, error) {
		resp, err := h.client.Names(t.Context(), &nodev1alpha1.NamesRequest{Addresses: a})
		return resp.GetNames(), err
	}
	got, err := names(tcp("10.96.0.1", 80), tcp("10.1.1.1", 8080), tcp("192.0.2.1", 9))
	if err != nil || len(got) != 3 {
		t.Fatal(got, err)
	}
	if s := got[0].Service; s.GetNamespace() != "default" || s.GetName() != "web" || s.GetPortName() != "http" || s.GetPort() != 80 ||
		s.GetProtocol() != nodev1alpha1.Protocol_PROTOCOL_TCP {
		t.Errorf("the Service's address: %v", got[0])
	}
	if e := got[1]; e.Pod != "default/pod-10.1.1.1" || e.Node != "n2" || len(e.EndpointOf) != 1 ||
		e.EndpointOf[0].Name != "web" || e.Service != nil {
		t.Errorf("the endpoint: %v", e)
	}
	if n := got[2]; n.Service != nil || len(n.EndpointOf) != 0 || n.Pod+n.Node != "" {
		t.Errorf("an unknown address: %v", n)
	}
	_, err = names(slices.Repeat([]*nodev1alpha1.Address{tcp("10.96.0.1", 80)}, maxNames+1)...)
	wantCode(t, "too many", err, connect.CodeInvalidArgument, "at most 512")
	_, err = names(tcp("10.96.0.1", 80), tcp("web", 80))
	wantCode(t, "no address", err, connect.CodeInvalidArgument, `addresses[1]: not an address and a port: "web", 80`)
	_, err = names(tcp("10.96.0.1", 70_000))
	wantCode(t, "no port", err, connect.CodeInvalidArgument, "70000")
}

func TestPods(t *testing.T) {
	state := &fakeState{pods: []intent.Pod{
		{Name: model.Name{Namespace: "a", Name: "x"}, Node: "n1", Addrs: []netip.Addr{netip.MustParseAddr("10.1.1.1")}},
		{Name: model.Name{Namespace: "b", Name: "x"}}, {Name: model.Name{Namespace: "b", Name: "y"}},
	}}
	h := start(t, func(c *Config) { c.State = state }).wait(t)
	ask := func(req *nodev1alpha1.PodsRequest, more bool, want int) []*nodev1alpha1.Pod {
		t.Helper()
		resp, err := h.client.Pods(t.Context(), req)
		if err != nil || len(resp.Pods) != want || resp.More != more {
			t.Fatalf("%v, %v", resp, err)
		}
		return resp.Pods
	}
	if p := ask(&nodev1alpha1.PodsRequest{Namespace: "a", Name: "x"}, false, 1)[0]; p.Node != "n1" || len(p.Addresses) != 1 ||
		p.Addresses[0] != "10.1.1.1" {
		t.Errorf("%v", p)
	}
	ask(&nodev1alpha1.PodsRequest{Namespace: "b"}, false, 2)
	ask(&nodev1alpha1.PodsRequest{Limit: 2}, true, 2)
}

// TestFindingsAreExaminedOnceAtATime: an examination costs more than other requests. Its result
// is everybody's who asks meanwhile, also if the first leaves.
func TestFindingsAreExaminedOnceAtATime(t *testing.T) {
	began, end := make(chan bool, 2), make(chan bool)
	h := start(t, func(c *Config) {
		c.examine = func(context.Context) (*doctor.Node, error) {
			began <- true
			<-end
			return &doctor.Node{}, nil
		}
	}).wait(t)
	impatient, leave := context.WithCancel(t.Context())
	asked := make(chan error, 3)
	ask := func(ctx context.Context) {
		_, err := h.client.Findings(ctx, &nodev1alpha1.FindingsRequest{})
		asked <- err
	}
	go ask(impatient)
	<-began
	go ask(t.Context())
	go ask(t.Context())
	leave()
	wantCode(t, "who leaves", <-asked, connect.CodeCanceled, "")
	await.True(t, "both requests", func() bool { return len(h.requests) == 2 })
	end <- true
	for range 2 {
		if err := <-asked; err != nil {
			t.Error(err)
		}
	}
	if len(began) > 0 {
		t.Error("there was a second examination")
	}
	// While the last examination is recent, by its cost, it is not repeated.
	h.examined.cost, h.examined.ended = time.Hour, time.Now()
	if _, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{}); err != nil || len(began) > 0 {
		t.Errorf("soon after: %v, %d examinations", err, len(began))
	}
	close(end)
	h.examined.cost = 0
	if _, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{}); err != nil || len(began) != 1 {
		t.Errorf("later: %v, %d examinations", err, len(began))
	}
}

// A mistake of an examination costs its answer, not the agent.
func TestAFailingExaminationIsAnError(t *testing.T) {
	h := start(t, func(c *Config) {
		c.examine = func(context.Context) (*doctor.Node, error) { panic("an unexpected rule") }
	}).wait(t)
	for range 2 {
		_, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
		wantCode(t, "an examination that panics", err, connect.CodeInternal, "its log has the reason")
	}
	if log := h.log.String(); !strings.Contains(log, "an unexpected rule") {
		t.Errorf("log %s", log)
	}
}

func TestABusyAgentSaysSo(t *testing.T) {
	h := start(t, func(c *Config) { c.State = &fakeState{busy: true} }).wait(t)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := service{h.Server}.ListServices(ctx, &nodev1alpha1.ListServicesRequest{})
	wantCode(t, "a busy loop", coded(err), connect.CodeUnavailable, "busy")
	if _, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil {
		t.Errorf("Status waits for the loop: %v", err)
	}
}

// TestRequestsAreLimited fills the places for requests, and sees one more be refused.
func TestRequestsAreLimited(t *testing.T) {
	asked, end := make(chan bool, 2*maxRequests), make(chan bool)
	h := start(t, func(c *Config) { c.State = &fakeState{asked: func() { asked <- true; <-end }} }).wait(t)
	var wg sync.WaitGroup
	for range maxRequests {
		wg.Go(func() {
			if _, err := h.client.ListServices(context.Background(), &nodev1alpha1.ListServicesRequest{}); err != nil {
				t.Error(err)
			}
		})
	}
	for range maxRequests {
		<-asked
	}
	_, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{})
	wantCode(t, "one request too many", err, connect.CodeResourceExhausted, "16 requests at once")
	close(end)
	wg.Wait()
	if _, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{}); err != nil {
		t.Errorf("after the others: %v", err)
	}
	_, err = h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{Namespace: strings.Repeat("x", maxRequest)})
	wantCode(t, "a request that is too large", err, connect.CodeResourceExhausted, "")
}

// fakeEvents sends events without an end.
type fakeEvents struct{ watching sync.WaitGroup }

func (f *fakeEvents) Counts() *nodev1alpha1.Events {
	return &nodev1alpha1.Events{Enabled: true, Received: 5}
}

func (f *fakeEvents) Visit(flowlog.Filter, time.Time, func(*flowlog.Event)) error { return nil }

func (f *fakeEvents) Watch(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest,
	send func(*nodev1alpha1.WatchFlowsResponse) error) error {
	f.watching.Add(1)
	defer f.watching.Done()
	for ctx.Err() == nil {
		if err := send(&nodev1alpha1.WatchFlowsResponse{Missed: 1}); err != nil {
			return err
		}
		time.Sleep(time.Millisecond)
	}
	return ctx.Err()
}

func TestStreamsAreLimitedAndEndWithTheirClient(t *testing.T) {
	events := &fakeEvents{}
	h := start(t, func(c *Config) { c.Events = events }).wait(t)
	ctx, cancel := context.WithCancel(t.Context())
	for range maxStreams {
		stream, err := h.client.WatchFlows(ctx, &nodev1alpha1.WatchFlowsRequest{})
		if err != nil || !stream.Receive() || stream.Msg().Missed != 1 {
			t.Fatalf("stream: %v", err)
		}
	}
	more, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
	if err == nil && !more.Receive() {
		err = more.Err()
	}
	wantCode(t, "one stream too many", err, connect.CodeResourceExhausted, "16 streams at once")
	if resp, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil || resp.Events.Received != 5 {
		t.Errorf("a request beside the streams: %v, %v", resp.GetEvents(), err)
	}
	cancel()
	events.watching.Wait()
	await.True(t, "the places of the streams are free", func() bool { return len(h.streams) == 0 })
}

// pausingEvents sends as much as the client reads, with pauses.
type pausingEvents struct {
	fakeEvents
	pause time.Duration
	size  int
	ended chan struct{}
}

func (p *pausingEvents) Watch(ctx context.Context, _ *nodev1alpha1.WatchFlowsRequest,
	send func(*nodev1alpha1.WatchFlowsResponse) error) (err error) {
	// Equal letters would be compressed, and the connection take thousands of messages.
	random := make([]byte, p.size)
	_, _ = rand.Read(random)
	text := base64.StdEncoding.EncodeToString(random)
	for err == nil && ctx.Err() == nil {
		err = send(&nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{{Reason: text}}})
		time.Sleep(p.pause)
	}
	p.ended <- struct{}{}
	return err
}

// TestASilentStreamStays for longer than a write may take, with each version of HTTP.
func TestASilentStreamStays(t *testing.T) {
	events := &pausingEvents{pause: 300 * time.Millisecond, ended: make(chan struct{}, 2)}
	h := start(t, func(c *Config) { c.Events, c.writeTimeout = events, 50*time.Millisecond }).wait(t)
	for name, client := range map[string]nodev1alpha1connect.NodeServiceClient{"HTTP/1": h.client,
		"HTTP/2": dial(h.socket, connect.WithGRPC())} {
		stream, err := client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			if !stream.Receive() {
				t.Fatalf("%s: the stream ended: %v", name, stream.Err())
			}
		}
		stream.Close()
	}
}

// TestAClientThatDoesNotReadIsLeft, so that it holds no place forever.
func TestAClientThatDoesNotReadIsLeft(t *testing.T) {
	events := &pausingEvents{size: 1 << 20, ended: make(chan struct{}, 2)}
	h := start(t, func(c *Config) { c.Events, c.writeTimeout = events, 2*time.Second }).wait(t)
	for name, client := range map[string]nodev1alpha1connect.NodeServiceClient{"HTTP/1": h.client,
		"HTTP/2": dial(h.socket, connect.WithGRPC())} {
		stream, err := client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !stream.Receive() {
			t.Fatalf("%s: %v", name, stream.Err())
		}
		select {
		case <-events.ended: // with an error, or because its context has ended
		case <-time.After(2 * time.Minute):
			t.Errorf("%s: the agent still waits for the client", name)
		}
	}
}

func TestWithoutEventsThereIsNothingToWatch(t *testing.T) {
	h := start(t, nil).wait(t)
	stream, err := h.client.WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
	if err == nil && !stream.Receive() {
		err = stream.Err()
	}
	wantCode(t, "WatchFlows", err, connect.CodeUnimplemented, "does not follow flows")
}

// TestAPanicIsAnErrorOfOneRequest, and not the end of the agent.
func TestAPanicIsAnErrorOfOneRequest(t *testing.T) {
	state := &fakeState{asked: func() { panic("planted") }}
	h := start(t, func(c *Config) { c.State = state }).wait(t)
	_, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{})
	wantCode(t, "a panic", err, connect.CodeInternal, "log has the reason")
	if !strings.Contains(h.log.String(), "planted") {
		t.Errorf("the log has no reason: %s", h.log)
	}
	if _, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil {
		t.Error(err)
	}
}
