package main

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// flowWorld is what a question is answered from.
type flowWorld struct {
	q        question
	world    model.Delta
	proto    model.Protocol
	problems []string // that bear on the answer
	notes    []string
	assumed  string   // of who asks
	nodes    []string // sorted: those that have an object, or pods
	trackers map[string]*policy.Tracker
	// alsoTo is an address of a Service that the client's node judges too, before
	// netfilter translates.
	alsoTo netip.AddrPort
	// elsewhere says that who is asked is not who gets it, and when that is decided.
	elsewhere translation
}

// translation says when another destination is put in, which an answer about the first
// one knows nothing of.
type translation int

const (
	notTranslated    translation = iota
	translatedBefore             // by eBPF: policies never see the first one
	translatedAfter              // by netfilter: what is denied before goes no further
)

func newFlowWorld(q question, world model.Delta, problems []model.Problem) *flowWorld {
	w := &flowWorld{q: q, world: world, proto: flowProtocols[strings.ToUpper(q.protocol)], trackers: map[string]*policy.Tracker{}}
	for _, p := range problems {
		// Nothing is decided by these; all else that could not be read may be what decides.
		if p.Object.Kind != model.KindNetworkPolicy {
			w.problems = append(w.problems, p.String())
		}
	}
	names := maps.Clone(world.Nodes)
	if names == nil {
		names = map[string]*model.Node{}
	}
	for _, p := range world.Pods {
		if p.Node != "" && names[p.Node] == nil {
			names[p.Node] = &model.Node{Name: p.Node}
		}
	}
	w.nodes = slices.Sorted(maps.Keys(names))
	return w
}

// who is one that asks or is asked.
type who struct {
	text  string
	addrs []netip.Addr
	node  string // where it is, "" if that is not known
	is    string // "pod", "node" or "" for an address that neither has
}

// flows lists what the question is about, a flow for each pair of addresses.
func (w *flowWorld) flows() ([]policy.Flow, error) {
	from, err := w.find("--from", w.q.from)
	if err != nil {
		return nil, err
	}
	if s := serviceAt(w.world, from.addrs[0]); s != nil && from.is == "" {
		return nil, usageErrorf("--from %s: that is an address of Service %s, and nobody asks from it", from.text, s.Name)
	}
	to, err := w.find("--to", w.q.to)
	if err != nil {
		return nil, err
	}
	if s := serviceAt(w.world, to.addrs[0]); s != nil && to.is == "" {
		if slices.Contains(s.ClusterIPs, to.addrs[0]) && from.node != "" {
			return w.through(s, to.addrs[0], from)
		}
		w.lead(fmt.Sprintf("%s is an address of Service %s", to.text, s.Name))
	}
	if to.is == "node" {
		w.leadByPort(to)
	}
	var out []policy.Flow
	for _, f := range from.addrs {
		for _, t := range to.addrs {
			if f.Is4() == t.Is4() {
				out = append(out, w.flow(f, netip.AddrPortFrom(t, uint16(w.q.port))))
			}
		}
	}
	if len(out) == 0 {
		return nil, usageErrorf("--from %s and --to %s have no address of one family", from.text, to.text)
	}
	w.assume(from)
	return out, nil
}

func (w *flowWorld) flow(from netip.Addr, to netip.AddrPort) policy.Flow {
	p := uint16(w.q.sourcePort)
	return policy.Flow{From: from, To: to.Addr(), Protocol: w.proto, Port: to.Port(), Source: policy.PortSpan{First: p, Last: p}}
}

// assume says which address a node is taken to ask with: its kernel chooses, and not
// the Node object.
func (w *flowWorld) assume(from who) {
	if from.is == "node" {
		w.assumed = fmt.Sprintf("assumed: node %s asks with %s, which its Node object has; towards its own pods "+
			"the kernel may take another address, of a bridge or tunnel: ask with that one, too", from.node, addrTexts(from.addrs))
	}
}

// lead says that a Service leads from there to its endpoints, which are not followed: on
// the way, who asks may be masqueraded.
func (w *flowWorld) lead(how string) {
	w.elsewhere = translatedBefore
	if modeUsesNetfilter(w.q.proxyMode) {
		w.elsewhere = translatedAfter
	}
	w.notes = append(w.notes, how+": what policies make of its endpoints is not in here; "+
		"ask for an endpoint, from who asks and from the node, which may masquerade")
}

// leadByPort looks where a port of a node leads to.
func (w *flowWorld) leadByPort(to who) {
	port := uint16(w.q.port)
	var services, pods []string
	for name, s := range w.world.Services {
		has := slices.ContainsFunc(slices.Concat(s.ExternalIPs, s.LoadBalancerIPs), func(a netip.Addr) bool { return slices.Contains(to.addrs, a.Unmap()) })
		if slices.ContainsFunc(s.Ports, func(p model.ServicePort) bool {
			return p.Protocol == w.proto && (p.NodePort == port || has && p.Port == port)
		}) {
			services = append(services, name.String())
		}
	}
	for name, p := range w.world.Pods {
		for _, h := range p.HostPorts {
			if p.Node == to.node && h.Protocol == w.proto && h.Host == port {
				pods = append(pods, fmt.Sprintf("the hostPort of pod %s: what policies make of that is not in here; ask for the pod, at port %d", name, h.Port))
			}
		}
	}
	slices.Sort(pods)
	for _, text := range pods {
		w.elsewhere = translatedAfter // by the CNI
		w.notes = append(w.notes, fmt.Sprintf("port %d of that node is %s", port, text))
	}
	slices.Sort(services)
	for _, name := range services {
		w.lead(fmt.Sprintf("port %d of that node is one of Service %s", port, name))
	}
}

func addrTexts(addrs []netip.Addr) string {
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}

// find says who is meant.
func (w *flowWorld) find(flag, text string) (who, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		a = a.Unmap()
		is, node := w.at(a)
		return who{text, []netip.Addr{a}, node, is}, nil
	}
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		return who{}, usageErrorf("%s %s: neither an address nor NAMESPACE/POD nor node/NAME", flag, text)
	}
	if n := w.world.Nodes[name]; namespace == "node" && n != nil {
		if len(n.Addresses) == 0 {
			return who{}, fmt.Errorf("%s %s: no address of that node is known", flag, text)
		}
		return who{text, n.Addresses, name, "node"}, nil
	}
	p := w.world.Pods[model.Name{Namespace: namespace, Name: name}]
	if p != nil && len(p.IPs) > 0 {
		return who{text, p.IPs, p.Node, "pod"}, nil
	}
	return who{}, w.nobody(flag, text, namespace, name)
}

// at says who has an address.
func (w *flowWorld) at(a netip.Addr) (is, node string) {
	for _, p := range w.world.Pods {
		if slices.Contains(p.IPs, a) {
			return "pod", p.Node
		}
	}
	for name, n := range w.world.Nodes {
		if slices.Contains(n.Addresses, a) {
			return "node", name
		}
	}
	return "", ""
}

// nobody says what to ask for instead of what is not there.
func (w *flowWorld) nobody(flag, text, namespace, name string) error {
	if namespace == "node" {
		known := "no Node is known"
		if all := slices.Sorted(maps.Keys(w.world.Nodes)); len(all) > 0 {
			known = "there are " + strings.Join(all[:min(len(all), 5)], ", ")
			if len(all) > 5 {
				known += fmt.Sprintf(" and %d more", len(all)-5)
			}
		}
		return fmt.Errorf("%s %s: there is no such node (%s)", flag, text, known)
	}
	for _, p := range w.problems {
		if strings.Contains(p, "Pod "+namespace+"/"+name) {
			return fmt.Errorf("%s %s: that pod could not be read: %s", flag, text, p)
		}
	}
	return fmt.Errorf("%s %s: there is no such pod with an address of its own; for one on the host's network ask for its node, as node/NAME", flag, text)
}

// decide asks each node that has one of the addresses what it makes of a flow, and says
// what becomes of it.
func (w *flowWorld) decide(e *explanation, f policy.Flow) string {
	elsewhere := w.elsewhere
	if len(w.world.DoNotTrackPolicies) == 0 {
		elsewhere = notTranslated // wherever it goes
	}
	if elsewhere == translatedBefore {
		return notJudged
	}
	var all []policy.Decision
	for _, name := range w.nodes {
		if !w.has(name, f.From) && !w.has(name, f.To) {
			continue
		}
		t := w.tracker(name)
		found := t.Explain(f)
		if w.alsoTo.IsValid() && w.has(name, f.From) {
			before := f
			before.To, before.Port = w.alsoTo.Addr(), w.alsoTo.Port()
			found = append(found, t.Explain(before)...)
		}
		for _, d := range found {
			if one := (nodeDecision{name, d.Side.String(), d}); !slices.Contains(e.Decisions, one) {
				e.Decisions = append(e.Decisions, one)
			}
		}
		all = append(all, found...)
	}
	outcome := policy.Outcome(f, all)
	if elsewhere == translatedAfter && outcome != policy.Denied {
		return notJudged
	}
	return outcome
}

// has reports whether an address is on a node.
func (w *flowWorld) has(node string, a netip.Addr) bool {
	if n := w.world.Nodes[node]; n != nil && slices.Contains(n.Addresses, a) {
		return true
	}
	for _, p := range w.world.Pods {
		if p.Node == node && slices.Contains(p.IPs, a) {
			return true
		}
	}
	return false
}

func (w *flowWorld) tracker(node string) *policy.Tracker {
	if t := w.trackers[node]; t != nil {
		return t
	}
	t := policy.New(policyConfigOf(node, w.q.proxyName, w.q.proxyMode))
	if n := w.world.Nodes[node]; n != nil {
		t.SetNodeAddrs(n.Addresses)
	}
	t.Apply(w.world)
	w.trackers[node] = t
	return t
}

// through follows a Service from its cluster IP to its endpoints, as the node of who
// asks does.
func (w *flowWorld) through(s *model.Service, addr netip.Addr, from who) ([]policy.Flow, error) {
	is := fmt.Sprintf("--to %s: that is an address of Service %s", w.q.to, s.Name)
	t := intent.New(intent.Config{NodeName: from.node, ProxyName: w.q.proxyName})
	t.Apply(w.world)
	var out []policy.Flow
	for _, p := range t.State().Ports {
		for _, fe := range p.Frontends {
			if p.ID.Protocol != w.proto || fe.Addr != addr || fe.Port != uint16(w.q.port) {
				continue
			}
			if modeUsesNetfilter(w.q.proxyMode) || ebpf.GivesAway(w.proto, p.Helper) != nil {
				w.alsoTo = netip.AddrPortFrom(addr, fe.Port)
			}
			out = w.toEndpoints(p, fe.InternalRoute, from)
		}
	}
	if len(out) == 0 {
		return nil, usageErrorf("%s, which leads from node %s to nobody at %s port %d: policies are about what is behind it, ask for a pod",
			is, from.node, w.proto, w.q.port)
	}
	w.notes = append(w.notes, fmt.Sprintf("%s is an address of Service %s: its endpoints are judged, as node %s knows them", addr, s.Name, from.node))
	w.assume(from)
	return out, nil
}

func (w *flowWorld) toEndpoints(p *intent.ServicePort, route intent.Route, from who) (out []policy.Flow) {
	for _, ep := range p.Endpoints {
		if !(route == intent.ToCluster && ep.ClusterPolicy || route == intent.ToLocal && ep.LocalPolicy) {
			continue
		}
		for _, f := range from.addrs {
			if f == ep.Addr.Addr() {
				w.notes = append(w.notes, fmt.Sprintf("%s is an endpoint itself: when it reaches itself, it does as its node", f))
			} else if f.Is4() == ep.Addr.Addr().Is4() {
				out = append(out, w.flow(f, ep.Addr))
			}
		}
	}
	return out
}

// serviceAt finds the Service that has an address, nil if none has.
func serviceAt(world model.Delta, a netip.Addr) *model.Service {
	var found *model.Service
	for _, s := range world.Services {
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			if slices.ContainsFunc(list, func(of netip.Addr) bool { return of.Unmap() == a }) &&
				(found == nil || s.Name.String() < found.Name.String()) { // the same one each time
				found = s
			}
		}
	}
	return found
}

// note says what was assumed, or why no policy has a say.
func (w *flowWorld) note(e *explanation) {
	switch {
	case len(e.Decisions) > 0:
		if w.assumed != "" {
			w.notes = append(w.notes, w.assumed)
		}
	case len(w.world.DoNotTrackPolicies) == 0:
		w.notes = append(w.notes, "there is no DoNotTrackPolicy")
	case w.elsewhere != notTranslated:
	default:
		w.notes = append(w.notes, "no policy selects either")
		for _, name := range policy.SelectNobody(w.world) {
			w.notes = append(w.notes, fmt.Sprintf("DoNotTrackPolicy %s selects nobody at all: no pod with an address of its own, and no node", name))
		}
	}
}
