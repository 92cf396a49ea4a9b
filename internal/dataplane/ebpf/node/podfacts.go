package node

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// podFacts is what the cluster says about addresses that pods announce.
type podFacts struct {
	node        *intent.Node
	otherRanges prefixSet
}

// Fact returns what the cluster says about an address; see attach.Config.Facts.
func (w *Writer) Fact(a netip.Addr) attach.Fact {
	f := w.facts.Load()
	if f == nil {
		return attach.Unknown
	}
	n := f.node
	switch {
	case hasAddr(n.Addrs, a):
		return attach.NodeAddress
	case hasAddr(n.Peers, a):
		return attach.OtherNode
	case hasAddr(n.KnownPods, a):
		return attach.PodHere
	case w.isServiceAddr(a):
		return attach.ServiceAddress
	case hasAddr(n.OtherPods, a):
		return attach.PodElsewhere
	case f.otherRanges.contains(a) && !slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(a) }):
		return attach.OtherNodeRange
	}
	return attach.Unknown
}

// setFacts makes fact use this node, and requests a new decision about announcements if the facts
// differ.
func (w *Writer) setFacts(n *intent.Node) {
	f := &podFacts{node: n}
	old := w.facts.Load()
	if old != nil && slices.Equal(old.node.OtherPodCIDRs, n.OtherPodCIDRs) {
		f.otherRanges = old.otherRanges
	} else {
		f.otherRanges = newPrefixSet(n.OtherPodCIDRs)
	}
	w.facts.Store(f)
	if old == nil || !slices.Equal(old.node.Addrs, n.Addrs) || !slices.Equal(old.node.Peers, n.Peers) ||
		!slices.Equal(old.node.KnownPods, n.KnownPods) || !slices.Equal(old.node.OtherPods, n.OtherPods) ||
		!slices.Equal(old.node.OtherPodCIDRs, n.OtherPodCIDRs) || !slices.Equal(old.node.PodCIDRs, n.PodCIDRs) {
		w.noteFacts()
	}
}

func (w *Writer) noteFacts() {
	if w.factsChanged != nil {
		w.factsChanged()
	}
}

// OnRefused reports a refused address in the log and to Config.Refused.
func (w *Writer) OnRefused(r attach.Refusal) {
	w.cfg.Log.Warn("pod address refused: packets for it do not use this interface",
		"address", r.Addr, "interface", r.Interface, "reason", r.Reason.String(), "moreIgnored", r.Last)
	if w.cfg.Refused != nil {
		w.cfg.Refused(fmt.Sprintf("No packets for %s are sent past netfilter to interface %s: a pod or virtual machine there claims the "+
			"address, but %s. "+
			"If the address is right, check the node's routes (ip route get %s); if not, check the pod behind the interface (ip -d link show %s)",
			r.Addr, r.Interface, r.Reason, r.Addr, r.Interface))
	}
}

// hasAddr reports whether a sorted list has the address.
func hasAddr(list []netip.Addr, a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(list, a, netip.Addr.Compare)
	return found
}

// prefixSet finds which of thousands of prefixes contains an address. The prefixes have
// few lengths.
type prefixSet struct {
	prefixes map[netip.Prefix]struct{}
	lengths  []int
}

func newPrefixSet(list []netip.Prefix) prefixSet {
	s := prefixSet{prefixes: make(map[netip.Prefix]struct{}, len(list))}
	for _, p := range list {
		s.prefixes[p.Masked()] = struct{}{}
		if !slices.Contains(s.lengths, p.Bits()) {
			s.lengths = append(s.lengths, p.Bits())
		}
	}
	return s
}

func (s prefixSet) contains(a netip.Addr) bool {
	for _, bits := range s.lengths {
		if p, err := a.Prefix(bits); err == nil {
			if _, ok := s.prefixes[p]; ok {
				return true
			}
		}
	}
	return false
}

// readPods reads the pods that an earlier run has accepted.
func readPods(m *ebpf.Map) (map[netip.Addr]attach.Pod, error) {
	pods := map[netip.Addr]attach.Pod{}
	err := objects.Each(m, func(key objects.TCAddrKey, v objects.TCPod) {
		if v.Ifindex == 0 {
			return
		}
		p := attach.Pod{Ifindex: int(v.Ifindex)}
		if v.Flags&uint32(objects.TCPodFlagsPOD_REACHABLE) != 0 {
			p.PodMAC, p.HostMAC = slices.Clone(v.Mac[:]), slices.Clone(v.GatewayMac[:])
		}
		pods[objects.FromAddr(key.Addr, uint8(key.Family))] = p
	})
	if err != nil {
		return nil, fmt.Errorf("read pods of an earlier run: %w", err)
	}
	return pods, nil
}
