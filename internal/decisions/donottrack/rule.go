package donottrack

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// rule is a Rule with its sources and its current state.
type rule struct {
	Rule
	ports []model.PortRange
	pods  []*model.PodSelection // of its peers
	// wanted counts the addresses of this node that the rule applies to. While it is above
	// 0 the Tracker knows the rule's peers, and the kernel has them.
	wanted int
	peers  map[netip.Addr]int // how many pods have the address
	// nat is a Service whose packets the rule would match, zero if there is none; for
	// outgoing rules only. renewNAT computes it if natStale is set.
	nat      obstacle
	natStale bool
}

// policy is one DoNotTrackPolicy.
type policy struct {
	spec  *model.DoNotTrackPolicy
	rules []*rule
}

func newPolicy(spec *model.DoNotTrackPolicy) *policy {
	p := &policy{spec: spec}
	add := func(side Side, entries []model.PolicyRule) {
		for i := range entries {
			e := &entries[i]
			r := &rule{Rule: Rule{
				Name: ruleName(spec.Name, side, i), Policy: spec.Name, Side: side, Index: i,
				Track: spec.Track, Deny: spec.DenyOthers, AnyPeer: len(e.Peers) == 0,
			}, ports: e.Ports, natStale: true}
			for j := range e.Peers {
				if peer := &e.Peers[j]; peer.Pods != nil {
					r.pods = append(r.pods, peer.Pods)
				} else {
					r.Blocks = append(r.Blocks, without(peer.Block, peer.Except)...)
				}
			}
			r.Pods, r.Blocks = len(r.pods) > 0, joined(r.Blocks)
			p.rules = append(p.rules, r)
		}
	}
	add(Ingress, spec.Ingress)
	add(Egress, spec.Egress)
	return p
}

// before orders two policies that contradict. The older one holds; of the same second, the
// one that denies, or the first by name. A policy without a time, as in a file, counts as
// older.
func (p *policy) before(o *policy) int {
	if c := p.spec.Created.Compare(o.spec.Created); c != 0 {
		return c
	}
	if p.spec.DenyOthers != o.spec.DenyOthers {
		if p.spec.DenyOthers {
			return -1
		}
		return 1
	}
	if p.spec.Name < o.spec.Name {
		return -1
	}
	return 1
}

// whyAfter returns why another policy takes precedence over this one.
func (p *policy) whyAfter(o *policy) string {
	switch {
	case !p.spec.Created.Equal(o.spec.Created):
		return "is older"
	case p.spec.DenyOthers != o.spec.DenyOthers:
		return "is as old and denies"
	}
	return "is as old and comes first by name"
}

// covers reports whether an address is among the peers of a rule.
func (r *rule) covers(a netip.Addr) bool {
	if r.AnyPeer || r.peers[a] > 0 {
		return true
	}
	return r.inBlocks(a)
}

func (r *rule) inBlocks(a netip.Addr) bool {
	i, found := slices.BinarySearchFunc(r.Blocks, a, func(b Range, a netip.Addr) int { return b.First.Compare(a) })
	return found || i > 0 && r.Blocks[i-1].Last.Compare(a) >= 0 && r.Blocks[i-1].Last.Is4() == a.Is4()
}

// about reports whether a rule is about a port.
func (r *rule) about(proto model.Protocol, port uint16) bool {
	return slices.ContainsFunc(r.ports, func(p model.PortRange) bool {
		return p.Protocol == proto && p.First <= port && port <= p.Last
	})
}

// sharedPorts reports whether two rules are about the same ports.
func (r *rule) sharedPorts(o *rule) (model.PortRange, bool) {
	for _, a := range r.ports {
		for _, b := range o.ports {
			if r.Side == o.Side && a.Protocol == b.Protocol && a.First <= b.Last && b.First <= a.Last {
				return model.PortRange{Protocol: a.Protocol, First: max(a.First, b.First), Last: min(a.Last, b.Last)}, true
			}
		}
	}
	return model.PortRange{}, false
}

// selectsPeer reports whether a pod is among a rule's peers by its labels.
func (r *rule) selectsPeer(pod, namespace map[string]string) bool {
	return slices.ContainsFunc(r.pods, func(s *model.PodSelection) bool { return selects(s, pod, namespace) })
}

func selects(s *model.PodSelection, pod, namespace map[string]string) bool {
	return (s.Namespaces == nil || s.Namespaces.Matches(namespace)) && (s.Pods == nil || s.Pods.Matches(pod))
}

// without returns a block without the blocks in except, which lie within it and are
// sorted.
func without(block netip.Prefix, except []netip.Prefix) (out []Range) {
	next, last := block.Addr(), lastOf(block)
	for _, e := range except {
		if first := e.Addr(); next.IsValid() && next.Less(first) {
			out = append(out, Range{next, first.Prev()})
		}
		if after := lastOf(e).Next(); next.IsValid() && (!after.IsValid() || next.Less(after)) {
			next = after
		}
	}
	if next.IsValid() && next.Compare(last) <= 0 {
		out = append(out, Range{next, last})
	}
	return out
}

// joined sorts ranges and merges adjacent ones.
func joined(ranges []Range) (out []Range) {
	slices.SortFunc(ranges, func(a, b Range) int { return a.First.Compare(b.First) })
	for _, r := range ranges {
		if n := len(out); n > 0 && out[n-1].Last.Is4() == r.First.Is4() {
			end := &out[n-1].Last
			if after := end.Next(); !after.IsValid() || after.Compare(r.First) >= 0 {
				if end.Less(r.Last) {
					*end = r.Last
				}
				continue
			}
		}
		out = append(out, r)
	}
	return out
}

// Prefixes returns the fewest prefixes that cover a range.
func (r Range) Prefixes() (out []netip.Prefix) {
	for first := r.First; first.IsValid() && first.Compare(r.Last) <= 0; {
		p := netip.PrefixFrom(first, first.BitLen())
		for p.Bits() > 0 {
			wider := netip.PrefixFrom(first, p.Bits()-1)
			if wider.Masked().Addr() != first || r.Last.Less(lastOf(wider)) {
				break
			}
			p = wider
		}
		out, first = append(out, p), lastOf(p).Next()
	}
	return out
}

// lastOf returns the last address of a block.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}
