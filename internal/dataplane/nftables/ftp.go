package nftables

import (
	"encoding/binary"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// What a helper of FTP expects has its translation from the announcement, before any
// rule is asked: a server could have a client's next connection to the node's SSH, or
// to another Service. These chains come behind conntrack (-200) and before that
// translation (-100), and drop the first packet of a connection to a port that may not
// be announced (see intent.NeverExpected). Conntrack forgets it and what was
// expected, and the client's next attempt gets to where it belongs.
//
//	ftp-endpoints4       addresses of endpoints of Services that speak FTP
//
// Who announces such a port again and again would have each attempt dropped. So the
// first one also cuts the two off from FTP between them, for a while: the announcer's
// lines are dropped before the kernel's helper, which is behind all chains, reads them.
// A port that the announcer's own Service has at the same number is left out.
//
//	cut-off4             who asked . who had announced
//	services4-own        frontends of Services that speak FTP . their endpoints
const (
	chainAnnounced       = "announced"      // connections that were expected, of others
	chainAnnouncedOutput = "announced-here" // of processes of the node
	chainControl         = "control"        // of FTP: drops what those say who were cut off
	chainTaken           = "taken"          // finds those to ports that are not the announcer's
	chainCutOff          = "cut-off"        // drops them, and cuts the announcer off
)

// cutOffFor is how long FTP is cut off between two addresses. Each of them may cost
// the other one attempt in that time.
const cutOffFor = 5 * time.Minute

// cutOffLimit bounds the pairs of a family that are cut off. The kernel takes 16 bytes
// for each in advance. Further ones are dropped, and not cut off.
const cutOffLimit = 1 << 14

// own renders the ports of a Service that speaks FTP, which its endpoints may announce.
func (r *rendering) own(l *layout, p *intent.ServicePort) {
	i := familyIndex(p.ID.Family)
	for j := range p.Frontends {
		f := &p.Frontends[j]
		b, key := &l.addresses[i], []byte(nil)
		if f.Kind == intent.NodePort {
			b = &l.nodePorts[i]
		} else {
			key = appendAddr(key, f.Addr)
		}
		key = appendPort(appendProto(key, p.ID.Protocol), f.Port)
		for _, e := range p.Endpoints {
			r.add(b.own, string(appendAddr(slices.Clone(key), e.Addr.Addr())), nft.Value{})
		}
	}
}

// expectations keeps connections that were announced by FTP away from ports that are not
// the announcer's: those from a client to an endpoint (passive), and those of an
// endpoint to a client whose address was masqueraded (active).
func (rs *ruleset) expectations() {
	served := false
	for _, name := range []string{chainAnnounced, chainAnnouncedOutput} {
		var rules []*nft.Rule
		for i := range rs.layout.common {
			c := &rs.layout.common[i]
			if !rs.exists(c.ftpEndpoints) {
				continue
			}
			passive := expected(c.family).CtReply(c.family.CtSrc, nft.Reg).In(c.ftpEndpoints.Name, nft.Reg)
			active := expected(c.family).Addr(c.family, nft.Source, nft.Reg).In(c.ftpEndpoints.Name, nft.Reg)
			if rules = append(rules, passive.Jump(chainTaken), active.Jump(chainTaken)); name == chainAnnounced && rs.sockets {
				// A process of the node that is a client itself listens for its data: no
				// such question about what endpoints open.
				r := expected(c.family).CtReply(c.family.CtSrc, nft.Reg).In(c.ftpEndpoints.Name, nft.Reg)
				// Nor about packets by lo: the node's own process asks, and is allowed.
				r.Local(nft.Destination, unix.NFT_CMP_EQ).Device(unix.NFT_CMP_NEQ, 1)
				r.Comment = "the node listens there"
				rules = append(rules, r.Socket(nft.Reg).Counter().Goto(chainCutOff))
			}
		}
		if rules != nil { // one rule for all other packets
			rules = append([]*nft.Rule{lacksStatus(nft.CtStatusExpected | nft.CtStatusHelper).Return(), tcpWithHelper().Jump(chainControl),
				lacksStatus(nft.CtStatusDNAT).Return()}, rules...)
			rs.chains = append(rs.chains, hooked(name, rules))
			served = true
		}
	}
	if served {
		rs.chains = append(rs.chains, &nft.Chain{Name: chainTaken, Rules: rs.taken()})
		rs.blockFTP()
	}
}

// blockFTP writes the rules that drop an expected connection and add its endpoints to the
// FTP block, and those that keep blocked control connections from the helper.
func (rs *ruleset) blockFTP() {
	cut, control := &nft.Chain{Name: chainCutOff}, &nft.Chain{Name: chainControl}
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		if !rs.exists(c.ftpBlock) {
			continue
		}
		f, second := c.family, nft.Reg+c.family.Regs()
		pair := (&nft.Rule{}).Version(f).CtOriginal(f.CtSrc, nft.Reg).CtReply(f.CtSrc, second)
		cut.Rules = append(cut.Rules, pair.Dynset(unix.NFT_DYNSET_OP_ADD, c.ftpBlock.Name, nft.Reg, 0, cutOffFor))
		passive := (&nft.Rule{Comment: "the server announced what is not its"}).Version(f).CtOriginal(f.CtSrc, nft.Reg).CtReply(f.CtSrc, second)
		active := (&nft.Rule{Comment: "the client did"}).Version(f).CtReply(f.CtSrc, nft.Reg).CtOriginal(f.CtSrc, second)
		control.Rules = append(control.Rules, passive.In(c.ftpBlock.Name, nft.Reg).Counter().Drop(),
			active.In(c.ftpBlock.Name, nft.Reg).Counter().Drop())
	}
	cut.Rules = append(cut.Rules, (&nft.Rule{}).Drop()) // where the set is full, too
	rs.chains = append(rs.chains, cut, control)
}

// lacksStatus goes on with packets of connections that have none of these bits.
func lacksStatus(bits uint32) *nft.Rule {
	return (&nft.Rule{}).Ct(unix.NFT_CT_STATUS, nft.Reg).NoBit(nft.Reg, bits)
}

// tcpWithHelper goes on with packets of control connections. (ct helper tells what the
// connection has that this one was expected by.)
func tcpWithHelper() *nft.Rule {
	return (&nft.Rule{}).Ct(unix.NFT_CT_STATUS, nft.Reg).AnyBit(nft.Reg, nft.CtStatusHelper).Protocol(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
}

// expected goes on with TCP connections of the family that are not answered yet.
func expected(f *nft.IP) *nft.Rule {
	return (&nft.Rule{}).Ct(unix.NFT_CT_STATE, nft.Reg).AnyBit(nft.Reg,
		nft.CtStateRelated).Version(f).Protocol(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
}

// taken returns the rules that drop, and block, expected connections to ports that no
// expectation may use.
func (rs *ruleset) taken() []*nft.Rule {
	to := func(r *nft.Rule, ports intent.PortRange) *nft.Rule {
		r.Port(nft.Destination, nft.Reg)
		first, last := binary.BigEndian.AppendUint16(nil, ports.First), binary.BigEndian.AppendUint16(nil, ports.Last)
		if ports.First == ports.Last {
			return r.Cmp(unix.NFT_CMP_EQ, nft.Reg, first).Counter().Goto(chainCutOff)
		}
		return r.Cmp(unix.NFT_CMP_GTE, nft.Reg, first).Cmp(unix.NFT_CMP_LTE, nft.Reg, last).Counter().Goto(chainCutOff)
	}
	out := []*nft.Rule{to(&nft.Rule{Comment: "privileged"}, intent.NeverExpected)}
	for _, ports := range intent.KeptByNodes {
		out = append(out, to((&nft.Rule{Comment: "of the node's programs"}).Local(nft.Destination, unix.NFT_CMP_EQ), ports))
	}
	for _, b := range rs.layout.bases() {
		at := func(comment string) *nft.Rule {
			r := (&nft.Rule{Comment: comment}).Version(b.family)
			if b.nodePort {
				r.Addr(b.family, nft.Destination, nft.Reg).In(rs.layout.commonOf(b.family).nodePortAddrs.Name, nft.Reg)
			}
			return b.key(r)
		}
		if rs.exists(b.own) {
			out = append(out, at("the announcer's own Service's").CtReply(b.family.CtSrc, b.nextRegister()).In(b.own.Name, nft.Reg).Counter().Drop())
		}
		out = append(out, at("a Service's").In(b.frontends.Name, nft.Reg).Counter().Goto(chainCutOff))
	}
	return out
}
