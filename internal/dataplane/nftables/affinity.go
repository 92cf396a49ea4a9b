package nftables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
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
// nft cannot write that one lookup's result is part of the next one's key (it even aborts when
// it lists such a rule), so the numbers go through
// skb->priority. It is 0 again when the packet leaves.

// clientLimit bounds the remembered clients of a family. The kernel allocates 16 bytes for
// each in advance, and some 150 for each element. Clients beyond the limit are served
// without affinity.
const clientLimit = 1 << 18

func (l *layout) newClients(f *nft.IP) *set {
	return l.add(nft.Set{
		Name: "clients" + f.Suffix, Comment: "who has which endpoint of which Service port, by number", Size: clientLimit,
		Key: []nft.Field{nft.AddrField(f), nft.PriorityField}, Data: []nft.Field{nft.PriorityField},
	})
}

// timeouts are those that the table has, in seconds. Each costs a set, a chain and rules that the
// packets of other Services traverse, and any author of a Service chooses one of 86,400.
var timeouts = []int{
	1, 2, 3, 5, 7, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300, 450, 600, 900, 1200, 1800, 2700,
	3600, 5400, 7200, 10800, 14400, 21600, 28800, 43200, 64800, 86400,
}

// timeoutOf returns the first timeout of the table that lasts as long. It is at most half longer.
func timeoutOf(affinity time.Duration) time.Duration {
	i, _ := slices.BinarySearch(timeouts, int((affinity+time.Second-1)/time.Second))
	return time.Duration(timeouts[min(i, len(timeouts)-1)]) * time.Second
}

// timeout returns the map of the frontends with one timeout. The table has one map for each
// timeout.
func (b *base) timeout(l *layout, d time.Duration) *set {
	s := b.timeouts[d]
	if s == nil {
		s = l.add(nft.Set{Name: b.name + "-affinity-" + seconds(d), Key: b.frontends.Key, Data: []nft.Field{nft.PriorityField}})
		b.timeouts[d] = s
		clients := l.commonOf(b.family).clients
		clients.with = append(clients.with, s)
	}
	return s
}

// seconds formats a timeout for names: 10800s.
func seconds(d time.Duration) string { return fmt.Sprintf("%ds", d/time.Second) }

// numberOf is how a packet carries a hash of a Service port or of an endpoint: the
// same for all frontends, while others come and go, and after a restart. Should
// two have the same one, of 2³² - 1, a client's affinity to one of them does not hold.
func numberOf(key []byte) string {
	return string(binary.NativeEndian.AppendUint32(nil, nft.Hash(key)))
}

// affinity records the timeout of a frontend, valid the endpoints that it has in a pool.
func (r *rendering) affinity(l *layout, b *base, key string, p *intent.ServicePort) {
	r.add(b.timeout(l, timeoutOf(p.Affinity)), key, nft.Value{Data: numberOf([]byte(p.ID.String()))})
}

func (r *rendering) valid(to *pool, key string, p *intent.ServicePort, route intent.Route) {
	for i := range p.Endpoints {
		if !p.Endpoints[i].In(route) || p.Endpoints[i].Ejected {
			continue
		}
		e := p.Endpoints[i].Addr
		n := numberOf(appendPort(appendProto(appendAddr(nil, e.Addr()), p.ID.Protocol), e.Port()))
		r.add(to.valid, key+n, nft.Value{Data: endpointValue(e)})
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
func client(r *nft.Rule, f *nft.IP) *nft.Rule {
	return r.Addr(f, nft.Source, nft.Reg).Meta(unix.NFT_META_PRIORITY, nft.Reg+f.Regs())
}

// port has the packet carry the number of the Service port that it is for.
func (b *base) port(r *nft.Rule, d time.Duration) *nft.Rule {
	return b.load(r).Map(b.timeouts[d].Name, nft.Reg).SetMeta(unix.NFT_META_PRIORITY, nft.Reg)
}

// affinity sends packets of clients that have an endpoint there, if it still is.
func (rs *ruleset) affinity(b *base, p *pool) (out []*nft.Rule) {
	if !rs.exists(p.valid) {
		return nil
	}
	clients := rs.layout.commonOf(b.family).clients
	c := &nft.Chain{Name: p.valid.Name, Rules: []*nft.Rule{
		b.load(&nft.Rule{}).Meta(unix.NFT_META_PRIORITY, b.nextRegister()).Map(p.valid.Name, nft.Reg).DNAT(b.family),
	}}
	for _, d := range rs.inUse(b) {
		out = append(out, client(b.port(&nft.Rule{}, d), b.family).Map(clients.Name,
			nft.Reg).SetMeta(unix.NFT_META_PRIORITY, nft.Reg).Jump(c.Name))
		c.Rules = append(c.Rules, client(b.port(&nft.Rule{Comment: "that endpoint is gone"}, d), b.family).
			Dynset(nft.DynsetDelete, clients.Name, nft.Reg, nft.Reg+b.family.Regs(), 0))
	}
	rs.chains = append(rs.chains, c)
	return out
}

// remember writes the rules that store which endpoint a client was sent to, before any
// rule changes the packet's source address, and that remove the number from the packet.
// Packets to the node itself traverse another hook.
func (rs *ruleset) remember() {
	var rules []*nft.Rule
	made := map[string]bool{}
	for _, b := range rs.layout.bases() {
		clients := rs.layout.commonOf(b.family).clients
		for _, d := range rs.inUse(b) {
			c := &nft.Chain{Name: clients.Name + "-" + seconds(d), Rules: []*nft.Rule{
				endpoint(client((&nft.Rule{}).Version(b.family), b.family), b.family, hashReg).Hash(hashReg, b.family.Regs()+2).
					Dynset(unix.NFT_DYNSET_OP_UPDATE, clients.Name, nft.Reg, hashReg, d),
				(&nft.Rule{}).Load(nft.Reg, 0).SetMeta(unix.NFT_META_PRIORITY, nft.Reg),
			}}
			if !made[c.Name] {
				rs.chains = append(rs.chains, c)
				made[c.Name] = true
			}
			rules = append(rules, rs.loadFrontend(b).Map(b.timeouts[d].Name, nft.Reg).SetMeta(unix.NFT_META_PRIORITY, nft.Reg).Goto(c.Name))
		}
	}
	if rules == nil {
		return
	}
	rs.chains = append(rs.chains, hooked(chainRemember, rules), hooked(chainRememberInput, rules))
}

// hashReg is behind the client of either family.
const hashReg = nft.Reg + 8

// endpoint loads what the packet is for by now, as numberOf takes it.
func endpoint(r *nft.Rule, f *nft.IP, reg uint32) *nft.Rule {
	r.Addr(f, nft.Destination, reg).Meta(unix.NFT_META_L4PROTO, reg+f.Regs())
	return r.Port(nft.Destination, reg+f.Regs()+1)
}
