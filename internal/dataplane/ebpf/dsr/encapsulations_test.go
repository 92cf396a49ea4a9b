package dsr

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsrprobe"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// network says what arrives at an endpoint's node.
type network map[netip.Addr]dsrprobe.Result

var probeKeys = []objects.DSRKey{{1, 2, 3}}

var noRoute = dsrprobe.Result{MTU: -1}

func newTestEncapsulations(t *testing.T, n network) *Encapsulations {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 20, ValueSize: 4, MaxEntries: objects.MaxDSRPaths, Flags: 1})
	must.Do(t, err)
	t.Cleanup(func() { m.Close() })
	c, err := New(m, &objects.Config{DSRKeys: probeKeys, DSRPort: objects.DefaultDSRPort, Log: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	c.probe = func(_ context.Context, a netip.Addr) (dsrprobe.Result, error) {
		if n[a] == noRoute {
			return dsrprobe.Result{}, errors.New("no route")
		}
		return n[a], nil
	}
	return c
}

// encapsulationClock is a clock that the test moves.
type encapsulationClock struct{ time.Time }

func (c *encapsulationClock) now() time.Time { return c.Time }

func (c *encapsulationClock) round(t *testing.T, of *Encapsulations, after time.Duration, endpoints ...netip.Addr) {
	t.Helper()
	c.Time = c.Add(after)
	of.round(t.Context(), endpoints, c.now)
	of.running.Wait()
}

func encapsulationOf(t *testing.T, c *Encapsulations, a netip.Addr) string {
	t.Helper()
	for _, d := range c.List() {
		if d.Endpoint == a {
			return d.Encapsulation
		}
	}
	t.Fatalf("%s is not among %v", a, c.List())
	return ""
}

// TestEncapsulationsFollowTheNetwork: options at once, datagrams at once, and nothing only after three
// probes in a row.
func TestEncapsulationsFollowTheNetwork(t *testing.T) {
	for _, a := range []netip.Addr{netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("fd00::1")} {
		least := leastCarried(a.Is4())
		n := network{a: {Option: true}}
		c, clock := newTestEncapsulations(t, n), &encapsulationClock{time.Now()}
		steps := []struct {
			what  string
			after time.Duration
			r     dsrprobe.Result
			want  string
		}{
			{"the first probe", 0, dsrprobe.Result{Option: true}, dataplane.EncapsulationOption},
			{"not due yet", probeInterval - time.Second, dsrprobe.Result{}, dataplane.EncapsulationOption},
			{"no answer", time.Second, dsrprobe.Result{}, dataplane.EncapsulationOption},
			{"no second answer", retryInterval, dsrprobe.Result{}, dataplane.EncapsulationOption},
			{"no third answer", retryInterval, dsrprobe.Result{}, dataplane.EncapsulationNone},
			{"datagrams", probeInterval, dsrprobe.Result{MTU: least}, dataplane.EncapsulationGUE},
			{"datagrams that are too short", probeInterval, dsrprobe.Result{MTU: least - 1}, dataplane.EncapsulationGUE},
			{"still", retryInterval, dsrprobe.Result{MTU: least - 1}, dataplane.EncapsulationGUE},
			{"and again", retryInterval, dsrprobe.Result{MTU: least - 1}, dataplane.EncapsulationNone},
			{"options", probeInterval, dsrprobe.Result{Option: true}, dataplane.EncapsulationOption},
			{"only datagrams", probeInterval, dsrprobe.Result{MTU: least}, dataplane.EncapsulationOption},
			{"options again", retryInterval, dsrprobe.Result{Option: true}, dataplane.EncapsulationOption},
			{"only datagrams once more", probeInterval, dsrprobe.Result{MTU: least}, dataplane.EncapsulationOption},
			{"and in a row", retryInterval, dsrprobe.Result{MTU: least}, dataplane.EncapsulationGUE},
			{"options at last", probeInterval, dsrprobe.Result{Option: true}, dataplane.EncapsulationOption},
			{"no route here", probeInterval, noRoute, dataplane.EncapsulationOption},
			{"still", probeInterval, noRoute, dataplane.EncapsulationOption},
			{"and again", probeInterval, noRoute, dataplane.EncapsulationOption},
		}
		for _, step := range steps {
			n[a] = step.r
			clock.round(t, c, step.after, a)
			if got := encapsulationOf(t, c, a); got != step.want {
				t.Errorf("%s, %s: %s, want %s", a, step.what, got, step.want)
			}
		}
	}
}

// TestEncapsulationsOutliveTheAgent: the maps keep what was found out, until endpoints are gone for long.
func TestEncapsulationsOutliveTheAgent(t *testing.T) {
	a, b := netip.MustParseAddr("10.1.1.1"), netip.MustParseAddr("10.1.1.2")
	n := network{a: {MTU: 1400}, b: {Option: true}}
	c, clock := newTestEncapsulations(t, n), &encapsulationClock{time.Now()}
	clock.round(t, c, 0, a, b)
	again, err := New(c.m.(*ebpf.Map), &objects.Config{DSRKeys: probeKeys, DSRPort: objects.DefaultDSRPort,
		Log: slog.New(slog.DiscardHandler)})
	must.Do(t, err)
	again.probe = c.probe
	n[a] = noRoute // the first probe of the new agent fails
	clock.round(t, again, 0, a, b)
	if got := again.List(); len(got) != 2 || got[0].Encapsulation != dataplane.EncapsulationGUE || got[0].MTU != 1400 ||
		got[1].Encapsulation != dataplane.EncapsulationOption {
		t.Errorf("a new agent knows %+v", got)
	}
	clock.round(t, again, encapsulationKept, b)
	if got := again.List(); len(got) != 1 || got[0].Endpoint != b {
		t.Errorf("the Service has %+v", got)
	}
	var v objects.TCDsrEncapsulation
	must.Do(t, again.m.(*ebpf.Map).Lookup(objects.AddrKey(a), &v))
	clock.round(t, again, time.Second, b)
	if err := again.m.(*ebpf.Map).Lookup(objects.AddrKey(a), &v); !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("%s is gone, and its entry is not: %v", a, err)
	}
}

// TestEncapsulationsWithoutPort: an agent without a port leaves nothing behind.
func TestEncapsulationsWithoutPort(t *testing.T) {
	a := netip.MustParseAddr("10.1.1.1")
	c, clock := newTestEncapsulations(t, network{a: {MTU: 1400}}), &encapsulationClock{time.Now()}
	clock.round(t, c, 0, a)
	none, err := New(c.m.(*ebpf.Map), &objects.Config{DSRKeys: probeKeys})
	must.Do(t, err)
	var v objects.TCDsrEncapsulation
	if err := c.m.(*ebpf.Map).Lookup(objects.AddrKey(a), &v); none != nil || !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Errorf("%v, and the entry: %v", none, err)
	}
}

// TestSilentEndpointsDelayNone: as many as are probed at once never answer, but the first one.
func TestSilentEndpointsDelayNone(t *testing.T) {
	c, clock := newTestEncapsulations(t, nil), &encapsulationClock{time.Now()}
	fast := netip.MustParseAddr("10.9.9.9")
	release := make(chan struct{})
	c.probe = func(_ context.Context, a netip.Addr) (dsrprobe.Result, error) {
		if a != fast {
			<-release
		}
		return dsrprobe.Result{Option: true}, nil
	}
	all := []netip.Addr{fast}
	for i := range probesAtOnce - 1 {
		all = append(all, netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}))
	}
	probes := func() int { // of the fast one
		c.mu.Lock()
		defer c.mu.Unlock()
		return probesAtOnce - 1 - c.probing
	}
	for range 3 {
		c.round(t.Context(), all, clock.now)
		await.True(t, "the end of the fast endpoint's probe", func() bool { return probes() == 0 })
		if got := encapsulationOf(t, c, fast); got != dataplane.EncapsulationOption {
			t.Fatalf("the fast endpoint has %s", got)
		}
		clock.Time = clock.Add(probeInterval)
	}
	close(release)
	c.running.Wait()
}

// TestProbesAreBounded: each round sends so many, and all endpoints have their turn.
func TestProbesAreBounded(t *testing.T) {
	n := network{}
	var all []netip.Addr
	for i := range 3 * probesAtOnce {
		a := netip.AddrFrom4([4]byte{10, 2, byte(i / 256), byte(i)})
		n[a] = dsrprobe.Result{Option: true}
		all = append(all, a)
	}
	c, clock := newTestEncapsulations(t, n), &encapsulationClock{time.Now()}
	for round := range 3 {
		clock.round(t, c, retryInterval, all...)
		known := slices.DeleteFunc(c.List(), func(d dataplane.DSREncapsulation) bool { return d.Encapsulation == dataplane.EncapsulationUnknown })
		if want := (round + 1) * probesAtOnce; len(known) != want {
			t.Errorf("round %d: %d endpoints are known, want %d", round, len(known), want)
		}
	}
}
