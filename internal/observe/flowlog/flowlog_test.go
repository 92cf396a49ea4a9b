package flowlog

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var begun = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func ap(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// event is the n-th event: of Service ns/web if n is even, else of ns/other.
func event(n int) dataplane.FlowEvent {
	service := "web"
	if n%2 == 1 {
		service = "other"
	}
	return dataplane.FlowEvent{
		Kind: dataplane.FlowOpened, Time: begun.Add(time.Duration(n) * time.Second), Reason: fmt.Sprint(n),
		Flow: dataplane.EventFlow{
			Port:     intent.PortID{Service: model.Name{Namespace: "ns", Name: service}, Port: "http", Number: 80, Protocol: model.TCP},
			Protocol: model.TCP, Client: ap("10.0.0.1:4000"), ServiceAddress: ap("10.96.0.1:80"), Endpoint: ap("10.0.1.1:8080"),
		},
	}
}

func (l *Log) addEvents(from, to int) {
	for n := from; n < to; n++ {
		l.Add([]dataplane.FlowEvent{event(n)})
	}
}

func watch(t *testing.T, l *Log, f Filter, since time.Time) *Reader {
	t.Helper()
	r, err := l.Watch(f, since)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

// want fails unless these events come, and so many were missed.
func want(t *testing.T, r *Reader, missed uint64, reasons ...string) {
	t.Helper()
	var have []string
	var lost uint64
	for len(have) < len(reasons) || lost < missed {
		events, n, err := r.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		lost += n
		for _, e := range events {
			have = append(have, e.Reason)
		}
	}
	if !slices.Equal(have, reasons) || lost != missed {
		t.Fatalf("read %q and missed %d, want %q and %d", have, lost, reasons, missed)
	}
	if more, n, _ := r.take(); len(more) > 0 || n > 0 {
		t.Fatalf("%d more events, and %d more missed", len(more), n)
	}
}

func TestReaders(t *testing.T) {
	l := New(Config{Node: "n1", Events: 4})
	l.addEvents(0, 3)
	fromNow := watch(t, l, Filter{}, time.Time{})
	all := watch(t, l, Filter{}, begun)
	later := watch(t, l, Filter{}, begun.Add(2*time.Second))
	web := watch(t, l, Filter{Service: "web"}, begun)
	want(t, fromNow, 0)
	want(t, all, 0, "0", "1", "2")
	want(t, later, 0, "2")
	l.addEvents(3, 6)
	want(t, fromNow, 0, "3", "4", "5")
	want(t, all, 0, "3", "4", "5")
	// This reader has not read: 0 and 1 are gone, and only one is of its Service.
	want(t, web, 1, "2", "4")
	l.addEvents(6, 106)
	want(t, all, 96, "102", "103", "104", "105")
	want(t, web, 48, "102", "104")
	want(t, watch(t, l, Filter{}, begun), 0, "102", "103", "104", "105")
	if len(l.ring) != 4 {
		t.Errorf("%d events in memory", len(l.ring))
	}
}

func TestNextWaits(t *testing.T) {
	l := New(Config{})
	r := watch(t, l, Filter{Service: "web"}, time.Time{})
	ctx, cancel := context.WithCancel(t.Context())
	read := make(chan []Event)
	go func() {
		defer close(read)
		for {
			events, _, err := r.Next(ctx)
			if err != nil {
				return
			}
			read <- events
		}
	}()
	l.addEvents(1, 3)
	if events := <-read; len(events) != 1 || events[0].Reason != "2" {
		t.Errorf("events %v", events)
	}
	cancel()
	if _, more := <-read; more {
		t.Error("more events")
	}
}

func TestTooManyReaders(t *testing.T) {
	l := New(Config{Events: 1})
	for range maxReaders {
		watch(t, l, Filter{}, time.Time{})
	}
	if _, err := l.Watch(Filter{}, time.Time{}); !errors.Is(err, errTooManyReaders) {
		t.Errorf("error %v", err)
	}
	for r := range l.readers {
		r.Close()
		break
	}
	watch(t, l, Filter{}, time.Time{})
}

func TestFilter(t *testing.T) {
	l := New(Config{Owners: func(_ context.Context, addrs []netip.Addr) (out []Owner, err error) {
		for _, a := range addrs {
			out = append(out, Owner{Pod: "ns/pod-" + a.String(), Node: "n2"})
		}
		return out, nil
	}})
	l.Add([]dataplane.FlowEvent{event(0)})
	e := l.ring[0]
	prefix := func(s string) netip.Prefix {
		p, err := ParsePrefix(s)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	tests := []struct {
		yes, no Filter
	}{
		{Filter{}, Filter{Namespace: "n"}},
		{Filter{Namespace: "ns", Service: "web"}, Filter{Namespace: "ns", Service: "we"}},
		{Filter{Pod: "ns/pod-10.0.0.1"}, Filter{Pod: "pod-10.0.0.1"}},
		{Filter{Pod: "ns/pod-10.0.1.1"}, Filter{Pod: "ns/pod-10.96.0.1"}},
		{Filter{Prefix: prefix("10.0.0.1")}, Filter{Prefix: prefix("10.0.0.2")}},
		{Filter{Prefix: prefix("10.0.1.0/24")}, Filter{Prefix: prefix("10.96.0.0/16")}},
		{Filter{Prefix: prefix("::ffff:10.0.0.1")}, Filter{Prefix: prefix("::/0")}},
		{Filter{Port: 80}, Filter{Port: 4000}},
		{Filter{Port: 8080}, Filter{Port: 8081}},
		{Filter{Kinds: []dataplane.FlowEventKind{dataplane.FlowClosed, dataplane.FlowOpened}},
			Filter{Kinds: []dataplane.FlowEventKind{dataplane.FlowClosed}}},
	}
	for i, tt := range tests {
		if !tt.yes.matches(&e) || tt.no.matches(&e) {
			t.Errorf("case %d: %+v matches: %v, %+v: %v", i, tt.yes, tt.yes.matches(&e), tt.no, tt.no.matches(&e))
		}
	}
	if _, err := ParsePrefix("web"); err == nil {
		t.Error("web is an address")
	}
	// An event without an endpoint and without a client.
	unknown := Event{}
	if (&Filter{Prefix: prefix("0.0.0.0/0")}).matches(&unknown) {
		t.Error("an unknown address is in a prefix")
	}
}

// An owner is still named after it is gone, and while there is no answer.
func TestOwners(t *testing.T) {
	pod, asked := Owner{Pod: "ns/a", Node: "n1"}, 0
	var failure error
	o := newOwners(func(_ context.Context, addrs []netip.Addr) ([]Owner, error) {
		asked++
		out := make([]Owner, len(addrs))
		out[0] = pod
		return out, failure
	})
	a := netip.MustParseAddr("10.0.0.1")
	learn := func(want Owner, questions int) {
		t.Helper()
		got := o.of([]netip.Addr{a, {}, a})
		if got[0] != want || got[1] != (Owner{}) || got[2] != want || asked != questions {
			t.Fatalf("%+v after %d questions, want %+v after %d", got, asked, want, questions)
		}
	}
	age := func() {
		for k, v := range o.known {
			v.at = v.at.Add(-ownerFresh - time.Second)
			o.known[k] = v
		}
	}
	first := pod
	learn(first, 1)
	learn(first, 1)
	age()
	pod = Owner{}
	learn(first, 2)
	age()
	pod = Owner{Pod: "ns/b", Node: "n1"}
	learn(pod, 3)
	age()
	failure = errors.New("busy")
	learn(pod, 4)
	learn(pod, 4) // a pause
	if o.of([]netip.Addr{netip.MustParseAddr("10.0.0.2")})[0] != (Owner{}) {
		t.Error("an address that was never asked for has an owner")
	}
}

func TestOwnersAreBounded(t *testing.T) {
	o := newOwners(func(_ context.Context, addrs []netip.Addr) ([]Owner, error) { return make([]Owner, len(addrs)), nil })
	a := netip.MustParseAddr("2001:db8::")
	for range 3 * ownersMax {
		a = a.Next()
		o.of([]netip.Addr{a})
		if len(o.known) > ownersMax {
			t.Fatalf("%d addresses", len(o.known))
		}
	}
}

func TestVisitEndsWithTheEventsInMemory(t *testing.T) {
	l := New(Config{Events: 1000})
	l.addEvents(0, 1500)
	visited := 0
	err := l.Visit(Filter{Service: "web"}, begun.Add(1200*time.Second), func(e *Event) {
		if visited == 0 {
			l.addEvents(1500, 1510) // does not wait for the reader
		}
		if e.Flow.Service != "web" || e.Time.Before(begun.Add(1200*time.Second)) {
			t.Errorf("visited %+v", e)
		}
		visited++
	})
	if err != nil || visited != 150 {
		t.Errorf("visited %d events, want 150: %v", visited, err)
	}
	if len(l.readers) != 0 {
		t.Errorf("%d readers are left", len(l.readers))
	}
	if err := New(Config{}).Visit(Filter{}, begun, func(*Event) { t.Error("an event of an empty log") }); err != nil {
		t.Error(err)
	}
}
