package ruleset

import (
	"cmp"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// SourceNAT reports whether the rule gives packets another source address, and
// whether it chooses their ports at random among all.
func (r *Rule) SourceNAT() (translates, random bool) {
	ws := words(r.withoutComment())
	if r.keepsSource(ws) {
		return false, false
	}
	if r.Command != "nft" {
		t := target(ws)
		return t == "MASQUERADE" || t == "SNAT", slices.Contains(ws, "--random-fully")
	}
	return slices.Contains(ws, "masquerade") || slices.Contains(ws, "snat"), slices.Contains(ws, "fully-random")
}

// keepsSource reports whether the rule translates a source to itself, which is how
// rules prevent a later rule from translating it.
func (r *Rule) keepsSource(ws []string) bool {
	if r.Command != "nft" {
		to := after(ws, "--to-source")
		from, length, _ := strings.Cut(after(ws, "-s"), "/")
		return to != "" && to == from && (length == "32" || length == "128")
	}
	return after(ws, "snat", "to", "ip") == "saddr" || after(ws, "snat", "ip", "to", "ip") == "saddr" ||
		after(ws, "snat", "to", "ip6") == "saddr" || after(ws, "snat", "ip6", "to", "ip6") == "saddr"
}

// MakeRandom returns the shell command that replaces the rule by the same rule with
// random ports; "" for a rule with names that the tools do not accept.
func (r *Rule) MakeRandom() string {
	if r.Command != "nft" {
		args, ok := r.arguments()
		if !ok {
			return ""
		}
		return r.replaceArguments(append(args, "--random-fully"))
	}
	return r.replaceText(func(text string) string {
		separator := " "
		if ws := words(text); len(ws) > 0 && (ws[len(ws)-1] == "random" || ws[len(ws)-1] == "persistent") {
			separator = ","
		}
		return text + separator + "fully-random"
	})
}

// identifier matches a name that nft's language accepts.
var identifier = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_./-]*$`)

// arguments converts the output of iptables-save into arguments of iptables: it removes
// double quotes, and backslashes before quotes. ok is false for a rule that
// iptables-save truncated, as it does at a line break.
func (r *Rule) arguments() (args []string, ok bool) {
	var arg strings.Builder
	quotes, escaped, begun := false, false, false
	end := func() {
		if begun {
			args = append(args, arg.String())
		}
		arg.Reset()
		begun = false
	}
	for _, c := range []byte(r.Text) {
		switch {
		case escaped:
			arg.WriteByte(c)
			escaped = false
		case c == '\\':
			escaped, begun = true, true
		case c == '"':
			quotes, begun = !quotes, true
		case !quotes && (c == ' ' || c == '\t'):
			end()
		default:
			arg.WriteByte(c)
			begun = true
		}
	}
	end()
	return args, !quotes && !escaped
}

// DestNAT reports whether the rule gives packets another destination.
func (r *Rule) DestNAT() bool {
	if r.Element() {
		return false
	}
	ws := words(r.withoutComment())
	if r.Command != "nft" {
		t := target(ws)
		return t == "DNAT" || t == "REDIRECT"
	}
	return slices.Contains(ws, "dnat") || slices.Contains(ws, "redirect")
}

// DropsInvalid reports whether the rule drops packets that conntrack classifies as INVALID,
// and not RSTs alone: those stall no connection.
func (r *Rule) DropsInvalid() bool {
	text := r.withoutComment()
	if strings.Contains(text, "RST RST") || strings.Contains(text, "tcp flags rst") {
		return false
	}
	if r.Command != "nft" {
		return strings.Contains(text, "state INVALID") && target(words(text)) == "DROP"
	}
	return strings.Contains(text, "ct state invalid") && strings.HasSuffix(strings.TrimSpace(text), "drop")
}

// AssignsHelper reports whether the rule gives connections a conntrack helper.
// An nft object may have any name; by convention it has the name of the helper.
func (r *Rule) AssignsHelper(helper string) bool {
	ws := words(r.withoutComment())
	if r.Command != "nft" {
		return after(ws, "--helper") == helper
	}
	return strings.Contains(after(ws, "ct", "helper", "set"), helper)
}

// Assigned reports whether a rule assigns the helper to connections to the port. The rule
// may name the port, no port, or a set with the port.
func (rs *Ruleset) Assigned(helper string, port int) bool {
	return slices.ContainsFunc(rs.Rules, func(r *Rule) bool {
		if !r.AssignsHelper(helper) {
			return false
		}
		ws := words(r.withoutComment())
		if !strings.Contains(r.withoutComment(), "dport") {
			return true
		}
		if p, _ := r.destPort(ws); p == port {
			return true
		}
		set := rs.chains[chainKey{r.Command, r.Family, r.Table, after(ws, "dport")}]
		return set != nil && slices.ContainsFunc(set.Rules, func(e *Rule) bool {
			p, ok := e.destPort(nil)
			return e.Element() && ok && p == port
		})
	})
}

// destPort returns the destination port that the rule matches. ok is false for a rule
// that matches none or several.
func (r *Rule) destPort(ws []string) (port int, ok bool) {
	s := after(ws, "--dport")
	if r.Command == "nft" {
		s = after(ws, "dport")
	}
	if r.Element() { // 10.96.0.1 . udp . 69 : goto ..., or with more after the port
		key, _, _ := strings.Cut(r.Text, " : ")
		parts := strings.Split(key, " . ")
		last := len(parts) - 1
		if i := slices.IndexFunc(parts, func(part string) bool { return part == "udp" || part == "tcp" }); i >= 0 {
			last = min(i+1, last)
		}
		s = strings.TrimSpace(parts[last])
		if len(parts) < 2 {
			return 0, false
		}
		if fields := strings.Fields(s); len(fields) > 0 { // 69 comment "..."
			s = fields[0]
		}
	}
	port, err := strconv.Atoi(s)
	return port, err == nil
}

// destination matches the address and port of a translation.
var destination = regexp.MustCompile(`(?:--to-destination|dnat(?: ip6?)? to|redirect to) (?:\[[^\]]*\]|[0-9.-]*):(\d+)(?:$| )|--to-ports (\d+)`)

// leadsTo reports whether the rule sends packets to that port of an endpoint.
func (r *Rule) leadsTo(port int) bool {
	if r.Element() { // ... : 10.244.0.2 . 69
		_, value, ok := strings.Cut(r.Text, " : ")
		fields := strings.Fields(value)
		return ok && len(fields) >= 3 && fields[len(fields)-2] == "." && fields[len(fields)-1] == strconv.Itoa(port)
	}
	m := destination.FindStringSubmatch(r.withoutComment())
	return r.DestNAT() && m != nil && m[1]+m[2] == strconv.Itoa(port)
}

var jump = regexp.MustCompile(`(?:goto|jump) ([^\s,}]+)|vmap (@[^\s,}]+)`)

// jumps returns the chains and maps that the rule may jump to.
func (r *Rule) jumps(ws []string) []string {
	if r.Command != "nft" {
		if t := target(ws); t != "" {
			return []string{t}
		}
		return nil
	}
	var out []string
	for _, m := range jump.FindAllStringSubmatch(r.Text, -1) {
		out = append(out, m[1]+m[2])
	}
	return out
}

// Frontend is a destination port whose packets rules translate to an endpoint.
type Frontend struct {
	Command, Family string // of the rules
	Port            int
}

// Frontends returns, sorted, the destination ports of a protocol ("udp", "tcp") that
// rules translate to the given port of an endpoint. The given port itself is one if
// rules translate it.
func (rs *Ruleset) Frontends(protocol string, port int) []Frontend {
	g := graph{into: map[chainKey][]edge{}, reached: map[chainKey]bool{}, found: map[Frontend]bool{}}
	for _, r := range rs.Rules {
		ws := words(r.withoutComment())
		its := slices.Contains(ws, protocol)
		if !its && (slices.Contains(ws, "udp") || slices.Contains(ws, "tcp")) || marks(target(ws)) {
			continue // of another protocol
		}
		e := edge{from: chainKey{r.Command, r.Family, r.Table, r.Chain}}
		if p, asks := r.destPort(ws); asks && its {
			e.port = p
		}
		if its && (r.leadsTo(port) || e.port == port && r.DestNAT()) {
			g.reach(e)
		}
		for _, to := range r.jumps(ws) {
			k := chainKey{r.Command, r.Family, r.Table, to}
			if rs.chains[k] == nil {
				continue // a verdict
			}
			g.into[k] = append(g.into[k], e)
			if e.port == port && r.Table != "filter" {
				g.reach(e)
			}
		}
	}
	g.walk()
	return slices.SortedFunc(maps.Keys(g.found), func(a, b Frontend) int {
		return cmp.Or(cmp.Compare(a.Command, b.Command), cmp.Compare(a.Family, b.Family), cmp.Compare(a.Port, b.Port))
	})
}

// edge is a rule that jumps to a chain: its own chain, and the port that it matches (0:
// none).
type edge struct {
	from chainKey
	port int
}

// graph follows rules backwards, from the translations to the ports that lead to them.
type graph struct {
	into    map[chainKey][]edge
	reached map[chainKey]bool
	todo    []chainKey
	found   map[Frontend]bool
}

func (g *graph) reach(e edge) {
	if e.port != 0 {
		g.found[Frontend{e.from.command, e.from.family, e.port}] = true
	} else if !g.reached[e.from] {
		g.reached[e.from] = true
		g.todo = append(g.todo, e.from)
	}
}

func (g *graph) walk() {
	for ; len(g.todo) > 0; g.todo = g.todo[1:] {
		for _, e := range g.into[g.todo[0]] {
			g.reach(e)
		}
	}
}

// marks reports whether a chain only marks packets, such as KUBE-MARK-MASQ.
func marks(target string) bool { return strings.Contains(target, "MARK") || target == "RETURN" }

// Walk is the largest number of rules that the first packet of a connection traverses
// if no rule matches it.
type Walk struct {
	Chain *Chain
	Rules int
}

// FirstPacket returns the Walk of every base chain.
func (rs *Ruleset) FirstPacket() []Walk {
	var out []Walk
	lengths := map[*Chain]int{}
	for _, c := range rs.order {
		if c.Base {
			out = append(out, Walk{c, rs.length(c, lengths)})
		}
	}
	return out
}

func (rs *Ruleset) length(c *Chain, known map[*Chain]int) int {
	if n, ok := known[c]; ok {
		return n
	}
	known[c] = 0 // a loop, which the kernel refuses, would end here
	n := 0
	for _, r := range c.Rules {
		n++
		if to := r.always(); to != "" {
			if next := rs.chains[chainKey{c.Command, c.Family, c.Table, to}]; next != nil {
				n += rs.length(next, known)
			}
		}
	}
	known[c] = n
	return n
}

// first matches conditions that every first packet meets.
var first = regexp.MustCompile(`-m (conntrack --ctstate|state --state) NEW|ct state new|counter packets \d+ bytes \d+|counter`)

// always returns the chain that the rule jumps to with every first packet; "" for none.
func (r *Rule) always() string {
	ws := strings.Fields(first.ReplaceAllString(r.withoutComment(), ""))
	if len(ws) == 2 && slices.Contains([]string{"-j", "-g", "jump", "goto"}, ws[0]) {
		return ws[1]
	}
	return ""
}

// Addresses is the set of addresses that rules may translate to.
type Addresses struct {
	single map[netip.Addr]struct{}
	ranges [][2]netip.Addr
	nets   []netip.Prefix // that rules translate to
}

// Addresses returns the addresses that translating rules and elements of sets and maps
// mention.
func (rs *Ruleset) Addresses() *Addresses {
	a := &Addresses{single: map[netip.Addr]struct{}{}}
	for _, r := range rs.Rules {
		translates := r.DestNAT() || strings.Contains(r.Text, "NETMAP")
		if !translates && !r.Element() {
			continue
		}
		for _, w := range words(r.withoutComment()) {
			a.add(w, translates)
		}
	}
	return a
}

func (a *Addresses) add(word string, translates bool) {
	if !strings.ContainsAny(word, ".:") {
		return
	}
	if addr, err := netip.ParseAddr(word); err == nil {
		a.single[addr] = struct{}{}
	} else if both, err := netip.ParseAddrPort(word); err == nil {
		a.single[both.Addr()] = struct{}{}
	} else if p, err := netip.ParsePrefix(word); err == nil {
		if p.IsSingleIP() {
			a.single[p.Addr()] = struct{}{}
		} else if translates {
			a.nets = append(a.nets, p)
		}
	} else if lo, hi, ok := strings.Cut(word, "-"); ok {
		hi, _, _ = strings.Cut(hi, ":")
		from, err1 := netip.ParseAddr(lo)
		to, err2 := netip.ParseAddr(hi)
		if err1 == nil && err2 == nil {
			a.ranges = append(a.ranges, [2]netip.Addr{from, to})
		}
	}
}

// Mention reports whether a rule mentions the address.
func (a *Addresses) Mention(addr netip.Addr) bool {
	if _, ok := a.single[addr]; ok {
		return true
	}
	return slices.ContainsFunc(a.nets, func(p netip.Prefix) bool { return p.Contains(addr) }) ||
		slices.ContainsFunc(a.ranges, func(r [2]netip.Addr) bool { return !addr.Less(r[0]) && !r[1].Less(addr) })
}
