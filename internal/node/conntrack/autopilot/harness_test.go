package autopilot

import (
	"math/rand/v2"
	"slices"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
)

// world simulates the flows of a machine: decide gets the figures that the kernel would
// report.
type world struct {
	now                     time.Time
	max, buckets, expectMax int
	spaces                  []*worldSpace
	noise                   *rand.Rand
	fixed                   map[setting]bool
}

type worldSpace struct {
	netns    uint64
	timeouts map[string]int
	rates    map[string]float64 // new flows a second, each of one moment
	steady   map[string]int     // flows that go on
	expect   int
	pending  map[string][]batch
	before   int
}

// batch are entries that fell silent in the same second.
type batch struct {
	n       int
	expires time.Time
}

func newWorld(spaces int) *world {
	w := &world{now: time.Unix(1e9, 0), max: 65536, buckets: 65536, expectMax: 1024, noise: rand.New(rand.NewPCG(1, 2)),
		fixed: map[setting]bool{}}
	for i := range spaces {
		w.spaces = append(w.spaces, &worldSpace{netns: uint64(i + 1), rates: map[string]float64{}, steady: map[string]int{},
			pending:  map[string][]batch{},
			timeouts: map[string]int{timeoutUDP: 30, timeoutUDPStream: 120, timeoutTimeWait: 120, timeoutFinWait: 120}})
	}
	return w
}

// second simulates one second.
func (w *world) second() {
	w.now = w.now.Add(time.Second)
	for _, s := range w.spaces {
		for sysctl, rate := range s.rates {
			n := int(rate * (0.97 + 0.06*w.noise.Float64()))
			s.pending[sysctl] = append(s.pending[sysctl], batch{n, w.now.Add(time.Duration(s.timeouts[sysctl]) * time.Second)})
		}
		for sysctl, list := range s.pending {
			s.pending[sysctl] = slices.DeleteFunc(list, func(b batch) bool { return !b.expires.After(w.now) })
		}
	}
}

func (s *worldSpace) entries() (n int) {
	for _, list := range s.pending {
		for _, b := range list {
			n += b.n
		}
	}
	for _, steady := range s.steady {
		n += steady
	}
	return n
}

func (w *world) measure(since time.Duration) measured {
	m := measured{At: w.now, Max: w.max, Buckets: w.buckets, ExpectMax: w.expectMax}
	for _, s := range w.spaces {
		sp := space{Netns: s.netns, Name: "pod", Entries: s.entries(), Expectations: s.expect, Timeouts: map[string]int{},
			Ages: map[string]capacity.Ages{}}
		sp.Growth = float64(sp.Entries-s.before) / since.Seconds()
		s.before = sp.Entries
		for sysctl, t := range s.timeouts {
			sp.Timeouts[sysctl] = t
			a := capacity.Ages{Timeout: time.Duration(t) * time.Second}
			for _, b := range s.pending[sysctl] {
				add(&a, b.n, b.expires.Sub(w.now)-time.Second)
			}
			add(&a, s.steady[sysctl], time.Duration(t-1)*time.Second)
			sp.Ages[sysctl] = a
		}
		m.Spaces = append(m.Spaces, sp)
	}
	return m
}

// add counts n entries that have as much time left.
func add(a *capacity.Ages, n int, left time.Duration) {
	one := capacity.Ages{Timeout: a.Timeout}
	one.Add(left)
	a.All += one.All * float64(n)
	a.Fresh += one.Fresh * float64(n)
	a.Early += one.Early * float64(n)
	a.Late += one.Late * float64(n)
}

func (w *world) value(s setting) *int {
	switch s.Sysctl {
	case sizeMax:
		return &w.max
	case sizeBuckets:
		return &w.buckets
	case sizeExpectMax:
		return &w.expectMax
	}
	return nil
}

func (w *world) set(s setting, v int) {
	if s.Netns == 0 {
		*w.value(s) = v
	} else {
		w.spaces[s.Netns-1].timeouts[s.Sysctl] = v
	}
}

// run simulates an autopilot that measures every 5 s, and returns its steps.
func (w *world) run(mem *memory, b bounds, seconds int) (done []step) {
	b.Fixed = w.fixed
	for i := range seconds {
		w.second()
		if i%5 != 4 {
			continue
		}
		m := w.measure(5 * time.Second)
		mem.reconcile(current(m, mem.Records, true))
		for _, s := range decide(m, mem, b) {
			mem.note(s, w.now)
			w.set(s.setting, s.To)
			done = append(done, s)
		}
	}
	return done
}
