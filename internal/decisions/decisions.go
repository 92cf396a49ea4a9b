package decisions

import (
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// Tracker keeps all decisions about the facts up to date. One goroutine at a time uses it.
//
//	Delta ──> store ──> donottrack ──Traversal──> intent ──> Changes
//	netfilter's rules, or a file ──────> egress ──Plan──┘
type Tracker struct {
	facts     *store.Store
	services  *intent.Tracker
	policies  *donottrack.Tracker
	traversal donottrack.Traversal
	outliers  outlier.Detector
	egress    egressState
}

// Changes is what differs from the decisions before.
type Changes struct {
	Services intent.Changes
	Policies donottrack.Changes
	// Egress is all that is wrong with egress. Nil means unchanged.
	Egress []model.Problem
}

// New returns a Tracker without facts, for the node of the first Config. Both must be valid.
func New(services intent.Config, policies donottrack.Config) *Tracker {
	policies.NodeName = services.NodeName
	facts := store.New(services.NodeName)
	return &Tracker{
		facts:    facts,
		services: intent.NewReader(services, facts),
		policies: donottrack.NewReader(policies, facts),
	}
}

// Apply stores a Delta and returns what it changes.
func (t *Tracker) Apply(d model.Delta) Changes {
	t.facts.Apply(d)
	return t.changes(t.policies.Changes())
}

// SetNodeAddrs sets the node's own addresses as the kernel has them, complete each time.
func (t *Tracker) SetNodeAddrs(addrs []netip.Addr) Changes {
	t.services.SetNodeAddrs(addrs)
	t.policies.SetNodeAddrs(addrs)
	return t.changes(t.policies.Changes())
}

// SetTime sets the time for slow start, and returns what it changes.
func (t *Tracker) SetTime(now time.Time) Changes {
	if !t.services.SetTime(now) {
		return Changes{}
	}
	return t.servicesChanged()
}

// NextStep returns when SetTime changes something next.
func (t *Tracker) NextStep() (at time.Time, any bool) { return t.services.NextStep() }

// Observe takes what the kernel and the agent have seen since the last call: the outcomes of
// handshakes with all watched endpoints and the results of checks. It returns what they change.
func (t *Tracker) Observe(now time.Time, outcomes []outlier.Outcome, results []outlier.Result) Changes {
	if !t.outliers.Observe(now, outcomes, results) {
		return Changes{}
	}
	failing := map[intent.PortID][]intent.Failing{}
	for id, list := range t.outliers.Ejections() {
		for _, e := range list {
			failing[id] = append(failing[id], intent.Failing{Endpoint: e.Endpoint, Why: e.Why})
		}
	}
	t.services.SetFailing(failing)
	return t.servicesChanged()
}

// Checks returns the endpoints that the agent must connect to before Observe decides about them.
func (t *Tracker) Checks(now time.Time) []outlier.Check { return t.outliers.Checks(now) }

// changes passes on what policies mean for the bypass of netfilter, and adds what changed
// of Services.
func (t *Tracker) changes(c donottrack.Changes) Changes {
	if c.Traversal != nil {
		unknown := t.traversal.Unknown
		t.traversal = *c.Traversal
		t.traversal.Unknown = unknown
		t.services.SetTraversal(t.traversal)
	}
	changes := t.servicesChanged()
	changes.Policies = c
	return changes
}

// servicesChanged returns what changed of Services and of the node, and of egress, which depends on the node.
func (t *Tracker) servicesChanged() Changes {
	c := Changes{Services: t.services.Changes()}
	if ranges := t.egress.own.update(t.facts.ThisNode()); c.Services.Node == nil && !ranges {
		return c
	}
	c.Egress = t.decideEgress(t.services.Node())
	if n := t.services.ChangedNode(); n != nil { // it has the new plan of egress
		c.Services.Node = n
	}
	return c
}

// State returns the whole state of Services.
func (t *Tracker) State() intent.State { return t.services.State() }

// Services returns the part of the decisions that is about Services.
func (t *Tracker) Services() *intent.Tracker { return t.services }

// Policies returns the part of the decisions that is about do-not-track policies.
func (t *Tracker) Policies() *donottrack.Tracker { return t.policies }
