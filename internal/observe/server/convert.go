package server

import (
	"math"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/reconcile"
)

// timestamp is nil for the zero time.
func timestamp(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func count(n int) uint32 { return uint32(max(0, min(n, math.MaxUint32))) }

func problem(p model.Problem) *nodev1alpha1.Problem {
	what := p.What
	if p.Field != "" {
		what = p.Field + ": " + what
	}
	return &nodev1alpha1.Problem{Where: p.Where, What: what}
}

func problemsByService(all []model.Problem) map[model.Name][]model.Problem {
	out := map[model.Name][]model.Problem{}
	for _, p := range all {
		if name, ok := p.Service(); ok {
			out[name] = append(out[name], p)
		}
	}
	return out
}

func protocol(p model.Protocol) nodev1alpha1.Protocol {
	switch p {
	case model.TCP:
		return nodev1alpha1.Protocol_PROTOCOL_TCP
	case model.UDP:
		return nodev1alpha1.Protocol_PROTOCOL_UDP
	case model.SCTP:
		return nodev1alpha1.Protocol_PROTOCOL_SCTP
	case model.ICMP, model.ICMPv6:
		return nodev1alpha1.Protocol_PROTOCOL_ICMP
	}
	return nodev1alpha1.Protocol_PROTOCOL_UNSPECIFIED
}

// protocolOf is the inverse of protocol; 0 for one that Services do not have.
func protocolOf(p nodev1alpha1.Protocol) model.Protocol {
	for _, known := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if protocol(known) == p {
			return known
		}
	}
	return 0
}

// convertService returns a Service whose first ports are those of s.Ports, in their order.
// The others have no address that is served. whole adds endpoints, and what the kernel lacks.
func convertService(s reconcile.Service, problems []model.Problem, whole bool) *nodev1alpha1.Service {
	out := &nodev1alpha1.Service{Namespace: s.Spec.Namespace, Name: s.Spec.Name.Name, Type: string(s.Spec.Type)}
	served := map[model.EndpointPort]bool{}
	var named map[intent.PortID][]slicePort
	if whole {
		named = slicesByPort(s.Slices)
	}
	for i, p := range s.Ports {
		port := convertPort(s.Spec, p, s.Sync[i])
		if whole {
			port.Endpoints = endpoints(p, named[intent.PortID{Port: p.ID.Port, Protocol: p.ID.Protocol, Family: p.ID.Family}])
			port.Differences = syncProblems(s.Sync[i])
		}
		out.Ports = append(out.Ports, port)
		served[model.EndpointPort{Name: p.ID.Port, Port: p.ID.Number, Protocol: p.ID.Protocol}] = true
	}
	for _, spec := range s.Spec.Ports {
		if !served[model.EndpointPort{Name: spec.Name, Port: spec.Port, Protocol: spec.Protocol}] {
			out.Ports = append(out.Ports, &nodev1alpha1.ServicePort{Name: spec.Name, Port: uint32(spec.Port), Protocol: protocol(spec.Protocol)})
		}
	}
	for _, p := range problems {
		out.Problems = append(out.Problems, problem(p))
	}
	return out
}

// addCounters adds the counters of the first ports of a Service, which are these.
func addCounters(s *nodev1alpha1.Service, ports []*intent.ServicePort, counted map[intent.PortID]*dataplane.ServiceCounters) {
	for i, p := range ports {
		c := counted[p.ID]
		if c == nil {
			continue
		}
		out := &nodev1alpha1.Counters{
			Connections: c.Connections, Active: c.Active,
			BytesToEndpoint: c.BytesToEndpoint, BytesToClient: c.BytesToClient,
			PacketsToEndpoint: c.PacketsToEndpoint, PacketsToClient: c.PacketsToClient,
			HandshakeMsLog2: c.Handshakes[:], ConnectionsOnly: c.ConnectionsOnly,
		}
		for _, n := range c.Refused {
			out.Refused += n
		}
		for _, n := range c.Dropped {
			out.Dropped += n
		}
		s.Ports[i].Counters = out
	}
}

func convertPort(spec *model.Service, p *intent.ServicePort, sync reconcile.PortSync) *nodev1alpha1.ServicePort {
	out := &nodev1alpha1.ServicePort{
		Name: p.ID.Port, Port: uint32(p.ID.Number), Protocol: protocol(p.ID.Protocol), Family: p.ID.Family.String(),
		Dataplane: sync.Dataplane, EndpointCount: count(len(p.Endpoints)), Helper: helperName(p.Helper),
		ExternalTrafficPolicy: policyName(spec.ExternalLocal), InternalTrafficPolicy: policyName(spec.InternalLocal),
	}
	if p.Affinity > 0 {
		out.Affinity = durationpb.New(p.Affinity)
	}
	if p.Balance != intent.Random {
		out.Balance = p.Balance.String()
	}
	if p.DSR {
		out.Forwarding = intent.Hybrid
	}
	if p.DSR && p.ID.Protocol == model.UDP {
		out.Forwarding = intent.DSR
	}
	out.SynLimit = uint32(p.SYNLimit)
	out.LocalRedirect = intent.RedirectOf(spec).Name
	for _, f := range p.Frontends {
		frontend := &nodev1alpha1.Frontend{Kind: kindName(f.Kind), Port: uint32(f.Port)}
		if f.Addr.IsValid() {
			frontend.Address = f.Addr.String()
		}
		for _, r := range f.SourceRanges {
			frontend.SourceRanges = append(frontend.SourceRanges, r.String())
		}
		out.Frontends = append(out.Frontends, frontend)
	}
	return out
}

func policyName(local bool) string {
	if local {
		return "Local"
	}
	return "Cluster"
}

func helperName(h intent.Helper) string {
	switch h {
	case intent.TFTP:
		return "tftp"
	case intent.FTP:
		return "ftp"
	}
	return ""
}

func kindName(k intent.FrontendKind) string {
	switch k {
	case intent.NodePort:
		return "nodePort"
	case intent.ExternalIP:
		return "externalIP"
	case intent.LoadBalancerIP:
		return "loadBalancerIP"
	}
	return "clusterIP"
}

// syncProblems returns what the agent has not written to the kernel.
func syncProblems(sync reconcile.PortSync) (out []string) {
	switch {
	case sync.Dataplane == "" && sync.Err != nil:
		return []string{"not served on this node: " + sync.Err.Error()}
	case sync.Dataplane == "":
		return []string{"not served on this node"}
	case sync.Err != nil:
		out = append(out, "the last write failed, and is tried again: "+sync.Err.Error())
	}
	if sync.Waits {
		what := "a change waits for the next write"
		if !sync.Since.IsZero() {
			what += ", since " + sync.Since.UTC().Format(time.RFC3339)
		}
		out = append(out, what)
	}
	return out
}

// slicePort is a slice that has a port, with its number.
type slicePort struct {
	*model.EndpointSlice
	number uint16
}

// slicesByPort returns the slices by family, name and protocol of their ports. It reads each slice
// once: a Service and each of its slices may have thousands of ports.
func slicesByPort(from []*model.EndpointSlice) map[intent.PortID][]slicePort {
	out := map[intent.PortID][]slicePort{}
	for _, s := range from {
		for _, port := range s.Ports {
			if id := (intent.PortID{Port: port.Name, Protocol: port.Protocol, Family: s.Family}); port.Port != 0 {
				out[id] = append(out[id], slicePort{s, port.Port})
			}
		}
	}
	return out
}

// endpoints returns all endpoints of a port that EndpointSlices name, sorted by address. One
// address may be in several slices: a ready one counts, as in package intent.
func endpoints(p *intent.ServicePort, from []slicePort) []*nodev1alpha1.Endpoint {
	found := map[netip.AddrPort]*model.Endpoint{}
	for _, s := range from {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			at := netip.AddrPortFrom(e.Addr, s.number)
			if known := found[at]; known == nil || !known.Ready && e.Ready {
				found[at] = e
			}
		}
	}
	ejected := map[netip.AddrPort]bool{}
	for i := range p.Endpoints {
		if p.Endpoints[i].Ejected {
			ejected[p.Endpoints[i].Addr] = true
		}
	}
	shares := sharesInUse(p)
	out := make([]*nodev1alpha1.Endpoint, 0, len(found))
	addrs := make([]netip.AddrPort, 0, len(found))
	for at := range found {
		addrs = append(addrs, at)
	}
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	for _, at := range addrs {
		e := found[at]
		endpoint := &nodev1alpha1.Endpoint{
			Address: at.Addr().String(), Port: uint32(at.Port()), Node: e.Node,
			Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating, InUse: shares[at] > 0,
			Ejected: ejected[at],
		}
		if p.Weights != nil {
			endpoint.Shares = shares[at]
		}
		if e.Pod != (model.Name{}) {
			endpoint.Pod = e.Pod.String()
		}
		out = append(out, endpoint)
	}
	return out
}

// sharesInUse returns the shares of the endpoints to which some frontend leads. With frontends
// of different traffic policies, an endpoint has its largest share.
func sharesInUse(p *intent.ServicePort) map[netip.AddrPort]uint32 {
	leads := map[intent.Route]bool{}
	for _, f := range p.Frontends {
		leads[f.ExternalRoute], leads[f.InternalRoute] = true, true
	}
	out := map[netip.AddrPort]uint32{}
	for route := range leads {
		for i, shares := range p.Shares(route) {
			at := p.Endpoints[i].Addr
			out[at] = max(out[at], uint32(shares))
		}
	}
	return out
}
