package services

import (
	"maps"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/test/must"
)

// Maps of several batches are read whole, each entry once, as one by one.
func TestBatchesGiveEveryEntryOnce(t *testing.T) {
	m := newPortMaps(t, 1<<13, 1<<14)
	ports := objectstest.ManyPorts(2*objects.ReadBatch+objects.ReadBatch/2, 3)
	writeAll(t, openPorts(t, m), ports)
	sameBothWays[uint32, objects.TCService](t, m[objects.TCMapServices], len(ports))
	sameBothWays[uint32, objects.TCBackend](t, m[objects.TCMapBackends], 3*len(ports))
	sameBothWays[objects.TCSlotKey, uint32](t, m[objects.TCMapSlots], 3*len(ports))
	sameBothWays[objects.TCFrontendKey, objects.TCFrontend](t, m[objects.TCMapFrontends], 4*len(ports)) // with the endpoints' own
	sameBothWays[objects.TCRangeKey, uint8](t, m[objects.TCMapSourceRanges], 0)
}

func sameBothWays[K, V comparable](t *testing.T, m *ebpf.Map, want int) {
	t.Helper()
	batches, single, calls := map[K]V{}, map[K]V{}, 0
	must.Do(t, objects.Each(m, func(k K, v V) { batches[k], calls = v, calls+1 }))
	var key K
	var value V
	it := m.Iterate()
	for it.Next(&key, &value) {
		single[key] = value
	}
	must.Do(t, it.Err())
	if calls != want || !maps.Equal(batches, single) {
		t.Errorf("%s: %d entries in %d calls by batches, %d one by one, want %d", m, len(batches), calls, len(single), want)
	}
}

// BenchmarkCheck reads 5,000 Services of 10 endpoints back and compares them.
func BenchmarkCheck(b *testing.B) {
	m := newPortMaps(b, objects.DefaultMaxFrontends, objects.DefaultMaxEndpoints)
	back := &Writer{objects: &objects.Objects{Maps: m}, table: openPorts(b, m)}
	writeAll(b, back.table, objectstest.ManyPorts(5000, 10))
	b.Run("read beside changes", func(b *testing.B) {
		for b.Loop() {
			if _, err := readMaps(m); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Applied", func(b *testing.B) {
		for b.Loop() {
			if _, err := back.Applied(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("compared, in steps of which a change waits for one", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			read, err := readMaps(m)
			must.Do(b, err)
			b.StartTimer()
			if d, _ := back.table.compare(read, inOneStep); d.Any() {
				b.Fatal(d)
			}
		}
	})
}
