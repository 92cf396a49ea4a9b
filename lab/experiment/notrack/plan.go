package notrack

import (
	"context"
	"fmt"
	"slices"
	"time"

	"spillway.dev/spillway/lab/experiment"
)

// Sample is one measurement of both clients.
type Sample struct {
	Rate     float64 `json:"rate"` // connections answered a second
	Answered int64   `json:"answered"`
	Failed   int64   `json:"failed"`
	// Errors counts failures by kind.
	Errors map[string]int64 `json:"errors,omitempty"`
	// CPU is how long clients, node, server and the kernel's threads ran for each
	// connection, in µs.
	CPU float64 `json:"cpu_per_connection_us"`
	// Entries is how many more there were in the node's conntrack table after.
	Entries int `json:"conntrack_entries"`
}

func rateOf(s Sample) float64 { return s.Rate }
func cpuOf(s Sample) float64  { return s.CPU }

// plan is one comparison.
type plan struct {
	name, figure string
	a, b         side
	rate         float64
	value        func(Sample) float64
	target       *experiment.Target
}

func (b *bench) plans() []plan {
	at := fmt.Sprintf("CPU, %.0f conn/s", b.cfg.Rate)
	none, tracking, untracked := side{harness: b.tracked, lived: true}, side{harness: b.tracked, policy: TrackPolicy, lived: true},
		side{harness: b.tracked, policy: DoNotTrackPolicy, lived: true}
	bare, floor, full, nodeFull := side{harness: b.bare}, side{harness: b.bare, rules: untrackAll},
		side{harness: b.tracked, policy: DoNotTrackPolicy, full: true}, side{harness: b.tracked, policy: NodePolicy, node: true, full: true}
	return []plan{
		{"do-not-track ÷ tracked policy", at, tracking, untracked, b.cfg.Rate, cpuOf, &experiment.Target{Limit: 0.85, AtMost: true}},
		{"do-not-track ÷ no policy", at, none, untracked, b.cfg.Rate, cpuOf, nil},
		{"no conntrack ÷ tracked policy", at, tracking, bare, b.cfg.Rate, cpuOf, nil}, // the lower bound
		{"do-not-track ÷ no conntrack", at, bare, untracked, b.cfg.Rate, cpuOf, nil},
		{"do-not-track ÷ tracked policy", "max conn/s", side{harness: b.tracked, policy: TrackPolicy},
			side{harness: b.tracked, policy: DoNotTrackPolicy}, 0, rateOf, nil},
		{"pod, table full, do-not-track ÷ pod, no conntrack", "max conn/s", bare, full, 0, rateOf, &experiment.Target{Limit: 0.95}},
		{"pod, all untracked by one rule ÷ pod, no conntrack", "max conn/s", bare, floor, 0, rateOf, nil}, // the upper bound
		{"node, table full, do-not-track ÷ metal, no conntrack", "max conn/s", side{harness: b.bare, node: true}, nodeFull, 0, rateOf,
			&experiment.Target{Limit: 0.95}},
	}
}

func (b *bench) wanted(name string) bool { return b.cfg.Only == nil || b.cfg.Only.MatchString(name) }

func (b *bench) measureAll(ctx context.Context) error {
	plans := slices.DeleteFunc(b.plans(), func(p plan) bool { return !b.wanted(p.name + ", " + p.figure) })
	for i, p := range plans {
		b.cfg.Progress.Step("%s, %s (%d of %d)", p.name, p.figure, i+1, len(plans))
		pair := experiment.Pair[Sample]{Name: p.name, A: b.arm(p.a, p.rate), B: b.arm(p.b, p.rate), Rounds: b.cfg.Rounds,
			Progress: b.cfg.Progress.Part}
		trial, err := pair.Run(ctx)
		if len(trial.A) > 0 {
			b.report.add(p, trial)
		}
		if err != nil {
			return err
		}
	}
	return b.ceilings(ctx)
}

// slots and giveUp create a table that can remember slots/giveUp connections a second.
// The rest is full of permanent flows.
const (
	slots  = 10_000
	giveUp = 10 // s
)

// ceilings sends requests as fast as possible for longer than a full table lasts.
func (b *bench) ceilings(ctx context.Context) error {
	for _, c := range []struct {
		name   string
		policy Case
		free   int
	}{
		{fmt.Sprintf("tracked policy, %d free entries, given up after %d s", slots, giveUp), TrackPolicy, slots},
		{"tracked policy, table full", TrackPolicy, 0},
		{fmt.Sprintf("do-not-track policy, %d free entries", slots), DoNotTrackPolicy, slots},
		{"do-not-track policy, table full", DoNotTrackPolicy, 0},
	} {
		if !b.wanted(c.name + ", ceiling") {
			continue
		}
		b.cfg.Progress.Step("%s", c.name)
		if err := b.setPolicy(ctx, c.policy); err != nil {
			return err
		}
		if err := b.table.fill(ctx, true, c.free); err != nil {
			return err
		}
		s, err := b.measure(ctx, side{harness: b.tracked, policy: c.policy}, 0, 8*time.Second)
		if err != nil {
			return err
		}
		b.report.Ceilings = append(b.report.Ceilings, Ceiling{Name: c.name, Sample: s})
	}
	return nil
}
