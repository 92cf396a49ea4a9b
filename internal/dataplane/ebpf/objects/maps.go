package objects

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Map is the part of *ebpf.Map that writers need. Tests interrupt any call.
type Map interface {
	Put(key, value any) error
	Delete(key any) error
	BatchUpdate(keys, values any, opts *ebpf.BatchOptions) (int, error)
	BatchDelete(keys any, opts *ebpf.BatchOptions) (int, error)
	Iterate() *ebpf.MapIterator
	BatchLookup(cursor *ebpf.MapBatchCursor, keysOut, valuesOut any, opts *ebpf.BatchOptions) (int, error)
	String() string
}

// ReadBatch is the number of entries that one system call reads. The kernel returns
// whole buckets of a hash map, which are much smaller.
const ReadBatch = 1024

// Each calls f for every entry of a map that only this agent writes.
func Each[K, V any](m Map, f func(K, V)) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, ReadBatch), make([]V, ReadBatch)
	for first := true; ; first = false {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && first && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return eachByOne(m, f) // the kernel has no batches for this kind of map
		}
		for i := range n {
			f(keys[i], values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil // that was the last batch
		case err != nil:
			return fmt.Errorf("read eBPF map %s: %w", m, err)
		}
	}
}

// eachByOne is Each with two system calls for each entry.
func eachByOne[K, V any](m Map, f func(K, V)) error {
	var key K
	var value V
	it := m.Iterate()
	for it.Next(&key, &value) {
		f(key, value)
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	return nil
}

// Remove deletes a key. A missing key is no error.
func Remove[K any](m Map, key K) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete from eBPF map: %w", err)
	}
	return nil
}

// RemoveIf deletes the entries of a map for which is returns true.
func RemoveIf[K, V any](m Map, is func(K, V) bool) error {
	var found []K
	err := Each(m, func(key K, value V) {
		if is(key, value) {
			found = append(found, key)
		}
	})
	for _, key := range found {
		err = errors.Join(err, Remove(m, key))
	}
	return err
}

// ErrFull replaces the kernel's "argument list too long".
var ErrFull = errors.New("its eBPF map is full; the other Services are served")

// WriteError adds the entry to an error, and replaces the cause if the map is full.
func WriteError(what string, which any, err error) error {
	if IsFull(err) {
		err = ErrFull
	}
	return fmt.Errorf("write %s %v: %w", what, which, err)
}

// IsFull reports whether a map had no room for an entry.
func IsFull(err error) bool { return errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) }

// CountChange adds 1 to service_changes. A new map begins with any number: sockets may have seen one
// of an earlier map.
func CountChange(m *ebpf.Map) error {
	var n uint32
	if err := m.Lookup(uint32(0), &n); err != nil {
		return fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	if n == 0 {
		n = rand.Uint32()
	}
	if n++; n == 0 {
		n = 1
	}
	if err := m.Put(uint32(0), n); err != nil {
		return fmt.Errorf("write eBPF map %s: %w", m, err)
	}
	return nil
}

// FirstError returns the first error, and how many others there are: they have one cause.
func FirstError(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return fmt.Errorf("%w (and %d more)", errs[0], len(errs)-1)
}

// ReplaceMap makes a small map equal to want. It does not write correct entries, and removes others
// first: they may take the room. An error of one entry holds up no other.
func ReplaceMap[K comparable, V comparable](m *ebpf.Map, want map[K]V) error {
	var key K
	var value V
	have := map[K]V{}
	it := m.Iterate()
	for it.Next(&key, &value) {
		have[key] = value
	}
	if err := it.Err(); err != nil {
		return err
	}
	var errs []error
	for k := range have {
		if _, ok := want[k]; !ok {
			errs = append(errs, Remove(m, k))
		}
	}
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			errs = append(errs, m.Put(k, v))
		}
	}
	return FirstError(errs)
}

// EachPerCPU calls f for every entry of a per-CPU hash. Programs may add entries meanwhile.
func EachPerCPU[K, V any](m *ebpf.Map, f func(K, []V)) error {
	var key K
	var values []V
	entries := m.Iterate()
	for entries.Next(&key, &values) {
		f(key, values)
	}
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	return nil
}

// SumPerCPU returns the first n counters of a per-CPU array, summed over all CPUs.
func SumPerCPU(m *ebpf.Map, n int) []uint64 {
	out := make([]uint64, n)
	var perCPU []uint64
	for i := range out {
		if err := m.Lookup(uint32(i), &perCPU); err != nil {
			continue
		}
		for _, v := range perCPU {
			out[i] += v
		}
	}
	return out
}

// OpenPinned opens a map of a layout. The error is fs.ErrNotExist if there is none.
func OpenPinned(dir, name string) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
	if err != nil {
		return nil, fmt.Errorf("open eBPF map %s: %w", name, err)
	}
	return m, nil
}

// PerCPU reports whether maps of this type have a value for each CPU.
func PerCPU(t ebpf.MapType) bool {
	return t == ebpf.PerCPUArray || t == ebpf.PerCPUHash || t == ebpf.LRUCPUHash
}
