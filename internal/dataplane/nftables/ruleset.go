package nftables

import (
	"strings"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// hooks are of all base chains there may be. To remember clients comes before
// anybody gives them other addresses.
var hooks = map[string]*nft.Hook{
	"prerouting":       {Type: "nat", Num: unix.NF_INET_PRE_ROUTING, Priority: -100},
	"output":           {Type: "nat", Num: unix.NF_INET_LOCAL_OUT, Priority: -100},
	"forward":          {Type: "filter", Num: unix.NF_INET_FORWARD, Priority: 0},
	"postrouting":      {Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: 100},
	chainRemember:      {Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: 99},
	chainRememberInput: {Type: "nat", Num: unix.NF_INET_LOCAL_IN, Priority: 99},
	chainAsItIs:        {Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: 98},
	chainEgress:        {Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: egressPriority},

	chainAnnounced:       {Type: "filter", Num: unix.NF_INET_PRE_ROUTING, Priority: -150},
	chainAnnouncedOutput: {Type: "filter", Num: unix.NF_INET_LOCAL_OUT, Priority: -150},

	chainHandshakes:      {Type: "nat", Num: unix.NF_INET_POST_ROUTING, Priority: 96},
	chainHandshakesInput: {Type: "nat", Num: unix.NF_INET_LOCAL_IN, Priority: 96},
	chainAnswers:         {Type: "filter", Num: unix.NF_INET_PRE_ROUTING, Priority: -150},
	chainAnswersOutput:   {Type: "filter", Num: unix.NF_INET_LOCAL_OUT, Priority: -150},
}

func hooked(name string, rules []*nft.Rule) *nft.Chain {
	return &nft.Chain{Name: name, Hook: hooks[name], Rules: rules}
}

// tries is how often a slot without an endpoint is drawn again. A draw misses
// in less than half of all cases, so that in 1 of 256 the last rule decides: in
// it the first half of the slots, all of which are taken, are a little favored.
const tries = 8

// No name may be one of nft's words, or it could not read what it shows.
const (
	chainReject        = "refuse"
	chainMasquerade    = "own-address"
	chainRemember      = "remember"
	chainRememberInput = "remember-here"
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
	chains []*nft.Chain
}

func (rs *ruleset) write() []*nft.Chain {
	rs.chains = append(rs.chains,
		hooked("prerouting", rs.dispatch()),
		hooked("output", rs.dispatch()),
		hooked("forward", rs.forward()),
		hooked("postrouting", []*nft.Rule{
			(&nft.Rule{Comment: "what was translated here"}).Ct(unix.NFT_CT_STATUS, nft.Reg).AnyBit(nft.Reg, nft.CtStatusDNAT).Goto(chainMasquerade),
		}),
		&nft.Chain{Name: chainReject, Rules: rejects()},
		&nft.Chain{Name: chainMasquerade, Rules: rs.masquerade()},
	)
	for _, b := range rs.layout.bases() {
		rs.base(b)
	}
	rs.remember()
	rs.keepExpectedSources()
	rs.expectations()
	rs.countHandshakes()
	rs.egress()
	return rs.chains
}

// dispatch finds out whether a connection's first packet is for a Service.
func (rs *ruleset) dispatch() []*nft.Rule {
	out := rs.assign()
	for i := range rs.layout.common {
		c, addr, port := &rs.layout.common[i], &rs.layout.addresses[i], &rs.layout.nodePorts[i]
		r := &nft.Rule{}
		out = append(out, addr.load(r).In(addr.frontends.Name, nft.Reg).Goto(addr.name))
		r = (&nft.Rule{}).Version(c.family).Addr(c.family, nft.Destination, nft.Reg).In(c.nodePortAddrs.Name, nft.Reg)
		out = append(out, port.key(r).In(port.frontends.Name, nft.Reg).Goto(port.name))
		if rs.beside {
			continue
		}
		out = append(out, (&nft.Rule{Comment: "no Service has this port"}).Version(c.family).
			Addr(c.family, nft.Destination, nft.Reg).In(c.clusterIPs.Name, nft.Reg).Goto(chainReject))
	}
	return out
}

// load puts the frontend that a packet is for into registers, if it is of the
// family; key does without asking.
func (b *base) load(r *nft.Rule) *nft.Rule { return b.key(r.Version(b.family)) }

func (b *base) key(r *nft.Rule) *nft.Rule {
	reg := uint32(nft.Reg)
	if !b.nodePort {
		r.Addr(b.family, nft.Destination, reg)
		reg += b.family.Regs()
	}
	r.Meta(unix.NFT_META_L4PROTO, reg)
	return r.Port(nft.Destination, reg+1)
}

// nextRegister is the register behind the frontend.
func (b *base) nextRegister() uint32 { return nft.Reg + nft.Len(b.frontends.Key)/4 }

// base writes the chains that choose an endpoint.
func (rs *ruleset) base(b *base) {
	c := &nft.Chain{Name: b.name}
	if rs.exists(b.counters) {
		c.Rules = append(c.Rules, b.load(&nft.Rule{}).In(b.counters.Name, nft.Reg))
	}
	if rs.exists(b.ranges) {
		r := &nft.Rule{Comment: "not in loadBalancerSourceRanges"}
		b.load(r).In(b.ranges.Name, nft.Reg)
		if rs.exists(b.sources) { // an empty list allows no client
			b.key(r).Addr(b.family, nft.Source, b.nextRegister()).NotIn(b.sources.Name, nft.Reg)
		}
		c.Rules = append(c.Rules, r.Drop())
	}
	if rs.exists(b.external) {
		r := b.load(&nft.Rule{Comment: "from another machine"}).In(b.external.Name, nft.Reg)
		rs.notFromPods(r, b.family)
		c.Rules = append(c.Rules, r.Local(nft.Source, unix.NFT_CMP_NEQ).Goto(b.outer.name))
		rs.pool(b, &b.outer, &nft.Chain{Name: b.outer.name})
	}
	rs.pool(b, &b.inner, c)
}

// pool ends a chain with the choice of an endpoint.
func (rs *ruleset) pool(b *base, p *pool, c *nft.Chain) {
	if rs.exists(p.drop) {
		c.Rules = append(c.Rules, b.load(&nft.Rule{}).In(p.drop.Name, nft.Reg).Drop())
	}
	c.Rules = append(c.Rules, rs.affinity(b, p)...)
	if rs.exists(p.one) {
		c.Rules = append(c.Rules, b.load(&nft.Rule{}).Map(p.one.Name, nft.Reg).DNAT(b.family))
	}
	for _, k := range p.class {
		if !rs.exists(k.members) {
			continue
		}
		draw := &nft.Chain{Name: k.members.Name}
		for range tries {
			draw.Rules = append(draw.Rules, b.randomEndpoint(&k, k.size))
		}
		draw.Rules = append(draw.Rules, b.randomEndpoint(&k, k.size/2))
		rs.chains = append(rs.chains, draw)
		// It returns if the slots were deleted after this lookup: the next class has others.
		c.Rules = append(c.Rules, b.load(&nft.Rule{}).In(k.members.Name, nft.Reg).Jump(draw.Name))
	}
	c.Rules = append(c.Rules, (&nft.Rule{Comment: "no endpoints"}).Goto(chainReject))
	rs.chains = append(rs.chains, c)
}

// randomEndpoint translates to the endpoint of a random slot, if one has it.
func (b *base) randomEndpoint(k *class, slots int) *nft.Rule {
	return b.load(&nft.Rule{}).Random(uint32(slots), b.nextRegister()).Map(k.slots.Name, nft.Reg).DNAT(b.family)
}

// rejects returns the rules that reply as a host without a listener does.
func rejects() []*nft.Rule {
	proto := func(p byte) *nft.Rule {
		return (&nft.Rule{}).Protocol(unix.NFT_CMP_EQ, p)
	}
	return []*nft.Rule{
		proto(unix.IPPROTO_TCP).Reject(unix.NFT_REJECT_TCP_RST, 0),
		proto(unix.IPPROTO_UDP).Reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH),
		proto(unix.IPPROTO_SCTP).Reject(unix.NFT_REJECT_ICMPX_UNREACH, unix.NFT_REJECT_ICMPX_PORT_UNREACH),
	}
}

// tcpFlags is the offset of the flags in a TCP header; the others are flags.
const tcpFlags, tcpFIN, tcpRST, tcpACK = 13, 1, 4, 16

// forward drops RSTs that conntrack considers invalid. It does not translate a reply outside
// the TCP window, so that the client gets it from the endpoint's address. The client's RST
// would end a healthy connection (kubernetes/kubernetes#74839). A liberal conntrack has no
// such replies.
//
// The reply itself is not dropped. Conntrack may have met a connection in its middle: it
// bypassed netfilter before, or another node translates it. Conntrack then takes forged
// segments for valid ones, and all that follow for invalid ones.
func (rs *ruleset) forward() []*nft.Rule {
	if rs.liberal {
		return nil
	}
	r := (&nft.Rule{Comment: "they answer replies that were not translated"}).
		Ct(unix.NFT_CT_STATE, nft.Reg).AnyBit(nft.Reg, nft.CtStateInvalid).Protocol(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
	r.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, tcpFlags, 1, nft.Reg).And(nft.Reg, []byte{tcpRST}).Cmp(unix.NFT_CMP_NEQ, nft.Reg, []byte{0})
	return []*nft.Rule{r.Drop()}
}

// masquerade decides which Service connections get the node's address. It matches the
// destination that the client requested and uses no packet mark, so that it cannot
// conflict with other programs' marks.
func (rs *ruleset) masquerade() (out []*nft.Rule) {
	for i := range rs.layout.common {
		c, addr, port := &rs.layout.common[i], &rs.layout.addresses[i], &rs.layout.nodePorts[i]
		hairpin := (&nft.Rule{Comment: "an endpoint that reaches itself"}).Version(c.family).
			Addr(c.family, nft.Source, nft.Reg).Addr(c.family, nft.Destination, nft.Reg+c.family.Regs()).In(c.hairpin.Name, nft.Reg)
		out = append(out, hairpin.Masquerade())
		if rs.all {
			out = append(out, rs.frontendIn(addr, addr.frontends).Masquerade(), rs.frontendIn(port, port.frontends).Masquerade())
			continue
		}
		for _, b := range []*base{addr, port} {
			if rs.exists(b.masquerade) {
				out = append(out, rs.frontendIn(b, b.masquerade).Masquerade())
			}
		}
		for _, b := range []*base{addr, port} {
			r := rs.frontendIn(b, b.frontends)
			r.Comment = "processes of the node"
			out = append(out, r.Local(nft.Source, unix.NFT_CMP_EQ).Masquerade())
		}
		r := rs.frontendIn(addr, addr.frontends)
		r.Comment = "not from this node's pods"
		if !rs.notFromPods(r, c.family) {
			continue
		}
		if rs.exists(addr.external) {
			out = append(out, rs.frontendIn(addr, addr.external).Return())
		}
		out = append(out, r.Masquerade())
	}
	return out
}

// notFromPods goes on with what is not from this node's pods, as
// --detect-local-mode tells them. It reports false, and goes on with everything,
// where they cannot be recognized.
func (rs *ruleset) notFromPods(r *nft.Rule, f *nft.IP) bool {
	name := rs.local.Prefix
	if rs.local.Interface != "" {
		name = rs.local.Interface + strings.Repeat("\x00", max(0, unix.IFNAMSIZ-len(rs.local.Interface)))
	}
	if name != "" {
		// What one port of a bridge hands to another has no device when it leaves
		// (br_netfilter), and comes from a pod if anything does.
		r.Device(unix.NFT_CMP_NEQ, 0)
		r.Meta(unix.NFT_META_IIFNAME, nft.Reg).Cmp(unix.NFT_CMP_NEQ, nft.Reg, []byte(name))
		return true
	}
	for _, p := range rs.local.Sources {
		if p.Addr().Is6() == (f == nft.IPv6) {
			r.Addr(f, nft.Source, nft.Reg).NotIn(rs.layout.commonOf(f).localPods.Name, nft.Reg)
			return true
		}
	}
	return false
}

// frontendIn matches packets whose client requested a frontend of the set.
func (rs *ruleset) frontendIn(b *base, s *set) *nft.Rule {
	return rs.loadFrontend(b).In(s.Name, nft.Reg)
}

// loadFrontend loads the frontend that the client requested into registers.
func (rs *ruleset) loadFrontend(b *base) *nft.Rule {
	r := (&nft.Rule{}).Version(b.family).CtOriginal(b.family.CtDst, nft.Reg)
	reg := uint32(nft.Reg)
	if b.nodePort {
		r.In(rs.layout.commonOf(b.family).nodePortAddrs.Name, nft.Reg)
	} else {
		reg += b.family.Regs()
	}
	return r.Meta(unix.NFT_META_L4PROTO, reg).CtOriginal(nft.CtProtoDst, reg+1)
}

// forNode fills in what the ruleset takes from the node.
func (rs *ruleset) forNode(n *intent.Node) {
	rs.all, rs.local = n.MasqueradeAll, n.Local
}
