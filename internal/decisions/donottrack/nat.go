package donottrack

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// natKey is a port of an endpoint or a frontend whose packets are translated.
type natKey struct {
	proto model.Protocol
	port  uint16
	// frontend says that a Service has the address, rather than an endpoint.
	frontend bool
	// early says that eBPF translates before a policy sees the packet: a policy for that
	// address would match nothing. Otherwise netfilter translates after the policy.
	early bool
	what  string // "it is an endpoint of Service a/b"
	// instead is the remedy, apart from leaving the port out.
	instead string
	reason  string // of the Refusal, if it is not NeedsNAT
}

// natIndex holds the addresses where a policy cannot untrack: packets there have another
// address before or after, and conntrack must know which. The Tracker maintains it while
// there are policies.
type natIndex struct {
	at        map[netip.Addr]map[natKey]int
	nodePorts map[natKey]int // at all addresses of the node
}

func newNATIndex() natIndex {
	return natIndex{at: map[netip.Addr]map[natKey]int{}, nodePorts: map[natKey]int{}}
}

// add adds 1 or -1 to an entry.
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

func (x *natIndex) addNodePort(k natKey, by int) {
	if x.nodePorts[k] += by; x.nodePorts[k] <= 0 {
		delete(x.nodePorts, k)
	}
}

// Any author of a slice can name 20,000 ports of 1,000 endpoints, and no rule can meet most of
// them. Of a slice with more than allTranslated endpoints, each counted once per port, the Tracker
// knows those that rules are about, and maxTranslated at most. A rule for a port that none was
// about before does not wait until the kernel has such a slice no more. Beyond maxTranslated, a
// rule may leave connections through the slice's own Service without conntrack, and break them.
const (
	allTranslated = 1 << 10
	maxTranslated = 1 << 16
)

func isLarge(s *model.EndpointSlice) bool { return len(s.Ports)*len(s.Endpoints) > allTranslated }

// portSet has the ports that rules are about.
type portSet map[model.Protocol]*[1 << 16]bool

func (t *Tracker) portsOfRules() portSet {
	out := portSet{}
	for _, p := range t.policies {
		for _, r := range p.rules {
			for _, ports := range r.ports {
				if out[ports.Protocol] == nil {
					out[ports.Protocol] = new([1 << 16]bool)
				}
				for n := int(ports.First); n <= int(ports.Last); n++ {
					out[ports.Protocol][n] = true
				}
			}
		}
	}
	return out
}

func (s portSet) has(proto model.Protocol, port uint16) bool {
	return s[proto] != nil && s[proto][port]
}

func (s portSet) equal(o portSet) bool {
	return maps.EqualFunc(s, o, func(a, b *[1 << 16]bool) bool { return *a == *b })
}

// translated returns for each port of a Service whether netfilter translates its packets.
func (t *Tracker) translated(s *model.Service) []bool {
	out := make([]bool, len(s.Ports))
	others := s.ProxyName != t.cfg.ProxyName
	if !others && !t.cfg.Netfilter && !t.takingOver {
		if t.cfg.NeedsFallback != nil {
			return t.cfg.NeedsFallback(s)
		}
		return out
	}
	for i := range out {
		out[i] = !others || t.cfg.ProxyName != "" // beside another proxy
	}
	return out
}

// remedy returns the remedy for a policy that conflicts with a Service's port.
func (t *Tracker) remedy(s *model.Service, port *model.ServicePort) string {
	const headless = "use a headless Service"
	others := s == nil || s.ProxyName != t.cfg.ProxyName || port.Protocol == model.SCTP
	switch {
	case t.takingOver && !others:
		return "wait until eBPF serves it"
	case others:
		return headless
	case t.cfg.Netfilter:
		return headless + ", or --proxy-mode ebpf"
	}
	return headless + ", or annotate the Service with spillway.dev/helper=none if it is not FTP"
}

// countSlice adds or removes the endpoints of a slice. of is its Service; nil if that is not
// known.
func (t *Tracker) countSlice(s *model.EndpointSlice, of *model.Service, by int) {
	service, left, large := t.translation(of), maxTranslated, isLarge(s)
	for _, port := range s.Ports {
		if large && !t.rulePorts.has(port.Protocol, port.Port) {
			continue
		}
		translated, instead := service.endpointPort(&port)
		if !translated {
			continue
		}
		if left -= len(s.Endpoints); left < 0 {
			break
		}
		k := natKey{proto: port.Protocol, port: port.Port, what: fmt.Sprintf("it is an endpoint of Service %s", s.Service), instead: instead}
		for i := range s.Endpoints {
			if a := s.Endpoints[i].Addr; a.IsValid() {
				t.countNAT(a, k, by)
			}
		}
	}
}

// translation says which ports of a Service's slices netfilter translates to.
type translation struct {
	tracker    *Tracker
	of         *model.Service // nil: not known
	translated []bool         // of its ports
	ports      map[translatedPort]int
}

// translatedPort is what ports of a Service and of its slices have in common.
type translatedPort struct {
	name  string
	proto model.Protocol
}

func (t *Tracker) translation(of *model.Service) translation {
	out := translation{tracker: t, of: of}
	if of == nil {
		return out
	}
	out.translated, out.ports = t.translated(of), make(map[translatedPort]int, len(of.Ports))
	for i := range of.Ports {
		p := translatedPort{of.Ports[i].Name, of.Ports[i].Protocol}
		if _, found := out.ports[p]; !found {
			out.ports[p] = i
		}
	}
	return out
}

// endpointPort returns whether netfilter translates to a port of a slice, and the remedy if a
// policy matches it.
func (s *translation) endpointPort(port *model.EndpointPort) (translated bool, instead string) {
	t := s.tracker
	if s.of == nil {
		return t.cfg.ProxyName != "", t.remedy(nil, nil)
	}
	if i, found := s.ports[translatedPort{port.Name, port.Protocol}]; found {
		return s.translated[i], t.remedy(s.of, &s.of.Ports[i])
	}
	// The Service serves no port there; the program that translates may disagree.
	return t.cfg.Netfilter || s.of.ProxyName != t.cfg.ProxyName && t.cfg.ProxyName != "", t.remedy(nil, nil)
}

// countService adds or removes the addresses of a Service.
func (t *Tracker) countService(s *model.Service, by int) {
	translated := t.translated(s)
	for i := range s.Ports {
		port := &s.Ports[i]
		early, instead := !translated[i], t.remedy(s, port)
		k := natKey{port.Protocol, port.Port, true, early, fmt.Sprintf("Service %s has that address", s.Name), instead, ""}
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			for _, a := range list {
				t.countNAT(a.Unmap(), k, by)
			}
		}
		if port.NodePort != 0 {
			k = natKey{port.Protocol, port.NodePort, true, early, fmt.Sprintf("it is a NodePort of Service %s", s.Name), instead, ""}
			t.nat.addNodePort(k, by)
			if !early {
				t.pendingRemoval.addNodePort(k, -by)
			}
			t.markNodePortsDirty(by)
		}
	}
}

// countHostPorts adds or removes the ports of a pod of this node that a hostPort leads to.
// The CNI translates them in netfilter, whatever serves Services.
func (t *Tracker) countHostPorts(p *model.Pod, by int) {
	if p.Node != t.cfg.NodeName {
		return
	}
	for _, h := range p.HostPorts {
		k := natKey{proto: h.Protocol, port: h.Port, reason: HostPort, instead: "take the hostPort out of the pod",
			what: fmt.Sprintf("hostPort %d of pod %s leads there", h.Host, p.Name)}
		for _, a := range p.IPs {
			t.countNAT(a.Unmap(), k, by)
		}
	}
}

func (t *Tracker) countNAT(a netip.Addr, k natKey, by int) {
	t.nat.add(a, k, by)
	if !k.early && k.reason != HostPort {
		t.pendingRemoval.add(a, k, -by)
	}
	t.markNATDirty(a, k, by)
}

// markNATDirty marks everything dirty that a Service or a hostPort at an address may
// conflict with.
func (t *Tracker) markNATDirty(a netip.Addr, k natKey, by int) {
	if _, selected := t.targetsOf[a]; selected {
		t.markAddressDirty(a, by)
	}
	for _, r := range t.outgoing {
		if r.takesFrom(k) && r.covers(a) {
			t.markRuleDirty(r)
		}
	}
}

func (t *Tracker) markNodePortsDirty(by int) {
	for _, a := range t.own {
		t.markAddressDirty(a, by)
	}
}

// StartTakeover says that another program may translate for Services in netfilter until
// the call of ServicesWritten. Callers call it first.
func (t *Tracker) StartTakeover() { t.takingOver, t.holdRefusals = true, true }

// ReportRefusals returns the refusals that StartTakeover withheld because they may be
// resolved soon.
func (t *Tracker) ReportRefusals() Changes {
	if !t.holdRefusals {
		return Changes{}
	}
	t.holdRefusals = false
	t.refusals = t.collectRefusals()
	return Changes{Refusals: t.refusals}
}

// ServicesWritten says that the kernel serves the Services that the Tracker knows, so that
// netfilter no longer translates for deleted ones. Until this call deleted Services still
// block policies; otherwise connections that start meanwhile would break.
func (t *Tracker) ServicesWritten() Changes {
	first := t.takingOver
	if !first && len(t.pendingRemoval.at)+len(t.pendingRemoval.nodePorts) == 0 {
		return Changes{}
	}
	if first {
		t.countServices(-1)
		t.takingOver = false
		t.countServices(1)
	}
	gone := t.pendingRemoval
	t.pendingRemoval = newNATIndex()
	for a, keys := range gone.at {
		for k := range keys {
			t.markNATDirty(a, k, -1)
		}
	}
	if len(gone.nodePorts) > 0 {
		t.markNodePortsDirty(-1)
	}
	c := t.Changes()
	if report := t.ReportRefusals(); report.Refusals != nil {
		c.Refusals = report.Refusals
	}
	return c
}

func (t *Tracker) countServices(by int) {
	if len(t.policies) == 0 {
		return
	}
	for _, s := range t.facts.Services() {
		t.countService(s, by)
	}
	for s := range t.facts.Slices() {
		t.countSlice(s.Object, t.facts.Service(s.Object.Service), by)
	}
}

func (t *Tracker) countLargeSlices(by int) {
	for s := range t.facts.Slices() {
		if isLarge(s.Object) {
			t.countSlice(s.Object, t.facts.Service(s.Object.Service), by)
		}
	}
}

// markAddressDirty marks an address dirty where netfilter translates more, or less.
func (t *Tracker) markAddressDirty(a netip.Addr, by int) {
	t.dirty[a] = struct{}{}
	if by < 0 {
		t.resolved[a] = struct{}{}
	}
}

// markRuleDirty makes renewNAT search for the Services that an outgoing rule matches.
func (t *Tracker) markRuleDirty(r *rule) {
	if !r.natStale {
		r.natStale = true
		t.natStale = append(t.natStale, r)
	}
}

// obstacle is why a rule does not hold as requested at an address.
type obstacle struct {
	what    string // the Service, or the pod's hostPort
	early   bool   // as in natKey: the rule matches nothing there
	instead string // as in natKey
	reason  string
}

// natAt returns the Service whose packets conflict with a rule, if there is one.
func (t *Tracker) natAt(addr netip.Addr, r *rule) (found obstacle) {
	own := t.isOwn(addr)
	look := func(keys map[natKey]int) {
		for k := range keys {
			if !r.about(k.proto, k.port) || k.early && !own || r.Track && !k.early {
				continue // a rule that tracks hides nothing from conntrack
			}
			if found.what == "" || k.what < found.what { // the same result each time
				found = obstacle{k.what, k.early, k.instead, k.reason}
			}
		}
	}
	for _, x := range []*natIndex{&t.nat, &t.pendingRemoval} {
		if r.Side == Ingress {
			look(x.at[addr])
			if own {
				look(x.nodePorts)
			}
		}
	}
	if found.what == "" && !r.Track {
		return r.nat
	}
	return found
}

// The ports that Linux assigns to sockets without a chosen port: the default of
// ip_local_port_range, which a pod may change.
const firstEphemeral, lastEphemeral = 32768, 60999

// outgoing reports whether a rule may match packets to Services: those that pods of this
// node send to the rule's ports, or those that look like replies because they come from
// the rule's ports.
func (r *rule) outgoing() bool {
	return r.Side == Egress || r.ephemeral(model.TCP) || r.ephemeral(model.UDP) || r.ephemeral(model.SCTP)
}

// ephemeral reports whether the kernel may choose a port of a rule as the source of a
// pod's own connections.
func (r *rule) ephemeral(proto model.Protocol) bool {
	return slices.ContainsFunc(r.ports, func(p model.PortRange) bool {
		return p.Protocol == proto && p.First <= lastEphemeral && firstEphemeral <= p.Last
	})
}

// takesFrom reports whether a rule would match packets that netfilter translates at a key,
// if the key's address is among the rule's peers.
func (r *rule) takesFrom(k natKey) bool {
	switch {
	case k.early:
		return false
	case r.Side == Egress:
		return r.about(k.proto, k.port)
	}
	return k.frontend && r.ephemeral(k.proto)
}

// lookForNAT returns a Service that an outgoing rule matches.
func (t *Tracker) lookForNAT(r *rule) (found obstacle) {
	for _, x := range []*natIndex{&t.nat, &t.pendingRemoval} {
		x.lookFor(r, &found)
	}
	return found
}

func (x *natIndex) lookFor(r *rule, found *obstacle) {
	for a, keys := range x.at {
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
			if found.what == "" || what < found.what { // the same result each time, so that it changes only with the facts
				*found = obstacle{what: what, instead: k.instead, reason: k.reason}
			}
		}
	}
}
