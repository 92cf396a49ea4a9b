package ebpf

import (
	"errors"
	"fmt"
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
	for _, a := range changed {
		if err := b.writePod(a); err != nil {
			b.cfg.Log.Error("Write pod", "address", a, "err", err)
		}
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

// writePod writes the entry of one pod address: its device, its MACs, and whether its
// packets must traverse netfilter. The entry has the device even without the MACs,
// because the programs check the device of a source address.
func (b *Backend) writePod(a netip.Addr) error {
	var pod tcPod
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
	var err error
	if flags == 0 && pod.Ifindex == 0 {
		err = b.m(tcMapPods).Delete(addrKey(a))
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
	} else {
		err = b.m(tcMapPods).Put(addrKey(a), pod)
	}
	if err != nil {
		return fmt.Errorf("write pod %s: %w", a, err)
	}
	return nil
}
