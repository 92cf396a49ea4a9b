package sysdump

import (
	"cmp"
	"slices"
)

// shares keeps lines up to a weight. Beyond it, the namespace with the most weight loses the lines of
// its highest rank: a namespace with many objects leaves room to those of others.
type shares struct {
	most, weight int
	added        int64 // lines, by addObject
	of           map[string]*share
}

type share struct {
	lines  []line // by rank
	weight int
}

type line struct {
	rank   int64
	weight int
	text   []byte
}

func newShares(most int) *shares { return &shares{most: most, of: map[string]*share{}} }

func (s *shares) add(namespace string, l line) {
	one := s.of[namespace]
	if one == nil {
		one = &share{}
		s.of[namespace] = one
	}
	i, _ := slices.BinarySearchFunc(one.lines, l, byRank)
	one.lines = slices.Insert(one.lines, i, l)
	one.weight += l.weight
	for s.weight += l.weight; s.weight > s.most; {
		largest := one
		for _, other := range s.of {
			if other.weight > largest.weight {
				largest = other
			}
		}
		last := len(largest.lines) - 1
		s.weight -= largest.lines[last].weight
		largest.weight -= largest.lines[last].weight
		largest.lines = slices.Delete(largest.lines, last, last+1)
	}
}

// lines returns the lines that are left, by rank.
func (s *shares) lines() (all []line) {
	for _, one := range s.of {
		all = append(all, one.lines...)
	}
	slices.SortFunc(all, byRank)
	return all
}

func byRank(a, b line) int { return cmp.Compare(a.rank, b.rank) }
