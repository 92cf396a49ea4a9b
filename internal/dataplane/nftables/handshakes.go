package nftables

import (
	"context"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// Three sets count the TCP handshakes of watched endpoints (intent.Endpoint.Watched), of all
// connections that this node translated:
//
//	handshakes4   SYNs: chains of type nat see a connection's first packet alone
//	accepted4     SYN-ACKs
//	refused4      RSTs that answer a SYN
//
// An endpoint of several watched ports has one counter of each kind: it accepts connections,
// or it does not, whichever Service they are for.
const (
	chainHandshakes      = "handshakes"
	chainHandshakesInput = "handshakes-here" // with endpoints that are processes of the node
	chainAnswers         = "answers"
	chainAnswersOutput   = "answers-here" // of such endpoints
)

// handshakeSets are the sets of one family.
type handshakeSets struct{ begun, accepted, refused *set }

func (l *layout) handshakeSets(f *nft.IP) handshakeSets {
	counted := func(name, comment string) *set {
		return l.shared(nft.Set{
			Name: name + f.Suffix, Key: []nft.Field{nft.AddrField(f), nft.PortField}, Counted: true, Comment: comment,
		})
	}
	return handshakeSets{
		begun:    counted("handshakes", "first SYNs to watched endpoints"),
		accepted: counted("accepted", "SYN-ACKs of watched endpoints"),
		refused:  counted("refused", "RSTs of watched endpoints that answer a SYN"),
	}
}

// watched renders the counters of a port's endpoints.
func (r *rendering) watched(c *common, p *intent.ServicePort) {
	for i := range p.Endpoints {
		if e := &p.Endpoints[i]; e.Watched {
			key := string(endpointValue(e.Addr))
			for _, s := range []*set{c.handshakes.begun, c.handshakes.accepted, c.handshakes.refused} {
				r.add(s, key, nft.Value{})
			}
		}
	}
}

// countHandshakes writes the rules that count. The chains of first packets come before anybody
// translates the source, which ends the way of a packet through chains of type nat.
func (rs *ruleset) countHandshakes() {
	var begun, answers []*nft.Rule
	for i := range rs.layout.common {
		c := &rs.layout.common[i]
		if !rs.exists(c.handshakes.begun) {
			continue
		}
		// Conntrack also begins a connection with a later packet of one that it does not know.
		to := translated(withTCPFlags(c.family, tcpSYN)).Addr(c.family, nft.Destination, nft.Reg)
		begun = append(begun, to.Port(nft.Destination, nft.Reg+c.family.Regs()).In(c.handshakes.begun.Name, nft.Reg))
		answers = append(answers, answer(c.family, tcpSYN|tcpACK).In(c.handshakes.accepted.Name, nft.Reg))
		refusal := answer(c.family, tcpRST|tcpACK)
		refusal.Comment = "an RST that answers a SYN has sequence number 0 (RFC 9293, 3.10.7.1)"
		answers = append(answers, refusal.In(c.handshakes.refused.Name, nft.Reg))
	}
	if begun == nil {
		return
	}
	rs.chains = append(rs.chains, hooked(chainHandshakes, begun), hooked(chainHandshakesInput, begun),
		hooked(chainAnswers, answers), hooked(chainAnswersOutput, answers))
}

// withTCPFlags goes on with packets that have exactly these of the flags SYN, ACK, RST and FIN.
func withTCPFlags(f *nft.IP, flags byte) *nft.Rule {
	r := (&nft.Rule{}).Version(f).Protocol(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
	return r.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, tcpFlags, 1, nft.Reg).And(nft.Reg, []byte{tcpSYN | tcpACK | tcpRST | tcpFIN}).
		Cmp(unix.NFT_CMP_EQ, nft.Reg, []byte{flags})
}

// translated goes on with packets of connections that were translated to an endpoint.
func translated(r *nft.Rule) *nft.Rule {
	return r.Ct(unix.NFT_CT_STATUS, nft.Reg).AnyBit(nft.Reg, nft.CtStatusDNAT)
}

// answer goes on with replies that have exactly these of the flags SYN, ACK, RST and FIN, and,
// if RST is one of them, sequence number 0. It loads the endpoint.
func answer(f *nft.IP, flags byte) *nft.Rule {
	const sequence = 4 // its offset in a TCP header
	r := withTCPFlags(f, flags)
	if flags&tcpRST != 0 {
		r.Payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, sequence, 4, nft.Reg).Cmp(unix.NFT_CMP_EQ, nft.Reg, make([]byte, 4))
	}
	translated(r)
	r.Ct(unix.NFT_CT_DIRECTION, nft.Reg).Cmp(unix.NFT_CMP_EQ, nft.Reg, []byte{1})
	return r.Addr(f, nft.Source, nft.Reg).Port(nft.Source, nft.Reg+f.Regs())
}

var _ dataplane.HandshakeWatcher = (*Backend)(nil)

// handshakes is what the counters have said.
type handshakes struct {
	seen map[watchedEndpoint]*handshakeCount
	next uint32 // ID
	last []outlier.Outcome
}

type watchedEndpoint struct {
	port     intent.PortID
	endpoint netip.AddrPort
}

// handshakeCount is an endpoint's counters when it last accepted a connection, and what has
// happened since.
type handshakeCount struct {
	outlier.Outcome
	begun, accepted, refused uint64
}

// Outcomes implements dataplane.HandshakeWatcher. Its cost follows the number of watched
// endpoints. While changes are written, it returns what it saw last.
func (b *Backend) Outcomes() ([]outlier.Outcome, error) {
	if !b.turn.TryAcquire(1) {
		return b.handshakes.last, nil
	}
	defer b.turn.Release(1)
	if b.table == nil || len(b.table.watched) == 0 {
		b.handshakes = handshakes{next: b.handshakes.next}
		return nil, nil
	}
	var counts [2][3]map[string]uint64
	for i := range b.table.layout.common {
		h := b.table.layout.common[i].handshakes
		for j, s := range []*set{h.begun, h.accepted, h.refused} {
			var err error
			if counts[i][j], err = b.conn.Packets(context.Background(), b.nftTable, s.Name); err != nil {
				return nil, err
			}
		}
	}
	b.handshakes.observe(time.Now(), b.table.watched, &counts)
	return b.handshakes.last, nil
}

// observe enters the packets of the three sets of both families.
func (h *handshakes) observe(now time.Time, ports map[intent.PortID]*intent.ServicePort, counts *[2][3]map[string]uint64) {
	seen := map[watchedEndpoint]*handshakeCount{}
	h.last = nil
	for id, p := range ports {
		of := &counts[familyIndex(id.Family)]
		for i := range p.Endpoints {
			e := watchedEndpoint{id, p.Endpoints[i].Addr}
			c := h.seen[e]
			if c == nil {
				h.next++
				c = &handshakeCount{Outcome: outlier.Outcome{ID: h.next, Port: id, Endpoint: e.endpoint}}
			}
			key := string(endpointValue(e.endpoint))
			c.observe(now, of[0][key], of[1][key], of[2][key])
			seen[e] = c
			h.last = append(h.last, c.Outcome)
		}
	}
	h.seen = seen
}

// observe enters the counters of one endpoint. Those that a table lost begin at 0 again.
func (c *handshakeCount) observe(now time.Time, begun, accepted, refused uint64) {
	if begun < c.begun || accepted < c.accepted || refused < c.refused {
		c.begun, c.accepted, c.refused, c.Since = 0, accepted, 0, time.Time{}
	}
	if accepted > c.accepted {
		c.begun, c.accepted, c.refused = begun, accepted, refused
		c.Accepted, c.Since = now, time.Time{}
	}
	c.Failed, c.Refused = uint32(begun-c.begun), uint32(refused-c.refused)
	if c.Failed > 0 && c.Since.IsZero() {
		c.Since = now
	}
}

// watches reports whether handshakes with an endpoint of the port are counted.
func watches(p *intent.ServicePort) bool {
	return p != nil && p.ID.Protocol == model.TCP && len(p.Endpoints) > 0 && p.Endpoints[0].Watched
}
