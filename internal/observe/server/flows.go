package server

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
)

// The number of flows in a response.
const (
	usualFlows = 1000
	mostFlows  = 20_000
)

// namedAtOnce is how many flows one question to reconcile names.
const namedAtOnce = 512

// ListFlows reads the flow table until it has found enough. Flows are in no order.
func (s service) ListFlows(ctx context.Context, req *nodev1alpha1.ListFlowsRequest) (*nodev1alpha1.ListFlowsResponse, error) {
	filter, err := newFilter(req.Filter)
	if err != nil {
		return nil, err
	}
	list := flowList{server: s.Server, filter: filter, resp: &nodev1alpha1.ListFlowsResponse{},
		limit: int(min(req.Limit, mostFlows)), state: req.State, egress: req.Egress}
	if list.limit == 0 {
		list.limit = usualFlows
	}
	if filter.noFlow {
		return list.resp, nil
	}
	for _, in := range s.inspectors() {
		if err := in.Flows(ctx, func(f dataplane.Flow) bool { return list.add(ctx, f) }); err != nil {
			return nil, err
		}
	}
	list.name(ctx)
	// The table has no order.
	slices.SortStableFunc(list.resp.Flows, func(a, b *nodev1alpha1.Flow) int {
		return cmp.Or(b.Opened.AsTime().Compare(a.Opened.AsTime()), strings.Compare(a.Client.Address, b.Client.Address),
			cmp.Compare(a.Client.Port, b.Client.Port))
	})
	return list.resp, list.err
}

// filter selects flows.
type filter struct {
	*nodev1alpha1.FlowFilter
	prefix netip.Prefix // invalid: all
	// noFlow: the filter asks for events that say that there is no flow, or not any more.
	noFlow bool
}

func newFilter(f *nodev1alpha1.FlowFilter) (filter, error) {
	if f == nil {
		f = &nodev1alpha1.FlowFilter{}
	}
	out := filter{FlowFilter: f}
	var err error
	if out.prefix, err = parsePrefix(f); err != nil {
		return out, connect.NewError(connect.CodeInvalidArgument, err)
	}
	out.noFlow = len(f.Kinds) > 0 && !slices.Contains(f.Kinds, nodev1alpha1.EventKind_EVENT_KIND_OPENED) &&
		!slices.Contains(f.Kinds, nodev1alpha1.EventKind_EVENT_KIND_ANSWERED)
	return out, nil
}

// parsePrefix returns the prefix of a filter's address; "" is the zero prefix.
func parsePrefix(f *nodev1alpha1.FlowFilter) (netip.Prefix, error) {
	prefix, err := flowlog.ParsePrefix(f.Address)
	if err != nil {
		return prefix, fmt.Errorf("filter.address: %w", err)
	}
	return prefix, nil
}

// byAddress compares what needs no names.
func (f *filter) byAddress(flow dataplane.Flow) bool {
	if f.prefix.IsValid() && !f.prefix.Contains(flow.Client.Addr()) && !f.prefix.Contains(flow.Endpoint.Addr()) {
		return false
	}
	return f.Port == 0 || f.Port == uint32(flow.Service.Port()) || f.Port == uint32(flow.Endpoint.Port())
}

// byName compares names.
func (f *filter) byName(flow *nodev1alpha1.Flow) bool {
	return (f.Namespace == "" || f.Namespace == flow.Namespace) && (f.Service == "" || f.Service == flow.Service) &&
		(f.Pod == "" || f.Pod == flow.Client.Pod || f.Pod == flow.Endpoint.Pod)
}

// flowList collects the flows of a response.
type flowList struct {
	server *Server
	filter filter
	resp   *nodev1alpha1.ListFlowsResponse
	limit  int
	state  string           // "": all
	egress bool             // false: all
	next   []dataplane.Flow // without names yet
	err    error
}

// add takes a flow of the table, and returns false when no more are needed.
func (l *flowList) add(ctx context.Context, f dataplane.Flow) bool {
	if l.state != "" && l.state != f.State || l.egress && !f.Egress || !l.filter.byAddress(f) {
		return true
	}
	if l.next = append(l.next, f); len(l.next) == namedAtOnce {
		l.name(ctx)
	}
	return l.err == nil && !l.resp.More
}

// name names the flows in next, and adds those that the filter selects to the response.
func (l *flowList) name(ctx context.Context) {
	if l.err != nil || len(l.next) == 0 {
		return
	}
	// Three addresses a flow: client, Service, endpoint.
	names := make([]reconcile.Address, 0, 3*len(l.next))
	for _, f := range l.next {
		for _, at := range []netip.AddrPort{f.Client, f.Service, f.Endpoint} {
			names = append(names, reconcile.Address{Protocol: f.Protocol, AddrPort: at})
		}
	}
	if l.err = l.server.cfg.State.Names(ctx, names); l.err != nil {
		return
	}
	for i, f := range l.next {
		flow := l.server.flow(f, names[3*i], names[3*i+1], names[3*i+2])
		if !l.filter.byName(flow) {
			continue
		}
		if len(l.resp.Flows) == l.limit {
			l.resp.More = true
			break
		}
		l.resp.Flows = append(l.resp.Flows, flow)
	}
	l.next = l.next[:0]
}

func (s *Server) flow(f dataplane.Flow, client, at, endpoint reconcile.Address) *nodev1alpha1.Flow {
	out := &nodev1alpha1.Flow{
		Node: s.cfg.Node, Protocol: protocol(f.Protocol), Client: peer(client), ServiceAddress: peer(at), Endpoint: peer(endpoint),
		Opened: timestamp(f.Opened), LastSeen: timestamp(f.LastSeen), State: f.State, ClosedByRst: f.Reset, Dsr: f.DSR, OneWay: f.OneWay,
		Namespace: at.Service.Service.Namespace, Service: at.Service.Service.Name, PortName: at.Service.Port,
	}
	out.ServiceAddress.Pod, out.ServiceAddress.Node = "", ""
	if f.Egress {
		out.Egress, out.ServiceAddress = true, nil
		out.Source = &nodev1alpha1.Peer{Address: f.Source.Addr().String(), Port: uint32(f.Source.Port())}
	}
	return out
}

// maxNames is how many addresses one request of Names has.
const maxNames = 512

// maxEndpointOf is how many Service ports Names returns that have an address as an endpoint.
const maxEndpointOf = doctor.MostEndpointOf

// Names looks up addresses between two turns of reconcile.
func (s service) Names(ctx context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	if len(req.Addresses) > maxNames {
		return nil, connect.NewError(connect.CodeInvalidArgument,
			fmt.Errorf("addresses: %d, at most %d are allowed", len(req.Addresses), maxNames))
	}
	names := make([]reconcile.Address, len(req.Addresses))
	for i, a := range req.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil || a.Port > math.MaxUint16 {
			return nil, connect.NewError(connect.CodeInvalidArgument,
				fmt.Errorf("addresses[%d]: not an address and a port: %q, %d", i, a.Address, a.Port))
		}
		names[i] = reconcile.Address{Protocol: protocolOf(a.Protocol), AddrPort: netip.AddrPortFrom(addr, uint16(a.Port)),
			EndpointOfMax: maxEndpointOf}
	}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return nil, err
	}
	resp := &nodev1alpha1.NamesResponse{}
	for _, n := range names {
		out := &nodev1alpha1.AddressNames{Service: portName(n.Service), Pod: peer(n).Pod, Node: n.Node}
		for _, id := range n.EndpointOf {
			out.EndpointOf = append(out.EndpointOf, portName(id))
		}
		resp.Names = append(resp.Names, out)
	}
	return resp, nil
}

// portName is nil for no port.
func portName(id intent.PortID) *nodev1alpha1.ServicePortName {
	if id == (intent.PortID{}) {
		return nil
	}
	return &nodev1alpha1.ServicePortName{
		Namespace: id.Service.Namespace, Name: id.Service.Name, PortName: id.Port, Port: uint32(id.Number), Protocol: protocol(id.Protocol),
	}
}

func peer(a reconcile.Address) *nodev1alpha1.Peer {
	p := &nodev1alpha1.Peer{Address: a.AddrPort.Addr().String(), Port: uint32(a.AddrPort.Port()), Node: a.Node}
	if a.Pod != (model.Name{}) {
		p.Pod = a.Pod.String()
	}
	return p
}
