package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// store holds the facts, and the indexes that lead from a pod, an address or a
// namespace to the slices that depend on it.
type store struct {
	node     string // this node
	slices   map[model.Name]*slice
	nodes    map[string]*model.Node
	pods     map[model.Name]*model.Pod
	policies map[string]policySet // by namespace; never an empty set

	slicesOfPod  index[model.Name] // slices with an endpoint that names the pod
	slicesOfAddr index[netip.Addr] // slices with an endpoint of the address
	slicesOfNS   map[string]map[*slice]struct{}
	slicesOnNode map[*slice]struct{} // slices with an endpoint that is or may be on this node
	podsOfAddr   map[netip.Addr][]model.Name
	podsOfNS     map[string]map[model.Name]struct{}

	hasDenyRule map[netip.Addr]struct{}       // see SetDenyRulePods
	allowsAny   map[netip.Addr][]AllowedPorts // see SetAllowsAny

	policiesUnknown  bool
	denyRulesUnknown bool // see SetDenyRulesUnknown
}

// slice is an EndpointSlice and what depends on it.
type slice struct {
	object       *model.EndpointSlice
	service      *service
	mayBeOnNode  bool         // has an endpoint that is or may be on this node
	mustTraverse []netip.Addr // the pod addresses of this slice that must traverse netfilter
}

func newStore(node string) store {
	return store{
		node:         node,
		slices:       map[model.Name]*slice{},
		nodes:        map[string]*model.Node{},
		pods:         map[model.Name]*model.Pod{},
		policies:     map[string]policySet{},
		slicesOfPod:  index[model.Name]{},
		slicesOfAddr: index[netip.Addr]{},
		slicesOfNS:   map[string]map[*slice]struct{}{},
		slicesOnNode: map[*slice]struct{}{},
		podsOfAddr:   map[netip.Addr][]model.Name{},
		podsOfNS:     map[string]map[model.Name]struct{}{},
	}
}

// index leads from a key to slices. Nearly every key has one.
type index[K comparable] map[K][]*slice

func (x index[K]) add(key K, s *slice) {
	if list := x[key]; !slices.Contains(list, s) {
		x[key] = append(list, s)
	}
}

func (x index[K]) remove(key K, s *slice) {
	list := slices.DeleteFunc(x[key], func(o *slice) bool { return o == s })
	if len(list) == 0 {
		delete(x, key)
		return
	}
	x[key] = list
}

// addToIndexes adds a slice to the indexes.
func (st *store) addToIndexes(s *slice) {
	for i := range s.object.Endpoints {
		ep := &s.object.Endpoints[i]
		s.mayBeOnNode = s.mayBeOnNode || onNode(ep, st.node) || ep.Node == ""
		st.slicesOfAddr.add(endpointAddr(ep), s)
		if ep.Pod.Name == "" {
			continue
		}
		st.slicesOfPod.add(ep.Pod, s)
		addTo(st.slicesOfNS, ep.Pod.Namespace, s)
	}
	addTo(st.slicesOfNS, s.object.Service.Namespace, s)
	if s.mayBeOnNode {
		st.slicesOnNode[s] = struct{}{}
	}
}

// removeFromIndexes removes a slice from the indexes.
func (st *store) removeFromIndexes(s *slice) {
	for i := range s.object.Endpoints {
		ep := &s.object.Endpoints[i]
		st.slicesOfAddr.remove(endpointAddr(ep), s)
		if ep.Pod.Name == "" {
			continue
		}
		st.slicesOfPod.remove(ep.Pod, s)
		removeFrom(st.slicesOfNS, ep.Pod.Namespace, s)
	}
	removeFrom(st.slicesOfNS, s.object.Service.Namespace, s)
	delete(st.slicesOnNode, s)
}

// indexedAlike reports whether a slice may replace another without a change to
// any index: conditions change far more often than addresses.
func indexedAlike(a, b *model.EndpointSlice) bool {
	return a.Service == b.Service && slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b model.Endpoint) bool {
		return a.Pod == b.Pod && a.Node == b.Node && endpointAddr(&a) == endpointAddr(&b)
	})
}

// addPod adds a pod.
func (st *store) addPod(p *model.Pod) {
	st.pods[p.Name] = p
	addTo(st.podsOfNS, p.Namespace, p.Name)
	for _, a := range p.IPs {
		a = a.Unmap()
		if list := st.podsOfAddr[a]; !slices.Contains(list, p.Name) {
			st.podsOfAddr[a] = append(list, p.Name)
		}
	}
}

// removePod removes a pod.
func (st *store) removePod(p *model.Pod) {
	delete(st.pods, p.Name)
	removeFrom(st.podsOfNS, p.Namespace, p.Name)
	for _, a := range p.IPs {
		a = a.Unmap()
		list := slices.DeleteFunc(st.podsOfAddr[a], func(n model.Name) bool { return n == p.Name })
		if len(list) == 0 {
			delete(st.podsOfAddr, a)
		} else {
			st.podsOfAddr[a] = list
		}
	}
}

// podOnThisNode reports whether a Pod of this node has the address.
func (st *store) podOnThisNode(addr netip.Addr) bool {
	return slices.ContainsFunc(st.podsOfAddr[addr], st.onThisNode)
}

func (st *store) onThisNode(name model.Name) bool {
	p := st.pods[name]
	return p != nil && st.node != "" && p.Node == st.node
}

// mustTraverseNetfilter reports whether packets of an endpoint must traverse netfilter:
// because it has a deny rule, or a NetworkPolicy selects it.
func (st *store) mustTraverseNetfilter(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	_, denyRule := st.hasDenyRule[addr]
	return denyRule || st.selected(namespace, ep, addr)
}

// selected reports whether a NetworkPolicy selects, or may select, the pod that has the
// endpoint's address. Any author of a slice can name any pod, node and Service in it. A
// slice can therefore make an endpoint selected, but never unselected. The namespace is
// the slice's.
func (st *store) selected(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	if len(st.policies) == 0 {
		return false
	}
	known := st.podsOfAddr[addr]
	switch {
	case slices.ContainsFunc(known, st.podSelected):
		return true
	case ep.Pod.Name != "" && st.podSelected(ep.Pod):
		return true
	case st.podOnThisNode(addr):
		return false
	case onNode(ep, st.node):
		// A pod of this node, of any namespace, whose object is not known yet.
		return true
	}
	// An endpoint without a node is usually outside the cluster.
	return ep.Pod.Name == "" && len(known) == 0 && ep.Node != "" && st.policies[namespace].selectsUnknown()
}

func (st *store) podSelected(name model.Name) bool {
	set := st.policies[name.Namespace]
	if pod := st.pods[name]; pod != nil {
		return set.selects(pod.Labels)
	}
	return set.selectsUnknown()
}

// addTo and removeFrom maintain one set per key, without empty sets.
func addTo[K, V comparable](sets map[K]map[V]struct{}, key K, v V) {
	set := sets[key]
	if set == nil {
		set = map[V]struct{}{}
		sets[key] = set
	}
	set[v] = struct{}{}
}

func removeFrom[K, V comparable](sets map[K]map[V]struct{}, key K, v V) {
	delete(sets[key], v)
	if len(sets[key]) == 0 {
		delete(sets, key)
	}
}
