package model

import (
	"cmp"
	"slices"
)

// RoundRobin returns a list in the order in which its owners take turns, each with its own order. So
// a limit on the list leaves a share to each owner, such as a namespace.
func RoundRobin[T any, O comparable](list []T, owner func(T) O) []T {
	type ranked struct {
		one  T
		turn int
	}
	turns, all := map[O]int{}, make([]ranked, 0, len(list))
	for _, one := range list {
		of := owner(one)
		all = append(all, ranked{one, turns[of]})
		turns[of]++
	}
	slices.SortStableFunc(all, func(a, b ranked) int { return cmp.Compare(a.turn, b.turn) })
	out := make([]T, 0, len(list))
	for _, r := range all {
		out = append(out, r.one)
	}
	return out
}
