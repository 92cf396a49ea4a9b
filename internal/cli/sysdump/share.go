package sysdump

import (
	"cmp"
	"container/heap"
	"slices"
)

// shares keeps lines up to a weight. Beyond it, the namespace with the most weight loses the lines of
// its highest rank: a namespace with many objects leaves room to those of others.
type shares struct {
	most, weight int
	added        int64 // lines, by addObject
	of           map[string]*share
	byWeight     byWeight
}

type share struct {
	lines  []line // by rank
	weight int
	at     int // its index in shares.byWeight
}

// byWeight is a heap with the largest share first.
type byWeight []*share

func (b byWeight) Len() int           { return len(b) }
func (b byWeight) Less(i, j int) bool { return b[i].weight > b[j].weight }
func (b byWeight) Swap(i, j int) {
	b[i], b[j] = b[j], b[i]
	b[i].at, b[j].at = i, j
}

// Push implements heap.Interface.
func (b *byWeight) Push(x any) {
	one := x.(*share)
	one.at = len(*b)
	*b = append(*b, one)
}

// Pop implements heap.Interface. No share leaves the heap.
func (b *byWeight) Pop() any {
	last := (*b)[len(*b)-1]
	*b = (*b)[:len(*b)-1]
	return last
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
		heap.Push(&s.byWeight, one)
	}
	i, _ := slices.BinarySearchFunc(one.lines, l, byRank)
	one.lines = slices.Insert(one.lines, i, l)
	one.weight += l.weight
	heap.Fix(&s.byWeight, one.at)
	for s.weight += l.weight; s.weight > s.most; {
		largest := s.byWeight[0]
		if one.weight == largest.weight {
			largest = one // of equal shares, the one that grows
		}
		last := len(largest.lines) - 1
		s.weight -= largest.lines[last].weight
		largest.weight -= largest.lines[last].weight
		largest.lines = slices.Delete(largest.lines, last, last+1)
		heap.Fix(&s.byWeight, largest.at)
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
