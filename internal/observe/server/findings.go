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

const (
	// sample is how long an examination watches the counters.
	sample = time.Second
	// A finding that returns within resumedWithin was not away: traffic that pauses, or the limits
	// of a reading, hide it for a while.
	resumedWithin = time.Minute
	// statusPatience is how long other answers wait for findings: those of the last evaluation are
	// better than none. They begin no evaluation within freshFor of the last.
	statusPatience = time.Second
	freshFor       = time.Second
	// Without requests, an evaluation follows the last after watchPause, and an examination after
	// examinePause, or after watchShare times their cost: together they take 2 % of a CPU at most.
	watchPause   = 10 * time.Second
	examinePause = time.Minute
	watchShare   = 100
)

// examination is the last examination of the node. What it reads of the namespace costs more than
// what the agent knows about traffic, which is therefore more recent.
type examination struct {
	ended time.Time
	cost  time.Duration // without the pause of sample
	node  *doctor.Node  // without Traffic; nil: there was none yet
}

// trafficReading is the last reading of what the backends know.
type trafficReading struct {
	ended   time.Time
	cost    time.Duration
	traffic *doctor.Traffic // nil: there was none yet
	err     error           // why a part is missing
}

// isRecent reports whether something that cost so much is not to be repeated yet.
func isRecent(ended time.Time, cost, least time.Duration, share int) bool {
	return time.Since(ended) < max(least, time.Duration(share)*cost)
}

// Findings examines the agent's own network namespace. One examination at a time serves all
// who ask meanwhile, and those who ask soon after: see readingShare.
func (s service) Findings(ctx context.Context, _ *nodev1alpha1.FindingsRequest) (*nodev1alpha1.FindingsResponse, error) {
	if err := s.examine(ctx, 0, readingShare); err != nil {
		return nil, err
	}
	if err := s.evaluate(ctx, 0, readingShare); err != nil {
		return nil, err
	}
	list, problems := s.findings.now()
	resp := &nodev1alpha1.FindingsResponse{NetworkNamespace: s.netns}
	for _, f := range list {
		one := convertFinding(f)
		one.Fix, one.Evidence, one.Commands = f.Remedy, f.Evidence, f.Commands
		resp.Findings = append(resp.Findings, one)
	}
	for _, p := range problems {
		resp.Problems = append(resp.Problems, &nodev1alpha1.Problem{Where: strings.Join(p.Namespaces, ", "), What: p.What})
	}
	return resp, nil
}

// convertFinding returns what every answer has of a finding.
func convertFinding(f doctor.Finding) *nodev1alpha1.Finding {
	return &nodev1alpha1.Finding{
		Id: f.ID, Severity: string(f.Severity), Title: f.Title, Detail: f.Packets, Documentation: f.Documentation, Since: timestamp(f.Since),
		Object: &nodev1alpha1.FindingObject{Kind: f.Object.Kind, Namespace: f.Object.Namespace, Name: f.Object.Name, Port: f.Object.Port,
			Endpoint: f.Object.Endpoint},
	}
}

// recentFindings returns the findings for an answer that does not depend on them.
func (s *Server) recentFindings(ctx context.Context) []doctor.Finding {
	ctx, cancel := context.WithTimeout(ctx, statusPatience)
	defer cancel()
	if err := s.evaluate(ctx, freshFor, readingShare); err != nil {
		s.log.Debug("an answer has the findings of the last evaluation", "err", err)
	}
	list, _ := s.findings.now()
	return list
}

// addFindings adds the findings about a Service to it, and its health.
func addFindings(out *nodev1alpha1.Service, list []doctor.Finding) {
	out.Health = "ok"
	if len(out.Problems) > 0 {
		out.Health = "problem"
	}
	for i, f := range list { // the worst first
		if i == 0 && f.Severity != doctor.Info {
			out.Health = f.ID
		}
		out.Findings = append(out.Findings, convertFinding(f))
	}
}

// findingsByService returns the findings about Services.
func findingsByService(list []doctor.Finding) map[model.Name][]doctor.Finding {
	out := map[model.Name][]doctor.Finding{}
	for _, f := range list {
		if name, is := f.Object.Service(); is {
			out[name] = append(out[name], f)
		}
	}
	return out
}

// followFindings evaluates the node until ctx ends: metrics and Events follow findings without
// a request.
func (s *Server) followFindings(ctx context.Context) {
	for pause := s.cfg.watchPause; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		err := s.examine(ctx, examinePause, watchShare)
		if err == nil {
			err = s.evaluate(ctx, 0, watchShare)
		}
		if err != nil && ctx.Err() == nil {
			s.log.Debug("evaluating the node failed", "err", err)
		}
		s.evaluating <- struct{}{}
		pause = max(s.cfg.watchPause, watchShare*s.read.cost)
		<-s.evaluating
	}
}

// examine reads the node, unless the last examination is recent.
func (s *Server) examine(ctx context.Context, least time.Duration, share int) error {
	running := s.examining.DoChan("", func() (_ any, err error) {
		defer func() {
			if what := recover(); what != nil { // singleflight would end the agent
				err = s.recover(ctx, connect.Spec{Procedure: nodev1alpha1connect.NodeServiceFindingsProcedure}, nil, what)
			}
		}()
		// The one who asked first may leave before the others.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), findingTimeout)
		defer cancel()
		return nil, s.examineOnce(ctx, least, share)
	})
	select {
	case <-ctx.Done():
		return ctx.Err()
	case r := <-running:
		return r.Err
	}
}

// examineOnce is examine without a second one beside it. Only s.examining calls it.
func (s *Server) examineOnce(ctx context.Context, least time.Duration, share int) error {
	if s.examined.node != nil && isRecent(s.examined.ended, s.examined.cost, least, share) {
		return nil
	}
	began := time.Now()
	node, err := s.cfg.examine(ctx)
	if err != nil {
		return fmt.Errorf("examine the node: %w", err)
	}
	s.evaluating <- struct{}{}
	defer func() { <-s.evaluating }()
	s.examined = examination{ended: time.Now(), cost: max(time.Since(began)-sample, 0), node: node}
	return nil
}

// evaluate finds what is wrong, by the last examination and by what the backends know; both may be
// recent. It fails if ctx ends first.
func (s *Server) evaluate(ctx context.Context, least time.Duration, share int) (err error) {
	select {
	case s.evaluating <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() {
		<-s.evaluating
		if what := recover(); what != nil {
			err = s.recover(ctx, connect.Spec{Procedure: nodev1alpha1connect.NodeServiceFindingsProcedure}, nil, what)
		}
	}()
	if r := &s.read; r.traffic == nil || !isRecent(r.ended, r.cost, least, share) {
		began := time.Now()
		traffic, err := s.traffic(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		cost := time.Since(began)
		if s.walk.ended.After(began) { // a reading of the flow table has a share of its own
			cost -= s.walk.took
		}
		s.read = trafficReading{time.Now(), cost, traffic, err}
	}
	node := doctor.Node{}
	if s.examined.node != nil {
		node = *s.examined.node
	}
	node.Traffic = s.read.traffic
	if s.read.err != nil {
		node.Problems = append(slices.Clone(node.Problems), doctor.Problem{What: s.read.err.Error()})
	}
	s.findings.update(doctor.Examine(&node), node.Problems, time.Now())
	return nil
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
