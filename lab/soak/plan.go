package soak

import (
	"math/rand/v2"
	"time"
)

// action is one step of the plan.
type action struct {
	number int // from 1
	kind   string
	pause  time.Duration // before it
	// seed chooses what the action does.
	seed uint64
}

// plan draws actions. The same seed and kinds give the same actions.
type plan struct {
	r      *rand.Rand
	kinds  []string
	deck   []string
	number int
}

func newPlan(seed uint64, kinds []string) *plan {
	return &plan{r: rand.New(rand.NewPCG(seed, 0)), kinds: kinds}
}

// next draws an action. Kinds come in shuffled rounds, so that each comes as often as any other.
func (p *plan) next() action {
	if len(p.deck) == 0 {
		p.deck = append(p.deck, p.kinds...)
		p.r.Shuffle(len(p.deck), func(i, j int) { p.deck[i], p.deck[j] = p.deck[j], p.deck[i] })
	}
	p.number++
	a := action{number: p.number, kind: p.deck[0], seed: p.r.Uint64(), pause: time.Duration(p.r.IntN(2500)) * time.Millisecond}
	p.deck = p.deck[1:]
	return a
}
