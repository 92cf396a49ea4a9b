package reconcile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// fakeEntries writes down what it is told, and what the kernel held then.
type fakeEntries struct {
	kernel func() map[string]uint16
	fail   error
	told   []string
	again  time.Duration // until the next Recheck; once
	at     time.Time
}

func (f *fakeEntries) Apply(_ context.Context, c intent.Changes) error {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(versions(c.Upserts))) {
		v := versions(c.Upserts)[name]
		words = append(words, fmt.Sprintf("%s%d", name, v))
		if f.kernel()[name] != v {
			words = append(words, "too-early")
		}
	}
	for _, id := range c.Deletes {
		words = append(words, "-"+id.Service.Name)
		if _, there := f.kernel()[id.Service.Name]; there {
			words = append(words, "too-early")
		}
	}
	if c.Node != nil {
		words = append(words, "node")
	}
	f.told = append(f.told, strings.Join(words, " "))
	f.at = time.Time{}
	if f.again > 0 {
		f.at, f.again = time.Now().Add(f.again), 0
	}
	return f.fail
}

func (f *fakeEntries) Recheck() time.Time { return f.at }

func (f *fakeEntries) Forget(context.Context, func(model.Protocol, netip.AddrPort, netip.AddrPort) bool,
	func(model.Protocol, netip.AddrPort, netip.AddrPort) bool) (int, bool, error) {
	return 0, false, nil
}

func (f *fakeEntries) Translated(context.Context, func(model.Protocol, netip.AddrPort, netip.AddrPort) bool) error {
	return nil
}

// want compares what was told since the last call.
func (f *fakeEntries) want(t *testing.T, told ...string) {
	t.Helper()
	if !slices.Equal(f.told, told) {
		t.Errorf("told %q, want %q", f.told, told)
	}
	f.told = nil
}

func startWithEntries(t *testing.T, b *fakeBackend) (*harness, *fakeEntries) {
	f := &fakeEntries{kernel: b.holds}
	return start(t, func(c *Config) { c.StaleEntries = f }, b), f
}

func TestStaleEntriesHearOfWhatTheKernelHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("nftables")
		g, f := startWithEntries(t, b)
		g.after(time.Second)
		f.want(t)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1}), nil)
		g.after(time.Second)
		f.want(t, "a1 b1 node")
		g.Deliver(delta(false, map[string]uint16{"a": 2, "b": 0}), nil)
		g.after(time.Second)
		f.want(t, "a2 -b")
		g.after(30 * time.Second) // a full sync names all again
		f.want(t, "a2")
	})
}

func TestStaleEntriesDoNotHearOfWhatCouldNotBeWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("nftables")
		g, f := startWithEntries(t, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1, "b": 1, "c": 1}), nil)
		g.after(time.Second)
		f.want(t, "a1 b1 c1 node")
		b.set(func() { b.fail = func(int) error { return errors.New("no memory") } })
		g.Deliver(delta(false, map[string]uint16{"a": 2, "b": 0}), nil)
		g.after(time.Second)
		if told := strings.Join(f.told, ""); told != "" {
			t.Errorf("told %q though nothing could be written", told)
		}
		f.told = nil
		b.set(func() { b.fail = nil })
		g.after(10 * time.Second)
		f.want(t, "a2 c1 -b")

		b.set(func() {
			b.fail = func(int) error {
				return &dataplane.PortErrors{Errors: map[intent.PortID]error{idOf(svcName("a")): errors.New("full")}}
			}
		})
		g.Deliver(delta(false, map[string]uint16{"a": 3, "c": 2}), nil)
		g.after(100 * time.Millisecond)
		f.want(t, "c2")

		b.set(func() {
			b.fail = func(int) error {
				return &dataplane.PortErrors{Errors: map[intent.PortID]error{idOf(svcName("c")): errors.New("busy")}}
			}
		})
		g.Deliver(delta(false, map[string]uint16{"c": 0}), nil)
		g.after(200 * time.Millisecond)
		if told := strings.Join(f.told, " "); strings.Contains(told, "c") {
			t.Errorf("told %q though c could not be taken away", told)
		}
	})
}

func TestStaleEntriesThatCannotBeDeletedAreAProblemAndTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("nftables")
		g, f := startWithEntries(t, b)
		f.fail = errors.New("not permitted")
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(10 * time.Second)
		ps := g.Status().Problems
		if len(ps) != 1 || ps[0].Where != "conntrack" || !strings.HasPrefix(ps[0].What, "not permitted; ") {
			t.Errorf("problems: %+v", ps)
		}
		if n := len(f.told); n < 3 || n > 12 {
			t.Errorf("tried %d times in 10 s", n)
		}
		if n := len(b.log()); n != 1 {
			t.Errorf("the dataplane was written %d times for it", n)
		}
		if g.Status().LastSynced.IsZero() {
			t.Error("the node counts as not synced for it")
		}
		f.fail = nil
		g.after(16 * time.Second) // the longest wait that began before; the full sync is at 30 s
		if ps := g.Status().Problems; len(ps) != 0 {
			t.Errorf("problems after it went well: %+v", ps)
		}
	})
}

func TestStaleEntriesThatWaitAreCheckedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("nftables")
		g, f := startWithEntries(t, b)
		f.again = time.Second
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(500 * time.Millisecond)
		f.want(t, "a1 node")
		g.after(time.Second)
		f.want(t, "")
		g.after(10 * time.Second)
		f.want(t)
		if n := len(b.log()); n != 1 {
			t.Errorf("the dataplane was written %d times for it", n)
		}
	})
}

func TestAServiceThatComesBackIsNotGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("nftables")
		g, f := startWithEntries(t, b)
		g.Deliver(delta(true, map[string]uint16{"a": 1}), nil)
		g.after(time.Second)
		b.set(func() { b.fail = func(int) error { return errors.New("no memory") } })
		g.Deliver(delta(false, map[string]uint16{"a": 0}), nil)
		g.after(time.Second)
		b.set(func() { b.fail = nil })
		f.told = nil
		g.Deliver(delta(false, map[string]uint16{"a": 2}), nil)
		g.after(10 * time.Second)
		f.want(t, "a2")
	})
}
