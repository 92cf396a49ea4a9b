package donottrackflow

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/proxymode"
)

// explainer answers one question.
type explainer struct {
	q        Question
	store    model.Delta
	proto    model.Protocol
	problems []string // that bear on the answer
	notes    []string
	assumed  string   // about the client's address
	nodes    []string // sorted: those that have an object, or pods
	trackers map[string]*donottrack.Tracker
	// alsoTo is an address of a Service that the client's node judges too, before
	// netfilter translates.
	alsoTo netip.AddrPort
	// elsewhere states whether and when the destination is translated.
	elsewhere translation
}

// translation states when the destination of a flow is translated. An answer about the
// first destination does not cover the second one.
type translation int

const (
	notTranslated    translation = iota
	translatedBefore             // by eBPF: policies never see the first destination
	translatedAfter              // by netfilter: a flow that is denied before ends there
)

func newExplainer(q Question, store model.Delta, problems []model.Problem) *explainer {
	x := &explainer{q: q, store: store, proto: flowProtocols[strings.ToUpper(q.Protocol)], trackers: map[string]*donottrack.Tracker{}}
	for _, p := range problems {
		// NetworkPolicies do not matter here. Any other unreadable object may matter.
		if p.Object.Kind != model.KindNetworkPolicy {
			x.problems = append(x.problems, p.String())
		}
	}
	names := maps.Clone(store.Nodes)
	if names == nil {
		names = map[string]*model.Node{}
	}
	for _, p := range store.Pods {
		if p.Node != "" && names[p.Node] == nil {
			names[p.Node] = &model.Node{Name: p.Node}
		}
	}
	x.nodes = slices.Sorted(maps.Keys(names))
	return x
}

// party is the client or the server of a flow.
type party struct {
	text  string
	addrs []netip.Addr
	node  string // its node, "" if that is not known
	is    string // "pod", "node", or "" for an address of neither
}

// flows lists the flows of the question, one for each pair of addresses.
func (x *explainer) flows() ([]donottrack.Flow, error) {
	from, err := x.find("--from", x.q.From)
	if err != nil {
		return nil, err
	}
	if s := serviceAt(x.store, from.addrs[0]); s != nil && from.is == "" {
		return nil, questionErrorf("--from %s: that is an address of Service %s, and no client has it", from.text, s.Name)
	}
	to, err := x.find("--to", x.q.To)
	if err != nil {
		return nil, err
	}
	if s := serviceAt(x.store, to.addrs[0]); s != nil && to.is == "" {
		if slices.Contains(s.ClusterIPs, to.addrs[0]) && from.node != "" {
			return x.toService(s, to.addrs[0], from)
		}
		x.noteService(fmt.Sprintf("%s is an address of Service %s", to.text, s.Name))
	}
	if to.is == "node" {
		x.noteNodePort(to)
	}
	var out []donottrack.Flow
	for _, f := range from.addrs {
		for _, t := range to.addrs {
			if f.Is4() == t.Is4() {
				out = append(out, x.flow(f, netip.AddrPortFrom(t, uint16(x.q.Port))))
			}
		}
	}
	if len(out) == 0 {
		return nil, questionErrorf("--from %s and --to %s have no address of one family", from.text, to.text)
	}
	x.assume(from)
	return out, nil
}

func (x *explainer) flow(from netip.Addr, to netip.AddrPort) donottrack.Flow {
	p := uint16(x.q.SourcePort)
	return donottrack.Flow{From: from, To: to.Addr(), Protocol: x.proto, Port: to.Port(), Source: donottrack.PortSpan{First: p, Last: p}}
}

// assume records which address a node is assumed to use as a client. Its kernel chooses
// the address, which need not be one of the Node object.
func (x *explainer) assume(from party) {
	if from.is == "node" {
		x.assumed = fmt.Sprintf("assumed: node %s asks with %s, which its Node object has; towards its own pods "+
			"the kernel may take another address, of a bridge or tunnel: ask with that one, too", from.node, addrTexts(from.addrs))
	}
}

// noteService records that the destination belongs to a Service. Its endpoints are not
// judged, because the client may be masqueraded on the path to them.
func (x *explainer) noteService(how string) {
	x.elsewhere = translatedBefore
	if proxymode.UsesNetfilter(x.q.ProxyMode) {
		x.elsewhere = translatedAfter
	}
	x.notes = append(x.notes, how+": this does not say what policies decide about its endpoints. "+
		"Give an endpoint as --to, and as --from both the client and the node, which may masquerade")
}

// noteNodePort finds the Services and the hostPorts that have a port of a node.
func (x *explainer) noteNodePort(to party) {
	port := uint16(x.q.Port)
	var services, pods []string
	for name, s := range x.store.Services {
		has := slices.ContainsFunc(slices.Concat(s.ExternalIPs, s.LoadBalancerIPs),
			func(a netip.Addr) bool { return slices.Contains(to.addrs, a.Unmap()) })
		if slices.ContainsFunc(s.Ports, func(p model.ServicePort) bool {
			return p.Protocol == x.proto && (p.NodePort == port || has && p.Port == port)
		}) {
			services = append(services, name.String())
		}
	}
	for name, p := range x.store.Pods {
		for _, h := range p.HostPorts {
			if p.Node == to.node && h.Protocol == x.proto && h.Host == port {
				pods = append(pods, fmt.Sprintf("the hostPort of pod %s: this does not say what policies decide about it. Give the pod as --to, "+
					"and --port %d", name, h.Port))
			}
		}
	}
	slices.Sort(pods)
	for _, text := range pods {
		x.elsewhere = translatedAfter // by the CNI
		x.notes = append(x.notes, fmt.Sprintf("port %d of that node is %s", port, text))
	}
	slices.Sort(services)
	for _, name := range services {
		x.noteService(fmt.Sprintf("port %d of that node is one of Service %s", port, name))
	}
}

func addrTexts(addrs []netip.Addr) string {
	var out []string
	for _, a := range addrs {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}

// find returns the party that text names.
func (x *explainer) find(flag, text string) (party, error) {
	if a, err := netip.ParseAddr(text); err == nil {
		a = a.Unmap()
		is, node := x.at(a)
		return party{text, []netip.Addr{a}, node, is}, nil
	}
	namespace, name, ok := strings.Cut(text, "/")
	if !ok {
		return party{}, questionErrorf("%s %s: neither an address nor NAMESPACE/POD nor node/NAME", flag, text)
	}
	if n := x.store.Nodes[name]; namespace == "node" && n != nil {
		if len(n.Addresses) == 0 {
			return party{}, fmt.Errorf("%s %s: no address of that node is known", flag, text)
		}
		return party{text, n.Addresses, name, "node"}, nil
	}
	p := x.store.Pods[model.Name{Namespace: namespace, Name: name}]
	if p != nil && len(p.IPs) > 0 {
		return party{text, p.IPs, p.Node, "pod"}, nil
	}
	return party{}, x.notFound(flag, text, namespace, name)
}

// at returns whether a pod or a node has an address, and the node.
func (x *explainer) at(a netip.Addr) (is, node string) {
	for _, p := range x.store.Pods {
		if slices.Contains(p.IPs, a) {
			return "pod", p.Node
		}
	}
	for name, n := range x.store.Nodes {
		if slices.Contains(n.Addresses, a) {
			return "node", name
		}
	}
	return "", ""
}

// notFound is the error for a name that no pod or node has.
func (x *explainer) notFound(flag, text, namespace, name string) error {
	if namespace == "node" {
		known := "no Node is known"
		if all := slices.Sorted(maps.Keys(x.store.Nodes)); len(all) > 0 {
			known = "there are " + strings.Join(all[:min(len(all), 5)], ", ")
			if len(all) > 5 {
				known += fmt.Sprintf(" and %d more", len(all)-5)
			}
		}
		return fmt.Errorf("%s %s: there is no such node (%s)", flag, text, known)
	}
	for _, p := range x.problems {
		if strings.Contains(p, "Pod "+namespace+"/"+name) {
			return fmt.Errorf("%s %s: that pod could not be read: %s", flag, text, p)
		}
	}
	return fmt.Errorf("%s %s: there is no such pod with an address of its own; for one on the host's network ask for its node, as node/NAME",
		flag, text)
}

// decide returns the outcome of a flow, from the decisions of each node that has one
// of its addresses.
func (x *explainer) decide(e *Explanation, f donottrack.Flow) string {
	elsewhere := x.elsewhere
	if len(x.store.DoNotTrackPolicies) == 0 {
		elsewhere = notTranslated // for any destination
	}
	if elsewhere == translatedBefore {
		return NotJudged
	}
	var all []donottrack.Decision
	for _, name := range x.nodes {
		if !x.has(name, f.From) && !x.has(name, f.To) {
			continue
		}
		t := x.tracker(name)
		found := t.Explain(f)
		if elsewhere == translatedAfter {
			found = withoutEgressDenials(found)
		}
		if x.alsoTo.IsValid() && x.has(name, f.From) {
			before := f
			before.To, before.Port = x.alsoTo.Addr(), x.alsoTo.Port()
			found = append(found, withoutEgressDenials(t.Explain(before))...)
		}
		for _, d := range found {
			if one := (NodeDecision{name, d.Side.String(), d}); !slices.Contains(e.Decisions, one) {
				e.Decisions = append(e.Decisions, one)
			}
		}
		all = append(all, found...)
	}
	outcome := donottrack.Outcome(f, all)
	if elsewhere == translatedAfter && outcome != donottrack.Denied {
		return NotJudged
	}
	return outcome
}

// withoutEgressDenials removes what egress rules deny of a destination that netfilter
// translates: they deny after DNAT.
func withoutEgressDenials(all []donottrack.Decision) []donottrack.Decision {
	return slices.DeleteFunc(all, func(d donottrack.Decision) bool { return d.Side == donottrack.Egress && d.Outcome == donottrack.Denied })
}

// has reports whether an address is on a node.
func (x *explainer) has(node string, a netip.Addr) bool {
	if n := x.store.Nodes[node]; n != nil && slices.Contains(n.Addresses, a) {
		return true
	}
	for _, p := range x.store.Pods {
		if p.Node == node && slices.Contains(p.IPs, a) {
			return true
		}
	}
	return false
}

func (x *explainer) tracker(node string) *donottrack.Tracker {
	if t := x.trackers[node]; t != nil {
		return t
	}
	t := donottrack.New(proxymode.DoNotTrackConfig(node, x.q.ProxyName, x.q.ProxyMode))
	if n := x.store.Nodes[node]; n != nil {
		t.SetNodeAddrs(n.Addresses)
	}
	t.Apply(x.store)
	x.trackers[node] = t
	return t
}

// toService returns the flows to the endpoints of a Service, as the client's node
// chooses them.
func (x *explainer) toService(s *model.Service, addr netip.Addr, from party) ([]donottrack.Flow, error) {
	is := fmt.Sprintf("--to %s: that is an address of Service %s", x.q.To, s.Name)
	t := intent.New(intent.Config{NodeName: from.node, ProxyName: x.q.ProxyName})
	t.Apply(x.store)
	var out []donottrack.Flow
	for _, p := range t.State().Ports {
		for _, fe := range p.Frontends {
			if p.ID.Protocol != x.proto || fe.Addr != addr || fe.Port != uint16(x.q.Port) {
				continue
			}
			if proxymode.UsesNetfilter(x.q.ProxyMode) || ebpf.NeedsFallback(x.proto, p.Helper) != nil {
				x.alsoTo = netip.AddrPortFrom(addr, fe.Port)
			}
			out = x.toEndpoints(p, fe.InternalRoute, from)
		}
	}
	if len(out) == 0 {
		return nil, questionErrorf("%s, which has no endpoint for node %s at %s port %d: policies are about endpoints, name a pod",
			is, from.node, x.proto, x.q.Port)
	}
	x.notes = append(x.notes, fmt.Sprintf("%s is an address of Service %s: its endpoints are judged, as node %s knows them",
		addr, s.Name, from.node))
	x.assume(from)
	return out, nil
}

func (x *explainer) toEndpoints(p *intent.ServicePort, route intent.Route, from party) (out []donottrack.Flow) {
	for _, ep := range p.Endpoints {
		if !ep.In(route) {
			continue
		}
		for _, f := range from.addrs {
			if f == ep.Addr.Addr() {
				x.notes = append(x.notes, fmt.Sprintf("%s is an endpoint itself: when it reaches itself, it does as its node", f))
			} else if f.Is4() == ep.Addr.Addr().Is4() {
				out = append(out, x.flow(f, ep.Addr))
			}
		}
	}
	return out
}

// serviceAt returns the Service that has an address, nil if none has.
func serviceAt(store model.Delta, a netip.Addr) *model.Service {
	var found *model.Service
	for _, s := range store.Services {
		for _, list := range [][]netip.Addr{s.ClusterIPs, s.ExternalIPs, s.LoadBalancerIPs} {
			if slices.ContainsFunc(list, func(of netip.Addr) bool { return of.Unmap() == a }) &&
				(found == nil || s.Name.String() < found.Name.String()) { // the same one in each run
				found = s
			}
		}
	}
	return found
}

// note adds the assumptions to the notes, or the reason why no policy decides.
func (x *explainer) note(e *Explanation) {
	switch {
	case len(e.Decisions) > 0:
		if x.assumed != "" {
			x.notes = append(x.notes, x.assumed)
		}
	case len(x.store.DoNotTrackPolicies) == 0:
		x.notes = append(x.notes, "there is no DoNotTrackPolicy")
	case x.elsewhere != notTranslated:
	default:
		x.notes = append(x.notes, "no policy selects either")
		for _, name := range donottrack.PoliciesWithoutTargets(x.store) {
			x.notes = append(x.notes, fmt.Sprintf("DoNotTrackPolicy %s selects nothing: no pod with an address of its own, and no node", name))
		}
	}
}
