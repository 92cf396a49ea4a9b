package scale

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/reconcile"
)

const (
	services = 10_000
	rate     = 200 // changes a second
	during   = 400 // changes that arrive while the first full sync is written
	after    = 400 // changes that arrive after it
	burst    = 50_000
	streamed = services - 10 // Services that the stream changes
	// burstMemory bounds what a burst may leave in memory, in bytes. A queue of
	// the burst's deltas would be three times as large.
	burstMemory = 12 << 20
	// serviceMemory bounds what one Service may take in all of the process, in
	// bytes: facts, decision, and what a dataplane remembers of it.
	serviceMemory = 16 << 10
)

func TestEveryChangeArrivesInEBPF(t *testing.T)     { changesDuringAFullSync(t, openEBPF(t, 8*services)) }
func TestEveryChangeArrivesInNftables(t *testing.T) { changesDuringAFullSync(t, openNftables(t)) }
func TestEveryChangeArrivesInIptablesLegacy(t *testing.T) {
	changesDuringAFullSync(t, openIptables(t, "legacy"))
}
func TestEveryChangeArrivesInIptablesNFT(t *testing.T) {
	changesDuringAFullSync(t, openIptables(t, "nft"))
}

// kernel is a dataplane in a fresh network namespace, and a way to read what
// it serves that does not ask the dataplane's memory.
type kernel struct {
	reader
	endpoints func(*testing.T) []string // "ADDR:PORT" of all that are served, sorted
}

// changesDuringAFullSync runs the loop on the test's own thread, which is in the
// namespace, while another goroutine plays the source.
func changesDuringAFullSync(t *testing.T, k *kernel) {
	slow := &slowBackend{Backend: k.reader, writing: make(chan struct{}), written: make(chan struct{}), goOn: make(chan struct{})}
	r, err := reconcile.New(reconcile.Config{
		Tracker: decisions.New(intent.Config{NodeName: "node-0"}, donottrack.Config{NodeName: "node-0"}), Backends: []dataplane.Backend{slow},
		SyncPeriod: time.Hour, MinSyncPeriod: time.Millisecond, Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	before := heap()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	w := newWorld()
	played := make(chan error, 1)
	go func() {
		defer cancel()
		played <- play(ctx, r, w, slow)
	}()
	if err := r.Run(ctx); err != nil {
		t.Fatal(err)
	}
	if err := <-played; err != nil {
		t.Fatal(err)
	}
	if ps := r.Status().Problems; len(ps) > 0 {
		t.Errorf("problems: %v", ps)
	}
	if slow.grown > burstMemory {
		t.Errorf("%d changes that wait take %d KiB, more than %d", burst, slow.grown>>10, burstMemory>>10)
	}
	if grown := heap() - before; grown > services*serviceMemory {
		t.Errorf("%d Services and their changes take %d KiB, more than %d", services, grown>>10, services*serviceMemory>>10)
	}
	// All that arrived during the first write makes one.
	if slow.writes > after+2 {
		t.Errorf("%d writes for %d changes", slow.writes, during+after)
	}
	t.Logf("%d writes for %d changes; a burst of %d left %d KiB", slow.writes, during+after, burst, slow.grown>>10)
	w.compare(t, k)
	runtime.KeepAlive(r)
}

// play is the source: all Services at once, then single changes.
func play(ctx context.Context, r *reconcile.Reconciler, w *world, slow *slowBackend) error {
	r.Deliver(w.all(), nil)
	r.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
	select {
	case <-slow.writing:
	case <-ctx.Done():
		return errors.New("no full sync began")
	}
	w.stream(r, during)
	select {
	case <-slow.written: // it takes no more memory that would be counted as the burst's
	case <-ctx.Done():
		return errors.New("the full sync does not end")
	}
	// Ten Services that flap for minutes, in no time at all.
	before := heap()
	for i := range burst {
		r.Deliver(w.change(i%10, false), nil)
	}
	for i := streamed; i < services; i++ { // created, then deleted, and never seen again
		r.Deliver(w.change(i, false), nil)
		r.Deliver(w.change(i, true), nil)
	}
	slow.grown = heap() - before
	close(slow.goOn)
	w.stream(r, after)
	for !r.Status().PendingSince.IsZero() {
		select {
		case <-ctx.Done():
			return errors.New("changes are still waiting: " + time.Since(r.Status().PendingSince).String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// stream delivers changes at the rate, half of them of a few Services that
// change again and again.
func (w *world) stream(r *reconcile.Reconciler, changes int) {
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	for i := range changes {
		<-tick.C
		among := streamed
		if i%2 == 0 {
			among = 20
		}
		r.Deliver(w.change(w.random.IntN(among), i%7 == 0), nil)
	}
}

// slowBackend is a dataplane whose first write does not end before goOn is
// closed, and which counts.
type slowBackend struct {
	dataplane.Backend
	writing, written, goOn chan struct{}
	writes                 int
	grown                  int64 // bytes
}

func (s *slowBackend) Replace(ctx context.Context, state intent.State) error {
	if s.writes++; s.writes == 1 {
		close(s.writing)
		defer func() { close(s.written); <-s.goOn }()
	}
	return s.Backend.Replace(ctx, state)
}

func (s *slowBackend) Apply(ctx context.Context, c intent.Changes) error {
	s.writes++
	return s.Backend.Apply(ctx, c)
}

// heap is what is in use, in bytes.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// compare holds what the kernel serves against the world.
func (w *world) compare(t *testing.T, k *kernel) {
	t.Helper()
	var want []string
	for i := range services {
		if w.version[i] != deleted {
			for _, e := range w.endpoints(i) {
				want = append(want, e.String())
			}
		}
	}
	slices.Sort(want)
	got := k.endpoints(t)
	if missing, extra := without(want, got), without(got, want); len(missing)+len(extra) > 0 {
		t.Errorf("of %d endpoints %d are missing (%q), %d are too many (%q)", len(want), len(missing), first(missing), len(extra), first(extra))
	}
	s, err := k.Applied(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if here := w.count(); len(s.Ports) != here {
		t.Errorf("%d Service ports are applied, want %d", len(s.Ports), here)
	}
}

func first(list []string) []string { return list[:min(5, len(list))] }

// without is what is in a and not in b.
func without(a, b []string) []string {
	in := map[string]bool{}
	for _, s := range b {
		in[s] = true
	}
	left := map[string]bool{}
	for _, s := range a {
		if !in[s] {
			left[s] = true
		}
	}
	return slices.Sorted(maps.Keys(left))
}
