package server

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
)

const (
	// refusalWindow is how long a refusal is a finding.
	refusalWindow = time.Minute
	// An endpoint is a finding if leastUnanswered connections to it, opened within
	// answerWindow, have waited for answerPatience, and it has answered none opened since; or
	// if it has refused so many and accepted none opened since.
	// A TCP client repeats its first segment after 1 s (RFC 6298), so two were lost. The
	// window is shorter than the timeout of a flow without an answer (ebpf.Timeouts.TCPNew).
	leastUnanswered = 3
	answerPatience  = 1500 * time.Millisecond
	answerWindow    = 30 * time.Second
	// refusedWindow is how long the flow table keeps a refused connection
	// (ebpf.Timeouts.TCPClosed).
	refusedWindow = 10 * time.Second
	// readingShare bounds the cost of examinations and of reading the flow table: the next
	// begins so many times its duration after the last.
	readingShare = 20
	// mostTraffic limits the endpoints and the Service ports of a report, mostClients the clients of
	// each, and mostFailing the failing endpoints whose names are looked up. Namespaces take turns, and
	// of failing endpoints first the addresses of Services: none hides those of another.
	mostTraffic = 20
	mostClients = 1000
	mostFailing = 4096
)

// stateNew is the state of a flow whose endpoint has not answered.
const stateNew = "new"

// traffic returns what the backends and the flow events know about recent packets. Only
// evaluate calls it.
func (s *Server) traffic(ctx context.Context) (*doctor.Traffic, error) {
	t := &doctor.Traffic{}
	for _, in := range s.inspectors() {
		for _, table := range in.Tables() {
			if table.Name == "flows" {
				t.Flows = doctor.Table{Used: int(table.Used), Size: int(table.Size)}
			}
		}
	}
	var err error
	if t.Refusals, err = s.refusals(ctx); err != nil {
		return t, err
	}
	failing, err := s.failingEndpoints(ctx)
	if err != nil {
		return t, err
	}
	if t.Unanswered, err = s.nameFailing(ctx, failing, (*recentFlows).silent, answerWindow); err != nil {
		return t, err
	}
	if t.Refusing, err = s.nameFailing(ctx, failing, (*recentFlows).refusing, refusedWindow); err != nil {
		return t, err
	}
	if t.Denials, err = s.denied(ctx); err != nil {
		return t, err
	}
	if t.DSR, err = s.dsrTraffic(ctx); err != nil {
		return t, err
	}
	if t.Egress, err = s.egressPorts(ctx); err != nil {
		return t, err
	}
	if t.Bypass, err = s.egressBypass(); err != nil {
		return t, err
	}
	t.Taken, err = s.taken(ctx)
	return t, err
}

// endpointKey is an endpoint's address.
type endpointKey struct {
	protocol model.Protocol
	at       netip.AddrPort
}

// recentFlows are the connections to an endpoint that were opened within answerWindow. Those
// that waited count if they were opened after the last one that was answered, and those that
// were refused if after the last one that was accepted.
type recentFlows struct {
	answered, accepted time.Time // when the last such one was opened; zero: none was
	waiting, refused   []failedFlow
}

// failedFlow has waited for its answer for answerPatience or longer, or was refused.
type failedFlow struct {
	opened  time.Time
	client  netip.Addr
	service netip.AddrPort
}

// silent and refusing return the connections that make the endpoint a finding; nil: too few.
func (r *recentFlows) silent() []failedFlow   { return enough(r.waiting) }
func (r *recentFlows) refusing() []failedFlow { return enough(r.refused) }

func enough(list []failedFlow) []failedFlow {
	if len(list) < leastUnanswered {
		return nil
	}
	return list
}

func (r *recentFlows) answer(opened time.Time) { endsBefore(&r.answered, &r.waiting, opened) }
func (r *recentFlows) accept(opened time.Time) { endsBefore(&r.accepted, &r.refused, opened) }

// endsBefore records a success, and forgets the failures that were opened before.
func endsBefore(last *time.Time, failed *[]failedFlow, opened time.Time) {
	if opened.After(*last) {
		*last = opened
		*failed = slices.DeleteFunc(*failed, func(w failedFlow) bool { return !w.opened.After(opened) })
	}
}

// fail remembers a failure after the last success. Of more than mostClients it keeps the ones
// that it saw first.
func fail(failed *[]failedFlow, last time.Time, f *dataplane.Flow) {
	if len(*failed) < mostClients && f.Opened.After(last) {
		*failed = append(*failed, failedFlow{f.Opened, f.Client.Addr(), f.Service})
	}
}

// clientsOf counts failures by client, and returns how long ago the first and the last one
// began.
func clientsOf(failed []failedFlow, now time.Time) (clients map[string]int, longest, latest time.Duration) {
	clients, latest = map[string]int{}, answerWindow
	for _, w := range failed {
		clients[w.client.String()]++
		longest, latest = max(longest, now.Sub(w.opened)), min(latest, now.Sub(w.opened))
	}
	return clients, longest, latest
}

// flowWalk is the last reading of the flow table.
type flowWalk struct {
	ended   time.Time
	took    time.Duration
	failing map[endpointKey]*recentFlows
}

// failingEndpoints returns the endpoints that answer or accept no connection. The result may
// be from the last reading of the flow table: see readingShare.
func (s *Server) failingEndpoints(ctx context.Context) (map[endpointKey]*recentFlows, error) {
	last := &s.walk
	if !last.ended.IsZero() && time.Since(last.ended) < readingShare*last.took {
		return last.failing, nil
	}
	began, found := time.Now(), map[endpointKey]*recentFlows{}
	for _, in := range s.inspectors() {
		if err := in.Flows(ctx, func(f dataplane.Flow) bool { addRecent(found, &f, began); return true }); err != nil {
			return nil, fmt.Errorf("read the flow table: %w", err)
		}
	}
	maps.DeleteFunc(found, func(_ endpointKey, r *recentFlows) bool { return r.silent() == nil && r.refusing() == nil })
	s.walk = flowWalk{ended: time.Now(), took: time.Since(began), failing: found}
	return found, nil
}

// addRecent counts a flow. Many UDP protocols have no answers, so UDP is not counted. Nor is a flow
// whose answers pass another way, or one to the outside.
func addRecent(found map[endpointKey]*recentFlows, f *dataplane.Flow, now time.Time) {
	age := now.Sub(f.Opened)
	if f.Protocol == model.UDP || f.OneWay || f.Egress || f.Opened.IsZero() || age > answerWindow {
		return
	}
	key := endpointKey{f.Protocol, f.Endpoint}
	r := found[key]
	if r == nil {
		r = &recentFlows{}
		found[key] = r
	}
	switch {
	case f.State == stateNew:
		if age >= answerPatience {
			fail(&r.waiting, r.answered, f)
		}
	case f.Refused:
		r.answer(f.Opened)
		fail(&r.refused, r.accepted, f)
	default:
		r.answer(f.Opened)
		r.accept(f.Opened)
	}
}

// nameFailing names the endpoints with failures that their Service still has: connections to a
// removed endpoint end by themselves. The flow table has the failures of the window.
func (s *Server) nameFailing(ctx context.Context, all map[endpointKey]*recentFlows, failures func(*recentFlows) []failedFlow,
	window time.Duration) ([]doctor.FailingEndpoint, error) {
	failing := map[endpointKey][]failedFlow{}
	for k, r := range all {
		if list := failures(r); list != nil {
			failing[k] = list
		}
	}
	keys := slices.SortedFunc(maps.Keys(failing), func(a, b endpointKey) int {
		return cmp.Or(cmp.Compare(len(failing[b]), len(failing[a])), a.at.Compare(b.at), cmp.Compare(a.protocol, b.protocol))
	})
	keys = model.RoundRobin(keys, func(k endpointKey) netip.AddrPort { return failing[k][0].service })
	var named []namedEndpoint
	for some := range slices.Chunk(keys[:min(len(keys), mostFailing)], maxNames/2) {
		names := make([]reconcile.Address, 0, 2*len(some))
		for _, k := range some {
			names = append(names, reconcile.Address{Protocol: k.protocol, AddrPort: k.at, EndpointOfMax: maxEndpointOf},
				reconcile.Address{Protocol: k.protocol, AddrPort: failing[k][0].service})
		}
		if err := s.cfg.State.Names(ctx, names); err != nil {
			return nil, fmt.Errorf("name endpoints: %w", err)
		}
		for i, k := range some {
			if e := (namedEndpoint{k, names[2*i], names[2*i+1].Service}); slices.Contains(e.EndpointOf, e.of) {
				named = append(named, e)
			}
		}
	}
	named = model.RoundRobin(named, func(e namedEndpoint) string { return e.of.Service.Namespace })
	var list []doctor.FailingEndpoint
	for _, e := range named[:min(len(named), mostTraffic)] {
		u := doctor.FailingEndpoint{
			Service: servicePort(e.of.Service, e.of.Port, e.of.Number), Protocol: e.key.protocol.String(), Endpoint: e.key.at.String(), Node: e.Node,
			Flows: len(failing[e.key]), Window: window,
		}
		u.Clients, u.Longest, u.Latest = clientsOf(failing[e.key], time.Now())
		if e.Pod != (model.Name{}) {
			u.Pod = e.Pod.String()
		}
		list = append(list, u)
	}
	return list, nil
}

// namedEndpoint is a failing endpoint with its names, and the Service port whose clients fail.
type namedEndpoint struct {
	key endpointKey
	reconcile.Address
	of intent.PortID
}

// servicePort returns namespace/name:port.
func servicePort(name model.Name, port string, number uint16) string {
	if port == "" && number != 0 {
		port = fmt.Sprint(number)
	}
	if port == "" {
		return name.String()
	}
	return name.String() + ":" + port
}

// refusalKey is what one Refusal counts.
type refusalKey struct {
	service  model.Name
	port     string
	protocol model.Protocol
	reason   string
}

// refusals counts the refusals and drops of the last minute that the flow events in memory
// have. Events are limited by rate, so there may have been more packets.
func (s *Server) refusals(ctx context.Context) ([]doctor.Refusal, error) {
	if s.cfg.Events == nil {
		return nil, nil
	}
	now, found := time.Now(), map[refusalKey]*doctor.Refusal{}
	err := s.cfg.Events.Visit(
		flowlog.Filter{Kinds: []dataplane.FlowEventKind{dataplane.FlowRefused, dataplane.FlowDropped}},
		now.Add(-refusalWindow), func(e *flowlog.Event) { addRefusal(found, e, now) })
	if err != nil {
		return nil, err
	}
	keys := slices.SortedFunc(maps.Keys(found), func(a, b refusalKey) int {
		return cmp.Or(cmp.Compare(found[b].Packets, found[a].Packets), a.service.Compare(b.service), cmp.Compare(a.port, b.port),
			cmp.Compare(a.reason, b.reason), cmp.Compare(a.protocol, b.protocol))
	})
	keys = model.RoundRobin(keys, func(k refusalKey) string { return k.service.Namespace })
	var list []doctor.Refusal
	for _, k := range keys[:min(len(keys), mostTraffic)] {
		service, exists, err := s.cfg.State.Service(ctx, k.service)
		if err != nil {
			return nil, fmt.Errorf("look up Service %s: %w", k.service, err)
		}
		if !exists { // it was deleted meanwhile
			continue
		}
		r := found[k]
		r.Allowed = sourceRanges(&service, k, r.Address)
		if k.reason == doctor.ReasonSocketTimedOut {
			if len(r.Allowed) == 0 { // policy Local
				continue
			}
			r.Reason = doctor.ReasonSourceRange
		}
		list = append(list, *r)
	}
	return list, nil
}

// explained are the reasons of refusals and drops that a check explains.
var explained = []string{doctor.ReasonSourceRange, doctor.ReasonSNATPorts, doctor.ReasonSocketTimedOut}

// addRefusal counts an event, if there is a check of its reason and a Service to name.
func addRefusal(found map[refusalKey]*doctor.Refusal, e *flowlog.Event, now time.Time) {
	f := &e.Flow
	if f.Service == "" || !slices.Contains(explained, e.Reason) {
		return
	}
	key := refusalKey{model.Name{Namespace: f.Namespace, Name: f.Service}, f.PortName, f.Protocol, e.Reason}
	r := found[key]
	if r == nil {
		r = &doctor.Refusal{
			Reason: e.Reason, Service: servicePort(key.service, f.PortName, 0), Protocol: f.Protocol.String(),
			Window: refusalWindow, Ago: refusalWindow, Clients: map[string]int{},
		}
		found[key] = r
	}
	r.Packets++
	if ago := max(now.Sub(e.Time), 0); ago <= r.Ago {
		r.Ago, r.Address, r.Endpoint = ago, f.ServiceAddress.Address, ""
		if at := f.Endpoint.Address; at.IsValid() && !at.Addr().IsUnspecified() {
			r.Endpoint = at.String()
		}
	}
	client := f.Client.Address.Addr().String()
	switch {
	case e.Reason == doctor.ReasonSocketTimedOut: // a socket has no address before connect()
		client = "sockets of this node and its pods"
	case f.Client.Pod != "":
		client = "pod " + f.Client.Pod
	}
	if r.Clients[client] > 0 || len(r.Clients) < mostClients {
		r.Clients[client]++
	}
}

// sourceRanges returns the source ranges of a Service port at an address, sorted.
func sourceRanges(service *reconcile.Service, k refusalKey, at netip.AddrPort) (list []string) {
	ranges := map[netip.Prefix]bool{}
	for _, p := range service.Ports {
		if p.ID.Port != k.port || p.ID.Protocol != k.protocol {
			continue
		}
		for _, f := range p.Frontends {
			if !isAt(&f, at) {
				continue
			}
			for _, r := range f.SourceRanges {
				ranges[r] = true
			}
		}
	}
	for _, r := range slices.SortedFunc(maps.Keys(ranges), netip.Prefix.Compare) {
		list = append(list, r.String())
	}
	return list
}
