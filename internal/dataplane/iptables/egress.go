package iptables

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
)

// chainEgress gives pods' connections to the outside the node's address. The CNI's rule may
// choose source ports by counting up: two connections that begin at once get one port, and one
// of them loses its first packet (insert_failed). Ports of this chain's rules are fully random.
// The chain exists while a range of pods is configured, and chainEgressAddresses while the Plan has Addresses.
const (
	chainEgress          = chainPrefix + "EGRESS"
	chainEgressAddresses = chainPrefix + "EGRESS-ADDR"
)

// egressRanges are an egress.Plan of one family.
type egressRanges struct {
	sources, keep []netip.Prefix
	addresses     []netip.Addr // of egress.Plan.ForPods
}

func newEgressRanges(f model.Family, p egress.Plan) egressRanges {
	sources := aggregate(masked(rangesOf(f, p.Sources)))
	if len(sources) == 0 {
		return egressRanges{} // Keep alone changes nothing
	}
	return egressRanges{sources, aggregate(masked(rangesOf(f, p.Keep))), p.ForPods(f == model.IPv6)}
}

// masked clears the bits behind the prefixes, as iptables-save does.
func masked(ranges []netip.Prefix) []netip.Prefix {
	for i, p := range ranges {
		ranges[i] = p.Masked()
	}
	return ranges
}

func (e egressRanges) any() bool { return len(e.sources) > 0 }

func (e egressRanges) equal(o egressRanges) bool {
	return slices.Equal(e.sources, o.sources) && slices.Equal(e.keep, o.keep) && slices.Equal(e.addresses, o.addresses)
}

// jump leads to the chain from POSTROUTING, ahead of the CNI's rules. A Service's connection is
// translated (DNAT) or has a mark. A connection that a helper expects is left to its rules.
func (e egressRanges) jump() jump {
	return jump{tableNAT, "POSTROUTING", newRule("! -o lo").add(ifMark(0, markMask).String(),
		"-m conntrack ! --ctstate DNAT ! --ctstatus EXPECTED", "-m addrtype ! --dst-type LOCAL",
		`-m comment --comment "spillway: egress"`).jump(chainEgress)}
}

func (e egressRanges) chains() []chain {
	c := chain{name: chainEgress}
	for _, p := range e.keep {
		c.add(to(p).jump("RETURN"))
	}
	if e.addresses == nil {
		for _, p := range e.sources {
			c.add(from(p).jump("MASQUERADE --random-fully"))
		}
		return []chain{c}
	}
	for _, p := range e.sources {
		c.add(from(p).jump(chainEgressAddresses))
	}
	addresses := chain{name: chainEgressAddresses}
	for group, a := range e.addresses {
		addresses.add(ofPodGroup(group, a.Is6()).jump("SNAT --to-source " + a.String() + " --random-fully"))
	}
	return []chain{c, addresses}
}

// ofPodGroup is the match of the pods whose addresses end in these bits.
func ofPodGroup(group int, v6 bool) *rule {
	ending := func(n int) netip.Addr {
		if v6 {
			return netip.AddrFrom16([16]byte{15: byte(n)})
		}
		return netip.AddrFrom4([4]byte{3: byte(n)})
	}
	return newRule(fmt.Sprintf("-s %s/%s", ending(group), ending(egress.PodGroups-1)))
}
