package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// Service ports with sessionAffinity ClientIP have elements besides those that
// all have. Which client has which endpoint is in one map of a family, filled by
// packets:
//
//	services4-affinity-10800s   frontends of this timeout -> Service port's number
//	clients4                    client . Service port's number -> endpoint's number
//	services4-affinity          frontend . endpoint's number -> endpoint
//
// A remembered number leads to an endpoint only through services4-affinity. So a deleted
// endpoint takes one element, for all clients that remember it. A client without a number,
// or with one of a deleted endpoint, is served as without affinity. Its endpoint is recorded
// when its packet leaves with the endpoint's address.
//
// nft has no way to write that one lookup's result is part of the next one's key
// (it even aborts when it has to show that), so the numbers go through
// skb->priority. It is 0 again when the packet leaves.

// clientLimit bounds the remembered clients of a family. The kernel allocates 16 bytes for
// each in advance, and some 150 for each element. Clients beyond the limit are served
// without affinity.
const clientLimit = 1 << 18

func (l *layout) newClients(f *family) *set {
	return l.add(&set{
		name: "clients" + f.suffix, comment: "who has which endpoint of which Service port, by number", size: clientLimit,
		key: []field{addrField(f), numberField}, data: []field{numberField},
	})
}

// timeout returns the map of the frontends with one timeout. The table has one map for each
// timeout.
func (b *base) timeout(l *layout, d time.Duration) *set {
	s := b.timeouts[d]
	if s == nil {
		s = l.add(&set{name: b.name + "-affinity-" + seconds(d), key: b.frontends.key, data: []field{numberField}})
		b.timeouts[d] = s
		clients := l.commonOf(b.family).clients
		clients.with = append(clients.with, s)
	}
	return s
}

// seconds formats a timeout for names: 10800s, or 1500ms.
func seconds(d time.Duration) string {
	if d%time.Second != 0 {
		return fmt.Sprintf("%dms", d.Milliseconds())
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

// numberOf is how a packet carries a hash of a Service port or of an endpoint: the
// same for all frontends, while others come and go, and after a restart. Should
// two have the same one, of 2³² - 1, a client's affinity to one of them does not hold.
func numberOf(key []byte) string {
	return string(binary.NativeEndian.AppendUint32(nil, hash(key)))
}

// sticky records the timeout of a frontend, valid the endpoints that it has in a pool.
func (r *rendering) sticky(l *layout, b *base, key string, p *intent.ServicePort) {
	r.add(b.timeout(l, p.Affinity), key, value{data: numberOf([]byte(p.ID.String()))})
}

func (r *rendering) valid(to *pool, key string, p *intent.ServicePort, route intent.Route) {
	for _, e := range endpointsOf(p, route) {
		n := numberOf(appendPort(appendProto(appendAddr(nil, e.Addr()), p.ID.Protocol), e.Port()))
		r.add(to.valid, key+n, value{data: endpointValue(e)})
	}
}

// inUse lists the timeouts of a base.
func (rs *ruleset) inUse(b *base) (out []time.Duration) {
	for _, d := range slices.Sorted(maps.Keys(b.timeouts)) {
		if rs.exists(b.timeouts[d]) {
			out = append(out, d)
		}
	}
	return out
}

// client loads the client and the number that the packet carries.
func (r *rule) client(f *family) *rule {
	return r.source(f, firstReg).meta(unix.NFT_META_PRIORITY, firstReg+f.regs())
}

// port has the packet carry the number of the Service port that it is for.
func (b *base) port(r *rule, d time.Duration) *rule {
	return b.load(r).look(b.timeouts[d], firstReg).setPriority(firstReg)
}

// sticky sends packets of clients that have an endpoint there, if it still is.
func (rs *ruleset) sticky(b *base, p *pool) (out []*rule) {
	if !rs.exists(p.valid) {
		return nil
	}
	clients := rs.layout.commonOf(b.family).clients
	c := chain{name: p.valid.name, rules: []*rule{
		b.load(&rule{}).meta(unix.NFT_META_PRIORITY, b.behind()).look(p.valid, firstReg).dnat(b.family),
	}}
	for _, d := range rs.inUse(b) {
		out = append(out, b.port(&rule{}, d).client(b.family).look(clients, firstReg).setPriority(firstReg).call(c.name))
		c.rules = append(c.rules, b.port(&rule{comment: "that endpoint is gone"}, d).client(b.family).
			dynset(dynsetDelete, clients, firstReg, firstReg+b.family.regs(), 0))
	}
	rs.chains = append(rs.chains, c)
	return out
}

// remember writes the rules that store which endpoint a client was sent to, before any
// rule changes the packet's source address, and that remove the number from the packet.
// Packets to the node itself traverse another hook.
func (rs *ruleset) remember() {
	var rules []*rule
	made := map[string]bool{}
	for _, b := range rs.layout.bases() {
		clients := rs.layout.commonOf(b.family).clients
		for _, d := range rs.inUse(b) {
			c := chain{name: clients.name + "-" + seconds(d), rules: []*rule{
				b.family.endpoint((&rule{}).only(b.family).client(b.family), hashReg).hash(hashReg, b.family.regs()+2).
					dynset(unix.NFT_DYNSET_OP_UPDATE, clients, firstReg, hashReg, d),
				(&rule{}).value(firstReg, hostU32(0)).setPriority(firstReg),
			}}
			if !made[c.name] {
				rs.chains = append(rs.chains, c)
				made[c.name] = true
			}
			rules = append(rules, rs.askedFor(b).look(b.timeouts[d], firstReg).setPriority(firstReg).jumpTo(c.name))
		}
	}
	if rules == nil {
		return
	}
	rs.chains = append(rs.chains, hooked(chainRemember, rules), hooked(chainRememberHere, rules))
}

// hashReg is behind the client of either family.
const hashReg = firstReg + 8

// endpoint loads what the packet is for by now, as numberOf takes it.
func (f *family) endpoint(r *rule, reg uint32) *rule {
	r.destination(f, reg).meta(unix.NFT_META_L4PROTO, reg+f.regs())
	return r.payload(unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, reg+f.regs()+1)
}
