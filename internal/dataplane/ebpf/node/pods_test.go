package node

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

func TestPodsMap(t *testing.T) {
	b := newWriter(t, objects.Config{})
	a := func(n int) netip.Addr { return netip.AddrFrom4([4]byte{10, 244, 0, byte(n)}) }
	mac := []byte{2, 0, 0, 0, 0, 1}
	pod := func(ifindex int) attach.Pod { return attach.Pod{Ifindex: ifindex, PodMAC: mac, HostMAC: mac} }
	entry := func(ifindex uint32, flags objects.TCPodFlags) objects.TCPod {
		if ifindex == 0 {
			return objects.TCPod{Flags: uint32(flags)}
		}
		return objects.TCPod{Ifindex: ifindex, Mac: [6]uint8(mac), GatewayMac: [6]uint8(mac), Flags: uint32(flags)}
	}
	const reachable, policed = objects.TCPodFlagsPOD_REACHABLE, objects.TCPodFlagsPOD_TRAVERSES_NETFILTER
	want := func(what string, pods map[int]objects.TCPod) {
		t.Helper()
		byKey := map[objects.TCAddrKey]objects.TCPod{}
		for n, p := range pods {
			byKey[objects.AddrKey(a(n))] = p
		}
		objectstest.WantSame(t, what, objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, b.m(objects.TCMapPods)), byKey)
	}
	police := func(ns ...int) {
		t.Helper()
		var node intent.Node
		for _, n := range ns {
			node.MustTraverseNetfilter = append(node.MustTraverseNetfilter, a(n))
		}
		must.Do(t, b.Write(&node))
	}
	for n, p := range map[int]objects.TCPod{1: entry(5, reachable), 2: entry(6, reachable|policed), 3: entry(7, reachable|policed),
		9: entry(8, reachable|policed)} {
		must.Do(t, b.m(objects.TCMapPods).Put(objects.AddrKey(a(n)), p)) // an earlier run's
	}
	police(2, 4)
	b.OnPods(attach.PodChanges{Full: true, Upserts: map[netip.Addr]attach.Pod{
		a(2): pod(16), a(3): pod(17), a(5): {Ifindex: 18}, a(6): {Ifindex: 19, PodMAC: mac},
	}})
	bare := func(ifindex uint32, flags objects.TCPodFlags) objects.TCPod {
		return objects.TCPod{Ifindex: ifindex, Flags: uint32(flags)}
	}
	five, six := bare(18, 0), bare(19, 0) // without MACs the device is known all the same
	want("after the first news", map[int]objects.TCPod{2: entry(16, reachable|policed), 3: entry(17, reachable),
		4: entry(0, policed), 5: five, 6: six})

	police(3)
	want("after other policies", map[int]objects.TCPod{2: entry(16, reachable), 3: entry(17, reachable|policed), 5: five, 6: six})

	b.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{a(2): pod(26)}, Deletes: []netip.Addr{a(3), a(5), a(6)}})
	want("after changes", map[int]objects.TCPod{2: entry(26, reachable), 3: entry(0, policed)})

	b.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{a(3): pod(27), a(2): {Ifindex: 26}}})
	want("after a MAC was lost", map[int]objects.TCPod{2: bare(26, 0), 3: entry(27, reachable|policed)})
	police(2, 3)
	want("policed without a MAC", map[int]objects.TCPod{2: bare(26, policed), 3: entry(27, reachable|policed)})
	police(3)

	b.OnPods(attach.PodChanges{Full: true, Upserts: map[netip.Addr]attach.Pod{a(2): pod(36)}})
	want("after all anew", map[int]objects.TCPod{2: entry(36, reachable), 3: entry(0, policed)})

	police()
	want("without policies", map[int]objects.TCPod{2: entry(36, reachable)})
}

// A pod that no Pod object claims may be one that a NetworkPolicy selects.
func TestUnclaimedPodsTraverseNetfilter(t *testing.T) {
	b := newWriter(t, objects.Config{})
	const policed, guarded = uint32(objects.TCPodFlagsPOD_TRAVERSES_NETFILTER), uint32(objects.TCPodFlagsPOD_DENY_RULE_ONLY)
	mac := []byte{2, 0, 0, 0, 0, 1}
	addrs := addrList("10.244.1.2", "10.244.1.3", "10.244.1.4")
	want := func(what string, flags ...uint32) {
		t.Helper()
		have := objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, b.m(objects.TCMapPods))
		if len(have) != len(flags) {
			t.Errorf("%s: %d entries: %v", what, len(have), have)
		}
		for i, f := range flags {
			p := have[objects.AddrKey(addrs[i])]
			if got := p.Flags &^ uint32(objects.TCPodFlagsPOD_REACHABLE); got != f || p.Ifindex != uint32(10+i) {
				t.Errorf("%s: %s has flags %d and interface %d, want %d and %d", what, addrs[i], got, p.Ifindex, f, 10+i)
			}
		}
	}
	pods := map[netip.Addr]attach.Pod{}
	for i, a := range addrs {
		pods[a] = attach.Pod{Ifindex: 10 + i, PodMAC: mac, HostMAC: mac}
	}
	write := func(n intent.Node) { t.Helper(); must.Do(t, b.Write(&n)) }
	write(intent.Node{PoliciesExist: true, KnownPods: addrs[:1]})
	b.OnPods(attach.PodChanges{Full: true, Upserts: pods})
	want("policies first", 0, policed, policed)
	write(intent.Node{PoliciesExist: true, KnownPods: addrs[:2], DenyRuleOnlyPods: addrs[:1], MustTraverseNetfilter: addrs[:1]})
	want("a Pod object comes", policed|guarded, 0, policed)
	write(intent.Node{PoliciesExist: true, KnownPods: addrs[1:], DenyRuleOnlyPods: addrs[:1], MustTraverseNetfilter: addrs[:1]})
	want("another one goes", policed, 0, 0)
	write(intent.Node{KnownPods: addrs[1:]})
	want("no policies", 0, 0, 0)
	write(intent.Node{PoliciesExist: true})
	want("no Pod objects at all", policed, policed, policed)

	// Several interfaces claim an address.
	write(intent.Node{})
	b.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{addrs[2]: {}}, Deletes: addrs[:2]})
	objectstest.WantSame(t, "contested", objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, b.m(objects.TCMapPods)),
		map[objects.TCAddrKey]objects.TCPod{objects.AddrKey(addrs[2]): {Flags: policed}})
}
