package reconcile

import (
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/egress"
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
	// EgressMode is the value of --egress, and Egress what it leads to.
	EgressMode egress.Mode
	Egress     egress.Plan
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
	r.problems.report(time.Now())
	r.logFallbacks()
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
	r.status.EgressMode, r.status.Egress = r.egressMode, r.node.Egress
	r.mu.Unlock()

	services, endpoints := r.queue.sizes()
	r.metrics.SetPending(r.pendingSvcs+services, r.pendingEps+endpoints)
	r.metrics.SetPorts(ports, unsupported)
	r.metrics.SetProblems(len(r.problems.known))
	r.metrics.SetNoLocalEndpoints(r.counters.internalDrop, r.counters.externalDrop)
}
