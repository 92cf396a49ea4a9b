package nftables

import (
	"maps"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// rawPriority is before conntrack (-200), and so before all NAT, and after
// fragments were put together (-400).
const rawPriority = -300

// policyHooks are of the base chains of the policies' table: what comes in, for
// this node or for others, and what the node itself sends.
var policyHooks = map[string]*hook{
	"prerouting": {"filter", unix.NF_INET_PRE_ROUTING, rawPriority},
	"output":     {"filter", unix.NF_INET_LOCAL_OUT, rawPriority},
}

// translatedHooks are of base chains for what netfilter has translated since: a
// Service's client asks another address, and only now is it known which pod.
var translatedHooks = map[string]*hook{
	"translated-on":   {"filter", unix.NF_INET_FORWARD, rawPriority},
	"translated-here": {"filter", unix.NF_INET_LOCAL_IN, rawPriority},
}

// way is one of the four ways in which a packet can be about a target: which side
// has the ports, and whether it is a request or an answer.
type way struct {
	name    string
	comment string
	side    policy.Side
	asks    bool // a request
	// here and port are where the packet has the target's address and port: 0 is
	// the source, 1 the destination. The peer is where here is not.
	here, port int
}

var ways = []way{
	{"asked", "requests to ports of addresses here", policy.Ingress, true, 1, 1},
	{"answering", "what these answer", policy.Ingress, false, 0, 0},
	{"asking", "requests of addresses here to ports of others", policy.Egress, true, 0, 1},
	{"answered", "what is answered to these", policy.Egress, false, 1, 0},
}

// chainOf is the chain of a verdict that looks for the peer in the packet's source
// (0) or destination (1).
func chainOf(verdict string, peer int) string {
	return verdict + [2]string{"-from", "-to"}[peer]
}

// set is the name of the set of single ports of a way, or of that of ranges. Nearly
// all targets are single ports, and a hash finds them at a fraction of what a set of
// ranges costs (nft_set_pipapo), which is looked at for every packet too.
func (w way) set(f *family, ranges bool) string {
	if ranges {
		return w.name + "-ranges" + f.suffix
	}
	return w.name + f.suffix
}

func (w way) newSet(f *family, ranges bool) *set {
	return &set{
		name: w.set(f, ranges), comment: w.comment, interval: ranges, verdict: true,
		key: []field{addrField(f), protoField, portField},
	}
}

// policyTable is what the table of policies holds, but for elements.
type policyTable struct {
	rules    map[string]*policy.Rule
	verdicts map[string]*policy.Verdict
	targets  map[string]map[ports]int // how many in each set of ways, by their ports
	kept     map[string]int           // how many in each set of them
	sets     map[string]*set
	chains   map[string]*chain
}

// ports are those of a target, both ends included.
type ports struct{ first, last uint16 }

func newPolicyTable() *policyTable {
	return &policyTable{rules: map[string]*policy.Rule{}, verdicts: map[string]*policy.Verdict{}, targets: map[string]map[ports]int{}, kept: map[string]int{}}
}

func (t *policyTable) clone() *policyTable {
	out := &policyTable{rules: maps.Clone(t.rules), verdicts: maps.Clone(t.verdicts), targets: maps.Clone(t.targets), kept: maps.Clone(t.kept)}
	for name, m := range out.targets {
		out.targets[name] = maps.Clone(m)
	}
	return out
}

// count enters a target into a set of ways, or takes it out, by 1 or -1.
func (t *policyTable) count(set string, p ports, by int) {
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
func (t *policyTable) span(set string) ports {
	out := ports{first: 0xffff}
	for p := range t.targets[set] {
		out.first, out.last = min(out.first, p.first), max(out.last, p.last)
	}
	return out
}

// shape works out sets and chains from the rest.
func (t *policyTable) shape() {
	t.sets, t.chains = map[string]*set{}, map[string]*chain{}
	var base, translated []*rule
	for _, f := range []*family{&ipv4, &ipv6} {
		for _, w := range ways {
			for _, ranges := range []bool{false, true} {
				if len(t.targets[w.set(f, ranges)]) == 0 {
					continue
				}
				s := w.newSet(f, ranges)
				t.sets[s.name] = s
				base = append(base, w.rule(&rule{}, f, s, t.span(s.name)))
				if w.asks && t.denies() {
					translated = append(translated, w.rule((&rule{}).translated(), f, s, t.span(s.name)))
				}
			}
		}
	}
	for _, r := range t.rules {
		for _, s := range peerSets(r) {
			t.sets[s.name] = s
		}
	}
	for _, f := range []*family{&ipv4, &ipv6} {
		if s := trackedSet(f); t.kept[s.name] > 0 {
			t.sets[s.name] = s
		}
	}
	for _, v := range t.verdicts {
		for peer := range 2 {
			name := chainOf(v.Name, peer)
			t.chains[name] = &chain{name: name, rules: t.verdictRules(v, peer)}
		}
	}
	t.hook(policyHooks, base)
	t.hook(translatedHooks, translated)
}

// hook makes base chains of rules, if there are any.
func (t *policyTable) hook(hooks map[string]*hook, rules []*rule) {
	if len(rules) == 0 {
		return
	}
	for name, h := range hooks {
		t.chains[name] = &chain{name: name, hook: h, rules: rules}
	}
}

// denies reports whether requests may have to be denied.
func (t *policyTable) denies() bool {
	for _, v := range t.verdicts {
		if v.Deny {
			return true
		}
	}
	return false
}

// translated goes on with what asks, and has another destination than it was sent to.
func (r *rule) translated() *rule {
	r.ct(unix.NFT_CT_STATUS, firstReg).anyBit(firstReg, ctStatusDNAT)
	return r.ct(unix.NFT_CT_DIRECTION, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{0})
}

// rule sends packets of a target to the chain of its verdict, and back. It reads the port
// first: a packet of no target costs a comparison, and not a lookup.
func (w way) rule(r *rule, f *family, s *set, span ports) *rule {
	r.comment = w.comment
	r.only(f)
	reg := firstReg + f.regs()
	r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*w.port), 2, reg+1).between(span, reg+1)
	r.address(f, w.here, firstReg).meta(unix.NFT_META_L4PROTO, reg)
	return r.lookup(s, firstReg, unix.NFT_REG_VERDICT, 0)
}

// between goes on if the port at reg is one of these.
func (r *rule) between(p ports, reg uint32) *rule {
	first, last := appendPort(nil, p.first), appendPort(nil, p.last)
	if p.first == p.last {
		return r.cmp(unix.NFT_CMP_EQ, reg, first[:2])
	}
	return r.within(reg, first[:2], last[:2])
}

// address loads a packet's source (0) or destination (1).
func (r *rule) address(f *family, which int, reg uint32) *rule {
	if which == 0 {
		return r.source(f, reg)
	}
	return r.destination(f, reg)
}

// counted adds a counter, for metrics and for people who list the table.
func (r *rule) counted(policy, verdict string) *rule {
	r.counts = counterKey{policy, verdict}
	return r.counter()
}

func (r *rule) notrack() *rule { return r.add("notrack", func(*attrs) {}) }

// done ends the path of an allowed packet through the table, if possible. A packet that
// the destination pod allows as a request needs no check as a reply. An egress rule of the
// source pod may still deny it.
func (t *policyTable) done(v *policy.Verdict, peer int) func(*rule) *rule {
	asked := peer == 0 && t.side(v) == policy.Ingress
	if !asked || v.Track || t.hasEgress() {
		return (*rule).ret
	}
	return (*rule).accept
}

func (t *policyTable) side(v *policy.Verdict) policy.Side { return t.rules[v.Rules[0]].Side }

func (t *policyTable) hasEgress() bool {
	for _, v := range t.verdicts {
		if t.side(v) == policy.Egress {
			return true
		}
	}
	return false
}

// verdictRules match the peer. A packet whose peer is in no rule is denied, or continues.
// The node itself is never denied, as with NetworkPolicies: kubelet's probes come from the
// node's address that is nearest to the pod.
func (t *policyTable) verdictRules(v *policy.Verdict, peer int) (out []*rule) {
	end := t.done(v, peer)
	if !v.Track {
		for _, w := range ways {
			if w.side == t.side(v) && 1-w.here == peer {
				out = t.trackedRules(peer, w.port)
			}
		}
	}
	match := func(policy string, r *rule) {
		if v.Track {
			r.counted(policy, "tracked")
		} else {
			r.counted(policy, "untracked").notrack()
		}
		out = append(out, end(r))
	}
	for _, name := range v.Rules {
		r := t.rules[name]
		if r.Anybody {
			match(r.Policy, &rule{})
			continue
		}
		for _, s := range peerSets(r) {
			f := &ipv4
			if s.key[0].size == ipv6.size {
				f = &ipv6
			}
			match(r.Policy, (&rule{}).only(f).address(f, peer, firstReg).in(s, firstReg))
		}
	}
	if v.Deny {
		by := t.rules[v.Rules[0]].Policy
		out = append(append(out, itself(peer)...), (&rule{comment: aboutPolicy(by) + deniesOthers}).counted(by, "denied").drop())
	}
	return out
}

// trackedSet holds the pairs between which packets stay tracked although they match; see
// policy.Tracker.Keep.
func trackedSet(f *family) *set {
	addr := addrField(f)
	return &set{name: "kept" + f.suffix, comment: "here, peer and port of what somebody translates: stays tracked", key: []field{addr, addr, protoField, portField}}
}

func trackedElem(p policy.Pair) (set, key string) {
	f := familyOfAddr(p.Here)
	raw := appendProto(appendAddr(appendAddr(nil, p.Here), p.Peer), p.Protocol)
	return trackedSet(f).name, string(appendPort(raw, p.Port))
}

// trackedRules let what is kept go back, as if the verdict were not about it. port is where
// the packet has the target's.
func (t *policyTable) trackedRules(peer, port int) (out []*rule) {
	for _, f := range []*family{&ipv4, &ipv6} {
		s := trackedSet(f)
		if t.kept[s.name] == 0 {
			continue
		}
		r, last := (&rule{comment: "somebody translates it"}).only(f), firstReg+2*f.regs()
		r.address(f, 1-peer, firstReg).address(f, peer, firstReg+f.regs()).meta(unix.NFT_META_L4PROTO, last)
		r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*port), 2, last+1)
		out = append(out, r.in(s, firstReg).ret())
	}
	return out
}

// itself lets the node be the peer. It sends by the hook output, where a packet has come
// by no device (0), or by lo, which is device 1 of any namespace: what says by another
// that it is from the node does not come from there.
func itself(peer int) (out []*rule) {
	const comment = "the node itself"
	if peer == 1 {
		return []*rule{(&rule{comment: comment}).local(peer, unix.NFT_CMP_EQ).ret()}
	}
	for iif := range uint32(2) {
		r := (&rule{comment: comment}).meta(unix.NFT_META_IIF, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, hostU32(iif))
		out = append(out, r.local(peer, unix.NFT_CMP_EQ).ret())
	}
	return out
}

// peerSets are the sets that hold the peers of a rule: pods, which come and go, in
// a hash; ranges, which are the policy's own, in a tree.
func peerSets(r *policy.Rule) (out []*set) {
	for _, f := range []*family{&ipv4, &ipv6} {
		if r.Pods {
			out = append(out, &set{name: r.Name + "-pods" + f.suffix, comment: "pods of " + aboutRule(r), key: []field{addrField(f)}})
		}
		if slices.ContainsFunc(r.Blocks, func(b policy.Range) bool { return b.First.Is6() == (f == &ipv6) }) {
			out = append(out, &set{name: blocksOf(r.Name, f), comment: "ranges of " + aboutRule(r), key: []field{addrField(f)}, interval: true})
		}
	}
	return out
}

func aboutRule(r *policy.Rule) string { return aboutPolicy(r.Policy) + ", " + r.Side.String() }

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

func blocksOf(rule string, f *family) string { return rule + "-ranges" + f.suffix }

func familyOfAddr(a netip.Addr) *family { return familyOf(model.FamilyOf(a)) }

// memberElem is the element of a pod's address.
func memberElem(m policy.Member) (set, key string) {
	return m.Rule + "-pods" + familyOfAddr(m.Addr).suffix, string(m.Addr.AsSlice())
}

// targetElems calls do with the elements of a target that leads to a verdict.
func targetElems(t policy.Target, verdict string, do func(set, key string, v *value)) {
	f := familyOfAddr(t.Addr)
	raw := appendProto(appendAddr(nil, t.Addr), t.Protocol)
	first, last := string(appendPort(slices.Clone(raw), t.First)), ""
	if t.First != t.Last {
		last = string(appendPort(slices.Clone(raw), t.Last))
	}
	for _, w := range ways {
		if w.side == t.Side {
			do(w.set(f, last != ""), first, &value{end: last, jump: chainOf(verdict, 1-w.here)})
		}
	}
}

// blockElems are the borders of a rule's ranges of one family.
func blockElems(r *policy.Rule, f *family) (keys []string, values []*value) {
	for _, b := range r.Blocks {
		if familyOfAddr(b.First) != f {
			continue
		}
		keys, values = append(keys, string(b.First.AsSlice())), append(values, &value{})
		if end := b.Last.Next(); end.IsValid() {
			keys, values = append(keys, string(end.AsSlice())), append(values, &value{flags: intervalEnd})
		}
	}
	return keys, values
}
