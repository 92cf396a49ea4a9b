package objects

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync"

	"github.com/cilium/ebpf"
)

// PortFilter is the only writer of the map port_filter; see
// bpf/lib/lookup/port_filter.h. Members are added before their entry in another map, so
// that no program misses it. They are removed all together: a word may have the bits of
// other members.
//
//	tidy 1: keep what has an entry, a flow or a socket now
//	tidy 2, at the next sweep: keep what either pass has found
//
// A program that has found an entry just before it was deleted may store its flow after
// the first pass has read that place. The second pass finds this flow.
type PortFilter struct {
	mu    sync.Mutex
	words *ebpf.Memory
	Mask  uint32
	Seed  uint32 // hash_seed of bpf/config.h
	// ungrouped says that the words are those of version 2 of the maps' layout.
	ungrouped bool
	gone      int // members deleted since the last tidy
	// next has the words of a tidy in progress, and last those of its first pass.
	next, last []uint64
}

// filterKeysPerWord is the number of members for each word if all maps are full: then 3 %
// of all other addresses with ports pass the test.
const filterKeysPerWord = 8

// filterWords returns the number of words of port_filter, a power of two.
func (c *Config) filterWords() uint32 {
	return 1 << bits.Len32(max((c.MaxFrontends+c.MaxEndpoints)/filterKeysPerWord, 2)-1)
}

// OpenFilter fills the filter from all maps that an earlier run has written. The earlier
// run may have been an older version, which did not write the filter.
func OpenFilter(o *Objects) (*PortFilter, error) {
	m := o.Maps[TCMapPortFilter]
	words, err := m.Memory()
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", m, err)
	}
	f := &PortFilter{words: words, Mask: m.MaxEntries() - 1, Seed: o.Seed}
	return f, f.Fill(o.Maps)
}

// Fill adds all members, and the ports of flows of egress to their map.
func (f *PortFilter) Fill(m map[string]*ebpf.Map) error {
	ports, err := openEgressPorts(m)
	if err != nil {
		return err
	}
	err = EachFlow(context.Background(), m[TCMapFlows], func(k *TCTuple, v *TCFlow, _ uint32) error {
		if v.Service != ServiceEgress {
			f.Add(FlowMember(k, v))
			return nil
		}
		return ports.mark(v)
	})
	if err != nil {
		return err
	}
	return eachMember(m, f.Add)
}

// eachMember calls add for every member that has an entry or a socket.
func eachMember(m map[string]*ebpf.Map, add func(TCFrontendKey)) error {
	if err := Each(m[TCMapFrontends], func(k TCFrontendKey, _ TCFrontend) { add(k) }); err != nil {
		return err
	}
	if err := Each(m[TCMapUntrackedPorts], func(k TCFrontendKey, _ TCUntrackedPort) { add(k) }); err != nil {
		return err
	}
	return Each(m[TCMapSockets], func(k TCSocketKey, _ TCSocketPeer) {
		add(TCFrontendKey{Addr: k.Addr, Port: k.Port, Proto: k.Proto})
	})
}

// Add adds a member. A NodePort has the zero address. A nil filter has no members.
func (f *PortFilter) Add(key TCFrontendKey) {
	if f == nil {
		return
	}
	index, set := f.Place(&key)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next != nil {
		f.next[index] |= set
	}
	if have := f.word(index); have&set != set {
		f.setWord(index, have|set)
	}
}

// Keep makes the tidy in progress keep a member.
func (f *PortFilter) Keep(key TCFrontendKey) {
	index, set := f.Place(&key)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next[index] |= set
}

// BeginTidy starts a pass if enough members were deleted, or the last pass was the first.
func (f *PortFilter) BeginTidy() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	words := f.Mask + 1
	if f.last == nil && f.gone < int(words/4) {
		return false
	}
	f.next = make([]uint64, words)
	if f.last == nil {
		f.gone = 0
	}
	return true
}

// EndTidy ends a pass, after keep has been called for every flow. The second pass removes
// all members that none of both has kept. After an error both are repeated.
func (f *PortFilter) EndTidy(m map[string]*ebpf.Map, err error) error {
	if err == nil {
		err = eachMember(m, f.Keep)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	next, last := f.next, f.last
	f.next, f.last = nil, nil
	switch {
	case err != nil:
		f.gone += len(next)
	case last == nil:
		f.last = next
	default:
		for i, w := range next {
			if keep := w | last[i]; f.word(uint32(i)) != keep {
				f.setWord(uint32(i), keep)
			}
		}
	}
	return err
}

// Before returns the map with a writer that adds each key first. A nil filter returns m.
func (f *PortFilter) Before(m Map) Map {
	if f == nil {
		return m
	}
	return memberMap{m, f}
}

type memberMap struct {
	Map
	filter *PortFilter
}

func (m memberMap) Put(key, value any) error {
	m.filter.Add(key.(TCFrontendKey))
	return m.Map.Put(key, value)
}

func (m memberMap) BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error) {
	for _, key := range keys.([]TCFrontendKey) {
		m.filter.Add(key)
	}
	return m.Map.BatchUpdate(keys, values, opts)
}

func (m memberMap) Delete(key any) error {
	m.filter.forget(1)
	return m.Map.Delete(key)
}

func (m memberMap) BatchDelete(keys any, opts *ebpf.BatchOptions) (int, error) {
	m.filter.forget(len(keys.([]TCFrontendKey)))
	return m.Map.BatchDelete(keys, opts)
}

// forget counts deleted members.
func (f *PortFilter) forget(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone += n
}

// Words in the group of an address: FILTER_GROUP and FILTER_GROUP_NODEPORTS of
// bpf/lib/lookup/port_filter.h.
const (
	filterGroup          = 64
	filterGroupNodePorts = 4096
)

// Place returns the word and the bits of a member, as filter_has of
// bpf/lib/lookup/port_filter.h.
func (f *PortFilter) Place(key *TCFrontendKey) (index uint32, set uint64) {
	addr := filterAddr(f.Seed, &key.Addr)
	group := uint64(filterGroup)
	if key.Addr == (TCAddr{}) {
		group = filterGroupNodePorts
	}
	h := filterPort(addr, key)
	if f.ungrouped {
		return uint32(h>>32) & f.Mask, filterBits(h)
	}
	return uint32(addr&^(group-1)|h>>32&(group-1)) & f.Mask, filterBits(h)
}

// FilterPlace is place, for a filter of so many words.
func FilterPlace(seed, words uint32, key *TCFrontendKey) (index uint32, set uint64) {
	f := PortFilter{Mask: words - 1, Seed: seed}
	return f.Place(key)
}

// Layout2 returns a writer of the same words for version 2 of the maps' layout.
func (f *PortFilter) Layout2() *PortFilter {
	return &PortFilter{words: f.words, Mask: f.Mask, Seed: f.Seed, ungrouped: true}
}

// Has reports whether the filter may have a member.
func (f *PortFilter) Has(key TCFrontendKey) bool {
	index, set := f.Place(&key)
	return f.word(index)&set == set
}

func filterAddr(seed uint32, a *TCAddr) uint64 {
	return filterMix(filterMix(uint64(seed), uint64(a.W[0])<<32|uint64(a.W[1])), uint64(a.W[2])<<32|uint64(a.W[3]))
}

func filterPort(addr uint64, key *TCFrontendKey) uint64 {
	return filterMix(addr, uint64(uint32(key.Port)<<8|uint32(key.Proto)))
}

func filterBits(h uint64) uint64 { return 1<<(h&63) | 1<<(h>>6&63) }

func filterMix(h, v uint64) uint64 {
	h = (h ^ v) * 0x9e3779b97f4a7c15
	return h ^ h>>32
}

// word and setWord access one word of the map. The kernel's programs read it at the same
// time: a copy of eight aligned bytes is one store.
func (f *PortFilter) word(index uint32) uint64 {
	var b [8]byte
	_, _ = f.words.ReadAt(b[:], int64(index)*8)
	return binary.NativeEndian.Uint64(b[:])
}

func (f *PortFilter) setWord(index uint32, v uint64) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], v)
	_, _ = f.words.WriteAt(b[:], int64(index)*8)
}
