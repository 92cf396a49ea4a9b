package server

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/reconcile"
)

// sample is how long an examination watches the counters.
const sample = time.Second

// examination is the last examination of the node.
type examination struct {
	ended time.Time
	cost  time.Duration // without the pause of sample
	resp  *nodev1alpha1.FindingsResponse
}

// Findings examines the agent's own network namespace. One examination at a time serves all
// who ask meanwhile, and those who ask soon after: see readingShare.
func (s service) Findings(ctx context.Context, _ *nodev1alpha1.FindingsRequest) (*nodev1alpha1.FindingsResponse, error) {
	running := s.examining.DoChan("", func() (_ any, err error) {
		defer func() {
			if what := recover(); what != nil { // singleflight would end the agent
				err = s.recover(ctx, connect.Spec{Procedure: nodev1alpha1connect.NodeServiceFindingsProcedure}, nil, what)
			}
		}()
		// The one who asked first may leave before the others.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findingTimeout)
		defer cancel()
		return s.findings(ctx)
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case r := <-running:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*nodev1alpha1.FindingsResponse), nil
	}
}

// findings returns the last examination's findings while they are recent, else new ones. Only
// s.examining calls it.
func (s *Server) findings(ctx context.Context) (*nodev1alpha1.FindingsResponse, error) {
	last := &s.examined
	if last.resp != nil && time.Since(last.ended) < readingShare*last.cost {
		return last.resp, nil
	}
	began := time.Now()
	node, err := s.cfg.examine(ctx)
	if err != nil {
		return nil, fmt.Errorf("examine the node: %w", err)
	}
	if node.Traffic, err = s.traffic(ctx); err != nil {
		node.Problems = append(node.Problems, doctor.Problem{What: err.Error()})
	}
	s.examined = examination{ended: time.Now(), cost: max(time.Since(began)-sample, 0), resp: findingsResponse(node)}
	return s.examined.resp, nil
}

func findingsResponse(node *doctor.Node) *nodev1alpha1.FindingsResponse {
	resp := &nodev1alpha1.FindingsResponse{}
	for _, f := range doctor.Examine(node) {
		resp.Findings = append(resp.Findings, &nodev1alpha1.Finding{
			Id: f.ID, Severity: string(f.Severity), Title: f.Title, Detail: f.Packets, Fix: f.Remedy,
			Documentation: f.Documentation, Evidence: f.Evidence, Commands: f.Commands,
		})
	}
	for _, p := range node.Problems {
		resp.Problems = append(resp.Problems, &nodev1alpha1.Problem{Where: strings.Join(p.Namespaces, ", "), What: p.What})
	}
	return resp
}

// examineHere reads the agent's own network namespace.
func (s *Server) examineHere(ctx context.Context) (*doctor.Node, error) {
	return doctor.Load(ctx, doctor.Config{Sample: sample, Uses: s.uses, Namespaces: func() ([]conntrack.Namespace, error) {
		list, err := conntrack.Namespaces()
		return slices.DeleteFunc(list, func(n conntrack.Namespace) bool { return !n.Own }), err
	}})
}

// uses tells which Service ports have the UDP addresses.
func (s *Server) uses(ctx context.Context, addrs []netip.AddrPort) ([]doctor.AddressUse, error) {
	names := make([]reconcile.Address, len(addrs))
	for i, a := range addrs {
		names[i] = reconcile.Address{Protocol: model.UDP, AddrPort: a, EndpointOfMax: maxEndpointOf}
	}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return nil, fmt.Errorf("name addresses: %w", err)
	}
	uses := make([]doctor.AddressUse, len(addrs))
	for i, n := range names {
		if p := n.Service; p.Service != (model.Name{}) {
			uses[i].Service = servicePort(p.Service, p.Port, p.Number)
		}
		for _, p := range n.EndpointOf {
			uses[i].EndpointOf = append(uses[i].EndpointOf, servicePort(p.Service, p.Port, p.Number))
		}
	}
	return uses, nil
}
