package stale

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// ofTCP returns a port with the same frontends and endpoints of TCP.
func ofTCP(p *intent.ServicePort) *intent.ServicePort {
	p.ID.Protocol = model.TCP
	return p
}

// handshakeEntry is that of a SYN to a frontend, which an endpoint has not answered.
func handshakeEntry(to, answers string) conntrack.Entry {
	e := waiting(to, answers)
	e.Protocol, e.TCPState = unix.IPPROTO_TCP, 1 // TCP_CONNTRACK_SYN_SENT
	return e
}

// rested has the scans for these ports behind it, and may scan at once.
func rested(t *testing.T, f *fakeTable, ports ...*intent.ServicePort) *Reconciler {
	t.Helper()
	r := onFake(t, f)
	settled(t, r, f, ports...)
	now := r.now().Add(time.Hour)
	r.now = func() time.Time { return now }
	return r
}

func TestOnlyUnansweredHandshakesWithRemovedEndpointsAreDeleted(t *testing.T) {
	lost := []conntrack.Entry{handshakeEntry("10.96.0.10:53", epA), handshakeEntry("172.30.0.1:30053", epA),
		handshakeEntry("203.0.113.10:53", epA)}
	with := func(change func(*conntrack.Entry)) conntrack.Entry {
		e := handshakeEntry("10.96.0.10:53", epA)
		change(&e)
		return e
	}
	stay := []conntrack.Entry{
		handshakeEntry("10.96.0.10:53", epB),                                               // to a present endpoint
		handshakeEntry("10.96.0.99:53", epA),                                               // of another Service
		handshakeEntry("192.0.2.1:30053", epA),                                             // no NodePort is served there
		handshakeEntry("[fd96::10]:53", epA6),                                              // the port lost no endpoint
		with(func(e *conntrack.Entry) { e.Status |= conntrack.SeenReply; e.TCPState = 2 }), // TCP_CONNTRACK_SYN_RECV
		with(func(e *conntrack.Entry) { e.Status = 0; e.Reply.Src = e.Orig.Dst }),
		with(func(e *conntrack.Entry) { e.Zone = 1 }),
	}
	f := &fakeTable{}
	r := rested(t, f, ofTCP(port4(epA, epB)), ofTCP(port6(epA6)))
	f.entries = slices.Concat(lost, stay)
	apply(t, r, upserts(ofTCP(port4(epB))))
	if !slices.Equal(f.entries, stay) {
		t.Errorf("left: %v, want %v", f.entries, stay)
	}
	want := []conntrack.Filter{{Family: unix.AF_INET, Protocol: unix.IPPROTO_TCP, Status: conntrack.DstNAT, Unset: conntrack.SeenReply}}
	if !slices.Equal(f.dumps, want) {
		t.Errorf("dumps %v, want %v", f.dumps, want)
	}
}

func TestAPortThatLosesNoEndpointReadsNothing(t *testing.T) {
	f := &fakeTable{}
	r := rested(t, f, ofTCP(port4(epA)))
	apply(t, r, upserts(ofTCP(port4(epA, epB))))
	if len(f.dumps) != 0 || !r.Recheck().IsZero() {
		t.Errorf("dumps %v, another one at %v", f.dumps, r.Recheck())
	}
}

func TestAHandshakeEndsWithItsService(t *testing.T) {
	port := func(service string, endpoints ...string) *intent.ServicePort {
		p := ofTCP(port4(endpoints...))
		p.ID.Service.Name = service
		return p
	}
	ours, others := handshakeEntry("10.96.0.10:53", epA), handshakeEntry("10.96.0.10:53", epB)
	for _, row := range []struct {
		name    string
		instead []*intent.ServicePort
		left    []conntrack.Entry
	}{
		{"deleted", nil, []conntrack.Entry{others}},
		{"another Service with its addresses", []*intent.ServicePort{port("second", epB)}, []conntrack.Entry{others}},
		{"renamed", []*intent.ServicePort{port("second", epA, epB)}, []conntrack.Entry{ours, others}},
	} {
		t.Run(row.name, func(t *testing.T) {
			f := &fakeTable{}
			r := rested(t, f, port("first", epA))
			f.entries = []conntrack.Entry{ours, others}
			change := upserts(row.instead...)
			change.Deletes = []intent.PortID{port("first").ID}
			apply(t, r, change)
			if !slices.Equal(f.entries, row.left) {
				t.Errorf("left: %v, want %v", f.entries, row.left)
			}
			f.entries = []conntrack.Entry{ours, others} // of packets that were traversing the old rules
			lookAgain(t, r)
			if !slices.Equal(f.entries, row.left) || !r.Recheck().IsZero() {
				t.Errorf("left later: %v, want %v; recheck at %v", f.entries, row.left, r.Recheck())
			}
		})
	}
}

// slowTable takes time for a dump.
type slowTable struct {
	*fakeTable
	took func()
}

func (s slowTable) Dump(ctx context.Context, f conntrack.Filter, each func(*conntrack.Entry) bool) error {
	defer s.took()
	return s.fakeTable.Dump(ctx, f, each)
}

// However many changes there are, a scan begins a second after the end of the last one, or nine
// times its duration.
func TestScansForHandshakesAreRare(t *testing.T) {
	for _, takes := range []time.Duration{0, 2 * time.Second} {
		now := time.Now()
		var ended time.Time
		f := &fakeTable{}
		r, err := New(Config{Table: slowTable{f, func() { now = now.Add(takes); ended = now }}})
		if err != nil {
			t.Fatal(err)
		}
		r.now = func() time.Time { return now }
		scans := 0
		for i := range 10_000 {
			began, before := now, ended
			apply(t, r, upserts(ofTCP(port4([]string{epA, epB}[i%2]))))
			if len(f.dumps) > scans {
				if pause := began.Sub(before); scans > 0 && pause < max(time.Second, 9*takes) {
					t.Errorf("a scan that takes %v began %v after another one", takes, pause)
				}
				scans = len(f.dumps)
			}
			now = now.Add(10 * time.Millisecond)
		}
		if scans < 2 || r.Recheck().IsZero() {
			t.Errorf("%d scans that take %v; the last change waits until %v", scans, takes, r.Recheck())
		}
	}
}

func TestAHandshakeThatBeginsDuringTheScanIsFoundByTheNext(t *testing.T) {
	f := &fakeTable{}
	r := rested(t, f, ofTCP(port4(epA)))
	apply(t, r, upserts(ofTCP(port4(epB))))
	f.entries = []conntrack.Entry{handshakeEntry("10.96.0.10:53", epA)}
	lookAgain(t, r)
	if len(f.entries) != 0 || !r.Recheck().IsZero() {
		t.Errorf("left: %v; recheck at %v", f.entries, r.Recheck())
	}
}

func TestAFailedScanForHandshakesIsRepeated(t *testing.T) {
	f := &fakeTable{dumpErr: errors.New("no buffer space")}
	r := onFake(t, f)
	if err := r.Apply(t.Context(), upserts(ofTCP(port4(epB)))); !errors.Is(err, f.dumpErr) {
		t.Fatalf("dump failed, got %v", err)
	}
	f.entries = []conntrack.Entry{handshakeEntry("10.96.0.10:53", epA)}
	f.dumpErr, f.delErr = nil, errors.New("not permitted")
	r.now = func() time.Time { return time.Now().Add(time.Hour) }
	if err := r.Apply(t.Context(), intent.Changes{}); !errors.Is(err, f.delErr) {
		t.Fatalf("delete failed, got %v", err)
	}
	f.delErr = nil
	lookAgain(t, r)
	if len(f.entries) != 0 {
		t.Errorf("left: %v", f.entries)
	}
}

func TestABackendThatTranslatesBeforeNetfilterScansForNoHandshakes(t *testing.T) {
	f := &fakeTable{}
	r, err := New(Config{Table: f, TranslatedOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	settled(t, r, f, ofTCP(port4(epA)))
	apply(t, r, upserts(ofTCP(port4(epB))))
	if len(f.dumps) != 0 {
		t.Errorf("dumps %v", f.dumps)
	}
}
