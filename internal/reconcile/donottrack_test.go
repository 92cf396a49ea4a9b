package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// fakeTable keeps how many targets it was given, as a kernel would.
type fakeTable struct {
	mu      sync.Mutex
	targets int
	kept    int
	writes  int
}

func (f *fakeTable) Apply(_ context.Context, c donottrack.Changes) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.writes++
	for _, ch := range c.Targets {
		if ch.Had != "" {
			f.targets--
		}
		if ch.Want != "" {
			f.targets++
		}
	}
	for _, ch := range c.Tracked {
		f.kept += map[bool]int{true: 1, false: -1}[ch.Want]
	}
	return nil
}

func (f *fakeTable) Replace(_ context.Context, s donottrack.State) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.writes++
	f.targets, f.kept = len(s.Targets), len(s.Tracked)
	return nil
}

// Repair writes nothing, as the real one while no other program writes.
func (f *fakeTable) Repair(context.Context, donottrack.State) error { return nil }

func (f *fakeTable) HasPolicies(context.Context) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.targets > 0, nil
}

func (f *fakeTable) Drifted() <-chan struct{}       { return nil }
func (f *fakeTable) Repaired() (r dataplane.Repair) { return r }
func (f *fakeTable) Close() error                   { return nil }

func (f *fakeTable) state() (targets, writes int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.targets, f.writes
}

func (f *fakeTable) held() int {
	targets, _ := f.state()
	return targets
}

func (f *fakeTable) keeps() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kept
}

// denyRuleTracker notes what it is told of guards.
type denyRuleTracker struct {
	*fakeTracker
	mu      sync.Mutex
	unknown bool
}

func (g *denyRuleTracker) SetKernel(k decisions.Kernel) decisions.Changes {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unknown = k.DenyRulesUnknown
	return g.fakeTracker.SetKernel(k)
}

func (g *denyRuleTracker) denyRulesUnknown() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.unknown
}

// policyDelta has one policy that selects one pod of node n1.
func policyDelta() model.Delta {
	pod := model.Name{Namespace: "n", Name: "p"}
	return model.Delta{Full: true,
		DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"p": {Name: "p", Pods: &model.PodSelection{}, DenyOthers: true,
			Ingress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.TCP, First: 80, Last: 80}}}}}},
		Pods: map[model.Name]*model.Pod{pod: {Name: pod, Node: "n1", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}},
	}
}

// TestWhatTheKernelDeniesStaysWhileItIsNotKnown starts an agent whose source cannot read
// something: what an earlier agent wrote must not go, and is given up for what is known
// only where there is nothing of it.
func TestWhatTheKernelDeniesStaysWhileItIsNotKnown(t *testing.T) {
	unread, mended := model.Unread{Reason: model.UnreadFile, Text: "m.yaml"}, model.Unread{}
	for _, test := range []struct {
		name    string
		holds   int // targets of the earlier agent
		delta   model.Delta
		left    bool
		targets int // at last
	}{
		{"a bad file and an earlier agent's table", 3, model.Delta{Full: true, Unread: &unread}, true, 0},
		{"another policy beside a bad file", 3, func() model.Delta { d := policyDelta(); d.Unread = &unread; return d }(), true, 1},
		{"nothing is held", 0, func() model.Delta { d := policyDelta(); d.Unread = &unread; return d }(), false, 1},
		{"all was read", 3, policyDelta(), false, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			table, guard := &fakeTable{targets: test.holds}, &denyRuleTracker{fakeTracker: newFakeTracker(donottrack.Config{})}
			g := start(t, func(c *Config) {
				c.Tracker, c.Policies = guard, table
			}, newFakeBackend("ebpf"))
			g.Deliver(test.delta, nil)
			g.after(2 * time.Minute) // over full syncs
			if targets, writes := table.state(); (writes == 0) != test.left || test.left && targets != test.holds {
				t.Errorf("%s: the kernel has %d targets after %d writes", test.name, targets, writes)
			}
			if guard.denyRulesUnknown() != test.left {
				t.Errorf("%s: guards unknown: %v", test.name, guard.denyRulesUnknown())
			}
			told := slices.ContainsFunc(g.policies.problem(),
				func(p model.Problem) bool { return strings.Contains(p.What, "wrote, and m.yaml cannot be read") })
			if told != test.left {
				t.Errorf("%s: problems %v", test.name, g.policies.problem())
			}
			g.Deliver(model.Delta{Unread: &mended}, nil)
			g.after(time.Second)
			if targets, _ := table.state(); targets != test.targets || guard.denyRulesUnknown() || len(g.policies.problem()) > 0 {
				t.Errorf("%s: mended: %d targets, guards unknown %v, problems %v", test.name, targets, guard.denyRulesUnknown(), g.policies.problem())
			}
			g.Deliver(model.Delta{Unread: &unread}, nil) // what it said before goes on holding
			g.after(time.Second)
			if guard.denyRulesUnknown() || len(g.policies.problem()) > 0 {
				t.Errorf("%s: later: guards unknown %v, problems %v", test.name, guard.denyRulesUnknown(), g.policies.problem())
			}
		})
	}
}

// TestAChangeInTheTurnOfAFullSyncIsWritten: a table need not compare what it holds at a full
// sync, so the turn must say that the state has changed.
func TestAChangeInTheTurnOfAFullSyncIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		g := start(t, func(c *Config) {
			c.Policies, c.SyncPeriod, c.MinSyncPeriod = table, 3*time.Second, time.Second
		}, newFakeBackend("ebpf"))
		g.Deliver(policyDelta(), nil)
		g.after(time.Second)
		p := policyDelta().DoNotTrackPolicies["p"]
		for i := range 30 {
			want := i % 2
			change := map[string]*model.DoNotTrackPolicy{"p": nil}
			if want == 1 {
				change["p"] = p
			}
			g.Deliver(delta(false, map[string]uint16{"a": uint16(i + 1)}), nil) // the next turn is a second later
			g.after(100 * time.Millisecond)
			g.Deliver(model.Delta{DoNotTrackPolicies: change}, nil)
			if g.after(1010 * time.Millisecond); table.held() != want {
				t.Fatalf("change %d: the kernel has %d targets, want %d", i, table.held(), want)
			}
		}
	})
}

// TestTwoChangesInOneTurnAreWritten: they are not merged, so the whole state is.
func TestTwoChangesInOneTurnAreWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &fakeTable{}
		g := start(t, func(c *Config) { c.Policies, c.SyncPeriod = table, time.Hour }, newFakeBackend("ebpf"))
		d := policyDelta()
		d.Nodes = map[string]*model.Node{"n1": {Name: "n1"}}
		own := *d.DoNotTrackPolicies["p"]
		own.Name, own.Pods, own.Nodes = "own", nil, &model.Selector{}
		d.DoNotTrackPolicies["own"] = &own
		g.Deliver(d, nil)
		g.after(time.Second)
		g.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.3")})
		g.Deliver(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"p": nil}}, nil)
		if g.after(time.Second); table.held() != 3 {
			t.Errorf("the kernel has %d targets, want those of three addresses of the node", table.held())
		}
	})
}

// translated is one direction of a connection that netfilter translates.
type translated struct {
	proto    model.Protocol
	from, to netip.AddrPort
}

// forgetting is asked for entries, and has more than it deletes at once.
type forgetting struct {
	fakeEntries
	mu    sync.Mutex
	asked []bool // whether the policy's traffic was unseen
	more  int

	looked     int // for what is translated
	translated []translated
	err        error
}

func (f *forgetting) Forget(_ context.Context, unseen, _ func(model.Protocol, netip.AddrPort, netip.AddrPort) bool) (int, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, unseen(model.TCP, netip.MustParseAddrPort("192.0.2.9:4000"), netip.MustParseAddrPort("10.0.0.1:80")))
	f.more--
	return 1, f.more > 0, nil
}

func (f *forgetting) Translated(_ context.Context, each func(model.Protocol, netip.AddrPort, netip.AddrPort) bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looked++
	for _, c := range f.translated {
		each(c.proto, c.from, c.to)
	}
	return f.err
}

func (f *forgetting) looks() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.looked
}

// runs sets what netfilter translates.
func (f *forgetting) runs(list ...translated) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.translated = list
}

func (f *forgetting) times() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.asked)
}

// TestConnectionsThatRunAreForgottenOnceARuleIsWritten counts how often the table of
// conntrack is looked at: when rules come, not when pods do.
func TestConnectionsThatRunAreForgottenOnceARuleIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		f := &forgetting{fakeEntries: fakeEntries{kernel: b.holds}}
		g := start(t, func(c *Config) {
			c.StaleEntries, c.Policies = f, &fakeTable{}
		}, b)
		g.Deliver(model.Delta{Full: true}, nil)
		g.after(time.Minute)
		if n := f.times(); n != 0 {
			t.Errorf("looked %d times without a policy", n)
		}
		f.mu.Lock()
		f.more = 3
		f.mu.Unlock()
		g.Deliver(policyDelta(), nil)
		g.after(time.Minute)
		if n := f.times(); n != 3 || slices.Contains(f.asked, false) {
			t.Errorf("a policy came: looked %d times, %v", n, f.asked)
		}
		pod := model.Name{Namespace: "n", Name: "another"}
		g.Deliver(model.Delta{Pods: map[model.Name]*model.Pod{pod: {Name: pod, Node: "n1", IPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}}}},
			nil)
		g.after(time.Minute)
		if n := f.times(); n != 3 {
			t.Errorf("a pod came: looked %d times in all", n)
		}
	})
}

// TestWhatIsTranslatedIsKeptWithThePolicy: in the same write, and until it has ended. It
// is looked for when connections that run may be concerned, and again soon after.
func TestWhatIsTranslatedIsKeptWithThePolicy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		client, pod := netip.MustParseAddrPort("192.0.2.9:4000"), netip.MustParseAddrPort("10.0.0.1:80")
		answers := translated{model.TCP, pod, client}
		f := &forgetting{fakeEntries: fakeEntries{kernel: b.holds}}
		f.runs(answers, answers, translated{model.TCP, client, netip.MustParseAddrPort("10.96.0.1:80")},
			translated{model.UDP, pod, client}, translated{model.TCP, netip.MustParseAddrPort("10.0.0.1:81"), client})
		table := &fakeTable{}
		g := start(t, func(c *Config) {
			c.StaleEntries, c.Policies = f, table
		}, b)
		f.err = errors.New("try again")
		g.Deliver(policyDelta(), nil)
		g.after(time.Millisecond)
		f.err = nil
		if n := table.keeps(); n != 0 {
			t.Errorf("conntrack could not be read: %d are kept", n)
		}
		g.after(3 * time.Second)
		if n := table.keeps(); n != 1 {
			t.Errorf("%d are kept", n)
		}
		g.after(5 * time.Minute)
		if n := f.looks(); n < 7 || n > 14 {
			t.Errorf("looked %d times", n)
		}
		f.runs()
		forgot := f.times()
		g.after(2 * trackedInterval)
		if f.times() == forgot {
			t.Error("what was tracked beside them is not forgotten")
		}
		looks := f.looks()
		g.after(10 * time.Minute)
		if n := table.keeps(); n != 0 || f.looks() != looks {
			t.Errorf("they have ended: %d are kept, looked %d times", n, f.looks()-looks)
		}
		pod2 := model.Name{Namespace: "n", Name: "another"}
		g.Deliver(model.Delta{Pods: map[model.Name]*model.Pod{pod2: {Name: pod2, Node: "n1",
			IPs: []netip.Addr{netip.MustParseAddr("10.0.0.9")}}}}, nil)
		g.after(time.Minute)
		if f.looks() != looks {
			t.Errorf("a pod came: looked %d times", f.looks()-looks)
		}
		f.runs(answers)
		p := policyDelta().DoNotTrackPolicies["p"]
		p.DenyOthers = false
		_, writes := table.state()
		g.Deliver(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"p": p}}, nil)
		g.after(time.Millisecond)
		if _, now := table.state(); table.keeps() != 1 || now != writes+1 {
			t.Errorf("another rule: %d are kept, %d writes", table.keeps(), now-writes)
		}
	})
}

// TestOfTooManyTheDatagramsAreLeftOut: one client's UDP entries do not evict other
// clients' connections.
func TestOfTooManyTheDatagramsAreLeftOut(t *testing.T) {
	tr := donottrack.New(donottrack.Config{NodeName: "n1"})
	d := policyDelta()
	r := &d.DoNotTrackPolicies["p"].Ingress[0]
	r.Ports = append(r.Ports, model.PortRange{Protocol: model.UDP, First: 80, Last: 80})
	tr.Apply(d)
	f, pod := &forgetting{}, netip.MustParseAddrPort("10.0.0.1:80")
	client := netip.MustParseAddr("192.0.2.1")
	for range 2 * maxTracked {
		client = client.Next()
		f.translated = append(f.translated, translated{model.UDP, pod, netip.AddrPortFrom(client, 4000)})
	}
	f.translated = append(f.translated, translated{model.TCP, pod, netip.AddrPortFrom(client.Next(), 4000)})
	last := donottrack.Pair{Local: pod.Addr(), Peer: client.Next(), Protocol: model.TCP, Port: pod.Port()}
	run, err := (&doNotTrackSync{tracker: tr}).translated(t.Context(), f)
	if err != nil || len(run) != maxTracked || !run[last] {
		t.Errorf("%d, with TCP: %v; %v", len(run), run[last], err)
	}
}

// besides notes at each write how many targets there are, and what Services the kernel
// has at that time.
type besides struct {
	fakeTable
	b    *fakeBackend
	list []string
}

func (s *besides) note(t *fakeTable) {
	targets, _ := t.state()
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.list = append(s.list, fmt.Sprintf("%d beside %d", targets, len(s.b.kernel)))
}

func (s *besides) Apply(ctx context.Context, c donottrack.Changes) error {
	defer s.note(&s.fakeTable)
	return s.fakeTable.Apply(ctx, c)
}

func (s *besides) Replace(ctx context.Context, state donottrack.State) error {
	defer s.note(&s.fakeTable)
	return s.fakeTable.Replace(ctx, state)
}

// takingOver is a Bypass of a Backend that has served no Services yet.
type takingOver struct{ steps }

func (*takingOver) Serves() bool { return false }

// policyBesideService has a policy whose pod is an endpoint of a Service.
func policyBesideService() (world model.Delta, web model.Name) {
	web = model.Name{Namespace: "n", Name: "web"}
	world = policyDelta()
	world.Services = map[model.Name]*model.Service{web: {Name: web, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}}}}
	world.Slices = map[model.Name]*model.EndpointSlice{web: {Name: web, Service: web,
		Ports:     []model.EndpointPort{{Protocol: model.TCP, Port: 80}},
		Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1")}}}}
	world.DoNotTrackPolicies["p"].DenyOthers = false
	return world, web
}

// TestAPolicyThatWaitsForAFailingWriteIsReported: a policy that a takeover blocks for a moment
// is no news, but a write that fails may block it for long.
func TestAPolicyThatWaitsForAFailingWriteIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		world, _ := policyBesideService()
		b := newFakeBackend("a")
		b.fail = func(int) error { return errors.New("no memory") }
		var refused []model.PolicyRefusal
		g := start(t, func(cfg *Config) {
			cfg.Tracker, cfg.Policies, cfg.Bypass = newFakeTracker(donottrack.Config{}), &fakeTable{}, &takingOver{}
			cfg.OnDoNotTrack = func(r []model.PolicyRefusal, _ error) { refused = r }
		}, b)
		g.Deliver(world, nil)
		g.after(time.Second)
		if len(refused) != 1 {
			t.Errorf("refused: %v, want the policy's port", refused)
		}
	})
}

// TestAPolicyHoldsWhenItsServiceIsWritten: where netfilter translates, a policy must not
// hold before the translation stops, nor after it starts.
func TestAPolicyHoldsWhenItsServiceIsWritten(t *testing.T) {
	world, web := policyBesideService()
	bare := world
	bare.Services, bare.Slices = nil, nil
	gone := model.Delta{Services: map[model.Name]*model.Service{web: nil}, Slices: map[model.Name]*model.EndpointSlice{web: nil}}
	for _, c := range []struct {
		what   string
		cfg    donottrack.Config
		bypass dataplane.Bypass
		deltas []model.Delta
		want   string
	}{
		{"netfilter translates", donottrack.Config{Netfilter: true}, nil, []model.Delta{bare, world, gone}, "1 beside 0, 0 beside 0, 1 beside 0"},
		{"eBPF takes over", donottrack.Config{}, &takingOver{}, []model.Delta{world}, "0 beside 0, 1 beside 1"},
		{"eBPF served before", donottrack.Config{}, &steps{}, []model.Delta{world}, "1 beside 0"},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newFakeBackend("a")
			table := &besides{b: b}
			b.fail = func(n int) error {
				if n == 0 {
					return errors.New("once")
				}
				return nil
			}
			g := start(t, func(cfg *Config) {
				cfg.Tracker, cfg.Policies, cfg.Bypass, cfg.SyncPeriod = newFakeTracker(c.cfg), table, c.bypass, time.Hour
			}, b)
			for _, d := range c.deltas {
				g.Deliver(d, nil)
				g.after(5 * time.Second)
			}
			if got := strings.Join(table.list, ", "); got != c.want {
				t.Errorf("%s: targets beside Services in the kernel: %s; want %s", c.what, got, c.want)
			}
		})
	}
}

// TestATableThatGoesWhileItIsLeftIsWritten: others may take away what was left alone.
func TestATableThatGoesWhileItIsLeftIsWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		unread := model.Unread{Reason: model.UnreadFile, Text: "m.yaml"}
		table := &fakeTable{targets: 3}
		g := start(t, func(c *Config) { c.Policies = table }, newFakeBackend("ebpf"))
		d := policyDelta()
		d.Unread = &unread
		g.Deliver(d, nil)
		g.after(time.Second)
		_ = table.Replace(t.Context(), donottrack.State{}) // another program
		g.after(time.Minute)
		if targets, writes := table.state(); targets != 1 || writes < 2 {
			t.Errorf("%d targets after %d writes", targets, writes)
		}
	})
}

// steps notes who is called, in which order.
type steps struct {
	fakeTable
	fail bool
	list []string
}

func (s *steps) note(what string, c *donottrack.Changes) error {
	if c == nil {
		what += " all"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.list = append(s.list, what)
	return nil
}

func (s *steps) Apply(_ context.Context, c donottrack.Changes) error {
	if s.fail {
		_ = s.note("fail", &c)
		return errors.New("no")
	}
	return s.note("table", &c)
}
func (s *steps) Replace(context.Context, donottrack.State) error        { return s.note("table", nil) }
func (s *steps) Serves() bool                                           { return true }
func (s *steps) Revoke(_ donottrack.State, c *donottrack.Changes) error { return s.note("revoke", c) }
func (s *steps) Grant(_ donottrack.State, c *donottrack.Changes) error  { return s.note("grant", c) }

// TestNothingPassesByWhatIsNotWritten: entries that bypass netfilter are deleted before
// netfilter's table is written, and added after it, if the write succeeded.
func TestNothingPassesByWhatIsNotWritten(t *testing.T) {
	s := &steps{}
	ps := &doNotTrackSync{tracker: donottrack.New(donottrack.Config{NodeName: "n1"}), table: s, bypass: s, whole: true, changed: true}
	for _, fail := range []bool{false, true} {
		if err := ps.writeTable(t.Context()); err != nil {
			t.Fatal(err)
		}
		ps.whole, s.fail, ps.pending = false, fail, ps.tracker.Apply(policyDelta())
		if err := ps.writeTable(t.Context()); (err != nil) != fail {
			t.Error(err)
		}
		ps.whole = true
	}
	unread := model.Unread{Reason: model.UnreadFile, Text: "m.yaml"}
	s.targets, ps.unread, ps.owned = 1, unread, false // what the kernel holds is not known, and left alone
	if err := ps.writeTable(t.Context()); err == nil {
		t.Error("what could not be read is written over")
	}
	want := "revoke all, table all, grant all, revoke, table, grant, revoke all, table all, grant all, revoke, fail"
	if got := strings.Join(s.list, ", "); got != want {
		t.Errorf("order of writes:\n%s\nwant\n%s", got, want)
	}
}

// grantFailsOnce is a Bypass whose first Grant fails.
type grantFailsOnce struct {
	steps
	failed bool
}

func (b *grantFailsOnce) Grant(donottrack.State, *donottrack.Changes) error {
	if b.failed {
		return nil
	}
	b.failed = true
	return errors.New("once")
}

// TestAFailedGrantLeavesTheTableToThisAgent: the table holds policies after it, but no
// earlier agent wrote them.
func TestAFailedGrantLeavesTheTableToThisAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table, bypass := &fakeTable{}, &grantFailsOnce{}
		g := start(t, func(c *Config) { c.Policies, c.Bypass = table, bypass }, newFakeBackend("ebpf"))
		d := policyDelta()
		d.Unread = &model.Unread{Reason: model.UnreadFile, Text: "m.yaml"}
		g.Deliver(d, nil)
		g.after(time.Minute)
		ps := g.policies.problem()
		if !bypass.failed || table.held() != 1 || len(ps) != 1 || !strings.Contains(ps[0].What, "the kernel had nothing of an earlier agent") {
			t.Errorf("%d targets, problems %v", table.held(), ps)
		}
	})
}

// failingTable refuses every write of a whole state.
type failingTable struct{ fakeTable }

func (*failingTable) Replace(context.Context, donottrack.State) error {
	return errors.New("no nf_tables")
}

// endpointBackend keeps the endpoints of its last whole state.
type endpointBackend struct {
	*fakeBackend
	endpoints []intent.Endpoint
}

func (b *endpointBackend) Replace(ctx context.Context, s intent.State) error {
	b.set(func() {
		b.endpoints = nil
		for _, p := range s.Ports {
			b.endpoints = append(b.endpoints, p.Endpoints...)
		}
	})
	return b.fakeBackend.Replace(ctx, s)
}

// TestAnyClientIsAllowedWhateverTheTableHolds: an endpoint that a policy opens to any client
// is marked with the Services, as docs/how-to/do-not-track.md says.
func TestAnyClientIsAllowedWhateverTheTableHolds(t *testing.T) {
	web := model.Name{Namespace: "n", Name: "web"}
	world := policyDelta()
	world.Services = map[model.Name]*model.Service{web: {Name: web, Type: model.ClusterIP,
		ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}}}}
	world.Slices = map[model.Name]*model.EndpointSlice{web: {Name: web, Service: web, Family: model.IPv4,
		Ports:     []model.EndpointPort{{Protocol: model.TCP, Port: 80}},
		Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1"), Ready: true, Serving: true, Node: "n1"}}}}
	synctest.Test(t, func(t *testing.T) {
		b := &endpointBackend{fakeBackend: newFakeBackend("ebpf")}
		g := start(t, func(c *Config) {
			c.Tracker = decisions.New(intent.Config{NodeName: "n1"}, donottrack.Config{})
			c.Policies, c.Bypass, c.Backends = &failingTable{}, &steps{}, []dataplane.Backend{b}
		})
		g.Deliver(world, nil)
		g.after(time.Second)
		if len(g.policies.problem()) == 0 {
			t.Error("the write of the table did not fail")
		}
		if len(b.endpoints) != 1 || !b.endpoints[0].AllowsAny {
			t.Errorf("endpoints %+v, want one that allows any client", b.endpoints)
		}
	})
}
