package intent

import (
	"cmp"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// Tracker stores the facts of Deltas and keeps the decisions about them up to date. Its
// work for a change follows the change: indexes lead from each object to the Services
// whose decision depends on it.
//
//	Delta ──> store (facts, indexes) ──> dirty Services ──> decide ──> compare ──> Changes
//
// One goroutine at a time uses a Tracker.
type Tracker struct {
	cfg   Config
	store store
	own   ownNode

	addresses    addressTable
	conflictable map[netip.Addr]map[*service]struct{} // by externalIP and LoadBalancer IP
	services     map[model.Name]*service
	withProblems map[model.Name]struct{} // Services with problems
	problems     []model.Problem         // of all Services and the node, sorted

	dirty      []*service // to decide again
	candidates []candidate
	healthy    []netip.Addr
}

// service is a Service, or a placeholder for one whose slices came first.
type service struct {
	name   model.Name
	spec   *model.Service // nil while there is none
	slices []*slice       // sorted by name
	plan   plan

	ports    []*ServicePort // as decided, sorted by ID
	health   HealthCheck    // Port 0: none
	problems []model.Problem
	dirty    bool
}

// New returns a Tracker without facts. The Config must be valid.
func New(cfg Config) *Tracker {
	cfg.NodePortAddresses = canonicalPrefixes(cfg.NodePortAddresses)
	cfg.ClusterCIDRs = canonicalPrefixes(cfg.ClusterCIDRs)
	t := &Tracker{
		cfg:          cfg,
		store:        newStore(cfg.NodeName),
		own:          newOwnNode(),
		addresses:    newAddressTable(),
		conflictable: map[netip.Addr]map[*service]struct{}{},
		services:     map[model.Name]*service{},
		withProblems: map[model.Name]struct{}{},
	}
	t.own.node = t.describeNode()
	return t
}

// Apply stores the facts of a Delta and returns what they change. The first call always
// returns the Node.
func (t *Tracker) Apply(d model.Delta) Changes {
	if d.Full {
		t.forget(d)
		t.onPoliciesUnknownUpdate(false)
	}
	if t.cfg.IgnoreNetworkPolicies {
		d.NetworkPolicies, d.PoliciesUnknown = nil, nil
	}
	if d.PoliciesUnknown != nil {
		t.onPoliciesUnknownUpdate(*d.PoliciesUnknown)
	}
	// Nodes, policies and pods come first only so that each Service is decided once. The
	// result does not depend on the order.
	for name, n := range d.Nodes {
		t.onNodeUpdate(name, n)
	}
	for name, p := range d.NetworkPolicies {
		t.onNetworkPolicyUpdate(name, p)
	}
	for name, p := range d.Pods {
		t.onPodUpdate(name, p)
	}
	for name, s := range d.Services {
		t.onServiceUpdate(name, s)
	}
	for name, s := range d.Slices {
		t.onSliceUpdate(name, s)
	}
	return t.recompute()
}

// SetNodeAddrs sets the node's own addresses as the kernel has them, complete each time.
// It ignores loopback and link-local addresses.
func (t *Tracker) SetNodeAddrs(addrs []netip.Addr) Changes {
	t.own.kernel = slices.Clone(addrs)
	t.readdress()
	return t.recompute()
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

// markDirty makes recompute decide a Service again.
func (t *Tracker) markDirty(e *service) {
	if !e.dirty {
		e.dirty = true
		t.dirty = append(t.dirty, e)
	}
}

// recompute decides all dirty Services and returns what changed.
func (t *Tracker) recompute() Changes {
	var c Changes
	complained := t.checkNode()
	t.addresses.resolve()
	for _, e := range t.dirty {
		for _, s := range e.slices {
			t.updateSlicePods(s)
		}
		ports, health, problems := t.decide(e)
		e.ports = comparedWith(e.ports, ports, &c)
		if health != e.health {
			e.health = health
			c.HealthChecks = append(c.HealthChecks, health)
		}
		if !slices.Equal(problems, e.problems) {
			e.problems = problems
			t.setHasProblems(e)
			complained = true
		}
		e.dirty = false
		if e.spec == nil && len(e.slices) == 0 {
			delete(t.services, e.name)
		}
	}
	clear(t.dirty)
	t.dirty = t.dirty[:0]

	slices.SortFunc(c.Upserts, comparePorts)
	slices.SortFunc(c.Deletes, PortID.Compare)
	slices.SortFunc(c.HealthChecks, compareHealthChecks)
	if complained {
		c.Problems = t.collectProblems()
	}
	c.Node = t.changedNode()
	return c
}

func (t *Tracker) setHasProblems(e *service) {
	if len(e.problems) > 0 {
		t.withProblems[e.name] = struct{}{}
	} else {
		delete(t.withProblems, e.name)
	}
}

// collectProblems updates the list of all Problems. It returns nil if the list is
// unchanged, and an empty list after the last Problem was resolved.
func (t *Tracker) collectProblems() []model.Problem {
	all := []model.Problem{}
	if p := t.own.problem; p != nil {
		all = append(all, *p)
	}
	for name := range t.withProblems {
		all = append(all, t.services[name].problems...)
	}
	slices.SortFunc(all, compareProblems)
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
			if samePort(before[i], sp) {
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

// samePort compares two decisions without the time that caused them.
func samePort(a, b *ServicePort) bool {
	return a.ID == b.ID && a.Affinity == b.Affinity && a.Helper == b.Helper && a.OfFTP == b.OfFTP &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.Equal(a.ServingUnselected, b.ServingUnselected) &&
		slices.EqualFunc(a.Frontends, b.Frontends, sameFrontend)
}

func sameFrontend(a, b Frontend) bool {
	return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port &&
		a.ExternalRoute == b.ExternalRoute && a.InternalRoute == b.InternalRoute &&
		(a.SourceRanges == nil) == (b.SourceRanges == nil) &&
		slices.Equal(a.SourceRanges, b.SourceRanges)
}

func comparePorts(a, b *ServicePort) int { return a.ID.Compare(b.ID) }

func compareHealthChecks(a, b HealthCheck) int { return compareNames(a.Service, b.Service) }

func compareNames(a, b model.Name) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
}

func compareProblems(a, b model.Problem) int {
	return cmp.Or(cmp.Compare(a.Where, b.Where), cmp.Compare(a.Field, b.Field), cmp.Compare(a.What, b.What))
}
