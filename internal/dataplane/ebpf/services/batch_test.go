package services

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

var errRefused = errors.New("refused")

// pickyMap writes entries as the kernel does, refuses some, and reports that in one of
// several ways.
type pickyMap struct {
	objects.Map
	refuses []uint32
	missing []uint32
	reports func(n, of int, err error) (int, error)
	tried   []uint32
}

func (m *pickyMap) Put(key, _ any) error {
	m.tried = append(m.tried, key.(uint32))
	if slices.Contains(m.refuses, key.(uint32)) {
		return errRefused
	}
	return nil
}

func (m *pickyMap) Delete(key any) error {
	if err := m.Put(key, nil); err != nil || !slices.Contains(m.missing, key.(uint32)) {
		return err
	}
	return ebpf.ErrKeyNotExist
}

func (m *pickyMap) BatchUpdate(keys, _ any, _ *ebpf.BatchOptions) (int, error) {
	return m.all(keys.([]uint32), func(key uint32) error { return m.Put(key, nil) })
}

func (m *pickyMap) BatchDelete(keys any, _ *ebpf.BatchOptions) (int, error) {
	return m.all(keys.([]uint32), func(key uint32) error { return m.Delete(key) })
}

func (m *pickyMap) all(keys []uint32, do func(uint32) error) (int, error) {
	if n, err := m.reports(0, len(keys), nil); err != nil {
		return n, err
	}
	for n, key := range keys {
		if err := do(key); err != nil {
			return m.reports(n, len(keys), fmt.Errorf("batch: %w", err))
		}
	}
	return len(keys), nil
}

// TestABatchGoesOnAfterARefusedEntry: the change of the entry fails with its name, and the
// entries of other changes are written, each once.
func TestABatchGoesOnAfterARefusedEntry(t *testing.T) {
	for what, reports := range map[string]func(n, of int, err error) (int, error){
		"as the kernel": func(n, _ int, err error) (int, error) { return n, err },
		"no batches":    func(int, int, error) (int, error) { return 0, ebpf.ErrNotSupported },
	} {
		for _, isDelete := range []bool{false, true} {
			t.Run(fmt.Sprint(what, ", delete ", isDelete), func(t *testing.T) {
				// The first change has entries 0 to 9, the second 10 to 19, and so on.
				m := &pickyMap{reports: reports, refuses: []uint32{0, 15, 16, 39}, missing: []uint32{1, 21, 38}}
				var written []uint32
				b, cs := puts(new(objects.Map), func(_ *change, k uint32, _ string) { written = append(written, k) },
					func(k uint32, v string) (string, any) { return v, k }), make([]change, 4)
				if b.delete = isDelete; isDelete {
					failed := b.failed
					b = deletes(new(objects.Map), b.written)
					b.failed = failed
				}
				*b.m = m
				for i := range uint32(40) {
					b.add(&cs[i/10], i, "entry")
				}
				b.flush()
				want := []uint32{10, 11, 12, 13, 14}
				for i := range uint32(19) {
					want = append(want, 20+i)
				}
				if !slices.Equal(written, want) {
					t.Errorf("written are %v, want %v", written, want)
				}
				for i, want := range []string{"write entry 0: ", "write entry 15: ", "", "write entry 39: "} {
					if err := cs[i].err; (err != nil) != (want != "") || err != nil && (!errors.Is(err, errRefused) || err.Error()[:len(want)] != want) {
						t.Errorf("change %d: error %v, want %q", i, err, want)
					}
				}
				if slices.Contains(m.tried, 16) || slices.Contains(m.tried, 1) {
					t.Errorf("tried are %v: entries of a failed change", m.tried)
				}
				b.add(&cs[2], 20, "entry")
				b.add(&cs[1], 10, "entry")
				if written = nil; len(b.keys) != 1 {
					t.Errorf("%d entries wait, want those that have not failed", len(b.keys))
				}
				if b.flush(); !slices.Equal(written, []uint32{20}) || len(b.keys)+len(b.of) > 0 {
					t.Errorf("written are %v, and %d wait", written, len(b.keys))
				}
			})
		}
	}
}

// TestABatchOfWhichNothingIsKnown: a kernel that could not begin reports all entries as
// written, beside the error.
func TestABatchOfWhichNothingIsKnown(t *testing.T) {
	m := &pickyMap{reports: func(_, of int, _ error) (int, error) { return of, errRefused }}
	var maps objects.Map = m
	b := puts(&maps, func(*change, uint32, string) { t.Error("an entry counts as written") },
		func(uint32, string) (string, any) { return "entry", 0 })
	cs := make(changes, 2)
	for i := range uint32(10) {
		b.add(&cs[i/5], i, "")
	}
	if b.flush(); cs[0].err == nil || cs[1].err == nil {
		t.Errorf("errors %v, %v", cs[0].err, cs[1].err)
	}
}

// TestALargePortIsWrittenInBatches, and is compared apart from others.
func TestALargePortIsWrittenInBatches(t *testing.T) {
	const endpoints = chunkEndpoints + 7
	m := newPortMaps(t, 1<<10, 1<<14)
	table := openPorts(t, m)
	large := objectstest.SimplePort(1, 0)
	for i := range endpoints {
		large.Endpoints = append(large.Endpoints, intent.Endpoint{Addr: objectstest.SimplePort(i%200, i/200+1).Endpoints[i/200].Addr,
			ClusterPolicy: true})
	}
	slices.SortFunc(large.Endpoints, func(a, b intent.Endpoint) int { return a.Addr.Compare(b.Addr) })
	calls := &countedBatches{Map: table.backends}
	table.backends = calls
	some := []*intent.ServicePort{objectstest.SimplePort(0, 2), large, objectstest.SimplePort(2, 2)}
	writeAll(t, table, some)
	wantWritten(t, &Writer{objects: &objects.Objects{Maps: m}, table: table}, some)
	if want := 2 + endpoints/batchEntries + 1; calls.n != want {
		t.Errorf("%d calls wrote %d endpoints, want %d", calls.n, endpoints+4, want)
	}
	read, err := readMaps(m)
	must.Do(t, err)
	steps := 0
	if d, _ := table.compare(read, func(step func()) bool { steps++; step(); return true }); d.Any() {
		t.Errorf("the maps are not what the table has written: %+v", d)
	}
	ofFrontends := endpoints/entriesAtOnce + 1
	if steps < 1+2+ofFrontends+1 {
		t.Errorf("compared in %d steps", steps)
	}
	writeAll(t, table, nil)
	if left := readContents(t, m).size(); left != 0 {
		t.Errorf("%d entries are left", left)
	}
	if w := table.batches; cap(w.backends.keys)+cap(w.noSlots.of)+cap(table.endpoints.dirty) > 0 {
		t.Error("the buffers of a large write stay")
	}
}

// TestASourceRangeIsWrittenOnce, however many addresses of the port share it.
func TestASourceRangeIsWrittenOnce(t *testing.T) {
	table := openPorts(t, newPortMaps(t, 64, 64))
	p := objectstest.SimplePort(1, 1)
	for i := range 3 {
		p.Frontends = append(p.Frontends, intent.Frontend{
			Kind: intent.LoadBalancerIP, Addr: netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), Port: 80,
			SourceRanges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("172.16.0.0/12")},
		})
	}
	calls := &countedBatches{Map: table.ranges}
	table.ranges = calls
	writeAll(t, table, []*intent.ServicePort{p})
	if calls.entries != 2 {
		t.Errorf("%d entries were written, want 2", calls.entries)
	}
}

type countedBatches struct {
	objects.Map
	n, entries int
}

func (m *countedBatches) BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error) {
	m.n, m.entries = m.n+1, m.entries+reflect.ValueOf(keys).Len()
	return m.Map.BatchUpdate(keys, values, opts)
}
