package ebpf

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/bits"
	"sync"

	"github.com/cilium/ebpf"
)

// portFilter is the only writer of the map port_filter; see
// bpf/lib/lookup/port_filter.h. Members are added before their entry in another map, so
// that no program misses it. They are removed all together: a word may have the bits of
// other members.
//
//	tidy 1: keep what has an entry, a flow or a socket now
//	tidy 2, at the next sweep: keep what either pass has found
//
// A program that has found an entry just before it was deleted may store its flow after
// the first pass has read that place. The second pass finds this flow.
type portFilter struct {
	mu    sync.Mutex
	words *ebpf.Memory
	mask  uint32
	seed  uint32 // hash_seed of bpf/config.h
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

// openFilter fills the filter from all maps that an earlier run has written. The earlier
// run may have been an older version, which did not write the filter.
func openFilter(o *objects) (*portFilter, error) {
	m := o.maps[tcMapPortFilter]
	words, err := m.Memory()
	if err != nil {
		return nil, fmt.Errorf("map %s into memory: %w", m, err)
	}
	f := &portFilter{words: words, mask: m.MaxEntries() - 1, seed: o.seed}
	return f, f.fill(o.maps)
}

// fill adds all members.
func (f *portFilter) fill(m map[string]*ebpf.Map) error {
	err := eachFlow(context.Background(), m[tcMapFlows], func(k *tcTuple, v *tcFlow, _ uint32) error {
		f.add(flowMember(k, v))
		return nil
	})
	if err != nil {
		return err
	}
	return eachMember(m, f.add)
}

// eachMember calls add for every member that has an entry or a socket.
func eachMember(m map[string]*ebpf.Map, add func(tcFrontendKey)) error {
	if err := each(m[tcMapFrontends], func(k tcFrontendKey, _ tcFrontend) { add(k) }); err != nil {
		return err
	}
	if err := each(m[tcMapUntrackedPorts], func(k tcFrontendKey, _ tcUntrackedPort) { add(k) }); err != nil {
		return err
	}
	return each(m[tcMapSockets], func(k tcSocketKey, _ tcSocketPeer) {
		add(tcFrontendKey{Addr: k.Addr, Port: k.Port, Proto: k.Proto})
	})
}

// flowMember returns the member that lets the packets of a flow's entry pass: the Service or
// the endpoint.
func flowMember(k *tcTuple, f *tcFlow) tcFrontendKey {
	if tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_REPLY != 0 {
		return tcFrontendKey{Addr: k.Saddr, Port: k.Sport, Proto: k.Proto}
	}
	return tcFrontendKey{Addr: k.Daddr, Port: k.Dport, Proto: k.Proto}
}

// add adds a member. A NodePort has the zero address. A nil filter has no members.
func (f *portFilter) add(key tcFrontendKey) {
	if f == nil {
		return
	}
	index, set := f.place(&key)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.next != nil {
		f.next[index] |= set
	}
	if have := f.word(index); have&set != set {
		f.setWord(index, have|set)
	}
}

// keep makes the tidy in progress keep a member.
func (f *portFilter) keep(key tcFrontendKey) {
	index, set := f.place(&key)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next[index] |= set
}

// beginTidy starts a pass if enough members were deleted, or the last pass was the first.
func (f *portFilter) beginTidy() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	words := f.mask + 1
	if f.last == nil && f.gone < int(words/4) {
		return false
	}
	f.next = make([]uint64, words)
	if f.last == nil {
		f.gone = 0
	}
	return true
}

// endTidy ends a pass, after keep has been called for every flow. The second pass removes
// all members that none of both has kept. After an error both are repeated.
func (f *portFilter) endTidy(m map[string]*ebpf.Map, err error) error {
	if err == nil {
		err = eachMember(m, f.keep)
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

// before returns the map with a writer that adds each key first. A nil filter returns m.
func (f *portFilter) before(m kernelMap) kernelMap {
	if f == nil {
		return m
	}
	return memberMap{m, f}
}

type memberMap struct {
	kernelMap
	filter *portFilter
}

func (m memberMap) Put(key, value any) error {
	m.filter.add(key.(tcFrontendKey))
	return m.kernelMap.Put(key, value)
}

func (m memberMap) BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error) {
	for _, key := range keys.([]tcFrontendKey) {
		m.filter.add(key)
	}
	return m.kernelMap.BatchUpdate(keys, values, opts)
}

func (m memberMap) Delete(key any) error {
	m.filter.forget(1)
	return m.kernelMap.Delete(key)
}

func (m memberMap) BatchDelete(keys any, opts *ebpf.BatchOptions) (int, error) {
	m.filter.forget(len(keys.([]tcFrontendKey)))
	return m.kernelMap.BatchDelete(keys, opts)
}

// forget counts deleted members.
func (f *portFilter) forget(n int) {
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

// place returns the word and the bits of a member, as filter_has of
// bpf/lib/lookup/port_filter.h.
func (f *portFilter) place(key *tcFrontendKey) (index uint32, set uint64) {
	addr := filterAddr(f.seed, &key.Addr)
	group := uint64(filterGroup)
	if key.Addr == (tcAddr{}) {
		group = filterGroupNodePorts
	}
	h := filterPort(addr, key)
	if f.ungrouped {
		return uint32(h>>32) & f.mask, filterBits(h)
	}
	return uint32(addr&^(group-1)|h>>32&(group-1)) & f.mask, filterBits(h)
}

func filterAddr(seed uint32, a *tcAddr) uint64 {
	return filterMix(filterMix(uint64(seed), uint64(a.W[0])<<32|uint64(a.W[1])), uint64(a.W[2])<<32|uint64(a.W[3]))
}

func filterPort(addr uint64, key *tcFrontendKey) uint64 {
	return filterMix(addr, uint64(uint32(key.Port)<<8|uint32(key.Proto)))
}

func filterBits(h uint64) uint64 { return 1<<(h&63) | 1<<(h>>6&63) }

func filterMix(h, v uint64) uint64 {
	h = (h ^ v) * 0x9e3779b97f4a7c15
	return h ^ h>>32
}

// word and setWord access one word of the map. The kernel's programs read it at the same
// time: a copy of eight aligned bytes is one store.
func (f *portFilter) word(index uint32) uint64 {
	var b [8]byte
	_, _ = f.words.ReadAt(b[:], int64(index)*8)
	return binary.NativeEndian.Uint64(b[:])
}

func (f *portFilter) setWord(index uint32, v uint64) {
	var b [8]byte
	binary.NativeEndian.PutUint64(b[:], v)
	_, _ = f.words.WriteAt(b[:], int64(index)*8)
}
