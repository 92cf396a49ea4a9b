package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// A long random walk through states of intent: after every step the maps hold
// what is wanted, at every single write they are fit for use, and at the end
// they are as if written at once.
func TestPortsFollowIntent(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			m := newPortMaps(t, 1<<10, 1<<10)
			w := newPortWorld(seed)
			b := &Writer{objects: &objects.Objects{Maps: m}}
			watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
			b.table = watch.open()
			writeAll(t, b.table, w.state())
			for range 80 {
				before := w.state()
				c := w.step()
				watch.between(before, w.state())
				switch w.rng.IntN(10) {
				case 0:
					b.table = watch.open() // a new run
					fallthrough
				case 1:
					failed, err := b.table.replace(t.Context(), w.state())
					must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
				default:
					must.Do(t, apply(t.Context(), b, c))
				}
				watch.wantCounted()
				wantWritten(t, b, w.state())
				wantAgreement(t, b.table, m)
				if t.Failed() {
					t.FailNow()
				}
			}
			fresh := newPortMaps(t, 1<<10, 1<<10)
			writeFresh(t, fresh, w.state())
			wantSameContents(t, m, fresh)
			t.Logf("%d writes looked at", watch.writes)
		})
	}
}

// A run that is killed before any of its writes leaves maps fit for use, and the
// next run makes them right. Endpoints that stay keep their ids.
func TestPortsAfterCrashAtEveryWrite(t *testing.T) {
	m, fresh := newPortMaps(t, 1<<10, 1<<10), newPortMaps(t, 1<<10, 1<<10)
	watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
	w := newPortWorld(7)
	crashes := 0
	for range 16 {
		before := w.state()
		c := w.step()
		after := w.state()
		writeFresh(t, fresh, after)
		for at := 1; ; at++ {
			watch.between(nil, nil)
			table := watch.open()
			writeAll(t, table, before)
			ids := objectstest.EndpointIDs(t, m, before)

			watch.between(before, after)
			watch.failFrom = watch.writes + at
			failed, err := table.update(t.Context(), c.Upserts, c.Deletes, false)
			watch.failFrom = 0
			if err == nil && len(failed) == 0 {
				break // it had nothing left to write
			}
			crashes++
			writeAll(t, watch.open(), after)
			wantSameContents(t, m, fresh)
			wantIDsKept(t, ids, objectstest.EndpointIDs(t, m, after))
			if t.Failed() {
				t.Fatalf("killed before write %d", at)
			}
		}
	}
	t.Logf("%d crashes, %d writes", crashes, watch.writes)
	if crashes < 100 {
		t.Errorf("only %d crashes: the steps change too little", crashes)
	}
}

// A single write that fails leaves the maps fit for use, and writing the same
// changes again ends where it should.
func TestPortsAfterFailureOfAnyWrite(t *testing.T) {
	for _, seed := range []uint64{11, 12, 26, 29, 31} {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { failAnyWrite(t, seed) })
	}
}

func failAnyWrite(t *testing.T, seed uint64) {
	m, fresh := newPortMaps(t, 1<<7, 1<<7), newPortMaps(t, 1<<7, 1<<7)
	watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
	w := newPortWorld(seed)
	for range 12 {
		before := w.state()
		c := w.step()
		writeFresh(t, fresh, w.state())
		for at := 1; ; at++ {
			table := watch.open()
			watch.between(nil, nil)
			writeAll(t, table, before)
			watch.between(before, w.state())
			watch.failOnce = watch.writes + at
			_, err := table.update(t.Context(), c.Upserts, c.Deletes, false)
			done := watch.writes < watch.failOnce
			watch.failOnce = 0
			must.Do(t, err)
			failed, err := table.update(t.Context(), c.Upserts, c.Deletes, false)
			must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
			wantSameContents(t, m, fresh)
			if t.Failed() {
				t.Fatalf("write %d failed", at)
			}
			if done {
				break
			}
		}
	}
}

// Ids go on where the last run stopped, even if nothing is left of it.
func TestIDsAreNeverUsedTwice(t *testing.T) {
	m := newPortMaps(t, 64, 64)
	p := objectstest.SimplePort(1, 3)
	last := uint32(0)
	for range 3 {
		table := openPorts(t, m)
		for range 2 {
			writeAll(t, table, []*intent.ServicePort{p})
			for _, id := range objectstest.EndpointIDs(t, m, []*intent.ServicePort{p}) {
				if id <= last {
					t.Errorf("id %d was given before (%d)", id, last)
				}
			}
			last = table.last[backendID]
			writeAll(t, table, nil)
		}
	}
	if used := last / idBlock; used > 3 {
		t.Errorf("three runs used up %d blocks of ids", used)
	}
}

// An address changes hands within one Changes, whichever way round the two
// Services are named, and is served at every moment (the watch sees to it).
func TestAddressMovesBetweenServices(t *testing.T) {
	for name, names := range map[string][2]int{"to a later name": {1, 2}, "to an earlier name": {2, 1}} {
		for _, how := range []string{"the previousLayout keeps another", "the previousLayout is deleted"} {
			t.Run(name+", "+how, func(t *testing.T) {
				m, fresh := newPortMaps(t, 64, 64), newPortMaps(t, 64, 64)
				watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
				from, to := objectstest.SimplePort(names[0], 2), objectstest.SimplePort(names[1], 3)
				without := *from
				moving := intent.Frontend{Kind: intent.ExternalIP, Addr: netip.MustParseAddr("192.0.2.1"), Port: 80, ExternalRoute: intent.ToCluster,
					InternalRoute: intent.ToCluster}
				with := *to
				from.Frontends = append(slices.Clone(from.Frontends), moving)
				with.Frontends = append(slices.Clone(to.Frontends), moving)
				table := watch.open()
				writeAll(t, table, []*intent.ServicePort{from, to})

				c := intent.Changes{Upserts: []*intent.ServicePort{&with}, Deletes: []intent.PortID{from.ID}}
				after := []*intent.ServicePort{&with}
				if how == "the previousLayout keeps another" {
					after = []*intent.ServicePort{&without, &with}
					slices.SortFunc(after, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
					c = intent.Changes{Upserts: after}
				}
				watch.between([]*intent.ServicePort{from, to}, after)
				failed, err := table.update(t.Context(), c.Upserts, c.Deletes, false)
				must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
				writeFresh(t, fresh, after)
				wantSameContents(t, m, fresh)
			})
		}
	}
}

func TestFrontendsFull(t *testing.T) {
	m, fresh := newPortMaps(t, 4, 64), newPortMaps(t, 64, 64)
	b := &Writer{objects: &objects.Objects{Maps: m}}
	b.table = (&mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}).open()
	var all []*intent.ServicePort
	for i := range 6 {
		all = append(all, objectstest.SimplePort(i, 2))
	}
	wantPortErrors(t, apply(t.Context(), b, intent.Changes{Upserts: all}), all[4:])
	writeFresh(t, fresh, all[:4])
	wantSameContents(t, m, fresh)

	// One goes, and one of two that wait fits. Both are asked for again.
	err := apply(t.Context(), b, intent.Changes{Upserts: all[4:], Deletes: []intent.PortID{all[0].ID}})
	wantPortErrors(t, err, all[5:])
	// A full sync with what fits is content.
	failed, err := b.table.replace(t.Context(), all[2:])
	must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
	wantWritten(t, b, all[2:])
	writeFresh(t, fresh, all[2:])
	wantSameContents(t, m, fresh)
}

func TestEndpointsFull(t *testing.T) {
	m, fresh := newPortMaps(t, 64, 10), newPortMaps(t, 64, 64)
	watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
	b := &Writer{objects: &objects.Objects{Maps: m}, table: watch.open()}
	large, larger, small := objectstest.SimplePort(1, 6), objectstest.SimplePort(2, 8), objectstest.SimplePort(3, 4)
	all := []*intent.ServicePort{large, larger, small}
	// The one that does not fit must not sit on the room of the next.
	wantPortErrors(t, apply(t.Context(), b, intent.Changes{Upserts: all}), all[1:2])
	writeFresh(t, fresh, []*intent.ServicePort{large, small})
	wantSameContents(t, m, fresh)

	// One that grows beyond the room serves on with what it had.
	grown := *small
	grown.Endpoints = objectstest.SimplePort(3, 9).Endpoints
	watch.between([]*intent.ServicePort{large, small}, []*intent.ServicePort{large, &grown})
	wantPortErrors(t, apply(t.Context(), b, intent.Changes{Upserts: []*intent.ServicePort{&grown}}), []*intent.ServicePort{&grown})
	wantSameContents(t, m, fresh)

	// The room of what is deleted in the same breath can be had.
	watch.between(nil, nil)
	must.Do(t, apply(t.Context(), b, intent.Changes{
		Upserts: []*intent.ServicePort{larger}, Deletes: []intent.PortID{large.ID, small.ID},
	}))
	writeFresh(t, fresh, all[1:2])
	wantSameContents(t, m, fresh)
}

// With hardly any room anything may fail, but nothing breaks or leaks, and what
// is not reported is served.
func TestPortsWithTooLittleRoom(t *testing.T) {
	failures := 0
	for seed := range uint64(6) {
		m := newPortMaps(t, 12, 14)
		watch := &mapWatch{t: t, maps: m, given: map[uint32]endpointName{}}
		w := newPortWorld(seed + 100)
		table := watch.open()
		if seed%2 == 1 {
			table = openPorts(t, m) // batches as the kernel writes them
		}
		waiting := map[intent.PortID]bool{}
		for i := range 40 {
			c := w.step()
			if i == 0 {
				c = intent.Changes{Upserts: w.state()}
			}
			for _, p := range w.state() {
				if waiting[p.ID] && !slices.ContainsFunc(c.Upserts, func(o *intent.ServicePort) bool { return o.ID == p.ID }) {
					c.Upserts = append(c.Upserts, p)
				}
			}
			failed, err := table.update(t.Context(), c.Upserts, c.Deletes, false)
			must.Do(t, err)
			clear(waiting)
			for id, err := range failed {
				if waiting[id] = true; !errors.Is(err, objects.ErrFull) {
					t.Fatal(err)
				}
			}
			failures += len(failed)
			wantAgreement(t, table, m)
			b := &Writer{objects: &objects.Objects{Maps: m}, table: table}
			have, err := b.Applied()
			must.Do(t, err)
			for _, p := range w.state() {
				i := slices.IndexFunc(have, func(o *intent.ServicePort) bool { return o.ID == p.ID })
				if !waiting[p.ID] && (i < 0 || objectstest.PortText(have[i]) != objectstest.PortText(p)) {
					t.Fatalf("%s was not reported and is not served as wanted", p.ID)
				}
			}
		}
		writeAll(t, table, nil)
		if left := readContents(t, m).size(); left != 0 {
			t.Errorf("%d entries are left", left)
		}
	}
	if failures == 0 {
		t.Error("everything fitted")
	}
}

// The first Apply needs no Replace before it.
func TestApplyFirst(t *testing.T) {
	m := newPortMaps(t, 64, 64)
	p := objectstest.SimplePort(1, 2)
	writeAll(t, openPorts(t, m), []*intent.ServicePort{p})
	ids := objectstest.EndpointIDs(t, m, []*intent.ServicePort{p})

	b := &Writer{objects: &objects.Objects{Maps: m}, table: &portTable{}}
	again := *p
	must.Do(t, apply(t.Context(), b, intent.Changes{Upserts: []*intent.ServicePort{&again}}))
	wantIDsKept(t, ids, objectstest.EndpointIDs(t, m, []*intent.ServicePort{p}))
	wantWritten(t, b, []*intent.ServicePort{p})
}

func TestArrange(t *testing.T) {
	for _, c := range []struct{ have, want, next []uint32 }{
		{nil, []uint32{1, 2}, []uint32{1, 2}},
		{[]uint32{1, 2, 3}, []uint32{1, 3}, []uint32{1, 3}},
		{[]uint32{1, 2, 3}, []uint32{2, 3, 4}, []uint32{4, 2, 3}},
		{[]uint32{1, 3, 3}, []uint32{1, 3}, []uint32{1, 3}}, // killed while it was rearranged
		{[]uint32{1, 0, 3}, []uint32{1, 3, 5}, []uint32{1, 5, 3}},
		{[]uint32{1, 2}, nil, []uint32{}},
		{[]uint32{1, 2}, []uint32{1, 2, 2, 2}, []uint32{1, 2, 2, 2}},
		{[]uint32{1, 2, 2, 2}, []uint32{1, 1, 2}, []uint32{1, 2, 1}},
		{[]uint32{2, 2, 1}, []uint32{1, 2, 2, 3, 3}, []uint32{2, 2, 1, 3, 3}},
		{[]uint32{3, 3, 1}, []uint32{1, 2}, []uint32{1, 2}},
	} {
		if got := arrange(c.have, c.want); !slices.Equal(got, c.next) {
			t.Errorf("arrange(%v, %v) = %v, want %v", c.have, c.want, got, c.next)
		}
	}
}

// BenchmarkApplyEndpointFlip makes one endpoint of one Service go and come back.
func BenchmarkApplyEndpointFlip(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprintf("%d Services", n), func(b *testing.B) {
			m := newPortMaps(b, objects.DefaultMaxFrontends, objects.DefaultMaxEndpoints)
			back := &Writer{objects: &objects.Objects{Maps: m}, table: openPorts(b, m)}
			with, without := objectstest.ManyPorts(n, 10), objectstest.ManyPorts(n, 9)
			must.Do(b, apply(b.Context(), back, intent.Changes{Upserts: with}))
			times := make([]time.Duration, 0, b.N)
			i := 0
			for b.Loop() {
				p := without[i/2%n]
				if i%2 == 1 {
					p = with[i/2%n]
				}
				i++
				start := time.Now()
				must.Do(b, apply(b.Context(), back, intent.Changes{Upserts: []*intent.ServicePort{p}}))
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
			b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
		})
	}
}

// BenchmarkReplaceCold writes a whole cluster into empty maps.
func BenchmarkReplaceCold(b *testing.B) {
	ports := objectstest.ManyPorts(5000, 10)
	for b.Loop() {
		b.StopTimer()
		m := newPortMaps(b, objects.DefaultMaxFrontends, objects.DefaultMaxEndpoints)
		table := openPorts(b, m)
		b.StartTimer()
		writeAll(b, table, ports)
	}
}

// newPortMaps makes the maps of Services alone, for one test.
func newPortMaps(tb testing.TB, frontends, endpoints uint32) map[string]*ebpf.Map {
	tb.Helper()
	if os.Geteuid() != 0 {
		tb.Skip("needs root: makes eBPF maps")
	}
	all, err := objects.Specs(&objects.Config{FlowTableSize: 1, MaxFrontends: frontends, MaxEndpoints: endpoints}, kernel.Features{})
	must.Do(tb, err)
	tc := all[0]
	m := map[string]*ebpf.Map{}
	for _, name := range append([]string{objects.IDsMap, objects.TCMapServiceChanges}, objects.PortMaps...) {
		spec := tc.Maps[name]
		if name == objects.IDsMap {
			spec = objects.IDsSpec()
		}
		spec.Pinning = ebpf.PinNone
		m[name], err = ebpf.NewMap(spec)
		must.Do(tb, err)
		tb.Cleanup(func() { m[name].Close() })
	}
	return m
}

func openPorts(tb testing.TB, m map[string]*ebpf.Map) *portTable {
	tb.Helper()
	table, err := readPorts(m, nil)
	must.Do(tb, err)
	return table
}

func writeAll(tb testing.TB, table *portTable, ports []*intent.ServicePort) {
	tb.Helper()
	failed, err := table.replace(tb.Context(), ports)
	must.Do(tb, errors.Join(err, dataplane.PortErrorsOf(failed)))
}

// writeFresh empties the maps and writes this state at once.
func writeFresh(tb testing.TB, m map[string]*ebpf.Map, ports []*intent.ServicePort) {
	tb.Helper()
	writeAll(tb, openPorts(tb, m), nil)
	writeAll(tb, openPorts(tb, m), ports)
}

func deleteAny(t *testing.T, m *ebpf.Map) {
	t.Helper()
	key := make([]byte, m.KeySize())
	must.Do(t, m.NextKey(nil, &key))
	must.Do(t, m.Delete(key))
}

func wantPortErrors(t *testing.T, err error, ports []*intent.ServicePort) {
	t.Helper()
	var pe *dataplane.PortErrors
	if !errors.As(err, &pe) {
		t.Fatalf("error %v, want PortErrors", err)
	}
	for _, p := range ports {
		if !errors.Is(pe.Errors[p.ID], objects.ErrFull) {
			t.Errorf("%s: error %v, want a map without room", p.ID, pe.Errors[p.ID])
		}
	}
	if len(pe.Errors) != len(ports) {
		t.Errorf("%d ports failed, want %d: %v", len(pe.Errors), len(ports), pe.Errors)
	}
}

// apply writes these changes. An error is one of single ports.
func apply(ctx context.Context, w *Writer, c intent.Changes) error {
	failed, err := w.Update(ctx, c.Upserts, c.Deletes)
	return errors.Join(err, dataplane.PortErrorsOf(failed))
}

func wantWritten(t *testing.T, w *Writer, want []*intent.ServicePort) {
	t.Helper()
	have, err := w.Applied()
	must.Do(t, err)
	objectstest.WantPorts(t, have, want)
}
