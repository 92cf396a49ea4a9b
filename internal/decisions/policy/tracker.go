package policy

import (
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// Tracker knows the world as Deltas told it, and keeps what policies mean on this
// node up to date. While there is no policy it keeps facts and works out nothing.
// One goroutine at a time uses it.
type Tracker struct {
	cfg        Config
	policies   map[string]*policy
	namespaces map[string]*model.Namespace
	pods       map[model.Name]*model.Pod
	services   map[model.Name]*model.Service
	slices     map[model.Name]*model.EndpointSlice
	slicesOf   map[model.Name]map[model.Name]struct{} // of a Service
	node       *model.Node
	own        []netip.Addr // the node's own, sorted

	podsHere  map[netip.Addr][]model.Name // pods on this node, by address
	targetsOf map[netip.Addr][]Target     // of addresses that a policy selects
	wantedOf  map[netip.Addr][]*policy
	refusedOf map[netip.Addr][]Refusal
	used      map[string]int // Verdicts and Rules, by the targets that lead there
	holding   map[string]*rule
	nat       natIndex
	fading    natIndex // what is gone from nat, and may be written still
	outward   []*rule  // of all policies

	dirty      map[netip.Addr]struct{} // addresses to be judged again
	natStale   []*rule
	refusals   []Refusal
	guarded    map[netip.Addr]struct{}
	opened     map[Target]struct{}
	takingOver bool // see TakeOver
	silent     bool // of refusals, until Tell

	guarding bool // guarded changed
	opening  bool // opened did
	// What may be about connections that run: pods have other labels, or netfilter
	// translates less at an address.
	running bool
	lifted  map[netip.Addr]struct{}

	rules    ledger[string, *Rule]
	verdicts ledger[string, *Verdict]
	targets  ledger[Target, string]
	members  ledger[Member, bool]
	kept     ledger[Pair, bool]
}

// New returns a Tracker of an empty world.
func New(cfg Config) *Tracker {
	return &Tracker{
		cfg: cfg, policies: map[string]*policy{}, namespaces: map[string]*model.Namespace{},
		pods: map[model.Name]*model.Pod{}, services: map[model.Name]*model.Service{},
		slices: map[model.Name]*model.EndpointSlice{}, slicesOf: map[model.Name]map[model.Name]struct{}{},
		podsHere: map[netip.Addr][]model.Name{}, targetsOf: map[netip.Addr][]Target{},
		wantedOf: map[netip.Addr][]*policy{}, refusedOf: map[netip.Addr][]Refusal{}, used: map[string]int{}, holding: map[string]*rule{},
		nat: newNATIndex(), fading: newNATIndex(), dirty: map[netip.Addr]struct{}{}, guarded: map[netip.Addr]struct{}{}, opened: map[Target]struct{}{}, lifted: map[netip.Addr]struct{}{},
		rules: newLedger[string](sameRule), verdicts: newLedger[string](sameVerdict),
		targets: newLedger[Target](func(a, b string) bool { return a == b }),
		members: newLedger[Member](func(a, b bool) bool { return a == b }),
		kept:    newLedger[Pair](func(a, b bool) bool { return a == b }),
	}
}

// State is all that holds now.
func (t *Tracker) State() State {
	return State{Rules: t.rules.now, Verdicts: t.verdicts.now, Targets: t.targets.now, Members: t.members.now, Kept: t.kept.now}
}

// Refusals are what policies ask for and does not hold here, sorted.
func (t *Tracker) Refusals() []Refusal { return t.refusals }

// Policies returns the policies known, by name.
func (t *Tracker) Policies() map[string]*model.DoNotTrackPolicy {
	out := make(map[string]*model.DoNotTrackPolicy, len(t.policies))
	for name, p := range t.policies {
		out[name] = p.spec
	}
	return out
}

// Apply takes in a Delta and returns what it changes.
func (t *Tracker) Apply(d model.Delta) Changes {
	if d.Full {
		forget(d.DoNotTrackPolicies, t.policies, t.takePolicy)
		forget(d.Namespaces, t.namespaces, t.takeNamespace)
		forget(d.Pods, t.pods, t.takePod)
		forget(d.Services, t.services, t.takeService)
		forget(d.Slices, t.slices, t.takeSlice)
		if d.Nodes[t.cfg.NodeName] == nil {
			t.takeNode(nil)
		}
	}
	take(d.Services, t.takeService)
	take(d.Slices, t.takeSlice)
	take(d.Namespaces, t.takeNamespace)
	take(d.Pods, t.takePod)
	if n, ok := d.Nodes[t.cfg.NodeName]; ok {
		t.takeNode(n)
	}
	take(d.DoNotTrackPolicies, t.takePolicy)
	return t.settle()
}

// SetNodeAddrs tells the node's own addresses as the kernel has them, all of them
// each time.
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
	return t.settle()
}

func (t *Tracker) isOwn(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(t.own, a, netip.Addr.Compare)
	return found
}

// forget takes out what a full Delta does not name.
func forget[K comparable, M, V any](named map[K]*M, known map[K]V, take func(K, *M)) {
	for name := range known {
		if named[name] == nil {
			take(name, nil)
		}
	}
}

func take[K comparable, M any](named map[K]*M, take func(K, *M)) {
	for name, m := range named {
		take(name, m)
	}
}

// settle judges every address again that was touched.
func (t *Tracker) settle() Changes {
	refused := false
	for len(t.natStale)+len(t.dirty) > 0 { // to judge makes peers known, which may be of Services
		t.renewNAT()
		refused = refused || len(t.dirty) > 0
		for a := range t.dirty {
			t.judge(a)
		}
		clear(t.dirty)
	}
	c := Changes{Rules: t.rules.changes(), Verdicts: t.verdicts.changes(), Targets: t.targets.changes(), Members: t.members.changes()}
	c.Running = len(c.Rules)+len(c.Verdicts) > 0 || t.running && !c.Empty() ||
		slices.ContainsFunc(c.Targets, func(ch Change[Target, string]) bool {
			_, lifted := t.lifted[ch.Key.Addr]
			return lifted && ch.Want != "" && !t.verdicts.now[ch.Want].Track
		})
	t.running = false
	clear(t.lifted)
	if t.guarding {
		t.guarding = false
		c.Guarded = slices.AppendSeq([]netip.Addr{}, maps.Keys(t.guarded))
		slices.SortFunc(c.Guarded, netip.Addr.Compare)
	}
	if t.opening {
		t.opening = false
		c.Opened = slices.AppendSeq([]Target{}, maps.Keys(t.opened))
		slices.SortFunc(c.Opened, Target.Compare)
	}
	if refused && !t.silent {
		if now := t.collectRefusals(); !slices.Equal(now, t.refusals) {
			t.refusals, c.Refusals = now, now
		}
	}
	return c
}

// renewNAT looks again for Services in outward rules, and has their policies judged
// again where that is news.
func (t *Tracker) renewNAT() {
	stale := t.natStale
	t.natStale = nil
	for _, r := range stale {
		r.natStale = false
		if was := r.nat; was != t.natOf(r) {
			t.touchPolicy(r.Policy)
		}
	}
}

func (t *Tracker) natOf(r *rule) obstacle {
	r.nat = obstacle{}
	if !r.Track && r.outward() && t.policies[r.Policy] != nil {
		r.nat = t.lookForNAT(r)
	}
	return r.nat
}
