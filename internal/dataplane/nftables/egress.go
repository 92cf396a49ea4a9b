package nftables

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// Connections of pods to the outside get the node's address from a rule of this table, not
// from the CNI's. The CNI's rule may choose source ports by counting up: two connections that
// begin at once get one port, and one of them loses its first packet (insert_failed). Ports of
// this rule are fully random.
//
//	egress-sources4     ranges of the pods concerned (egress.Plan.Sources)
//	egress-keep4        destinations that are left to other programs' rules (egress.Plan.Keep)
//	egress-addresses4   last bits of a pod's address -> the node's address (egress.Plan.ForPods)
//
// The first rule that translates the source of a connection ends its way through chains of
// type nat. So chain "egress" comes before the CNI's: iptables and flannel have theirs at
// srcnat (100), others at 99, kindnet at srcnat - 5. It comes no earlier: srcnat - 10 is where
// operators and other programs put SNAT rules that precede the CNI's, and these rules still
// win. The rule takes no connection that the table's other chains of this hook are about, so
// that their order does not matter: Services' connections are translated (dnat), and chain
// "as-it-is" is about expected ones.
const (
	chainEgress    = "egress"
	egressPriority = 94
)

// egressSets are the sets of one family.
type egressSets struct{ sources, keep, addresses *set }

func (l *layout) egressSets(f *nft.IP) egressSets {
	ranges := func(name, comment string) *set {
		return l.add(nft.Set{Name: name + f.Suffix, Key: []nft.Field{nft.AddrField(f)}, Interval: true, Comment: comment})
	}
	return egressSets{
		sources: ranges("egress-sources", "pods whose packets to the outside get the node's address"),
		keep:    ranges("egress-keep", "destinations that are left to other rules"),
		addresses: l.add(nft.Set{
			Name: "egress-addresses" + f.Suffix, Key: []nft.Field{nft.AddrField(f)}, Data: []nft.Field{nft.AddrField(f)},
			Comment: "the node's addresses, by the last bits of pods'",
		}),
	}
}

// egress renders the ranges of one family. Without sources, the family needs no rule.
func (r *rendering) egress(to egressSets, n *intent.Node, is6 bool) {
	if slices.ContainsFunc(n.Egress.Sources, func(p netip.Prefix) bool { return p.Addr().Is6() == is6 }) {
		r.addIntervals(to.sources, n.Egress.Sources, is6)
		r.addIntervals(to.keep, n.Egress.Keep, is6)
		for group, a := range n.Egress.ForPods(is6) {
			key := make([]byte, a.BitLen()/8)
			key[len(key)-1] = byte(group)
			r.add(to.addresses, string(key), nft.Value{Data: string(appendAddr(nil, a))})
		}
	}
}

// egress writes the rules that give pods' connections to the outside the node's address.
func (rs *ruleset) egress() {
	var rules []*nft.Rule
	for i := range rs.layout.common {
		if c := &rs.layout.common[i]; rs.exists(c.egress.sources) {
			rules = append(rules, egressRule(c, rs.exists(c.egress.keep), rs.exists(c.egress.addresses)))
		}
	}
	if rules != nil {
		rs.chains = append(rs.chains, hooked(chainEgress, rules))
	}
}

// podGroupMask has the bits of a pod's address that are the number of its group.
func podGroupMask(f *nft.IP) []byte {
	mask := make([]byte, f.Size)
	mask[len(mask)-1] = egress.PodGroups - 1
	return mask
}

func egressRule(c *common, keeps, addresses bool) *nft.Rule {
	r := lacksStatus(nft.CtStatusDNAT | nft.CtStatusExpected).Version(c.family)
	r.Addr(c.family, nft.Source, nft.Reg).In(c.egress.sources.Name, nft.Reg)
	if keeps {
		r.Addr(c.family, nft.Destination, nft.Reg).NotIn(c.egress.keep.Name, nft.Reg)
	}
	r.OutputDevice(unix.NFT_CMP_NEQ, loopback).Local(nft.Destination, unix.NFT_CMP_NEQ).Counter()
	if !addresses {
		return r.Masquerade()
	}
	r.Addr(c.family, nft.Source, nft.Reg).And(nft.Reg, podGroupMask(c.family))
	return r.Map(c.egress.addresses.Name, nft.Reg).SNATFullyRandom(c.family)
}

// loopback is the number of device lo in every network namespace (LOOPBACK_IFINDEX).
const loopback = 1
