package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/client-go/kubernetes/fake"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// told is Events with an API server that has only Events.
type told struct {
	*Events
	client *fake.Clientset
}

func newTold() *told {
	client := fake.NewClientset()
	return &told{NewEvents(client, "n1", func(model.Name) string { return "uid" }, slog.New(slog.DiscardHandler)), client}
}

// pass writes what waits, at a time.
func (e *told) pass(t *testing.T, now time.Time) {
	t.Helper()
	for m, any := e.queue.pop(); any; m, any = e.queue.pop() {
		if e.isRepeated(m, now) {
			continue
		}
		if err := e.begin(t.Context(), m, now); err != nil {
			t.Fatal(err)
		}
		now = now.Add(1) // no two writes are at the same time
	}
	for key, s := e.due(now); s != nil; key, s = e.due(now) {
		if err := e.writeCount(t.Context(), key, s, now); err != nil {
			t.Fatal(err)
		}
	}
}

func (e *told) events(t *testing.T) []eventsv1.Event {
	t.Helper()
	list, err := e.client.EventsV1().Events("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return list.Items
}

// A finding that begins again and again is one Event with a count, and few writes.
func TestAFindingIsASeriesOfEvents(t *testing.T) {
	e, start := newTold(), time.Now()
	web := model.Name{Namespace: "shop", Name: "web"}
	for i := range 60 {
		e.EmitFinding(web, "endpoint-refuses", fmt.Sprintf("endpoint %d refuses", i))
		e.pass(t, start.Add(time.Duration(i)*time.Minute))
	}
	writes := len(e.client.Actions())
	list := e.events(t)
	if len(list) != 1 || writes != 6 {
		t.Fatalf("%d Events, %d writes: %v", len(list), writes, list)
	}
	ev := list[0]
	if ev.Reason != "SpillwayEndpointRefuses" || ev.Type != corev1.EventTypeWarning || ev.Regarding.Kind != "Service" ||
		ev.Regarding.UID != "uid" || ev.Note != "endpoint 0 refuses. On node n1, spillway doctor shows evidence and the fix" {
		t.Errorf("Event %+v", ev)
	}
	end := start.Add(59*time.Minute + seriesEnds + 1)
	e.pass(t, end)
	e.pass(t, end)
	if s := e.events(t)[0].Series; s == nil || s.Count != 60 ||
		!s.LastObservedTime.Time.Equal(start.Add(59*time.Minute).Truncate(time.Microsecond)) {
		t.Errorf("series %+v", s)
	}
	if len(e.series) > 0 {
		t.Errorf("an ended series is kept: %+v", e.series)
	}
	e.EmitFinding(web, "endpoint-refuses", "again")
	e.EmitFinding(web, "endpoint-unanswered", "another")
	e.EmitFinding(model.HostPortsOf(web), "endpoint-refuses", "a Pod's")
	e.pass(t, end)
	if list := e.events(t); len(list) != 4 {
		t.Errorf("%d Events: %v", len(list), list)
	}
}

// An Event that the API server has forgotten is written anew at the next beginning.
func TestASeriesOfAForgottenEventBeginsAgain(t *testing.T) {
	e, start := newTold(), time.Now()
	web := model.Name{Namespace: "shop", Name: "web"}
	emit := func() (m message) {
		e.EmitFinding(web, "x", "y")
		m, _ = e.queue.pop()
		return m
	}
	if err := e.begin(t.Context(), emit(), start); err != nil {
		t.Fatal(err)
	}
	if err := e.client.EventsV1().Events("shop").Delete(t.Context(), e.events(t)[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, at := range []time.Duration{seriesPause / 2, seriesPause} {
		if !e.isRepeated(emit(), start.Add(at)) {
			t.Fatalf("a repetition after %v is none", at)
		}
	}
	key, due := e.due(start.Add(seriesPause))
	if due == nil || e.writeCount(t.Context(), key, due, start.Add(seriesPause)) == nil {
		t.Fatalf("no count was due, or the Event is there: %v", due)
	}
	if e.isRepeated(emit(), start.Add(seriesPause)) {
		t.Error("a repetition is counted in an Event that is not there")
	}
}

// Tenants make Services and findings: the memory has a bound, and so has the number of writes.
func TestManySeriesHaveABound(t *testing.T) {
	e := newTold()
	for i := range mostSeries - 1 {
		e.series[seriesKey{reason: fmt.Sprint(i)}] = &series{last: time.Now()}
	}
	for i := range 3 {
		e.EmitFinding(model.Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}, "x", "y")
	}
	e.pass(t, time.Now())
	if list := e.events(t); len(e.series) != mostSeries || len(list) != 3 {
		t.Errorf("%d series, %d Events", len(e.series), len(list))
	}
	// Run writes with its limit: twenty at once, and then one in 5 s.
	other := newTold()
	for i := range maxWaiting {
		other.EmitFinding(model.Name{Namespace: "shop", Name: fmt.Sprint("web-", i)}, "x", "y")
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- other.Run(ctx) }()
	other.EmitNode("the last") // of another namespace: the queue is fair
	await.True(t, "ten Events", func() bool { return len(other.client.Actions()) >= 10 })
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := len(other.client.Actions()); n > 30 {
		t.Errorf("%d writes", n)
	}
}

func TestEventsOfLongNames(t *testing.T) {
	e := newTold()
	for _, name := range []string{"a", strings.Repeat("a", 253), strings.Repeat("a", 199) + "-b", strings.Repeat("a", 198) + ".-b"} {
		e.EmitFinding(model.HostPortsOf(model.Name{Namespace: "shop", Name: name}), "x", "y")
	}
	e.pass(t, time.Now())
	for _, ev := range e.events(t) {
		if errs := validation.IsDNS1123Subdomain(ev.Name); len(errs) > 0 {
			t.Errorf("%q: %v", ev.Name, errs)
		}
	}
}
