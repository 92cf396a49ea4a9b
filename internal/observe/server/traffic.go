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
	// Of sockets of this node, each SYN counts that had no answer for half a second.
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
	if t.Unanswered, err = s.nameFailing(ctx, failing, (*recentFlows).silent); err != nil {
		return t, err
	}
	if t.Refusing, err = s.nameFailing(ctx, failing, (*recentFlows).refusing); err != nil {
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
	sockets            dataplane.FailedSockets // of the node, whose connections are no flows
}

// failedFlow has waited for its answer for answerPatience or longer, or was refused.
type failedFlow struct {
	opened  time.Time
	client  netip.Addr
	service netip.AddrPort
}

// failures are the failed connections that make an endpoint a finding.
type failures struct {
	flows   []failedFlow
	sockets dataplane.Failures // zero: none
	window  time.Duration      // in which all of them began
}

func (f *failures) connections() int { return len(f.flows) + int(f.sockets.Connections) }

// silent and refusing return the connections that make the endpoint a finding; nil: too few.
func (r *recentFlows) silent(now time.Time) *failures {
	return enough(r.waiting, r.answered, r.sockets.Unanswered, answerWindow, now)
}

func (r *recentFlows) refusing(now time.Time) *failures {
	return enough(r.refused, r.accepted, r.sockets.Refused, refusedWindow, now)
}

func enough(flows []failedFlow, success time.Time, sockets dataplane.Failures, window time.Duration, now time.Time) *failures {
	f := &failures{flows: flows, window: window}
	if sockets.Last.After(success) && now.Sub(sockets.Last) <= window {
		f.sockets, f.window = sockets, max(window, now.Sub(sockets.First))
	}
	if len(flows)+int(f.sockets.Segments) < leastUnanswered {
		return nil
	}
	return f
}

func (r *recentFlows) answer(opened time.Time) { endsBefore(&r.answered, &r.waiting, opened) }
func (r *recentFlows) accept(opened time.Time) { endsBefore(&r.accepted, &r.refused, opened) }

// endsBefore records a success, and forgets the failures that were opened before.
func endsBefore(last *time.Time, failed *[]failedFlow, opened time.Time) {
	if opened.After(*last) {
		*last = opened
		*failed = slices.DeleteFunc(slices.Clone(*failed), func(w failedFlow) bool { return !w.opened.After(opened) })
	}
}

// clone returns a copy, also of nil.
func (r *recentFlows) clone() *recentFlows {
	if r == nil {
		return &recentFlows{}
	}
	own := *r
	return &own
}

// addSockets adds failed connections of sockets. Several Service ports may have the endpoint.
func (r *recentFlows) addSockets(f *dataplane.FailedSockets) {
	s := &r.sockets
	if f.Refused.Connections+f.Unanswered.Connections > s.Refused.Connections+s.Unanswered.Connections {
		s.Port = f.Port
	}
	if f.Last().After(s.Last()) {
		s.Client = f.Client
	}
	s.Refused.Add(f.Refused)
	s.Unanswered.Add(f.Unanswered)
	r.answer(f.Refused.Last)
	r.answer(f.Accepted)
	r.accept(f.Accepted)
}

// fail remembers a failure after the last success. Of more than mostClients it keeps the ones
// that it saw first.
func fail(failed *[]failedFlow, last time.Time, f *dataplane.Flow) {
	if len(*failed) < mostClients && f.Opened.After(last) {
		*failed = append(*failed, failedFlow{f.Opened, f.Client.Addr(), f.Service})
	}
}

// clientsOf counts the failures of flows by client, and returns how long ago the first and the last
// failure began.
func clientsOf(failed *failures, now time.Time) (clients map[string]int, longest, latest time.Duration) {
	clients, latest = map[string]int{}, answerWindow
	for _, w := range failed.flows {
		clients[w.client.String()]++
		longest, latest = max(longest, now.Sub(w.opened)), min(latest, now.Sub(w.opened))
	}
	if s := failed.sockets; s.Connections > 0 {
		longest, latest = max(longest, now.Sub(s.First)), min(latest, now.Sub(s.Last))
	}
	return clients, longest, latest
}

// flowWalk is the last reading of the flow table.
type flowWalk struct {
	ended  time.Time
	took   time.Duration
	recent map[endpointKey]*recentFlows
}

// failingEndpoints returns the endpoints that answer or accept no connection. What it knows of flows
// may be from the last reading of the flow table: see readingShare.
func (s *Server) failingEndpoints(ctx context.Context) (map[endpointKey]*recentFlows, error) {
	walked, err := s.recentFlows(ctx)
	if err != nil {
		return nil, err
	}
	found := maps.Clone(walked)
	for _, b := range s.cfg.Backends {
		watcher, ok := b.(dataplane.SocketWatcher)
		if !ok {
			continue
		}
		list, err := watcher.FailedSockets()
		if err != nil {
			return nil, fmt.Errorf("read failed connections of sockets: %w", err)
		}
		merged := map[endpointKey]bool{}
		for i := range list {
			key := endpointKey{list[i].Port.Protocol, list[i].Endpoint}
			if !merged[key] { // what was walked stays as it is
				merged[key], found[key] = true, found[key].clone()
			}
			found[key].addSockets(&list[i])
		}
	}
	now := time.Now()
	maps.DeleteFunc(found, func(_ endpointKey, r *recentFlows) bool { return r.silent(now) == nil && r.refusing(now) == nil })
	return found, nil
}

// recentFlows returns the connections in the flow table.
func (s *Server) recentFlows(ctx context.Context) (map[endpointKey]*recentFlows, error) {
	last := &s.walk
	if !last.ended.IsZero() && time.Since(last.ended) < readingShare*last.took {
		return last.recent, nil
	}
	began, found := time.Now(), map[endpointKey]*recentFlows{}
	for _, in := range s.inspectors() {
		if err := in.Flows(ctx, func(f dataplane.Flow) bool { addRecent(found, &f, began); return true }); err != nil {
			return nil, fmt.Errorf("read the flow table: %w", err)
		}
	}
	s.walk = flowWalk{ended: time.Now(), took: time.Since(began), recent: found}
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
// removed endpoint end by themselves.
func (s *Server) nameFailing(ctx context.Context, all map[endpointKey]*recentFlows,
	choose func(*recentFlows, time.Time) *failures) ([]doctor.FailingEndpoint, error) {
	failing, now := map[endpointKey]*failures{}, time.Now()
	for k, r := range all {
		if list := choose(r, now); list != nil {
			failing[k] = list
		}
	}
	keys := slices.SortedFunc(maps.Keys(failing), func(a, b endpointKey) int {
		return cmp.Or(cmp.Compare(failing[b].connections(), failing[a].connections()), a.at.Compare(b.at), cmp.Compare(a.protocol, b.protocol))
	})
	keys = model.RoundRobin(keys, func(k endpointKey) string {
		if list := failing[k].flows; len(list) > 0 {
			return list[0].service.String()
		}
		return all[k].sockets.Port.Service.String()
	})
	var named []namedEndpoint
	for some := range slices.Chunk(keys[:min(len(keys), mostFailing)], maxNames/2) {
		names := make([]reconcile.Address, 0, 2*len(some))
		for _, k := range some {
			names = append(names, reconcile.Address{Protocol: k.protocol, AddrPort: k.at, EndpointOfMax: maxEndpointOf})
		}
		for _, k := range some {
			if list := failing[k].flows; len(list) > 0 {
				names = append(names, reconcile.Address{Protocol: k.protocol, AddrPort: list[0].service})
			}
		}
		if err := s.cfg.State.Names(ctx, names); err != nil {
			return nil, fmt.Errorf("name endpoints: %w", err)
		}
		services := names[len(some):]
		for i, k := range some {
			e := namedEndpoint{k, names[i], all[k].sockets.Port}
			if len(failing[k].flows) > 0 {
				e.of, services = services[0].Service, services[1:]
			}
			if slices.Contains(e.EndpointOf, e.of) {
				named = append(named, e)
			}
		}
	}
	named = model.RoundRobin(named, func(e namedEndpoint) string { return e.of.Service.Namespace })
	var list []doctor.FailingEndpoint
	for _, e := range named[:min(len(named), mostTraffic)] {
		u := e.failing(failing[e.key])
		if u.Sockets > 0 {
			var err error
			if u.Socket, err = s.nameOfClient(ctx, all[e.key].sockets.Client); err != nil {
				return nil, err
			}
		}
		list = append(list, u)
	}
	return list, nil
}

// failing describes the failures of an endpoint.
func (e *namedEndpoint) failing(f *failures) doctor.FailingEndpoint {
	u := doctor.FailingEndpoint{
		Service: servicePort(e.of.Service, e.of.Port, e.of.Number), Protocol: e.key.protocol.String(), Endpoint: e.key.at.String(), Node: e.Node,
		Flows: f.connections(), Sockets: int(f.sockets.Connections), Window: f.window,
	}
	u.Clients, u.Longest, u.Latest = clientsOf(f, time.Now())
	if e.Pod != (model.Name{}) {
		u.Pod = e.Pod.String()
	}
	return u
}

// nameOfClient names a client for people.
func (s *Server) nameOfClient(ctx context.Context, client netip.Addr) (string, error) {
	names := []reconcile.Address{{AddrPort: netip.AddrPortFrom(client, 0)}}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return "", fmt.Errorf("name a client: %w", err)
	}
	if pod := names[0].Pod; pod != (model.Name{}) {
		return fmt.Sprintf("pod %s (%s)", pod, client), nil
	}
	return client.String(), nil
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

// refusal is a Refusal in the making.
type refusal struct {
	doctor.Refusal
	cgroup uint64 // of the last client, if it is a socket; 0: unknown
}

// refusals counts the refusals and drops of the last minute that the flow events in memory
// have. Events are limited by rate, so there may have been more packets.
func (s *Server) refusals(ctx context.Context) ([]doctor.Refusal, error) {
	if s.cfg.Events == nil {
		return nil, nil
	}
	now, found := time.Now(), map[refusalKey]*refusal{}
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
		if r := found[k]; exists && s.explain(r, k, &service) { // else it was deleted or changed meanwhile
			list = append(list, r.Refusal)
		}
	}
	return list, nil
}

// explain completes a refusal by what the Service is now. It reports false if that is no longer
// the reason.
func (s *Server) explain(r *refusal, k refusalKey, service *reconcile.Service) bool {
	switch k.reason {
	case doctor.ReasonNoEndpoint:
		r.Cause = noEndpointCause(service, k, r.Address)
		if r.cgroup != 0 {
			r.Client = s.clients.name(r.cgroup)
		}
		return r.Cause != ""
	case doctor.ReasonSocketTimedOut:
		r.Reason = doctor.ReasonSourceRange
	}
	r.Allowed = sourceRanges(service, k, r.Address)
	return k.reason != doctor.ReasonSocketTimedOut || len(r.Allowed) > 0 // else by policy Local
}

// noEndpointCause says why a Service port has no endpoint; "": it has one by now.
func noEndpointCause(service *reconcile.Service, k refusalKey, at netip.AddrPort) string {
	refuses, family := false, model.IPv4
	for _, p := range service.Ports {
		for _, f := range p.Frontends {
			if p.ID.Port == k.port && p.ID.Protocol == k.protocol && isAt(&f, at) &&
				(f.InternalRoute == intent.Reject || f.ExternalRoute == intent.Reject) {
				refuses, family = true, p.ID.Family
			}
		}
	}
	if !refuses {
		return ""
	}
	all, ready, ofPort := 0, 0, 0
	for _, slice := range service.Slices {
		if slice.Family != family {
			continue
		}
		has := slices.ContainsFunc(slice.Ports, func(p model.EndpointPort) bool { return p.Name == k.port && p.Protocol == k.protocol })
		for i := range slice.Endpoints {
			all++
			if slice.Endpoints[i].Ready {
				ready++
			}
			if has {
				ofPort++
			}
		}
	}
	switch {
	case all == 0:
		return "its selector matches no ready Pod"
	case ready == 0:
		return fmt.Sprintf("none of its endpoints (%d) is ready", all)
	case ofPort == 0:
		return "its ready endpoints have no such port: compare targetPort with the ports of the Pods"
	}
	return "none of its endpoints can be used"
}

// reasons are those of refusals and drops that a check explains, with the reason that it knows.
var reasons = map[string]string{
	doctor.ReasonSourceRange: doctor.ReasonSourceRange, doctor.ReasonSocketTimedOut: doctor.ReasonSocketTimedOut,
	doctor.ReasonSNATPorts: doctor.ReasonSNATPorts, doctor.ReasonNoEndpoint: doctor.ReasonNoEndpoint,
	doctor.ReasonNoEndpointUDP: doctor.ReasonNoEndpoint, doctor.ReasonSocketRefused: doctor.ReasonNoEndpoint,
}

// addRefusal counts an event, if there is a check of its reason and a Service to name.
func addRefusal(found map[refusalKey]*refusal, e *flowlog.Event, now time.Time) {
	f, reason := &e.Flow, reasons[e.Reason]
	if f.Service == "" || reason == "" {
		return
	}
	key := refusalKey{model.Name{Namespace: f.Namespace, Name: f.Service}, f.PortName, f.Protocol, reason}
	r := found[key]
	if r == nil {
		r = &refusal{Refusal: doctor.Refusal{
			Reason: reason, Service: servicePort(key.service, f.PortName, 0), Protocol: f.Protocol.String(),
			Window: refusalWindow, Ago: refusalWindow, Clients: map[string]int{},
		}}
		found[key] = r
	}
	r.Packets++
	client := f.Client.Address.Addr().String()
	switch {
	case f.BySocket || e.Reason == doctor.ReasonSocketTimedOut: // a socket has no address before connect()
		client = "sockets of this node and its pods"
	case f.Client.Pod != "":
		client = "pod " + f.Client.Pod
	}
	if ago := max(now.Sub(e.Time), 0); ago <= r.Ago {
		r.Ago, r.Address, r.Endpoint, r.Client, r.cgroup = ago, f.ServiceAddress.Address, "", client, f.Cgroup
		if at := f.Endpoint.Address; at.IsValid() && !at.Addr().IsUnspecified() {
			r.Endpoint = at.String()
		}
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
