package scripts

import (
	"context"
	"maps"
	"net/netip"
	"sync"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// recorder is a dataplane in memory: it keeps what is written, and prints it.
type recorder struct {
	mu     sync.Mutex
	ports  map[intent.PortID]*intent.ServicePort
	node   intent.Node
	checks map[model.Name]intent.HealthCheck
	policy donottrack.State

	// Since the last look:
	seen     map[string]string // texts at the last look, by name
	calls    map[string]string // "write" or "delete", by name
	replaced bool
}

func newRecorder() *recorder {
	return &recorder{
		ports: map[intent.PortID]*intent.ServicePort{}, checks: map[model.Name]intent.HealthCheck{},
		policy: emptyPolicies(), calls: map[string]string{},
	}
}

func emptyPolicies() donottrack.State {
	return donottrack.State{
		Rules: map[string]*donottrack.Rule{}, Verdicts: map[string]*donottrack.Verdict{}, Targets: map[donottrack.Target]string{},
		Members: map[donottrack.Member]bool{}, Tracked: map[donottrack.Pair]bool{},
	}
}

func (r *recorder) backends() []dataplane.Backend  { return []dataplane.Backend{backend{recorder: r}} }
func (r *recorder) policies() dataplane.DoNotTrack { return policies{recorder: r} }

// noWatcher is of a dataplane that no other program changes.
type noWatcher struct{}

func (noWatcher) Drifted() <-chan struct{}   { return nil }
func (noWatcher) Repaired() dataplane.Repair { return dataplane.Repair{} }
func (noWatcher) Close() error               { return nil }

// backend is the recorder as dataplane.Backend.
type backend struct {
	*recorder
	noWatcher
}

func (backend) Name() string                       { return "recorder" }
func (backend) CanCarry(*intent.ServicePort) error { return nil }

func (b backend) Apply(_ context.Context, c intent.Changes) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, p := range c.Upserts {
		b.ports[p.ID] = p
		b.called("write", p.ID.Service, p.ID.String())
	}
	for _, id := range c.Deletes {
		delete(b.ports, id)
		b.called("delete", id.Service, id.String())
	}
	if c.Node != nil {
		b.node = *c.Node
	}
	return nil
}

func (b backend) Replace(_ context.Context, s intent.State) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	clear(b.ports)
	for _, p := range s.Ports {
		b.ports[p.ID] = p
	}
	b.node = s.Node
	b.replaced = true
	return nil
}

func (r *recorder) called(what string, service model.Name, name string) {
	if service.Namespace != canaryNamespace {
		r.calls[name] = what
	}
}

// Update implements reconcile.HealthChecks.
func (r *recorder) Update(_ []netip.Addr, changed []intent.HealthCheck) []model.Problem {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, hc := range changed {
		r.checks[hc.Service] = hc
		what := "write"
		if hc.Port == 0 {
			delete(r.checks, hc.Service)
			what = "delete"
		}
		r.called(what, hc.Service, checkName(hc.Service))
	}
	return nil
}

// policies is the recorder as dataplane.DoNotTrack.
type policies struct {
	*recorder
	noWatcher
}

func (p policies) Replace(_ context.Context, s donottrack.State) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.policy = donottrack.State{
		Rules: maps.Clone(s.Rules), Verdicts: maps.Clone(s.Verdicts), Targets: maps.Clone(s.Targets),
		Members: maps.Clone(s.Members), Tracked: maps.Clone(s.Tracked),
	}
	return nil
}

// Repair writes nothing: no other program changes the record.
func (policies) Repair(context.Context, donottrack.State) error { return nil }

func (p policies) Apply(_ context.Context, c donottrack.Changes) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	apply(p.policy.Rules, c.Rules)
	apply(p.policy.Verdicts, c.Verdicts)
	apply(p.policy.Targets, c.Targets)
	apply(p.policy.Members, c.Members)
	apply(p.policy.Tracked, c.Tracked)
	return nil
}

func apply[K, V comparable](m map[K]V, changes []donottrack.Change[K, V]) {
	var zero V
	for _, c := range changes {
		m[c.Key] = c.Want
		if c.Want == zero {
			delete(m, c.Key)
		}
	}
}

func (p policies) HasPolicies(context.Context) (bool, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.policy.Targets) > 0, nil
}
