// Package fakenode is the API of an agent that exists only on paper: its Services, flows
// and faults are made up. It tests what shows an agent.
package fakenode

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	node "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Hostile is a name that would run a script if a page took it for markup, and color a
// terminal.
const Hostile = `<img src=x onerror="document.title='owned'">` + "\x1b[31m"

// Faults that are planted: a Service whose source ranges refuse clients, one with an
// endpoint that does not answer, one whose node ports are used up, one about which the agent has a
// finding.
const (
	RefusingService = "shop/checkout"
	DeadService     = "payments/ledger"
	DeadEndpoint    = "10.244.2.66"
	DroppingService = "shop/web"
	RefusedService  = "shop/cart"
	RefusedEndpoint = "10.244.1.67"
	// UncountedService has connections of sockets alone, whose packets are not counted.
	UncountedService = "batch/queue"
)

// Node is the fake. Fields must not change while it serves.
type Node struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	Name string
	// Services is how many there are, at least those with names of their own.
	Services int
	// Rate is the number of events in a second.
	Rate int
	// NoWatch: the agent is older than WatchFlows.
	NoWatch bool
	// Mode is that of its events; "": all. With on-demand it never turns them on.
	Mode string
	// Healthy: no fault is planted.
	Healthy bool
	// Handshake is that of all flows; 0: they differ.
	Handshake time.Duration
	// Hostile: some flows have names that no API server allows.
	Hostile bool

	started time.Time
	list    []*node.Service
	targets []target
	sent    atomic.Uint64 // events, to all readers
	quiet   atomic.Bool
}

// target is an endpoint of a Service to which flows go.
type target struct {
	service  *node.Service
	port     *node.ServicePort
	endpoint *node.Endpoint
	weight   int
}

type client struct{ address, pod, node string }

var clients = []client{
	{"10.244.1.11", "shop/web-6f7c9d5b8-2lqzt", "node-a"},
	{"10.244.1.12", "shop/web-6f7c9d5b8-x9d4k", "node-a"},
	{"10.244.2.31", "shop/cart-74c8f-jj2wp", "node-b"},
	{"10.244.2.40", "payments/api-5d8b7-qmk7r", "node-b"},
	{"10.244.1.77", "monitoring/prometheus-0", "node-a"},
	{"10.244.3.18", "batch/report-28841-hk2sz", "node-c"},
	{"198.51.100.7", "", ""},
	{"203.0.113.80", "", ""},
}

var named = []struct {
	namespace, name, kind string
	port                  uint32
	protocol              node.Protocol
	portName              string
	endpoints, weight     int
}{
	{"shop", "web", "NodePort", 80, node.Protocol_PROTOCOL_TCP, "http", 6, 40},
	{"shop", "cart", "ClusterIP", 8080, node.Protocol_PROTOCOL_TCP, "http", 4, 24},
	{"shop", "checkout", "LoadBalancer", 443, node.Protocol_PROTOCOL_TCP, "https", 3, 10},
	{"shop", "catalog", "ClusterIP", 9000, node.Protocol_PROTOCOL_TCP, "grpc", 5, 18},
	{"payments", "api", "ClusterIP", 8443, node.Protocol_PROTOCOL_TCP, "https", 3, 12},
	{"payments", "ledger", "ClusterIP", 9090, node.Protocol_PROTOCOL_TCP, "grpc", 3, 9},
	{"kube-system", "kube-dns", "ClusterIP", 53, node.Protocol_PROTOCOL_UDP, "dns", 2, 60},
	{"monitoring", "prometheus", "ClusterIP", 9090, node.Protocol_PROTOCOL_TCP, "web", 1, 4},
	{"batch", "queue", "ClusterIP", 6379, node.Protocol_PROTOCOL_TCP, "redis", 2, 8},
	{"default", "kubernetes", "ClusterIP", 443, node.Protocol_PROTOCOL_TCP, "https", 1, 3},
	{"edge", "ingress", "LoadBalancer", 443, node.Protocol_PROTOCOL_TCP, "https", 2, 0},
}

// Start makes the Services. It must be called before the Node serves.
func (n *Node) Start() *Node {
	n.started = time.Now()
	for i, s := range named {
		n.add(i, s.namespace, s.name, s.kind, s.portName, s.port, s.protocol, s.endpoints, s.weight)
	}
	for i := len(named); i < n.Services; i++ {
		n.add(i, fmt.Sprintf("team-%02d", i%40), fmt.Sprintf("service-%04d", i), "ClusterIP", "http", 8080, node.Protocol_PROTOCOL_TCP, 3, 1)
	}
	slices.SortFunc(n.list, func(a, b *node.Service) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return n
}

func (n *Node) add(i int, namespace, name, kind, portName string, number uint32, protocol node.Protocol, endpoints, weight int) {
	p := &node.ServicePort{
		Name: portName, Port: number, Protocol: protocol, Dataplane: "ebpf", Family: "IPv4", Compared: true, EndpointCount: uint32(endpoints),
		ExternalTrafficPolicy: "Cluster", InternalTrafficPolicy: "Cluster",
		Frontends: []*node.Frontend{{Kind: "clusterIP", Address: fmt.Sprintf("10.96.%d.%d", i/250, i%250+1), Port: number}},
		Counters:  &node.Counters{HandshakeMsLog2: make([]uint64, 16)},
	}
	s := &node.Service{Namespace: namespace, Name: name, Type: kind, Ports: []*node.ServicePort{p}}
	switch kind {
	case "NodePort":
		p.Frontends = append(p.Frontends, &node.Frontend{Kind: "nodePort", Port: 30080})
	case "LoadBalancer":
		lb := &node.Frontend{Kind: "loadBalancerIP", Address: fmt.Sprintf("192.0.2.%d", 10+i), Port: number}
		if !n.Healthy && namespace+"/"+name == RefusingService {
			lb.SourceRanges = []string{"203.0.113.0/24"}
		}
		p.Frontends = append(p.Frontends, lb)
	}
	if name == "ingress" {
		p.ExternalTrafficPolicy = "Local"
	}
	if name == "queue" {
		p.Affinity = durationpb.New(3 * time.Hour)
	}
	for e := range endpoints {
		on := []string{"node-a", "node-b", "node-c"}[e%3]
		ep := &node.Endpoint{
			Address: fmt.Sprintf("10.244.%d.%d", e%3+1, 60+(i*7+e)%180), Port: number, Node: on, Ready: true, Serving: true, InUse: true,
			Pod: fmt.Sprintf("%s/%s-%d", namespace, name, e),
		}
		switch {
		case namespace+"/"+name == DeadService && e == 1:
			ep.Address = DeadEndpoint
		case namespace+"/"+name == RefusedService && e == 0:
			ep.Address = RefusedEndpoint
		}
		if name == "catalog" && e == 4 {
			ep.Ready, ep.Terminating, ep.InUse = false, true, false
		}
		p.Endpoints = append(p.Endpoints, ep)
		if ep.InUse && weight > 0 {
			n.targets = append(n.targets, target{s, p, ep, weight})
		}
	}
	if !n.Healthy && name == "catalog" {
		p.Differences = []string{"slot 3 leads to 10.244.2.99:9000, wanted 10.244.2.88:9000"}
	}
	n.list = append(n.list, s)
}

// Quiet stops or continues the events. Those that were due meanwhile are not sent.
func (n *Node) Quiet(quiet bool) { n.quiet.Store(quiet) }

// Sent is the number of events that all readers got.
func (n *Node) Sent() uint64 { return n.sent.Load() }

// Status reports a node with one problem, and a table that is nearly full.
func (n *Node) Status(context.Context, *node.StatusRequest) (*node.StatusResponse, error) {
	now := time.Now()
	r := &node.StatusResponse{
		Node: n.Name, Version: "0.1.0", Commit: "0123456789ab", Kernel: "6.18.2", Time: timestamppb.New(now),
		Started:   timestamppb.New(n.started.Add(-26 * time.Hour)),
		ProxyMode: "ebpf",
		Sync: &node.Sync{Listed: true, LastSynced: timestamppb.New(now.Add(-1200 * time.Millisecond)), Services: uint32(len(n.list)),
			Ports: uint32(len(n.list)), Endpoints: uint32(len(n.targets))},
		Dataplanes: []*node.Dataplane{{Name: "ebpf", Ports: uint32(len(n.list))}, {Name: "nftables", Ports: 2}},
		Tables: []*node.Table{{Name: "flows", Used: 41_200, Size: 262_144}, {Name: "backends", Used: uint64(len(n.targets)), Size: 1 << 20},
			{Name: "frontends", Used: uint64(len(n.list)), Size: 131_072}},
		Hooks: []*node.Hook{{Place: "eth0", Program: "from_network", Mechanism: "tcx"},
			{Place: "eth0", Program: "to_network", Mechanism: "tcx"}, {Place: "/sys/fs/cgroup", Program: "connect4", Mechanism: "cgroup"}},
		Features: []*node.Feature{{Name: "tcx", Present: true}, {Name: "bpf_redirect_peer", Present: true},
			{Name: "sock_ops", Present: false, Detail: "needs Linux 5.10"}},
		Events: &node.Events{Enabled: !n.NoWatch, Received: n.sent.Load(), Mode: cmp.Or(n.Mode, "all")},
	}
	if !n.Healthy {
		r.Problems = []*node.Problem{{Where: "Service edge/ingress",
			What: "externalTrafficPolicy Local, and no endpoint is on this node: packets from outside are dropped"}}
		r.Findings = []*node.Finding{n.refuses()}
		r.Tables[0].Used = 236_000
		r.Events.Lost = 12
	}
	return r, nil
}

// refuses is a finding about RefusedService.
func (n *Node) refuses() *node.Finding {
	namespace, name, _ := strings.Cut(RefusedService, "/")
	return &node.Finding{Id: "endpoint-refuses", Severity: "critical", Title: "connections to Service " + RefusedService + ":http fail",
		Detail: "The endpoint answers the first packet of each connection with an RST.", Since: timestamppb.New(n.started),
		Object: &node.FindingObject{Kind: "Service", Namespace: namespace, Name: name, Port: "http", Endpoint: RefusedEndpoint + ":8080"}}
}

// ListServices returns pages of Services.
func (n *Node) ListServices(_ context.Context, req *node.ListServicesRequest) (*node.ListServicesResponse, error) {
	from, _ := strconv.Atoi(req.PageToken)
	size := cmp.Or(int(req.PageSize), 500)
	to := min(from+size, len(n.list))
	if from < 0 || from > to {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("page token %q: unknown", req.PageToken))
	}
	r := &node.ListServicesResponse{}
	for _, s := range n.list[from:to] {
		r.Services = append(r.Services, n.service(s, false))
	}
	if to < len(n.list) {
		r.NextPageToken = strconv.Itoa(to)
	}
	return r, nil
}

// service returns a Service with its counters, which grow with time.
func (n *Node) service(s *node.Service, whole bool) *node.Service {
	seconds := uint64(time.Since(n.started).Seconds()) + 60
	weight := uint64(1)
	for _, other := range named {
		if other.namespace == s.Namespace && other.name == s.Name {
			weight = uint64(other.weight)
		}
	}
	p := s.Ports[0]
	q := &node.ServicePort{
		Name: p.Name, Port: p.Port, Protocol: p.Protocol, Dataplane: p.Dataplane, Family: p.Family, Frontends: p.Frontends,
		EndpointCount:         p.EndpointCount,
		ExternalTrafficPolicy: p.ExternalTrafficPolicy, InternalTrafficPolicy: p.InternalTrafficPolicy, Affinity: p.Affinity,
		Counters: &node.Counters{
			Connections: weight * seconds, Active: weight * 3, BytesToEndpoint: weight * seconds * 640, BytesToClient: weight * seconds * 18_400,
			PacketsToEndpoint: weight * seconds * 6, PacketsToClient: weight * seconds * 9,
			HandshakeMsLog2: []uint64{weight * seconds * 7 / 10, weight * seconds * 2 / 10, weight * seconds / 10, 0, 0, 0, 0, 0},
		},
	}
	if !n.Healthy {
		switch s.Namespace + "/" + s.Name {
		case RefusingService:
			q.Counters.Refused = 2 * seconds
		case DroppingService:
			q.Counters.Dropped = 3 * seconds
		}
	}
	if s.Namespace+"/"+s.Name == UncountedService {
		c := q.Counters
		c.BytesToEndpoint, c.BytesToClient, c.PacketsToEndpoint, c.PacketsToClient = 0, 0, 0, 0
	}
	if whole {
		q.Endpoints, q.Differences, q.Compared = p.Endpoints, p.Differences, p.Compared
	}
	out := &node.Service{Namespace: s.Namespace, Name: s.Name, Type: s.Type, Ports: []*node.ServicePort{q}}
	if !n.Healthy && s.Namespace+"/"+s.Name == RefusedService {
		out.Findings, out.Health = []*node.Finding{n.refuses()}, "endpoint-refuses"
	}
	if !n.Healthy && s.Name == "ingress" {
		out.Problems = []*node.Problem{{Where: "Service edge/ingress",
			What: "externalTrafficPolicy Local, and no endpoint is on this node: packets from outside are dropped"}}
	}
	return out
}

// GetService returns a Service with its endpoints.
func (n *Node) GetService(_ context.Context, req *node.GetServiceRequest) (*node.GetServiceResponse, error) {
	for _, s := range n.list {
		if s.Namespace == req.Namespace && s.Name == req.Name {
			return &node.GetServiceResponse{Service: n.service(s, true)}, nil
		}
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("Service %s/%s: not on this node", req.Namespace, req.Name))
}

// ListFlows returns flows that could be in the table.
func (n *Node) ListFlows(_ context.Context, req *node.ListFlowsRequest) (*node.ListFlowsResponse, error) {
	r := &node.ListFlowsResponse{More: true}
	g := n.generator(7)
	for len(r.Flows) < cmp.Or(int(req.Limit), 200) {
		f := g.flow()
		f.State = "established"
		if f.Handshake == nil {
			f.State = "syn_sent"
		}
		if matches(req.Filter, &node.FlowEvent{Flow: f}) || len(n.targets) == 0 {
			r.Flows = append(r.Flows, f)
		}
		if g.made > 20_000 {
			break
		}
	}
	return r, nil
}

// WatchFlows sends events until the caller ends.
func (n *Node) WatchFlows(ctx context.Context, req *node.WatchFlowsRequest, stream *connect.ServerStream[node.WatchFlowsResponse]) error {
	if n.NoWatch {
		return connect.NewError(connect.CodeUnimplemented, fmt.Errorf("WatchFlows: not implemented"))
	}
	const pause = 50 * time.Millisecond
	g := n.generator(uint64(time.Now().UnixNano()))
	began, made := time.Now(), 0
	if req.Since != nil && !n.quiet.Load() { // what it remembers
		var r node.WatchFlowsResponse
		for g.at = req.Since.AsTime(); n.Rate > 0 && g.at.Before(began); g.at = g.at.Add(time.Second / time.Duration(n.Rate)) {
			if e := g.event(); matches(req.Filter, e) {
				r.Events = append(r.Events, e)
			}
		}
		g.at = time.Time{}
		n.sent.Add(uint64(len(r.Events)))
		if err := stream.Send(&r); err != nil {
			return err
		}
	}
	for tick := time.NewTicker(pause); ; {
		var r node.WatchFlowsResponse
		quiet := n.quiet.Load()
		for due := int(time.Since(began).Seconds() * float64(n.Rate)); made < due; made++ {
			if e := g.event(); !quiet && matches(req.Filter, e) {
				r.Events = append(r.Events, e)
			}
		}
		n.sent.Add(uint64(len(r.Events)))
		if len(r.Events) > 0 {
			if err := stream.Send(&r); err != nil {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			tick.Stop()
			return nil
		}
	}
}

func matches(f *node.FlowFilter, e *node.FlowEvent) bool {
	if f == nil {
		return true
	}
	flow := e.Flow
	peers := []*node.Peer{flow.Client}
	if flow.Endpoint != nil {
		peers = append(peers, flow.Endpoint)
	}
	any := func(match func(*node.Peer) bool) bool { return slices.ContainsFunc(peers, match) }
	return (f.Namespace == "" || f.Namespace == flow.Namespace) && (f.Service == "" || f.Service == flow.Service) &&
		(f.Pod == "" || any(func(p *node.Peer) bool { return p.Pod == f.Pod })) &&
		(f.Address == "" || any(func(p *node.Peer) bool { return p.Address == f.Address })) &&
		(f.Port == 0 || f.Port == flow.ServiceAddress.Port || flow.Endpoint.GetPort() == f.Port) &&
		(len(f.Kinds) == 0 || slices.Contains(f.Kinds, e.Kind))
}

// Drops returns the drops of the planted faults.
func (n *Node) Drops(context.Context, *node.DropsRequest) (*node.DropsResponse, error) {
	if n.Healthy {
		return &node.DropsResponse{}, nil
	}
	seconds := uint64(time.Since(n.started).Seconds()) + 60
	return &node.DropsResponse{Drops: []*node.Drop{
		{Reason: "snat_ports", Meaning: "no free port of the node towards the endpoint", Packets: 3 * seconds, Namespace: "shop", Service: "web"},
		{Reason: "source_range", Meaning: "the client is outside loadBalancerSourceRanges", Packets: 2 * seconds,
			Namespace: "shop", Service: "checkout"},
		{Reason: "policy_local", Meaning: "a Local policy, and no endpoint on this node", Packets: 41, Namespace: "edge", Service: "ingress"},
		{Reason: "flow_table", Meaning: "the flow could not be stored", Packets: 7},
	}}, nil
}

// Findings returns one finding of each severity.
func (n *Node) Findings(context.Context, *node.FindingsRequest) (*node.FindingsResponse, error) {
	if n.Healthy {
		return &node.FindingsResponse{}, nil
	}
	const docs = "https://spillway.dev/docs/runbooks/"
	return &node.FindingsResponse{
		Findings: []*node.Finding{
			{Id: "timeouts-long", Severity: "info", Title: "Finished flows hold 6 % of the table",
				Detail: "The table carries fewer connections in a second than it could.", Fix: "Use shorter timeouts.",
				Documentation: docs + "timeouts-long/", Commands: []string{"sysctl -w net.netfilter.nf_conntrack_tcp_timeout_time_wait=10"}},
			{Id: "conntrack-table-full", Severity: "critical", Title: "The conntrack table of the node is 97 % full",
				Detail: "New connections are dropped: 254,300 of 262,144 entries are in use.", Fix: "Raise nf_conntrack_max and nf_conntrack_buckets.",
				Documentation: docs + "conntrack-table-full/",
				Evidence:      []string{"254,300 of 262,144 entries", "drop grew by 1,204 in the last second"},
				Commands:      []string{"sysctl -w net.netfilter.nf_conntrack_max=1048576", "sysctl -w net.netfilter.nf_conntrack_buckets=262144"}},
			{Id: "masquerade-not-random", Severity: "warning", Title: "A masquerade rule does not use random ports",
				Detail: "New connections can lose their first packet: the rule of flannel gives two connections one port.",
				Fix:    "Use the same rule with --random-fully.", Documentation: docs + "masquerade-not-random/",
				Evidence: []string{"-A FLANNEL-POSTRTG -s 10.244.0.0/16 -j MASQUERADE"}},
		},
		Problems: []*node.Problem{{Where: "namespace of pod default/vm-1", What: "its sysctls cannot be read: permission denied"}},
	}, nil
}

type generator struct {
	node  *Node
	rand  *rand.Rand
	total int
	sums  []int // of weights up to each target
	made  int
	open  []*node.Flow
	at    time.Time // of what happens; zero: now
}

func (n *Node) generator(seed uint64) *generator {
	g := &generator{node: n, rand: rand.New(rand.NewPCG(seed, 1))}
	for _, t := range n.targets {
		g.total += t.weight
		g.sums = append(g.sums, g.total)
	}
	return g
}

// flow is a new one. Most go to a random endpoint; one of eight meets a planted fault, so that
// none has to be waited for.
func (g *generator) flow() *node.Flow {
	g.made++
	i, _ := slices.BinarySearch(g.sums, g.rand.IntN(g.total)+1)
	switch {
	case g.node.Healthy:
	case g.made%16 == 0:
		i = slices.IndexFunc(g.node.targets, func(t target) bool { return t.endpoint.Address == DeadEndpoint })
	case g.made%16 == 4:
		i = slices.IndexFunc(g.node.targets, func(t target) bool { return t.endpoint.Address == RefusedEndpoint })
	case g.made%16 == 8:
		i = slices.IndexFunc(g.node.targets, func(t target) bool { return t.service.Namespace+"/"+t.service.Name == RefusingService })
	}
	t, c := g.node.targets[i], clients[g.rand.IntN(6)]
	front := t.port.Frontends[0]
	if t.service.Type != "ClusterIP" && g.rand.IntN(3) > 0 {
		front, c = t.port.Frontends[len(t.port.Frontends)-1], clients[6+g.rand.IntN(2)]
	}
	address := front.Address
	if address == "" {
		address = "192.168.7.10"
	}
	now := g.now()
	f := &node.Flow{
		Node: g.node.Name, Protocol: t.port.Protocol, Namespace: t.service.Namespace, Service: t.service.Name, PortName: t.port.Name,
		Client:         &node.Peer{Address: c.address, Port: uint32(32768 + g.rand.IntN(28000)), Pod: c.pod, Node: c.node},
		ServiceAddress: &node.Peer{Address: address, Port: front.Port},
		Endpoint:       &node.Peer{Address: t.endpoint.Address, Port: t.endpoint.Port, Pod: t.endpoint.Pod, Node: t.endpoint.Node},
		BySocket:       c.pod != "" && g.rand.IntN(2) == 0, Opened: timestamppb.New(now), LastSeen: timestamppb.New(now), State: "syn_sent",
	}
	switch {
	case g.reset(f):
		f.PacketsToEndpoint, f.PacketsToClient, f.BytesToEndpoint, f.BytesToClient = 1, 1, 60, 40
	case g.dead(f):
		f.PacketsToEndpoint = 4
	default:
		f.Handshake = durationpb.New(time.Duration(150+g.rand.ExpFloat64()*900) * time.Microsecond)
		if g.node.Handshake > 0 {
			f.Handshake = durationpb.New(g.node.Handshake)
		}
		f.SmoothedRtt = durationpb.New(f.Handshake.AsDuration() * 4 / 5)
		f.BytesToEndpoint, f.BytesToClient = uint64(200+g.rand.IntN(4000)), uint64(g.rand.IntN(90_000))
		f.PacketsToEndpoint, f.PacketsToClient = 6, uint64(4+g.rand.IntN(60))
	}
	return f
}

// now is the time of what happens.
func (g *generator) now() time.Time {
	if g.at.IsZero() {
		return time.Now()
	}
	return g.at
}

// reset reports whether the endpoint of a flow answers its first packet with an RST, as it does to every other one.
func (g *generator) reset(f *node.Flow) bool {
	return !g.node.Healthy && f.Endpoint.GetAddress() == RefusedEndpoint && f.Client.Port%2 == 0
}

func (g *generator) dead(f *node.Flow) bool {
	return !g.node.Healthy && f.Endpoint.GetAddress() == DeadEndpoint && f.Service == "ledger"
}

// event is the next one: a flow opens, or one that is open goes on.
func (g *generator) event() *node.FlowEvent {
	now := timestamppb.New(g.now())
	if len(g.open) > 400 || len(g.open) > 20 && g.rand.IntN(3) > 0 {
		i := g.rand.IntN(len(g.open))
		f := g.open[i]
		if f.State == "syn_sent" && !g.dead(f) && !g.reset(f) {
			f.State = "established"
			return &node.FlowEvent{Kind: node.EventKind_EVENT_KIND_ANSWERED, Time: now, Flow: f}
		}
		g.open = slices.Delete(g.open, i, i+1)
		reason := "FIN"
		switch {
		case g.dead(f), f.Protocol == node.Protocol_PROTOCOL_UDP:
			reason = "timeout"
		case g.reset(f), g.rand.IntN(20) == 0:
			reason = "RST"
		}
		f.State, f.LastSeen = "closed", now
		return &node.FlowEvent{Kind: node.EventKind_EVENT_KIND_CLOSED, Time: now, Flow: f, Reason: reason}
	}
	f := g.flow()
	kind, reason := node.EventKind_EVENT_KIND_OPENED, ""
	if g.node.Hostile && g.made%10 == 0 {
		f.Client.Pod, f.Client.Node, f.Service, f.PortName = Hostile+"/x", Hostile, Hostile, Hostile
		return &node.FlowEvent{Kind: node.EventKind_EVENT_KIND_DROPPED, Time: now, Flow: f, Reason: Hostile}
	}
	switch {
	case g.node.Healthy:
	case f.Namespace+"/"+f.Service == RefusingService && f.Client.Address == "198.51.100.7":
		kind, reason, f.Endpoint, f.Handshake = node.EventKind_EVENT_KIND_REFUSED, "source_range", nil, nil
	case f.Namespace+"/"+f.Service == DroppingService && f.Client.Pod == "" && g.rand.IntN(3) == 0:
		kind, reason, f.Handshake = node.EventKind_EVENT_KIND_DROPPED, "snat_ports", nil
	}
	if kind == node.EventKind_EVENT_KIND_OPENED {
		g.open = append(g.open, f)
	} else {
		f.State, f.BytesToClient, f.BytesToEndpoint, f.PacketsToClient, f.PacketsToEndpoint, f.SmoothedRtt = "", 0, 0, 0, 1, nil
	}
	return &node.FlowEvent{Kind: kind, Time: now, Flow: f, Reason: reason}
}
