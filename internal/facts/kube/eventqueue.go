package kube

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// maxWaiting bounds the queued messages; the log has the rest.
const maxWaiting = 200

// eventQueue holds messages that wait for the limit of Events. Namespaces take turns, so that
// the author of the objects in one cannot delay the Events of another by more than one message.
// While the queue is full, a namespace with the most messages loses its newest one.
type eventQueue struct {
	ready   chan struct{} // holds one token while messages wait
	dropped prometheus.Counter

	mu      sync.Mutex
	waiting map[string][]message // by namespace, "" for cluster-scoped objects
	turns   []string             // the keys of waiting; the next first
	size    int
}

func newEventQueue() *eventQueue {
	return &eventQueue{
		ready: make(chan struct{}, 1), waiting: map[string][]message{},
		dropped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "spillway_events_dropped_total",
			Help: "Kubernetes Events that were not written, because too many of their namespace waited. The log has their problems.",
		}),
	}
}

// push adds a message. It returns the namespace whose newest message was dropped for it, and
// whether one was.
func (q *eventQueue) push(m message) (loser string, full bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	namespace := m.about.Namespace
	if full = q.size == maxWaiting; full {
		q.dropped.Inc()
		loser = namespace
		most := len(q.waiting[namespace]) + 1 // so many would be no fairer
		for other, list := range q.waiting {
			if len(list) > most {
				loser, most = other, len(list)
			}
		}
		if loser == namespace {
			return loser, true
		}
		q.waiting[loser] = q.waiting[loser][:most-1]
		q.size--
	}
	if len(q.waiting[namespace]) == 0 {
		q.turns = append(q.turns, namespace)
	}
	q.waiting[namespace] = append(q.waiting[namespace], m)
	q.size++
	q.wake()
	return loser, full
}

// pop removes the first message of the namespace whose turn it is.
func (q *eventQueue) pop() (m message, any bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.turns) == 0 {
		return m, false
	}
	namespace := q.turns[0]
	q.turns = q.turns[1:]
	list := q.waiting[namespace]
	if m = list[0]; len(list) > 1 {
		q.waiting[namespace] = list[1:]
		q.turns = append(q.turns, namespace)
	} else {
		delete(q.waiting, namespace)
	}
	if q.size--; q.size > 0 {
		q.wake()
	}
	return m, true
}

func (q *eventQueue) wake() {
	select {
	case q.ready <- struct{}{}:
	default:
	}
}
