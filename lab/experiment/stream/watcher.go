package stream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// watcher records when changes of probes arrive by a watch like a proxy's. Earlier time
// belongs to the API server, later time to the proxy.
type watcher struct {
	events watch.Interface
	done   chan struct{}

	mu   sync.Mutex
	came map[string]time.Time     // by version of the object
	want map[string]chan struct{} // closed when that version arrives
}

// watchProbes starts to watch the slices of the probes.
func (b *bench) watchProbes(ctx context.Context) (*watcher, error) {
	slices := b.client.DiscoveryV1().EndpointSlices(probeNamespace)
	now, err := slices.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return nil, fmt.Errorf("list EndpointSlices: %w", err)
	}
	events, err := slices.Watch(ctx, metav1.ListOptions{ResourceVersion: now.ResourceVersion})
	if err != nil {
		return nil, fmt.Errorf("watch EndpointSlices: %w", err)
	}
	w := &watcher{events: events, done: make(chan struct{}), came: map[string]time.Time{}, want: map[string]chan struct{}{}}
	go w.follow()
	return w, nil
}

func (w *watcher) follow() {
	defer close(w.done)
	for e := range w.events.ResultChan() {
		now := time.Now()
		s, ok := e.Object.(*discoveryv1.EndpointSlice)
		if !ok {
			return // an error of the server's: the watch is over
		}
		w.mu.Lock()
		w.came[s.ResourceVersion] = now
		if c := w.want[s.ResourceVersion]; c != nil {
			close(c)
			delete(w.want, s.ResourceVersion)
		}
		w.mu.Unlock()
	}
}

var errWatch = errors.New("the watch of the probes has ended too soon")

// at waits until a version of an object has arrived, and returns the time.
func (w *watcher) at(ctx context.Context, version string) (time.Time, error) {
	w.mu.Lock()
	at, ok := w.came[version]
	c := w.want[version]
	if !ok && c == nil {
		c = make(chan struct{})
		w.want[version] = c
	}
	w.mu.Unlock()
	if ok {
		return at, nil
	}
	select {
	case <-c:
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.came[version], nil
	case <-w.done:
		return at, errWatch
	case <-ctx.Done():
		return at, ctx.Err()
	}
}

// stop ends the watch. It is an error if that has ended by itself: then moments
// are missing.
func (w *watcher) stop() error {
	select {
	case <-w.done:
		return errWatch
	default:
	}
	w.events.Stop()
	<-w.done
	return nil
}
