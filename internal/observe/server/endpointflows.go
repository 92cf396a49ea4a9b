package server

import (
	"context"
	"net/netip"
	"slices"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// endpointFlows are the counts of one endpoint, by the Service ports that have it: a Service may
// have an endpoint in several ports.
type endpointFlows struct {
	port   *intent.ServicePort
	counts *nodev1alpha1.EndpointFlows
}

// countFlows sets the flows of all endpoints of a Service. One client at a time reads the flow
// table; the others wait.
func (s *Server) countFlows(ctx context.Context, ports []*intent.ServicePort, out []*nodev1alpha1.ServicePort) error {
	select {
	case s.counting <- struct{}{}:
		defer func() { <-s.counting }()
	case <-ctx.Done():
		return ctx.Err()
	}
	inspectors := s.inspectors()
	if len(inspectors) == 0 {
		return nil
	}
	counts := map[endpointKey][]endpointFlows{}
	for i, p := range ports {
		for _, e := range out[i].Endpoints {
			e.Flows = &nodev1alpha1.EndpointFlows{}
			addr, err := netip.ParseAddr(e.Address)
			if err != nil {
				return err
			}
			key := endpointKey{p.ID.Protocol, netip.AddrPortFrom(addr, uint16(e.Port))}
			counts[key] = append(counts[key], endpointFlows{p, e.Flows})
		}
	}
	for _, in := range inspectors {
		if err := in.Flows(ctx, func(f dataplane.Flow) bool { countFlow(counts, &f); return true }); err != nil {
			return err
		}
	}
	return nil
}

func countFlow(counts map[endpointKey][]endpointFlows, f *dataplane.Flow) {
	for _, c := range counts[endpointKey{f.Protocol, f.Endpoint}] {
		switch {
		case !serves(c.port, f.Service):
		case f.State == stateNew:
			c.counts.Waiting++
		default:
			c.counts.Answered++
		}
	}
}

// serves reports whether a Service port has a frontend at an address.
func serves(p *intent.ServicePort, at netip.AddrPort) bool {
	return slices.ContainsFunc(p.Frontends, func(f intent.Frontend) bool { return isAt(&f, at) })
}

// isAt reports whether a frontend is at an address. A NodePort is at all of them.
func isAt(f *intent.Frontend, at netip.AddrPort) bool {
	return f.Port == at.Port() && (!f.Addr.IsValid() || f.Addr == at.Addr())
}
