package reconcile

import (
	"cmp"
	"context"
	"log/slog"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// Status is the state of the loop.
type Status struct {
	// PendingSince is the arrival of the oldest change that is not in the
	// kernel yet; zero when all are.
	PendingSince time.Time
	// LastSynced is when the kernel last held the whole desired state; zero before the
	// first sync.
	LastSynced time.Time
	// Ports counts Service ports by the name of the backend that serves them.
	Ports map[string]int
	// Errors are those of the backends' last writes as a whole, by name. A backend without
	// an error is not in it.
	Errors map[string]string
	// Services and Endpoints count those that are served.
	Services, Endpoints int
	// Unsupported counts Service ports that no backend can carry.
	Unsupported int
	// Problems are all current Problems, sorted.
	Problems []model.Problem
	// Listed says that the source has delivered all objects once. Until then the agent
	// writes nothing, however old PendingSince is.
	Listed bool
	// NodeLeaving says that this node is being deleted or no longer exists.
	NodeLeaving bool
}

// Status returns the state of the loop. Any goroutine may call it; it does not wait for a
// running sync.
func (r *Reconciler) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Ports = maps.Clone(s.Ports)
	s.Errors = maps.Clone(s.Errors)
	s.Problems = slices.Clone(s.Problems)
	if since := r.queue.oldest(); s.PendingSince.IsZero() || !since.IsZero() && since.Before(s.PendingSince) {
		s.PendingSince = since
	}
	if s.LastSynced.IsZero() && s.PendingSince.IsZero() {
		// No change arrived yet. A source that never delivers means a node that never
		// serves.
		s.PendingSince = r.started
	}
	return s
}

// publish updates status, metrics and log after a turn.
func (r *Reconciler) publish() {
	r.problems.set(fromBackends, append(r.backendProblems(), r.entryProblems()...))
	if ps := r.policies; ps != nil {
		r.problems.set(fromPolicies, append(ps.problem(), ps.refused...))
	}
	r.problems.report()
	ports, failed := map[string]int{}, map[string]string{}
	for i, bs := range r.syncs {
		ports[bs.backend.Name()] = r.counters.perBackend[i]
		if err := bs.lasting(); err != nil {
			failed[bs.backend.Name()] = err.Error()
		}
	}
	unsupported := len(r.counters.unassigned)
	r.mu.Lock()
	r.status.PendingSince = r.pendingSince
	r.status.Ports, r.status.Errors = ports, failed
	r.status.Services, r.status.Endpoints = r.cfg.Tracker.Services().Count(), r.counters.endpoints
	r.status.Unsupported = unsupported
	r.status.Problems = r.problems.known
	r.status.Listed = r.haveFull
	r.status.NodeLeaving = r.haveFull && r.node.Leaving
	r.mu.Unlock()

	services, endpoints := r.queue.sizes()
	r.metrics.SetPending(r.pendingSvcs+services, r.pendingEps+endpoints)
	r.metrics.SetPorts(ports, unsupported)
	r.metrics.SetProblems(len(r.problems.known))
	r.metrics.SetNoLocalEndpoints(r.counters.internalDrop, r.counters.externalDrop)
}

// origin is the part of the agent that found a Problem.
type origin int

const (
	fromSource origin = iota
	fromIntent
	fromBackends
	fromHealthChecks
	fromPolicies
	fromServers
	origins
)

// maxProblemLines bounds the log lines of one turn: ten thousand ports that do not fit a
// map are one fault.
const maxProblemLines = 20

// problems holds the current Problems, and logs each once when it appears and once when it
// is resolved.
type problems struct {
	log        *slog.Logger
	onAppeared func(appeared []model.Problem) // nil: no callback
	current    [origins][]model.Problem
	known      []model.Problem // as last reported, sorted, each once
}

func (p *problems) set(o origin, ps []model.Problem) { p.current[o] = ps }

// report logs what changed since the last report.
func (p *problems) report() {
	var now []model.Problem
	for _, ps := range p.current {
		now = append(now, ps...)
	}
	slices.SortFunc(now, compareProblems)
	now = slices.Compact(now)
	appeared := without(now, p.known)
	p.each(slog.LevelWarn, "problem", "more problems", appeared)
	if p.onAppeared != nil && len(appeared) > 0 {
		p.onAppeared(appeared)
	}
	p.each(slog.LevelInfo, "problem resolved", "more problems resolved", without(p.known, now))
	p.known = now
}

func (p *problems) each(level slog.Level, msg, more string, ps []model.Problem) {
	for i, pr := range ps {
		if i == maxProblemLines {
			p.log.Log(context.Background(), level, more, "count", len(ps)-i)
			return
		}
		attrs := []any{"where", pr.Where}
		if pr.Field != "" {
			attrs = append(attrs, "field", pr.Field)
		}
		p.log.Log(context.Background(), level, msg, append(attrs, "what", pr.What)...)
	}
}

// without returns the elements of a that are not in b; both are sorted.
func without(a, b []model.Problem) []model.Problem {
	var out []model.Problem
	for _, p := range a {
		if _, found := slices.BinarySearchFunc(b, p, compareProblems); !found {
			out = append(out, p)
		}
	}
	return out
}

func compareProblems(a, b model.Problem) int {
	return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Field, b.Field), cmp.Compare(a.What, b.What))
}
