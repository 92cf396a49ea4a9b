package notrack

import (
	"context"
	"errors"
	"fmt"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
)

// New returns the experiment do-not-track.
func New() experiment.Experiment {
	return experiment.Experiment{
		Name:  "do-not-track",
		Title: "Conntrack as a ceiling on connections per second",
		Question: "A memcached is asked over one short connection after another. Each leaves an entry that is kept for a time, so that the " +
			"size of " +
			"the table divided by that time is the most that can be had. What do policies that do not track change, in connections/s and in CPU?",
		Published: "512k entries given up after 120 s: 4,369 connections/s; more than 60,000 with a do-not-track policy; at 4,000 " +
			"connections/s 20 % less CPU.",
		Sources: []experiment.Source{
			{Title: "When Linux conntrack is no longer your friend",
				URL: "https://www.tigera.io/blog/when-linux-conntrack-is-no-longer-your-friend/"},
		},
		Packages: packages,
		Figures: []experiment.Figure{
			{Key: "max", Name: "as fast as it goes", Unit: "connections/s", Better: "higher"},
			{Key: "failed", Name: "failed", Unit: "%", Better: "lower"},
			{Key: "cpu", Name: "CPU at the fixed rate", Unit: "µs a connection", Better: "lower"},
			{Key: "entries", Name: "entries left", Better: "lower"},
		},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "Connections/s", Figure: "max"},
			{Kind: experiment.Bars, Title: "CPU of a connection", Figure: "cpu"},
		},
		Scale:    describe,
		Rows:     rows,
		Conclude: conclude,
		Card:     card,
	}
}

// subject is one row.
type subject struct {
	name      string
	policy    Case
	bare      bool // a node without conntrack
	full      bool // the table is full but for so many entries
	free      int
	published float64
}

var subjects = []subject{
	{name: "no conntrack on the node", bare: true},
	{name: "no policy"},
	{name: "policy that tracks", policy: TrackPolicy},
	{name: "do-not-track policy", policy: DoNotTrackPolicy, published: 60000},
	{name: fmt.Sprintf("policy that tracks, %d free entries", slots), policy: TrackPolicy, full: true, free: slots, published: 4369},
	{name: "policy that tracks, table full", policy: TrackPolicy, full: true},
	{name: "do-not-track policy, table full", policy: DoNotTrackPolicy, full: true},
}

func shape(o experiment.Options) Config {
	c := Config{Name: o.Name + "-dnt", Mode: "ebpf", Rounds: 6, Duration: 2 * time.Second, Connections: 32, Rate: 4000, Progress: o.Progress}
	if o.Quick {
		c.Rounds, c.Duration = 2, time.Second
	}
	return c
}

func describe(o experiment.Options) string {
	c := shape(o)
	return fmt.Sprintf("Two client machines, one node, memcached in a pod. A table of half a million entries would take minutes to fill: "+
		"here it is full of flows "+
		"that are not given up but for %d entries, given up after %d s, which makes %d connections/s. %d measurements of %v a row; CPU is "+
		"that of the whole "+
		"machine at %.0f connections/s, clients and server among it, and not asked of rows with a full table.",
		slots, giveUp, slots/giveUp, c.Rounds, c.Duration, c.Rate)
}

// Rows with a full table are measured once. The measurement, with its warm-up, takes
// longer than entries live, so that entries are used a second time. In full there are two
// whole turns, after a warm-up half as long.
const (
	fullFor        = 4 * time.Second
	givenUpInQuick = 12 * time.Second
	givenUpIn      = 2 * giveUp * time.Second
)

// lasts is how long a row with a full table is measured.
func (s subject) lasts(quick bool) time.Duration {
	switch {
	case s.free == 0:
		return fullFor
	case quick:
		return givenUpInQuick
	}
	return givenUpIn
}

func rows(o experiment.Options) []experiment.Row {
	c := shape(o)
	var out []experiment.Row
	for i, s := range subjects {
		if o.Quick && i == 5 { // no request succeeds: the row before shows it
			continue
		}
		row := experiment.Row{Name: s.name, Group: "memcached", Takes: 4*time.Second + 3*time.Duration(c.Rounds)*c.Duration,
			Run: func(ctx context.Context, m *experiment.Measurement) error {
				return runSubject(ctx, c, s, s.lasts(o.Quick), m)
			}}
		switch {
		case s.bare:
			row.Side = experiment.Metal
		case s.policy == DoNotTrackPolicy:
			row.Side = experiment.Spillway
		}
		if s.full {
			row.Takes = 8*time.Second + s.lasts(o.Quick)*3/2
		}
		if s.published > 0 {
			row.Published = map[string]float64{"max": s.published}
		}
		out = append(out, row)
	}
	return out
}

// runSubject measures one row on clusters of its own.
func runSubject(ctx context.Context, cfg Config, s subject, full time.Duration, m *experiment.Measurement) (err error) {
	b := &bench{cfg: cfg, report: &Report{}}
	defer func() {
		for _, r := range []*harness.Harness{b.tracked, b.bare} {
			if r == nil {
				continue
			}
			if err != nil {
				m.Log += r.Logs()
			}
			err = errors.Join(err, r.Down())
		}
	}()
	if err := b.setUp(ctx); err != nil {
		return err
	}
	at := side{harness: b.tracked, policy: s.policy, full: s.full}
	if s.bare {
		at.harness = b.bare
	}
	if s.full {
		if err := b.setPolicy(ctx, s.policy); err != nil {
			return err
		}
		if err := b.table.fill(ctx, true, s.free); err != nil {
			return err
		}
		got, err := b.measure(ctx, at, 0, full)
		if err != nil {
			return err
		}
		add(m, got)
		return nil
	}
	for i := range cfg.Rounds {
		cfg.Progress.Part(i, cfg.Rounds)
		got, err := b.arm(at, cfg.Rate)(ctx)
		if err != nil {
			return err
		}
		m.Add("cpu", got.CPU)
		if got, err = b.arm(at, 0)(ctx); err != nil {
			return err
		}
		add(m, got)
	}
	return nil
}

// add adds a measurement at full speed.
func add(m *experiment.Measurement, s Sample) {
	m.Add("max", s.Rate)
	m.Add("entries", float64(s.Entries))
	if all := s.Answered + s.Failed; all > 0 {
		m.Add("failed", 100*float64(s.Failed)/float64(all))
	}
}

// conclude describes the effect of a policy that does not track.
func conclude(res *experiment.Result) []string {
	ratio := func(a, b, key string) string {
		x, y := res.Row(a), res.Row(b)
		if x == nil || y == nil {
			return ""
		}
		p, inA := x.Value(key)
		q, inB := y.Value(key)
		if !inA || !inB || p.Median == 0 {
			return ""
		}
		return experiment.FormatNumber(q.Median / p.Median)
	}
	var out []string
	if r := ratio("policy that tracks", "do-not-track policy", "cpu"); r != "" {
		out = append(out, "Measured: CPU of a connection with a do-not-track policy ÷ with one that tracks: "+r+" (published: 0.80).")
	}
	if r := ratio(subjects[4].name, "do-not-track policy, table full", "max"); r != "" {
		out = append(out, "Measured: connections/s with a full table and a do-not-track policy ÷ with few free entries and one that tracks: "+r+
			" (published: 13.7).")
	}
	if row := res.Row(subjects[4].name); row != nil {
		const most = slots / giveUp
		if v, ok := row.Value("max"); ok && (v.Median < 0.75*most || v.Median > 1.25*most) {
			out = append(out, fmt.Sprintf("Entries ÷ timeout is %d/s, and %s/s were measured: an entry whose time is over takes its place "+
				"until the kernel's collector or a "+
				"search of its bucket meets it, and so few turns of the table were measured that it matters which of them were whole.", most,
				experiment.FormatNumber(v.Median)))
		}
	}
	return append(out, "Why it may differ: the published machine had a table of its own size and more cores; the ceiling of a table is "+
		"arithmetic (entries ÷ timeout) and "+
		"shows at any size, while connections/s without it are what clients, server and network manage on these CPUs.")
}
