package nftables

import (
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// rawPriority is before conntrack (-200), and so before all NAT, and after
// fragments were put together (-400).
const rawPriority = -300

// policyHooks are of the base chains of the policies' table: what comes in, for
// this node or for others, and what the node itself sends.
var policyHooks = map[string]*nft.Hook{
	"prerouting": {Type: "filter", Num: unix.NF_INET_PRE_ROUTING, Priority: rawPriority},
	"output":     {Type: "filter", Num: unix.NF_INET_LOCAL_OUT, Priority: rawPriority},
}

// translatedHooks are of base chains after DNAT, and before any masquerade: a Service's client
// asks another address, and only now is it known which pod.
var translatedHooks = map[string]*nft.Hook{
	"translated-on":   {Type: "filter", Num: unix.NF_INET_FORWARD, Priority: rawPriority},
	"translated-here": {Type: "filter", Num: unix.NF_INET_LOCAL_IN, Priority: rawPriority},
	"translated-out":  {Type: "filter", Num: unix.NF_INET_LOCAL_OUT, Priority: outputAfterDNAT},
}

// outputAfterDNAT is after the chains of type nat (-100) in the hook output.
const outputAfterDNAT = -50

// path is one of the kinds of packets of a target: requests and replies, of the policy's pods
// as servers and as clients.
type path struct {
	name    string
	comment string
	side    donottrack.Side
	stage   stage
	// target and port are the ends of the packet that have the target's address and port.
	// The peer is the other end than target.
	target, port nft.End
}

// stage says in which base chains a path is.
type stage uint8

const (
	beforeNAT     stage = iota // those of policyHooks
	andTranslated              // also those of translatedHooks, if netfilter has translated the packet
	afterNAT                   // those of translatedHooks
)

// Requests of addresses here to a Service have its address before DNAT, and rules are about
// its endpoints: any author of a Service or an EndpointSlice can be in between. So only
// after DNAT does a rule deny them.
var paths = []path{
	{"asked", "requests to ports of addresses here", donottrack.Ingress, andTranslated, nft.Destination, nft.Destination},
	{"answering", "what these answer", donottrack.Ingress, beforeNAT, nft.Source, nft.Source},
	{"asking", "requests of addresses here to ports of others", donottrack.Egress, beforeNAT, nft.Source, nft.Destination},
	{"answered", "what is answered to these", donottrack.Egress, beforeNAT, nft.Destination, nft.Source},
	{"translated", "requests of addresses here, after DNAT", donottrack.Egress, afterNAT, nft.Source, nft.Destination},
}

func (p path) peer() nft.End { return 1 - p.target }

// chain is the name of the chain of a verdict for a path's packets.
func (p path) chain(verdict string) string {
	if p.stage == afterNAT {
		return verdict + "-translated"
	}
	return chainOf(verdict, p.peer())
}

// chainOf is the name of the chain of a verdict that compares one end of the packet with the
// peers.
func chainOf(verdict string, peer nft.End) string {
	return verdict + [2]string{"-from", "-to"}[peer]
}

// set is the name of the path's set of single ports, or of ranges. Nearly all targets are
// single ports, and a hash finds them at a fraction of the cost of a set of ranges
// (nft_set_pipapo), which every packet looks up too.
func (p path) set(f *nft.IP, ranges bool) string {
	if ranges {
		return p.name + "-ranges" + f.Suffix
	}
	return p.name + f.Suffix
}

func (p path) newSet(f *nft.IP, ranges bool) *nft.Set {
	return &nft.Set{
		Name: p.set(f, ranges), Comment: p.comment, Interval: ranges, Verdict: true,
		Key: []nft.Field{nft.AddrField(f), nft.ProtocolField, nft.PortField},
	}
}

// doNotTrackTable is the content of the table of policies, without elements.
type doNotTrackTable struct {
	rules    map[string]*donottrack.Rule
	verdicts map[string]*donottrack.Verdict
	targets  map[string]map[ports]int // number in each set of the paths, by their ports
	kept     map[string]int           // number of elements of each set of tracked exceptions
	sets     map[string]*nft.Set
	chains   map[string]*nft.Chain
	counters map[*nft.Rule]counterKey // of the rules that count
}

// ports are those of a target, both ends included.
type ports struct{ first, last uint16 }

func newPolicyTable() *doNotTrackTable {
	return &doNotTrackTable{rules: map[string]*donottrack.Rule{}, verdicts: map[string]*donottrack.Verdict{},
		targets: map[string]map[ports]int{}, kept: map[string]int{}}
}

func (t *doNotTrackTable) clone() *doNotTrackTable {
	out := &doNotTrackTable{rules: maps.Clone(t.rules), verdicts: maps.Clone(t.verdicts), targets: maps.Clone(t.targets),
		kept: maps.Clone(t.kept)}
	for name, m := range out.targets {
		out.targets[name] = maps.Clone(m)
	}
	return out
}

// empty reports whether the table is not needed.
func (t *doNotTrackTable) empty() bool { return len(t.sets)+len(t.chains) == 0 }

// sums maps the chains to their Sums.
func (t *doNotTrackTable) sums() map[string]string {
	out := map[string]string{}
	for name, c := range t.chains {
		out[name] = c.Sums()
	}
	return out
}

// count adds a target to a set of the paths, or removes it, by 1 or -1.
func (t *doNotTrackTable) count(set string, p ports, by int) {
	m := t.targets[set]
	if m == nil {
		m = map[ports]int{}
		t.targets[set] = m
	}
	if m[p] += by; m[p] == 0 {
		delete(m, p)
	}
}

// span are the ports between which all targets of a set are.
func (t *doNotTrackTable) span(set string) ports {
	out := ports{first: 0xffff}
	for p := range t.targets[set] {
		out.first, out.last = min(out.first, p.first), max(out.last, p.last)
	}
	return out
}

// shape works out sets and chains from the rest.
func (t *doNotTrackTable) shape() {
	t.sets, t.chains, t.counters = map[string]*nft.Set{}, map[string]*nft.Chain{}, map[*nft.Rule]counterKey{}
	var base, changed []*nft.Rule
	for _, f := range families {
		for _, p := range paths {
			for _, ranges := range []bool{false, true} {
				if len(t.targets[p.set(f, ranges)]) == 0 {
					continue
				}
				s := p.newSet(f, ranges)
				t.sets[s.Name] = s
				if p.stage != afterNAT {
					base = append(base, p.rule(&nft.Rule{}, f, s, t.span(s.Name)))
				}
				if t.denies() {
					changed = append(changed, p.translatedRules(f, s, t.span(s.Name))...)
				}
			}
		}
	}
	for _, r := range t.rules {
		for _, s := range peerSets(r) {
			t.sets[s.Name] = s
		}
	}
	for _, f := range families {
		if s := trackedSet(f); t.kept[s.Name] > 0 {
			t.sets[s.Name] = s
		}
	}
	for _, v := range t.verdicts {
		for _, peer := range []nft.End{nft.Source, nft.Destination} {
			name := chainOf(v.Name, peer)
			t.chains[name] = &nft.Chain{Name: name, Rules: t.verdictRules(v, peer)}
		}
		if t.side(v) == donottrack.Egress {
			name := v.Name + "-translated"
			t.chains[name] = &nft.Chain{Name: name, Rules: t.translatedVerdictRules(v)}
		}
	}
	t.hook(policyHooks, base)
	t.hook(translatedHooks, changed)
}

// hook makes base chains of rules, if there are any.
func (t *doNotTrackTable) hook(hooks map[string]*nft.Hook, rules []*nft.Rule) {
	if len(rules) == 0 {
		return
	}
	for name, h := range hooks {
		t.chains[name] = &nft.Chain{Name: name, Hook: h, Rules: rules}
	}
}

// denies reports whether requests may have to be denied.
func (t *doNotTrackTable) denies() bool {
	for _, v := range t.verdicts {
		if v.Deny {
			return true
		}
	}
	return false
}

// translatedRules are the rules of a path in the chains of translatedHooks.
func (p path) translatedRules(f *nft.IP, s *nft.Set, span ports) []*nft.Rule {
	switch p.stage {
	case andTranslated:
		return []*nft.Rule{p.rule(translatedRequest(), f, s, span)}
	case afterNAT:
		return []*nft.Rule{p.rule(&nft.Rule{}, f, s, span)}
	}
	return nil
}

// translatedRequest matches requests whose destination netfilter has translated.
func translatedRequest() *nft.Rule {
	r := (&nft.Rule{}).Ct(unix.NFT_CT_STATUS, nft.Reg).AnyBit(nft.Reg, nft.CtStatusDNAT)
	return r.Ct(unix.NFT_CT_DIRECTION, nft.Reg).Cmp(unix.NFT_CMP_EQ, nft.Reg, []byte{0})
}

// rule sends packets of a target to the chain of its verdict, and back. It reads the port
// first: a packet of no target costs a comparison, and not a lookup.
func (p path) rule(r *nft.Rule, f *nft.IP, s *nft.Set, span ports) *nft.Rule {
	r.Comment = p.comment
	r.Version(f)
	reg := nft.Reg + f.Regs()
	span.match(r.Port(p.port, reg+1), reg+1)
	r.Addr(f, p.target, nft.Reg).Meta(unix.NFT_META_L4PROTO, reg)
	return r.JumpMap(s.Name, nft.Reg)
}

// match matches if the port at reg is one of these.
func (p ports) match(r *nft.Rule, reg uint32) {
	first, last := appendPort(nil, p.first), appendPort(nil, p.last)
	if p.first == p.last {
		r.Cmp(unix.NFT_CMP_EQ, reg, first[:2])
	} else {
		r.Between(reg, first[:2], last[:2])
	}
}

// counted adds a counter, for metrics and for people who list the table.
func (t *doNotTrackTable) counted(r *nft.Rule, policy, verdict string) *nft.Rule {
	t.counters[r] = counterKey{policy, verdict}
	return r.Counter()
}

// done ends the path of an allowed packet through the table, if possible. A packet that
// the destination pod allows as a request needs no check as a reply. An egress rule of the
// source pod may still deny it.
func (t *doNotTrackTable) done(v *donottrack.Verdict, peer nft.End) func(*nft.Rule) *nft.Rule {
	request := peer == nft.Source && t.side(v) == donottrack.Ingress
	if !request || v.Track || t.hasEgress() {
		return (*nft.Rule).Return
	}
	return (*nft.Rule).Accept
}

func (t *doNotTrackTable) side(v *donottrack.Verdict) donottrack.Side {
	return t.rules[v.Rules[0]].Side
}

func (t *doNotTrackTable) hasEgress() bool {
	for _, v := range t.verdicts {
		if t.side(v) == donottrack.Egress {
			return true
		}
	}
	return false
}

// verdictRules match the peer. A packet whose peer is in no rule is denied, or continues.
func (t *doNotTrackTable) verdictRules(v *donottrack.Verdict, peer nft.End) (out []*nft.Rule) {
	end := t.done(v, peer)
	if !v.Track {
		for _, p := range paths {
			if p.side == t.side(v) && p.peer() == peer {
				out = t.trackedRules(peer, p.port)
			}
		}
	}
	match := func(policy string, r *nft.Rule) {
		if v.Track {
			t.counted(r, policy, "tracked")
		} else {
			t.counted(r, policy, "untracked").Notrack()
		}
		out = append(out, end(r))
	}
	t.eachPeer(v, peer, match)
	if v.Deny && (t.side(v) == donottrack.Ingress || peer == nft.Source) {
		out = append(out, t.denial(v, peer)...)
	}
	return out
}

// translatedVerdictRules deny requests of addresses here, after DNAT.
func (t *doNotTrackTable) translatedVerdictRules(v *donottrack.Verdict) (out []*nft.Rule) {
	if !v.Deny {
		return nil
	}
	t.eachPeer(v, nft.Destination, func(_ string, r *nft.Rule) { out = append(out, r.Return()) })
	return append(out, t.denial(v, nft.Destination)...)
}

// eachPeer calls do with rules that match the peers of a verdict.
func (t *doNotTrackTable) eachPeer(v *donottrack.Verdict, peer nft.End, do func(policy string, r *nft.Rule)) {
	for _, name := range v.Rules {
		r := t.rules[name]
		if r.AnyPeer {
			do(r.Policy, &nft.Rule{})
			continue
		}
		for _, s := range peerSets(r) {
			f := nft.IPv4
			if s.Key[0].Size == nft.IPv6.Size {
				f = nft.IPv6
			}
			do(r.Policy, (&nft.Rule{}).Version(f).Addr(f, peer, nft.Reg).In(s.Name, nft.Reg))
		}
	}
}

// denial drops a packet, and counts it. The node itself is never denied, as with
// NetworkPolicies: kubelet's probes come from the node's address that is nearest to the pod.
func (t *doNotTrackTable) denial(v *donottrack.Verdict, peer nft.End) []*nft.Rule {
	by := t.rules[v.Rules[0]].Policy
	return append(itself(peer), t.counted(&nft.Rule{Comment: aboutPolicy(by) + deniesOthers}, by, verdictDenied).Drop())
}

// trackedSet holds the pairs between which packets stay tracked although they match; see
// donottrack.Tracker.Keep.
func trackedSet(f *nft.IP) *nft.Set {
	addr := nft.AddrField(f)
	return &nft.Set{Name: "kept" + f.Suffix, Comment: "local address, peer and port of translated connections: stay tracked",
		Key: []nft.Field{addr, addr, nft.ProtocolField, nft.PortField}}
}

func trackedElem(p donottrack.Pair) (set, key string) {
	f := familyOfAddr(p.Local)
	raw := appendProto(appendAddr(appendAddr(nil, p.Local), p.Peer), p.Protocol)
	return trackedSet(f).Name, string(appendPort(raw, p.Port))
}

// trackedRules return for tracked exceptions, as if the verdict did not exist. port is the
// end of the packet that has the target's port.
func (t *doNotTrackTable) trackedRules(peer, port nft.End) (out []*nft.Rule) {
	for _, f := range families {
		s := trackedSet(f)
		if t.kept[s.Name] == 0 {
			continue
		}
		r, last := (&nft.Rule{Comment: "translated: stays tracked"}).Version(f), nft.Reg+2*f.Regs()
		r.Addr(f, 1-peer, nft.Reg).Addr(f, peer, nft.Reg+f.Regs()).Meta(unix.NFT_META_L4PROTO, last)
		out = append(out, r.Port(port, last+1).In(s.Name, nft.Reg).Return())
	}
	return out
}

// itself lets the node be the peer. It sends by the hook output, where a packet has come
// by no device (0), or by lo, which is device 1 of any namespace: what says by another
// that it is from the node does not come from there.
func itself(peer nft.End) (out []*nft.Rule) {
	const comment = "the node itself"
	if peer == nft.Destination {
		return []*nft.Rule{(&nft.Rule{Comment: comment}).Local(peer, unix.NFT_CMP_EQ).Return()}
	}
	for device := range uint32(2) {
		r := (&nft.Rule{Comment: comment}).Device(unix.NFT_CMP_EQ, device)
		out = append(out, r.Local(peer, unix.NFT_CMP_EQ).Return())
	}
	return out
}

// peerSets are the sets that hold the peers of a rule: pods, which come and go, in
// a hash; ranges, which are the policy's own, in a tree.
func peerSets(r *donottrack.Rule) (out []*nft.Set) {
	for _, f := range families {
		if r.Pods {
			out = append(out, &nft.Set{Name: r.Name + "-pods" + f.Suffix, Comment: "pods of " + aboutRule(r), Key: []nft.Field{nft.AddrField(f)}})
		}
		if slices.ContainsFunc(r.Blocks, func(b donottrack.Range) bool { return b.First.Is6() == (f == nft.IPv6) }) {
			out = append(out, &nft.Set{Name: blocksOf(r.Name, f), Comment: "ranges of " + aboutRule(r),
				Key: []nft.Field{nft.AddrField(f)}, Interval: true})
		}
	}
	return out
}

func aboutRule(r *donottrack.Rule) string { return aboutPolicy(r.Policy) + ", " + r.Side.String() }

// A deny rule names its policy, so that the diagnosis of a dropped packet can read it
// back.
const (
	policyKind   = "DoNotTrackPolicy "
	deniesOthers = ", deny: others"
)

func aboutPolicy(name string) string {
	if len(name) > 150 {
		name = name[:150] // user data has one byte for the length
	}
	return policyKind + name
}

func blocksOf(rule string, f *nft.IP) string { return rule + "-ranges" + f.Suffix }

func familyOfAddr(a netip.Addr) *nft.IP { return familyOf(model.FamilyOf(a)) }

// memberElem is the element of a pod's address.
func memberElem(m donottrack.Member) (set, key string) {
	return m.Rule + "-pods" + familyOfAddr(m.Addr).Suffix, string(m.Addr.AsSlice())
}

// targetElems calls do with the elements of a target that leads to a verdict.
func targetElems(t donottrack.Target, verdict string, do func(set, key string, v *nft.Value)) {
	f := familyOfAddr(t.Addr)
	raw := appendProto(appendAddr(nil, t.Addr), t.Protocol)
	first, last := string(appendPort(slices.Clone(raw), t.First)), ""
	if t.First != t.Last {
		last = string(appendPort(slices.Clone(raw), t.Last))
	}
	for _, p := range paths {
		if p.side == t.Side {
			do(p.set(f, last != ""), first, &nft.Value{KeyEnd: last, Jump: p.chain(verdict)})
		}
	}
}

// blockElems are the borders of a rule's ranges of one family.
func blockElems(r *donottrack.Rule, f *nft.IP) *elemList {
	l := &elemList{}
	for _, b := range r.Blocks {
		if familyOfAddr(b.First) != f {
			continue
		}
		l.add(string(b.First.AsSlice()), &nft.Value{})
		if end := b.Last.Next(); end.IsValid() {
			l.add(string(end.AsSlice()), &nft.Value{IntervalEnd: true})
		}
	}
	return l
}
