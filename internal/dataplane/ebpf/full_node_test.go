package ebpf

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// shrink replaces a map by one with less room.
func shrink(t *testing.T, b *Backend, name string, entries uint32) *ebpf.Map {
	t.Helper()
	old, err := b.m(name).Info()
	must.Do(t, err)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: old.Type, Flags: old.Flags, MaxEntries: entries, KeySize: old.KeySize, ValueSize: old.ValueSize})
	must.Do(t, err)
	b.m(name).Close()
	b.objects.Maps[name] = m
	return m
}

// wantServicesChange fails unless a Service is added, changed and deleted beside an error of the
// node.
func wantServicesChange(t *testing.T, b *Backend, family model.Family, node *intent.Node) {
	t.Helper()
	web, old := portWith(family, "web", 0, 1, 1, prefixesOf(family, netAllowed, 1)), portWith(family, "old", 50, 1, 1, nil)
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{web, old}}))
	webNow := portWith(family, "web", 0, 1, 2, prefixesOf(family, netTightened, 1))
	err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{webNow}, Deletes: []intent.PortID{old.ID}, Node: node})
	var part *dataplane.PortErrors
	if !errors.As(err, &part) || part.Node == nil || len(part.Errors) > 0 {
		t.Errorf("error %v, want one of the node alone", err)
	}
	wantApplied(t, b, []*intent.ServicePort{webNow})
}

// The map pods is full of addresses that pods have taken. Services change and are deleted, a Pod's
// own change is written, and when addresses go, those that did not fit are written, a Pod's first.
func TestFullMapOfPods(t *testing.T) {
	const room = 8
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			b := newMapsBackend(t, small)
			m := shrink(t, b, objects.TCMapPods, room)
			device := attach.Pod{Ifindex: 7, PodMAC: []byte{2, 0, 0, 0, 0, 1}, HostMAC: []byte{2, 0, 0, 0, 0, 2}}
			known, later, policed := ipOf(family, netPods, 1), ipOf(family, netPods, 2), ipOf(family, netPods, 3)
			node := intent.Node{Name: "node", KnownPods: []netip.Addr{known, later, policed}}
			must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &node}))
			taken := map[netip.Addr]attach.Pod{known: device}
			for i := range 2 * room {
				taken[ipOf(family, netGreedy, i)] = device
			}
			b.node.OnPods(attach.PodChanges{Full: true, Upserts: taken})
			entry := func(a netip.Addr) (pod objects.TCPod, any bool) {
				return pod, m.Lookup(objects.AddrKey(a), &pod) == nil
			}
			if _, any := entry(known); !any || len(objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, m)) != room {
				t.Fatalf("%d entries, and that of a Pod is there: %t; want a full map with it",
					len(objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, m)), any)
			}

			b.node.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{later: device}})
			node.MustTraverseNetfilter = []netip.Addr{known, policed}
			wantServicesChange(t, b, family, &node)
			if pod, _ := entry(known); objects.TCPodFlags(pod.Flags)&objects.TCPodFlagsPOD_TRAVERSES_NETFILTER == 0 {
				t.Error("packets of a Pod may bypass netfilter, whose policy denies them")
			}

			delete(taken, known)
			gone := slices.SortedFunc(maps.Keys(taken), netip.Addr.Compare)
			here := slices.DeleteFunc(slices.Clone(gone), func(a netip.Addr) bool { _, any := entry(a); return !any })
			b.node.OnPods(attach.PodChanges{Deletes: here[:2]})
			if pod, _ := entry(later); pod.Ifindex != 7 {
				t.Error("a Pod that did not fit is not reached when there is room")
			}
			if pod, _ := entry(policed); objects.TCPodFlags(pod.Flags)&objects.TCPodFlagsPOD_TRAVERSES_NETFILTER == 0 {
				t.Error("packets of a Pod that did not fit may bypass netfilter when there is room")
			}
			b.node.OnPods(attach.PodChanges{Deletes: gone})
			must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &node}))
			want := map[netip.Addr]bool{known: true, later: true, policed: true}
			have := map[netip.Addr]bool{}
			for key := range objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, m) {
				have[objects.FromAddr(key.Addr, uint8(key.Family))] = true
			}
			objectstest.WantSame(t, "pods when there is room", have, want)
		})
	}
}

// A node has more addresses than node_addrs has room for, as an administrator may give it. Those
// that are there stay, others' Services change, and addresses that go make room in the same write.
func TestFullMapOfNodeAddresses(t *testing.T) {
	const room = 8
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			b := newMapsBackend(t, small)
			m := shrink(t, b, objects.TCMapNodeAddrs, room)
			own := ipOf(family, netNodes, 200)
			node := func(n int) *intent.Node {
				out := &intent.Node{Name: "node"}
				for i := range n {
					out.Addrs = append(out.Addrs, ipOf(family, netNodes, i))
				}
				out.Addrs = append(out.Addrs, own)
				out.NodePortAddrs = out.Addrs
				return out
			}
			has := func(a netip.Addr) bool {
				var flags uint32
				return m.Lookup(objects.AddrKey(a), &flags) == nil && flags == uint32(objects.TCNodeAddrFlagsNODE_ADDR_NODEPORT)
			}
			must.Do(t, b.Apply(t.Context(), intent.Changes{Node: node(0)}))
			wantServicesChange(t, b, family, node(3*room))
			if n := len(objectstest.ReadAll[objects.TCAddrKey, uint32](t, m)); n != room || !has(own) {
				t.Errorf("%d addresses, with the node's first: %t; want a full map with it", n, has(own))
			}
			moved := node(0)
			for i := range room - 1 {
				moved.Addrs = append(moved.Addrs, ipOf(family, netNodes, 100+i))
			}
			slices.SortFunc(moved.Addrs, netip.Addr.Compare)
			moved.NodePortAddrs = moved.Addrs
			must.Do(t, b.Apply(t.Context(), intent.Changes{Node: moved}))
			for _, a := range moved.Addrs {
				if !has(a) {
					t.Errorf("no NodePorts at %s, although there is room", a)
				}
			}
		})
	}
}
