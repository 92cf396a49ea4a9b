package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

func setNodeAddrs(t *Tracker, addrs []netip.Addr) Changes {
	t.SetNodeAddrs(addrs)
	return t.Changes()
}

func setTraversal(t *Tracker, v donottrack.Traversal) Changes {
	t.SetTraversal(v)
	return t.Changes()
}

// HealthChecks returns every healthCheckNodePort to serve, sorted by Service.
func (t *Tracker) HealthChecks() []HealthCheck {
	var out []HealthCheck
	for _, e := range t.services {
		if e.health != nil {
			out = append(out, *e.health)
		}
	}
	slices.SortFunc(out, compareHealthChecks)
	return out
}

// Problems returns the Problems of all Services and of the node, sorted.
func (t *Tracker) Problems() []model.Problem { return slices.Clone(t.problems) }

// Empty reports whether nothing changed.
func (c Changes) Empty() bool {
	return len(c.Upserts) == 0 && len(c.Deletes) == 0 && c.Node == nil &&
		len(c.HealthChecks) == 0 && len(c.Moves) == 0 && c.Problems == nil
}
