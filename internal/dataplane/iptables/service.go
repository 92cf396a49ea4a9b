package iptables

import (
	"fmt"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// The kinds of chain of a Service port. They are the middle of the chains' names.
const (
	kindCluster  = "SVC" // one of the endpoints of policy Cluster
	kindLocal    = "LOC" // one of the endpoints of policy Local
	kindExternal = "EXT" // traffic to NodePorts, externalIPs, load balancers
	kindRanges   = "FW"  // the same, for the clients of loadBalancerSourceRanges
	kindEndpoint = "EP"  // one endpoint that needs more than one rule
)

// portRules writes the rules of one Service port.
//
//	dispatch ──> SVC or LOC                      cluster IP
//	dispatch ──> [FW ──>] EXT ──> SVC or LOC     the others
//	                             ├─ DNAT         a rule an endpoint
//	                             └─> EP ─ DNAT   with affinity, and pods here
type portRules struct {
	*nodeInputs
	p      *intent.ServicePort
	id     string
	chains []chain
	made   map[string]bool
}

// serviceChains returns the chains of a Service port, and its entries for the two
// dispatches: by address and by NodePort.
func (f *nodeInputs) serviceChains(p *intent.ServicePort) (chains []chain, byAddr, byPort []entry) {
	r := &portRules{nodeInputs: f, p: p, id: fmt.Sprintf("%s %d", p.ID, p.ID.Number), made: map[string]bool{}}
	for i := range p.Frontends {
		fe := &p.Frontends[i]
		e := entry{key: dispatchKey(fe, p.ID.Protocol), owner: p.ID}
		d := f.dispatchOf(fe)
		e.rule = newRule(d.match(e.key, r.comment(fe))).jump(r.frontend(fe))
		if fe.Kind == intent.NodePort {
			byPort = append(byPort, e)
		} else {
			byAddr = append(byAddr, e)
		}
	}
	return r.chains, byAddr, byPort
}

// dispatchOf returns an empty dispatch of the kind that a frontend belongs to.
func (f *nodeInputs) dispatchOf(fe *intent.Frontend) *dispatch {
	if fe.Kind == intent.NodePort {
		return &dispatch{}
	}
	return &dispatch{addrDigits: addrDigits(f.family)}
}

func addrDigits(f model.Family) int {
	if f == model.IPv6 {
		return 64
	}
	return 16
}

var kindNames = map[intent.FrontendKind]string{
	intent.ClusterIP: "ClusterIP", intent.NodePort: "NodePort",
	intent.ExternalIP: "ExternalIP", intent.LoadBalancerIP: "LoadBalancerIP",
}

// comment names a Service port in a dump, "namespace/name:port 80/TCP ClusterIP".
// parseComment parses it.
func (r *portRules) comment(fe *intent.Frontend) string {
	name := r.p.ID.Service.String()
	if r.p.ID.Port != "" {
		name += ":" + r.p.ID.Port
	}
	return fmt.Sprintf("%s %d/%s %s", name, r.p.ID.Number, r.p.ID.Protocol, kindNames[fe.Kind])
}

// name returns the name of a chain of this Service port. of distinguishes several chains
// of one kind.
func (r *portRules) name(kind, of string) string {
	return chainPrefix + kind + "-" + hash(r.id+of)
}

// make adds a chain once, and returns its name.
func (r *portRules) make(name string, fill func(*chain)) string {
	if r.made[name] {
		return name
	}
	r.made[name] = true
	at := len(r.chains) // chains that fill adds come after it
	r.chains = append(r.chains, chain{name: name})
	c := chain{name: name}
	fill(&c)
	r.chains[at] = c
	return name
}

// frontend returns the target of packets to a frontend.
func (r *portRules) frontend(fe *intent.Frontend) string {
	if fe.Kind == intent.ClusterIP {
		return r.clusterIP(fe)
	}
	target := r.external(fe.ExternalRoute, fe.InternalRoute)
	if fe.SourceRanges == nil {
		return target
	}
	ranges := fmt.Sprint(fe.SourceRanges, fe.ExternalRoute, fe.InternalRoute)
	return r.make(r.name(kindRanges, ranges), func(c *chain) {
		for _, p := range fe.SourceRanges {
			c.add(from(p).jump(target))
		}
		c.add(newRule("").jump(chainDrop))
	})
}

// clusterIP returns the target of a cluster IP. Its routes are the same inside and
// outside: SPW-SOURCES marks a client from outside the cluster.
func (r *portRules) clusterIP(fe *intent.Frontend) string { return r.route(fe.InternalRoute) }

// route returns the target of one route.
func (r *portRules) route(to intent.Route) string {
	switch to {
	case intent.ToCluster:
		return r.endpoints(kindCluster, to)
	case intent.ToLocal:
		return r.endpoints(kindLocal, to)
	case intent.Drop:
		return chainDrop
	}
	return chainReject
}

// external returns the target of packets to NodePorts, externalIPs and load balancers.
func (r *portRules) external(outside, inside intent.Route) string {
	if outside == inside && (outside == intent.Reject || outside == intent.Drop) {
		return r.route(outside)
	}
	return r.make(r.name(kindExternal, fmt.Sprint(outside, inside)), func(c *chain) {
		if outside != inside {
			// Answers to this node's processes and pods come through this node in any
			// case. A process keeps its address only by accident.
			c.add(newRule("-m addrtype --src-type LOCAL").jump(chainMarkMasquerade))
			c.add(newRule("-m addrtype --src-type LOCAL").jump(r.route(inside)))
			for _, m := range r.inside {
				c.add(newRule(m).jump(r.route(inside)))
			}
		}
		switch {
		case outside == intent.ToCluster || r.masqueradeAll && outside == intent.ToLocal:
			// An endpoint on another node must answer through this node.
			c.add(newRule("").jump(setMark(markMasquerade, markMasquerade)))
		case outside == intent.ToLocal:
			// Policy Local exists to keep the client's address.
			c.add(newRule("").jump(setMark(0, markMasquerade)))
		}
		c.add(newRule("").jump(r.route(outside)))
	})
}

// endpoints returns the chain that selects one endpoint of a route.
func (r *portRules) endpoints(kind string, to intent.Route) string {
	return r.make(r.name(kind, ""), func(c *chain) {
		all := r.p.Shares(to)
		left := 0
		for _, shares := range all {
			left += shares
		}
		var choices []string
		for i := range r.p.Endpoints {
			e := &r.p.Endpoints[i]
			if !e.In(to) {
				continue
			}
			target := r.endpoint(e)
			if r.p.Affinity > 0 {
				c.add(r.remembered("--rcheck --seconds "+seconds(r.p.Affinity)+" --reap", e).jump(target))
			}
			if all[i] == 0 {
				continue
			}
			m := newRule("-p " + protocolName(r.p.ID.Protocol))
			if left > all[i] {
				m.add(sharesIn(all[i], left))
			}
			choices = append(choices, m.jump(target))
			left -= all[i]
		}
		c.rules = append(c.rules, choices...)
	})
}

// endpoint returns the target that sends packets to an endpoint: DNAT, or a chain if the
// endpoint needs more rules.
func (r *portRules) endpoint(e *intent.Endpoint) string {
	dnat := "DNAT --to-destination " + e.Addr.String()
	hairpin := mayHairpin(e)
	if !hairpin && r.p.Affinity == 0 {
		return dnat
	}
	return r.make(r.endpointChain(e), func(c *chain) {
		if hairpin {
			// The answer must come back here: the pod would take its own packet's answer
			// for its own.
			c.add(from(host(e.Addr.Addr())).jump(setMark(markMasquerade, markMasquerade)))
		}
		m := newRule("-p " + protocolName(r.p.ID.Protocol))
		if r.p.Affinity > 0 {
			m.add(r.remembered("--set", e).words...)
		}
		c.add(m.jump(dnat))
	})
}

// mayHairpin reports whether packets of the endpoint itself may traverse this node's
// chains. Such an endpoint costs a chain, so endpoints that are known to be on other
// nodes do not count.
func mayHairpin(e *intent.Endpoint) bool { return e.OnThisNode && !e.HostNetwork || e.NodeUnknown }

func (r *portRules) endpointChain(e *intent.Endpoint) string {
	return r.name(kindEndpoint, e.Addr.String())
}

// remembered is a match of xt_recent on the list of an endpoint's clients. The kernel
// keeps the list over changes of the rules while a rule names it.
func (r *portRules) remembered(how string, e *intent.Endpoint) *rule {
	mask := "255.255.255.255"
	if r.family == model.IPv6 {
		mask = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"
	}
	return newRule("-m recent").add(how, "--name", r.endpointChain(e), "--mask", mask, "--rsource")
}

// seconds rounds up: affinity must last at least as long as configured.
func seconds(d time.Duration) string {
	return fmt.Sprint(int64((d + time.Second - 1) / time.Second))
}
