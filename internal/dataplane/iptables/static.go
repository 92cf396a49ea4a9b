package iptables

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// Packet marks. The first is kube-proxy's and has its meaning. A packet to drop has both
// bits.
const (
	markMasquerade uint32 = 0x4000
	markRefuse     uint32 = 0x1000
	markDrop              = markRefuse | markMasquerade
	markMask              = markRefuse | markMasquerade
)

// The chains that always exist.
const (
	chainServices       = chainPrefix + "SERVICES"
	chainSources        = chainPrefix + "SOURCES"
	chainAddresses      = chainPrefix + "ADDRESSES"
	chainNodePorts      = chainPrefix + "NODEPORTS"
	chainMarkMasquerade = chainPrefix + "MARK-MASQUERADE"
	chainReject         = chainPrefix + "REJECT"
	chainDrop           = chainPrefix + "DROP"
	chainMasquerade     = chainPrefix + "MASQUERADE"
	chainRefuse         = chainPrefix + "REFUSE"
	chainForward        = chainPrefix + "FORWARD"
	chainLoopback       = chainPrefix + "LOOPBACK"
)

// The tables that hold rules of the agent.
const (
	tableNAT    = "nat"
	tableFilter = "filter"
)

var tables = []string{tableNAT, tableFilter}

// jump is a rule in a built-in chain that jumps to a chain of the agent.
type jump struct{ table, from, rule string }

// jumps are in the order of their chain. They are its first rules: an earlier ACCEPT of
// another program would hide Services.
func (f *nodeInputs) jumps() []jump {
	services := newRule(`-m comment --comment "spillway: Services"`).jump(chainServices)
	refuse := ifMark(markRefuse, markRefuse).add(`-m comment --comment "spillway: refused Services"`).jump(chainRefuse)
	list := []jump{
		{tableNAT, "PREROUTING", services},
		{tableNAT, "OUTPUT", services},
		{tableNAT, "POSTROUTING", ifMark(markMasquerade, markMasquerade).
			add(`-m comment --comment "spillway: masquerade"`).jump(chainMasquerade)},
		{tableFilter, "INPUT", refuse},
		{tableFilter, "FORWARD", refuse},
		{tableFilter, "FORWARD", newRule(`-m comment --comment "spillway: forwarding"`).jump(chainForward)},
		{tableFilter, "OUTPUT", refuse},
	}
	if f.egress.any() {
		list = append(list, f.egress.jump())
	}
	if f.family == model.IPv4 {
		list = append(list, jump{tableFilter, "INPUT",
			newRule(`-d 127.0.0.0/8 ! -i lo -m comment --comment "spillway: CVE-2020-8558"`).jump(chainLoopback)})
	}
	return list
}

// nodeInputs holds the inputs of one family's rules, apart from Services.
type nodeInputs struct {
	family        model.Family
	cluster       []string // matches of packets that are from the cluster's pods
	inside        []string // matches of packets that are from pods of this node
	nodePortAddrs []netip.Addr
	egress        egressRanges
	masqueradeAll bool
	liberal       bool // nf_conntrack_tcp_be_liberal
	sockets       bool // xt_socket is there; asked when FTP is first served
}

func newNodeInputs(f model.Family, n intent.Node, liberal bool) nodeInputs {
	of := nodeInputs{
		family:        f,
		egress:        newEgressRanges(f, n.Egress),
		masqueradeAll: n.MasqueradeAll,
		liberal:       liberal,
	}
	of.cluster, of.inside = podSources(f, n)
	for _, a := range n.NodePortAddrs {
		if model.FamilyOf(a) == f {
			of.nodePortAddrs = append(of.nodePortAddrs, a)
		}
	}
	return of
}

// podSources returns the matches of packets from pods, as --detect-local-mode defines
// them. With a device, cluster and inside are the same: packets that arrive by it. With
// addresses they differ: packets of another node's pods are not masqueraded either, but
// come from outside.
func podSources(f model.Family, n intent.Node) (cluster, inside []string) {
	switch {
	case n.Local.Interface != "":
		m := []string{"-i " + n.Local.Interface}
		return m, m
	case n.Local.Prefix != "":
		m := []string{"-i " + n.Local.Prefix + "+"}
		return m, m
	}
	cluster = sources(rangesOf(f, n.Local.Sources))
	if len(cluster) == 0 {
		cluster = sources(rangesOf(f, n.ClusterCIDRs))
	}
	if inside = sources(rangesOf(f, n.PodCIDRs)); len(inside) == 0 {
		// This node's range is unknown. As kube-proxy does, count all pods of the cluster
		// as this node's.
		inside = cluster
	}
	return cluster, inside
}

// sources returns the matches of packets from ranges.
func sources(ranges []netip.Prefix) (matches []string) {
	for _, p := range aggregate(ranges) {
		matches = append(matches, from(p).String())
	}
	return matches
}

func (f *nodeInputs) equal(o *nodeInputs) bool {
	return f.masqueradeAll == o.masqueradeAll && f.liberal == o.liberal &&
		slices.Equal(f.cluster, o.cluster) && slices.Equal(f.inside, o.inside) &&
		slices.Equal(f.nodePortAddrs, o.nodePortAddrs) && f.egress.equal(o.egress)
}

// natChains are the chains of table nat that no Service changes.
func (f *nodeInputs) natChains() []chain {
	services := chain{name: chainServices}
	services.add(newRule("").jump(chainSources))
	services.add(newRule("").jump(chainAddresses))
	for _, a := range f.nodePortAddrs {
		services.add(newRule("-d " + host(a).String()).jump(chainNodePorts))
	}
	// The packet is no Service's: SPW-SOURCES's mark does not apply.
	services.add(newRule("").jump(setMark(0, markMasquerade)))

	sources := chain{name: chainSources}
	if !f.masqueradeAll {
		for _, m := range f.cluster {
			sources.add(newRule(m).jump("RETURN"))
		}
	}
	if f.masqueradeAll || len(f.cluster) > 0 {
		sources.add(newRule("").jump(setMark(markMasquerade, markMasquerade)))
	}
	// ACCEPT ends the traversal of table nat. Table filter acts on the mark.
	list := []chain{services, sources,
		{chainMarkMasquerade, []string{newRule("").jump(setMark(markMasquerade, markMasquerade))}},
		{chainReject, []string{newRule("").jump(setMark(markRefuse, markMask)), newRule("").jump("ACCEPT")}},
		{chainDrop, []string{newRule("").jump(setMark(markDrop, markMask)), newRule("").jump("ACCEPT")}},
		// An encapsulated packet traverses the chain again; it keeps its mark.
		{chainMasquerade, []string{newRule("").jump(setMark(0, markMasquerade)), newRule("").jump("MASQUERADE --random-fully")}},
	}
	if f.egress.any() {
		list = append(list, f.egress.chains()...)
	}
	return list
}

// filterChains are all chains of table filter; no Service changes any of them.
func (f *nodeInputs) filterChains() []chain {
	unreachable := "icmp-port-unreachable"
	if f.family == model.IPv6 {
		unreachable = "icmp6-port-unreachable"
	}
	forward := chain{name: chainForward}
	if !f.liberal {
		// Conntrack does not translate a reply outside the TCP window. Its receiver
		// answers with a reset (kubernetes/kubernetes issue 74839). Where conntrack tracks
		// TCP liberally, there is no such reply. kube-proxy drops all invalid packets.
		// But conntrack may have met a connection in its middle: it bypassed netfilter
		// before, or another node translates it. Conntrack then takes forged segments for
		// valid ones, and all that follow for invalid ones.
		forward.add(newRule("-p tcp -m tcp --tcp-flags RST RST -m conntrack --ctstate INVALID").jump("DROP"))
	}
	forward.add(ifMark(markMasquerade, markMasquerade).jump("ACCEPT"))
	forward.add(newRule("-m conntrack --ctstate RELATED,ESTABLISHED").jump("ACCEPT"))
	list := []chain{forward, {chainRefuse, []string{
		ifMark(markDrop, markDrop).jump("DROP"),
		newRule("-p tcp").jump("REJECT --reject-with tcp-reset"),
		newRule("").jump("REJECT --reject-with " + unreachable),
	}}}
	if f.family == model.IPv4 {
		// Other machines can reach loopback only if a program set route_localnet. Packets
		// that such a program translated to loopback may pass.
		list = append(list, chain{chainLoopback, []string{
			newRule("-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT").jump("DROP"),
		}})
	}
	return list
}

func rangesOf(f model.Family, all []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range all {
		if model.FamilyOf(p.Addr()) == f {
			out = append(out, p)
		}
	}
	return out
}

// aggregate joins ranges that fill a larger one and removes ranges within others. A
// cluster of 5,000 nodes has as many adjacent ranges of pods, and each first packet walks
// them.
func aggregate(sorted []netip.Prefix) []netip.Prefix {
	slices.SortFunc(sorted, netip.Prefix.Compare)
	var out []netip.Prefix
	for _, p := range sorted {
		if n := len(out); n > 0 && out[n-1].Overlaps(p) {
			continue // sorted, so the earlier one is the larger
		}
		out = append(out, p)
		for n := len(out); n > 1; n = len(out) {
			above, _ := out[n-1].Addr().Prefix(out[n-1].Bits() - 1)
			if out[n-2].Bits() != out[n-1].Bits() || !above.Contains(out[n-2].Addr()) {
				break
			}
			out = append(out[:n-2], above)
		}
	}
	return out
}
