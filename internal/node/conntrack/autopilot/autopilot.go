// Package autopilot keeps headroom in the kernel's connection tracking. It measures the
// rate of new flows, calculates with package capacity what they need, and applies the
// decisions of decide.go, within a memory budget:
//
//	measure ──> decide ──> apply ──> /proc/sys/net/netfilter
//	   ^       (pure)        └─────> state file, log, Event, metric
//	   └── count, growth, ages of entries in each network namespace
//
// It raises sizes before a table is full, and shortens the timeouts of short-lived flows
// if sizes are not enough. It restores the found values after a calm period. A file holds
// the values found at the start, so that the next agent can restore them after a SIGKILL.
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
	Off    = "off"    // changes nothing
	Advise = "advise" // logs the changes that On would make
	On     = "on"     // changes settings
)

// Modes lists every mode.
var Modes = []string{Off, Advise, On}

const (
	defaultInterval = 5 * time.Second
	// timeShare bounds the time of measurements: 1 of N seconds.
	timeShare = 10
	// fixedFor is the time until a value that could not be written is tried again.
	fixedFor = 10 * time.Minute
)

// Config configures an autopilot.
type Config struct {
	Mode     string // Advise or On
	Memory   int64  // largest size of full tables, in bytes
	Entries  int    // smallest nf_conntrack_max; 0: no minimum
	Timeouts map[string]time.Duration
	// Namespaces lists the network namespaces to manage, the agent's own among them.
	Namespaces func() ([]conntrack.Namespace, error)
	// State is the file of the values found at the start.
	State string
	// Event writes an Event about the node; nil: no Events.
	Event    func(note string)
	Interval time.Duration // between measurements, if they are short; 0: 5 s
	Log      *slog.Logger
}

// Validate reports a missing value or one out of range.
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
	mem     *memory
	meter   meter
	write   func(conntrack.Namespace, step) (int, error)
	fixed   map[setting]time.Time // values that could not be written, and until when they are left alone
	advised map[setting]advice    // last advice
	failed  string                // the last measurement's error, logged once
	*metrics
}

// New prepares a Pilot. It takes over the changes of a previous agent, or restores the
// found values if it only advises.
func New(c Config) (*Pilot, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if c.Interval == 0 {
		c.Interval = defaultInterval
	}
	if c.Mode != On {
		if err := Restore(c.State, c.Namespaces, c.Log); err != nil {
			c.Log.Warn("conntrack autopilot: cannot restore all settings", "err", err)
		}
	}
	records, err := readState(c.State)
	if err != nil {
		c.Log.Warn("conntrack autopilot: cannot read the values that a previous agent found", "err", err)
	}
	p := &Pilot{
		Config: c, mem: newMemory(records), meter: newMeter(), write: writeStep,
		fixed: map[setting]time.Time{}, advised: map[setting]advice{}, metrics: newMetrics(),
	}
	p.within.Set(float64(capacity.TableWithin(c.Memory)))
	return p, nil
}

// Run manages conntrack until ctx ends, and then returns nil. It keeps its changes; the
// next agent continues from them.
func (p *Pilot) Run(ctx context.Context) error {
	for {
		begin := time.Now()
		p.round(ctx, begin)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(p.pause(time.Since(begin))):
		}
	}
}

// pause returns the time until the next measurement, after one that took this long.
func (p *Pilot) pause(took time.Duration) time.Duration {
	return max(p.Interval-took, (timeShare-1)*took)
}

// round measures, decides and applies the decisions.
func (p *Pilot) round(ctx context.Context, now time.Time) {
	begin := time.Now()
	m, spaces, err := p.measure(ctx, now)
	p.measured(m, time.Since(begin))
	if ctx.Err() != nil {
		return
	}
	p.logError(err)
	if len(m.Spaces) == 0 {
		return
	}
	p.forget(spaces)
	before := len(p.mem.Records)
	p.mem.reconcile(current(m, p.mem.Records, err == nil))
	if len(p.mem.Records) != before {
		_ = p.save() // logged
	}
	for _, s := range decide(m, p.mem, p.bounds(now)) {
		if p.Mode == On {
			p.apply(spaces[s.Netns], s, now)
		} else {
			p.advise(s, now)
		}
	}
	p.changed.Set(float64(len(p.mem.Records)))
}

// forget forgets the advice and the failed writes of deleted namespaces.
func (p *Pilot) forget(there map[uint64]conntrack.Namespace) {
	maps.DeleteFunc(p.advised, func(s setting, _ advice) bool { _, is := there[s.Netns]; return !is })
	maps.DeleteFunc(p.fixed, func(s setting, _ time.Time) bool { _, is := there[s.Netns]; return !is })
}

// logError logs a new error of a measurement, once.
func (p *Pilot) logError(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text != p.failed && text != "" {
		p.Log.Warn("conntrack autopilot: cannot measure everything", "err", err)
	}
	p.failed = text
}

func (p *Pilot) bounds(now time.Time) bounds {
	b := bounds{Memory: p.Memory, Entries: p.Entries, PageBytes: os.Getpagesize(), Timeouts: map[string]int{}, Fixed: map[setting]bool{}}
	for sysctl, d := range p.Timeouts {
		b.Timeouts[sysctl] = int(d / time.Second)
	}
	for s, until := range p.fixed {
		b.Fixed[s] = now.Before(until)
	}
	return b
}

// advice is the last advised value, and the last time it was advised or confirmed.
type advice struct {
	to int
	at time.Time
}

// advise reports a step that On would take. It reports a different step at once if the
// change is larger, and after Calm if it is smaller, so that noise is not reported.
func (p *Pilot) advise(s step, now time.Time) {
	last, known := p.advised[s.setting]
	less := known && (s.To > s.From) == (s.To < last.to)
	switch {
	case known && s.To == last.to:
		p.advised[s.setting] = advice{s.To, now}
		return
	case less && now.Sub(last.at) < Calm:
		return
	}
	p.advised[s.setting] = advice{s.To, now}
	p.count(s, "advised")
	p.Log.Info("conntrack autopilot advises", "step", s.String(), "why", s.Why)
	p.event("advises %s: %s", s, s.Why)
}

// apply carries out a step. It writes the found value to the file before it changes the
// kernel, and removes it from the file after it has restored the kernel. So after a
// SIGKILL at any point the next agent can restore the value.
func (p *Pilot) apply(in conntrack.Namespace, s step, now time.Time) {
	records := maps.Clone(p.mem.Records)
	if !s.Back {
		p.mem.note(s, now)
		if err := p.save(); err != nil {
			p.mem.Records = records
			return // without a saved value the change could not be undone
		}
	}
	got, err := p.write(in, s)
	if err != nil {
		p.mem.Records = records
		_ = p.save() // logged
		if !errors.Is(err, errChangedElsewhere) {
			p.onWriteError(s, err, now)
		}
		return
	}
	if delete(p.fixed, s.setting); s.Back {
		p.mem.note(s, now)
	} else if r := p.mem.Records[s.setting]; got != r.Set {
		r.Set = got // the kernel rounds
		p.mem.Records[s.setting] = r
	}
	_ = p.save() // logged
	p.readOnly.Set(float64(len(p.fixed)))
	p.count(s, "done")
	p.Log.Info("conntrack autopilot", "step", s.String(), "why", s.Why)
	p.event("set %s: %s", s, s.Why)
}

// onWriteError notes that a value cannot be written. It reports this once, and the value
// is not tried again for fixedFor: in a container /proc/sys is often read-only forever.
func (p *Pilot) onWriteError(s step, err error, now time.Time) {
	_, known := p.fixed[s.setting]
	p.fixed[s.setting] = now.Add(fixedFor)
	p.readOnly.Set(float64(len(p.fixed)))
	if known {
		return
	}
	p.count(s, "refused")
	p.Log.Warn("conntrack autopilot: cannot write a setting, continuing without it", "step", s.String(), "why", s.Why, "err", err)
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
		p.Log.Warn("conntrack autopilot: cannot save the found values, so no setting is changed", "err", err)
	}
	return err
}

// current returns the current values of changed settings. A setting whose value could not
// be read counts as unchanged. If all namespaces were measured, settings of a removed
// namespace are missing.
func current(m measured, records map[setting]record, all bool) map[setting]int {
	now := map[setting]int{{Sysctl: sizeMax}: m.Max, {Sysctl: sizeBuckets}: m.Buckets, {Sysctl: sizeExpectMax}: m.ExpectMax}
	for s, r := range records {
		i := slices.IndexFunc(m.Spaces, func(sp space) bool { return sp.Netns == s.Netns })
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
