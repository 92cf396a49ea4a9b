package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/model"
)

// natKey is a port from which, or to which, packets of a Service are translated: that
// of an endpoint or of a frontend.
type natKey struct {
	proto model.Protocol
	port  uint16
	// frontend says that a Service has the address, and not an endpoint.
	frontend bool
	// early says that eBPF translates, before a policy sees the packet: a policy for
	// that very address would decide about nothing. Else netfilter translates, after.
	early bool
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
		k := natKey{proto: port.Protocol, port: port.Port, what: fmt.Sprintf("it is an endpoint of Service %s", s.Service)}
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
		early := !t.translated(s.Name, port.Protocol)
		k := natKey{port.Protocol, port.Port, true, early, fmt.Sprintf("Service %s has that address", s.Name)}
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			for _, a := range list {
				t.countNAT(a.Unmap(), k, by)
			}
		}
		if port.NodePort != 0 {
			k = natKey{port.Protocol, port.NodePort, true, early, fmt.Sprintf("it is a NodePort of Service %s", s.Name)}
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
	for _, r := range t.outward {
		if r.takesFrom(k) && r.covers(a) {
			t.staleNAT(r)
		}
	}
}

// staleNAT has the Services that an outward rule takes in looked for again.
func (t *Tracker) staleNAT(r *rule) {
	if !r.natStale {
		r.natStale = true
		t.natStale = append(t.natStale, r)
	}
}

// obstacle is why a rule does not hold at an address as it is asked for.
type obstacle struct {
	what  string // the Service
	early bool   // as in natKey: the rule decides about nothing there
}

// natAt says which Service's packets are in the way of a rule, if there is any.
func (t *Tracker) natAt(addr netip.Addr, r *rule) (found obstacle) {
	own := t.isOwn(addr)
	look := func(keys map[natKey]int) {
		for k := range keys {
			if !r.about(k.proto, k.port) || k.early && !own || r.Track && !k.early {
				continue // conntrack sees all of what is tracked
			}
			if found.what == "" || k.what < found.what { // the same one each time
				found = obstacle{k.what, k.early}
			}
		}
	}
	if r.Side == Ingress {
		look(t.nat.at[addr])
		if own {
			look(t.nat.nodePorts)
		}
	}
	if found.what == "" && !r.Track {
		found.what = r.nat
	}
	return found
}

// The ports that Linux gives to sockets which ask for none (ip_local_port_range, unless
// somebody changed it in the pod).
const firstEphemeral, lastEphemeral = 32768, 60999

// outward reports whether a rule may take packets to Services: those that pods here
// send to the ports that it names, or, from ports that it names, as if they answered.
func (r *rule) outward() bool {
	return r.Side == Egress || r.ephemeral(model.TCP) || r.ephemeral(model.UDP) || r.ephemeral(model.SCTP)
}

// ephemeral reports whether connections of the pods themselves may have a port of a
// rule as their source, by nobody's choice.
func (r *rule) ephemeral(proto model.Protocol) bool {
	return slices.ContainsFunc(r.ports, func(p model.PortRange) bool {
		return p.Protocol == proto && p.First <= lastEphemeral && firstEphemeral <= p.Last
	})
}

// takesFrom reports whether a rule takes packets from netfilter's translation at a key,
// if its address is among the rule's peers.
func (r *rule) takesFrom(k natKey) bool {
	switch {
	case k.early:
		return false
	case r.Side == Egress:
		return r.about(k.proto, k.port)
	}
	return k.frontend && r.ephemeral(k.proto)
}

// lookForNAT finds a Service that an outward rule takes in.
func (t *Tracker) lookForNAT(r *rule) string {
	found := ""
	for a, keys := range t.nat.at {
		if !r.covers(a) {
			continue
		}
		for k := range keys {
			if !r.takesFrom(k) {
				continue
			}
			what := fmt.Sprintf("it is about %s, and %s", netip.AddrPortFrom(a, k.port), k.what)
			if r.Side == Ingress {
				what = fmt.Sprintf("its ports are also those that pods ask %s from, and %s", netip.AddrPortFrom(a, k.port), k.what)
			}
			if found == "" || what < found { // the same one each time, or every look would be news
				found = what
			}
		}
	}
	return found
}
