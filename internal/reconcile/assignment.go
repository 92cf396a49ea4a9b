package reconcile

import (
	"fmt"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// unassigned is the backend index of a port that no backend can carry.
const unassigned = -1

// assignment records which backend serves a Service port.
type assignment struct {
	backend int8 // index in Reconciler.syncs, or unassigned
	// internalDrop and externalDrop say that a Local policy leaves internal or external
	// traffic without an endpoint; kube-proxy counts these ports.
	internalDrop, externalDrop bool
	endpoints                  int32 // of the newest decision
	// measured is the newest trigger time whose latency was observed, in ns since 1970; 0:
	// none. A large cluster has many assignments.
	measured int64
}

// choose returns the first backend that can carry the port, and the reason if that is not
// the first of all.
func (r *Reconciler) choose(p *intent.ServicePort) (backend int8, reason error) {
	for i, bs := range r.syncs {
		err := bs.backend.CanCarry(p)
		if err == nil {
			return int8(i), reason
		}
		if reason == nil {
			reason = err
		}
	}
	return unassigned, reason
}

// assign queues a new or changed port for its backend, and deletes it from its previous
// backend if that is another one.
func (r *Reconciler) assign(p *intent.ServicePort) {
	old, known := r.assignments[p.ID]
	a := assignment{measured: old.measured, endpoints: int32(len(p.Endpoints))}
	var reason error
	a.backend, reason = r.choose(p)
	a.internalDrop, a.externalDrop = withoutLocal(p)
	if known {
		r.counters.count(p.ID, old, nil, -1)
	}
	r.counters.count(p.ID, a, reason, +1)
	if known && old.backend != a.backend && old.backend != unassigned {
		r.syncs[old.backend].enqueue(p.ID, r.pendingPort(nil, old))
	}
	if a.backend > 0 && (!known || old.backend != a.backend) {
		r.fellBack = append(r.fellBack, fallback{p.ID, a.backend, reason})
	}
	if a.backend != unassigned {
		r.syncs[a.backend].enqueue(p.ID, r.pendingPort(p, old))
		delete(r.entries.gone, p.ID)
	} else if known {
		r.noteGone(p.ID)
	}
	r.assignments[p.ID] = a
}

// fallback is a port that the first backend cannot carry, and why.
type fallback struct {
	port    intent.PortID
	backend int8
	reason  error
}

// logFallbacks writes a line for each new fallback: a Service may have thousands of ports.
func (r *Reconciler) logFallbacks() {
	for i, f := range r.fellBack {
		if i == maxProblemLines {
			r.log.Info("more Service ports are served by another dataplane", "count", len(r.fellBack)-i)
			break
		}
		r.log.Info("Service port is served by another dataplane", "port", f.port.String(),
			"dataplane", r.syncs[f.backend].backend.Name(), "reason", f.reason)
	}
	r.fellBack = nil
}

// pendingPort returns a change of a port whose assignment was old.
func (r *Reconciler) pendingPort(p *intent.ServicePort, old assignment) pendingPort {
	c := pendingPort{port: p, endpoints: int(old.endpoints), since: r.arrival}
	if p != nil {
		c.endpoints = max(c.endpoints, len(p.Endpoints))
	}
	return c
}

// unassign deletes a port from its backend.
func (r *Reconciler) unassign(id intent.PortID) {
	a, known := r.assignments[id]
	if !known {
		return
	}
	if a.backend != unassigned {
		r.syncs[a.backend].enqueue(id, r.pendingPort(nil, a))
	}
	r.counters.count(id, a, nil, -1)
	delete(r.assignments, id)
	r.noteGone(id)
}

// counters counts assignments as they change, so that no report iterates over all of them.
type counters struct {
	perBackend                 []int                   // ports by backend
	endpoints                  int                     // of all ports
	unassigned                 map[intent.PortID]error // ports that no backend can carry, and why
	internalDrop, externalDrop int                     // ports without local endpoints, see assignment
}

// count adds n, 1 or -1, to the counters of an assignment.
func (t *counters) count(id intent.PortID, a assignment, reason error, n int) {
	switch {
	case a.backend != unassigned:
		t.perBackend[a.backend] += n
	case n > 0:
		t.unassigned[id] = reason
	default:
		delete(t.unassigned, id)
	}
	t.endpoints += n * int(a.endpoints)
	if a.internalDrop {
		t.internalDrop += n
	}
	if a.externalDrop {
		t.externalDrop += n
	}
}

// withoutLocal reports whether a Local policy drops the port's internal traffic (to the
// ClusterIP) or its external traffic (to all other frontends).
func withoutLocal(p *intent.ServicePort) (internal, external bool) {
	for _, f := range p.Frontends {
		if f.Kind == intent.ClusterIP {
			internal = internal || f.InternalRoute == intent.Drop
		} else {
			external = external || f.ExternalRoute == intent.Drop
		}
	}
	return internal, external
}

// stateOf returns the part of a state that one backend serves.
func (r *Reconciler) stateOf(backend int, s intent.State) intent.State {
	part := intent.State{Node: s.Node}
	for _, p := range s.Ports {
		if a, ok := r.assignments[p.ID]; ok && int(a.backend) == backend {
			part.Ports = append(part.Ports, p)
		}
	}
	return part
}

// measure observes the time from a change in the cluster to the kernel. Like kube-proxy it
// ignores changes older than this process, because their age does not depend on its speed. It
// ignores the future: any author of a slice writes the annotation, and clocks are set back.
func (r *Reconciler) measure(done []*intent.ServicePort, now time.Time) {
	for _, p := range done {
		if !p.Triggered.After(r.started) || p.Triggered.After(now) {
			continue
		}
		a, ok := r.assignments[p.ID]
		if !ok || p.Triggered.UnixNano() <= a.measured {
			continue
		}
		a.measured = p.Triggered.UnixNano()
		r.assignments[p.ID] = a
		r.metrics.NetworkProgrammed(now.Sub(p.Triggered))
	}
}

// portProblem returns a Problem of one Service port.
func portProblem(id intent.PortID, what string) model.Problem {
	port := id.Port
	if port == "" {
		port = fmt.Sprint(id.Number)
	}
	return model.ServiceProblem(id.Service, fmt.Sprintf("port %s/%s/%s", port, id.Protocol, id.Family), what)
}
