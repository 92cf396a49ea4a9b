package intent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// plan is what a Service requests, before other Services and endpoints count.
type plan struct {
	families   []model.Family                  // of the clusterIPs
	addrs      []frontendAddr                  // of all ports
	ports      []portPlan                      // sorted by ID
	health     *addressRequest                 // the healthCheckNodePort; nil for none
	ranges     map[model.Family][]netip.Prefix // for LoadBalancer frontends; see Frontend.SourceRanges
	balance    Balance
	forwarding string // one of Forwardings
	// synLimit is that of the TCP ports: see ServicePort.SYNLimit.
	synLimit uint16
	eject    bool // endpoints that do not accept connections
	weights  *weightsSpec
	// slowStart is the time in which shares of endpoints grow; 0: at once.
	slowStart time.Duration
	redirect  model.Name // see LocalRedirectAnnotation; zero: none
	problems  []model.Problem
}

// portPlan is what one Service port requests in one family.
type portPlan struct {
	id       PortID
	requests []addressRequest // one per frontend, in the order of frontends
	helper   Helper
	ofFTP    bool // see ServicePort.OfFTP
}

// addressRequest is one address or port that a Service requests.
type addressRequest struct {
	key   addressKey
	kind  FrontendKind
	ofPod bool  // a Pod requests its host port: see hostports.go
	index int32 // in the list of the object's field
}

// field returns the field of the object that requests the address.
func (c addressRequest) field() string {
	if c.ofPod {
		return hostPortField(c.key.Port, c.key.Protocol)
	}
	if !c.key.Addr.IsValid() && c.key.Family == 0 {
		return "spec.healthCheckNodePort"
	}
	return fieldOf(c.kind, int(c.index))
}

func fieldOf(kind FrontendKind, index int) string {
	switch kind {
	case ClusterIP:
		return fmt.Sprintf("spec.clusterIPs[%d]", index)
	case NodePort:
		return fmt.Sprintf("spec.ports[%d].nodePort", index)
	case ExternalIP:
		return fmt.Sprintf("spec.externalIPs[%d]", index)
	}
	return "status.loadBalancer.ingress"
}

// complain adds a Problem; decide drops those past maxProblems.
func (p *plan) complain(svc model.Name, field, what string) {
	if len(p.problems) <= maxProblems {
		p.problems = append(p.problems, model.ServiceProblem(svc, field, what))
	}
}

// planService lists what a Service requests, without its ports. A Service is served only in the
// families of its clusterIPs.
func planService(svc *model.Service, cfg *Config) plan {
	var p plan
	complain := func(field, what string) { p.complain(svc.Name, field, what) }
	for _, a := range svc.ClusterIPs {
		if a.IsValid() && !slices.Contains(p.families, model.FamilyOf(a)) {
			p.families = append(p.families, model.FamilyOf(a))
		}
	}
	external := svc.ExternalIPs
	if cfg.RefuseExternalIPs && len(external) > 0 {
		complain("spec.externalIPs", "is not served: --allow-external-ips=false, since any author of a Service could take any address with it "+
			"(CVE-2020-8554); use a Service of type LoadBalancer, or allow them")
		external = nil
	}
	p.addrs = frontendAddrs(svc, external, p.families, complain)
	p.balance, p.weights = cfg.balanceOf(svc, complain)
	p.forwarding = cfg.forwardingOf(svc, p.balance, complain)
	p.synLimit = cfg.synLimitOf(svc, complain)
	p.slowStart = slowStartOf(svc, complain)
	p.eject = cfg.ejectsOutliers(svc, complain)
	p.redirect = redirectOf(svc, complain)
	reportUnknown(svc, complain)
	if svc.SourceRanges != nil {
		p.ranges = map[model.Family][]netip.Prefix{}
		for _, f := range p.families {
			p.ranges[f] = rangesOf(svc.SourceRanges, f)
		}
	}
	// As in the API server, only a load balancer that must distinguish nodes needs health
	// checks.
	if svc.HealthCheckNodePort != 0 && svc.Type == model.LoadBalancer && svc.ExternalLocal {
		p.health = &addressRequest{key: addressKey{Port: svc.HealthCheckNodePort}}
	}
	return p
}

// addPorts adds the ports of a Service: each has a request for each address.
func (p *plan) addPorts(svc *model.Service, cfg *Config) {
	complain := func(field, what string) { p.complain(svc.Name, field, what) }
	helpers := helpersOf(svc, complain)
	known := make(map[PortID]bool, len(svc.Ports)*len(p.families))
	for i := range svc.Ports {
		spec := &svc.Ports[i]
		for _, f := range p.families {
			id := PortID{Service: svc.Name, Port: spec.Name, Number: spec.Port, Protocol: spec.Protocol, Family: f}
			if known[id] {
				complain(fmt.Sprintf("spec.ports[%d]", i), "repeats an earlier port; remove one of the two")
				break
			}
			known[id] = true
			port := planPort(id, spec, i, p.addrs, cfg.APIServer, complain)
			port.helper = helpers[i]
			port.ofFTP = spec.Protocol == model.TCP && slices.Contains(helpers, FTP)
			p.ports = append(p.ports, port)
		}
	}
	slices.SortFunc(p.ports, func(a, b portPlan) int { return a.id.Compare(b.id) })
}

// frontendAddr is an address of a Service that serves all of its ports.
type frontendAddr struct {
	kind  FrontendKind
	addr  netip.Addr
	index int // in the list of the object's field
}

// frontendAddrs lists the addresses of a Service, and reports those that cannot be a
// frontend. An address of two kinds counts once: as the LoadBalancer's rather than as an
// externalIP, so that its source ranges apply.
func frontendAddrs(svc *model.Service, external []netip.Addr, families []model.Family, complain func(field, what string)) []frontendAddr {
	var out []frontendAddr
	known := make(map[netip.Addr]bool, len(external))
	add := func(kind FrontendKind, addr netip.Addr, index int) {
		addr = addr.Unmap()
		if why := whyInvalid(kind, addr); why != "" {
			complain(fieldOf(kind, index), fmt.Sprintf("%s %s; remove it", addr, why))
			return
		}
		if !slices.Contains(families, model.FamilyOf(addr)) {
			if kind == ExternalIP {
				complain(fieldOf(kind, index), fmt.Sprintf("%s is %s, but the Service has no clusterIP of that family; remove it or make the "+
					"Service dual-stack",
					addr, model.FamilyOf(addr)))
			}
			return // a load balancer may translate between the families
		}
		if !known[addr] {
			known[addr] = true
			out = append(out, frontendAddr{kind, addr, index})
		}
	}
	taken := make([]model.Family, 0, 2)
	for i, a := range svc.ClusterIPs {
		if f := model.FamilyOf(a); a.IsValid() && !slices.Contains(taken, f) {
			taken = append(taken, f) // the first clusterIP of each family
			add(ClusterIP, a, i)
		}
	}
	for i, a := range svc.LoadBalancerIPs {
		add(LoadBalancerIP, a, i)
	}
	for i, a := range external {
		add(ExternalIP, a, i)
	}
	return out
}

// whyInvalid returns why an address cannot be a frontend; "" if it can. Users write
// externalIPs, so the API server's validation rules apply.
func whyInvalid(kind FrontendKind, a netip.Addr) string {
	switch {
	case !a.IsValid():
		return "is not an address"
	case a.IsUnspecified():
		return "is the unspecified address"
	case a.IsLoopback():
		return "is a loopback address"
	case a.IsMulticast():
		return "is a multicast address"
	case kind == ExternalIP && a.IsLinkLocalUnicast():
		return "is a link-local address"
	}
	return ""
}

func planPort(id PortID, spec *model.ServicePort, index int, addrs []frontendAddr, apiServer netip.AddrPort,
	complain func(field, what string)) portPlan {
	p := portPlan{id: id}
	for _, a := range addrs {
		if model.FamilyOf(a.addr) != id.Family {
			continue
		}
		key := addressKey{Addr: a.addr, Port: spec.Port, Protocol: spec.Protocol}
		if a.kind == ExternalIP && spec.Protocol == model.TCP && netip.AddrPortFrom(a.addr, spec.Port) == apiServer {
			complain(fieldOf(a.kind, a.index), fmt.Sprintf("%s is the API server of the agent, and is not served; remove it", key))
			continue
		}
		p.requests = append(p.requests, addressRequest{key: key, kind: a.kind, index: int32(a.index)})
	}
	if spec.NodePort != 0 {
		p.requests = append(p.requests, addressRequest{
			key:   addressKey{Family: id.Family, Port: spec.NodePort, Protocol: spec.Protocol},
			kind:  NodePort,
			index: int32(index),
		})
	}
	slices.SortFunc(p.requests, func(a, b addressRequest) int {
		return cmp.Or(cmp.Compare(a.kind, b.kind), a.key.Addr.Compare(b.key.Addr))
	})
	return p
}

// rangesOf returns the source ranges of one family. Ranges of only the other family allow
// no client of this family, because the Service requested a restriction.
func rangesOf(ranges []netip.Prefix, f model.Family) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(ranges))
	for _, r := range ranges {
		if model.FamilyOf(r.Addr()) == f {
			out = append(out, r)
		}
	}
	return canonicalPrefixes(out)
}

// withOwn returns source ranges. If they allow the node, they get the load balancer addresses
// that the node has itself: packets from the node to such an address have it as source, and
// kube-proxy allows it, too.
func (o *ownNode) withOwn(ranges []netip.Prefix, held []addressRequest) []netip.Prefix {
	var own []netip.Prefix
	for _, c := range held {
		if a := c.key.Addr; c.kind == LoadBalancerIP && o.has(a) {
			own = append(own, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	if own == nil || !o.isIn(ranges) {
		return ranges
	}
	return canonicalPrefixes(slices.Concat(ranges, own))
}

// isIn reports whether ranges have an address of the node: of its Node, or if that has none,
// of the kernel.
func (o *ownNode) isIn(ranges []netip.Prefix) bool {
	addrs := o.named
	if len(addrs) == 0 {
		addrs = o.addrs
	}
	return slices.ContainsFunc(ranges, func(p netip.Prefix) bool {
		return slices.ContainsFunc(addrs, func(a netip.Addr) bool { return p.Contains(a.Unmap()) })
	})
}

// needOf returns the traffic policies that these frontends use. Even with
// externalTrafficPolicy Local, internal clients use all endpoints.
func needOf(svc *model.Service, held []addressRequest) need {
	var n need
	for _, c := range held {
		if c.kind == ClusterIP {
			n.clusterPolicy = n.clusterPolicy || !svc.InternalLocal
			n.localPolicy = n.localPolicy || svc.InternalLocal
			continue
		}
		n.clusterPolicy = true
		n.localPolicy = n.localPolicy || svc.ExternalLocal
	}
	return n
}

// frontends returns the frontends of a Service port for the addresses and ports that it
// holds.
func frontends(svc *model.Service, ranges []netip.Prefix, held []addressRequest, r reach) []Frontend {
	out := make([]Frontend, 0, len(held))
	for _, c := range held {
		f := Frontend{Kind: c.kind, Addr: c.key.Addr, Port: c.key.Port}
		if c.kind == ClusterIP {
			f.ExternalRoute = routeOf(svc.InternalLocal, r)
			f.InternalRoute = f.ExternalRoute
		} else {
			f.ExternalRoute = routeOf(svc.ExternalLocal, r)
			f.InternalRoute = routeOf(false, r)
		}
		if c.kind == LoadBalancerIP {
			f.SourceRanges = ranges
		}
		out = append(out, f)
	}
	return out
}

// routeOf applies a traffic policy: an endpoint if the policy has one; else Drop if other
// nodes may serve the client, and Reject if none can.
func routeOf(local bool, r reach) Route {
	switch {
	case local && r.localPolicy:
		return ToLocal
	case !local && r.clusterPolicy:
		return ToCluster
	case r.any:
		return Drop
	}
	return Reject
}
