package reconcile

import (
	"fmt"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// nowhere is the lane of a port that no backend can carry.
const nowhere = -1

// place is what the loop remembers of a Service port.
type place struct {
	lane   int
	reason error // why the first backend does not carry it; nil if it does
	// inside and outside say that a Local policy leaves traffic of that side
	// without an endpoint; kube-proxy counts these.
	inside, outside bool
	// measured is the newest trigger time whose latency was observed.
	measured time.Time
}

// choose picks the first backend that can carry the port.
func (r *Reconciler) choose(p *intent.ServicePort) (lane int, reason error) {
	for i, l := range r.lanes {
		err := l.backend.CanCarry(p)
		if err == nil {
			return i, reason
		}
		if reason == nil {
			reason = err
		}
	}
	return nowhere, reason
}

// place sends a new or changed port to its lane, and takes it from the lane
// that had it before if that is another one.
func (r *Reconciler) place(p *intent.ServicePort) {
	old, known := r.places[p.ID]
	pl := place{measured: old.measured}
	pl.lane, pl.reason = r.choose(p)
	pl.inside, pl.outside = withoutLocal(p)
	if known {
		r.tally.count(p.ID, old, -1)
	}
	r.tally.count(p.ID, pl, +1)
	if known && old.lane != pl.lane && old.lane != nowhere {
		r.lanes[old.lane].want(p.ID, nil)
	}
	if pl.lane > 0 && (!known || old.lane != pl.lane) {
		r.log.Info("Service port is served by another dataplane", "port", p.ID.String(),
			"dataplane", r.lanes[pl.lane].backend.Name(), "reason", pl.reason)
	}
	if pl.lane != nowhere {
		r.lanes[pl.lane].want(p.ID, p)
		delete(r.entries.gone, p.ID)
	} else if known {
		r.noteGone(p.ID)
	}
	r.places[p.ID] = pl
}

// remove takes a port out of its lane.
func (r *Reconciler) remove(id intent.PortID) {
	pl, known := r.places[id]
	if !known {
		return
	}
	if pl.lane != nowhere {
		r.lanes[pl.lane].want(id, nil)
	}
	r.tally.count(id, pl, -1)
	delete(r.places, id)
	r.noteGone(id)
}

// tally counts places as they change, so that nobody walks through all of them.
type tally struct {
	lanes           []int                   // ports by lane
	nowhere         map[intent.PortID]error // ports that no backend can carry, and why
	inside, outside int                     // ports without local endpoints, see place
}

func (t *tally) count(id intent.PortID, pl place, n int) {
	switch {
	case pl.lane != nowhere:
		t.lanes[pl.lane] += n
	case n > 0:
		t.nowhere[id] = pl.reason
	default:
		delete(t.nowhere, id)
	}
	if pl.inside {
		t.inside += n
	}
	if pl.outside {
		t.outside += n
	}
}

// withoutLocal reports whether a Local policy drops the port's traffic from
// inside (ClusterIP) or from outside (everything else).
func withoutLocal(p *intent.ServicePort) (inside, outside bool) {
	for _, f := range p.Frontends {
		if f.Kind == intent.ClusterIP {
			inside = inside || f.Inside == intent.Drop
		} else {
			outside = outside || f.Outside == intent.Drop
		}
	}
	return inside, outside
}

// stateOf is the part of a state that one lane carries.
func (r *Reconciler) stateOf(lane int, s intent.State) intent.State {
	part := intent.State{Node: s.Node}
	for _, p := range s.Ports {
		if pl, ok := r.places[p.ID]; ok && pl.lane == lane {
			part.Ports = append(part.Ports, p)
		}
	}
	return part
}

// measure observes how long it took from a change in the cluster to the
// kernel. Like kube-proxy it leaves out changes older than this process: their
// age says nothing about its speed.
func (r *Reconciler) measure(done []*intent.ServicePort, now time.Time) {
	for _, p := range done {
		pl, ok := r.places[p.ID]
		if !ok || !p.Triggered.After(pl.measured) {
			continue
		}
		pl.measured = p.Triggered
		r.places[p.ID] = pl
		if p.Triggered.After(r.started) {
			r.metrics.NetworkProgrammed(now.Sub(p.Triggered))
		}
	}
}

// portProblem says what is wrong with one Service port.
func portProblem(id intent.PortID, what string) model.Problem {
	port := id.Port
	if port == "" {
		port = fmt.Sprint(id.Number)
	}
	return model.ServiceProblem(id.Service, fmt.Sprintf("port %s/%s/%s", port, id.Protocol, id.Family), what)
}
