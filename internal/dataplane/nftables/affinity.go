package nftables

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/intent"
)

// affinity renders a Service port with sessionAffinity ClientIP. Which client
// has which endpoint is known to the kernel alone: each endpoint has a set of
// its clients, filled by its chain. An endpoint that goes takes its set along.
//
//	affinity/NS/NAME/tcp4/80/10800s/cluster        who is known goes to its endpoint, others to a random one
//	affinity/NS/NAME/tcp4/80/10800s/10.244.0.5/80  remembers the client, then dnat
type affinity struct {
	port   *intent.ServicePort
	family *family
	prefix string
}

// affinityOf is nil for a port without affinity.
func affinityOf(p *intent.ServicePort, f *family) *affinity {
	if p.Affinity == 0 {
		return nil
	}
	number := fmt.Sprint(p.ID.Number)
	if p.ID.Port != "" {
		number += "-" + p.ID.Port
	}
	// A set's time-out never changes, so it is part of the name.
	return &affinity{p, f, fmt.Sprintf("affinity/%s/%s%s/%s/%s", p.ID.Service,
		strings.ToLower(p.ID.Protocol.String()), f.suffix, number, p.Affinity.Round(time.Millisecond))}
}

// poolChain is the chain that chooses among the endpoints of a route.
func (a *affinity) poolChain(r intent.Route) string {
	if r == intent.ToLocal {
		return a.prefix + "/local"
	}
	return a.prefix + "/cluster"
}

// endpointName names an endpoint's set and chain. nft has no colons in names.
func (a *affinity) endpointName(e netip.AddrPort) string {
	return fmt.Sprintf("%s/%s/%d", a.prefix, strings.ReplaceAll(e.Addr().String(), ":", "."), e.Port())
}

func (a *affinity) render(r *rendering) {
	clients := map[netip.AddrPort]*set{}
	for _, e := range a.port.Endpoints {
		s := &set{
			name: a.endpointName(e.Addr), key: []field{addrField(a.family)}, always: true,
			timeout: uint64(a.port.Affinity.Milliseconds()),
		}
		clients[e.Addr] = s
		r.sets = append(r.sets, s)
		r.chains = append(r.chains, chain{name: s.name, rules: []*rule{
			(&rule{}).only(a.family).source(a.family, firstReg).remember(s, firstReg),
			(&rule{}).meta(unix.NFT_META_L4PROTO, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{byte(a.port.ID.Protocol)}).
				value(firstReg, e.Addr.Addr().AsSlice()).
				value(firstReg+a.family.regs(), []byte{byte(e.Addr.Port() >> 8), byte(e.Addr.Port())}).dnat(*a.family),
		}})
	}
	for _, route := range a.routes() {
		a.renderPool(r, route, clients)
	}
}

// routes are those of its frontends that lead to endpoints.
func (a *affinity) routes() (out []intent.Route) {
	for _, route := range []intent.Route{intent.ToCluster, intent.ToLocal} {
		for _, f := range a.port.Frontends {
			if f.Inside == route || f.Outside == route {
				out = append(out, route)
				break
			}
		}
	}
	return out
}

func (a *affinity) renderPool(r *rendering, route intent.Route, clients map[netip.AddrPort]*set) {
	endpoints := endpointsOf(a.port, route)
	c := chain{name: a.poolChain(route), comment: describePool(a.port.ID)}
	for _, e := range endpoints {
		s := clients[e]
		c.rules = append(c.rules, (&rule{}).only(a.family).source(a.family, firstReg).in(s, firstReg).jumpTo(s.name))
	}
	slots := &set{
		name: c.name, key: []field{slotField(anySlots)}, verdict: true, typeof: true, always: true,
	}
	r.sets = append(r.sets, slots)
	for i, e := range endpoints {
		r.add(slots, string(hostU32(uint32(i))), value{chain: clients[e].name})
	}
	c.rules = append(c.rules, (&rule{}).random(uint32(len(endpoints)), firstReg).vmap(slots, firstReg))
	r.chains = append(r.chains, c)
}

func describePool(id intent.PortID) string { return id.String() }

// anySlots is the modulus that nft is told for the slots of affinity: it is
// part of how a map is shown, and a map outlives a change of their number.
const anySlots = 65536
