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
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
)

const (
	// refusalWindow is how long a refusal is a finding.
	refusalWindow = time.Minute
	// An endpoint is a finding if leastUnanswered connections to it, opened within
	// answerWindow, have waited for answerPatience, and it has answered none opened since.
	// A TCP client repeats its first segment after 1 s (RFC 6298), so two were lost. The
	// window is shorter than the timeout of a flow without an answer (ebpf.Timeouts.TCPNew).
	leastUnanswered = 3
	answerPatience  = 1500 * time.Millisecond
	answerWindow    = 30 * time.Second
	// readingShare bounds the cost of examinations and of reading the flow table: the next
	// begins so many times its duration after the last.
	readingShare = 20
	// mostTraffic limits the endpoints and the Service ports of a report, and mostClients the
	// clients of each.
	mostTraffic = 20
	mostClients = 1000
)

// stateNew is the state of a flow whose endpoint has not answered.
const stateNew = "new"

// traffic returns what the backends and the flow events know about recent packets. Only
// s.examining calls it.
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
	silent, err := s.silentEndpoints(ctx)
	if err != nil {
		return t, err
	}
	t.Unanswered, err = s.nameUnanswered(ctx, silent)
	return t, err
}

// endpointKey is an endpoint's address.
type endpointKey struct {
	protocol model.Protocol
	at       netip.AddrPort
}

// recentFlows are the connections to an endpoint that were opened within answerWindow. Those
// opened before the last one that was answered do not count.
type recentFlows struct {
	answered time.Time // when the last answered one was opened; zero: none was
	waiting  []waitingFlow
}

// waitingFlow has waited for its answer for answerPatience or longer.
type waitingFlow struct {
	opened  time.Time
	client  netip.Addr
	service netip.AddrPort
}

func (r *recentFlows) answer(opened time.Time) {
	if opened.After(r.answered) {
		r.answered = opened
		r.waiting = slices.DeleteFunc(r.waiting, func(w waitingFlow) bool { return !w.opened.After(opened) })
	}
}

// wait remembers a flow. Of more than mostClients it keeps the ones that it saw first.
func (r *recentFlows) wait(f *dataplane.Flow) {
	if len(r.waiting) < mostClients && f.Opened.After(r.answered) {
		r.waiting = append(r.waiting, waitingFlow{f.Opened, f.Client.Addr(), f.Service})
	}
}

// clients counts the waiting flows by client, and returns how long the oldest has waited.
func (r *recentFlows) clients(now time.Time) (clients map[string]int, longest time.Duration) {
	clients = map[string]int{}
	for _, w := range r.waiting {
		clients[w.client.String()]++
		longest = max(longest, now.Sub(w.opened))
	}
	return clients, longest
}

// flowWalk is the last reading of the flow table.
type flowWalk struct {
	ended  time.Time
	took   time.Duration
	silent map[endpointKey]*recentFlows
}

// silentEndpoints returns the endpoints that answer no connection. The result may be from the
// last reading of the flow table: see readingShare.
func (s *Server) silentEndpoints(ctx context.Context) (map[endpointKey]*recentFlows, error) {
	last := &s.walk
	if !last.ended.IsZero() && time.Since(last.ended) < readingShare*last.took {
		return last.silent, nil
	}
	began, found := time.Now(), map[endpointKey]*recentFlows{}
	for _, in := range s.inspectors() {
		if err := in.Flows(ctx, func(f dataplane.Flow) bool { addRecent(found, &f, began); return true }); err != nil {
			return nil, fmt.Errorf("read the flow table: %w", err)
		}
	}
	maps.DeleteFunc(found, func(_ endpointKey, r *recentFlows) bool { return len(r.waiting) < leastUnanswered })
	s.walk = flowWalk{ended: time.Now(), took: time.Since(began), silent: found}
	return found, nil
}

// addRecent counts a flow. Many UDP protocols have no answers, so UDP is not counted.
func addRecent(found map[endpointKey]*recentFlows, f *dataplane.Flow, now time.Time) {
	age := now.Sub(f.Opened)
	if f.Protocol == model.UDP || f.Opened.IsZero() || age > answerWindow {
		return
	}
	key := endpointKey{f.Protocol, f.Endpoint}
	r := found[key]
	if r == nil {
		r = &recentFlows{}
		found[key] = r
	}
	switch {
	case f.State != stateNew:
		r.answer(f.Opened)
	case age >= answerPatience:
		r.wait(f)
	}
}

// nameUnanswered names the endpoints that their Service still has: connections to a removed
// endpoint end by themselves.
func (s *Server) nameUnanswered(ctx context.Context, silent map[endpointKey]*recentFlows) ([]doctor.Unanswered, error) {
	keys := slices.SortedFunc(maps.Keys(silent), func(a, b endpointKey) int {
		return cmp.Or(cmp.Compare(len(silent[b].waiting), len(silent[a].waiting)), a.at.Compare(b.at), cmp.Compare(a.protocol, b.protocol))
	})
	keys = keys[:min(len(keys), maxNames/2)]
	if len(keys) == 0 {
		return nil, nil
	}
	names := make([]reconcile.Address, 0, 2*len(keys))
	for _, k := range keys {
		names = append(names, reconcile.Address{Protocol: k.protocol, AddrPort: k.at, EndpointOfMax: maxEndpointOf},
			reconcile.Address{Protocol: k.protocol, AddrPort: silent[k].waiting[0].service})
	}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return nil, fmt.Errorf("name endpoints: %w", err)
	}
	var list []doctor.Unanswered
	for i, k := range keys {
		endpoint, service, r := names[2*i], names[2*i+1].Service, silent[k]
		if !slices.Contains(endpoint.EndpointOf, service) {
			continue
		}
		u := doctor.Unanswered{
			Service: servicePort(service.Service, service.Port, service.Number), Protocol: k.protocol.String(), Endpoint: k.at.String(), Node: endpoint.Node,
			Flows: len(r.waiting), Window: answerWindow,
		}
		u.Clients, u.Longest = r.clients(time.Now())
		if endpoint.Pod != (model.Name{}) {
			u.Pod = endpoint.Pod.String()
		}
		if list = append(list, u); len(list) == mostTraffic {
			break
		}
	}
	return list, nil
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
		return cmp.Or(cmp.Compare(found[b].Packets, found[a].Packets), a.service.Compare(b.service), cmp.Compare(a.port, b.port), cmp.Compare(a.reason, b.reason), cmp.Compare(a.protocol, b.protocol))
	})
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
