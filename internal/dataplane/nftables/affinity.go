package nftables

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/intent"
)

// Service ports with sessionAffinity ClientIP are elements too. Which client has
// which endpoint is in one map of each base, filled by packets:
//
//	services4-clients           client . frontend -> endpoint's number
//	services4-affinity-10800s   frontends of this time-out
//	services4-affinity          frontend . endpoint's number -> endpoint
//	services4-affinity-16       frontend . slot -> endpoint's number
//
// A remembered number leads to an endpoint only through services4-affinity, so
// an endpoint that goes takes one element along, whoever remembers it.
//
// nft has no way to write that one lookup's result is part of the next one's key
// (it even aborts when it has to show that), so the number goes through
// skb->priority. It is 0 again when the packet leaves.
type affinity struct {
	clients  *set
	timeouts map[time.Duration]*set
}

// clientLimit bounds the clients that are remembered in a base. The kernel
// takes 16 bytes for each in advance, and some 150 for one that is there. Who
// does not fit is served as if the port had no affinity.
const clientLimit = 1 << 18

func (l *layout) newAffinity(b *base) *affinity {
	return &affinity{timeouts: map[time.Duration]*set{}, clients: l.add(&set{
		name: b.name + "-clients", comment: "who asked, and the number of the endpoint that he has", size: clientLimit,
		key: append([]field{addrField(b.family)}, b.frontends.key...), data: []field{numberField},
	})}
}

// timeout is the set of frontends of a time-out. The table has as many as there
// are different ones.
func (b *base) timeout(l *layout, d time.Duration) *set {
	s := b.affinity.timeouts[d]
	if s == nil {
		name := fmt.Sprintf("%s-affinity-%ds", b.name, d/time.Second)
		if d%time.Second != 0 {
			name = fmt.Sprintf("%s-affinity-%dms", b.name, d.Milliseconds())
		}
		s = l.add(&set{name: name, key: b.frontends.key})
		b.affinity.timeouts[d] = s
		b.affinity.clients.with = append(b.affinity.clients.with, s)
	}
	return s
}

// numbers gives each endpoint of a port a number other than 0. It is made of the
// address, so that an endpoint keeps its own while others come and go and over a
// restart; the few that would have the same are told apart by their order.
func numbers(endpoints []netip.AddrPort) []uint32 {
	out, taken := make([]uint32, len(endpoints)), map[uint32]bool{0: true}
	for i, e := range endpoints {
		h := fnv.New32a()
		_, _ = h.Write([]byte(endpointValue(e)))
		n := h.Sum32()
		for taken[n] {
			n++
		}
		out[i], taken[n] = n, true
	}
	return out
}

// sticky puts a frontend with affinity into a pool.
func (r *rendering) sticky(to *pool, key string, p *intent.ServicePort, route intent.Route) error {
	all := make([]netip.AddrPort, len(p.Endpoints))
	for i := range p.Endpoints {
		all[i] = p.Endpoints[i].Addr
	}
	number := map[netip.AddrPort]string{}
	for i, n := range numbers(all) {
		number[all[i]] = string(binary.NativeEndian.AppendUint32(nil, n))
	}
	endpoints := endpointsOf(p, route)
	i, err := classFor(len(endpoints))
	if err != nil {
		return err
	}
	for _, e := range endpoints {
		r.add(to.valid, key+number[e], value{data: endpointValue(e)})
	}
	c := &to.class[i]
	for slot := range c.size / len(endpoints) * len(endpoints) {
		r.add(c.numbers, string(appendSlot([]byte(key), slot)), value{data: number[endpoints[slot%len(endpoints)]]})
	}
	return nil
}

// The rules below have the client and the frontend it asks from the first
// register on, and the endpoint's number behind.

func (b *base) numberReg() uint32 { return b.behind() + b.family.regs() }

// client loads the client and the frontend.
func (b *base) client(r *rule) *rule {
	return b.keyAt(r.source(b.family, firstReg), firstReg+b.family.regs())
}

// known goes on if the client has an endpoint, and notes its number.
func (b *base) known(r *rule) *rule {
	return b.client(r.only(b.family)).lookup(b.affinity.clients, firstReg, b.numberReg(), 0).setPriority(b.numberReg())
}

// memory changes what is remembered of the client.
func (b *base) memory(r *rule, op uint32, d time.Duration) *rule {
	return b.client(r).meta(unix.NFT_META_PRIORITY, b.numberReg()).dynset(op, b.affinity.clients, firstReg, b.numberReg(), d)
}

// resolve translates to the endpoint of the number noted, if it is still there.
func (b *base) resolve(r *rule, p *pool) *rule {
	return b.key(r).meta(unix.NFT_META_PRIORITY, b.behind()).look(p.valid, firstReg).dnat(b.family)
}

// sticky sends packets for frontends with affinity to chains of their time-out,
// and writes those.
func (rs *ruleset) sticky(b *base, p *pool) (out []*rule) {
	if !rs.exists(p.valid) {
		return nil
	}
	for _, d := range slices.Sorted(maps.Keys(b.affinity.timeouts)) {
		s := b.affinity.timeouts[d]
		if !rs.exists(s) {
			continue
		}
		c := chain{name: p.name + s.name[len(b.name):]}
		learn := chain{name: c.name + "-learn", rules: []*rule{
			b.memory((&rule{}).only(b.family), unix.NFT_DYNSET_OP_ADD, d),
			b.known(&rule{comment: "another packet of his may have been faster"}),
			b.resolve((&rule{}).only(b.family), p),
		}}
		c.rules = append(c.rules,
			b.resolve(b.memory(b.known(&rule{}), unix.NFT_DYNSET_OP_UPDATE, d), p),
			b.memory(b.known(&rule{comment: "that endpoint is gone"}), dynsetDelete, 0))
		for _, k := range p.class {
			for i := 0; rs.exists(k.numbers) && i <= tries; i++ {
				slots := k.size
				if i == tries {
					slots /= 2
				}
				c.rules = append(c.rules, b.load(&rule{}).random(uint32(slots), b.behind()).
					look(k.numbers, firstReg).setPriority(firstReg).jumpTo(learn.name))
			}
		}
		rs.chains = append(rs.chains, c, learn)
		out = append(out, b.load(&rule{}).in(s, firstReg).jumpTo(c.name))
	}
	return out
}

// calm takes the number out of packets that leave.
func (rs *ruleset) calm() (out []*rule) {
	for _, b := range rs.layout.bases() {
		for _, d := range slices.Sorted(maps.Keys(b.affinity.timeouts)) {
			if s := b.affinity.timeouts[d]; rs.exists(s) {
				out = append(out, rs.asked(b, s).value(firstReg, hostU32(0)).setPriority(firstReg))
			}
		}
	}
	return out
}
