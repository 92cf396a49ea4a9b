package ruleset

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"go4.org/netipx"
)

// Masquerade is what the rules do with connections of pods to the outside.
type Masquerade struct {
	// Masqueraded are ranges of source addresses with different destinations that are masqueraded: to the
	// address of the output device, from all ports. The ranges do not overlap.
	Masqueraded []MasqueradeRange
	// Unclear are rules that may translate such connections in another way, or that this package does
	// not understand. No MasqueradeRange has the destinations that they concern.
	Unclear []Unclear
	// Translated are destinations that rules of nat's hook prerouting may replace: of such connections
	// it is unknown where they go.
	Translated *netipx.IPSet
}

// MasqueradeRange is where packets from some sources are masqueraded. All addresses are of one family.
type MasqueradeRange struct {
	Sources, Outside *netipx.IPSet
}

// Unclear is a rule, and why it is unclear what it does.
type Unclear struct {
	Rule *Rule
	Why  string
}

// maxSources and maxRules bound the work: a node has at most some hundred pods, each with some rules.
// kube-proxy with thousands of Services has more rules.
const (
	maxSources = 4096
	maxRules   = 1 << 14
)

// Masquerade evaluates the rules of nat's hook postrouting as a connection of a pod meets them that
// leaves by one of the external devices: its packets have no mark, no conntrack state but new, and no
// translated destination. Spillway's own rules do not count.
func (rs *Ruleset) Masquerade(external []string) (Masquerade, error) {
	out := Masquerade{Translated: setOf()}
	for _, family := range []string{"ip", "ip6"} {
		w := walker{rs: rs, family: family, hook: "postrouting", external: external, seen: map[*Rule]bool{}}
		err := w.eachSource(func(sources, _ *netipx.IPSet) {
			if outside, _ := w.outside.IPSet(); !empty(outside) {
				out.add(sources, outside)
			}
		})
		if err != nil {
			return Masquerade{}, err
		}
		out.Unclear = append(out.Unclear, w.unclear...)
		w = walker{rs: rs, family: family, hook: "prerouting", external: external, seen: map[*Rule]bool{}}
		err = w.eachSource(func(_, left *netipx.IPSet) {
			out.Translated = union(out.Translated, minus(w.all(), left))
		})
		if err != nil {
			return Masquerade{}, err
		}
	}
	return out, nil
}

// walker evaluates the rules of one family.
type walker struct {
	rs       *Ruleset
	family   string
	hook     string // "postrouting" or "prerouting"
	external []string
	usual    []string // of those, the ones that a rule has to name for all packets; nil: all of them
	outward  *Outward // not nil: packets are these, with any mark and in any state but INVALID

	source  netip.Addr // that is evaluated
	outside netipx.IPSetBuilder
	unclear []Unclear
	seen    map[*Rule]bool // rules in unclear
	err     error
}

// all returns all addresses of the family.
func (w *walker) all() *netipx.IPSet {
	if w.family == "ip6" {
		return setOf(netip.MustParsePrefix("::/0"))
	}
	return setOf(netip.MustParsePrefix("0.0.0.0/0"))
}

func setOf(prefixes ...netip.Prefix) *netipx.IPSet {
	var b netipx.IPSetBuilder
	for _, p := range prefixes {
		b.AddPrefix(p)
	}
	set, _ := b.IPSet() // fails only for an invalid prefix
	return set
}

func combine(a, b *netipx.IPSet, how func(*netipx.IPSetBuilder, *netipx.IPSet)) *netipx.IPSet {
	var builder netipx.IPSetBuilder
	builder.AddSet(a)
	how(&builder, b)
	set, _ := builder.IPSet()
	return set
}

func minus(a, b *netipx.IPSet) *netipx.IPSet { return combine(a, b, (*netipx.IPSetBuilder).RemoveSet) }
func union(a, b *netipx.IPSet) *netipx.IPSet { return combine(a, b, (*netipx.IPSetBuilder).AddSet) }
func both(a, b *netipx.IPSet) *netipx.IPSet  { return combine(a, b, (*netipx.IPSetBuilder).Intersect) }

func empty(s *netipx.IPSet) bool { return len(s.Ranges()) == 0 }

// bases returns the base chains of nat's hook, in the order in which packets enter them.
func (w *walker) bases() []*Chain {
	var list []*Chain
	for _, c := range w.rs.order {
		switch {
		case !c.Base || c.Family != w.family && c.Family != "inet":
		case c.Command == "nft" && c.Type == "nat" && c.Hook == w.hook,
			c.Command != "nft" && c.Table == "nat" && c.Name == strings.ToUpper(w.hook):
			list = append(list, c)
		}
	}
	slices.SortStableFunc(list, func(a, b *Chain) int { return cmp.Compare(priorityOf(a), priorityOf(b)) })
	return list
}

func priorityOf(c *Chain) int {
	if c.Command == "nft" {
		return c.Priority
	}
	return priorities["srcnat"]
}

// eachSource evaluates the chains of the hook for each part of the sources that rules tell apart. It
// calls f with the sources, and with the destinations whose packets no rule has translated.
func (w *walker) eachSource(f func(sources, left *netipx.IPSet)) error {
	bases := w.bases()
	if len(bases) == 0 {
		return nil
	}
	atoms, err := w.atoms()
	if err != nil {
		return err
	}
	for _, sources := range atoms {
		w.source, w.outside = sources.Ranges()[0].From(), netipx.IPSetBuilder{}
		left := w.all()
		for _, c := range bases {
			through, ended := w.chain(c, left, 0)
			left = union(through, ended)
		}
		if w.err != nil {
			return w.err
		}
		f(sources, left)
	}
	return nil
}

// add adds sources to the MasqueradeRange with the same destinations.
func (m *Masquerade) add(sources, outside *netipx.IPSet) {
	for i := range m.Masqueraded {
		if m.Masqueraded[i].Outside.Equal(outside) {
			m.Masqueraded[i].Sources = union(m.Masqueraded[i].Sources, sources)
			return
		}
	}
	m.Masqueraded = append(m.Masqueraded, MasqueradeRange{sources, outside})
}

// atoms splits all addresses at the source ranges of rules: no rule tells apart two addresses of a part.
func (w *walker) atoms() ([]*netipx.IPSet, error) {
	var ranges []netip.Prefix
	if len(w.rs.Rules) > maxRules {
		return nil, fmt.Errorf("netfilter has %d rules, more than %d", len(w.rs.Rules), maxRules)
	}
	for _, r := range w.rs.Rules {
		if r.Family != w.family && r.Family != "inet" || r.Element() || !r.inNAT() {
			continue
		}
		for _, p := range w.parse(r).sources {
			ranges = append(ranges, p.Prefixes()...)
		}
	}
	slices.SortFunc(ranges, func(a, b netip.Prefix) int { return cmp.Or(b.Bits()-a.Bits(), a.Addr().Compare(b.Addr())) })
	ranges = slices.Compact(ranges)
	if len(ranges) > maxSources {
		return nil, fmt.Errorf("rules of nat name %d source ranges, more than %d", len(ranges), maxSources)
	}
	// The narrowest ranges come first: what is left of a wider one is a part of its own.
	var parts []*netipx.IPSet
	taken := setOf()
	for _, p := range append(ranges, w.all().Prefixes()...) {
		if part := minus(setOf(p), taken); !empty(part) {
			parts = append(parts, part)
			taken = union(taken, part)
		}
	}
	return parts, nil
}

// inNAT reports whether a rule may be of type nat. Rules of other chains split the addresses in vain.
func (r *Rule) inNAT() bool { return r.Command == "nft" || r.Table == "nat" }

// maxDepth is more than the kernel's own limit of jumps (NFT_JUMP_STACK_SIZE).
const maxDepth = 16

// chain sends packets to these destinations through a chain. It returns those that fall through to the
// caller, and those that an accept ends. Packets that are masqueraded or unclear are in neither.
func (w *walker) chain(c *Chain, in *netipx.IPSet, depth int) (through, ended *netipx.IPSet) {
	through, ended = setOf(), setOf()
	if depth > maxDepth {
		w.err = errors.New("chains of nat POSTROUTING are nested too deeply")
		return in, ended
	}
	for _, r := range c.Rules {
		if empty(in) {
			break
		}
		if r.Owner() == "Spillway" {
			continue
		}
		m := w.parse(r)
		if !w.matchesSource(m) || m.never {
			continue
		}
		hit := in
		for _, d := range m.dests {
			hit = both(hit, d)
		}
		if empty(hit) {
			continue
		}
		rest := minus(in, hit)
		switch m.verdict {
		case "": // a counter, a log
			continue
		case "return":
			if m.unclear != "" {
				in = w.leaveUnclear(r, m.unclear, in, hit)
				continue
			}
			in, through = rest, union(through, hit)
		case "accept":
			if m.unclear != "" {
				in = w.leaveUnclear(r, m.unclear, in, hit)
				continue
			}
			in, ended = rest, union(ended, hit)
		case "masquerade":
			if m.unclear != "" {
				in = w.leaveUnclear(r, m.unclear, in, hit)
				continue
			}
			w.outside.AddSet(hit)
			in = rest
		case "jump", "goto":
			next := w.rs.chains[chainKey{c.Command, c.Family, c.Table, m.target}]
			if next == nil {
				in = w.leaveUnclear(r, "its target is unknown", in, hit)
				continue
			}
			if m.unclear != "" { // harmless, if the chain translates nothing
				if w.translates(next, hit, depth) {
					in = w.leaveUnclear(r, m.unclear, in, hit)
				}
				continue
			}
			f, e := w.chain(next, hit, depth+1)
			ended = union(ended, e)
			if m.verdict == "goto" {
				in, through = rest, union(through, f)
			} else {
				in = union(rest, f)
			}
		default:
			in = w.leaveUnclear(r, cmp.Or(m.unclear, "it translates or ends in another way"), in, hit)
		}
	}
	return union(through, in), ended
}

// translates reports whether a chain does anything but let packets through.
func (w *walker) translates(c *Chain, in *netipx.IPSet, depth int) bool {
	trial := walker{rs: w.rs, family: w.family, hook: w.hook, external: w.external, source: w.source, seen: map[*Rule]bool{}}
	through, _ := trial.chain(c, in, depth+1)
	w.err = cmp.Or(w.err, trial.err)
	return !through.Equal(in)
}

// leaveUnclear takes packets out that netfilter decides about, and returns the others.
func (w *walker) leaveUnclear(r *Rule, why string, in, hit *netipx.IPSet) *netipx.IPSet {
	if !w.seen[r] {
		w.seen[r] = true
		w.unclear = append(w.unclear, Unclear{r, why})
	}
	return minus(in, hit)
}

// matchesSource reports whether the rule matches the source that is evaluated.
func (w *walker) matchesSource(m match) bool {
	for i, p := range m.sources {
		if p.Contains(w.source) == m.notSources[i] {
			return false
		}
	}
	return true
}

// match is what a rule says, as far as it matters here.
type match struct {
	sources    []*netipx.IPSet
	notSources []bool
	dests      []*netipx.IPSet // all of them must have the destination
	never      bool            // it matches no connection of a pod to the outside
	unclear    string          // why it is unknown whether it matches; "": it does
	verdict    string          // "", "return", "accept", "masquerade", "jump", "goto", "other"
	target     string
}

func (m *match) source(p *netipx.IPSet, not bool) {
	m.sources, m.notSources = append(m.sources, p), append(m.notSources, not)
}

func (m *match) dest(w *walker, p *netipx.IPSet, not bool) {
	if not {
		p = minus(w.all(), p)
	}
	m.dests = append(m.dests, p)
}

// require makes the rule match only if yes is not not.
func (m *match) require(yes, not bool) { m.never = m.never || yes == not }

func (m *match) setUnclear(why string) { m.unclear = cmp.Or(m.unclear, why) }

// parse parses a rule.
func (w *walker) parse(r *Rule) (m match) {
	if r.Command == "nft" {
		w.parseNFT(r, &m)
	} else {
		w.parseIptables(r, &m)
	}
	return m
}

// addresses parses addresses, prefixes and ranges of the family. ok is false if one is none.
func (w *walker) addresses(list ...string) (*netipx.IPSet, bool) {
	var b netipx.IPSetBuilder
	for _, text := range list {
		if p, err := netip.ParsePrefix(text); err == nil {
			b.AddPrefix(p.Masked())
		} else if a, err := netip.ParseAddr(text); err == nil {
			b.Add(a)
		} else if r, err := netipx.ParseIPRange(text); err == nil {
			b.AddRange(r)
		} else {
			return nil, false
		}
	}
	set, err := b.IPSet()
	return set, err == nil
}

// isExternal tells whether packets leave by the device, or by one of a name's prefix. known is false if
// only some do.
func (w *walker) isExternal(name string) (yes, known bool) {
	prefix := strings.TrimRight(name, "*+")
	is := func(e string) bool { return e == name || prefix != name && strings.HasPrefix(e, prefix) }
	usual := w.usual
	if usual == nil {
		usual = w.external
	}
	yes = slices.ContainsFunc(w.external, is)
	return yes, !yes || !slices.ContainsFunc(usual, func(e string) bool { return !is(e) })
}
