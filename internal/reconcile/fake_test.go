package reconcile

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/telemetry"
)

// fakeTracker serves each Service on one port; the endpoint's port carries the
// Service's HealthCheckNodePort, so that two versions of a Service differ.
type fakeTracker struct {
	services map[model.Name]*model.Service
	node     intent.Node
	policies *donottrack.Tracker
	step     time.Time // when SetTime changes all Services; zero: never
}

// newFakeTracker makes a tracker that decides about policies as a real one of node n1.
func newFakeTracker(cfg donottrack.Config) *fakeTracker {
	cfg.NodeName = "n1"
	return &fakeTracker{services: map[model.Name]*model.Service{}, policies: donottrack.New(cfg)}
}

func (f *fakeTracker) Apply(d model.Delta) decisions.Changes {
	return decisions.Changes{Services: f.applyServices(d), Policies: f.policies.Apply(d)}
}

func (f *fakeTracker) applyServices(d model.Delta) intent.Changes {
	var c intent.Changes
	if d.Full {
		for name := range f.services {
			if d.Services[name] == nil {
				c.Deletes = append(c.Deletes, idOf(name))
				delete(f.services, name)
			}
		}
	}
	for name, s := range d.Services {
		if s == nil {
			if f.services[name] != nil {
				c.Deletes = append(c.Deletes, idOf(name))
			}
			delete(f.services, name)
			continue
		}
		f.services[name] = s
		c.Upserts = append(c.Upserts, portOf(s))
		c.HealthChecks = append(c.HealthChecks, intent.HealthCheck{Service: name, Port: s.HealthCheckNodePort})
	}
	return c
}

func (f *fakeTracker) SetEgress(egress.Mode, egress.Facts) decisions.Changes {
	return decisions.Changes{}
}

func (f *fakeTracker) SetNodeAddrs(addrs []netip.Addr) decisions.Changes {
	f.node = intent.Node{Name: "n1", Addrs: addrs, NodePortAddrs: addrs}
	n := f.node
	f.policies.SetNodeAddrs(addrs)
	return decisions.Changes{Services: intent.Changes{Node: &n}, Policies: f.policies.Changes()}
}

func (f *fakeTracker) SetKernel(k decisions.Kernel) (c decisions.Changes) {
	switch k.Services {
	case decisions.ServicesForeign:
		f.policies.StartTakeover()
	case decisions.ServicesFailing:
		c.Policies = f.policies.ReportRefusals()
	case decisions.ServicesWritten:
		c.Policies = f.policies.ServicesWritten()
	}
	return c
}

func (f *fakeTracker) Observe(time.Time, []outlier.Outcome, []outlier.Result) decisions.Changes {
	return decisions.Changes{}
}

func (f *fakeTracker) Checks(time.Time) []outlier.Check { return nil }

func (f *fakeTracker) SetTime(now time.Time) (c decisions.Changes) {
	if f.step.IsZero() || now.Before(f.step) {
		return c
	}
	f.step = time.Time{}
	c.Services.Upserts = f.State().Ports
	return c
}

func (f *fakeTracker) NextStep() (time.Time, bool)   { return f.step, !f.step.IsZero() }
func (f *fakeTracker) Policies() *donottrack.Tracker { return f.policies }
func (f *fakeTracker) Services() *intent.Tracker     { return intent.New(intent.Config{NodeName: "n1"}) }

func (f *fakeTracker) State() intent.State {
	s := intent.State{Node: f.node}
	for _, svc := range f.services {
		s.Ports = append(s.Ports, portOf(svc))
	}
	slices.SortFunc(s.Ports, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
	return s
}

func idOf(n model.Name) intent.PortID {
	return intent.PortID{Service: n, Number: 80, Protocol: model.TCP, Family: model.IPv4}
}

func portOf(s *model.Service) *intent.ServicePort {
	p := &intent.ServicePort{ID: idOf(s.Name), Affinity: s.Affinity, Triggered: s.Created}
	p.Endpoints = []intent.Endpoint{{Addr: netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), s.HealthCheckNodePort)}}
	if s.ExternalLocal {
		p.Frontends = append(p.Frontends, intent.Frontend{Kind: intent.NodePort, Port: 30000, ExternalRoute: intent.Drop,
			InternalRoute: intent.ToCluster})
	}
	return p
}

// call is one call that a backend got.
type call struct {
	full    bool
	upserts map[string]uint16 // Service name: version
	ports   []*intent.ServicePort
	deletes []string
	node    bool
	at      time.Duration // since the test began
}

// fakeBackend keeps what it was told, as a kernel would.
type fakeBackend struct {
	name   string
	cannot func(*intent.ServicePort) error
	fail   func(n int) error // by number of the call, from 0
	delay  time.Duration
	start  time.Time

	mu     sync.Mutex
	kernel map[string]uint16
	calls  []call
	busy   bool
}

func newFakeBackend(name string) *fakeBackend {
	return &fakeBackend{name: name, kernel: map[string]uint16{}, start: time.Now()}
}

func (f *fakeBackend) Name() string { return f.name }

func (f *fakeBackend) CanCarry(p *intent.ServicePort) error {
	if f.cannot == nil {
		return nil
	}
	return f.cannot(p)
}

func (f *fakeBackend) Apply(_ context.Context, c intent.Changes) error {
	rec := call{upserts: versions(c.Upserts), ports: c.Upserts, node: c.Node != nil}
	for _, id := range c.Deletes {
		rec.deletes = append(rec.deletes, id.Service.Name)
	}
	return f.record(rec)
}

func (f *fakeBackend) Replace(_ context.Context, s intent.State) error {
	return f.record(call{full: true, upserts: versions(s.Ports)})
}

func (f *fakeBackend) record(c call) error {
	f.mu.Lock()
	if f.busy {
		panic("two goroutines use one backend")
	}
	f.busy = true
	n := len(f.calls)
	c.at = time.Since(f.start)
	f.calls = append(f.calls, c)
	delay := f.delay
	f.mu.Unlock()
	time.Sleep(delay)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.busy = false
	var err error
	if f.fail != nil {
		err = f.fail(n)
	}
	bad := map[intent.PortID]error{}
	if part := partErrors(err); part != nil {
		bad = part.Errors
	} else if err != nil {
		return err
	}
	if c.full {
		clear(f.kernel)
	}
	for name, v := range c.upserts {
		if bad[idOf(svcName(name))] == nil {
			f.kernel[name] = v
		}
	}
	for _, name := range c.deletes {
		delete(f.kernel, name)
	}
	return err
}

func (f *fakeBackend) Drifted() <-chan struct{} { return nil }

func (f *fakeBackend) Repaired() (r dataplane.Repair) { return r }

func (f *fakeBackend) Close() error { return nil }

// set changes how the backend behaves while it is in use.
func (f *fakeBackend) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fakeBackend) holds() map[string]uint16 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return maps.Clone(f.kernel)
}

func (f *fakeBackend) log() []call {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.calls)
}

func versions(ports []*intent.ServicePort) map[string]uint16 {
	m := map[string]uint16{}
	for _, p := range ports {
		m[p.ID.Service.Name] = p.Endpoints[0].Addr.Port()
	}
	return m
}

func svcName(name string) model.Name { return model.Name{Namespace: "default", Name: name} }

func svc(name string, version uint16) *model.Service {
	return &model.Service{Name: svcName(name), HealthCheckNodePort: version}
}

// delta makes a delta of Services; version 0 says that it is gone.
func delta(full bool, versions map[string]uint16) model.Delta {
	d := model.Delta{Full: full, Services: map[model.Name]*model.Service{}}
	for name, v := range versions {
		d.Services[svcName(name)] = nil
		if v > 0 {
			d.Services[svcName(name)] = svc(name, v)
		}
	}
	return d
}

// harness is a running Reconciler on a synctest clock.
type harness struct {
	*Reconciler
	t       *testing.T
	log     *bytes.Buffer
	metrics *telemetry.Metrics
	stop    func()
}

// start runs a Reconciler inside a synctest bubble, with node addresses set.
func start(t *testing.T, change func(*Config), backends ...*fakeBackend) *harness {
	t.Helper()
	var out bytes.Buffer
	m := telemetry.NewMetrics(telemetry.Build{})
	cfg := Config{
		Tracker:       newFakeTracker(donottrack.Config{}),
		SyncPeriod:    30 * time.Second,
		MinSyncPeriod: 100 * time.Millisecond,
		Metrics:       m,
		Logger:        slog.New(slog.NewTextHandler(&out, nil)),
	}
	for _, b := range backends {
		cfg.Backends = append(cfg.Backends, b)
	}
	if change != nil {
		change(&cfg)
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	stopped := false
	g := &harness{Reconciler: r, t: t, log: &out, metrics: m}
	g.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run returned %v", err)
		}
	}
	t.Cleanup(g.stop)
	r.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
	synctest.Wait()
	return g
}

// after lets time pass and waits until nothing is left to do.
func (g *harness) after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (g *harness) wantKernel(b *fakeBackend, want map[string]uint16) {
	g.t.Helper()
	if got := b.holds(); !maps.Equal(got, want) {
		g.t.Errorf("%s holds %v, want %v\ncalls: %s", b.name, got, want, fmt.Sprint(b.log()))
	}
}

// metric is the value of a gauge or counter, or the number of observations of
// a histogram. Labels follow the name as " label=value".
func (g *harness) metric(name string) float64 {
	g.t.Helper()
	families, err := g.metrics.Gatherer().Gather()
	if err != nil {
		g.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetName() + "=" + l.GetValue()
			}
			if key == name {
				return m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	g.t.Fatalf("no metric %s", name)
	return 0
}
