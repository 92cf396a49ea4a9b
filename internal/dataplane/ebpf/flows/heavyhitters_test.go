package flows

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestHeavyHittersFindWhatOccursOften: however many keys occur once, those that occur often are found, in
// their order, and no count is too large, or too small by more than 1/most of all.
func TestHeavyHittersFindWhatOccursOften(t *testing.T) {
	const most, all = 64, 100_000
	r := rand.New(rand.NewPCG(1, 0))
	keys := slices.Concat(slices.Repeat([]int{-1}, 40_000), slices.Repeat([]int{-2}, 20_000), slices.Repeat([]int{-3}, 10_000))
	for i := range all - len(keys) {
		keys = append(keys, i)
	}
	for _, shuffled := range []bool{false, true} {
		if shuffled {
			r.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
		}
		b := newHeavyHitters[int](most)
		exact := map[int]int{}
		for _, k := range keys {
			b.add(k)
			exact[k]++
			if len(b.counts) > most {
				t.Fatalf("%d keys are counted, want at most %d", len(b.counts), most)
			}
		}
		negative := func(k int) bool { return k < 0 }
		if first := b.first(10, negative, cmp.Compare[int]); !slices.Equal(first, []int{-1, -2, -3}) {
			t.Errorf("shuffled %t: found %v, want -1, -2 and -3", shuffled, first)
		}
		for k, n := range b.counts {
			if n > exact[k] || n < exact[k]-all/most {
				t.Errorf("shuffled %t: %d occurred %d times, counted %d", shuffled, k, exact[k], n)
			}
		}
	}
}
