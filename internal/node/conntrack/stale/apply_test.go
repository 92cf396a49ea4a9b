package stale

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// fakeTable counts dumps and fails on demand; the kernel can do neither.
type fakeTable struct {
	entries []conntrack.Entry
	dumps   []conntrack.Filter
	dumpErr error
	delErr  error
}

func (f *fakeTable) Dump(_ context.Context, filter conntrack.Filter, each func(*conntrack.Entry) bool) error {
	f.dumps = append(f.dumps, filter)
	if f.dumpErr != nil {
		return f.dumpErr
	}
	for _, e := range slices.Clone(f.entries) {
		if filter.OrigDst.IsValid() && filter.OrigDst != e.Orig.Dst || e.Status&filter.Status != filter.Status {
			continue
		}
		if !each(&e) {
			return nil
		}
	}
	return nil
}

func (f *fakeTable) Delete(e *conntrack.Entry) error {
	if f.delErr != nil {
		return f.delErr
	}
	f.entries = slices.DeleteFunc(f.entries, func(o conntrack.Entry) bool { return o == *e })
	return nil
}

func entry(to, answers string) conntrack.Entry {
	client := netip.MustParseAddrPort("172.30.0.9:4000")
	return conntrack.Entry{
		Protocol: protocol, Status: conntrack.DstNAT | conntrack.SeenReply,
		Orig:  conntrack.Tuple{Src: client, Dst: netip.MustParseAddrPort(to)},
		Reply: conntrack.Tuple{Src: netip.MustParseAddrPort(answers), Dst: client},
	}
}

func onFake(t *testing.T, f *fakeTable) *Reconciler {
	t.Helper()
	r, err := New(Config{Table: f})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// settled has the second look behind it.
func settled(t *testing.T, r *Reconciler, f *fakeTable, ports ...*intent.ServicePort) {
	t.Helper()
	apply(t, r, upserts(ports...))
	lookAgain(t, r)
	f.dumps = nil
}

// lookAgain applies nothing at the time of Recheck.
func lookAgain(t *testing.T, r *Reconciler) {
	t.Helper()
	if at := r.Recheck(); !at.IsZero() {
		r.now = func() time.Time { return at }
	}
	apply(t, r, intent.Changes{})
}

func TestOnlyChangesThatCanMakeAnEntryStaleReadTheTable(t *testing.T) {
	sctp := func() *intent.ServicePort { p := port4(epB); p.ID.Protocol = model.SCTP; return p }
	moved := port4(epA)
	moved.Frontends = slices.Clone(moved.Frontends)
	moved.Frontends[1].Port = 30054
	kept := port4(epA)
	for _, row := range []struct {
		name  string
		c     intent.Changes
		dumps int
	}{
		{"nothing", intent.Changes{}, 0},
		{"the same port again", intent.Changes{Upserts: []*intent.ServicePort{kept}}, 0},
		{"one more endpoint", upserts(port4(epA, epB)), 0},
		{"an SCTP port", upserts(sctp()), 0},
		{"an SCTP port gone", intent.Changes{Deletes: []intent.PortID{sctp().ID}}, 0},
		{"another endpoint", upserts(port4(epB)), 4}, // ClusterIP, NodePort, ExternalIP, LoadBalancerIP
		{"another NodePort", upserts(moved), 2},      // the old and the new
		{"gone", intent.Changes{Deletes: []intent.PortID{kept.ID}}, 4},
		{"another endpoint of two ports: one dump of each family", upserts(port4(epB), port6(epB6)), 2},
	} {
		f := &fakeTable{}
		r := onFake(t, f)
		settled(t, r, f, kept, port6(epA6))
		apply(t, r, row.c)
		if len(f.dumps) != row.dumps {
			t.Errorf("%s: %d dumps, want %d: %v", row.name, len(f.dumps), row.dumps, f.dumps)
		}
		apply(t, r, intent.Changes{})
		if len(f.dumps) != row.dumps {
			t.Errorf("%s: looked again before Recheck", row.name)
		}
		lookAgain(t, r)
		if len(f.dumps) != 2*row.dumps {
			t.Errorf("%s: %d dumps after the second look, want %d", row.name, len(f.dumps), 2*row.dumps)
		}
		lookAgain(t, r)
		if len(f.dumps) != 2*row.dumps {
			t.Errorf("%s: looked a third time", row.name)
		}
	}
}

func TestATableThatIsNearlyEmptyIsWalkedOnce(t *testing.T) {
	for _, row := range []struct{ entries, buckets, dumps int }{
		{0, 262144, 1},
		{262144/copyBuckets + 1, 262144, 1}, // two walks are the limit, and there are four destinations
		{3*262144/copyBuckets + 1, 262144, 4},
		{1 << 20, 262144, 4},
		{0, 0, 4}, // not known
	} {
		f := &fakeTable{}
		r := onFake(t, f)
		settled(t, r, f, port4(epA))
		r.cfg.Size = func() (int, int, error) { return row.entries, row.buckets, nil }
		apply(t, r, upserts(port4(epB)))
		if len(f.dumps) != row.dumps {
			t.Errorf("%d entries in %d buckets: %d dumps, want %d: %v", row.entries, row.buckets, len(f.dumps), row.dumps, f.dumps)
		}
		if row.dumps == 1 && f.dumps[0].Family != unix.AF_INET {
			t.Errorf("dump %v: want the addresses' family alone", f.dumps[0])
		}
	}
}

func TestAPacketThatWasUnderWayIsFoundByTheSecondLook(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, port4(epA))
	apply(t, r, upserts(port4(epB)))
	f.entries = append(f.entries, entry("10.96.0.10:53", epA))
	lookAgain(t, r)
	if len(f.entries) != 0 {
		t.Error("the late entry is left")
	}
}

// waiting is an entry whose client has asked and has no answer yet.
func waiting(to, answers string) conntrack.Entry {
	e := entry(to, answers)
	e.Status &^= conntrack.SeenReply
	return e
}

func TestAnEntryThatWaitsForAnAnswerHasAGrace(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, port4(epA))
	start := r.now()
	wait := waiting("10.96.0.10:53", epA)
	never := waiting("10.96.0.10:53", "10.96.0.10:53") // not translated: there will be no answer
	never.Status = 0
	f.entries = []conntrack.Entry{wait, entry("172.30.0.1:30053", epA), never}
	apply(t, r, upserts(port4(epB)))
	if !slices.Equal(f.entries, []conntrack.Entry{wait}) {
		t.Errorf("left: %v, want the entry that waits for an answer", f.entries)
	}
	if got := r.Recheck().Sub(start); got != grace {
		t.Errorf("recheck after %v, want %v", got, grace)
	}
	lookAgain(t, r)
	if len(f.entries) != 0 || !r.Recheck().IsZero() {
		t.Errorf("left after the grace: %v; recheck at %v", f.entries, r.Recheck())
	}
}

// A server of TFTP answers from another port, so the entry of a request does not wait for an
// answer.
func TestAnEntryOfATFTPRequestHasNoGrace(t *testing.T) {
	tftp := func(endpoint string) *intent.ServicePort { p := port4(endpoint); p.Helper = intent.TFTP; return p }
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, tftp(epA))
	f.entries = []conntrack.Entry{waiting("10.96.0.10:53", epA)}
	apply(t, r, upserts(tftp(epB)))
	if len(f.entries) != 0 {
		t.Errorf("left: %v", f.entries)
	}
}

// A Service whose endpoints change all the time does not extend the grace without end.
func TestChangesDoNotExtendTheGraceForever(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, port4(epA, epB))
	now := r.now()
	r.now = func() time.Time { return now }
	f.entries = []conntrack.Entry{waiting("10.96.0.10:53", epA)}
	for began := now; len(f.entries) > 0; now = now.Add(grace / 2) {
		if now.Sub(began) > maxGrace {
			t.Fatalf("the entry is still there after %v", now.Sub(began))
		}
		apply(t, r, upserts(port4([]string{epB, "10.244.0.4:53"}[int(now.Sub(began)/(grace/2))%2])))
		if at := r.Recheck(); !at.Equal(now.Add(grace)) {
			t.Fatalf("recheck %v after the change, want %v", at.Sub(now), grace)
		}
	}
}

func TestAFailureForgetsNothing(t *testing.T) {
	f := &fakeTable{entries: []conntrack.Entry{entry("10.96.0.10:53", epA), entry("10.96.0.10:53", epB), entry("172.30.0.1:30053", epA)}}
	r := onFake(t, f)
	settled(t, r, f, port4(epA, epB))
	if len(f.entries) != 3 {
		t.Fatalf("right entries were deleted: %v", f.entries)
	}
	f.dumpErr = errors.New("no buffer space")
	if err := r.Apply(t.Context(), upserts(port4(epB))); !errors.Is(err, f.dumpErr) {
		t.Fatalf("dump failed, got %v", err)
	}
	f.dumpErr, f.delErr = nil, errors.New("not permitted")
	if err := r.Apply(t.Context(), intent.Changes{}); !errors.Is(err, f.delErr) {
		t.Fatalf("delete failed, got %v", err)
	}
	f.delErr = nil
	apply(t, r, intent.Changes{})
	if len(f.entries) != 1 || f.entries[0].Reply.Src.String() != epB {
		t.Errorf("left: %v", f.entries)
	}
}

func TestWithoutConntrackThereIsNothingToDo(t *testing.T) {
	f := &fakeTable{dumpErr: fmt.Errorf("dump: %w", conntrack.ErrUnsupported)}
	r, _ := New(Config{Table: f, TranslatedOnly: true})
	apply(t, r, upserts(port4(epA)))
	r = onFake(t, f)
	if err := r.Apply(t.Context(), upserts(port4(epA))); !errors.Is(err, conntrack.ErrUnsupported) {
		t.Errorf("a netfilter dataplane without conntrack over netlink: %v", err)
	}
}

// An address moves from one Service to another in one batch, in any order.
func TestAnAddressThatMovesBetweenServices(t *testing.T) {
	for _, order := range [][]int{{0, 1}, {1, 0}} {
		f := &fakeTable{entries: []conntrack.Entry{entry("203.0.113.10:53", epA)}}
		r := onFake(t, f)
		web := port4(epB)
		web.ID.Service.Name = "web"
		web.Frontends = nil
		settled(t, r, f, port4(epA), web)
		lost, won := port4(epA), *web
		lost.Frontends = slices.Delete(slices.Clone(lost.Frontends), 2, 3)
		won.Frontends = port4().Frontends[2:3]
		both := []*intent.ServicePort{lost, &won}
		apply(t, r, upserts(both[order[0]], both[order[1]]))
		if len(f.entries) != 0 {
			t.Errorf("order %v: the entry to the old Service's endpoint is left", order)
		}
		f.entries = []conntrack.Entry{entry("203.0.113.10:53", epB)}
		apply(t, r, intent.Changes{Deletes: []intent.PortID{lost.ID}})
		lookAgain(t, r)
		if len(f.entries) != 1 {
			t.Errorf("order %v: the entry of the new Service went with the old one", order)
		}
	}
}

// The port that loses the address could not be written, and is not in the update.
func TestAnAddressThatMovedGoesWithItsNewService(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	loser, winner := port4(epA), port4(epA)
	winner.ID.Service.Name = "web"
	settled(t, r, f, loser)
	settled(t, r, f, loser, winner)
	f.entries = []conntrack.Entry{entry("203.0.113.10:53", epA)}
	apply(t, r, intent.Changes{Deletes: []intent.PortID{loser.ID}})
	if len(f.entries) != 1 {
		t.Error("an entry of the new Service went with the old one")
	}
}

func TestANodeAddressThatComesLater(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, port4(epA))
	untranslated := entry("192.0.2.5:30053", "192.0.2.5:30053")
	untranslated.Status = 0
	f.entries = []conntrack.Entry{untranslated}
	n := node()
	n.NodePortAddrs = append(n.NodePortAddrs, netip.MustParseAddr("192.0.2.5"))
	apply(t, r, intent.Changes{Node: n})
	if len(f.entries) != 0 {
		t.Error("the entry from before the address was served is left")
	}
}

func BenchmarkOneEndpointAmong50kPorts(b *testing.B) {
	f := &fakeTable{}
	r, _ := New(Config{Table: f})
	var ports []*intent.ServicePort
	for i := range 50000 {
		p := port4(epA)
		p.ID.Service.Name = fmt.Sprint(i)
		p.Frontends = []intent.Frontend{{Addr: netip.AddrFrom4([4]byte{10, 97, byte(i >> 8), byte(i)}), Port: 53}}
		ports = append(ports, p)
	}
	r.Apply(b.Context(), upserts(ports...))
	for i := 0; b.Loop(); i++ {
		p := *ports[i%len(ports)]
		p.Endpoints = endpointsOf([]string{[]string{epA, epB}[i&1]})
		r.Apply(b.Context(), upserts(&p))
		f.dumps = nil
	}
}

func TestOfAFrontendThatIsGoneOnlyOurTranslationsGo(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	settled(t, r, f, port4(epA))
	f.entries = []conntrack.Entry{entry("172.30.0.1:30053", epA), entry("172.30.0.1:30053", "10.9.9.9:53")}
	apply(t, r, intent.Changes{Deletes: []intent.PortID{portID(model.IPv4)}})
	if len(f.entries) != 1 || f.entries[0].Reply.Src.String() != "10.9.9.9:53" {
		t.Errorf("left: %v", f.entries)
	}
}
