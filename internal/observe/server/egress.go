package server

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/reconcile"
)

// egressUse returns the use of ports by pods' connections to the outside; nil: egress is off.
func (s *Server) egressUse() (*dataplane.EgressUse, error) {
	for _, b := range s.cfg.Backends {
		r, ok := b.(dataplane.EgressReporter)
		if !ok {
			continue
		}
		if use, err := r.EgressUse(); err != nil {
			return nil, fmt.Errorf("read the use of egress: %w", err)
		} else if use != nil {
			return use, nil
		}
	}
	return nil, nil
}

// egressGrowth is egressUse, with the growth of what was refused since the readings in memory began.
func (s *Server) egressGrowth() (use *dataplane.EgressUse, refused growth, err error) {
	use, err = s.egressUse()
	if use == nil {
		return nil, refused, err
	}
	s.egress.mu.Lock()
	defer s.egress.mu.Unlock()
	if grown := s.egress.add(reading{time.Now(), map[string]uint64{"refused": use.Refused}}); len(grown) > 0 {
		refused = grown[0]
	}
	return use, refused, nil
}

// describeEgress describes egress for the status; nil: it is off.
func (s *Server) describeEgress(st reconcile.Status) *nodev1alpha1.Egress {
	if st.EgressMode == "" || st.EgressMode == egress.Off {
		return nil
	}
	out := &nodev1alpha1.Egress{Mode: string(st.EgressMode), Kept: count(len(st.Egress.Keep))}
	for _, p := range st.Egress.Sources {
		out.Sources = append(out.Sources, p.String())
	}
	for _, a := range st.Egress.Addresses {
		out.Addresses = append(out.Addresses, a.String())
	}
	use, err := s.egressUse()
	if err != nil {
		s.log.Debug("counting egress failed", slog.Any("err", err))
	}
	if use != nil {
		out.Connections = &use.Connections
	}
	return out
}

// egressPorts returns the busiest destinations with the names of their pods.
func (s *Server) egressPorts(ctx context.Context) (out doctor.EgressPorts, err error) {
	use, refused, err := s.egressGrowth()
	if use == nil {
		return out, err
	}
	out = doctor.EgressPorts{Refused: refused.by, Window: refused.window, Ports: use.Ports}
	var pods []reconcile.Address
	for _, d := range use.Busiest {
		for _, p := range d.Pods {
			pods = append(pods, reconcile.Address{Protocol: d.Protocol, AddrPort: netip.AddrPortFrom(p.Addr, 0)})
		}
	}
	if err := s.cfg.State.Names(ctx, pods); err != nil {
		return out, fmt.Errorf("name pods: %w", err)
	}
	for _, d := range use.Busiest {
		to := doctor.EgressDestination{
			Protocol: d.Protocol.String(), Source: d.Source, Destination: d.Destination, Connections: d.Connections,
		}
		for _, p := range d.Pods {
			name := p.Addr.String()
			if pods[0].Pod != (model.Name{}) {
				name = pods[0].Pod.String()
			}
			pods = pods[1:]
			to.Pods = append(to.Pods, fmt.Sprintf("%d of pod %s", p.Connections, name))
		}
		out.Busiest = append(out.Busiest, to)
	}
	return out, nil
}

// egressBypass returns which packets of pods to the outside bypass netfilter.
func (s *Server) egressBypass() (out doctor.EgressBypass, err error) {
	use, err := s.egressUse()
	if use == nil || !use.Bypasses {
		return out, err
	}
	plan := s.cfg.State.Status().Egress
	return doctor.EgressBypass{Sources: plan.Sources, Keeps: plan.Keep, Devices: use.Devices}, nil
}
