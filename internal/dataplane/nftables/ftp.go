package nftables

import (
	"encoding/binary"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
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
	chainAnnounced     = "announced"      // connections that were expected, of others
	chainAnnouncedHere = "announced-here" // of processes of the node
	chainControl       = "control"        // of FTP: drops what those say who were cut off
	chainTaken         = "taken"          // finds those to ports that are not the announcer's
	chainCutOff        = "cut-off"        // drops them, and cuts the announcer off
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
			r.add(b.own, string(appendAddr(slices.Clone(key), e.Addr.Addr())), value{})
		}
	}
}

// expectations keeps connections that were announced by FTP away from ports that are not
// the announcer's: those from a client to an endpoint (passive), and those of an
// endpoint to a client whose address was masqueraded (active).
func (rs *ruleset) expectations() {
	served := false
	for _, name := range []string{chainAnnounced, chainAnnouncedHere} {
		var rules []*rule
		for i := range rs.layout.common {
			c := &rs.layout.common[i]
			if !rs.exists(c.ftpEndpoints) {
				continue
			}
			passive := expected(c.family).ctReply(c.family.ctSrc, firstReg).in(c.ftpEndpoints, firstReg)
			active := expected(c.family).source(c.family, firstReg).in(c.ftpEndpoints, firstReg)
			if rules = append(rules, passive.call(chainTaken), active.call(chainTaken)); name == chainAnnounced && rs.sockets {
				// A process of the node that is a client itself listens for its data: no
				// such question about what endpoints open.
				r := expected(c.family).ctReply(c.family.ctSrc, firstReg).in(c.ftpEndpoints, firstReg)
				// Nor about packets by lo: the node's own process asks, and is allowed.
				r.local(1, unix.NFT_CMP_EQ).meta(unix.NFT_META_IIF, firstReg).cmp(unix.NFT_CMP_NEQ, firstReg, hostU32(1))
				r.comment = "the node listens there"
				rules = append(rules, r.socket(firstReg).counter().jumpTo(chainCutOff))
			}
		}
		if rules != nil { // one rule for all other packets
			rules = append([]*rule{lacksStatus(ctStatusExpected | ctStatusHelper).ret(), tcpWithHelper().call(chainControl), lacksStatus(ctStatusDNAT).ret()}, rules...)
			rs.chains = append(rs.chains, hooked(name, rules))
			served = true
		}
	}
	if served {
		rs.chains = append(rs.chains, chain{name: chainTaken, rules: rs.taken()})
		rs.blockFTP()
	}
}

// blockFTP writes the rules that drop an expected connection and add its endpoints to the
// FTP block, and those that keep blocked control connections from the helper.
func (rs *ruleset) blockFTP() {
	cut, control := chain{name: chainCutOff}, chain{name: chainControl}
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		if !rs.exists(c.ftpBlock) {
			continue
		}
		f, second := c.family, firstReg+c.family.regs()
		pair := (&rule{}).only(f).ctOriginal(f.ctSrc, firstReg).ctReply(f.ctSrc, second)
		cut.rules = append(cut.rules, pair.dynset(unix.NFT_DYNSET_OP_ADD, c.ftpBlock, firstReg, 0, cutOffFor))
		passive := (&rule{comment: "the server announced what is not its"}).only(f).ctOriginal(f.ctSrc, firstReg).ctReply(f.ctSrc, second)
		active := (&rule{comment: "the client did"}).only(f).ctReply(f.ctSrc, firstReg).ctOriginal(f.ctSrc, second)
		control.rules = append(control.rules, passive.in(c.ftpBlock, firstReg).counter().drop(), active.in(c.ftpBlock, firstReg).counter().drop())
	}
	cut.rules = append(cut.rules, (&rule{}).drop()) // where the set is full, too
	rs.chains = append(rs.chains, cut, control)
}

// lacksStatus goes on with packets of connections that have none of these bits.
func lacksStatus(bits uint32) *rule {
	return (&rule{}).ct(unix.NFT_CT_STATUS, firstReg).mask(firstReg, bits).cmp(unix.NFT_CMP_EQ, firstReg, hostU32(0))
}

// tcpWithHelper goes on with packets of control connections. (ct helper tells what the
// connection has that this one was expected by.)
func tcpWithHelper() *rule {
	r := (&rule{}).ct(unix.NFT_CT_STATUS, firstReg).anyBit(firstReg, ctStatusHelper)
	return r.meta(unix.NFT_META_L4PROTO, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{unix.IPPROTO_TCP})
}

// expected goes on with TCP connections of the family that are not answered yet.
func expected(f *family) *rule {
	r := (&rule{}).ct(unix.NFT_CT_STATE, firstReg).anyBit(firstReg, ctStateRelated).only(f)
	return r.meta(unix.NFT_META_L4PROTO, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{unix.IPPROTO_TCP})
}

// taken returns the rules that drop, and block, expected connections to ports that no
// expectation may use.
func (rs *ruleset) taken() []*rule {
	to := func(r *rule, ports intent.PortRange) *rule {
		r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, firstReg)
		first, last := binary.BigEndian.AppendUint16(nil, ports.First), binary.BigEndian.AppendUint16(nil, ports.Last)
		if ports.First == ports.Last {
			return r.cmp(unix.NFT_CMP_EQ, firstReg, first).counter().jumpTo(chainCutOff)
		}
		return r.cmp(unix.NFT_CMP_GTE, firstReg, first).cmp(unix.NFT_CMP_LTE, firstReg, last).counter().jumpTo(chainCutOff)
	}
	out := []*rule{to(&rule{comment: "privileged"}, intent.NeverExpected)}
	for _, ports := range intent.KeptByNodes {
		out = append(out, to((&rule{comment: "of the node's programs"}).local(1, unix.NFT_CMP_EQ), ports))
	}
	for _, b := range rs.layout.bases() {
		at := func(comment string) *rule {
			r := (&rule{comment: comment}).only(b.family)
			if b.nodePort {
				r.destination(b.family, firstReg).in(rs.layout.commonOf(b.family).nodePortAddrs, firstReg)
			}
			return b.key(r)
		}
		if rs.exists(b.own) {
			out = append(out, at("the announcer's own Service's").ctReply(b.family.ctSrc, b.behind()).in(b.own, firstReg).counter().drop())
		}
		out = append(out, at("a Service's").in(b.frontends, firstReg).counter().jumpTo(chainCutOff))
	}
	return out
}

const (
	ctStatusExpected = 1 << 0  // IPS_EXPECTED
	ctStatusHelper   = 1 << 13 // IPS_HELPER: a rule gave it one
	ctStateRelated   = 1 << 2  // NF_CT_STATE_RELATED_BIT
)
