package server

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/reconcile"
)

// pathWindow is how long a repeated SYN, or a reply, says something about an endpoint. A node
// tries a broken path again after a minute.
const pathWindow = 5 * time.Minute

// dsrGrowth reads the counters of DSR replies, and returns those that grew since the
// readings in memory began.
func (s *Server) dsrGrowth() []growth {
	s.direct.mu.Lock()
	defer s.direct.mu.Unlock()
	counts := map[string]uint64{}
	for _, r := range s.dsrReporters() {
		announced, unanswered := r.DSRCounts()
		counts["announced"] += announced
		counts["unanswered"] += unanswered
	}
	return s.direct.add(reading{time.Now(), counts})
}

func (s *Server) dsrReporters() (list []dataplane.DSRReporter) {
	for _, b := range s.cfg.Backends {
		if r, ok := b.(dataplane.DSRReporter); ok {
			list = append(list, r)
		}
	}
	return list
}

// dsrTraffic returns what the dataplanes know about DSR replies.
func (s *Server) dsrTraffic(ctx context.Context) (out doctor.DSRReplies, err error) {
	for _, g := range s.dsrGrowth() {
		out.Window = g.window
		if g.name == "announced" {
			out.Announced = g.by
		} else {
			out.Unanswered = g.by
		}
	}
	var broken []dataplane.DSRPath
	var through []netip.AddrPort
	for _, r := range s.dsrReporters() {
		replies, err := r.DSRReplies()
		if err != nil {
			return out, fmt.Errorf("read DSR replies: %w", err)
		}
		through = append(through, replies.ThroughStack...)
		countEncapsulations(&out, r.DSREncapsulations())
		for _, p := range replies.Paths {
			switch {
			case p.Broken && time.Since(p.Failed) <= pathWindow:
				broken = append(broken, p)
			case !p.Broken && time.Since(p.Answered) <= pathWindow:
				out.Working++
			}
		}
	}
	slices.SortFunc(broken, func(a, b dataplane.DSRPath) int {
		return cmp.Or(cmp.Compare(b.Failures, a.Failures), a.Endpoint.Compare(b.Endpoint))
	})
	out.MoreBroken = max(len(broken)-mostTraffic, 0)
	broken, through = broken[:min(len(broken), mostTraffic)], through[:min(len(through), mostTraffic)]
	return out, s.nameDSR(ctx, &out, broken, through)
}

func (s *Server) dsrEncapsulations() (list []dataplane.DSREncapsulation) {
	for _, r := range s.dsrReporters() {
		list = append(list, r.DSREncapsulations()...)
	}
	return list
}

// dsrEndpoints counts encapsulations.
func dsrEndpoints(encapsulations []dataplane.DSREncapsulation) (out []*nodev1alpha1.DSREndpoints) {
	for _, name := range dataplane.Encapsulations {
		e := &nodev1alpha1.DSREndpoints{Encapsulation: name}
		for _, c := range encapsulations {
			if c.Encapsulation != name {
				continue
			}
			if e.Count++; e.Mtu == 0 || count(c.MTU) < e.Mtu {
				e.Mtu = count(c.MTU)
			}
		}
		if e.Count > 0 {
			out = append(out, e)
		}
	}
	return out
}

// addEncapsulations adds the encapsulations of the endpoints of ports with DSR.
func addEncapsulations(s *nodev1alpha1.Service, encapsulations []dataplane.DSREncapsulation) {
	if !slices.ContainsFunc(s.Ports, func(p *nodev1alpha1.ServicePort) bool { return p.Forwarding != "" }) {
		return
	}
	known := make(map[string]dataplane.DSREncapsulation, len(encapsulations))
	for _, c := range encapsulations {
		known[c.Endpoint.String()] = c
	}
	for _, port := range s.Ports {
		if port.Forwarding == "" {
			continue
		}
		for _, e := range port.Endpoints {
			c := known[e.Address]
			e.Encapsulation, e.EncapsulationMtu = c.Encapsulation, count(c.MTU)
		}
	}
}

func countEncapsulations(out *doctor.DSRReplies, encapsulations []dataplane.DSREncapsulation) {
	for _, c := range encapsulations {
		switch c.Encapsulation {
		case dataplane.EncapsulationUnknown:
			continue
		case dataplane.EncapsulationGUE:
			out.Encapsulated.Add(c.Endpoint)
			if out.MTU == 0 || c.MTU < out.MTU {
				out.MTU = c.MTU
			}
		case dataplane.EncapsulationNone:
			out.Unreached.Add(c.Endpoint)
		}
		out.Probed++
	}
}

// nameDSR adds the endpoints with their names.
func (s *Server) nameDSR(ctx context.Context, out *doctor.DSRReplies, broken []dataplane.DSRPath, through []netip.AddrPort) error {
	names := make([]reconcile.Address, 0, len(broken)+len(through))
	for _, p := range broken {
		names = append(names, reconcile.Address{Protocol: model.TCP, AddrPort: p.Endpoint, EndpointOfMax: 1})
	}
	for _, at := range through {
		names = append(names, reconcile.Address{Protocol: model.TCP, AddrPort: at, EndpointOfMax: 1})
	}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return fmt.Errorf("name endpoints: %w", err)
	}
	for i, name := range names {
		e := doctor.DSREndpoint{Endpoint: name.AddrPort, Node: name.Node}
		if name.Pod != (model.Name{}) {
			e.Pod = name.Pod.String()
		}
		if len(name.EndpointOf) > 0 {
			of := name.EndpointOf[0]
			e.Service = servicePort(of.Service, of.Port, of.Number)
		}
		if i >= len(broken) {
			out.ThroughStack = append(out.ThroughStack, e)
			continue
		}
		e.Failures, e.Failed = int(broken[i].Failures), time.Since(broken[i].Failed)
		if at := broken[i].Answered; !at.IsZero() {
			e.Answered = time.Since(at)
		}
		out.Broken = append(out.Broken, e)
	}
	return nil
}
