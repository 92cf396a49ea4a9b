package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// rendering is what one Service port, or the node, puts into the table.
type rendering struct {
	elems []elem
}

func (r *rendering) add(s *set, key string, v nft.Value) {
	r.elems = append(r.elems, elem{s, key, v})
}

// familyIndex is 0 for IPv4 and 1 for IPv6, as layouts count.
func familyIndex(f model.Family) int {
	if f == model.IPv6 {
		return 1
	}
	return 0
}

// renderPort says what the table holds for a Service port. It is a function of
// the port alone: what one endpoint's change writes is the difference between
// two renderings.
func renderPort(l *layout, p *intent.ServicePort) (*rendering, error) {
	r := &rendering{}
	c := &l.common[familyIndex(p.ID.Family)]
	for i := range p.Frontends {
		if err := r.frontend(l, p, &p.Frontends[i]); err != nil {
			return nil, err
		}
	}
	for _, e := range p.Endpoints {
		if !e.OnThisNode {
			continue
		}
		addr := string(appendAddr(nil, e.Addr.Addr()))
		r.add(c.hairpin, addr+addr, nft.Value{})
	}
	r.addHelper(l, p)
	r.watched(c, p)
	return r, nil
}

// frontend renders one address or NodePort.
func (r *rendering) frontend(l *layout, p *intent.ServicePort, f *intent.Frontend) error {
	b := &l.addresses[familyIndex(p.ID.Family)]
	var raw []byte
	if f.Kind == intent.NodePort {
		b = &l.nodePorts[familyIndex(p.ID.Family)]
	} else {
		raw = appendAddr(raw, f.Addr)
	}
	key := string(appendPort(appendProto(raw, p.ID.Protocol), f.Port))
	r.add(b.frontends, key, nft.Value{Comment: describePort(p.ID, f.Kind)})
	if l.counting {
		r.add(b.counters, key, nft.Value{Comment: describePort(p.ID, f.Kind)})
	}
	if f.Kind == intent.ClusterIP {
		r.add(l.common[familyIndex(p.ID.Family)].clusterIPs, string(raw), nft.Value{})
	} else if f.ExternalRoute == intent.ToCluster {
		// The endpoint may be anywhere, and its answer must come back here.
		r.add(b.masquerade, key, nft.Value{})
	}
	if f.SourceRanges != nil {
		r.add(b.ranges, key, nft.Value{})
		for _, s := range withoutContained(f.SourceRanges) {
			r.add(b.sources, key+string(appendAddr(nil, s.Addr())), nft.Value{KeyEnd: key + string(appendAddr(nil, lastOf(s)))})
		}
	}
	if p.Affinity > 0 && len(p.Endpoints) > 0 {
		r.affinity(l, b, key, p)
	}
	if f.ExternalRoute != f.InternalRoute {
		r.add(b.external, key, nft.Value{})
		if err := r.route(&b.outer, key, p, f.ExternalRoute); err != nil {
			return err
		}
	}
	return r.route(&b.inner, key, p, f.InternalRoute)
}

// route puts a frontend into a pool. A frontend that is in none is refused.
func (r *rendering) route(to *pool, key string, p *intent.ServicePort, route intent.Route) error {
	switch route {
	case intent.Reject:
		return nil
	case intent.Drop:
		r.add(to.drop, key, nft.Value{})
		return nil
	}
	endpoints := sharesOf(p, route)
	if p.Affinity > 0 {
		r.valid(to, key, p, route)
	}
	if len(endpoints) == 1 {
		r.add(to.one, key, nft.Value{Data: endpointValue(endpoints[0])})
		return nil
	}
	i, err := classFor(len(endpoints))
	if err != nil {
		return err
	}
	c := &to.class[i]
	r.add(c.members, key, nft.Value{})
	// As many slots as all endpoints can have equally many of.
	for slot := range c.size / len(endpoints) * len(endpoints) {
		r.add(c.slots, string(appendSlot([]byte(key), slot)), nft.Value{Data: endpointValue(endpoints[slot%len(endpoints)])})
	}
	return nil
}

// sharesOf are the endpoints that a route leads to, each once for each of its shares.
func sharesOf(p *intent.ServicePort, route intent.Route) []netip.AddrPort {
	out := make([]netip.AddrPort, 0, len(p.Endpoints))
	for i, shares := range p.Shares(route) {
		for range shares {
			out = append(out, p.Endpoints[i].Addr)
		}
	}
	return out
}

var kindNames = []string{intent.ClusterIP: "clusterIP", intent.NodePort: "nodePort", intent.ExternalIP: "externalIP",
	intent.LoadBalancerIP: "loadBalancer"}

// describePort is the comment of a frontend: "default/web http 80/TCP clusterIP".
// It names the port for people, and for an agent that reads the table back.
func describePort(id intent.PortID, kind intent.FrontendKind) string {
	name := ""
	if id.Port != "" {
		name = id.Port + " "
	}
	return fmt.Sprintf("%s %s%d/%s %s", id.Service, name, id.Number, id.Protocol, kindNames[kind])
}

// parsePort reads such a comment.
func parsePort(comment string, f model.Family) (intent.PortID, intent.FrontendKind, bool) {
	id := intent.PortID{Family: f}
	words := strings.Fields(comment)
	if len(words) != 3 && len(words) != 4 {
		return id, 0, false
	}
	kind := slices.Index(kindNames, words[len(words)-1])
	var proto string
	if n, _ := fmt.Sscanf(words[len(words)-2], "%d/%s", &id.Number, &proto); n != 2 || kind < 0 {
		return id, 0, false
	}
	for _, p := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		if p.String() == proto {
			id.Protocol = p
		}
	}
	if len(words) == 4 {
		id.Port = words[1]
	}
	id.Service.Namespace, id.Service.Name, _ = strings.Cut(words[0], "/")
	return id, intent.FrontendKind(kind), id.Protocol != 0 && id.Service.Name != ""
}

// withoutContained drops ranges that lie within others: a set of ranges refuses them.
func withoutContained(ranges []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range ranges {
		within := slices.ContainsFunc(ranges, func(o netip.Prefix) bool {
			return o.Bits() < r.Bits() && o.Contains(r.Addr())
		})
		if !within {
			out = append(out, r)
		}
	}
	return out
}

// lastOf is the last address of a range.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 0x80 >> (bit % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// renderNode says what the table holds about the node.
func renderNode(l *layout, n *intent.Node) *rendering {
	r := &rendering{}
	for i := range l.common {
		c := &l.common[i]
		is6 := i == 1
		for _, a := range n.NodePortAddrs {
			if a.Is6() == is6 {
				r.add(c.nodePortAddrs, string(appendAddr(nil, a)), nft.Value{})
			}
		}
		r.addIntervals(c.localPods, n.Local.Sources, is6)
		if !l.beside { // the node's other dataplane has the pods' connections
			r.egress(c.egress, n, is6)
		}
	}
	return r
}

// addIntervals adds ranges to a set of ranges: each begins with an element and ends
// before one that has intervalEnd. Ranges that touch become one.
func (r *rendering) addIntervals(s *set, ranges []netip.Prefix, is6 bool) {
	var mine []netip.Prefix
	for _, p := range ranges {
		if p.Addr().Is6() == is6 {
			mine = append(mine, p.Masked())
		}
	}
	slices.SortFunc(mine, netip.Prefix.Compare)
	outer := mine[:0]
	for _, p := range mine {
		if n := len(outer); n == 0 || !outer[n-1].Overlaps(p) { // sorted, so the earlier one is the larger
			outer = append(outer, p)
		}
	}
	mine = outer
	for i, p := range mine {
		if i == 0 || lastOf(mine[i-1]).Next() != p.Addr() {
			r.add(s, string(appendAddr(nil, p.Addr())), nft.Value{})
		}
		end := lastOf(p).Next()
		if end.IsValid() && (i+1 == len(mine) || mine[i+1].Addr() != end) {
			r.add(s, string(appendAddr(nil, end)), nft.Value{IntervalEnd: true})
		}
	}
}
