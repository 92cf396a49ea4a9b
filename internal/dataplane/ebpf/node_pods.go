package ebpf

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
)

// traversal says why a pod's packets must traverse netfilter.
type traversal uint8

const (
	mayBypass            traversal = iota
	traversesForPolicy             // a NetworkPolicy selects the pod
	traversesForDenyRule           // a deny rule of a do-not-track policy alone
)

// onPods receives the changes of the pods of this node.
func (b *Backend) onPods(c attach.PodChanges) {
	b.mu.Lock()
	defer b.mu.Unlock()
	changed := slices.Collect(maps.Keys(c.Upserts))
	if c.Full {
		// Pods that must traverse netfilter stay in the map, without device and MACs.
		changed = slices.AppendSeq(changed, maps.Keys(b.traversing))
		b.pods = map[netip.Addr]attach.Pod{}
		if err := b.forgetPods(c.Upserts); err != nil {
			b.cfg.Log.Error("Remove pods", "err", err)
		}
	}
	maps.Copy(b.pods, c.Upserts)
	for _, a := range c.Deletes {
		delete(b.pods, a)
		changed = append(changed, a)
	}
	if err := b.writePods(slices.Values(changed)); err != nil {
		b.cfg.Log.Error("Write pods", "err", err)
	}
}

// forgetPods removes the pods of an earlier run that are unknown to this one.
func (b *Backend) forgetPods(known map[netip.Addr]attach.Pod) error {
	var key tcAddrKey
	var pod tcPod
	var gone []tcAddrKey
	it := b.m(tcMapPods).Iterate()
	for it.Next(&key, &pod) {
		a := fromAddr(key.Addr, uint8(key.Family))
		if _, ok := known[a]; !ok && b.traversing[a] == mayBypass {
			gone = append(gone, key)
		}
	}
	for _, key := range gone {
		if err := b.m(tcMapPods).Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return it.Err()
}

// writePods writes the entries of addresses, and those that did not fit before. Removals make
// room. The addresses of Pods come before those that pods have taken.
func (b *Backend) writePods(changed iter.Seq[netip.Addr]) error {
	var errs []error
	puts := maps.Clone(b.unwritten)
	if puts == nil {
		puts = map[netip.Addr]tcPod{}
	}
	for a := range changed {
		delete(puts, a)
		if pod := b.podEntry(a); pod != (tcPod{}) {
			puts[a] = pod
		} else if err := remove(b.m(tcMapPods), addrKey(a)); err != nil {
			errs = append(errs, fmt.Errorf("remove pod %s: %w", a, err))
		}
	}
	b.unwritten = map[netip.Addr]tcPod{}
	ofOthers := func(a netip.Addr) int {
		if b.traversing[a] == mayBypass && (b.node == nil || !hasAddr(b.node.KnownPods, a)) {
			return 1
		}
		return 0
	}
	for _, a := range slices.SortedFunc(maps.Keys(puts), func(x, y netip.Addr) int { return cmp.Or(ofOthers(x)-ofOthers(y), x.Compare(y)) }) {
		if err := b.m(tcMapPods).Put(addrKey(a), puts[a]); err != nil {
			b.unwritten[a] = puts[a]
			errs = append(errs, full("pod", a, err))
		}
	}
	return firstOf(errs)
}

// podEntry returns the entry of one pod address: its device, its MACs, and whether its
// packets must traverse netfilter; zero for none. The entry has the device even without the
// MACs, because the programs check the device of a source address.
func (b *Backend) podEntry(a netip.Addr) (pod tcPod) {
	var flags tcPodFlags
	p, known := b.pods[a]
	contested := known && p.Ifindex == 0
	pod.Ifindex = uint32(p.Ifindex)
	if p.Ifindex != 0 && len(p.PodMAC) == 6 && len(p.HostMAC) == 6 {
		flags |= tcPodFlagsPOD_REACHABLE
		copy(pod.Mac[:], p.PodMAC)
		copy(pod.GatewayMac[:], p.HostMAC)
	}
	switch b.traversing[a] {
	case traversesForPolicy:
		flags |= tcPodFlagsPOD_TRAVERSES_NETFILTER
	case traversesForDenyRule:
		flags |= tcPodFlagsPOD_TRAVERSES_NETFILTER | tcPodFlagsPOD_DENY_RULE_ONLY
	}
	if contested || known && unclaimed(b.node, a) {
		flags |= tcPodFlagsPOD_TRAVERSES_NETFILTER
		flags &^= tcPodFlagsPOD_DENY_RULE_ONLY
	}
	pod.Flags = uint32(flags)
	return pod
}
