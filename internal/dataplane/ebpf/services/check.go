package services

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// After every Replace the maps are compared with the entries written. Reading 5,000
// Services of 10 endpoints takes 0.1 s of CPU time and more, so it runs beside other
// writes:
//
//	Replace ──> read all maps ──────────────> compare ──> Drifted ──> Replace, which
//	Apply   ──────> noted ─> noted ──────> noted ─┘                   reads and repairs
//
// An entry that is written during the reading may be in it or not. The next comparison
// checks it.

// reading is the content of the maps of Services.
type reading struct {
	services  map[uint32]objects.TCService
	frontends map[objects.TCFrontendKey]objects.TCFrontend
	backends  map[uint32]objects.TCBackend
	slots     map[objects.TCSlotKey]uint32
	ranges    map[objects.TCRangeKey]uint8
}

func readMaps(m map[string]*ebpf.Map) (*reading, error) {
	r := &reading{
		services: map[uint32]objects.TCService{}, frontends: map[objects.TCFrontendKey]objects.TCFrontend{},
		backends: map[uint32]objects.TCBackend{},
		slots:    map[objects.TCSlotKey]uint32{}, ranges: map[objects.TCRangeKey]uint8{},
	}
	if err := objects.Each(m[objects.TCMapServices], func(k uint32, v objects.TCService) { r.services[k] = v }); err != nil {
		return nil, err
	}
	if err := objects.Each(m[objects.TCMapFrontends], func(k objects.TCFrontendKey, v objects.TCFrontend) { r.frontends[k] = v }); err != nil {
		return nil, err
	}
	if err := objects.Each(m[objects.TCMapBackends], func(k uint32, v objects.TCBackend) { r.backends[k] = v }); err != nil {
		return nil, err
	}
	if err := objects.Each(m[objects.TCMapSlots], func(k objects.TCSlotKey, v uint32) { r.slots[k] = v }); err != nil {
		return nil, err
	}
	return r, objects.Each(m[objects.TCMapSourceRanges], func(k objects.TCRangeKey, v uint8) {
		if !objects.IsClusterRange(k) {
			r.ranges[k] = v
		}
	})
}

// journal lists the entries written since the start of a reading.
type journal struct {
	mu   sync.Mutex
	keys map[note]struct{} // nil: no reading is in progress
}

type note struct {
	m   string
	key any
}

func (n *journal) begin() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keys = map[note]struct{}{}
}

func (n *journal) end() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.keys = nil
}

func (n *journal) has(m string, key any) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.keys[note{m, key}]
	return ok
}

func (n *journal) add(m string, key any) { addAll(n, m, []any{key}) }

func addAll[K any](n *journal, m string, keys []K) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.keys == nil {
		return
	}
	for _, key := range keys {
		n.keys[note{m, key}] = struct{}{}
	}
}

// notedMap adds each write to the journal.
type notedMap[K any] struct {
	objects.Map
	name  string
	notes *journal
}

func (m notedMap[K]) Put(key, value any) error {
	m.notes.add(m.name, key)
	return m.Map.Put(key, value)
}

func (m notedMap[K]) Delete(key any) error {
	m.notes.add(m.name, key)
	return m.Map.Delete(key)
}

func (m notedMap[K]) BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error) {
	addAll(m.notes, m.name, keys.([]K))
	return m.Map.BatchUpdate(keys, values, opts)
}

func (m notedMap[K]) BatchDelete(keys any, opts *ebpf.BatchOptions) (int, error) {
	addAll(m.notes, m.name, keys.([]K))
	return m.Map.BatchDelete(keys, opts)
}

// Check reads the maps and compares them. Other writes continue meanwhile.
func (w *Writer) Check() error {
	w.mu.Lock()
	table, known := w.table, w.known
	if known {
		table.notes.begin()
	}
	w.mu.Unlock()
	if !known {
		return nil // the next Replace reads the maps
	}
	defer table.notes.end()
	read, err := readMaps(w.objects.Maps)
	if err != nil {
		return err
	}
	found, done := table.compare(read, func(step func()) bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.table == table { // else Replace has read the maps since
			step()
		}
		return w.table == table
	})
	if !done || !found.Any() {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.drift, w.known = found, false // the next Replace reads the maps and repairs them
	select {
	case w.drifted <- struct{}{}:
	default:
	}
	return nil
}

// Run compares the maps on request, until ctx is done.
func (w *Writer) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.checks:
		}
		if err := w.Check(); err != nil {
			w.log.Warn("Compare eBPF maps with what was written", "err", err)
		}
	}
}

// RequestCheck requests a check and does not wait for it.
func (w *Writer) RequestCheck() {
	select {
	case w.checks <- struct{}{}:
	default: // already requested
	}
}

// Repaired returns and resets the number of map entries that Replace has repaired.
func (w *Writer) Repaired() dataplane.Repair {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := w.repaired
	w.repaired = dataplane.Repair{}
	return r
}

// comparison removes the expected entries from a reading, and records the differences.
type comparison struct {
	table *portTable
	read  *reading
	found dataplane.Repair
}

// entriesAtOnce and chunkEndpoints limit the work under the lock to some milliseconds.
const entriesAtOnce = 1024

// compare compares a reading, which it consumes, with the entries that t has written.
// It passes each step to hold, which runs it without concurrent writes, or returns
// false to stop.
func (t *portTable) compare(r *reading, hold func(func()) bool) (found dataplane.Repair, done bool) {
	c := &comparison{table: t, read: r}
	var parts [][]*port
	if !hold(func() {
		ports := slices.AppendSeq(slices.Collect(maps.Values(t.byID)), maps.Values(t.unmatched))
		parts = slices.Collect(chunks(ports, (*port).size))
	}) {
		return found, false
	}
	for _, some := range parts {
		if !hold(func() {
			for _, p := range some {
				c.port(p)
			}
		}) {
			return found, false
		}
	}
	// Only the endpoints' own addresses may remain.
	for some := range slices.Chunk(slices.Collect(maps.Keys(r.frontends)), entriesAtOnce) {
		if !hold(func() {
			for _, key := range some {
				_, outOfSync := t.endpoints.outOfSync[key]
				if v, ok := t.endpointEntry(key); outOfSync || ok && r.frontends[key] == v {
					delete(r.frontends, key)
				}
			}
		}) {
			return found, false
		}
	}
	done = hold(func() {
		foreign(c, objects.TCMapServices, r.services)
		foreign(c, objects.TCMapFrontends, r.frontends)
		foreign(c, objects.TCMapBackends, r.backends)
		foreign(c, objects.TCMapSlots, r.slots)
		foreign(c, objects.TCMapSourceRanges, r.ranges)
	})
	return c.found, done
}

// port checks the entries of one Service port.
func (c *comparison) port(p *port) {
	have := p.current()
	if have.written {
		expect(c, objects.TCMapServices, c.read.services, p.service, have.header)
	}
	for key, v := range have.frontends {
		if c.table.owners[key] == p.service { // else another port has taken it over
			expect(c, objects.TCMapFrontends, c.read.frontends, key, v)
		}
	}
	for _, e := range have.backends {
		expect(c, objects.TCMapBackends, c.read.backends, e.id, e.value)
		// Several Services may share it, so it stays in the reading.
		key := endpointKey(p.protocol, e.addr)
		_, outOfSync := c.table.endpoints.outOfSync[key]
		if want, ok := c.table.endpointEntry(key); ok && !outOfSync {
			got, there := c.read.frontends[key]
			c.judge(objects.TCMapFrontends, key, there, got == want)
		}
	}
	for set, ids := range p.slots {
		for i, id := range ids {
			if id != 0 { // a hole that an earlier run has left
				expect(c, objects.TCMapSlots, c.read.slots, slotKey(p.service, set, i), id)
			}
		}
	}
	for key := range have.ranges {
		expect(c, objects.TCMapSourceRanges, c.read.ranges, key, 1)
	}
}

func expect[K, V comparable](c *comparison, m string, have map[K]V, key K, want V) {
	got, ok := have[key]
	delete(have, key)
	c.judge(m, key, ok, got == want)
}

func (c *comparison) judge(m string, key any, there, right bool) {
	switch {
	case there && right, c.table.notes.has(m, key):
	case there:
		c.found.Note(1, 0, fmt.Sprintf("eBPF map %s: entry %v was changed", m, key))
	default:
		c.found.Note(1, 0, fmt.Sprintf("eBPF map %s: entry %v is gone", m, key))
	}
}

func foreign[K, V comparable](c *comparison, m string, left map[K]V) {
	for key := range left {
		if !c.table.notes.has(m, key) {
			c.found.Note(0, 1, fmt.Sprintf("eBPF map %s: entry %v belongs to no object", m, key))
		}
	}
}
