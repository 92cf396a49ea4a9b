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

// Status is how things stand.
type Status struct {
	// PendingSince is the arrival of the oldest change that is not in the
	// kernel yet; zero when all are.
	PendingSince time.Time
	// LastSynced is when the kernel last held everything that was known; zero
	// before the first sync.
	LastSynced time.Time
	// Ports counts Service ports by the name of the backend that carries them.
	Ports map[string]int
	// Unsupported counts Service ports that no backend can carry.
	Unsupported int
	// Problems are all that are known now, sorted.
	Problems []model.Problem
	// Listed says that the source has told all there is once. Until then nothing can
	// be written, however long PendingSince is past.
	Listed bool
	// NodeLeaving says that this node is to go, or has gone.
	NodeLeaving bool
}

// Status tells how things stand. It may be called by any goroutine, and does
// not wait for a sync that is under way.
func (r *Reconciler) Status() Status {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.status
	s.Ports = maps.Clone(s.Ports)
	s.Problems = slices.Clone(s.Problems)
	if since := r.queue.oldest(); s.PendingSince.IsZero() || !since.IsZero() && since.Before(s.PendingSince) {
		s.PendingSince = since
	}
	if s.LastSynced.IsZero() && s.PendingSince.IsZero() {
		// Nothing arrived yet; a source that never delivers is a node that
		// never serves.
		s.PendingSince = r.started
	}
	return s
}

// publish tells status, metrics and log what a turn has brought.
func (r *Reconciler) publish() {
	r.problems.set(fromBackends, append(r.backendProblems(), r.entryProblems()...))
	r.problems.report()
	ports := map[string]int{}
	for i, bs := range r.syncs {
		ports[bs.backend.Name()] = r.counters.perBackend[i]
	}
	unsupported := len(r.counters.unassigned)
	r.mu.Lock()
	r.status.PendingSince = r.pendingSince
	r.status.Ports = ports
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

// origin is who found a problem.
type origin int

const (
	fromSource origin = iota
	fromIntent
	fromBackends
	fromHealthChecks
	fromPolicies
	fromPolicySync
	origins
)

// maxProblemLines bounds what one turn writes into the log: ten thousand ports
// that do not fit a map are one fault, not ten thousand.
const maxProblemLines = 20

// problems knows what is wrong, and logs each problem once when it appears and
// once when it is gone.
type problems struct {
	log        *slog.Logger
	onAppeared func(appeared []model.Problem) // nil: nobody else is told
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
	p.each(slog.LevelInfo, "problem gone", "more problems gone", without(p.known, now))
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
