package controlplane

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// watcher runs a source and accumulates its deltas.
type watcher struct {
	source *kube.Source

	mu       sync.Mutex
	changed  chan struct{} // closed and renewed with each delivery
	fulls    int
	early    int // deltas before the first Full one
	deletes  int
	world    model.Delta
	unknown  bool
	problems []model.Problem
}

// watch starts a source with a kubeconfig and ends it with the test.
func watch(t *testing.T, kubeconfig string, change func(*kube.Config)) *watcher {
	t.Helper()
	c, server, err := kube.Connect(kube.Access{Kubeconfig: kubeconfig})
	if err != nil {
		t.Fatal(err)
	}
	cfg := kube.Config{Client: c, Server: server, NodeName: "here", NetworkPolicies: true}
	if change != nil {
		change(&cfg)
	}
	s, err := kube.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w := &watcher{source: s, changed: make(chan struct{})}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.Run(ctx, w.take); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func (w *watcher) take(d model.Delta, problems []model.Problem) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Full {
		w.fulls++
		w.world = model.Delta{}
	}
	if w.fulls == 0 && !d.Empty() {
		w.early++
	}
	w.deletes += merge(&w.world.Services, d.Services) + merge(&w.world.Slices, d.Slices)
	merge(&w.world.Nodes, d.Nodes)
	merge(&w.world.Pods, d.Pods)
	merge(&w.world.NetworkPolicies, d.NetworkPolicies)
	merge(&w.world.Namespaces, d.Namespaces)
	merge(&w.world.DoNotTrackPolicies, d.DoNotTrackPolicies)
	if d.NetworkPoliciesUnknown != nil {
		w.unknown = *d.NetworkPoliciesUnknown
	}
	if problems != nil {
		w.problems = problems
	}
	close(w.changed)
	w.changed = make(chan struct{})
}

func merge[K comparable, V any](dst *map[K]*V, src map[K]*V) (deletes int) {
	if *dst == nil {
		*dst = map[K]*V{}
	}
	maps.Copy(*dst, src)
	for k, v := range src {
		if v == nil {
			delete(*dst, k)
			deletes++
		}
	}
	return deletes
}

// until waits until the accumulated state satisfies a condition.
func (w *watcher) until(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline := time.After(await.Limit)
	for {
		w.mu.Lock()
		ok, changed := holds(), w.changed
		w.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			w.mu.Lock()
			defer w.mu.Unlock()
			t.Fatalf("%s: not after %v; problems: %v", what, await.Limit, w.problems)
		}
	}
}

func (w *watcher) full() bool { return w.fulls > 0 }

// service returns the known state of a Service.
func (w *watcher) service(namespace, name string) *model.Service {
	return w.world.Services[model.Name{Namespace: namespace, Name: name}]
}

// slice returns the known state of an EndpointSlice.
func (w *watcher) slice(namespace, name string) *model.EndpointSlice {
	return w.world.Slices[model.Name{Namespace: namespace, Name: name}]
}

// says reports whether a problem contains a text.
func (w *watcher) says(text string) bool {
	for _, p := range w.problems {
		if strings.Contains(p.String(), text) {
			return true
		}
	}
	return false
}

// line is a wire to the API server that can be cut.
type line struct {
	t      *testing.T
	target string
	l      net.Listener

	mu    sync.Mutex
	cut   bool
	conns map[net.Conn]bool
}

// newLine forwards a port of loopback to the API server.
func newLine(t *testing.T, server string) *line {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &line{t: t, target: strings.TrimPrefix(server, "https://"), l: l, conns: map[net.Conn]bool{}}
	go n.serve()
	t.Cleanup(func() { l.Close(); n.setCut(true) })
	return n
}

func (n *line) server() string { return fmt.Sprintf("https://%s", n.l.Addr()) }

func (n *line) serve() {
	for {
		c, err := n.l.Accept()
		if err != nil {
			return
		}
		go n.forward(c)
	}
}

func (n *line) forward(c net.Conn) {
	defer c.Close()
	up, err := net.Dial("tcp", n.target)
	if err != nil {
		return
	}
	defer up.Close()
	n.mu.Lock()
	if n.cut {
		n.mu.Unlock()
		return
	}
	n.conns[c], n.conns[up] = true, true
	n.mu.Unlock()
	go func() { _, _ = io.Copy(up, c); up.Close() }()
	_, _ = io.Copy(c, up)
	n.mu.Lock()
	delete(n.conns, c)
	delete(n.conns, up)
	n.mu.Unlock()
}

// setCut cuts the line or restores it.
func (n *line) setCut(cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut = cut
	if cut {
		for c := range n.conns {
			c.Close()
		}
		clear(n.conns)
	}
}

// namespace creates a namespace for one test.
func namespace(t *testing.T, k kubernetes.Interface, name string) {
	t.Helper()
	if err := ensureNamespace(t.Context(), k, name); err != nil {
		t.Fatal(err)
	}
}
