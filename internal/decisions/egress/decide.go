package egress

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
)

// Mode is a value of --egress.
type Mode string

// The modes.
const (
	Off  Mode = "off"  // netfilter does what the CNI tells it
	Auto Mode = "auto" // what the CNI's rules masquerade
	On   Mode = "on"   // what a File says
)

// Modes lists the modes.
func Modes() []string { return []string{string(Off), string(Auto), string(On)} }

// Facts are what a Plan depends on.
type Facts struct {
	Rules *Rules // nil: not read yet, or they cannot be read
	File  *File  // nil: the ranges of the cluster's pods keep their address
	Err   string // why Rules or File are missing or old; "": they are not
	// Addresses are ranges: connections get the node's addresses in them; nil: that of the route's device.
	Addresses []netip.Prefix
	// AddressesOf is where Addresses are from: a flag, or an annotation.
	AddressesOf string
	// Lasting are the node's addresses that are neither temporary nor deprecated. No others are taken from Addresses,
	// except Deprecated ones that a range names alone: a socket may bind to them too, and RFC 6724, rule 3, is only a
	// preference. keepalived (vrrp_ipaddress.c: IPv6 with the length 128) and kube-vip (#1199) add virtual addresses as
	// deprecated, so that the kernel chooses them for no other connection.
	Lasting, Deprecated []netip.Addr
}

// Rules are what netfilter does with connections of pods to the outside.
type Rules struct {
	Masqueraded []MasqueradeRange
	Translated  []netip.Prefix // destinations that other rules may replace
	Unclear     []string       // rules that are not understood, each with the reason
}

// MasqueradeRange says where packets of some sources are masqueraded. All addresses are of one family.
type MasqueradeRange struct {
	Sources, Outside []netip.Prefix
}

// Node is what is known of the node.
type Node struct {
	Addrs        []netip.Addr   // the node's own, sorted
	Pods         []netip.Addr   // of Pods of this node
	PodCIDRs     []netip.Prefix // of this node's pods
	ClusterCIDRs []netip.Prefix // of all pods
}

// maxRanges bounds the ranges of a Plan: each is an entry of a map or a rule.
const maxRanges = 1024

// never are destinations that no CNI masquerades: groups, broadcast, the link and the node itself.
var never = prefixes("224.0.0.0/4", "255.255.255.255/32", "127.0.0.0/8", "0.0.0.0/8", "ff00::/8", "fe80::/10", "::1/128", "::/128")

// metadataServers are those of clouds outside of the link-local addresses. Rules of the host keep pods from them, so
// netfilter must see the packets: AKS drops TCP to 168.63.129.16 in FORWARD (Azure/AgentBaker, block_wireserver.sh).
// The others are of Alibaba Cloud, AWS and Google Cloud.
var metadataServers = prefixes("168.63.129.16/32", "100.100.100.200/32", "fd00:ec2::/64", "fd20:ce::254/128")

func prefixes(texts ...string) (list []netip.Prefix) {
	for _, t := range texts {
		list = append(list, netip.MustParsePrefix(t))
	}
	return list
}

// Decide returns the Plan, and what is wrong: sentences without a subject.
func Decide(mode Mode, f Facts, n Node) (plan Plan, wrong []string) {
	if mode == Off || mode == "" {
		return Plan{}, nil
	}
	if f.Err != "" {
		wrong = append(wrong, f.Err)
	}
	if f.Rules == nil {
		return Plan{}, wrong
	}
	for _, text := range f.Rules.Unclear {
		wrong = append(wrong, "leaves connections to netfilter that this rule concerns: "+text)
	}
	for _, v6 := range []bool{false, true} {
		masquerade, found := MasqueradeRange{}, false
		if mode == Auto {
			masquerade, found = masqueradeOf(f.Rules.Masqueraded, v6, n)
			masquerade.Outside = minus(masquerade.Outside, slices.Concat(metadataServers, []netip.Prefix{linkLocal[v6]})...)
		} else if f.Err == "" || f.File != nil {
			var why string
			if masquerade, why = f.File.masquerade(v6, n); why != "" {
				wrong = append(wrong, why)
			}
			found = len(masquerade.Sources) > 0
		}
		if !found {
			plan.Keep = append(plan.Keep, everything(v6))
			continue
		}
		plan.Sources = append(plan.Sources, masquerade.Sources...)
		plan.Keep = append(plan.Keep, masquerade.keeps(v6, f.Rules.Translated)...)
		addresses, why := f.addresses(v6, n)
		if why != "" {
			wrong = append(wrong, why)
		}
		plan.Addresses = append(plan.Addresses, addresses...)
	}
	if len(plan.Sources) == 0 {
		return Plan{}, wrong
	}
	if len(plan.Sources)+len(plan.Keep) > maxRanges {
		return Plan{}, append(wrong, fmt.Sprintf("leaves all to netfilter: %d ranges, more than %d", len(plan.Sources)+len(plan.Keep), maxRanges))
	}
	slices.SortFunc(plan.Sources, netip.Prefix.Compare)
	slices.SortFunc(plan.Keep, netip.Prefix.Compare)
	return plan, wrong
}

// addresses returns the node's addresses of the family that connections get; why says what is wrong.
func (f Facts) addresses(v6 bool, n Node) (own []netip.Addr, why string) {
	ranges := slices.DeleteFunc(slices.Clone(f.Addresses), func(p netip.Prefix) bool { return p.Addr().Is6() != v6 })
	if len(ranges) == 0 {
		return nil, ""
	}
	unnamed := "" // set if a range has deprecated addresses, and does not name them alone
	for _, a := range n.Addrs {
		in := func(p netip.Prefix) bool { return p.Contains(a) }
		alone := func(p netip.Prefix) bool { return in(p) && p.IsSingleIP() }
		switch lasting, deprecated := slices.Contains(f.Lasting, a), slices.Contains(f.Deprecated, a); {
		case linkLocal[v6].Contains(a) || !slices.ContainsFunc(ranges, in):
		case lasting || deprecated && slices.ContainsFunc(ranges, alone):
			own = append(own, a)
		case deprecated && unnamed == "":
			unnamed = fmt.Sprintf(" but deprecated ones (name it alone: %s)", netip.PrefixFrom(a, a.BitLen()))
		}
	}
	switch {
	case len(own) == 0:
		return nil, fmt.Sprintf("has no address in %s of %s%s: connections get the address of the route's device",
			list(ranges), f.AddressesOf, unnamed)
	case len(own) > PodGroups:
		return own[:PodGroups], fmt.Sprintf("has %d addresses in %s of %s: the first %d are used",
			len(own), list(ranges), f.AddressesOf, PodGroups)
	}
	return own, ""
}

func list(ranges []netip.Prefix) string {
	texts := make([]string, len(ranges))
	for i, p := range ranges {
		texts[i] = p.String()
	}
	return strings.Join(texts, ", ")
}

// everything is all addresses of a family.
func everything(v6 bool) netip.Prefix {
	if v6 {
		return netip.MustParsePrefix("::/0")
	}
	return netip.MustParsePrefix("0.0.0.0/0")
}

// masqueradeOf returns the MasqueradeRange of this node's pods. Rules often tell this node's pods apart from others.
func masqueradeOf(all []MasqueradeRange, v6 bool, n Node) (best MasqueradeRange, found bool) {
	most := [4]int{}
	for _, w := range all {
		if len(w.Sources) == 0 || w.Sources[0].Addr().Is6() != v6 {
			continue
		}
		rank := [4]int{w.pods(n.Pods), w.overlaps(n.PodCIDRs), w.overlaps(n.ClusterCIDRs), -len(w.Outside)}
		if !found || slices.Compare(rank[:], most[:]) > 0 {
			best, most, found = w, rank, true
		}
	}
	// Packets of other sources than pods are no business of egress.
	if found && most[0]+most[1]+most[2] == 0 && len(n.Pods)+len(n.PodCIDRs)+len(n.ClusterCIDRs) > 0 {
		return MasqueradeRange{}, false
	}
	return best, found
}

// pods counts the pods that are among the sources.
func (w MasqueradeRange) pods(pods []netip.Addr) (n int) {
	for _, a := range pods {
		if slices.ContainsFunc(w.Sources, func(p netip.Prefix) bool { return p.Contains(a) }) {
			n++
		}
	}
	return n
}

// overlaps counts the ranges that share an address with the sources.
func (w MasqueradeRange) overlaps(ranges []netip.Prefix) (n int) {
	for _, r := range ranges {
		if slices.ContainsFunc(w.Sources, r.Overlaps) {
			n++
		}
	}
	return n
}

// keeps returns the destinations of the family that are left to netfilter.
func (w MasqueradeRange) keeps(v6 bool, translated []netip.Prefix) []netip.Prefix {
	var b netipx.IPSetBuilder
	for _, p := range without(v6, w.Outside) {
		b.AddPrefix(p)
	}
	for _, p := range slices.Concat(never, translated) {
		if p.Addr().Is6() == v6 {
			b.AddPrefix(p)
		}
	}
	set, _ := b.IPSet() // fails only for an invalid prefix
	return set.Prefixes()
}

// minus returns ranges without others.
func minus(ranges []netip.Prefix, others ...netip.Prefix) []netip.Prefix {
	var b netipx.IPSetBuilder
	for _, p := range ranges {
		b.AddPrefix(p)
	}
	for _, p := range others {
		b.RemovePrefix(p)
	}
	set, _ := b.IPSet() // fails only for an invalid prefix
	return set.Prefixes()
}

// without returns all addresses of a family but these.
func without(v6 bool, kept []netip.Prefix) []netip.Prefix {
	return minus([]netip.Prefix{everything(v6)}, kept...)
}
