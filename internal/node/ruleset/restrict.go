package ruleset

import (
	"net/netip"
	"regexp"
	"slices"
	"strings"

	"go4.org/netipx"
)

// Outward describes packets of pods to the outside that are forwarded without netfilter: TCP, UDP
// and ICMP echo requests, with a source in Sources and a destination outside of Keeps.
type Outward struct {
	Sources, Keeps []netip.Prefix
	// Devices are those by which packets may leave. Usual are those that lead to hosts outside, and not to
	// other pods alone. By those of Foreign no packet enters.
	Devices, Usual, Foreign []string
}

// Restriction is a rule, or the policy of a chain, that may drop, queue or mark a packet.
type Restriction struct{ Where, Text string }

// Bounds of the work: the rules of a host firewall are some hundred.
const (
	maxSteps    = 1 << 13 // rules that are compared for a family
	maxElements = 1 << 12 // of a set that is compared by its addresses
	maxParts    = 64      // ranges of destinations that are followed separately
	maxVisits   = 8       // of a chain, each for more destinations; then all destinations may meet it
)

// Restrictions returns the rules and policies that may concern such packets, in the order in which
// packets meet them. A rule of which that is unclear is one. Those of Spillway, of proxies, of flannel, of
// Docker for its own bridges and of NetworkPolicy engines are none. complete is false if there are too
// many rules to compare.
func (rs *Ruleset) Restrictions(o Outward) (list []Restriction, complete bool) {
	complete = true
	if !slices.ContainsFunc(rs.Rules, (*Rule).mayRestrict) && !slices.ContainsFunc(rs.order, (*Chain).drops) {
		return nil, true
	}
	named := map[any]bool{}
	for _, family := range []string{"ip", "ip6"} {
		f := follower{
			w:       &walker{rs: rs, family: family, external: o.Devices, usual: o.Usual, outward: &o},
			sources: ofFamily(o.Sources, family), keeps: ofFamily(o.Keeps, family),
			matches: map[*Rule]*match{}, visits: map[*Chain]*visit{}, named: named,
		}
		if empty(f.sources) {
			continue
		}
		for _, c := range rs.order {
			if !c.forwards(family) {
				continue
			}
			through := f.chain(c, f.w.all(), 0)
			policy := &Rule{Table: c.Table, Chain: c.Name}
			if c.drops() && !policy.ofAnother() && !empty(minus(through, f.keeps)) {
				f.name(c, c.policy())
			}
		}
		list = append(list, f.list...)
		complete = complete && f.steps <= maxSteps
	}
	return list, complete
}

func ofFamily(list []netip.Prefix, family string) *netipx.IPSet {
	return setOf(slices.DeleteFunc(slices.Clone(list), func(p netip.Prefix) bool { return p.Addr().Is6() != (family == "ip6") })...)
}

// drops reports whether the policy of a base chain drops packets.
func (c *Chain) drops() bool { return strings.EqualFold(c.Policy, "drop") }

// policy returns the policy as it is listed.
func (c *Chain) policy() Restriction {
	if c.Command == "nft" {
		return Restriction{"nft " + c.Family + " " + c.Table + " " + c.Name, "policy drop"}
	}
	return Restriction{c.Command + " " + c.Table + " " + c.Name, ":" + c.Name + " DROP"}
}

// forwards reports whether forwarded packets of a family enter here, and rules may filter or mark them.
func (c *Chain) forwards(family string) bool {
	switch {
	case !c.Base || c.Family != family && c.Family != "inet":
		return false
	case c.Command == "nft":
		return (c.Type == "filter" || c.Type == "route") && slices.Contains([]string{"prerouting", "forward", "postrouting"}, c.Hook)
	}
	return slices.Contains([]string{
		"raw PREROUTING", "mangle PREROUTING", "mangle FORWARD", "mangle POSTROUTING", "filter FORWARD", "security FORWARD",
	}, c.Table+" "+c.Name)
}

// follower follows the packets of a family through the chains. It never loses a packet: a rule that may
// let it pass leaves it.
type follower struct {
	w              *walker
	sources, keeps *netipx.IPSet
	matches        map[*Rule]*match
	visits         map[*Chain]*visit
	named          map[any]bool // of both families
	list           []Restriction
	steps          int
}

// visit is what was followed through a chain already: destinations, and those that left at its end.
type visit struct {
	in, through *netipx.IPSet
	times       int
}

// chain follows packets to these destinations. It returns those that may fall through to the caller.
func (f *follower) chain(c *Chain, in *netipx.IPSet, depth int) *netipx.IPSet {
	v := f.visits[c]
	if depth > maxDepth {
		return in
	}
	if v != nil && empty(minus(in, v.in)) {
		return both(in, v.through)
	}
	if v == nil {
		v = &visit{in: setOf(), through: setOf()}
		f.visits[c] = v
	}
	v.in, v.through = union(in, v.in), union(in, v.through)
	if v.times++; v.times > maxVisits {
		v.in, v.through = f.w.all(), f.w.all()
	}
	left, through := v.in, setOf()
	for _, r := range c.Rules {
		if f.steps++; f.steps > maxSteps || empty(left) {
			break
		}
		var returned *netipx.IPSet
		left, returned = f.rule(c, r, left, depth)
		through = union(through, returned)
	}
	v.through = union(through, left)
	return both(in, v.through)
}

// rule sends packets through a rule. It returns those that may meet the next rule, and those that
// return to the caller.
func (f *follower) rule(c *Chain, r *Rule, in *netipx.IPSet, depth int) (left, returned *netipx.IPSet) {
	m, none := f.match(r), setOf()
	certain, never := f.concerns(m)
	if never {
		return in, none
	}
	hit := in
	for _, d := range m.dests {
		hit = both(hit, d)
	}
	if empty(hit) {
		return in, none
	}
	if r.Command == "nft" && f.verdictMap(c, r, hit, depth) {
		return in, none
	}
	if !empty(minus(hit, f.keeps)) && r.restricts() && !r.ofAnother() {
		f.name(r, Restriction{r.Where(), r.Text})
	}
	rest := in
	if certain && len(in.Ranges()) < maxParts {
		rest = minus(in, hit)
	}
	switch {
	case m.verdict == "jump" || m.verdict == "goto":
		next := f.w.rs.chains[chainKey{c.Command, c.Family, c.Table, m.target}]
		if next == nil { // a target that changes something else
			return in, none
		}
		through := f.chain(next, hit, depth+1)
		if m.verdict == "goto" {
			return rest, through
		}
		return union(rest, through), none
	case m.verdict == "return":
		return rest, hit
	case m.verdict == "accept" || m.verdict == "other" && r.ends():
		return rest, none
	}
	return in, none
}

// match returns what a rule says.
func (f *follower) match(r *Rule) *match {
	m := f.matches[r]
	if m == nil {
		parsed := f.w.parse(r)
		m = &parsed
		f.matches[r] = m
	}
	return m
}

// concerns reports whether a rule matches each source, or none.
func (f *follower) concerns(m *match) (certain, never bool) {
	certain = m.unclear == ""
	for i, s := range m.sources {
		hit := both(f.sources, s)
		if m.notSources[i] {
			hit = minus(f.sources, s)
		}
		never = never || empty(hit)
		certain = certain && hit.Equal(f.sources)
	}
	return certain, never || m.never
}

func (f *follower) name(key any, r Restriction) {
	if !f.named[key] {
		f.named[key] = true
		f.list = append(f.list, r)
	}
}

// verdictMap follows the elements of a map of verdicts. Any of them may match. It returns false for a
// rule without such a map.
func (f *follower) verdictMap(c *Chain, r *Rule, hit *netipx.IPSet, depth int) bool {
	if !strings.Contains(r.Text, "vmap") {
		return false
	}
	list := nftWords(r.withoutLog())
	at := slices.Index(list, "vmap")
	if at < 0 || at+1 >= len(list) {
		return false
	}
	var elements []string
	if name, isNamed := strings.CutPrefix(list[at+1], "@"); isNamed {
		if set := f.w.rs.chains[chainKey{"nft", r.Family, r.Table, "@" + name}]; set != nil {
			for _, e := range set.Rules {
				elements = append(elements, e.withoutComment())
			}
		}
	} else {
		elements = splitElements(strings.Trim(list[at+1], "{}"))
	}
	for _, element := range elements {
		if f.steps++; f.steps > maxSteps {
			return true
		}
		key, verdict, _ := strings.Cut(element, " : ")
		fields := strings.Fields(verdict)
		if len(fields) == 0 || f.otherKey(list[:at], words(key)) {
			continue
		}
		switch fields[0] {
		case "drop", "queue":
			if !empty(minus(hit, f.keeps)) && !r.ofAnother() {
				f.name(r, Restriction{r.Where(), r.Text})
			}
		case "jump", "goto":
			if next := f.w.rs.chains[chainKey{c.Command, c.Family, c.Table, fields[len(fields)-1]}]; next != nil {
				f.chain(next, hit, depth+1)
			}
		}
	}
	return true
}

// otherKey reports whether no packet has the key of an element, where the words before the map end with
// the property that it compares.
func (f *follower) otherKey(before, key []string) bool {
	switch property := before[max(0, len(before)-2):]; {
	case slices.Equal(property, []string{"ct", "state"}):
		var m match
		m.states(key, false)
		return m.never
	case len(before) > 0 && (before[len(before)-1] == "iifname" || before[len(before)-1] == "iif"):
		return len(key) == 1 && f.w.entersElsewhere(key[0])
	}
	return false
}

// restrictingTargets are the targets of iptables that drop, queue or mark packets.
var restrictingTargets = []string{"DROP", "REJECT", "QUEUE", "NFQUEUE", "MARK", "CONNMARK", "HMARK", "TPROXY"}

// restricts reports whether the rule drops, queues or marks packets, without the verdicts of a map.
func (r *Rule) restricts() bool {
	if r.Element() {
		return false
	}
	if r.Command != "nft" {
		args, _ := r.arguments()
		return slices.Contains(restrictingTargets, after(args, "-j"))
	}
	list := nftWords(r.withoutLog())
	for i, word := range list {
		switch word {
		case "drop", "reject", "queue", "tproxy":
			if i == 0 || list[i-1] != "jump" && list[i-1] != "goto" {
				return true
			}
		case "mark":
			if i+1 < len(list) && list[i+1] == "set" {
				return true
			}
		}
	}
	return false
}

// ends reports whether a rule that matches ends the packet's way.
func (r *Rule) ends() bool {
	if r.Command != "nft" {
		args, _ := r.arguments()
		t := after(args, "-j")
		return t == "DROP" || t == "REJECT"
	}
	list := nftWords(r.withoutLog())
	return slices.Contains(list, "drop") || slices.Contains(list, "reject")
}

// mayRestrict is cheap, and true for each rule or element with a verdict that restricts.
func (r *Rule) mayRestrict() bool {
	for _, word := range []string{"DROP", "REJECT", "QUEUE", "MARK", "TPROXY"} {
		if strings.Contains(r.Text, word) && r.Command != "nft" {
			return true
		}
		if r.Command == "nft" && strings.Contains(r.Text, strings.ToLower(word)) {
			return true
		}
	}
	return false
}

// logPrefix matches the text of a log statement of nft, which may have any words.
var logPrefix = regexp.MustCompile(`prefix "[^"]*"`)

// withoutLog returns the text without its comment and what it logs.
func (r *Rule) withoutLog() string {
	text := r.withoutComment()
	if strings.Contains(text, "prefix") {
		text = logPrefix.ReplaceAllString(text, "")
	}
	return text
}

// others are owners whose rules concern no packet of egress: those of packets to Services, to nodes or
// between pods, and those of NetworkPolicies, which select pods whose packets stay with netfilter.
var others = []string{
	"Spillway", "kubelet", "kube-proxy", "flannel", "kube-router", "Calico", "Cilium", "Antrea", "Weave", "kindnet",
}

// ofDocker matches the rules with which Docker isolates its own bridges. Those in DOCKER-USER are the
// operator's.
var ofDocker = regexp.MustCompile(`^docker-|^\S+ DOCKER(-[A-TV-Z]\S*)? |^raw PREROUTING -d \S+ ! -i (docker|br-[0-9a-f]{12})`)

// ofAnother reports whether the rule belongs to one of those.
func (r *Rule) ofAnother() bool {
	owner := r.Owner()
	return slices.Contains(others, owner) || ofDocker.MatchString(r.Table+" "+r.Chain+" "+r.Text)
}

// entersElsewhere reports whether no packet of a pod enters by the device.
func (w *walker) entersElsewhere(device string) bool {
	if w.outward != nil {
		return device == "lo" || slices.Contains(w.outward.Foreign, device)
	}
	yes, _ := w.isExternal(device)
	return yes
}

// states requires one of these states of conntrack. Packets have another one than the first of their
// connection: a rule for those alone is unclear.
func (m *match) states(list []string, not bool) {
	first, later := false, false
	for _, s := range []string{"new", "established", "related"} {
		if slices.Contains(list, s) != not {
			first, later = first || s == "new", true
		}
	}
	for _, s := range list {
		if !slices.Contains([]string{"new", "established", "related", "invalid", "untracked", "snat", "dnat"}, s) {
			m.setUnclear("its states are not understood")
			return
		}
	}
	if !later {
		m.never = true
	} else if !first {
		m.setUnclear("it depends on the state of the connection")
	}
}

// outwardProtocols are those of packets of egress, by their names and numbers.
var outwardProtocols = [][]string{{"tcp", "6"}, {"udp", "17"}, {"icmp", "1", "ipv6-icmp", "icmpv6", "58"}}

// protocol requires one of these protocols.
func (m *match) protocol(list []string, not bool) {
	matches := 0
	for _, names := range outwardProtocols {
		if slices.ContainsFunc(names, func(n string) bool { return slices.Contains(list, n) }) != not {
			matches++
		}
	}
	if matches == 0 {
		m.never = true
	} else if matches < len(outwardProtocols) {
		m.setUnclear("it depends on the protocol")
	}
}

// icmpTypes requires one of these types of ICMP: packets are echo requests.
func (m *match) icmpTypes(list []string, not bool) {
	requests := []string{"echo-request", "8", "128", "any", "255"}
	if slices.ContainsFunc(list, func(t string) bool { return slices.Contains(requests, t) }) != not {
		m.setUnclear("it depends on the type of ICMP")
	} else {
		m.never = true
	}
}

// outwardNext takes an expression that means something else for packets of egress. ok is false if it is
// none of those.
func (p *nftRule) outwardNext() (ok bool) {
	m := p.m
	switch {
	case len(p.words) > 2 && p.words[0] == "fib" && p.words[1] == "saddr" && p.words[2] == ".":
		// A reverse path filter: the eBPF programs know the source of each packet themselves.
		m.never, p.words = true, nil
	case slices.Contains(p.words[:min(4, len(p.words))], "vmap"), slices.Contains(p.words[:min(4, len(p.words))], "."):
		m.setUnclear("it depends on several properties, or on a map")
		p.rest()
	case p.follows("ct", "state"):
		not := p.not()
		m.states(words(p.take()), not)
	case p.follows("meta", "l4proto"), p.follows("ip", "protocol"), p.follows("ip6", "nexthdr"):
		not := p.not()
		m.protocol(words(p.take()), not)
	case p.follows("icmp", "type"), p.follows("icmpv6", "type"):
		not := p.not()
		m.icmpTypes(words(p.take()), not)
	case p.follows("icmp"), p.follows("icmpv6"):
		m.setUnclear("it depends on the header of ICMP")
		p.rest()
	case p.follows("sctp"):
		m.never, p.words = true, nil
	case p.follows("tcp", "dport"), p.follows("tcp", "sport"), p.follows("udp", "dport"), p.follows("udp", "sport"),
		p.follows("th", "dport"), p.follows("th", "sport"):
		p.not()
		p.take()
		m.setUnclear("it depends on the port")
	case p.follows("iifname"), p.follows("iif"):
		not := p.not()
		word := p.take()
		names := words(word)
		if len(names) == 0 || strings.HasPrefix(word, "@") || slices.ContainsFunc(names, func(n string) bool { return !p.w.entersElsewhere(n) }) {
			m.setUnclear("it depends on the input device")
		} else {
			m.require(false, not)
		}
	case p.follows("limit"):
		m.setUnclear("it depends on a rate")
		p.rest()
	case len(p.words) > 1 && (p.words[0] == "mark" || p.words[0] == "meta" && p.words[1] == "mark") && !slices.Contains(p.words[:min(3,
		len(p.words))], "set"):
		m.setUnclear("it depends on a mark")
		p.rest()
	default:
		return false
	}
	return true
}
