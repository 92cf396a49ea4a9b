package doctor

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/node/ruleset"
	"spillway.dev/spillway/internal/page"
)

// egressBypassesRules reports rules of the node that pods' packets to the outside no longer meet.
type egressBypassesRules struct{}

func (egressBypassesRules) Name() string { return "rules and egress" }
func (egressBypassesRules) About() string {
	return "rules of the node for pods' connections to the outside"
}

// shownRules is how many rules the finding quotes.
const shownRules = 3

func (egressBypassesRules) Find(n *Node) []Finding {
	ns := n.Own()
	if ns == nil || n.Traffic == nil || len(n.Traffic.Bypass.Sources) == 0 || len(n.Traffic.Bypass.Devices) == 0 {
		return nil
	}
	b := &n.Traffic.Bypass
	out := ruleset.Outward{Sources: b.Sources, Keeps: b.Keeps, Devices: b.Devices}
	for _, d := range b.Devices {
		kind := ns.kindOf(d)
		if kind != "vxlan" { // the network of the pods
			out.Usual = append(out.Usual, d)
		}
		if kind != "bridge" { // pods may be on it too
			out.Foreign = append(out.Foreign, d)
		}
	}
	var rules []string
	list, complete := ns.Rules.Restrictions(out)
	for _, r := range list {
		rules = append(rules, r.Where+": "+r.Text)
	}
	for _, r := range ns.MarkRules {
		if r.concerns(&out) {
			rules = append(rules, "ip "+r.command()+": "+r.Text)
		}
	}
	if len(rules) == 0 && complete {
		return nil
	}
	count := page.Counted(len(rules), "rule")
	if !complete {
		count = "rules"
	}
	f := Finding{
		ID: "egress-bypasses-rules", Severity: Warning, Namespace: ns.Namespace.String(),
		Title:    fmt.Sprintf("%s of this node may not apply to pods' connections to the outside: they bypass netfilter", count),
		Evidence: rules[:min(len(rules), shownRules)],
		Numbers:  map[string]float64{"rules": float64(len(rules))},
		Packets: "With eBPF and --egress, these packets are forwarded without netfilter and without marks: what the rules drop, queue, mark " +
			"or route another way is sent all the same.",
		Remedy: "If pods need the rules: select the pods by a NetworkPolicy, use --egress on with the destinations in nonMasqueradeCIDRs, or " +
			"--bypass never. Then netfilter sees the packets. A rule without an effect on pods can stay.",
	}
	if more := len(rules) - shownRules; more > 0 {
		f.Evidence = append(f.Evidence, fmt.Sprintf("and %d more", more))
	}
	if !complete {
		f.Evidence = append(f.Evidence, "there are too many rules to compare all of them")
	}
	return []Finding{f}
}

// kindOf returns the kind of a device; "" of an ordinary one.
func (ns *Namespace) kindOf(device string) string {
	i := slices.IndexFunc(ns.Links, func(l Link) bool { return l.Name == device })
	if i < 0 {
		return ""
	}
	return ns.Links[i].Kind
}

// concerns reports whether a packet of a pod to the outside may match the rule, if it has a mark.
func (r *MarkRule) concerns(o *ruleset.Outward) bool {
	if r.Input == "lo" || slices.Contains(o.Foreign, r.Input) {
		return false
	}
	isSource := func(p netip.Prefix) bool { return p.Addr().Is6() == r.V6 && (!r.Src.IsValid() || p.Overlaps(r.Src)) }
	to := r.Dst
	if !to.IsValid() {
		to = netip.PrefixFrom(netip.IPv4Unspecified(), 0)
		if r.V6 {
			to = netip.PrefixFrom(netip.IPv6Unspecified(), 0)
		}
	}
	isKept := func(p netip.Prefix) bool { return p.Bits() <= to.Bits() && p.Overlaps(to) }
	return slices.ContainsFunc(o.Sources, isSource) && !slices.ContainsFunc(o.Keeps, isKept)
}

// command returns the words of ip that list the rule.
func (r *MarkRule) command() string {
	if r.V6 {
		return "-6 rule"
	}
	return "rule"
}
