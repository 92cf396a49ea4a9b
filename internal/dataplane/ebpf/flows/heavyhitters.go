package flows

import (
	"cmp"
	"maps"
	"slices"
)

// heavyHitters counts the keys that occur most, in bounded memory however many others there are: J. Misra and
// D. Gries, Finding repeated elements, 1982. A count is too small by at most 1/most of all that were added.
type heavyHitters[K comparable] struct {
	most   int
	counts map[K]int
}

func newHeavyHitters[K comparable](most int) *heavyHitters[K] {
	return &heavyHitters[K]{most: most, counts: map[K]int{}}
}

// add counts a key. On average it takes the same time for any number of keys: what one call takes from
// all counts, as many calls had added.
func (b *heavyHitters[K]) add(k K) {
	if _, counted := b.counts[k]; counted || len(b.counts) < b.most {
		b.counts[k]++
		return
	}
	for other := range b.counts {
		if b.counts[other]--; b.counts[other] == 0 {
			delete(b.counts, other)
		}
	}
}

// first returns at most n of the keys that want selects, those that occurred most first.
func (b *heavyHitters[K]) first(n int, want func(K) bool, compare func(a, b K) int) []K {
	keys := slices.DeleteFunc(slices.Collect(maps.Keys(b.counts)), func(k K) bool { return !want(k) })
	slices.SortFunc(keys, func(x, y K) int { return cmp.Or(cmp.Compare(b.counts[y], b.counts[x]), compare(x, y)) })
	return keys[:min(n, len(keys))]
}
