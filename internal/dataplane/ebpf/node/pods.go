package node

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
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// traversal says why a pod's packets must traverse netfilter.
type traversal uint8

const (
	mayBypass            traversal = iota
	traversesForPolicy             // a NetworkPolicy selects the pod
	traversesForDenyRule           // a deny rule of a do-not-track policy alone
)

// OnPods receives the changes of the pods of this node.
func (w *Writer) OnPods(c attach.PodChanges) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed := slices.Collect(maps.Keys(c.Upserts))
	if c.Full {
		// Pods that must traverse netfilter stay in the map, without device and MACs.
		changed = slices.AppendSeq(changed, maps.Keys(w.traversing))
		w.pods = map[netip.Addr]attach.Pod{}
		if err := w.forgetPods(c.Upserts); err != nil {
			w.cfg.Log.Error("Remove pods", "err", err)
		}
	}
	maps.Copy(w.pods, c.Upserts)
	for _, a := range c.Deletes {
		delete(w.pods, a)
		changed = append(changed, a)
	}
	if err := w.writePods(slices.Values(changed)); err != nil {
		w.cfg.Log.Error("Write pods", "err", err)
	}
}

// forgetPods removes the pods of an earlier run that are unknown to this one.
func (w *Writer) forgetPods(known map[netip.Addr]attach.Pod) error {
	var key objects.TCAddrKey
	var pod objects.TCPod
	var gone []objects.TCAddrKey
	it := w.m(objects.TCMapPods).Iterate()
	for it.Next(&key, &pod) {
		a := objects.FromAddr(key.Addr, uint8(key.Family))
		if _, ok := known[a]; !ok && w.traversing[a] == mayBypass {
			gone = append(gone, key)
		}
	}
	for _, key := range gone {
		if err := w.m(objects.TCMapPods).Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return it.Err()
}

// writePods writes the entries of addresses, and those that did not fit before. Removals make
// room. The addresses of Pods come before those that pods have taken.
func (w *Writer) writePods(changed iter.Seq[netip.Addr]) error {
	var errs []error
	puts := maps.Clone(w.unwritten)
	if puts == nil {
		puts = map[netip.Addr]objects.TCPod{}
	}
	for a := range changed {
		delete(puts, a)
		if pod := w.podEntry(a); pod != (objects.TCPod{}) {
			puts[a] = pod
		} else if err := objects.Remove(w.m(objects.TCMapPods), objects.AddrKey(a)); err != nil {
			errs = append(errs, fmt.Errorf("remove pod %s: %w", a, err))
		}
	}
	w.unwritten = map[netip.Addr]objects.TCPod{}
	ofOthers := func(a netip.Addr) int {
		if w.traversing[a] == mayBypass && (w.node == nil || !hasAddr(w.node.KnownPods, a)) {
			return 1
		}
		return 0
	}
	for _, a := range slices.SortedFunc(maps.Keys(puts), func(x, y netip.Addr) int { return cmp.Or(ofOthers(x)-ofOthers(y), x.Compare(y)) }) {
		if err := w.m(objects.TCMapPods).Put(objects.AddrKey(a), puts[a]); err != nil {
			w.unwritten[a] = puts[a]
			errs = append(errs, objects.WriteError("pod", a, err))
		}
	}
	return objects.FirstError(errs)
}

// podEntry returns the entry of one pod address: its device, its MACs, whether its packets must
// traverse netfilter, and whether egress concerns it; zero for none. The entry has the device even without the
// MACs, because the programs check the device of a source address.
func (w *Writer) podEntry(a netip.Addr) (pod objects.TCPod) {
	var flags objects.TCPodFlags
	p, known := w.pods[a]
	contested := known && p.Ifindex == 0
	pod.Ifindex = uint32(p.Ifindex)
	if p.Ifindex != 0 && len(p.PodMAC) == 6 && len(p.HostMAC) == 6 {
		flags |= objects.TCPodFlagsPOD_REACHABLE
		copy(pod.Mac[:], p.PodMAC)
		copy(pod.GatewayMac[:], p.HostMAC)
	}
	switch w.traversing[a] {
	case traversesForPolicy:
		flags |= objects.TCPodFlagsPOD_TRAVERSES_NETFILTER
	case traversesForDenyRule:
		flags |= objects.TCPodFlagsPOD_TRAVERSES_NETFILTER | objects.TCPodFlagsPOD_DENY_RULE_ONLY
	}
	if known && w.node != nil && inAny(w.node.Egress.Sources, a) {
		flags |= objects.TCPodFlagsPOD_LEAVES
	}
	if contested || known && mayBeSelected(w.node, a) {
		flags |= objects.TCPodFlagsPOD_TRAVERSES_NETFILTER
		flags &^= objects.TCPodFlagsPOD_DENY_RULE_ONLY
	}
	pod.Flags = uint32(flags)
	return pod
}

// writeTraversing writes which pods' packets must traverse netfilter.
func (w *Writer) writeTraversing(before, n *intent.Node) error {
	traversing := map[netip.Addr]traversal{}
	for _, a := range n.MustTraverseNetfilter {
		traversing[a] = traversesForPolicy
	}
	for _, a := range n.DenyRuleOnlyPods {
		traversing[a] = traversesForDenyRule
	}
	changed := maps.Clone(w.traversing)
	maps.Copy(changed, traversing)
	w.traversing = traversing
	for a := range w.pods {
		if mayBeSelected(before, a) != mayBeSelected(n, a) || before == nil || inAny(before.Egress.Sources, a) != inAny(n.Egress.Sources, a) {
			changed[a] = traversing[a]
		}
	}
	return w.writePods(maps.Keys(changed))
}

// inAny reports whether an address is in one of the ranges.
func inAny(ranges []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool { return p.Contains(a) })
}

// mayBeSelected reports whether a pod's address may belong to a pod that a NetworkPolicy
// selects but whose Pod object is unknown: the pod starts, or its object is deleted.
// Without any Pod objects, as in manifests, that is every pod.
func mayBeSelected(n *intent.Node, a netip.Addr) bool {
	return n != nil && n.PoliciesExist && !hasAddr(n.KnownPods, a)
}
