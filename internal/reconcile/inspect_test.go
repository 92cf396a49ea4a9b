package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// realTracker decides as an agent's does.
func realTracker(c *Config) {
	c.Tracker = decisions.New(intent.Config{NodeName: "n1"}, donottrack.Config{NodeName: "n1"})
}

// worldOf is a full delta of Services of one port and endpoint.
func worldOf(names ...string) model.Delta {
	d := model.Delta{Full: true, Services: map[model.Name]*model.Service{}, Slices: map[model.Name]*model.EndpointSlice{}}
	for i, n := range names {
		s := &model.Service{Name: svcName(n), Type: model.ClusterIP, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, byte(i + 1)})},
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}}}
		d.Services[s.Name] = s
		d.Slices[s.Name] = &model.EndpointSlice{Name: s.Name, Service: s.Name, Family: model.IPv4,
			Ports: []model.EndpointPort{{Protocol: model.TCP, Port: uint16(8000 + i)}},
			Endpoints: []model.Endpoint{{Addr: netip.AddrFrom4([4]byte{10, 1, 0, byte(i + 1)}), Ready: true, Serving: true, Node: "n2",
				Pod: svcName(n + "-0")}}}
	}
	return d
}

func TestQuestionsAreAnsweredBetweenTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, realTracker, b)
		g.Deliver(worldOf("a", "b", "c"), nil)
		g.after(time.Second)
		calls := len(b.log())

		list, err := g.Services(t.Context(), "", model.Name{}, 2)
		if err != nil || len(list) != 2 || list[1].Spec.Name != svcName("b") || list[0].Sync[0] != (PortSync{Dataplane: "ebpf"}) {
			t.Errorf("first page: %+v, %v", list, err)
		}
		if list, err = g.Services(t.Context(), "default", svcName("b"), 2); err != nil || len(list) != 1 || list[0].Spec.Name != svcName("c") {
			t.Errorf("second page: %+v, %v", list, err)
		}
		one, ok, err := g.Service(t.Context(), svcName("b"))
		if err != nil || !ok || len(one.Slices) != 1 || len(one.Ports) != 1 || one.Ports[0].Endpoints[0].Addr.Port() != 8001 {
			t.Errorf("b: %+v, %v, %v", one, ok, err)
		}
		if _, ok, err := g.Service(t.Context(), svcName("none")); ok || err != nil {
			t.Errorf("a Service that does not exist: %v, %v", ok, err)
		}
		at := []Address{{Protocol: model.TCP, AddrPort: netip.MustParseAddrPort("10.96.0.3:80")},
			{AddrPort: netip.MustParseAddrPort("10.1.0.1:8000")}}
		if err := g.Names(t.Context(), at); err != nil || at[0].Service.Service != svcName("c") ||
			at[1].Pod != svcName("a-0") || at[1].Node != "n2" {
			t.Errorf("names: %+v, %v", at, err)
		}
		at = []Address{{Protocol: model.TCP, AddrPort: netip.MustParseAddrPort("10.1.0.2:8001"), EndpointOfMax: 1},
			{Protocol: model.TCP, AddrPort: netip.MustParseAddrPort("10.1.0.2:8001")}}
		if err := g.Names(t.Context(), at); err != nil || len(at[0].EndpointOf) != 1 || at[0].EndpointOf[0].Service != svcName("b") ||
			at[1].EndpointOf != nil {
			t.Errorf("endpoints: %+v, %v", at, err)
		}
		if s := g.Status(); s.Services != 3 || s.Endpoints != 3 || len(s.Errors) != 0 {
			t.Errorf("status: %+v", s)
		}
		if n := len(b.log()); n != calls {
			t.Errorf("questions made %d writes", n-calls)
		}
	})
}

// TestAPortSaysWhyTheKernelLacksIt: while it waits, when its write failed, and when no
// dataplane can carry it.
func TestAPortSaysWhyTheKernelLacksIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		idA := intent.PortID{Service: svcName("a"), Number: 80, Protocol: model.TCP, Family: model.IPv4}
		b.cannot = func(p *intent.ServicePort) error {
			if p.ID.Service == svcName("c") {
				return errors.New("no SCTP")
			}
			return nil
		}
		b.fail = func(int) error {
			return dataplane.PortErrorsOf(map[intent.PortID]error{idA: errors.New("map is full")})
		}
		g := start(t, realTracker, b)
		g.Deliver(worldOf("a", "b", "c"), nil)
		g.after(time.Second)
		sync := func(name string) PortSync {
			t.Helper()
			s, ok, err := g.Service(t.Context(), svcName(name))
			if err != nil || !ok || len(s.Sync) != 1 {
				t.Fatalf("%s: %+v, %v, %v", name, s, ok, err)
			}
			return s.Sync[0]
		}
		if s := sync("a"); s.Dataplane != "ebpf" || fmt.Sprint(s.Err) != "map is full" {
			t.Errorf("a failed port: %+v", s)
		}
		if s := sync("b"); s != (PortSync{Dataplane: "ebpf"}) {
			t.Errorf("a served port: %+v", s)
		}
		if s := sync("c"); s.Dataplane != "" || fmt.Sprint(s.Err) != "no SCTP" {
			t.Errorf("a port that none can carry: %+v", s)
		}
		b.set(func() { b.fail = func(int) error { return errors.New("no memory") } })
		g.Deliver(model.Delta{Services: map[model.Name]*model.Service{svcName("b"): nil, svcName("a"): nil}}, nil)
		g.after(time.Second)
		if s := g.Status(); s.Errors["ebpf"] != "no memory" {
			t.Errorf("errors of the dataplane: %v", s.Errors)
		}
	})
}

// TestAQuestionDuringAWriteEndsInTime, and does not stay in the way of the loop.
func TestAQuestionDuringAWriteEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		b.delay = time.Minute
		g := start(t, realTracker, b)
		g.Deliver(worldOf("a"), nil)
		g.after(time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		if _, err := g.Services(ctx, "", model.Name{}, 1); !errors.Is(err, ErrBusy) || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		if d := time.Since(began); d != 5*time.Second {
			t.Errorf("it took %v", d)
		}
		g.after(2 * time.Minute)
		if list, err := g.Services(t.Context(), "", model.Name{}, 1); err != nil || len(list) != 1 {
			t.Errorf("after the write: %v, %v", list, err)
		}
	})
}

func TestServerProblemsAreReportedAndResolved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, realTracker, b)
		g.Deliver(worldOf("a"), nil)
		g.after(time.Second)
		g.SetServerProblems([]model.Problem{{Where: "API of the agent", What: "the socket is in use"}})
		g.after(time.Second)
		if s := g.Status(); len(s.Problems) != 1 || !s.PendingSince.IsZero() {
			t.Errorf("status %+v", s)
		}
		g.SetServerProblems(nil)
		g.after(time.Second)
		if s := g.Status(); len(s.Problems) != 0 {
			t.Errorf("problems stay: %v", s.Problems)
		}
	})
}
