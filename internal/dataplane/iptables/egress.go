package iptables

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
)

// chainEgress gives pods' connections to the outside the node's address. The CNI's rule may
// choose source ports by counting up: two connections that begin at once get one port, and one
// of them loses its first packet (insert_failed). Ports of this chain's rules are fully random.
// The chain exists while a range of pods is configured.
const chainEgress = chainPrefix + "EGRESS"

// egressRanges are an egress.Plan of one family.
type egressRanges struct{ sources, keep []netip.Prefix }

func newEgressRanges(f model.Family, p egress.Plan) egressRanges {
	sources := aggregate(masked(rangesOf(f, p.Sources)))
	if len(sources) == 0 {
		return egressRanges{} // Keep alone changes nothing
	}
	return egressRanges{sources, aggregate(masked(rangesOf(f, p.Keep)))}
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
	return slices.Equal(e.sources, o.sources) && slices.Equal(e.keep, o.keep)
}

// jump leads to the chain from POSTROUTING, ahead of the CNI's rules. A Service's connection is
// translated (DNAT) or has a mark. A connection that a helper expects is left to its rules.
func (e egressRanges) jump() jump {
	return jump{tableNAT, "POSTROUTING", newRule("! -o lo").add(ifMark(0, markMask).String(),
		"-m conntrack ! --ctstate DNAT ! --ctstatus EXPECTED", "-m addrtype ! --dst-type LOCAL",
		`-m comment --comment "spillway: egress"`).jump(chainEgress)}
}

func (e egressRanges) chain() chain {
	c := chain{name: chainEgress}
	for _, p := range e.keep {
		c.add(to(p).jump("RETURN"))
	}
	for _, p := range e.sources {
		c.add(from(p).jump("MASQUERADE --random-fully"))
	}
	return c
}
