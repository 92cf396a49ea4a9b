package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	testPart       = 100 // endpoints that one call of a partBackend writes
	giantPorts     = 12
	giantEndpoints = 40 // of each port: a part has two ports
)

// partBackend is a fakeBackend that takes changes in parts and records them.
type partBackend struct {
	*fakeBackend
	parts   []intent.Changes
	applied func(intent.Changes) // runs while a part is written
}

var _ dataplane.Partial = (*partBackend)(nil)

func (b *partBackend) PartEndpoints() int { return testPart }

func (b *partBackend) Apply(ctx context.Context, c intent.Changes) error {
	b.parts = append(b.parts, c)
	if b.applied != nil {
		b.applied(c)
	}
	return b.fakeBackend.Apply(ctx, c)
}

// partHarness runs a Reconciler with a partBackend, and with a tracker that decides about
// Services of many ports.
func partHarness(t *testing.T) (*harness, *partBackend) {
	b := &partBackend{fakeBackend: newFakeBackend("parts")}
	g := start(t, func(c *Config) {
		c.Backends = []dataplane.Backend{b}
		c.Tracker = decisions.New(intent.Config{NodeName: "n1"}, donottrack.Config{})
	})
	g.Deliver(model.Delta{Full: true}, nil)
	g.after(time.Second)
	return g, b
}

// service makes a Service whose ports have the same endpoints.
func service(name string, addr byte, ports, endpoints int) model.Delta {
	n := svcName(name)
	s := &model.Service{Name: n, ClusterIPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 96, 0, addr})}}
	slice := &model.EndpointSlice{Name: n, Service: n, Family: model.IPv4}
	for i := range ports {
		port := fmt.Sprintf("p%02d", i)
		s.Ports = append(s.Ports, model.ServicePort{Name: port, Protocol: model.TCP, Port: uint16(1000 + i)})
		slice.Ports = append(slice.Ports, model.EndpointPort{Name: port, Protocol: model.TCP, Port: uint16(8000 + i)})
	}
	for i := range endpoints {
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: netip.AddrFrom4([4]byte{10, addr, 0, byte(i)}),
			Ready: true, Serving: true})
	}
	return model.Delta{Services: map[model.Name]*model.Service{n: s}, Slices: map[model.Name]*model.EndpointSlice{n: slice}}
}

func deleted(name string) model.Delta {
	return model.Delta{Services: map[model.Name]*model.Service{svcName(name): nil}}
}

// holding returns the numbers of the parts that change a Service.
func (b *partBackend) holding(name string) (at []int) {
	for i, c := range b.parts {
		of := func(id intent.PortID) bool { return id.Service.Name == name }
		if slices.ContainsFunc(c.Upserts, func(p *intent.ServicePort) bool { return of(p.ID) }) || slices.ContainsFunc(c.Deletes, of) {
			at = append(at, i)
		}
	}
	return at
}

// TestALargeServiceDoesNotHoldUpOthers: a change that arrives while the first part of a
// large Service is written is in the next sync, when it is created and when it is deleted.
func TestALargeServiceDoesNotHoldUpOthers(t *testing.T) {
	for what, giant := range map[string]model.Delta{
		"created": service("giant", 1, giantPorts, giantEndpoints), "deleted": deleted("giant"),
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g, b := partHarness(t)
				if what == "deleted" {
					g.Deliver(service("giant", 1, giantPorts, giantEndpoints), nil)
					g.after(time.Minute)
				}
				b.parts = nil
				b.applied = func(intent.Changes) {
					b.applied = nil
					g.Deliver(service("small", 2, 1, 3), nil)
				}
				g.Deliver(giant, nil)
				g.after(20 * time.Second)
				giants, small := b.holding("giant"), b.holding("small")
				if len(giants) != giantPorts/2 || !slices.Equal(small, []int{1}) {
					t.Errorf("parts %v have the large Service, %v the small one", giants, small)
				}
				ports := 0
				for i, c := range b.parts {
					if n := len(c.Upserts) + len(c.Deletes); n > 3 {
						t.Errorf("part %d has %d ports", i, n)
					}
					ports += len(c.Upserts) + len(c.Deletes)
				}
				if ports != giantPorts+1 {
					t.Errorf("%d ports were written, want %d", ports, giantPorts+1)
				}
				if s := g.Status(); !s.PendingSince.IsZero() {
					t.Errorf("changes are pending since %v", s.PendingSince)
				}
			})
		})
	}
}

// TestAFullSyncWaitsForParts, but not for ever: a full sync writes all parts at once.
func TestAFullSyncWaitsForParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, b := partHarness(t)
		b.parts, b.delay = nil, 10*time.Second // a part takes a third of the period
		full := func() (n int) {
			for _, c := range b.log() {
				if c.full {
					n++
				}
			}
			return n
		}
		before := full()
		g.Deliver(service("giant", 1, giantPorts, giantEndpoints), nil)
		g.after(45 * time.Second)
		if n := full() - before; n != 0 || len(b.parts) < 4 {
			t.Errorf("%d full syncs during the first parts, of which there were %d", n, len(b.parts))
		}
		g.Deliver(service("giant", 1, giantPorts, giantEndpoints-1), nil)
		g.after(30 * time.Second)
		if n := full() - before; n != 1 {
			t.Errorf("%d full syncs in two and a half periods, want 1", n)
		}
	})
}

// TestPendingSinceFollowsTheParts: while a large Service changes all the time, the node
// reports how long the oldest change waits, and not since when there are changes.
func TestPendingSinceFollowsTheParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, b := partHarness(t)
		endpoints := giantEndpoints
		b.applied = func(intent.Changes) {
			endpoints = 2*giantEndpoints - 1 - endpoints
			g.Deliver(service("giant", 1, giantPorts, endpoints), nil)
		}
		g.Deliver(service("giant", 1, giantPorts, endpoints), nil)
		longest := time.Duration(0)
		for range 200 {
			g.after(100 * time.Millisecond)
			longest = max(longest, time.Since(g.Status().PendingSince))
		}
		// Each part takes MinSyncPeriod, and six have all ports.
		if longest > 2*time.Second {
			t.Errorf("a change has waited for %v", longest)
		}
	})
}

func newPartSync() *backendSync {
	bs := newBackendSync(&partBackend{fakeBackend: newFakeBackend("parts")})
	bs.full = false
	return bs
}

func portID(service string, port int) intent.PortID {
	return intent.PortID{Service: svcName(service), Number: uint16(port), Protocol: model.TCP, Family: model.IPv4}
}

// enqueueMany enqueues ports of a Service.
func (bs *backendSync) enqueueMany(service string, ports, endpoints int, since time.Time) {
	for i := range ports {
		bs.enqueue(portID(service, i), pendingPort{port: &intent.ServicePort{ID: portID(service, i)}, endpoints: endpoints, since: since})
	}
}

func services(part map[intent.PortID]pendingPort) map[string]int {
	n := map[string]int{}
	for id := range part {
		n[id.Service.Name]++
	}
	return n
}

func TestNextPart(t *testing.T) {
	now := time.Unix(1000, 0)
	bs := newPartSync()
	bs.enqueueMany("a", 2, 40, now)
	if got := services(bs.next()); got["a"] != 2 {
		t.Errorf("all that fits is one part: %v", got)
	}
	bs.enqueueMany("small", 3, 1, now)
	bs.enqueueMany("b", 1, 30, now)
	bs.enqueueMany("young", 4, 40, now.Add(time.Second))
	bs.enqueueMany("old", 4, 60, now.Add(-time.Second))
	if got := fmt.Sprint(services(bs.next())); got != fmt.Sprint(map[string]int{"b": 1, "small": 3, "old": 1}) {
		t.Errorf("the next part has %v", got)
	}
	bs = newPartSync()
	bs.enqueueMany("one", 2, 10*testPart, now)
	if got := services(bs.next()); got["one"] != 1 {
		t.Errorf("a port that is larger than a part is one: %v", got)
	}
}

// TestAFormerSizeCounts: removing many endpoints costs as much as adding them.
func TestAFormerSizeCounts(t *testing.T) {
	bs := newPartSync()
	bs.enqueueMany("a", 4, 40, time.Unix(1, 0))
	bs.enqueueMany("a", 4, 0, time.Unix(2, 0))
	if p := bs.pending[portID("a", 0)]; p.endpoints != 40 || !p.since.Equal(time.Unix(1, 0)) {
		t.Errorf("pending is %+v", p)
	}
	if got := services(bs.next()); got["a"] != 2 {
		t.Errorf("the next part has %v", got)
	}
}

// TestEachLargeServiceHasItsTurn, however often each changes.
func TestEachLargeServiceHasItsTurn(t *testing.T) {
	bs, written := newPartSync(), map[intent.PortID]int{}
	for turn := range 60 {
		for _, name := range []string{"x", "y", "z"} {
			bs.enqueueMany(name, 4, 60, time.Unix(int64(turn), 0))
		}
		bs.enqueueMany("small", 1, 1, time.Unix(int64(turn), 0))
		part := bs.next()
		for id := range part {
			written[id]++
		}
		bs.forget(part)
	}
	if written[portID("small", 0)] != 60 {
		t.Errorf("the small Service was in %d of 60 parts", written[portID("small", 0)])
	}
	for _, name := range []string{"x", "y", "z"} {
		for i := range 4 {
			if n := written[portID(name, i)]; n != 5 {
				t.Errorf("port %d of %s was written %d times, want 5", i, name, n)
			}
		}
	}
}

// TestPortsThatExchangeAddressesAreInOnePart, however large they are.
func TestPortsThatExchangeAddressesAreInOnePart(t *testing.T) {
	bs := newPartSync()
	bs.enqueueMany("giant", 4, 60, time.Unix(1, 0))
	bs.enqueueMany("renamed", 4, 60, time.Unix(1, 0))
	for i := range 4 {
		bs.enqueueMoves([]intent.Move{{From: portID("giant", i), To: portID("renamed", i)}})
	}
	bs.enqueueMoves([]intent.Move{{From: portID("giant", 2), To: portID("giant", 3)}, {From: portID("absent", 1), To: portID("giant", 1)}})
	for i, want := range []int{2, 2, 4} {
		part := bs.next()
		for _, m := range bs.moves {
			_, from := part[m.From]
			_, to := part[m.To]
			if from != to && m.From.Service.Name != "absent" {
				t.Errorf("part %d separates %v from %v", i, m.From, m.To)
			}
		}
		if len(part) != want {
			t.Errorf("part %d has %v", i, services(part))
		}
		bs.forget(part)
	}
	if len(bs.pending)+len(bs.moves) > 0 {
		t.Errorf("left are %d ports and %d moves", len(bs.pending), len(bs.moves))
	}
}

// TestALargeServiceOfAnotherDataplaneFillsNoLog: its author could push the lines about others out.
func TestALargeServiceOfAnotherDataplaneFillsNoLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second := newFakeBackend("first"), newFakeBackend("second")
		first.cannot = func(*intent.ServicePort) error { return errors.New("never") }
		g := start(t, func(c *Config) { c.Tracker = decisions.New(intent.Config{NodeName: "n1"}, donottrack.Config{}) }, first, second)
		g.Deliver(model.Delta{Full: true}, nil)
		g.Deliver(service("giant", 1, 90, 3), nil)
		g.after(time.Minute)
		if n := strings.Count(g.log.String(), "Service port is served by another dataplane"); n != maxProblemLines ||
			!strings.Contains(g.log.String(), "count=70") {
			t.Errorf("%d lines, want %d and one that counts 70 more:\n%s", n, maxProblemLines, g.log)
		}
	})
}
