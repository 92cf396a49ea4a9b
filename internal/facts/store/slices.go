package store

import (
	"iter"
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// Slice is an EndpointSlice as the indexes know it. Object changes when only conditions of
// endpoints do, which is the most frequent change: no index changes then.
type Slice struct {
	Object *model.EndpointSlice
	// MayBeOnNode says that an endpoint is on this node, or does not name its node.
	MayBeOnNode bool
}

// sliceTable holds the EndpointSlices.
type sliceTable struct {
	node    string
	entries map[model.Name]*Slice
	readers []func(name model.Name, before, now *model.EndpointSlice)

	ofService looseIndex[model.Name]
	ofPod     looseIndex[model.Name]
	ofAddr    looseIndex[netip.Addr]
	in        Sets[string, *Slice] // by namespace of the Service and of the endpoints' pods
	onNode    map[*Slice]struct{}  // those with MayBeOnNode
}

func newSliceTable(node string) sliceTable {
	return sliceTable{
		node: node, entries: map[model.Name]*Slice{},
		ofService: newLooseIndex[model.Name](), ofPod: newLooseIndex[model.Name](), ofAddr: newLooseIndex[netip.Addr](),
		in: Sets[string, *Slice]{}, onNode: map[*Slice]struct{}{},
	}
}

func (t *sliceTable) subscribe(read func(name model.Name, before, now *model.EndpointSlice)) {
	if read != nil {
		t.readers = append(t.readers, read)
	}
}

// set stores a slice; nil deletes it.
func (t *sliceTable) set(name model.Name, now *model.EndpointSlice) {
	var before *model.EndpointSlice
	s := t.entries[name]
	if s != nil {
		before = s.Object
	}
	switch {
	case s == nil && now == nil:
		return
	case s != nil && now != nil && SameReferences(before, now):
		s.Object = now
	default:
		if s != nil {
			delete(t.entries, name)
			t.removeFromIndexes(s)
		}
		if now != nil {
			s = &Slice{Object: now}
			t.entries[name] = s
			t.addToIndexes(s)
		}
	}
	for _, read := range t.readers {
		read(name, before, now)
	}
}

// SameReferences reports whether two versions of a slice refer to the same Service, pods,
// nodes and addresses.
func SameReferences(a, b *model.EndpointSlice) bool {
	return a.Service == b.Service && slices.EqualFunc(a.Endpoints, b.Endpoints, func(a, b model.Endpoint) bool {
		return a.Pod == b.Pod && a.Node == b.Node && a.Addr == b.Addr
	})
}

func (t *sliceTable) addToIndexes(s *Slice) {
	t.ofService.add(s.Object.Service, s)
	t.in.Add(s.Object.Service.Namespace, s)
	for i := range s.Object.Endpoints {
		ep := &s.Object.Endpoints[i]
		s.MayBeOnNode = s.MayBeOnNode || ep.Node == "" || ep.Node == t.node
		t.ofAddr.add(ep.Addr, s)
		if ep.Pod.Name != "" {
			t.ofPod.add(ep.Pod, s)
			t.in.Add(ep.Pod.Namespace, s)
		}
	}
	if s.MayBeOnNode {
		t.onNode[s] = struct{}{}
	}
}

func (t *sliceTable) removeFromIndexes(s *Slice) {
	t.ofService.remove(s.Object.Service, s)
	t.in.Remove(s.Object.Service.Namespace, s)
	for i := range s.Object.Endpoints {
		ep := &s.Object.Endpoints[i]
		t.ofAddr.remove(ep.Addr, s)
		if ep.Pod.Name != "" {
			t.ofPod.remove(ep.Pod, s)
			t.in.Remove(ep.Pod.Namespace, s)
		}
	}
	delete(t.onNode, s)
}

// Slices returns all EndpointSlices.
func (st *Store) Slices() iter.Seq[*Slice] { return maps.Values(st.slices.entries) }

// SlicesOf returns the slices of a Service, sorted by name, in a list that may use the
// memory of buffer.
func (st *Store) SlicesOf(service model.Name, buffer []*Slice) []*Slice {
	list := st.slices.ofService.find(service, buffer)
	list = slices.DeleteFunc(list, func(s *Slice) bool { return s.Object.Service != service })
	if len(list) > 1 {
		slices.SortFunc(list, func(a, b *Slice) int { return a.Object.Name.Compare(b.Object.Name) })
	}
	return list
}

// SlicesOfPod returns the slices with an endpoint that names the pod.
func (st *Store) SlicesOfPod(pod model.Name) []*Slice {
	return withEndpoint(st.slices.ofPod.find(pod, nil), func(ep model.Endpoint) bool { return ep.Pod == pod })
}

// SlicesAt returns the slices with an endpoint of an address.
func (st *Store) SlicesAt(a netip.Addr) []*Slice {
	return withEndpoint(st.slices.ofAddr.find(a, nil), func(ep model.Endpoint) bool { return ep.Addr == a })
}

func withEndpoint(list []*Slice, is func(model.Endpoint) bool) []*Slice {
	return slices.DeleteFunc(list, func(s *Slice) bool { return !slices.ContainsFunc(s.Object.Endpoints, is) })
}

// SlicesIn returns the slices of a namespace: of its Services and with its pods.
func (st *Store) SlicesIn(namespace string) iter.Seq[*Slice] {
	return maps.Keys(st.slices.in[namespace])
}

// SlicesOnNode returns the slices with an endpoint that is or may be on this node.
func (st *Store) SlicesOnNode() iter.Seq[*Slice] { return maps.Keys(st.slices.onNode) }
