package intent

import (
	"cmp"
	"container/heap"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// Inspected is a Service of this node and what was decided about it. The values that it
// leads to do not change, so another goroutine may read them.
type Inspected struct {
	Spec  *model.Service
	Ports []*ServicePort // sorted by ID; without ports that lost all frontends
	// Slices are those of the Service, and then of the one that it redirects to, each sorted by
	// name; Inspect alone has them.
	Slices []*model.EndpointSlice
}

// Count returns how many Services have a port that is served.
func (t *Tracker) Count() int { return t.served }

// Inspect returns a Service, and whether the node serves one of that name.
func (t *Tracker) Inspect(name model.Name) (Inspected, bool) {
	e := t.services[name]
	if e == nil || e.spec == nil {
		return Inspected{}, false
	}
	s := e.inspected()
	for _, slice := range t.podsWithHostPorts[e] {
		s.Slices = append(s.Slices, slice.Object)
	}
	for _, of := range []model.Name{name, e.plan.redirect} {
		for _, slice := range t.facts.SlicesOf(of, nil) {
			s.Slices = append(s.Slices, slice.Object)
		}
	}
	return s, true
}

// InspectAfter returns the Services of a namespace ("": of all) that follow a name, sorted,
// and as many as limit at most. It looks at each name once and copies nothing else.
func (t *Tracker) InspectAfter(namespace string, after model.Name, limit int) []Inspected {
	first := &lastFirst{}
	for name, e := range t.services {
		if e.spec == nil || namespace != "" && name.Namespace != namespace || name.Compare(after) <= 0 {
			continue
		}
		switch {
		case len(*first) < limit:
			heap.Push(first, name)
		case limit > 0 && name.Compare((*first)[0]) < 0:
			(*first)[0] = name
			heap.Fix(first, 0)
		}
	}
	list := make([]Inspected, len(*first))
	for i := range list {
		name := heap.Pop(first).(model.Name)
		list[len(list)-1-i] = t.services[name].inspected()
	}
	return list
}

func (e *service) inspected() Inspected {
	return Inspected{Spec: e.spec, Ports: append([]*ServicePort{}, e.ports...)}
}

// lastFirst is a heap of names whose first element is the last by name.
type lastFirst []model.Name

func (h lastFirst) Len() int           { return len(h) }
func (h lastFirst) Less(i, j int) bool { return h[i].Compare(h[j]) > 0 }
func (h lastFirst) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *lastFirst) Push(x any)        { *h = append(*h, x.(model.Name)) }
func (h *lastFirst) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

// PortAt returns the Service port that is served on an address and port; the zero PortID if
// there is none. Other nodes are taken to serve NodePorts on all their addresses: a direct
// connection by one of them has its endpoint here.
func (t *Tracker) PortAt(proto model.Protocol, at netip.AddrPort) PortID {
	addr := at.Addr().Unmap()
	if id := t.addresses.owner(addressKey{Addr: addr, Protocol: proto, Port: at.Port()}); id != (PortID{}) {
		return id
	}
	node := t.own.node
	_, peer := slices.BinarySearchFunc(node.Peers, addr, netip.Addr.Compare)
	if peer || slices.Contains(node.NodePortAddrs, addr) || addr.IsLoopback() &&
		slices.Contains(node.LoopbackNodePorts, model.FamilyOf(addr)) {
		return t.addresses.owner(addressKey{Family: model.FamilyOf(addr), Protocol: proto, Port: at.Port()})
	}
	return PortID{}
}

// EndpointOf returns the Service ports whose EndpointSlices have an address and port, sorted,
// and as many as limit at most. It does not look at ports that lost all frontends.
func (t *Tracker) EndpointOf(proto model.Protocol, at netip.AddrPort, limit int) (ids []PortID) {
	addr := at.Addr().Unmap()
	all := t.facts.SlicesAt(addr)
	for _, list := range t.podsWithHostPorts {
		for _, s := range list {
			if endpointAt(s, addr) != nil {
				all = append(all, s)
			}
		}
	}
	for _, s := range all {
		e := t.services[s.Object.Service]
		if e == nil {
			continue
		}
		for _, p := range e.ports {
			if p.ID.Protocol == proto && p.ID.Family == s.Object.Family && slices.ContainsFunc(s.Object.Ports, func(sp model.EndpointPort) bool {
				return sp.Name == p.ID.Port && sp.Protocol == proto && sp.Port == at.Port()
			}) {
				ids = append(ids, p.ID)
			}
		}
	}
	slices.SortFunc(ids, PortID.Compare)
	ids = slices.Compact(ids)
	return ids[:min(limit, len(ids))]
}

// PodAt returns the pod that has an address, and its node, as far as Pods and EndpointSlices
// name them. Several pods share the address of a node: then it names none. The author of a slice
// can name any pod and node, so a pod of another namespace than the slice's does not count, nor
// does what slices disagree about.
func (t *Tracker) PodAt(addr netip.Addr) (pod model.Name, node string) {
	addr = addr.Unmap()
	if pods := t.facts.PodsAt(addr); len(pods) > 0 {
		node = t.facts.Pod(pods[0]).Node
		if len(pods) == 1 {
			pod = pods[0]
		}
		return pod, node
	}
	for i, s := range t.facts.SlicesAt(addr) {
		e := endpointAt(s, addr)
		named := e.Pod
		if named.Namespace != s.Object.Namespace {
			named = model.Name{}
		}
		if i == 0 {
			pod, node = named, e.Node
			continue
		}
		if pod != named {
			pod = model.Name{}
		}
		if node != e.Node {
			node = ""
		}
	}
	return pod, node
}

// Pod is a pod with its addresses, as far as Pods and EndpointSlices name them.
type Pod struct {
	model.Name
	Node  string // "": unknown
	Addrs []netip.Addr
}

// PodsOf returns the pods of a namespace and of a name; "": of all. They are sorted. A slice names only
// pods of its own namespace that no object is.
func (t *Tracker) PodsOf(namespace, name string) []Pod {
	selected := func(n model.Name) bool {
		return (namespace == "" || n.Namespace == namespace) && (name == "" || n.Name == name)
	}
	found := map[model.Name]*Pod{}
	for n, p := range t.facts.Pods() {
		if selected(n) {
			found[n] = &Pod{n, p.Node, slices.Clone(p.IPs)}
		}
	}
	for s := range t.facts.Slices() {
		for i := range s.Object.Endpoints {
			e := &s.Object.Endpoints[i]
			if e.Pod.Name == "" || e.Pod.Namespace != s.Object.Namespace || !selected(e.Pod) || t.facts.Pod(e.Pod) != nil {
				continue
			}
			p := found[e.Pod]
			if p == nil {
				p = &Pod{Name: e.Pod, Node: e.Node}
				found[e.Pod] = p
			}
			if !slices.Contains(p.Addrs, e.Addr) {
				p.Addrs = append(p.Addrs, e.Addr)
			}
		}
	}
	pods := make([]Pod, 0, len(found))
	for _, p := range found {
		slices.SortFunc(p.Addrs, netip.Addr.Compare) // slices have no order
		pods = append(pods, *p)
	}
	slices.SortFunc(pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name.Name, b.Name.Name))
	})
	return pods
}

// NodeAt returns the Node that has an address, or whose podCIDR does; "" for none, and for several.
func (t *Tracker) NodeAt(addr netip.Addr) (node string) {
	addr = addr.Unmap()
	if t.own.nodeAddrs[addr] == 0 {
		names := t.ranges.nodes[t.ranges.longest(addr)]
		for name := range names {
			node = name
		}
		if len(names) > 1 {
			return ""
		}
		return node
	}
	for name, n := range t.facts.Nodes() {
		if !slices.Contains(n.Addresses, addr) {
			continue
		}
		if node != "" {
			return ""
		}
		node = name
	}
	return node
}

func endpointAt(s *store.Slice, addr netip.Addr) *model.Endpoint {
	for i := range s.Object.Endpoints {
		if s.Object.Endpoints[i].Addr == addr {
			return &s.Object.Endpoints[i]
		}
	}
	return nil
}
