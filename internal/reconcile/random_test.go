package reconcile

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// Whatever changes come and whatever fails on the way: when it is quiet again,
// the kernel holds what the source said last.
func TestAfterAnyChangesAndFailuresTheKernelIsRight(t *testing.T) {
	for seed := range uint64(20) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			first, second := newFakeBackend("ebpf"), newFakeBackend("nftables")
			first.cannot = func(p *intent.ServicePort) error {
				if p.Endpoints[0].Addr.Port()%3 == 0 {
					return errors.New("not this version")
				}
				return nil
			}
			failing := true
			fails := rand.New(rand.NewPCG(seed, 2))
			for _, b := range []*fakeBackend{first, second} {
				b.fail = func(int) error {
					switch {
					case !failing || fails.IntN(3) > 0:
						return nil
					case fails.IntN(2) == 0:
						return errors.New("all of it")
					}
					return &dataplane.PortErrors{Errors: map[intent.PortID]error{
						idOf(svcName(fmt.Sprint("s", fails.IntN(10)))): errors.New("just this"),
					}}
				}
				b.delay = time.Duration(rnd.IntN(300)) * time.Millisecond
			}
			g := start(t, func(c *Config) { c.SyncPeriod = time.Hour }, first, second)
			want := map[string]uint16{}
			g.Deliver(delta(true, nil), nil)
			for range 300 {
				name, v := fmt.Sprint("s", rnd.IntN(10)), uint16(rnd.IntN(50))
				want[name] = v
				if v == 0 {
					delete(want, name)
				}
				if rnd.IntN(50) == 0 {
					g.Deliver(delta(true, want), nil)
				} else {
					g.Deliver(delta(false, map[string]uint16{name: v}), nil)
				}
				g.after(time.Duration(rnd.IntN(200)) * time.Millisecond)
			}
			g.after(time.Second)
			first.set(func() { second.set(func() { failing = false }) })
			g.after(2 * time.Minute) // far less than a sync period
			got := first.holds()
			for name, v := range second.holds() {
				if _, twice := got[name]; twice {
					t.Errorf("seed %d: both serve %s", seed, name)
				}
				if v%3 != 0 {
					t.Errorf("seed %d: the second has version %d of %s", seed, v, name)
				}
				got[name] = v
			}
			if !maps.Equal(got, want) {
				t.Errorf("seed %d: the kernel holds %v, want %v", seed, got, want)
			}
			if s := g.Status(); len(s.Problems) != 0 || !s.PendingSince.IsZero() {
				t.Errorf("seed %d: status %+v", seed, s)
			}
		})
	}
}
