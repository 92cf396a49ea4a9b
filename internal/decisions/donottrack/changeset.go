package donottrack

import (
	"fmt"
	"hash/fnv"
)

// changeSet is a map that remembers the previous values of changed entries.
type changeSet[K comparable, V any] struct {
	now    map[K]V
	before map[K]V // previous values of changed entries; the zero V if there was none
	same   func(a, b V) bool
}

func newChangeSet[K comparable, V any](same func(a, b V) bool) changeSet[K, V] {
	return changeSet[K, V]{now: map[K]V{}, before: map[K]V{}, same: same}
}

func (c *changeSet[K, V]) set(k K, v V) {
	c.remember(k)
	c.now[k] = v
}

func (c *changeSet[K, V]) remove(k K) {
	c.remember(k)
	delete(c.now, k)
}

func (c *changeSet[K, V]) remember(k K) {
	if _, ok := c.before[k]; !ok {
		c.before[k] = c.now[k]
	}
}

// changes returns what changed since the last call.
func (c *changeSet[K, V]) changes() (out []Change[K, V]) {
	for k, had := range c.before {
		if want := c.now[k]; !c.same(had, want) {
			out = append(out, Change[K, V]{k, had, want})
		}
	}
	clear(c.before)
	return out
}

// bounded shortens a name and keeps it unique.
func bounded(name string, most int) string {
	if len(name) <= most {
		return name
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(name))
	return fmt.Sprintf("%s-%016x", name[:most-17], h.Sum64())
}
