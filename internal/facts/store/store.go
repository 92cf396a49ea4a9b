// Package store keeps the facts about the cluster once, with the indexes that lead from an
// object to those that refer to it. A source's Delta goes in through Apply; each Reader
// turns what changed into decisions.
package store

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// Store holds the facts as the source last delivered them. One goroutine at a time uses a
// Store and its Readers. Readers must not change the objects.
type Store struct {
	node            string // this node
	nodes           table[string, model.Node]
	namespaces      table[string, model.Namespace]
	pods            table[model.Name, model.Pod]
	services        table[model.Name, model.Service]
	slices          sliceTable
	networkPolicies table[model.Name, model.NetworkPolicy]
	doNotTrack      table[string, model.DoNotTrackPolicy]

	policiesUnknown bool
	onUnknown       []func()

	podsAt     index[netip.Addr, model.Name]
	podsIn     Sets[string, model.Name]          // by namespace
	policiesIn map[string][]*model.NetworkPolicy // by namespace
}

// Reader has a function for each kind of object that its decisions depend on; nil for the
// others. Apply calls it for one object at a time, after the Store has the new object.
// before is nil if the object is new, now is nil if it was deleted.
type Reader struct {
	Node                   func(name string, before, now *model.Node)
	Namespace              func(name string, before, now *model.Namespace)
	Pod                    func(name model.Name, before, now *model.Pod)
	Service                func(name model.Name, before, now *model.Service)
	Slice                  func(name model.Name, before, now *model.EndpointSlice)
	NetworkPolicy          func(name model.Name, before, now *model.NetworkPolicy)
	DoNotTrackPolicy       func(name string, before, now *model.DoNotTrackPolicy)
	NetworkPoliciesUnknown func() // see model.Delta
}

// New returns a Store without facts. node is the name of this node.
func New(node string) *Store {
	st := &Store{
		node:       node,
		slices:     newSliceTable(node),
		podsAt:     index[netip.Addr, model.Name]{},
		podsIn:     Sets[string, model.Name]{},
		policiesIn: map[string][]*model.NetworkPolicy{},
	}
	st.pods.index = st.indexPod
	st.networkPolicies.index = st.indexNetworkPolicy
	return st
}

// Subscribe adds a Reader. It must come before the first Apply.
func (st *Store) Subscribe(r Reader) {
	st.nodes.subscribe(r.Node)
	st.namespaces.subscribe(r.Namespace)
	st.pods.subscribe(r.Pod)
	st.services.subscribe(r.Service)
	st.slices.subscribe(r.Slice)
	st.networkPolicies.subscribe(r.NetworkPolicy)
	st.doNotTrack.subscribe(r.DoNotTrackPolicy)
	if r.NetworkPoliciesUnknown != nil {
		st.onUnknown = append(st.onUnknown, r.NetworkPoliciesUnknown)
	}
}

// Apply stores a Delta. A Full one deletes every object that it does not name.
func (st *Store) Apply(d model.Delta) {
	// First: a policy's reader must see which Services the same Delta deletes.
	apply(d.DoNotTrackPolicies, st.doNotTrack.set)
	if d.Full {
		st.deleteUnnamed(d)
	}
	if unknown := d.NetworkPoliciesUnknown; unknown != nil || d.Full {
		st.policiesUnknown = unknown != nil && *unknown
		for _, read := range st.onUnknown {
			read()
		}
	}
	apply(d.Nodes, st.nodes.set)
	apply(d.NetworkPolicies, st.setNetworkPolicy)
	apply(d.Namespaces, st.namespaces.set)
	apply(d.Pods, st.pods.set)
	apply(d.Services, st.services.set)
	apply(d.Slices, st.slices.set)
}

func (st *Store) deleteUnnamed(d model.Delta) {
	deleteUnnamed(st.doNotTrack.objects, d.DoNotTrackPolicies, st.doNotTrack.set)
	deleteUnnamed(st.nodes.objects, d.Nodes, st.nodes.set)
	deleteUnnamed(st.networkPolicies.objects, d.NetworkPolicies, st.networkPolicies.set)
	deleteUnnamed(st.namespaces.objects, d.Namespaces, st.namespaces.set)
	deleteUnnamed(st.pods.objects, d.Pods, st.pods.set)
	deleteUnnamed(st.services.objects, d.Services, st.services.set)
	deleteUnnamed(st.slices.entries, d.Slices, st.slices.set)
}

// setNetworkPolicy stores a policy. One that restricts no traffic counts as deleted. The
// direction makes no difference: a bypass of netfilter would hide both from the program
// that enforces the policy.
func (st *Store) setNetworkPolicy(name model.Name, now *model.NetworkPolicy) {
	if now != nil && !now.Ingress && !now.Egress {
		now = nil
	}
	st.networkPolicies.set(name, now)
}

// ThisNode returns the Node of this node; nil if it is not known.
func (st *Store) ThisNode() *model.Node { return st.nodes.objects[st.node] }

// Nodes returns all Nodes.
func (st *Store) Nodes() iter.Seq2[string, *model.Node] { return maps.All(st.nodes.objects) }

// NodeNames returns the names of all Nodes, sorted.
func (st *Store) NodeNames() []string { return slices.Sorted(maps.Keys(st.nodes.objects)) }

// Namespace returns a Namespace; nil if it is not known.
func (st *Store) Namespace(name string) *model.Namespace { return st.namespaces.objects[name] }

// Pod returns a Pod; nil if it is not known.
func (st *Store) Pod(name model.Name) *model.Pod { return st.pods.objects[name] }

// Pods returns all Pods.
func (st *Store) Pods() iter.Seq2[model.Name, *model.Pod] { return maps.All(st.pods.objects) }

// PodsAt returns the Pods that have an address.
func (st *Store) PodsAt(a netip.Addr) []model.Name { return st.podsAt[a] }

// PodsIn returns the Pods of a namespace.
func (st *Store) PodsIn(namespace string) iter.Seq[model.Name] {
	return maps.Keys(st.podsIn[namespace])
}

// OnThisNode reports whether a Pod is known to be on this node.
func (st *Store) OnThisNode(pod model.Name) bool {
	p := st.Pod(pod)
	return p != nil && st.node != "" && p.Node == st.node
}

// Service returns a Service; nil if it is not known.
func (st *Store) Service(name model.Name) *model.Service { return st.services.objects[name] }

// Services returns all Services.
func (st *Store) Services() iter.Seq2[model.Name, *model.Service] {
	return maps.All(st.services.objects)
}

// NetworkPolicies returns those of a namespace that restrict traffic.
func (st *Store) NetworkPolicies(namespace string) []*model.NetworkPolicy {
	return st.policiesIn[namespace]
}

// AnyNetworkPolicy reports whether a NetworkPolicy restricts traffic.
func (st *Store) AnyNetworkPolicy() bool { return len(st.networkPolicies.objects) > 0 }

// NetworkPoliciesUnknown reports whether the source could not read all NetworkPolicies.
func (st *Store) NetworkPoliciesUnknown() bool { return st.policiesUnknown }
