package policy

import (
	"fmt"
	"hash/fnv"
)

// ledger is a map that remembers what its entries were before they changed.
type ledger[K comparable, V any] struct {
	now  map[K]V
	was  map[K]V // of entries that were touched; the zero V if there was none
	same func(a, b V) bool
}

func newLedger[K comparable, V any](same func(a, b V) bool) ledger[K, V] {
	return ledger[K, V]{now: map[K]V{}, was: map[K]V{}, same: same}
}

func (l *ledger[K, V]) set(k K, v V) {
	l.touch(k)
	l.now[k] = v
}

func (l *ledger[K, V]) drop(k K) {
	l.touch(k)
	delete(l.now, k)
}

func (l *ledger[K, V]) touch(k K) {
	if _, ok := l.was[k]; !ok {
		l.was[k] = l.now[k]
	}
}

// changes returns what became different since it was last called.
func (l *ledger[K, V]) changes() (out []Change[K, V]) {
	for k, had := range l.was {
		if want := l.now[k]; !l.same(had, want) {
			out = append(out, Change[K, V]{k, had, want})
		}
	}
	clear(l.was)
	return out
}

// bounded shortens a name, and keeps it unique.
func bounded(name string, most int) string {
	if len(name) <= most {
		return name
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return fmt.Sprintf("%s-%016x", name[:most-17], h.Sum64())
}
