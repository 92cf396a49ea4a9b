package kube

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"spillway.dev/spillway/internal/facts/model"
)

// newTestEvents returns Events that nothing writes, and their log.
func newTestEvents() (*Events, *strings.Builder) {
	var log strings.Builder
	return NewEvents(nil, "a", func(model.Name) string { return "" }, slog.New(slog.NewTextHandler(&log, nil))), &log
}

func flapping(namespace string, n int) (out []model.Problem) {
	for i := range n {
		out = append(out, model.ServiceProblem(model.Name{Namespace: namespace, Name: fmt.Sprint("s", i)}, "", "flaps"))
	}
	return out
}

// TestEventsOfOneNamespaceDoNotDelayOthers has a tenant whose Services have more problems than
// the queue holds, before and after the one problem of another.
func TestEventsOfOneNamespaceDoNotDelayOthers(t *testing.T) {
	e, log := newTestEvents()
	e.Emit(flapping("evil", 10*maxWaiting))
	e.Emit(flapping("honest", 2))
	e.EmitNode("tuned")
	e.Emit(flapping("evil", 10*maxWaiting))
	var first []string
	waiting := 0
	for m, any := e.queue.pop(); any; m, any = e.queue.pop() {
		if waiting++; len(first) < 5 {
			first = append(first, m.about.Namespace)
		}
	}
	if want := []string{"evil", "honest", "", "evil", "honest"}; !slices.Equal(first, want) {
		t.Errorf("the first Events are of %q, want %q", first, want)
	}
	if waiting != maxWaiting {
		t.Errorf("%d messages waited, want %d", waiting, maxWaiting)
	}
	if got, want := testutil.ToFloat64(e.queue.dropped), float64(20*maxWaiting+3-maxWaiting); got != want {
		t.Errorf("%v are counted as dropped, want %v", got, want)
	}
	if n := strings.Count(log.String(), "Events are dropped"); n != 1 || !strings.Contains(log.String(), "namespace=evil") {
		t.Errorf("the log has it %d times:\n%s", n, log)
	}
}

// TestEventsOfManyNamespaces has more namespaces than the queue has room.
func TestEventsOfManyNamespaces(t *testing.T) {
	e, _ := newTestEvents()
	for range 2 {
		for i := range 2 * maxWaiting {
			e.Emit(flapping(fmt.Sprint("n", i), 1))
		}
	}
	waiting := map[string]int{}
	for m, any := e.queue.pop(); any; m, any = e.queue.pop() {
		waiting[m.about.Namespace]++
	}
	if len(waiting) != maxWaiting {
		t.Errorf("messages of %d namespaces wait, want %d", len(waiting), maxWaiting)
	}
}

// TestTheEventQueueIsFair pushes and pops at random. Whatever others do, a namespace that has no
// more messages than its share loses none, and its messages stay in order.
func TestTheEventQueueIsFair(t *testing.T) {
	namespaces := []string{"", "a", "b", "c", "d"}
	share := maxWaiting / len(namespaces)
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		q := newEventQueue()
		modest := map[string][]string{} // what must come out, of those that keep to their share
		sent, dropped, popped := 0, 0, 0
		pop := func() bool {
			m, any := q.pop()
			if !any {
				return false
			}
			popped++
			if list := modest[m.about.Namespace]; m.about.Namespace < "c" {
				if len(list) == 0 || list[0] != m.note {
					t.Fatalf("seed %d: %q of %q comes out, want the first of %q", seed, m.note, m.about.Namespace, list)
				}
				modest[m.about.Namespace] = list[1:]
			}
			return true
		}
		for i := range 5000 {
			namespace := namespaces[r.IntN(len(namespaces))]
			switch {
			case r.IntN(4) == 0:
				pop()
				continue
			case namespace < "c" && len(modest[namespace]) >= share:
				continue
			case namespace < "c":
				modest[namespace] = append(modest[namespace], fmt.Sprint(i))
			}
			m := message{note: fmt.Sprint(i)}
			m.about.Namespace = namespace
			sent++
			if _, full := q.push(m); full {
				dropped++
			}
			if q.size > maxWaiting {
				t.Fatalf("seed %d: %d messages wait", seed, q.size)
			}
		}
		for pop() {
		}
		for namespace, list := range modest {
			if len(list) > 0 {
				t.Errorf("seed %d: %q of %q are lost", seed, list, namespace)
			}
		}
		if sent != popped+dropped || len(q.waiting)+len(q.turns)+q.size > 0 {
			t.Errorf("seed %d: %d sent, %d written, %d dropped; left: %+v", seed, sent, popped, dropped, q)
		}
	}
}
