// Package autopilot keeps head-room in the kernel's connection tracking. It
// measures how many new flows there are, works out by capacity what they need,
// and sets what decide.go says, within a memory budget:
//
//	measure ──> Decide ──> apply ──> /proc/sys/net/netfilter
//	   ^       (pure)        └─────> state file, log, Event, metric
//	   └── count, growth, ages of entries in each network namespace
//
// It raises sizes before a table is full, shortens the time-outs of short-lived
// flows where sizes do not do, and goes back when it has been calm. What was
// found at the start is kept in a file, so that whoever comes after a SIGKILL
// can go back too.
package autopilot

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
)

// The modes of --conntrack-autopilot.
const (
	Off    = "off"    // leaves conntrack alone
	Advise = "advise" // says what it would do
	On     = "on"     // does it
)

// Modes lists every mode.
var Modes = []string{Off, Advise, On}

const (
	defaultInterval = 5 * time.Second
	// fixedFor is how long a value that could not be written is left alone.
	fixedFor = 10 * time.Minute
)

// Config says what an autopilot looks after.
type Config struct {
	Mode     string // Advise or On
	Memory   int64  // bytes that full tables may take
	Entries  int    // least nf_conntrack_max; 0: none asked for
	Timeouts map[string]time.Duration
	// Namespaces lists those it looks after, its own among them.
	Namespaces func() ([]conntrack.Namespace, error)
	// State is the file of the values found at the start.
	State string
	// Event tells the owner of the node; nil: nobody.
	Event    func(note string)
	Interval time.Duration // between measurements; 0: 5 s
	Log      *slog.Logger
}

// Validate says what is missing or out of range.
func (c Config) Validate() error {
	switch {
	case c.Mode != Advise && c.Mode != On:
		return fmt.Errorf("conntrack autopilot: mode %q: use %s or %s", c.Mode, Advise, On)
	case c.Memory <= 0 || c.Entries < 0 || c.Interval < 0:
		return errors.New("conntrack autopilot: memory must be more than 0, entries and interval not negative")
	case c.Namespaces == nil || c.State == "" || c.Log == nil:
		return errors.New("conntrack autopilot: needs namespaces, a state file and a log")
	}
	return nil
}

// Pilot is an autopilot. Make one with New.
type Pilot struct {
	Config
	mem    *Memory
	meter  meter
	write  func(conntrack.Namespace, Step) (int, error)
	fixed  map[Setting]time.Time // values that could not be written, and until when they are left alone
	told   map[Setting]advice    // advice given
	failed string                // the last measurement's error, said once
	*metrics
}

// New prepares a Pilot. What an agent before it has changed is taken over, or,
// if it only advises, taken back.
func New(c Config) (*Pilot, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.Interval == 0 {
		c.Interval = defaultInterval
	}
	if c.Mode != On {
		if err := GoBack(c.State, c.Namespaces, c.Log); err != nil {
			c.Log.Warn("conntrack autopilot: not all could be taken back", "err", err)
		}
	}
	records, err := readState(c.State)
	if err != nil {
		c.Log.Warn("conntrack autopilot: what an agent before this one found is not known", "err", err)
	}
	p := &Pilot{
		Config: c, mem: NewMemory(records), meter: newMeter(), write: writeStep,
		fixed: map[Setting]time.Time{}, told: map[Setting]advice{}, metrics: newMetrics(),
	}
	p.within.Set(float64(capacity.TableWithin(c.Memory)))
	return p, nil
}

// Run looks after conntrack until ctx ends, and returns nil then. It leaves what
// it has set: the next agent goes on from there.
func (p *Pilot) Run(ctx context.Context) error {
	tick := time.NewTicker(p.Interval)
	defer tick.Stop()
	for {
		p.round(ctx, time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// round measures, decides and does.
func (p *Pilot) round(ctx context.Context, now time.Time) {
	begin := time.Now()
	m, spaces, err := p.measure(ctx, now)
	p.measured(m, time.Since(begin))
	if ctx.Err() != nil {
		return
	}
	p.say(err)
	if len(m.Spaces) == 0 {
		return
	}
	before := len(p.mem.Records)
	p.mem.Reconcile(current(m, p.mem.Records, err == nil))
	if len(p.mem.Records) != before {
		p.save()
	}
	for _, s := range Decide(m, p.mem, p.bounds(now)) {
		if p.Mode == On {
			p.apply(spaces[s.Netns], s, now)
		} else {
			p.advise(s, now)
		}
	}
	p.changed.Set(float64(len(p.mem.Records)))
}

// say logs why something cannot be measured, once.
func (p *Pilot) say(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != p.failed && text != "" {
		p.Log.Warn("conntrack autopilot: cannot measure everything", "err", err)
	}
	p.failed = text
}

func (p *Pilot) bounds(now time.Time) Bounds {
	b := Bounds{Memory: p.Memory, Entries: p.Entries, PageBytes: os.Getpagesize(), Timeouts: map[string]int{}, Fixed: map[Setting]bool{}}
	for sysctl, d := range p.Timeouts {
		b.Timeouts[sysctl] = int(d / time.Second)
	}
	for s, until := range p.fixed {
		b.Fixed[s] = now.Before(until)
	}
	return b
}

// advice is what was advised last, and when it would have been again.
type advice struct {
	to int
	at time.Time
}

// advise says what would be done, and says it again only when it is something else: at
// once if it is more than before, after Calm if it is less, lest noise be told.
func (p *Pilot) advise(s Step, now time.Time) {
	last, said := p.told[s.Setting]
	less := said && (s.To > s.From) == (s.To < last.to)
	switch {
	case said && s.To == last.to:
		p.told[s.Setting] = advice{s.To, now}
		return
	case less && now.Sub(last.at) < Calm:
		return
	}
	p.told[s.Setting] = advice{s.To, now}
	p.count(s, "advised")
	p.Log.Info("conntrack autopilot advises", "step", s.String(), "why", s.Why)
	p.event("advises %s: %s", s, s.Why)
}

// apply does a step. The file says what was found before the kernel hears of the
// change, and forgets it after the kernel has heard of the way back: a SIGKILL
// between any two leaves what the next agent can tell.
func (p *Pilot) apply(in conntrack.Namespace, s Step, now time.Time) {
	records := maps.Clone(p.mem.Records)
	if !s.Back {
		p.mem.Take(s, now)
		if err := p.save(); err != nil {
			p.mem.Records = records
			return // without a way back nothing is changed
		}
	}
	got, err := p.write(in, s)
	if err != nil {
		p.mem.Records = records
		p.save()
		if !errors.Is(err, errTaken) {
			p.cannot(s, err, now)
		}
		return
	}
	if delete(p.fixed, s.Setting); s.Back {
		p.mem.Take(s, now)
	} else if r := p.mem.Records[s.Setting]; got != r.Set {
		r.Set = got // the kernel rounds
		p.mem.Records[s.Setting] = r
	}
	p.save()
	p.readOnly.Set(float64(len(p.fixed)))
	p.count(s, "done")
	p.Log.Info("conntrack autopilot", "step", s.String(), "why", s.Why)
	p.event("set %s: %s", s, s.Why)
}

// cannot notes that a value cannot be written. It is said once, and the value
// left alone for a while: in a container /proc/sys is often read-only for good.
func (p *Pilot) cannot(s Step, err error, now time.Time) {
	_, known := p.fixed[s.Setting]
	p.fixed[s.Setting] = now.Add(fixedFor)
	p.readOnly.Set(float64(len(p.fixed)))
	if known {
		return
	}
	p.count(s, "refused")
	p.Log.Warn("conntrack autopilot: cannot write, going on without", "step", s.String(), "why", s.Why, "err", err)
	p.event("cannot set %s: %s: %s", s, s.Why, err)
}

func (p *Pilot) event(format string, args ...any) {
	if p.Event != nil {
		p.Event("conntrack autopilot " + fmt.Sprintf(format, args...))
	}
}

func (p *Pilot) save() error {
	err := writeState(p.State, p.mem.Records)
	if err != nil {
		p.Log.Warn("conntrack autopilot: cannot keep what was found, so nothing is changed", "err", err)
	}
	return err
}

// current are the values now of settings that were changed. Those of a namespace
// that is gone are missing, if all there are were measured; what just could not
// be read counts as unchanged.
func current(m Measured, records map[Setting]Record, all bool) map[Setting]int {
	now := map[Setting]int{{Sysctl: sizeMax}: m.Max, {Sysctl: sizeBuckets}: m.Buckets, {Sysctl: sizeExpectMax}: m.ExpectMax}
	for s, r := range records {
		i := slices.IndexFunc(m.Spaces, func(sp Space) bool { return sp.Netns == s.Netns })
		switch {
		case s.Netns == 0 || i < 0 && all:
			continue
		case i >= 0 && m.Spaces[i].Timeouts[s.Sysctl] != 0:
			now[s] = m.Spaces[i].Timeouts[s.Sysctl]
		default:
			now[s] = r.Set
		}
	}
	return now
}
