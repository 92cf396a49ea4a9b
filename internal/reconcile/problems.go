package reconcile

import (
	"context"
	"log/slog"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// origin is the part of the agent that found a Problem.
type origin int

const (
	fromSource origin = iota
	fromIntent
	fromBackends
	fromHealthChecks
	fromPolicies
	fromServers
	fromEgress
	origins
)

const (
	// maxProblemLines bounds the log lines of one turn of each kind: ten thousand ports that do
	// not fit a map are one fault.
	maxProblemLines = 20
	// reminderPeriod is the time between two log lines about a Problem that lasts.
	reminderPeriod = time.Hour
	// absentPeriod is the time without a fault of the agent's surroundings after which the log
	// calls it resolved. It is longer than two attempts of a source are apart (30 s), so that
	// a server whose answers alternate is one fault.
	absentPeriod = time.Minute
)

// problems holds the current Problems, and logs each once when it appears, once when it is
// resolved, and each reminderPeriod in between.
type problems struct {
	log        *slog.Logger
	onAppeared func(appeared []model.Problem) // with a new place or text; nil: no callback
	current    [origins][]model.Problem
	changed    bool            // current has, since the last report
	known      []model.Problem // as last reported, sorted, each once
	faults     map[place]*fault
	next       time.Time // when to call report again; zero: after a change
}

// place identifies a fault.
type place struct {
	object       model.ObjectRef
	where, field string
}

func placeOf(p model.Problem) place { return place{p.Object, p.Where, p.Field} }

// fault is what the log says about a place.
type fault struct {
	problems []model.Problem // sorted; their texts may be out of date
	since    time.Time
	logged   time.Time // the last line
	fewer    time.Time // since when there are fewer than in problems; zero: there are not
}

// due returns when to call report again without a change, and whether to.
func (p *problems) due() (time.Time, bool) { return orNever(p.next) }

func (p *problems) set(o origin, ps []model.Problem) {
	p.changed = p.changed || !slices.Equal(p.current[o], ps)
	p.current[o] = ps
}

// report logs what changed since the last report, and what lasts. A turn without either looks at
// no Problem: tenants can make any number of them.
func (p *problems) report(now time.Time) {
	if !p.changed && !passed(p.next, now) {
		return
	}
	p.changed = false
	var all []model.Problem
	for _, ps := range p.current {
		all = append(all, ps...)
	}
	slices.SortFunc(all, model.Problem.Compare)
	all = slices.Compact(all)
	if appeared := without(all, p.known); p.onAppeared != nil && len(appeared) > 0 {
		p.onAppeared(appeared)
	}
	p.known = all
	began, lasting, ended := p.update(now)
	p.each(slog.LevelWarn, "problem", "more problems", began, false)
	p.each(slog.LevelWarn, "problem", "more problems", lasting, true)
	p.each(slog.LevelInfo, "problem resolved", "more problems resolved", ended, false)
}

// update compares the faults with the known Problems, and returns those to log, sorted.
func (p *problems) update(now time.Time) (began, lasting, ended []model.Problem) {
	at := map[place][]model.Problem{}
	for _, pr := range p.known {
		at[placeOf(pr)] = append(at[placeOf(pr)], pr)
	}
	if p.faults == nil {
		p.faults = map[place]*fault{}
	}
	for k := range at {
		if p.faults[k] == nil {
			p.faults[k] = &fault{since: now, logged: now}
		}
	}
	p.next = time.Time{}
	for k, f := range p.faults {
		b, e := f.update(at[k], now)
		began, ended = append(began, b...), append(ended, e...)
		due := f.logged.Add(reminderPeriod)
		if len(f.problems) == 0 {
			delete(p.faults, k)
			continue
		}
		if !now.Before(due) {
			f.logged, due = now, now.Add(reminderPeriod)
			lasting = append(lasting, without(at[k], b)...)
		}
		if !f.fewer.IsZero() {
			due = earlier(due, f.fewer.Add(absentPeriod))
		}
		if p.next.IsZero() || due.Before(p.next) {
			p.next = due
		}
	}
	for _, ps := range [][]model.Problem{began, lasting, ended} {
		slices.SortFunc(ps, model.Problem.Compare)
	}
	return began, lasting, ended
}

// update compares a fault with the present Problems of its place, sorted, and returns what
// began and what ended. Texts only tell which of several Problems that is.
func (f *fault) update(now []model.Problem, at time.Time) (began, ended []model.Problem) {
	fewer := len(f.problems) - len(now)
	switch {
	case fewer == 0 && f.version(now) == f.version(f.problems):
		f.fewer = time.Time{}
		return nil, nil
	case fewer > 0 && !f.endsAtOnce() && f.fewer.IsZero():
		f.fewer = at
		return nil, nil
	case fewer > 0 && !f.endsAtOnce() && at.Sub(f.fewer) < absentPeriod:
		return nil, nil
	}
	began, ended = without(now, f.problems), without(f.problems, now)
	if f.version(now) == f.version(f.problems) || len(now) == 0 || len(f.problems) == 0 {
		// The others have another text than the log has.
		began, ended = began[:min(len(began), max(-fewer, 0))], ended[:min(len(ended), max(fewer, 0))]
	}
	f.problems, f.fewer = now, time.Time{}
	return began, ended
}

// endsAtOnce reports whether a Problem ends by a change of an object or a file. Others are
// results of attempts, which may alternate.
func (f *fault) endsAtOnce() bool {
	return f.problems[0].Object != (model.ObjectRef{}) || f.problems[0].Version != ""
}

func (f *fault) version(ps []model.Problem) string {
	if len(ps) == 0 {
		return ""
	}
	return ps[0].Version
}

func (p *problems) each(level slog.Level, msg, more string, ps []model.Problem, since bool) {
	for i, pr := range ps {
		if i == maxProblemLines {
			p.log.Log(context.Background(), level, more, "count", len(ps)-i)
			return
		}
		attrs := []any{"where", pr.Where}
		if pr.Field != "" {
			attrs = append(attrs, "field", pr.Field)
		}
		if since {
			attrs = append(attrs, "since", p.faults[placeOf(pr)].since.UTC().Format(time.RFC3339))
		}
		p.log.Log(context.Background(), level, msg, append(attrs, "what", pr.What)...)
	}
}

// without returns the elements of a that are not in b, apart from their Version; both are
// sorted.
func without(a, b []model.Problem) []model.Problem {
	var out []model.Problem
	for _, p := range a {
		if _, found := slices.BinarySearchFunc(b, p, model.Problem.Compare); !found {
			out = append(out, p)
		}
	}
	return out
}
