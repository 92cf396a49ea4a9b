package intent

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// world holds the facts, and the indexes that lead from a pod, an address or a
// namespace to the slices that depend on it.
type world struct {
	node     string // the node decided for
	slices   map[model.Name]*slice
	nodes    map[string]*model.Node
	pods     map[model.Name]*model.Pod
	policies map[string]policySet // by namespace; never an empty set

	slicesOfPod  index[model.Name] // slices with an endpoint that names the pod
	slicesOfAddr index[netip.Addr] // slices with an endpoint of the address
	slicesOfNS   map[string]map[*slice]struct{}
	slicesNear   map[*slice]struct{} // slices with an endpoint that is or may be on this node
	podsOfAddr   map[netip.Addr][]model.Name
	podsOfNS     map[string]map[model.Name]struct{}

	guarded map[netip.Addr]struct{}    // see SetGuarded
	opened  map[netip.Addr][]OpenPorts // see SetOpened

	policiesUnknown bool
	guardsUnknown   bool // see SetGuardsUnknown
}

// slice is an EndpointSlice and what depends on it.
type slice struct {
	object  *model.EndpointSlice
	service *service
	near    bool         // has an endpoint that is or may be on this node
	policed []netip.Addr // what it adds to the node's policed pods
}

func newWorld(node string) world {
	return world{
		node:         node,
		slices:       map[model.Name]*slice{},
		nodes:        map[string]*model.Node{},
		pods:         map[model.Name]*model.Pod{},
		policies:     map[string]policySet{},
		slicesOfPod:  index[model.Name]{},
		slicesOfAddr: index[netip.Addr]{},
		slicesOfNS:   map[string]map[*slice]struct{}{},
		slicesNear:   map[*slice]struct{}{},
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

// attach enters a slice into the indexes.
func (w *world) attach(s *slice) {
	for i := range s.object.Endpoints {
		ep := &s.object.Endpoints[i]
		s.near = s.near || isHere(ep, w.node) || ep.Node == ""
		w.slicesOfAddr.add(endpointAddr(ep), s)
		if ep.Pod.Name == "" {
			continue
		}
		w.slicesOfPod.add(ep.Pod, s)
		addTo(w.slicesOfNS, ep.Pod.Namespace, s)
	}
	addTo(w.slicesOfNS, s.object.Service.Namespace, s)
	if s.near {
		w.slicesNear[s] = struct{}{}
	}
}

// detach takes a slice out of the indexes again.
func (w *world) detach(s *slice) {
	for i := range s.object.Endpoints {
		ep := &s.object.Endpoints[i]
		w.slicesOfAddr.remove(endpointAddr(ep), s)
		if ep.Pod.Name == "" {
			continue
		}
		w.slicesOfPod.remove(ep.Pod, s)
		removeFrom(w.slicesOfNS, ep.Pod.Namespace, s)
	}
	removeFrom(w.slicesOfNS, s.object.Service.Namespace, s)
	delete(w.slicesNear, s)
}

// indexedAlike reports whether a slice may replace another without a change to
// any index: conditions change far more often than addresses.
func indexedAlike(a, b *model.EndpointSlice) bool {
	return a.Service == b.Service && slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b model.Endpoint) bool {
		return a.Pod == b.Pod && a.Node == b.Node && endpointAddr(&a) == endpointAddr(&b)
	})
}

// addPod enters a pod.
func (w *world) addPod(p *model.Pod) {
	w.pods[p.Name] = p
	addTo(w.podsOfNS, p.Namespace, p.Name)
	for _, a := range p.IPs {
		a = a.Unmap()
		if list := w.podsOfAddr[a]; !slices.Contains(list, p.Name) {
			w.podsOfAddr[a] = append(list, p.Name)
		}
	}
}

// removePod takes a pod out again.
func (w *world) removePod(p *model.Pod) {
	delete(w.pods, p.Name)
	removeFrom(w.podsOfNS, p.Namespace, p.Name)
	for _, a := range p.IPs {
		a = a.Unmap()
		list := slices.DeleteFunc(w.podsOfAddr[a], func(n model.Name) bool { return n == p.Name })
		if len(list) == 0 {
			delete(w.podsOfAddr, a)
		} else {
			w.podsOfAddr[a] = list
		}
	}
}

// podHere reports whether a Pod of this node has the address.
func (w *world) podHere(addr netip.Addr) bool {
	return slices.ContainsFunc(w.podsOfAddr[addr], w.onThisNode)
}

func (w *world) onThisNode(name model.Name) bool {
	p := w.pods[name]
	return p != nil && w.node != "" && p.Node == w.node
}

// policed reports whether packets of an endpoint must traverse netfilter: because it
// is guarded, or a NetworkPolicy selects it.
func (w *world) policed(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	_, guarded := w.guarded[addr]
	return guarded || w.selected(namespace, ep, addr)
}

// selected reports whether a NetworkPolicy selects the pod that has the endpoint's
// address, or may. Anybody who may write a slice can name any pod, node and Service
// in it, so what a slice says can make an endpoint selected, and never unselected.
// The namespace is the slice's.
func (w *world) selected(namespace string, ep *model.Endpoint, addr netip.Addr) bool {
	if len(w.policies) == 0 {
		return false
	}
	known := w.podsOfAddr[addr]
	switch {
	case slices.ContainsFunc(known, w.podPoliced):
		return true
	case ep.Pod.Name != "" && w.podPoliced(ep.Pod):
		return true
	case w.podHere(addr):
		return false
	case isHere(ep, w.node):
		// A pod of this node that is not known (yet), of any namespace.
		return true
	}
	// An endpoint without a node is most often outside the cluster.
	return ep.Pod.Name == "" && len(known) == 0 && ep.Node != "" && w.policies[namespace].selectsUnknown()
}

func (w *world) podPoliced(name model.Name) bool {
	set := w.policies[name.Namespace]
	if pod := w.pods[name]; pod != nil {
		return set.selects(pod.Labels)
	}
	return set.selectsUnknown()
}

// addTo and removeFrom keep a set a key, and no empty one.
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
