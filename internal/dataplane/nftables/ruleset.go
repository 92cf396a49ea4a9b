package nftables

import (
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// chain is a chain and its rules.
type chain struct {
	name    string
	comment string
	hook    *hook // of a base chain
	rules   []*rule
}

// hook is where a base chain hangs.
type hook struct {
	typ      string
	num      uint32
	priority int32
}

// hooks are of all base chains there may be. To remember clients comes before
// anybody gives them other addresses.
var hooks = map[string]*hook{
	"prerouting":      {"nat", unix.NF_INET_PRE_ROUTING, -100},
	"output":          {"nat", unix.NF_INET_LOCAL_OUT, -100},
	"forward":         {"filter", unix.NF_INET_FORWARD, 0},
	"postrouting":     {"nat", unix.NF_INET_POST_ROUTING, 100},
	chainRemember:     {"nat", unix.NF_INET_POST_ROUTING, 99},
	chainRememberHere: {"nat", unix.NF_INET_LOCAL_IN, 99},
	chainAsItIs:       {"nat", unix.NF_INET_POST_ROUTING, 98},

	chainAnnounced:     {"filter", unix.NF_INET_PRE_ROUTING, -150},
	chainAnnouncedHere: {"filter", unix.NF_INET_LOCAL_OUT, -150},
}

func hooked(name string, rules []*rule) chain {
	return chain{name: name, hook: hooks[name], rules: rules}
}

// sums tells two versions of a chain apart: what its rules' user data hold.
func (c *chain) sums() string {
	var b strings.Builder
	for _, r := range c.rules {
		if r.sum != "" {
			b.WriteString(r.sum)
			continue
		}
		b.Write(r.userData().get(udataRuleSum))
	}
	return b.String()
}

// tries is how often a slot without an endpoint is drawn again. A draw misses
// in less than half of all cases, so that in 1 of 256 the last rule decides: in
// it the first half of the slots, all of which are taken, are a little favored.
const tries = 8

// No name may be one of nft's words, or it could not read what it shows.
const (
	chainReject       = "refuse"
	chainMasquerade   = "own-address"
	chainRemember     = "remember"
	chainRememberHere = "remember-here"
)

// traits are what the rules depend on besides intent.
type traits struct {
	liberal bool // nf_conntrack_tcp_be_liberal
	beside  bool // see Config.Beside
	counted bool // see Config.ServiceCounters
	sockets bool // the kernel can tell whether the node listens on a port (nft_socket)
}

// ruleset writes the chains. Which there are depends on
// which sets hold something and on little else, so that it is written anew when
// the first element of its kind comes or the last goes, and not before.
type ruleset struct {
	layout *layout
	exists func(*set) bool
	all    bool // --masquerade-all
	traits
	local  intent.LocalTraffic
	chains []chain
}

func (rs *ruleset) write() []chain {
	rs.chains = append(rs.chains,
		hooked("prerouting", rs.dispatch()),
		hooked("output", rs.dispatch()),
		hooked("forward", rs.forward()),
		hooked("postrouting", []*rule{
			(&rule{comment: "what was translated here"}).ct(unix.NFT_CT_STATUS, firstReg).anyBit(firstReg, ctStatusDNAT).jumpTo(chainMasquerade),
		}),
		chain{name: chainReject, rules: rejects()},
		chain{name: chainMasquerade, rules: rs.masquerade()},
	)
	for _, b := range rs.layout.bases() {
		rs.base(b)
	}
	rs.remember()
	rs.asItIs()
	rs.expectations()
	return rs.chains
}

// dispatch finds out whether a connection's first packet is for a Service.
func (rs *ruleset) dispatch() []*rule {
	out := rs.assign()
	for i := range rs.layout.common {
		c, addr, port := &rs.layout.common[i], &rs.layout.addresses[i], &rs.layout.nodePorts[i]
		r := &rule{}
		out = append(out, addr.load(r).in(addr.frontends, firstReg).jumpTo(addr.name))
		r = (&rule{}).only(c.family).destination(c.family, firstReg).in(c.nodePortAddrs, firstReg)
		out = append(out, port.key(r).in(port.frontends, firstReg).jumpTo(port.name))
		if rs.beside {
			continue
		}
		out = append(out, (&rule{comment: "no Service has this port"}).only(c.family).
			destination(c.family, firstReg).in(c.clusterIPs, firstReg).jumpTo(chainReject))
	}
	return out
}

// load puts the frontend that a packet is for into registers, if it is of the
// family; key does without asking.
func (b *base) load(r *rule) *rule { return b.key(r.only(b.family)) }

func (b *base) key(r *rule) *rule {
	reg := uint32(firstReg)
	if !b.nodePort {
		r.destination(b.family, reg)
		reg += b.family.regs()
	}
	r.meta(unix.NFT_META_L4PROTO, reg)
	return r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, reg+1)
}

// behind is the register behind the frontend.
func (b *base) behind() uint32 { return firstReg + sizeOf(b.frontends.key)/4 }

// base writes the chains that choose an endpoint.
func (rs *ruleset) base(b *base) {
	c := chain{name: b.name}
	if rs.exists(b.counters) {
		c.rules = append(c.rules, b.load(&rule{}).in(b.counters, firstReg))
	}
	if rs.exists(b.ranges) {
		r := &rule{comment: "not in loadBalancerSourceRanges"}
		b.load(r).in(b.ranges, firstReg)
		if rs.exists(b.sources) { // an empty list allows no client
			b.key(r).source(b.family, b.behind()).notIn(b.sources, firstReg)
		}
		c.rules = append(c.rules, r.drop())
	}
	if rs.exists(b.external) {
		r := b.load(&rule{comment: "from another machine"}).in(b.external, firstReg)
		rs.notFromPods(r, b.family)
		c.rules = append(c.rules, r.fromLocal(unix.NFT_CMP_NEQ).jumpTo(b.outer.name))
		rs.pool(b, &b.outer, chain{name: b.outer.name})
	}
	rs.pool(b, &b.inner, c)
}

// pool ends a chain with the choice of an endpoint.
func (rs *ruleset) pool(b *base, p *pool, c chain) {
	if rs.exists(p.drop) {
		c.rules = append(c.rules, b.load(&rule{}).in(p.drop, firstReg).drop())
	}
	c.rules = append(c.rules, rs.sticky(b, p)...)
	if rs.exists(p.one) {
		c.rules = append(c.rules, b.load(&rule{}).look(p.one, firstReg).dnat(b.family))
	}
	for _, k := range p.class {
		if !rs.exists(k.members) {
			continue
		}
		draw := chain{name: k.members.name}
		for range tries {
			draw.rules = append(draw.rules, b.draw(&k, k.size))
		}
		draw.rules = append(draw.rules, b.draw(&k, k.size/2))
		rs.chains = append(rs.chains, draw)
		c.rules = append(c.rules, b.load(&rule{}).in(k.members, firstReg).jumpTo(draw.name))
	}
	c.rules = append(c.rules, (&rule{comment: "no endpoints"}).jumpTo(chainReject))
	rs.chains = append(rs.chains, c)
}

// draw translates to the endpoint of a random slot, if one has it.
func (b *base) draw(k *class, slots int) *rule {
	return b.load(&rule{}).random(uint32(slots), b.behind()).look(k.slots, firstReg).dnat(b.family)
}

// rejects returns the rules that reply as a host without a listener does.
func rejects() []*rule {
	proto := func(p byte) *rule {
		return (&rule{}).meta(unix.NFT_META_L4PROTO, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{p})
	}
	return []*rule{
		proto(unix.IPPROTO_TCP).reject(unix.NFT_REJECT_TCP_RST, 0),
		proto(unix.IPPROTO_UDP).reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH),
		proto(unix.IPPROTO_SCTP).reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH),
	}
}

// forward drops replies of endpoints that conntrack considers invalid (outside the TCP
// window). Untranslated, they would make the client reset a healthy connection
// (kubernetes/kubernetes#74839). A liberal conntrack has none.
func (rs *ruleset) forward() (out []*rule) {
	if rs.liberal {
		return nil
	}
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		r := (&rule{comment: "untranslated, they reset the client's connection"}).
			ct(unix.NFT_CT_STATE, firstReg).anyBit(firstReg, ctStateInvalid).only(c.family).source(c.family, firstReg)
		reg := firstReg + c.family.regs()
		r.meta(unix.NFT_META_L4PROTO, reg).payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, reg+1)
		out = append(out, r.in(c.localEndpoints, firstReg).drop())
	}
	return out
}

// masquerade decides which Service connections get the node's address. It matches the
// destination that the client requested and uses no packet mark, so that it cannot
// conflict with other programs' marks.
func (rs *ruleset) masquerade() (out []*rule) {
	for i := range rs.layout.common {
		c, addr, port := &rs.layout.common[i], &rs.layout.addresses[i], &rs.layout.nodePorts[i]
		hairpin := (&rule{comment: "an endpoint that reaches itself"}).only(c.family).
			source(c.family, firstReg).destination(c.family, firstReg+c.family.regs()).in(c.hairpin, firstReg)
		out = append(out, hairpin.masquerade())
		if rs.all {
			out = append(out, rs.asked(addr, addr.frontends).masquerade(), rs.asked(port, port.frontends).masquerade())
			continue
		}
		for _, b := range []*base{addr, port} {
			if rs.exists(b.masquerade) {
				out = append(out, rs.asked(b, b.masquerade).masquerade())
			}
		}
		for _, b := range []*base{addr, port} {
			r := rs.asked(b, b.frontends)
			r.comment = "processes of the node"
			out = append(out, r.fromLocal(unix.NFT_CMP_EQ).masquerade())
		}
		r := rs.asked(addr, addr.frontends)
		r.comment = "not from this node's pods"
		if !rs.notFromPods(r, c.family) {
			continue
		}
		if rs.exists(addr.external) {
			out = append(out, rs.asked(addr, addr.external).ret())
		}
		out = append(out, r.masquerade())
	}
	return out
}

// notFromPods goes on with what is not from this node's pods, as
// --detect-local-mode tells them. It reports false, and goes on with everything,
// where they cannot be told.
func (rs *ruleset) notFromPods(r *rule, f *family) bool {
	name := rs.local.Prefix
	if rs.local.Interface != "" {
		name = rs.local.Interface + strings.Repeat("\x00", max(0, unix.IFNAMSIZ-len(rs.local.Interface)))
	}
	if name != "" {
		// What one port of a bridge hands to another has no device when it leaves
		// (br_netfilter), and comes from a pod if anything does.
		r.meta(unix.NFT_META_IIF, firstReg).cmp(unix.NFT_CMP_NEQ, firstReg, hostU32(0))
		r.meta(unix.NFT_META_IIFNAME, firstReg).cmp(unix.NFT_CMP_NEQ, firstReg, []byte(name))
		return true
	}
	for _, p := range rs.local.Sources {
		if p.Addr().Is6() == (f == &ipv6) {
			r.source(f, firstReg).notIn(rs.layout.commonOf(f).localPods, firstReg)
			return true
		}
	}
	return false
}

// asked goes on if the client asked for a frontend of the set.
func (rs *ruleset) asked(b *base, s *set) *rule { return rs.askedFor(b).in(s, firstReg) }

// askedFor loads the frontend that the client asked for.
func (rs *ruleset) askedFor(b *base) *rule {
	r := (&rule{}).only(b.family).ctOriginal(b.family.ctDst, firstReg)
	reg := uint32(firstReg)
	if b.nodePort {
		r.in(rs.layout.commonOf(b.family).nodePortAddrs, firstReg)
	} else {
		reg += b.family.regs()
	}
	return r.meta(unix.NFT_META_L4PROTO, reg).ctOriginal(ctProtoDst, reg+1)
}

// forNode fills in what the ruleset takes from the node.
func (rs *ruleset) forNode(n *intent.Node) {
	rs.all, rs.local = n.MasqueradeAll, n.Local
}
