package reconcile

import (
	"cmp"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// A Service of many ports and endpoints, which any author of Services and EndpointSlices
// can make, takes seconds to write. Changes of other Services must not wait for it. So a
// sync writes a part of the pending changes if all of them have too many endpoints:
//
//   - Services with few endpoints, as many as fit, those with the fewest first;
//   - some ports of one Service that does not fit, the one that has waited longest.
//
// Changes that arrive meanwhile are in the next sync, together with the next part.

// pendingPort is the newest change of a port.
type pendingPort struct {
	port      *intent.ServicePort // nil: the port is deleted
	endpoints int                 // before the change or after it, whichever are more
	since     time.Time           // arrival of the oldest change; zero: it failed before
}

// cost is what a backend's work for a port depends on.
func (p pendingPort) cost() int { return 1 + p.endpoints }

// pendingService is the pending ports of one Service.
type pendingService struct {
	name  model.Name
	ports []intent.PortID
	cost  int
	since time.Time
}

// next returns the changes that the next sync writes.
func (bs *backendSync) next() map[intent.PortID]pendingPort {
	cost := 0
	for _, p := range bs.pending {
		cost += p.cost()
	}
	if bs.part == 0 || cost <= bs.part {
		return bs.pending
	}
	part, left := map[intent.PortID]pendingPort{}, bs.part
	var waits *pendingService
	for _, s := range bs.pendingServices() {
		if s.cost > left {
			if waits == nil || s.since.Before(waits.since) {
				waits = s
			}
			continue
		}
		left -= s.cost
		for _, id := range s.ports {
			part[id] = bs.pending[id]
		}
	}
	if waits != nil {
		bs.cut(part, waits)
	}
	bs.addMoves(part)
	return part
}

// pendingServices returns the pending changes by Service, those with the fewest endpoints
// first.
func (bs *backendSync) pendingServices() []*pendingService {
	byName := map[model.Name]*pendingService{}
	for id, p := range bs.pending {
		s := byName[id.Service]
		if s == nil {
			s = &pendingService{name: id.Service, since: p.since}
			byName[id.Service] = s
		}
		s.ports = append(s.ports, id)
		s.cost += p.cost()
		if p.since.Before(s.since) {
			s.since = p.since
		}
	}
	all := make([]*pendingService, 0, len(byName))
	for _, s := range byName {
		all = append(all, s)
	}
	slices.SortFunc(all, func(a, b *pendingService) int {
		return cmp.Or(cmp.Compare(a.cost, b.cost), a.name.Compare(b.name))
	})
	return all
}

// cut adds the first ports of a Service to a part, at least one. Those that have waited
// longest come first.
func (bs *backendSync) cut(part map[intent.PortID]pendingPort, s *pendingService) {
	slices.SortFunc(s.ports, func(a, b intent.PortID) int {
		return cmp.Or(bs.pending[a].since.Compare(bs.pending[b].since), a.Compare(b))
	})
	left := bs.part
	for i, id := range s.ports {
		p := bs.pending[id]
		if left -= p.cost(); left < 0 && i > 0 {
			return
		}
		part[id] = p
	}
}

// addMoves adds to a part the ports that exchange addresses with ports in it: an address
// that moves is served all the time if one sync writes both.
func (bs *backendSync) addMoves(part map[intent.PortID]pendingPort) {
	for added := true; added; {
		added = false
		for _, m := range bs.moves {
			_, from := part[m.From]
			_, to := part[m.To]
			other := m.From
			if from {
				other = m.To
			}
			if p, ok := bs.pending[other]; ok && from != to {
				part[other], added = p, true
			}
		}
	}
}

// forget removes changes that were written, and moves that are over.
func (bs *backendSync) forget(written map[intent.PortID]pendingPort) {
	if len(written) >= len(bs.pending) {
		bs.pending, bs.moves = map[intent.PortID]pendingPort{}, nil
		return
	}
	for id := range written {
		delete(bs.pending, id)
	}
	bs.moves = slices.DeleteFunc(bs.moves, func(m intent.Move) bool {
		_, from := bs.pending[m.From]
		_, to := bs.pending[m.To]
		return !from || !to
	})
}

// oldestPending returns the arrival of the oldest change that waits for its part of a sync,
// zero if only changes that failed before do, and false if a backend needs a full sync.
func (r *Reconciler) oldestPending() (oldest time.Time, known bool) {
	for i, bs := range r.syncs {
		if r.isUnused(i) {
			continue
		}
		if bs.full || bs.lasting() != nil || bs.node != nil {
			return oldest, false
		}
		for _, p := range bs.pending {
			if oldest.IsZero() || !p.since.IsZero() && p.since.Before(oldest) {
				oldest = p.since
			}
		}
	}
	return oldest, true
}
