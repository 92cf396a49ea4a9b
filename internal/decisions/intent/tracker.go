package intent

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// Tracker keeps the decisions about the facts of a Store up to date. Its work for a change
// follows the change: indexes lead from each object to the Services whose decision depends
// on it.
//
//	Delta ──> Store (facts, indexes) ──> dirty Services ──> decide ──> compare ──> Changes
//
// One goroutine at a time uses a Tracker and its Store.
type Tracker struct {
	cfg        Config
	facts      *store.Store
	doNotTrack doNotTrack // see SetTraversal
	own        ownNode
	ranges     podRanges

	addresses    addressTable
	conflictable store.Sets[netip.Addr, *service] // by externalIP and LoadBalancer IP
	services     map[model.Name]*service
	served       int                            // Services with a port
	most         budget                         // of what Services ask for at most
	budget       budget                         // of what they ask for as decided
	problemsOf   map[model.Name][]model.Problem // of Services, as decided
	problems     []model.Problem                // of all Services and the node, sorted

	now      time.Time              // see SetTime
	starting map[*service]time.Time // when a share grows next
	nextStep time.Time              // of the Service that is being decided; zero: no share grows

	redirecting store.Sets[model.Name, *service] // by the Service in LocalRedirectAnnotation

	podsWithHostPorts map[*service][]*store.Slice // the Store has those of Services: see hostports.go

	watched map[*service]struct{} // those with outlier ejection
	failing map[PortID][]Failing  // see SetFailing

	dirty      []*service     // to decide again
	slices     []*store.Slice // buffers of one decision
	nearSlices []*store.Slice
	addrSlices addrSlices // of one call of Changes
	// selectedPods says of pods whether a NetworkPolicy selects them, in one call of Changes.
	selectedPods map[model.Name]bool
	candidates   []candidate
	near         []candidate
	healthy      []netip.Addr
}

// service is a Service, or a placeholder for one that has slices only.
type service struct {
	name model.Name
	spec *model.Service // nil while there is none that this agent serves
	plan plan

	// next is its spec with the next call of Changes; nil: deleted. demand is what that asks for at
	// most. With portless it does not fit, and the plan has no ports.
	next     *nextPlan
	demand   demand
	portless bool

	ports   []*ServicePort // that are served, sorted by ID
	most    entries        // that it asks for at most
	entries entries        // that it asks for, as decided
	health  *HealthCheck   // nil: none
	dirty   bool

	starts starts // nil: no slow start
}

// healthCheck returns the health check as decided; Port 0: none.
func (e *service) healthCheck() HealthCheck {
	if e.health == nil {
		return HealthCheck{Service: e.name}
	}
	return *e.health
}

// New returns a Tracker with a Store of its own, for tools and tests: the agent has one
// Store for all decisions (package decisions). The Config must be valid.
func New(cfg Config) *Tracker { return NewReader(cfg, store.New(cfg.NodeName)) }

// NewReader returns a Tracker that reads a Store, which has no facts yet.
func NewReader(cfg Config, facts *store.Store) *Tracker {
	cfg.NodePortAddresses = canonicalPrefixes(cfg.NodePortAddresses)
	cfg.ClusterCIDRs = canonicalPrefixes(cfg.ClusterCIDRs)
	t := &Tracker{
		cfg:          cfg,
		facts:        facts,
		own:          newOwnNode(),
		ranges:       newPodRanges(cfg.ClusterCIDRs),
		addresses:    newAddressTable(),
		most:         newBudget(cfg.Capacity, func(e *service) *entries { return &e.most }),
		budget:       newBudget(cfg.Capacity, func(e *service) *entries { return &e.entries }),
		conflictable: store.Sets[netip.Addr, *service]{},
		redirecting:  store.Sets[model.Name, *service]{},
		services:     map[model.Name]*service{},
		problemsOf:   map[model.Name][]model.Problem{},
		starting:     map[*service]time.Time{},
		watched:      map[*service]struct{}{},

		podsWithHostPorts: map[*service][]*store.Slice{},
	}
	t.own.node = t.describeNode()
	facts.Subscribe(store.Reader{
		Node: t.onNode, NetworkPolicy: t.onNetworkPolicy, NetworkPoliciesUnknown: t.onPoliciesUnknown,
		Pod: t.onPod, Service: t.onService, Slice: t.onSlice,
	})
	return t
}

// Apply stores a Delta and returns what it changes.
func (t *Tracker) Apply(d model.Delta) Changes {
	t.facts.Apply(d)
	return t.Changes()
}

// SetNodeAddrs sets the node's own addresses as the kernel has them, complete each time.
// It ignores loopback and link-local addresses.
func (t *Tracker) SetNodeAddrs(addrs []netip.Addr) {
	before := t.own.kernel
	t.own.kernel = slices.SortedFunc(slices.Values(addrs), netip.Addr.Compare)
	t.markClusterIPsDirty(differing(before, t.own.kernel))
	t.readdress()
}

// Node returns the Node as last decided.
func (t *Tracker) Node() Node { return t.own.node }

// SetEgress sets what happens to packets of this node's pods to the outside.
func (t *Tracker) SetEgress(plan egress.Plan) {
	t.own.stale = t.own.stale || !plan.Equal(t.own.egress)
	t.own.egress = plan
}

// State returns the whole state, sorted.
func (t *Tracker) State() State {
	s := State{Node: t.own.node}
	for _, e := range t.services {
		s.Ports = append(s.Ports, e.ports...)
	}
	slices.SortFunc(s.Ports, comparePorts)
	return s
}

// markDirty makes Changes decide a Service again, and those that redirect to it.
func (t *Tracker) markDirty(e *service) {
	if e.dirty {
		return
	}
	e.dirty = true
	t.dirty = append(t.dirty, e)
	for other := range t.redirecting[e.name] {
		t.markDirty(other)
	}
}

// markSlicesDirty makes Changes decide the Services of slices again.
func (t *Tracker) markSlicesDirty(list []*store.Slice) {
	for _, s := range list {
		t.markDirty(t.serviceNamed(s.Object.Service))
	}
}

// markEndpointDirty makes Changes decide again what has an address as an endpoint.
func (t *Tracker) markEndpointDirty(a netip.Addr) {
	t.markSlicesDirty(t.facts.SlicesAt(a))
	for e, list := range t.podsWithHostPorts {
		if slices.ContainsFunc(list, func(s *store.Slice) bool { return endpointAt(s, a) != nil }) {
			t.markDirty(e)
		}
	}
}

// Changes decides everything that facts and settings have changed since the last call, and
// returns what is different. The first call always returns the Node.
func (t *Tracker) Changes() Changes {
	var c Changes
	t.selectedPods = map[model.Name]bool{}
	problemsChanged := t.checkNode()
	t.divideMost()
	t.planDirty()
	c.Moves = t.addresses.resolve()
	if t.decideDirty(&c) {
		problemsChanged = true
	}
	clear(t.dirty)
	t.dirty, t.addrSlices = t.dirty[:0], addrSlices{}

	slices.SortFunc(c.Upserts, comparePorts)
	slices.SortFunc(c.Deletes, PortID.Compare)
	slices.SortFunc(c.HealthChecks, compareHealthChecks)
	slices.SortFunc(c.Moves, compareMoves)
	if problemsChanged {
		c.Problems = t.collectProblems()
	}
	c.Node = t.ChangedNode()
	return c
}

// decidedService is what was decided about a Service, before Capacity counts.
type decidedService struct {
	service  *service
	ports    []*ServicePort // nil if postponed
	health   HealthCheck
	problems []model.Problem
	slices   int
	// postponed says that the Service is decided again, alone, if the budget has room for it.
	postponed bool
}

// decideDirty decides the dirty Services, and those that the budget now treats in another way.
// It adds to c what that changes, and reports whether Problems have changed. Until the budget is
// divided, it holds the new ports of at most half of the capacity, and of one Service more: a
// namespace may ask for any number that do not fit.
func (t *Tracker) decideDirty(c *Changes) (problemsChanged bool) {
	decided := make([]decidedService, 0, len(t.dirty))
	var held entries
	for _, e := range t.dirty {
		before := e.starts
		d := t.decideService(e)
		demand := t.cfg.entriesOf(d.ports)
		t.budget.set(e, demand)
		if !t.budget.hold(&held, demand) {
			d.ports, d.postponed, e.starts = nil, true, before
		}
		decided = append(decided, d)
	}
	changed := t.budget.divide(t.services)
	changed = slices.DeleteFunc(changed, func(e *service) bool { return e.dirty })
	for i := range decided {
		d := &decided[i]
		if _, refused := t.budget.refused[d.service]; d.postponed && !refused {
			changed = append(changed, d.service)
			continue
		}
		problemsChanged = t.commit(d, c) || problemsChanged
		d.ports = nil
	}
	for _, e := range changed {
		d := t.decideService(e)
		problemsChanged = t.commit(&d, c) || problemsChanged
	}
	return problemsChanged
}

// divideMost divides the budget of what Services ask for at most, and marks those dirty that it
// now treats in another way.
func (t *Tracker) divideMost() {
	for _, e := range t.dirty {
		t.most.set(e, t.mostEntries(e, t.slicesOf(e)))
	}
	for _, e := range t.most.divide(t.services) {
		t.markDirty(e)
	}
}

func (t *Tracker) decideService(e *service) decidedService {
	of := t.slicesOf(e)
	for _, s := range of {
		t.updateSlicePods(s)
	}
	d := decidedService{service: e, slices: len(of)}
	if problem, refused := t.most.problem(e); refused {
		t.beginStarts(e)
		d.problems = append(append(d.problems, problem), e.plan.problems...)
		d.health, d.problems = t.decideHealth(e, nil, d.problems)
		d.problems = capProblems(e.name, d.problems)
	} else {
		d.ports, d.health, d.problems = t.decide(e, of)
	}
	t.noteSteps(e)
	t.noteWatched(e)
	return d
}

// commit makes a decision the present one of its Service, and adds to c what that changes. It
// reports whether the Service's Problems have changed.
func (t *Tracker) commit(d *decidedService, c *Changes) (problemsChanged bool) {
	e := d.service
	if problem, refused := t.budget.problem(e); refused {
		d.ports, d.health.Endpoints, e.starts = nil, 0, nil
		d.problems = append([]model.Problem{problem}, d.problems...)
	}
	had := len(e.ports) > 0
	e.ports = comparedWith(e.ports, d.ports, c)
	if has := len(e.ports) > 0; has && !had {
		t.served++
	} else if had && !has {
		t.served--
	}
	if d.health != e.healthCheck() {
		if e.health = nil; d.health.Port != 0 {
			kept := d.health
			e.health = &kept
		}
		c.HealthChecks = append(c.HealthChecks, d.health)
	}
	if !slices.Equal(d.problems, t.problemsOf[e.name]) {
		if t.problemsOf[e.name] = d.problems; len(d.problems) == 0 {
			delete(t.problemsOf, e.name)
		}
		problemsChanged = true
	}
	e.dirty = false
	if e.spec == nil && d.slices == 0 {
		delete(t.services, e.name)
	}
	return problemsChanged
}

// slicesOf returns the slices of a Service, in a buffer for one decision.
func (t *Tracker) slicesOf(e *service) []*store.Slice {
	if list := t.podsWithHostPorts[e]; list != nil {
		return list
	}
	t.slices = t.facts.SlicesOf(e.name, t.slices)
	return t.slices
}

// collectProblems updates the list of all Problems. It returns nil if the list is
// unchanged, and an empty list after the last Problem was resolved.
func (t *Tracker) collectProblems() []model.Problem {
	all := []model.Problem{}
	if p := t.own.problem; p != nil {
		all = append(all, *p)
	}
	for _, problems := range t.problemsOf {
		all = append(all, problems...)
	}
	slices.SortFunc(all, model.Problem.Compare)
	all = slices.Compact(all)
	if slices.Equal(all, t.problems) {
		return nil
	}
	t.problems = all
	return slices.Clone(all)
}

// comparedWith adds to c the difference between the old and the new ports of a Service,
// both sorted. It returns the ports to keep: the old value where nothing changed.
func comparedWith(before, after []*ServicePort, c *Changes) []*ServicePort {
	i := 0
	for n, sp := range after {
		for i < len(before) && before[i].ID.Compare(sp.ID) < 0 {
			c.Deletes = append(c.Deletes, before[i].ID)
			i++
		}
		if i < len(before) && before[i].ID == sp.ID {
			if sp.Equal(before[i]) {
				after[n] = before[i]
				i++
				continue
			}
			i++
		}
		c.Upserts = append(c.Upserts, sp)
	}
	for ; i < len(before); i++ {
		c.Deletes = append(c.Deletes, before[i].ID)
	}
	return after
}

// Equal compares two decisions without the time that caused them.
func (p *ServicePort) Equal(q *ServicePort) bool {
	return p.ID == q.ID && p.Affinity == q.Affinity && p.Balance == q.Balance && p.DSR == q.DSR && p.SYNLimit == q.SYNLimit &&
		p.Helper == q.Helper && p.OfFTP == q.OfFTP &&
		slices.Equal(p.Endpoints, q.Endpoints) && slices.Equal(p.Weights, q.Weights) && slices.Equal(p.Table, q.Table) &&
		slices.Equal(p.ServingUnselected, q.ServingUnselected) && slices.Equal(p.Lingering, q.Lingering) &&
		slices.EqualFunc(p.Frontends, q.Frontends, sameFrontend)
}

func sameFrontend(a, b Frontend) bool {
	return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port &&
		a.ExternalRoute == b.ExternalRoute && a.InternalRoute == b.InternalRoute &&
		(a.SourceRanges == nil) == (b.SourceRanges == nil) &&
		slices.Equal(a.SourceRanges, b.SourceRanges)
}

func comparePorts(a, b *ServicePort) int { return a.ID.Compare(b.ID) }

func compareHealthChecks(a, b HealthCheck) int { return a.Service.Compare(b.Service) }

func compareMoves(a, b Move) int { return cmp.Or(a.From.Compare(b.From), a.To.Compare(b.To)) }
