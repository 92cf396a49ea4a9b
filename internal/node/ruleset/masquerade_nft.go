package ruleset

import (
	"slices"
	"strings"

	"go4.org/netipx"
)

// parseNFT parses a rule of nft, as "nft list" prints it.
func (w *walker) parseNFT(r *Rule, m *match) {
	p := nftRule{w: w, r: r, m: m, words: nftWords(r.withoutComment())}
	for len(p.words) > 0 {
		p.next()
	}
}

// nftRule is the rest of a rule.
type nftRule struct {
	w     *walker
	r     *Rule
	m     *match
	words []string
}

// nftWords splits a rule into words; an anonymous set is one of them.
func nftWords(text string) (list []string) {
	for text = strings.TrimSpace(text); text != ""; text = strings.TrimSpace(text) {
		end := strings.IndexAny(text, " \t")
		if text[0] == '{' {
			end = strings.IndexByte(text, '}') + 1
		}
		if end <= 0 || end > len(text) {
			end = len(text)
		}
		list = append(list, text[:end])
		text = text[end:]
	}
	return list
}

// take returns the next word, "" at the end.
func (p *nftRule) take() string {
	if len(p.words) == 0 {
		return ""
	}
	word := p.words[0]
	p.words = p.words[1:]
	return word
}

// follows takes these words if they come next.
func (p *nftRule) follows(words ...string) bool {
	if len(p.words) < len(words) || !slices.Equal(p.words[:len(words)], words) {
		return false
	}
	p.words = p.words[len(words):]
	return true
}

// not takes a comparison, and reports whether it is !=.
func (p *nftRule) not() bool {
	if p.follows("!=") {
		return true
	}
	p.follows("==")
	return false
}

func (p *nftRule) next() {
	m := p.m
	if p.w.outward != nil && p.outwardNext() {
		return
	}
	switch {
	case p.follows("ip", "saddr"), p.follows("ip6", "saddr"), p.follows("ip", "daddr"), p.follows("ip6", "daddr"):
		p.address()
	case p.follows("oifname"), p.follows("oif"):
		not := p.not()
		p.device(p.take(), not)
	case p.follows("iifname"), p.follows("iif"):
		not := p.not()
		if names := words(p.take()); len(names) == 1 {
			if yes, _ := p.w.isExternal(names[0]); yes {
				m.require(false, not)
				break
			}
		}
		m.setUnclear("it depends on the input device")
	case p.follows("fib", "daddr", "type"), p.follows("fib", "saddr", "type"):
		not := p.not()
		m.require(p.take() == "unicast", not)
	case p.follows("meta", "nfproto"):
		not := p.not()
		m.require((p.take() == "ipv6") == (p.w.family == "ip6"), not)
	case p.follows("meta", "mark"), p.follows("mark"):
		p.mark()
	case p.follows("ct", "state"):
		not := p.not()
		m.require(slices.Contains(strings.Split(p.take(), ","), "new"), not)
	case p.follows("ct", "status"):
		not := p.not()
		m.require(!strings.Contains(p.take(), "nat"), not)
	case p.follows("counter"):
		if p.follows("packets") {
			p.take()
			p.follows("bytes")
			p.take()
		}
	default:
		p.verdict()
	}
}

// address takes the comparison of an address. The words before were "ip saddr" or the like.
func (p *nftRule) address() {
	full := nftWords(p.r.withoutComment())
	field := full[len(full)-len(p.words)-1]
	family := full[len(full)-len(p.words)-2]
	not := p.not()
	if p.m.require(family == p.w.family, false); p.m.never {
		p.words = nil
		return
	}
	if p.follows("vmap") {
		p.m.verdict, p.words = "other", nil
		return
	}
	set, ok := p.set(p.take())
	switch {
	case !ok || len(p.words) > 0 && p.words[0] == ".":
		p.m.setUnclear("its addresses are not understood")
		p.rest()
	case field == "saddr":
		p.m.source(set, not)
	default:
		p.m.dest(p.w, set, not)
	}
}

// set returns the addresses of a word: one, an anonymous set, or a named one.
func (p *nftRule) set(word string) (*netipx.IPSet, bool) {
	if name, named := strings.CutPrefix(word, "@"); named {
		c := p.w.rs.chains[chainKey{"nft", p.r.Family, p.r.Table, "@" + name}]
		if c == nil || p.w.outward != nil && len(c.Rules) > maxElements {
			return nil, false
		}
		var list []string
		for _, e := range c.Rules {
			address, _, _ := strings.Cut(e.Text, " ")
			list = append(list, address)
		}
		return p.w.addresses(list...)
	}
	if inner, anonymous := strings.CutPrefix(word, "{"); anonymous {
		return p.w.addresses(words(strings.TrimSuffix(inner, "}"))...)
	}
	return p.w.addresses(word)
}

func (p *nftRule) device(word string, not bool) {
	names := words(word)
	if len(names) != 1 || strings.HasPrefix(word, "@") {
		p.m.setUnclear("it depends on output devices")
		return
	}
	yes, known := p.w.isExternal(names[0])
	if !known {
		p.m.setUnclear("it depends on the output device")
		return
	}
	p.m.require(yes, not)
}

// mark takes "0x1", "!= 0x1", "& 0x1 == 0x1" or "and 0x1 != 0x1", of a mark of zero, or "set …".
func (p *nftRule) mark() {
	if p.follows("set") {
		p.m.setUnclear("it sets a mark")
		p.m.verdict, p.words = "other", nil
		return
	}
	if p.follows("&") || p.follows("and") {
		p.take()
	}
	not := p.not()
	p.m.require(maskedIsZero(p.take()), not)
}

// verdict takes the end of a rule.
func (p *nftRule) verdict() {
	m := p.m
	switch word := p.take(); word {
	case "return", "accept":
		m.verdict = word
	case "masquerade":
		m.verdict = word
		if p.follows("to") {
			m.setUnclear("it gives ports of a range")
		}
		p.words = nil
	case "jump", "goto":
		m.verdict, m.target = word, p.take()
	case "snat", "dnat", "redirect", "drop", "reject", "queue":
		m.verdict, p.words = "other", nil
	case "log", "limit": // of statements without an effect here, only the words follow
		p.rest()
	case "continue":
	default:
		m.setUnclear("its words " + word + " are not understood")
		p.rest()
	}
}

// rest skips to the verdict.
func (p *nftRule) rest() {
	ends := []string{"return", "accept", "masquerade", "jump", "goto", "snat", "dnat", "redirect", "drop", "reject", "queue"}
	for len(p.words) > 0 && !slices.Contains(ends, p.words[0]) {
		if p.words[0] == "vmap" {
			p.m.verdict, p.words = "other", nil
			return
		}
		p.words = p.words[1:]
	}
}
