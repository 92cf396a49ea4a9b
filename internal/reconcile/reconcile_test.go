package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestFirstSyncWaitsForTheWholeWorld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.Deliver(delta(false, map[string]uint16{"a": 1}), nil)
		g.after(time.Minute)
		if n := len(b.log()); n != 0 {
			t.Fatalf("%d calls before the first full delta", n)
		}
		if g.Status().PendingSince.IsZero() {
			t.Error("nothing is pending though a change waits")
		}
		g.Deliver(delta(true, map[string]uint16{"b": 1}), nil)
		g.after(time.Second)
		g.wantKernel(b, map[string]uint16{"b": 1})
		if c := b.log()[0]; !c.full {
			t.Error("the first sync was not a full one")
		}
		if s := g.Status(); !s.PendingSince.IsZero() || s.LastSynced.IsZero() || s.Ports["ebpf"] != 1 {
			t.Errorf("status after the first sync: %+v", s)
		}
	})
}

func TestFirstSyncWaitsForNodeAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.stop()
		r, err := New(Config{Tracker: newFakeTracker(donottrack.Config{}), Backends: g.cfg.Backends, SyncPeriod: time.Second})
		if err != nil {
			t.Fatal(err)
		}
		r.Deliver(delta(true, nil), nil)
		r.runDue(t.Context())
		if len(b.log()) != 0 {
			t.Fatal("synced without knowing the node's addresses")
		}
		r.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
		r.runDue(t.Context())
		if len(b.log()) != 1 {
			t.Fatalf("%d calls, want 1", len(b.log()))
		}
	})
}

func TestOneChangeIsOneSmallSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"b": 0}), nil)
		g.after(time.Second)
		g.wantKernel(b, map[string]uint16{"a": 2})
		calls := b.log()
		if len(calls) != 3 || calls[1].full || len(calls[1].upserts) != 1 || len(calls[2].deletes) != 1 {
			t.Errorf("calls: %+v", calls)
		}
	})
}

func TestChangesCloseTogetherAreWrittenTogetherAndTheLatestWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(0)
		for v := uint16(2); v <= 50; v++ {
			g.Deliver(delta(false, map[string]uint16{"a": v, fmt.Sprint("n", v): v}), nil)
			g.after(time.Millisecond)
		}
		g.Deliver(delta(false, map[string]uint16{"n7": 0}), nil)
		g.after(time.Second)
		calls := b.log()
		if len(calls) != 2 {
			t.Fatalf("%d syncs, want 2: %+v", len(calls), calls)
		}
		if gap := calls[1].at - calls[0].at; gap < 100*time.Millisecond {
			t.Errorf("syncs are %v apart", gap)
		}
		if got := calls[1].upserts["a"]; got != 50 {
			t.Errorf("version %d of a was written, want 50", got)
		}
		if _, there := b.holds()["n7"]; there || len(b.holds()) != 49 {
			t.Errorf("kernel: %v", b.holds())
		}
	})
}

func TestNothingIsLostWhenASyncFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.fail = func(n int) error {
			if n >= 1 && n <= 3 {
				return errors.New("no memory")
			}
			return nil
		}
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"a": 2, "b": 0}), nil) // fails
		g.after(50 * time.Millisecond)
		g.Deliver(delta(false, map[string]uint16{"c": 1, "a": 3}), nil)
		if s := g.Status(); s.PendingSince.IsZero() || len(s.Problems) != 1 {
			t.Errorf("status while a sync fails: %+v", s)
		}
		g.after(10 * time.Second)
		g.wantKernel(b, map[string]uint16{"a": 3, "c": 1})
		calls := b.log()
		if len(calls) != 5 || calls[1].full || !calls[2].full || !calls[3].full || !calls[4].full {
			t.Errorf("want full syncs after the failure: %+v", calls)
		}
		if first, last := calls[2].at-calls[1].at, calls[4].at-calls[3].at; first < firstRetry/2 || last < 2*firstRetry {
			t.Errorf("retries after %v and %v do not back off", first, last)
		}
		if s := g.Status(); !s.PendingSince.IsZero() || len(s.Problems) != 0 {
			t.Errorf("status after recovery: %+v", s)
		}
		g.after(2 * absentPeriod)
		if n := strings.Count(g.log.String(), "no memory"); n != 2 {
			t.Errorf("the error is in the log %d times, want once when it appears and once when it is gone:\n%s", n, g.log)
		}
	})
}

func TestAPortThatCannotBeWrittenHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		full := true
		b.fail = func(int) error {
			if full {
				return fmt.Errorf("apply: %w", &dataplane.PortErrors{Errors: map[intent.PortID]error{
					idOf(svcName("big")): errors.New("map is full"),
				}})
			}
			return nil
		}
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "big": 1}), nil)
		g.after(4 * time.Second)
		tried := len(b.log())
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(10 * time.Millisecond)
		g.wantKernel(b, map[string]uint16{"a": 2})
		calls := b.log()
		if len(calls) != tried+1 || calls[tried].full || len(calls[tried].upserts) != 1 {
			t.Errorf("the change of a waited or took others along: %+v", calls)
		}
		if tried < 3 || tried > 8 {
			t.Errorf("the failed port was tried %d times in 4 s", tried)
		}
		s := g.Status()
		if !s.PendingSince.IsZero() {
			t.Error("one port that does not fit makes the node unhealthy")
		}
		if len(s.Problems) != 1 || !strings.Contains(s.Problems[0].String(), "Service default/big: port 80/TCP/IPv4: map is full") {
			t.Errorf("problems: %v", s.Problems)
		}
		b.set(func() { full = false })
		g.after(20 * time.Second)
		g.wantKernel(b, map[string]uint16{"a": 2, "big": 1})
		if s := g.Status(); len(s.Problems) != 0 {
			t.Errorf("problems after all: %v", s.Problems)
		}
	})
}

// What the Node itself needs is tried again and reported, and holds up no change of Services.
func TestANodeThatCannotBeWrittenHoldsUpNoService(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		full := true
		b.fail = func(int) error {
			if full {
				return &dataplane.PortErrors{Node: errors.New("map is full")}
			}
			return nil
		}
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(100 * time.Second)
		tried := len(b.log())
		if tried < 3 {
			t.Errorf("the Node was tried %d times in 100 s", tried)
		}
		g.Deliver(delta(false, map[string]uint16{"a": 2, "b": 0}), nil)
		g.after(100 * time.Millisecond) // less than the wait for the Node
		g.wantKernel(b, map[string]uint16{"a": 2})
		s := g.Status()
		if len(s.Problems) != 1 || !strings.Contains(s.Problems[0].String(), "dataplane ebpf: map is full; Services are served") {
			t.Errorf("problems: %v", s.Problems)
		}
		if s.PendingSince.IsZero() {
			t.Error("a node without what protects counts as healthy")
		}
		b.set(func() { full = false })
		g.after(60 * time.Second)
		if s := g.Status(); len(s.Problems) != 0 || !s.PendingSince.IsZero() {
			t.Errorf("status after all: %+v", s)
		}
	})
}

func TestAFailedPortThatIsDeletedIsNotTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.fail = func(int) error {
			return &dataplane.PortErrors{Errors: map[intent.PortID]error{idOf(svcName("big")): errors.New("map is full")}}
		}
		g := start(t, nil, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"big": 1}), nil)
		g.after(time.Second)
		b.set(func() { b.fail = nil })
		g.Deliver(delta(false, map[string]uint16{"big": 0}), nil)
		g.after(10 * time.Second)
		g.wantKernel(b, map[string]uint16{"a": 1})
	})
}

func TestJoinedErrorsCountAsWhole(t *testing.T) {
	pe := &dataplane.PortErrors{Errors: map[intent.PortID]error{idOf(svcName("a")): errors.New("x")}}
	if partErrors(fmt.Errorf("apply: %w", pe)) == nil {
		t.Error("a wrapped PortErrors is not seen")
	}
	if partErrors(errors.Join(pe, errors.New("and the node failed too"))) != nil {
		t.Error("an error beside PortErrors is forgotten")
	}
}

// sctp is the Affinity by which the fakes know a port of SCTP.
const sctp = time.Hour

func sctpOnly(p *intent.ServicePort) error {
	if p.Affinity == sctp {
		return errors.New("SCTP: this dataplane has no checksum for it")
	}
	return nil
}

func TestAPortGoesToTheFirstBackendThatCanCarryIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newFakeBackend("ebpf"), newFakeBackend("nftables")
		first.cannot = sctpOnly
		g := start(t, nil, first, second)
		d := delta(true, map[string]uint16{"a": 1, "s": 1})
		d.Services[svcName("s")].Affinity = sctp
		g.Deliver(d, nil)
		g.after(time.Second)
		g.wantKernel(first, map[string]uint16{"a": 1})
		g.wantKernel(second, map[string]uint16{"s": 1})
		// It turns into something that the first can carry, and goes there.
		g.Deliver(delta(false, map[string]uint16{"s": 2}), nil)
		g.after(time.Second)
		g.wantKernel(second, map[string]uint16{"s": 1}) // for the last answers
		g.after(Linger)
		g.wantKernel(first, map[string]uint16{"a": 1, "s": 2})
		g.wantKernel(second, map[string]uint16{})
		g.after(time.Minute) // and full syncs keep it there
		g.wantKernel(first, map[string]uint16{"a": 1, "s": 2})
		g.wantKernel(second, map[string]uint16{})
	})
}

// A dataplane that only helps out is never given a change while it has no port,
// only the whole of nothing: that leaves no trace in the kernel.
func TestABackendWithoutPortsIsToldTheWholeOfNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newFakeBackend("ebpf"), newFakeBackend("nftables")
		first.cannot = sctpOnly
		g := start(t, nil, first, second)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		g.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.2")})
		g.after(time.Second)
		d := delta(false, map[string]uint16{"s": 1})
		d.Services[svcName("s")].Affinity = sctp
		g.Deliver(d, nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"s": 0}), nil)
		g.after(Linger + time.Second)
		ports := 0
		for _, c := range second.log() {
			if c.full != (len(c.upserts) == 0) {
				t.Errorf("call %+v: want a full one if and only if there is no port", c)
			}
			ports += len(c.upserts)
		}
		if ports != 1 {
			t.Errorf("%d ports were written, want 1: %+v", ports, second.log())
		}
		g.wantKernel(second, map[string]uint16{})
	})
}

func TestFirstSyncIsToldOnceAndOnlyWhenAllIsInTheKernel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, told := newFakeBackend("ebpf"), 0
		failing := true
		b.fail = func(int) error {
			if failing {
				return errors.New("no")
			}
			return nil
		}
		g := start(t, func(c *Config) { c.OnFirstSync = func(context.Context) { told++ } }, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		if told != 0 {
			t.Errorf("told %d times before the first sync", told)
		}
		b.set(func() { failing = false })
		g.after(time.Minute)
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(time.Minute)
		if told != 1 {
			t.Errorf("told %d times, want once", told)
		}
	})
}

func TestAPortThatNobodyCarriesIsReported(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.cannot = sctpOnly
		g := start(t, nil, b)
		d := delta(true, map[string]uint16{"s": 1})
		d.Services[svcName("s")].Affinity = sctp
		g.Deliver(d, nil)
		g.after(2 * time.Minute)
		g.wantKernel(b, map[string]uint16{})
		s := g.Status()
		if s.Unsupported != 1 || len(s.Problems) != 1 || !strings.Contains(s.Problems[0].What, "not served on this node: SCTP") {
			t.Errorf("status: %+v", s)
		}
		if n := strings.Count(g.log.String(), "msg=problem"); n != 1 {
			t.Errorf("reported %d times:\n%s", n, g.log)
		}
		g.Deliver(delta(false, map[string]uint16{"s": 0}), nil)
		g.after(time.Second)
		if s := g.Status(); s.Unsupported != 0 || len(s.Problems) != 0 {
			t.Errorf("status after the Service went: %+v", s)
		}
		if n := strings.Count(g.log.String(), `msg="problem resolved"`); n != 1 {
			t.Errorf("gone %d times:\n%s", n, g.log)
		}
	})
}

func TestOneBackendThatFailsDoesNotHoldUpTheOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newFakeBackend("ebpf"), newFakeBackend("nftables")
		first.cannot = sctpOnly
		second.fail = func(int) error { return errors.New("nft is missing") }
		g := start(t, nil, first, second)
		d := delta(true, map[string]uint16{"a": 1, "s": 1})
		d.Services[svcName("s")].Affinity = sctp
		g.Deliver(d, nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(100 * time.Millisecond)
		g.wantKernel(first, map[string]uint16{"a": 2})
		if g.Status().PendingSince.IsZero() {
			t.Error("a dataplane that fails does not show in the status")
		}
	})
}

func TestAFullSyncRepairsWhatSomebodyFlushed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &watchingBackend{fakeBackend: newFakeBackend("ebpf")}
		g := start(t, func(c *Config) { c.Backends = []dataplane.Backend{b} })
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		b.set(func() {
			delete(b.kernel, "a")
			b.kernel["stranger"] = 1
		})
		g.after(30 * time.Second)
		g.wantKernel(b.fakeBackend, map[string]uint16{"a": 1, "b": 1})
		if !strings.Contains(g.log.String(), "missing=1 foreign=1") {
			t.Errorf("the log does not say so:\n%s", g.log)
		}
	})
}

func TestMemoryIsBoundedWhenTheBackendIsSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, func(c *Config) { c.SyncPeriod = time.Hour }, b)
		g.Deliver(delta(true, nil), nil)
		g.after(time.Second)
		b.set(func() { b.delay = 5 * time.Second })
		want := map[string]uint16{}
		most := 0
		for i := range 200 * 60 { // a minute of 200 changes a second
			name := fmt.Sprint("s", i%50)
			want[name] = uint16(i + 1)
			g.Deliver(delta(false, map[string]uint16{name: uint16(i + 1)}), nil)
			time.Sleep(5 * time.Millisecond)
			n, _ := g.queue.sizes()
			most = max(most, n)
		}
		g.after(20 * time.Second)
		g.wantKernel(b, want)
		if most > 50 {
			t.Errorf("%d changes of 50 Services were held at once", most)
		}
		if n := len(b.log()); n < 10 || n > 16 {
			t.Errorf("%d syncs of 5 s in 80 s", n)
		}
	})
}

// TestTheWaitForTheSourceIsNoLateWrite: what waits counts from when all was heard.
func TestTheWaitForTheSourceIsNoLateWrite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.Deliver(model.Delta{}, []model.Problem{{Where: "API server", What: "is away"}})
		g.after(time.Hour)
		if s := g.Status(); s.Listed || !s.LastSynced.IsZero() {
			t.Errorf("before all was heard: %+v", s)
		}
		b.set(func() { b.delay = 10 * time.Second })
		begin := time.Now()
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		if s := g.Status(); !s.Listed || !s.PendingSince.Equal(begin) {
			t.Errorf("while it is written: %+v, want pending since %v", s, begin)
		}
		g.after(time.Minute)
		if s := g.Status(); !s.PendingSince.IsZero() || s.LastSynced.IsZero() {
			t.Errorf("afterwards: %+v", s)
		}
	})
}

func TestPendingTimeIsThatOfTheOldestChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, nil, b)
		g.Deliver(delta(true, nil), nil)
		g.after(time.Second)
		b.set(func() { b.delay = 10 * time.Second })
		begin := time.Now()
		g.Deliver(delta(false, map[string]uint16{"a": 1}), nil)
		g.after(3 * time.Second)
		second := time.Now()
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(time.Second)
		if got := g.Status().PendingSince; !got.Equal(begin) {
			t.Errorf("pending since %v, want %v", got, begin)
		}
		g.after(8 * time.Second) // the first is written, the second is not
		if got := g.Status().PendingSince; !got.Equal(second) {
			t.Errorf("pending since %v, want %v", got, second)
		}
	})
}

func TestProblemsOfASourceStayUntilItSaysOtherwise(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := start(t, nil, newFakeBackend("ebpf"))
		bad := []model.Problem{{Where: "a.yaml, document 1", What: "not YAML"}}
		g.Deliver(delta(true, nil), bad)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		if ps := g.Status().Problems; len(ps) != 1 {
			t.Fatalf("problems: %v", ps)
		}
		g.Deliver(model.Delta{}, []model.Problem{})
		g.after(time.Second)
		if ps := g.Status().Problems; len(ps) != 0 {
			t.Errorf("problems: %v", ps)
		}
	})
}

func TestManyProblemsAreFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.cannot = func(*intent.ServicePort) error { return errors.New("never") }
		g := start(t, nil, b)
		all := map[string]uint16{}
		for i := range 1000 {
			all[fmt.Sprint("s", i)] = 1
		}
		g.Deliver(delta(true, all), nil)
		g.after(time.Second)
		if n := strings.Count(g.log.String(), "\n"); n > maxProblemLines+5 {
			t.Errorf("%d lines", n)
		}
		if n := len(g.Status().Problems); n != 1000 {
			t.Errorf("%d problems in the status", n)
		}
		families, err := g.metrics.Gatherer().Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if want := fmt.Sprintf("at most %d of", maxProblemLines); f.GetName() == "spillway_problems" && !strings.Contains(f.GetHelp(), want) {
				t.Errorf("the help of the metric, %q, does not say %q", f.GetHelp(), want)
			}
		}
	})
}

type fakeChecks struct {
	mu   sync.Mutex
	got  []intent.HealthCheck
	n    int
	fail bool
}

func (f *fakeChecks) Update(_ []netip.Addr, changed []intent.HealthCheck) []model.Problem {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
	f.got = append(f.got, changed...)
	if f.fail {
		return []model.Problem{{Where: "Service default/a", Field: "spec.healthCheckNodePort", What: "in use"}}
	}
	return nil
}

func TestHealthChecksFollowAndAreTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hc := &fakeChecks{fail: true}
		g := start(t, func(c *Config) { c.HealthChecks = hc }, newFakeBackend("ebpf"))
		g.after(time.Minute)
		if hc.n != 0 {
			t.Error("health checks before the first sync")
		}
		g.Deliver(delta(true, map[string]uint16{"a": 7}), nil)
		g.after(time.Second)
		if len(hc.got) != 1 || hc.got[0].Port != 7 {
			t.Fatalf("got %v", hc.got)
		}
		if len(g.Status().Problems) != 1 {
			t.Errorf("problems: %v", g.Status().Problems)
		}
		hc.mu.Lock()
		hc.fail = false
		hc.mu.Unlock()
		g.after(healthCheckRetry)
		if hc.n != 2 || len(g.Status().Problems) != 0 {
			t.Errorf("%d updates, problems %v", hc.n, g.Status().Problems)
		}
		g.after(time.Minute)
		if hc.n != 2 {
			t.Errorf("%d updates though nothing changed", hc.n)
		}
	})
}

func TestLatencyIsMeasuredOncePerTrigger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := start(t, nil, newFakeBackend("ebpf"))
		d := delta(true, map[string]uint16{"old": 1})
		d.Services[svcName("old")].Created = time.Now().Add(-time.Hour)
		g.Deliver(d, nil)
		g.after(time.Second)
		d = delta(false, map[string]uint16{"a": 1})
		d.Services[svcName("a")].Created = time.Now().Add(-time.Second / 2)
		g.Deliver(d, nil)
		d = delta(false, map[string]uint16{"future": 1}) // the annotation of a slice may say anything
		d.Services[svcName("future")].Created = time.Now().Add(time.Hour)
		g.Deliver(d, nil)
		g.after(2 * time.Minute) // full syncs write it again
		if got := g.metric("kubeproxy_network_programming_duration_seconds"); got != 1 {
			t.Errorf("%v observations, want 1", got)
		}
	})
}

func TestMetricsFollowTheLoop(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := start(t, nil, newFakeBackend("ebpf"))
		d := delta(true, map[string]uint16{"a": 1, "b": 1})
		d.Services[svcName("b")].ExternalLocal = true
		g.Deliver(d, nil)
		g.after(time.Second)
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(time.Second)
		for name, want := range map[string]float64{
			"kubeproxy_sync_proxy_rules_duration_seconds":                                 2,
			"kubeproxy_sync_full_proxy_rules_duration_seconds":                            1,
			"kubeproxy_sync_partial_proxy_rules_duration_seconds":                         1,
			"kubeproxy_sync_proxy_rules_no_local_endpoints_total traffic_policy=external": 1,
			"kubeproxy_sync_proxy_rules_no_local_endpoints_total traffic_policy=internal": 0,
			"kubeproxy_sync_proxy_rules_service_changes_pending":                          0,
			"kubeproxy_sync_proxy_rules_service_changes_total":                            3,
			"spillway_service_ports dataplane=ebpf":                                       2,
		} {
			if got := g.metric(name); got != want {
				t.Errorf("%s is %v, want %v", name, got, want)
			}
		}
	})
}

func TestStopInTheMiddleOfASyncIsNotAProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.delay = time.Minute
		b.fail = func(int) error { return errors.New("context canceled") }
		g := start(t, nil, b)
		g.Deliver(delta(true, nil), nil)
		g.after(time.Second)
		g.stop()
		if strings.Contains(g.log.String(), "problem") {
			t.Errorf("log:\n%s", g.log)
		}
	})
}

func TestFullDeltaTakesThePlaceOfWhatWaits(t *testing.T) {
	d := delta(false, map[string]uint16{"a": 1, "b": 1})
	mergeDelta(&d, delta(true, map[string]uint16{"c": 1}))
	mergeDelta(&d, delta(false, map[string]uint16{"d": 1, "c": 0}))
	if !d.Full || len(d.Services) != 1 || d.Services[svcName("d")] == nil {
		t.Errorf("merged: %+v", d)
	}
}
