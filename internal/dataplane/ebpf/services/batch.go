package services

import (
	"errors"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// portTable writes many ports at once, in stages: all their backends, then all their slots,
// and so on. A stage fills batches, and the next stage begins after the kernel has them.

// change is the write of one port in progress.
type change struct {
	want   *intent.ServicePort // nil: the port is erased
	have   *port
	isNew  bool              // the maps had no entry of it
	known  int               // number of its backends before the write; sorted by address
	header objects.TCService // wanted
	err    error             // the first; later stages leave the port alone
}

type changes []change

// each calls do for the ports that have not failed.
func (cs changes) each(do func(*change)) {
	for i := range cs {
		if cs[i].err == nil {
			do(&cs[i])
		}
	}
}

// batchEntries is the number of entries that one system call writes. More are not faster:
// keys and values should stay in the processor's caches.
const batchEntries = 1024

// batch writes or deletes entries of one map in the order in which they were added.
type batch[K, V any] struct {
	m      *objects.Map
	delete bool // values are notes for written and failed
	// written is called for each entry that the kernel has written or deleted, and failed
	// for each that it has refused.
	written func(*change, K, V)
	failed  func(*change, K, V, error)

	keys   []K
	values []V
	of     []*change // the changes to which the entries belong
}

// add adds an entry, unless its change has failed.
func (b *batch[K, V]) add(c *change, key K, value V) {
	if c.err != nil {
		return
	}
	b.keys, b.values, b.of = append(b.keys, key), append(b.values, value), append(b.of, c)
	if len(b.keys) == batchEntries {
		b.flush()
	}
}

// flush writes what was added. After an entry that the kernel refuses it continues with
// the next one whose change has not failed.
func (b *batch[K, V]) flush() {
	for next := 0; next < len(b.keys); {
		n, err := b.write(next)
		for i := next; i < next+n; i++ {
			b.written(b.of[i], b.keys[i], b.values[i])
		}
		if next += n; err == nil {
			continue
		}
		b.failed(b.of[next], b.keys[next], b.values[next], err)
		for next++; next < len(b.keys) && b.of[next].err != nil; {
			next++
		}
	}
	b.keys, b.values = b.keys[:0], b.values[:0]
	clear(b.of)
	b.of = b.of[:0]
}

// write returns how many entries, from first on, the kernel has written, and why it has
// refused the next one. A missing key is deleted.
func (b *batch[K, V]) write(first int) (n int, err error) {
	keys, values := b.keys[first:], b.values[first:]
	if b.delete {
		n, err = (*b.m).BatchDelete(keys, nil)
	} else {
		n, err = (*b.m).BatchUpdate(keys, values, nil)
	}
	switch {
	case err == nil:
		return len(keys), nil
	case errors.Is(err, ebpf.ErrNotSupported):
		// The library says so after any error if it cannot make a map to find out.
		n, err = 0, b.writeOne(keys[0], values[0])
	case n >= len(keys):
		n = 0 // before Linux 6.8, if the kernel had no memory for a copy of the keys
	}
	if err == nil || b.delete && errors.Is(err, ebpf.ErrKeyNotExist) {
		return n + 1, nil
	}
	return n, err
}

func (b *batch[K, V]) writeOne(key K, value V) error {
	if b.delete {
		return (*b.m).Delete(key)
	}
	return (*b.m).Put(key, value)
}

// release frees buffers that a large write has grown.
func (b *batch[K, V]) release() {
	const small = 64
	if cap(b.keys) > small {
		b.keys, b.values, b.of = nil, nil, nil
	}
}
