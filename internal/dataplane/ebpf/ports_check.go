package ebpf

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
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
	services  map[uint32]tcService
	frontends map[tcFrontendKey]tcFrontend
	backends  map[uint32]tcBackend
	slots     map[tcSlotKey]uint32
	ranges    map[tcRangeKey]uint8
}

func readMaps(m map[string]*ebpf.Map) (*reading, error) {
	r := &reading{
		services: map[uint32]tcService{}, frontends: map[tcFrontendKey]tcFrontend{}, backends: map[uint32]tcBackend{},
		slots: map[tcSlotKey]uint32{}, ranges: map[tcRangeKey]uint8{},
	}
	if err := each(m[tcMapServices], func(k uint32, v tcService) { r.services[k] = v }); err != nil {
		return nil, err
	}
	if err := each(m[tcMapFrontends], func(k tcFrontendKey, v tcFrontend) { r.frontends[k] = v }); err != nil {
		return nil, err
	}
	if err := each(m[tcMapBackends], func(k uint32, v tcBackend) { r.backends[k] = v }); err != nil {
		return nil, err
	}
	if err := each(m[tcMapSlots], func(k tcSlotKey, v uint32) { r.slots[k] = v }); err != nil {
		return nil, err
	}
	return r, each(m[tcMapSourceRanges], func(k tcRangeKey, v uint8) {
		if !isClusterRange(k) {
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
	kernelMap
	name  string
	notes *journal
}

func (m notedMap[K]) Put(key, value any) error {
	m.notes.add(m.name, key)
	return m.kernelMap.Put(key, value)
}

func (m notedMap[K]) Delete(key any) error {
	m.notes.add(m.name, key)
	return m.kernelMap.Delete(key)
}

func (m notedMap[K]) BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error) {
	addAll(m.notes, m.name, keys.([]K))
	return m.kernelMap.BatchUpdate(keys, values, opts)
}

func (m notedMap[K]) BatchDelete(keys any, opts *ebpf.BatchOptions) (int, error) {
	addAll(m.notes, m.name, keys.([]K))
	return m.kernelMap.BatchDelete(keys, opts)
}

// check reads the maps and compares them. Other writes continue meanwhile.
func (b *Backend) check() error {
	b.portsMu.Lock()
	table, known := b.ports, b.known
	if known {
		table.notes.begin()
	}
	b.portsMu.Unlock()
	if !known {
		return nil // the next Replace reads the maps
	}
	defer table.notes.end()
	read, err := readMaps(b.objects.maps)
	if err != nil {
		return err
	}
	found, done := table.compare(read, func(step func()) bool {
		b.portsMu.Lock()
		defer b.portsMu.Unlock()
		if b.ports == table { // else Replace has read the maps since
			step()
		}
		return b.ports == table
	})
	if !done || !found.Any() {
		return nil
	}
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	b.doubt, b.known = found, false // the next Replace reads the maps and repairs them
	select {
	case b.drifted <- struct{}{}:
	default:
	}
	return nil
}

// checkLoop runs check on request.
func (b *Backend) checkLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-b.checks:
		}
		if err := b.check(); err != nil {
			b.cfg.Log.Warn("Compare eBPF maps with what was written", "err", err)
		}
	}
}

// askCheck requests a check and does not wait for it.
func (b *Backend) askCheck() {
	select {
	case b.checks <- struct{}{}:
	default: // already requested
	}
}

// Drifted returns a channel that receives when the maps differ from what was written.
func (b *Backend) Drifted() <-chan struct{} { return b.drifted }

// Repaired returns and resets the number of map entries that Replace has repaired.
func (b *Backend) Repaired() dataplane.Repair {
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	r := b.repaired
	b.repaired = dataplane.Repair{}
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
		ports := slices.AppendSeq(slices.Collect(maps.Values(t.byID)), maps.Values(t.orphans))
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
				_, odd := t.endpoints.odd[key]
				if v, ok := t.endpointEntry(key); odd || ok && r.frontends[key] == v {
					delete(r.frontends, key)
				}
			}
		}) {
			return found, false
		}
	}
	done = hold(func() {
		foreign(c, tcMapServices, r.services)
		foreign(c, tcMapFrontends, r.frontends)
		foreign(c, tcMapBackends, r.backends)
		foreign(c, tcMapSlots, r.slots)
		foreign(c, tcMapSourceRanges, r.ranges)
	})
	return c.found, done
}

// port checks the entries of one Service port.
func (c *comparison) port(p *port) {
	have := p.current()
	if have.written {
		expect(c, tcMapServices, c.read.services, p.service, have.header)
	}
	for key, v := range have.frontends {
		if c.table.owners[key] == p.service { // else another port has taken it over
			expect(c, tcMapFrontends, c.read.frontends, key, v)
		}
	}
	for _, e := range have.backends {
		expect(c, tcMapBackends, c.read.backends, e.id, e.value)
		// Several Services may share it, so it stays in the reading.
		key := endpointKey(p.protocol, e.addr)
		_, odd := c.table.endpoints.odd[key]
		if want, ok := c.table.endpointEntry(key); ok && !odd {
			got, there := c.read.frontends[key]
			c.judge(tcMapFrontends, key, there, got == want)
		}
	}
	for set, ids := range p.slots {
		for i, id := range ids {
			if id != 0 { // a hole that an earlier run has left
				expect(c, tcMapSlots, c.read.slots, slotKey(p.service, set, i), id)
			}
		}
	}
	for key := range have.ranges {
		expect(c, tcMapSourceRanges, c.read.ranges, key, 1)
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
