package donottrack

import (
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// Tracker keeps the effect of policies on this node up to date with the facts of a Store.
// While there is no policy it does nothing. One goroutine at a time uses it and its Store.
type Tracker struct {
	cfg      Config
	facts    *store.Store
	policies map[string]*policy
	own      []netip.Addr // the node's own addresses, sorted

	podsOnNode     map[model.Name]struct{}
	targetsOf      map[netip.Addr][]Target // of addresses that a policy selects
	wantedOf       map[netip.Addr][]*policy
	refusedOf      map[netip.Addr][]Refusal
	used           map[string]int // number of targets of each Verdict and Rule
	installed      map[string]*rule
	nat            natIndex
	pendingRemoval natIndex // entries deleted from nat that the kernel may still have
	outgoing       []*rule  // of all policies
	rulePorts      portSet  // of all policies

	dirty        map[netip.Addr]struct{} // addresses to recompute
	natStale     []*rule
	refusals     []Refusal
	hasDenyRule  map[netip.Addr]struct{}
	allowsAny    map[Target]struct{}
	takingOver   bool // see StartTakeover
	holdRefusals bool // until ReportRefusals

	traversalChanged bool // hasDenyRule or allowsAny changed
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

// New returns a Tracker with a Store of its own, for tools and tests: the agent has one
// Store for all decisions (package decisions).
func New(cfg Config) *Tracker { return NewReader(cfg, store.New(cfg.NodeName)) }

// NewReader returns a Tracker that reads a Store, which has no facts yet.
func NewReader(cfg Config, facts *store.Store) *Tracker {
	t := &Tracker{
		cfg: cfg, facts: facts, policies: map[string]*policy{},
		podsOnNode: map[model.Name]struct{}{}, targetsOf: map[netip.Addr][]Target{},
		wantedOf: map[netip.Addr][]*policy{}, refusedOf: map[netip.Addr][]Refusal{}, used: map[string]int{}, installed: map[string]*rule{},
		nat: newNATIndex(), pendingRemoval: newNATIndex(), dirty: map[netip.Addr]struct{}{}, hasDenyRule: map[netip.Addr]struct{}{},
		allowsAny: map[Target]struct{}{}, resolved: map[netip.Addr]struct{}{},
		rules: newChangeSet[string](sameRule), verdicts: newChangeSet[string](sameVerdict),
		targets:           newChangeSet[Target](func(a, b string) bool { return a == b }),
		members:           newChangeSet[Member](func(a, b bool) bool { return a == b }),
		trackedExceptions: newChangeSet[Pair](func(a, b bool) bool { return a == b }),
	}
	facts.Subscribe(store.Reader{
		Node: t.onNode, Namespace: t.onNamespace, Pod: t.onPod,
		Service: t.onService, Slice: t.onSlice, DoNotTrackPolicy: t.onPolicy,
	})
	return t
}

// State returns the whole state.
func (t *Tracker) State() State {
	return State{Rules: t.rules.now, Verdicts: t.verdicts.now, Targets: t.targets.now, Members: t.members.now,
		Tracked: t.trackedExceptions.now}
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

// Apply stores a Delta and returns what it changes.
func (t *Tracker) Apply(d model.Delta) Changes {
	t.facts.Apply(d)
	return t.Changes()
}

// SetNodeAddrs sets the node's own addresses as the kernel has them, complete each time.
func (t *Tracker) SetNodeAddrs(addrs []netip.Addr) {
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
}

func (t *Tracker) isOwn(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(t.own, a, netip.Addr.Compare)
	return found
}

// Changes computes the state of every dirty address, and returns what is different since
// the last call.
func (t *Tracker) Changes() Changes {
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
	if t.traversalChanged {
		t.traversalChanged = false
		c.Traversal = &Traversal{
			DenyRulePods: slices.SortedFunc(maps.Keys(t.hasDenyRule), netip.Addr.Compare),
			AllowsAny:    slices.SortedFunc(maps.Keys(t.allowsAny), Target.Compare),
		}
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
