package policy

import (
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/model"
)

// natKey is an address and port from which, or to which, netfilter translates
// packets of a Service: an endpoint or a frontend.
type natKey struct {
	proto model.Protocol
	port  uint16
	what  string // "it is an endpoint of Service a/b"
}

// natIndex knows the addresses at which a policy must keep its hands off: packets
// there carry another address before or after, and conntrack must know which. It is
// kept while there are policies.
type natIndex struct {
	at        map[netip.Addr]map[natKey]int
	nodePorts map[natKey]int
}

func newNATIndex() natIndex {
	return natIndex{at: map[netip.Addr]map[natKey]int{}, nodePorts: map[natKey]int{}}
}

// add counts an entry, by 1 or -1.
func (x *natIndex) add(a netip.Addr, k natKey, by int) {
	m := x.at[a]
	if m == nil {
		m = map[natKey]int{}
		x.at[a] = m
	}
	if m[k] += by; m[k] <= 0 {
		delete(m, k)
	}
	if len(m) == 0 {
		delete(x.at, a)
	}
}

// translated reports whether netfilter translates packets of a Service's port.
func (t *Tracker) translated(service model.Name, proto model.Protocol) bool {
	s := t.services[service]
	if s == nil || s.ProxyName != t.cfg.ProxyName {
		return t.cfg.ProxyName != "" // beside another proxy
	}
	return t.cfg.Netfilter || proto == model.SCTP
}

// countSlice enters the endpoints of a slice, or takes them out.
func (t *Tracker) countSlice(s *model.EndpointSlice, by int) {
	for _, port := range s.Ports {
		if !t.translated(s.Service, port.Protocol) {
			continue
		}
		k := natKey{port.Protocol, port.Port, fmt.Sprintf("it is an endpoint of Service %s", s.Service)}
		for i := range s.Endpoints {
			if as := s.Endpoints[i].Addresses; len(as) > 0 {
				t.countNAT(as[0].Unmap(), k, by)
			}
		}
	}
}

// countService enters the addresses of a Service, or takes them out.
func (t *Tracker) countService(s *model.Service, by int) {
	for _, port := range s.Ports {
		if !t.translated(s.Name, port.Protocol) {
			continue
		}
		k := natKey{port.Protocol, port.Port, fmt.Sprintf("Service %s has that address", s.Name)}
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			for _, a := range list {
				t.countNAT(a.Unmap(), k, by)
			}
		}
		if port.NodePort != 0 {
			k = natKey{port.Protocol, port.NodePort, fmt.Sprintf("it is a NodePort of Service %s", s.Name)}
			if t.nat.nodePorts[k] += by; t.nat.nodePorts[k] <= 0 {
				delete(t.nat.nodePorts, k)
			}
			for _, a := range t.own {
				t.dirty[a] = struct{}{}
			}
		}
	}
}

func (t *Tracker) countNAT(a netip.Addr, k natKey, by int) {
	t.nat.add(a, k, by)
	if _, here := t.targetsOf[a]; here {
		t.dirty[a] = struct{}{}
	}
	for _, r := range t.egress {
		if r.about(k.proto, k.port) && r.covers(a) {
			t.staleNAT(r)
		}
	}
}

// staleNAT has the Services that an egress rule takes in looked for again.
func (t *Tracker) staleNAT(r *rule) {
	if !r.natStale {
		r.natStale = true
		t.natStale = append(t.natStale, r)
	}
}

// natAt says which Service a rule would take packets of that netfilter translates.
func (t *Tracker) natAt(addr netip.Addr, r *rule) string {
	if r.Track {
		return "" // conntrack sees all
	}
	if r.Side == Egress {
		return r.nat
	}
	found := ""
	look := func(keys map[natKey]int) {
		for k := range keys {
			if r.about(k.proto, k.port) && (found == "" || k.what < found) { // the same one each time
				found = k.what
			}
		}
	}
	look(t.nat.at[addr])
	if found == "" && t.isOwn(addr) {
		look(t.nat.nodePorts)
	}
	return found
}

// lookForNAT finds a Service that an egress rule takes in.
func (t *Tracker) lookForNAT(r *rule) string {
	found := ""
	for a, keys := range t.nat.at {
		if !r.covers(a) {
			continue
		}
		for k := range keys {
			// The same one each time, or every look would be news.
			if what := fmt.Sprintf("it is about %s, and %s", netip.AddrPortFrom(a, k.port), k.what); r.about(k.proto, k.port) && (found == "" || what < found) {
				found = what
			}
		}
	}
	return found
}
