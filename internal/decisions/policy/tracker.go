package policy

import (
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// Tracker stores the facts of Deltas and keeps the effect of policies on this node up to
// date. While there is no policy it only stores facts. One goroutine at a time uses it.
type Tracker struct {
	cfg        Config
	policies   map[string]*policy
	namespaces map[string]*model.Namespace
	pods       map[model.Name]*model.Pod
	services   map[model.Name]*model.Service
	slices     map[model.Name]*model.EndpointSlice
	slicesOf   map[model.Name]map[model.Name]struct{} // of a Service
	node       *model.Node
	own        []netip.Addr // the node's own addresses, sorted

	podsOnNode     map[netip.Addr][]model.Name // pods on this node, by address
	targetsOf      map[netip.Addr][]Target     // of addresses that a policy selects
	wantedOf       map[netip.Addr][]*policy
	refusedOf      map[netip.Addr][]Refusal
	used           map[string]int // number of targets of each Verdict and Rule
	holding        map[string]*rule
	nat            natIndex
	pendingRemoval natIndex // entries deleted from nat that the kernel may still have
	outgoing       []*rule  // of all policies

	dirty        map[netip.Addr]struct{} // addresses to recompute
	natStale     []*rule
	refusals     []Refusal
	hasDenyRule  map[netip.Addr]struct{}
	allowsAny    map[Target]struct{}
	takingOver   bool // see StartTakeover
	holdRefusals bool // until ReportRefusals

	hasDenyRuleChanged bool // hasDenyRule changed
	allowsAnyChanged   bool // allowsAny changed
	// Changes that may affect running connections: labels of pods changed, or netfilter
	// translates less at an address.
	mayAffectRunning bool
	resolved         map[netip.Addr]struct{}

	rules             changeSet[string, *Rule]
	verdicts          changeSet[string, *Verdict]
	targets           changeSet[Target, string]
	members           changeSet[Member, bool]
	trackedExceptions changeSet[Pair, bool]
}

// New returns a Tracker without facts.
func New(cfg Config) *Tracker {
	return &Tracker{
		cfg: cfg, policies: map[string]*policy{}, namespaces: map[string]*model.Namespace{},
		pods: map[model.Name]*model.Pod{}, services: map[model.Name]*model.Service{},
		slices: map[model.Name]*model.EndpointSlice{}, slicesOf: map[model.Name]map[model.Name]struct{}{},
		podsOnNode: map[netip.Addr][]model.Name{}, targetsOf: map[netip.Addr][]Target{},
		wantedOf: map[netip.Addr][]*policy{}, refusedOf: map[netip.Addr][]Refusal{}, used: map[string]int{}, holding: map[string]*rule{},
		nat: newNATIndex(), pendingRemoval: newNATIndex(), dirty: map[netip.Addr]struct{}{}, hasDenyRule: map[netip.Addr]struct{}{}, allowsAny: map[Target]struct{}{}, resolved: map[netip.Addr]struct{}{},
		rules: newChangeSet[string](sameRule), verdicts: newChangeSet[string](sameVerdict),
		targets:           newChangeSet[Target](func(a, b string) bool { return a == b }),
		members:           newChangeSet[Member](func(a, b bool) bool { return a == b }),
		trackedExceptions: newChangeSet[Pair](func(a, b bool) bool { return a == b }),
	}
}

// State returns the whole state.
func (t *Tracker) State() State {
	return State{Rules: t.rules.now, Verdicts: t.verdicts.now, Targets: t.targets.now, Members: t.members.now, Tracked: t.trackedExceptions.now}
}

// Refusals returns the parts of policies that do not hold on this node, sorted.
func (t *Tracker) Refusals() []Refusal { return t.refusals }

// Policies returns the known policies by name.
func (t *Tracker) Policies() map[string]*model.DoNotTrackPolicy {
	out := make(map[string]*model.DoNotTrackPolicy, len(t.policies))
	for name, p := range t.policies {
		out[name] = p.spec
	}
	return out
}

// Apply stores the facts of a Delta and returns what they change.
func (t *Tracker) Apply(d model.Delta) Changes {
	if d.Full {
		removeUnnamed(d.DoNotTrackPolicies, t.policies, t.onPolicyUpdate)
		removeUnnamed(d.Namespaces, t.namespaces, t.onNamespaceUpdate)
		removeUnnamed(d.Pods, t.pods, t.onPodUpdate)
		removeUnnamed(d.Services, t.services, t.onServiceUpdate)
		removeUnnamed(d.Slices, t.slices, t.onSliceUpdate)
		if d.Nodes[t.cfg.NodeName] == nil {
			t.onNodeUpdate(nil)
		}
	}
	each(d.Services, t.onServiceUpdate)
	each(d.Slices, t.onSliceUpdate)
	each(d.Namespaces, t.onNamespaceUpdate)
	each(d.Pods, t.onPodUpdate)
	if n, ok := d.Nodes[t.cfg.NodeName]; ok {
		t.onNodeUpdate(n)
	}
	each(d.DoNotTrackPolicies, t.onPolicyUpdate)
	return t.recompute()
}

// SetNodeAddrs sets the node's own addresses as the kernel has them, complete each time.
func (t *Tracker) SetNodeAddrs(addrs []netip.Addr) Changes {
	var own []netip.Addr
	for _, a := range addrs {
		if a = a.Unmap().WithZone(""); a.IsValid() && !a.IsLoopback() && !a.IsLinkLocalUnicast() {
			own = append(own, a)
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	own = slices.Compact(own)
	for _, a := range slices.Concat(t.own, own) {
		t.dirty[a] = struct{}{}
	}
	t.own = own
	return t.recompute()
}

func (t *Tracker) isOwn(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(t.own, a, netip.Addr.Compare)
	return found
}

// removeUnnamed deletes what a full Delta does not name.
func removeUnnamed[K comparable, M, V any](named map[K]*M, known map[K]V, take func(K, *M)) {
	for name := range known {
		if named[name] == nil {
			take(name, nil)
		}
	}
}

func each[K comparable, M any](named map[K]*M, take func(K, *M)) {
	for name, m := range named {
		take(name, m)
	}
}

// recompute computes the state of every dirty address, and returns what changed.
func (t *Tracker) recompute() Changes {
	refused := false
	for len(t.natStale)+len(t.dirty) > 0 { // recomputing an address adds peers, which may belong to Services
		t.renewNAT()
		refused = refused || len(t.dirty) > 0
		for a := range t.dirty {
			t.recomputeAddress(a)
		}
		clear(t.dirty)
	}
	c := Changes{Rules: t.rules.changes(), Verdicts: t.verdicts.changes(), Targets: t.targets.changes(), Members: t.members.changes()}
	c.MayAffectRunning = len(c.Rules)+len(c.Verdicts) > 0 || t.mayAffectRunning && !c.Empty() ||
		slices.ContainsFunc(c.Targets, func(ch Change[Target, string]) bool {
			_, lifted := t.resolved[ch.Key.Addr]
			return lifted && ch.Want != "" && !t.verdicts.now[ch.Want].Track
		})
	t.mayAffectRunning = false
	clear(t.resolved)
	if t.hasDenyRuleChanged {
		t.hasDenyRuleChanged = false
		c.DenyRulePods = slices.AppendSeq([]netip.Addr{}, maps.Keys(t.hasDenyRule))
		slices.SortFunc(c.DenyRulePods, netip.Addr.Compare)
	}
	if t.allowsAnyChanged {
		t.allowsAnyChanged = false
		c.AllowsAny = slices.AppendSeq([]Target{}, maps.Keys(t.allowsAny))
		slices.SortFunc(c.AllowsAny, Target.Compare)
	}
	if refused && !t.holdRefusals {
		if now := t.collectRefusals(); !slices.Equal(now, t.refusals) {
			t.refusals, c.Refusals = now, now
		}
	}
	return c
}

// renewNAT searches for Services among the peers of dirty outgoing rules, and marks their
// policies dirty where the result changed.
func (t *Tracker) renewNAT() {
	stale := t.natStale
	t.natStale = nil
	for _, r := range stale {
		r.natStale = false
		if was := r.nat; was != t.natOf(r) {
			t.markPolicyDirty(r.Policy)
		}
	}
}

func (t *Tracker) natOf(r *rule) obstacle {
	r.nat = obstacle{}
	if !r.Track && r.outgoing() && t.policies[r.Policy] != nil {
		r.nat = t.lookForNAT(r)
	}
	return r.nat
}
