package reconcile

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// watchingBackend hears of changes, and repairs with each Replace.
type watchingBackend struct {
	*fakeBackend
	drifted  chan struct{}
	repaired dataplane.Repair
}

func (w *watchingBackend) Drifted() <-chan struct{} { return w.drifted }

func (w *watchingBackend) Repaired() (r dataplane.Repair) {
	w.set(func() { r, w.repaired = w.repaired, dataplane.Repair{} })
	return r
}

func (w *watchingBackend) Replace(ctx context.Context, s intent.State) error {
	w.mu.Lock()
	for _, p := range s.Ports {
		if _, there := w.kernel[p.ID.Service.Name]; !there && len(w.calls) > 0 {
			w.repaired.Note(1, 0, p.ID.Service.Name)
		}
	}
	want := versions(s.Ports)
	for name := range w.kernel {
		if _, wanted := want[name]; !wanted {
			w.repaired.Note(0, 1, name)
		}
	}
	w.mu.Unlock()
	return w.fakeBackend.Replace(ctx, s)
}

func (w *watchingBackend) flush() {
	w.set(func() { clear(w.kernel) })
	select {
	case w.drifted <- struct{}{}:
	default:
	}
}

func startWatching(t *testing.T) (*watchingBackend, *harness) {
	b := &watchingBackend{fakeBackend: newFakeBackend("nftables"), drifted: make(chan struct{}, 1)}
	return b, start(t, func(c *Config) { c.SyncPeriod, c.Backends = time.Hour, []dataplane.Backend{b} })
}

func TestWhatSomebodyFlushedIsRestoredAtOnceAndToldOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, g := startWatching(t)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		b.flush()
		g.after(200 * time.Millisecond)
		g.wantKernel(b.fakeBackend, map[string]uint16{"a": 1, "b": 1})
		wantOneWarning(t, g, `restored" dataplane=nftables missing=2 foreign=0 found=a`)
	})
}

func TestWhatABackendFindsInPassingIsToldOnceInItsWords(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &watchingBackend{fakeBackend: newFakeBackend("iptables")} // hears of nothing
		g := start(t, func(c *Config) { c.Backends = []dataplane.Backend{b} })
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		b.set(func() { b.repaired.Note(1, 1, "table nat: chain A emptied") })
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(time.Second)
		wantOneWarning(t, g, `restored" dataplane=iptables missing=1 foreign=1 found="table nat: chain A emptied"`)
		g.after(60 * time.Second)
		wantOneWarning(t, g, "restored")
		if n := g.metric("spillway_audit_differences_total dataplane=iptables"); n != 2 {
			t.Errorf("%v differences are counted", n)
		}
	})
}

func wantOneWarning(t *testing.T, g *harness, words string) {
	t.Helper()
	if n := strings.Count(g.log.String(), "level=WARN"); n != 1 || !strings.Contains(g.log.String(), words) {
		t.Errorf("%d lines of the log warn:\n%s", n, g.log)
	}
}

func TestAFlushDuringASyncIsRestoredAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, g := startWatching(t)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		b.set(func() { b.delay = time.Second })
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		time.Sleep(500 * time.Millisecond)
		b.flush()
		g.after(5 * time.Second)
		g.wantKernel(b.fakeBackend, map[string]uint16{"a": 2, "b": 1})
	})
}

func TestWhoFlushesAllTheTimeIsAnsweredNowAndThen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, g := startWatching(t)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		before := len(b.log())
		for range 1000 {
			b.flush()
			time.Sleep(10 * time.Millisecond)
		}
		if n := len(b.log()) - before; n < 5 || n > 15 {
			t.Errorf("%d syncs in 10 s", n)
		}
		g.after(2 * time.Second)
		g.wantKernel(b.fakeBackend, map[string]uint16{"a": 1})
	})
}

func TestASlowRepairDoesNotPutOffTheNextForLong(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, g := startWatching(t)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		b.set(func() { b.delay = 2 * time.Second })
		b.flush()
		g.after(3 * time.Second)
		b.set(func() { b.delay = 0 })
		b.flush()
		g.after(3 * time.Second)
		g.wantKernel(b.fakeBackend, map[string]uint16{"a": 1})
	})
}
