package trace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// decide adds the steps of the connection.
func (t *tracer) decide(ctx context.Context) error {
	dst := t.to()
	if t.client.hooks {
		to, done := t.socketSteps(dst)
		if done {
			return nil
		}
		dst = to
	} else {
		t.add(t.entryStep())
	}
	if t.client.kind == nodeClient {
		return t.nodeSteps(dst)
	}
	return t.packetSteps(ctx, dst)
}

// entryStep says where the packet enters if no socket hook sees the connection.
func (t *tracer) entryStep() Step {
	s := Step{Name: stepEntry, Lookup: "pods, node_addrs"}
	switch t.client.kind {
	case podClient:
		s.Found = fmt.Sprintf("%s is a pod of this node, behind %s", t.From.Addr, t.client.device)
		if t.client.cgroup != "" {
			s.Found += fmt.Sprintf("; process %d is not in a cgroup with socket hooks", t.client.pid)
		}
		s.Follows = "the packet enters at from_pod"
	case nodeClient:
		s.Found = fmt.Sprintf("%s is this node's own; no socket hook is visible here", t.From.Addr)
		s.Follows = "the node's stack sends the packet"
	case outsideClient:
		s.Found = fmt.Sprintf("%s is neither this node's nor of a pod here; %s leads to %s", t.From.Addr, t.client.route, t.client.device)
		s.Follows = "the packet enters at from_network"
	}
	return s
}

// packet is one first packet on its way through the steps of a tc hook.
type packet struct {
	*tracer
	dst      netip.AddrPort
	result   *inspect.DryRunResult
	verdict  string
	decides  meaning
	frontend *inspect.FrontendEntry
	route    string // of the frontend, for this client
}

// packetSteps runs the tc program of the client's device on the first packet, and adds the
// steps up to the deciding one.
func (t *tracer) packetSteps(ctx context.Context, dst netip.AddrPort) error {
	p := &packet{tracer: t, dst: dst}
	err := t.inside(func() (err error) {
		p.result, err = t.dry.Run(ctx, inspect.DryRunPacket{
			Hook: t.client.hook(), Ifindex: t.client.ifindex, Protocol: t.Protocol, Src: t.from(), Dst: dst,
		})
		return err
	})
	if err != nil {
		return err
	}
	if n, all := t.dry.Copied(); !all {
		t.note("The dry run knows %d of the flows towards the endpoint; there are more.", n)
	}
	t.Verdicts = append(t.Verdicts, p.result.Verdicts...)
	p.verdict, p.decides = decisive(p.result.Verdicts)
	p.findFrontend()
	p.serves = p.serves || p.isEgress()
	if p.decides.step == "" {
		if p.decides.step = p.unservedStep(); p.decides.step == stepBypass {
			p.decides.text = "not forwarded past netfilter: the stack handles the packet unchanged"
		}
	}
	steps := map[string]func() (Step, bool){
		stepProgram: p.programStep, stepPacket: p.parseStep, stepFilter: p.filterStep, stepFlow: p.flowStep,
		stepFrontend: p.frontendStep, stepSource: p.sourceStep, stepNetfilter: p.netfilterStep, stepRanges: p.rangesStep,
		stepPolicy: p.policyStep, stepEndpoint: p.endpointStep, stepSNAT: p.snatStep, stepIPsec: p.ipsecStep,
		stepEgress: p.egressStep, stepPort: p.portStep, stepBypass: p.bypassStep, stepNextHop: p.nextHopStep,
	}
	attached := true
	for _, name := range order {
		s, applies := steps[name]()
		last := name == p.decides.step
		if !applies && !last {
			continue
		}
		s.Name = name
		if name == stepProgram && s.State == Refused {
			attached = false
		}
		if last && attached {
			s.State, s.Follows = p.decides.state, p.decides.text+" ("+p.verdict+")"
		}
		t.add(s)
		if last || !attached {
			break
		}
	}
	p.conclude(attached)
	return nil
}

// conclude writes the decision.
func (p *packet) conclude(attached bool) {
	switch {
	case !attached:
		p.Decision = "no program of Spillway sees the packet on " + p.client.device + ": the stack handles it unchanged"
	case p.decides.state == Refused:
		p.Refused, p.Decision = true, p.decides.text+" ("+p.verdict+")"
	case p.isEgress() && p.result.Flow != nil:
		p.Decision = fmt.Sprintf("leaves the cluster as %s: %s (%s)", p.result.Flow.Src, p.decides.text, p.verdict)
	case p.result.Flow != nil:
		p.Endpoint = p.result.Flow.Dst.String()
		p.Decision = fmt.Sprintf("to endpoint %s: %s (%s)%s", p.Endpoint, p.decides.text, p.verdict, replies(p.result.Flow))
	case p.dst != p.to(): // translated by the socket hook
		p.Endpoint = p.dst.String()
		p.Decision = fmt.Sprintf("to endpoint %s, by the socket hook; then %s (%s)", p.dst, p.decides.text, p.verdict)
	default:
		p.Decision = p.decides.text + " (" + p.verdict + ")"
		if p.frontend != nil && p.frontend.Has("endpoint") {
			p.Endpoint = p.dst.String()
		}
	}
}

// unservedStep is the step at which pass_other ends: the programs count it at several.
func (p *packet) unservedStep() string {
	switch {
	case !p.inFilter():
		return stepFilter
	case p.frontend == nil && !p.isEndpoint(p.from()) && !slices.Contains(p.view.Settings().Flags, "untracked"):
		return stepFrontend
	}
	return stepBypass
}

// isEgress reports whether the packet is of a pod's connection to the outside, with the node's address.
func (p *packet) isEgress() bool {
	return slices.Contains(p.result.Verdicts, "egress_created") || p.result.Flow != nil && p.result.Flow.IsEgress()
}

func (p *packet) egressStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("pods[%s], cluster_ranges[%s]", p.From.Addr, p.dst.Addr()),
		Found: "the pod's connections leave with the node's address, and no range keeps this destination"}
	if f := p.result.Flow; f != nil {
		s.Follows = "the packet leaves from " + f.Src.Addr().String()
	}
	return s, p.isEgress() && !p.known()
}

func (p *packet) isEndpoint(at netip.AddrPort) bool {
	e := p.view.Frontend(p.Protocol, at)
	return e != nil && e.Has("endpoint")
}

// anyAddr is the address of NodePorts in the map frontends.
func anyAddr(like netip.Addr) netip.Addr {
	if like.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// findFrontend reads the entry of the address, or that of a NodePort of this node.
func (p *packet) findFrontend() {
	p.frontend = p.view.Frontend(p.Protocol, p.dst)
	if _, nodePorts := p.view.NodeAddr(p.dst.Addr()); p.frontend == nil && nodePorts {
		p.frontend = p.view.Frontend(p.Protocol, netip.AddrPortFrom(anyAddr(p.dst.Addr()), p.dst.Port()))
	}
	if p.frontend == nil {
		return
	}
	p.serves = true
	if p.route = p.frontend.ExternalRoute; p.client.kind != outsideClient {
		p.route = p.frontend.InternalRoute
	}
}

// key is an address and port as the steps print them.
func (p *packet) key(at netip.AddrPort) string {
	return fmt.Sprintf("%s/%s", at, p.ProtocolName)
}

func (p *packet) programStep() (s Step, applies bool) {
	var list []attach.Attachment
	err := p.inside(func() (err error) {
		list, err = attach.IngressAttachments(p.BPFFS, p.client.ifindex)
		return err
	})
	s.Lookup = p.client.device + " ingress"
	if err != nil {
		s.Found, s.State = err.Error(), Doubt
		return s, true
	}
	own := slices.IndexFunc(list, func(a attach.Attachment) bool { return a.Own })
	var names []string
	for _, a := range list {
		name := fmt.Sprintf("%s (%s, id %d)", a.Name, a.Mechanism, a.ID)
		if a.Own {
			name += ", Spillway's"
		}
		names = append(names, name)
	}
	s.Found = strings.Join(names, ", then ")
	switch {
	case own < 0:
		if s.Found == "" {
			s.Found = "no program"
		}
		s.State, s.Follows = Refused, "no program of this Spillway is attached: Services are not served for packets from this device"
	case own > 0:
		s.State, s.Follows = Doubt, fmt.Sprintf("%s runs before Spillway's: the packet gets here only if that program returns TCX_NEXT",
			list[0].Name)
	default:
		s.Follows = "Spillway's program runs first"
		if list[own].Tag != p.result.Tag && list[own].Tag != "" {
			s.State, s.Follows = Doubt, "the attached program is of another version than this spillway: the decision below may differ"
		}
	}
	return s, true
}

func (p *packet) parseStep() (Step, bool) {
	return Step{Lookup: "headers", Found: fmt.Sprintf("untagged, %s %s > %s", p.first(), p.from(), p.dst), Follows: "looked up further"}, true
}

// first names the first packet of a connection.
func (t *tracer) first() string {
	if t.Protocol == model.TCP {
		return "TCP SYN"
	}
	return "UDP"
}

func (p *packet) inFilter() bool {
	has := func(at netip.AddrPort) bool { return p.view.FilterHas(p.Protocol, at) }
	return has(p.dst) || has(p.from()) || has(netip.AddrPortFrom(anyAddr(p.dst.Addr()), p.dst.Port()))
}

func (p *packet) filterStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("port_filter[%s]", p.key(p.dst)), Found: "member", Follows: "it may be a Service's"}
	if !p.inFilter() {
		s.Found = "not a member: no Service, endpoint, flow or policy has it"
	}
	if p.isEgress() {
		s.Follows = "it may leave the cluster (--egress)"
	}
	return s, true
}

func (p *packet) flowStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("flows[%s > %s]", p.from(), p.key(p.dst)), Found: "none", Follows: "a new connection"}
	if p.result.Found {
		f := p.result.Flow
		s.Found = flowText(f)
		s.Follows = "the packet belongs to this flow"
		if f == nil {
			s.Found = "an entry, which is over"
		}
	}
	return s, true
}

// flowText describes an entry of the flow table.
func flowText(f *inspect.FlowEntry) string {
	if f == nil {
		return "none"
	}
	text := fmt.Sprintf("%s, to %s as %s, idle for %d s", f.State, f.Dst, f.Src, f.Idle)
	if len(f.Flags) > 0 {
		text += " (" + strings.Join(f.Flags, ", ") + ")"
	}
	return text
}

// known reports whether the packet belongs to a flow that exists: later steps are those of
// its first packet.
func (p *packet) known() bool { return p.result.Found && p.decides.step == stepNextHop }

func (p *packet) frontendStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("frontends[%s]", p.key(p.dst))}
	own, nodePorts := p.view.NodeAddr(p.dst.Addr())
	switch {
	case p.known() || p.isEgress():
		return s, false
	case p.frontend == nil && own && !nodePorts:
		s.Found = "none; the address is this node's, without NodePorts"
	case p.frontend == nil && own:
		s.Found = "none; the address is this node's, and no NodePort has the port"
	case p.frontend == nil:
		s.Found = "none: not an address and port of a Service on this node"
	case p.frontend.Has("endpoint"):
		s.Found, s.Follows = "an endpoint's own address", "not translated; it may bypass netfilter"
	default:
		s.Lookup = fmt.Sprintf("frontends[%s]", p.frontend.Key) // a NodePort's has the zero address
		s.Found = fmt.Sprintf("Service %d, external route %s, internal route %s", p.frontend.Service, p.frontend.ExternalRoute,
			p.frontend.InternalRoute)
		if len(p.frontend.Flags) > 0 {
			s.Found += ", " + strings.Join(p.frontend.Flags, ", ")
		}
		s.Follows = "route " + p.route + ", for clients of this node"
		if p.client.kind == outsideClient {
			s.Follows = "route " + p.route + ", for clients on other machines"
		}
	}
	return s, true
}

func (p *packet) sourceStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("pods[%s], node_addrs", p.From.Addr), Found: "the address belongs to " + p.client.device}
	if p.known() {
		return s, false
	}
	if p.client.kind == outsideClient {
		s.Found = "no pod of this node and not the node"
	}
	if p.decides.step == stepSource {
		s.Found = "the address does not belong to " + p.client.device
	}
	return s, true
}

// netfilterStep shows conntrack's entries for the destination. The program asks conntrack
// about a packet only if it is no SYN.
func (p *packet) netfilterStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("conntrack, to %s", p.key(p.dst))}
	if p.known() || p.frontend == nil {
		return s, false
	}
	entries, err := p.conntrackEntries(p.dst)
	switch {
	case errors.Is(err, conntrack.ErrUnsupported) || errors.Is(err, os.ErrNotExist):
		s.Found = "conntrack is not in use"
		return s, true
	case err != nil:
		s.Found, s.State = err.Error(), Doubt
		return s, true
	}
	own, stale := p.judge(entries)
	s.Found = fmt.Sprintf("%d entries", len(entries))
	if own != nil {
		s.Found += fmt.Sprintf("; one of this source, to %s, %v left", own.Reply.Src, own.Timeout)
	}
	switch {
	case len(stale) > 0:
		s.State = Doubt
		s.Found += fmt.Sprintf("; stale, to addresses that are no endpoint: %s", shortList(stale))
		s.Follows = "packets of these entries reach no endpoint: delete them with 'spillway doctor --fix', or 'conntrack -D'"
	case p.Protocol == model.TCP:
		s.Follows = "a SYN begins a connection: netfilter is not asked"
	default:
		s.Follows = "netfilter does not translate this packet"
	}
	return s, true
}

// conntrackEntries lists the entries whose clients ask an address.
func (t *tracer) conntrackEntries(to netip.AddrPort) (list []conntrack.Entry, err error) {
	err = t.inside(func() error {
		c, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer c.Close()
		return c.Dump(context.Background(), conntrack.Filter{Protocol: uint8(t.Protocol), OrigDst: to}, func(e *conntrack.Entry) bool {
			list = append(list, *e)
			return len(list) < maxEntries
		})
	})
	return list, err
}

// maxEntries bounds the conntrack entries that are read.
const maxEntries = 1000

// judge returns the entry of this source, and the destinations of translated entries that
// are no endpoint of the Service.
func (p *packet) judge(entries []conntrack.Entry) (own *conntrack.Entry, stale []string) {
	cluster, _ := p.view.Endpoints(p.frontend.Service, "cluster")
	local, _ := p.view.Endpoints(p.frontend.Service, "local")
	for i := range entries {
		e := &entries[i]
		if e.Orig.Src == p.from() {
			own = e
		}
		to := e.Reply.Src
		is := func(x inspect.EndpointShare) bool { return x.Addr == to }
		if e.Status&conntrack.DstNAT != 0 && !slices.ContainsFunc(cluster, is) && !slices.ContainsFunc(local, is) {
			stale = append(stale, fmt.Sprintf("%s > %s", e.Orig.Src, to))
		}
	}
	return own, stale
}

// shortList joins the first items.
func shortList(items []string) string {
	const most = 3
	if len(items) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(items[:most], ", "), len(items)-most)
	}
	return strings.Join(items, ", ")
}

// serviceStep reports whether a step about the Service's choice applies.
func (p *packet) serviceStep() bool {
	return p.frontend != nil && !p.frontend.Has("endpoint") && !p.known()
}

func (p *packet) rangesStep() (Step, bool) {
	s := Step{Lookup: fmt.Sprintf("source_ranges[%s]", p.From.Addr), Found: "the Service allows every client"}
	if !p.serviceStep() {
		return s, false
	}
	s.Lookup = fmt.Sprintf("source_ranges[Service %d, %s]", p.frontend.Service, p.From.Addr)
	if p.frontend.Has("ranges") {
		list, contains := p.view.SourceRanges(p.frontend.Service, p.From.Addr)
		s.Found = fmt.Sprintf("%s: %s", map[bool]string{true: "allowed", false: "not in"}[contains], prefixes(list))
	}
	return s, true
}

func prefixes(list []netip.Prefix) string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	if len(out) == 0 {
		return "no range"
	}
	return shortList(out)
}

func (p *packet) policyStep() (Step, bool) {
	s := Step{}
	if !p.serviceStep() {
		return s, false
	}
	s.Lookup = fmt.Sprintf("frontends[%s].route", p.key(p.dst))
	s.Found = map[string]string{
		"cluster": "all endpoints", "local": "endpoints on this node only",
		"drop": "policy Local without an endpoint here", "reject": "no endpoint",
	}[p.route]
	s.Found = p.route + ": " + s.Found
	return s, true
}

func (p *packet) endpointStep() (Step, bool) {
	if !p.serviceStep() {
		return Step{}, false
	}
	return p.choice(p.frontend, p.route, 0, p.chosen()), true
}

// chosen is the endpoint of the dry run, "" for none.
func (p *packet) chosen() string {
	if p.result.Flow == nil {
		return ""
	}
	return p.result.Flow.Dst.String()
}

// choice shows the set of endpoints, and the session affinity of the client. cookie is that
// of a socket's namespace.
func (t *tracer) choice(fe *inspect.FrontendEntry, route string, cookie uint64, chosen string) Step {
	set, affinity := t.view.Endpoints(fe.Service, route)
	t.Sets = set
	s := Step{Name: stepEndpoint, Lookup: fmt.Sprintf("services, slots, backends[Service %d, %s]", fe.Service, route), Found: shares(set)}
	switch b := t.view.Balance(fe.Service); {
	case b.ByLoad():
		s.Found += fmt.Sprintf("; %s of two random ones: the kernel may choose another than this trace", b)
	case b.ByClient() && route == "cluster" && cookie == 0:
		s.Found += "; maglev: the client's address and port choose, on each node the same"
	}
	if affinity > 0 {
		client := t.From.Addr
		if cookie != 0 {
			client = t.To.Addr
		}
		text := "no entry of this client"
		if e := t.view.Affinity(fe.Service, client, cookie); e != nil {
			text = fmt.Sprintf("the client's is %s, used %d s ago", e.Endpoint.Addr, e.Idle)
		}
		s.Found += fmt.Sprintf("; session affinity %d s: %s", affinity, text)
	}
	if chosen != "" {
		s.Follows = "this connection gets " + chosen
	}
	return s
}

// shares lists endpoints with their share of new connections.
func shares(set []inspect.EndpointShare) string {
	if len(set) == 0 {
		return "no endpoint"
	}
	var items []string
	for _, e := range set {
		where := ""
		if slices.Contains(e.Flags, "on_this_node") {
			where = ", here"
		}
		items = append(items, fmt.Sprintf("%s (%.0f %%%s)", e.Addr, 100*e.Share, where))
	}
	return fmt.Sprintf("%d: %s", len(set), shortList(items))
}

func (p *packet) snatStep() (Step, bool) {
	f := p.result.Flow
	s := Step{Lookup: "uplinks, node_settings"}
	if !p.serviceStep() {
		return s, false
	}
	if f == nil {
		s.Lookup, s.Found = "FIB, uplinks", p.hopText()
		return s, false
	}
	switch {
	case f.Has("dsr"):
		s.Found, s.Follows = "kept", "the endpoint sees the client, and its node answers the client itself"
		if p.view.DSREncapsulation(f.Dst.Addr()) == inspect.EncapsulationGUE && !f.Has("to_pod") {
			s.Lookup += ", dsr_encapsulations"
			s.Follows += "; packets travel to it within datagrams, because the network drops IP options"
		}
	case f.Has("snat") && p.client.kind == outsideClient && p.view.DSR(p.frontend.Service):
		s.Found = fmt.Sprintf("replaced by %s", f.Src.Addr())
		if p.view.DSREncapsulation(f.Dst.Addr()) == inspect.EncapsulationNone {
			s.Lookup += ", dsr_encapsulations"
			s.Follows, s.State = "probes of this endpoint's node get no answer, neither by an IP option nor within a datagram: so replies come "+
				"back through this node", Doubt
			break
		}
		s.Follows, s.State = undirected(p.view.DSRPath(f.Backend), time.Now())
	case f.Has("snat"):
		s.Found = fmt.Sprintf("replaced by %s", f.Src.Addr())
		s.Follows = "client and endpoint are on other machines: replies must come back through this node"
		if p.From.Addr == f.Dst.Addr() {
			s.Follows = "the endpoint is the client itself (hairpin)"
		} else if slices.Contains(p.view.Settings().Flags, "masquerade_all") {
			s.Follows = "the agent masquerades all (--masquerade-all)"
		}
	case f.Has("stack"):
		s.Found, s.Follows = "kept", "netfilter must see the flow: it goes through the stack"
	default:
		s.Found, s.Follows = "kept", "replies come back through this node anyway"
	}
	return s, true
}

// replies says who answers the client, if that is not this node on their way back.
func replies(f *inspect.FlowEntry) string {
	switch {
	case !f.Has("dsr"):
		return ""
	case f.Has("to_pod"):
		return "; another node received the connection, and this node answers the client itself"
	}
	return "; the endpoint's node answers the client itself: no reply passes this node"
}

// undirected says why a packet of a Service with DSR gets the node's address, and
// whether that is a fault.
func undirected(path *inspect.DSRPath, now time.Time) (why string, state State) {
	if path == nil || path.Trusted {
		return "the Service has DSR replies, but not for clients in the cluster, and not while the client's port has another connection to " +
			"this endpoint", Passed
	}
	ago := now.Sub(path.Failed)
	return fmt.Sprintf("DSR replies of this endpoint do not arrive: clients repeated %d SYNs, the last %.0f s ago. So replies come back "+
		"through this node. It tries DSR replies again in %.0f s",
		path.Failures, ago.Seconds(), max(inspect.DSRRetry-ago, 0).Seconds()), Doubt
}

func (p *packet) ipsecStep() (Step, bool) {
	if !slices.Contains(p.view.Settings().Flags, "xfrm") || p.known() {
		return Step{}, false
	}
	return Step{Lookup: "cluster_ranges[IPsec policies]", Found: "the node has IPsec policies",
		Follows: "none selects this packet, or the stack encrypts it"}, true
}

func (p *packet) portStep() (Step, bool) {
	f, settings := p.result.Flow, p.view.Settings()
	if !p.serviceStep() && (!p.isEgress() || p.known()) {
		return Step{}, false
	}
	s := Step{Lookup: fmt.Sprintf("snat_ports[%d ports, %d to %d], flows", settings.SNATPorts, settings.First, settings.Last)}
	if f == nil {
		for _, e := range p.Sets {
			if used := p.dry.PortsInUse(p.Protocol, e.Addr); used > 0 {
				s.Found = fmt.Sprintf("%d of %d ports are in use towards %s", used, settings.SNATPorts, e.Addr)
			}
		}
		return s, p.decides.step == stepPort
	}
	switch {
	case f.Src.Port() == p.SourcePort:
		s.Found = fmt.Sprintf("%d, the client's own", f.Src.Port())
	default:
		s.Found = fmt.Sprintf("%d, a random one of the list", f.Src.Port())
	}
	if used := p.dry.PortsInUse(p.Protocol, f.Dst); f.Has("snat") {
		s.Found += fmt.Sprintf("; other connections to %s use %d of %d", f.Dst, used-1, settings.SNATPorts)
	}
	return s, true
}

func (p *packet) bypassStep() (Step, bool) {
	if p.serviceStep() || p.known() || p.isEgress() {
		return Step{}, false
	}
	settings := p.view.Settings()
	s := Step{Lookup: fmt.Sprintf("pods, untracked_ports[%s]", p.key(p.dst))}
	var facts []string
	for _, side := range []struct {
		name string
		addr netip.Addr
	}{{"client", p.From.Addr}, {"server", p.dst.Addr()}} {
		if pod := p.view.Pod(side.addr); pod != nil && slices.Contains(pod.Flags, "traverses_netfilter") {
			facts = append(facts, side.name+" must traverse netfilter (a NetworkPolicy or a deny rule)")
		}
	}
	if n := p.view.UntrackedRules(p.Protocol, p.dst); n > 0 {
		facts = append(facts, fmt.Sprintf("%d rules of do-not-track policies for the server's port", n))
	}
	if slices.Contains(settings.Flags, "bypass_never") {
		facts = append(facts, "the agent bypasses netfilter for no packet")
	}
	if len(facts) == 0 {
		facts = []string{"no policy speaks against it"}
	}
	s.Found, s.Follows = strings.Join(facts, "; "), "it may bypass netfilter"
	return s, true
}

func (p *packet) nextHopStep() (Step, bool) {
	s := Step{Lookup: "pods, FIB, neighbors", Found: p.hopText()}
	return s, p.result.NextHop != nil
}

// hopText describes the next hop that the program has found.
func (p *packet) hopText() string {
	hop := p.result.NextHop
	if hop == nil || hop.Kind == "stack" && hop.Ifindex == 0 {
		return "not looked up: the stack routes the packet"
	}
	name := fmt.Sprintf("device %d", hop.Ifindex)
	_ = p.inside(func() error {
		dev, err := net.InterfaceByIndex(hop.Ifindex)
		if err == nil {
			name = dev.Name
		}
		return nil
	})
	text := fmt.Sprintf("%s, %s", hop.Kind, name)
	if hop.Gateway.IsValid() {
		text += fmt.Sprintf(" by %s (neighbor %s)", hop.Gateway, p.neighborState(hop.Ifindex, hop.Gateway))
	}
	if own, external := p.view.Uplink(hop.Ifindex, p.dst.Addr()); external && own.IsUnspecified() {
		text += ", without an address of this node"
	}
	return text
}

// neighborState names the state of an entry of the kernel's neighbor table.
func (t *tracer) neighborState(ifindex int, a netip.Addr) (state string) {
	state = "unknown"
	_ = t.inside(func() error {
		state = neighborState(ifindex, a)
		return nil
	})
	return state
}

// nudNames are states of neighbors.
var nudNames = map[int]string{
	unix.NUD_INCOMPLETE: "incomplete: it has not answered yet", unix.NUD_REACHABLE: "reachable", unix.NUD_STALE: "stale",
	unix.NUD_DELAY: "delay", unix.NUD_PROBE: "probe", unix.NUD_FAILED: "failed: it does not answer", unix.NUD_NOARP: "no ARP",
	unix.NUD_PERMANENT: "permanent",
}

// nodeSteps are those of a packet of the node's own stack, after the socket hooks.
func (t *tracer) nodeSteps(dst netip.AddrPort) error {
	s := Step{Name: stepNextHop, Lookup: "FIB, neighbors", State: Decided}
	err := t.inside(func() error {
		text, err := routeText(dst.Addr())
		s.Found = text
		return err
	})
	if err != nil {
		s.Found, s.State = err.Error(), Refused
	}
	s.Follows = "the node's own stack sends the packet; netfilter's OUTPUT and POSTROUTING see it"
	t.add(s)
	if dst != t.to() {
		t.Endpoint = dst.String()
		t.Decision = fmt.Sprintf("to endpoint %s, by the socket hook; then the node's stack sends the packet", dst)
		return nil
	}
	t.Decision = "no socket hook translates: the node's stack sends the packet unchanged"
	if fe := t.view.Frontend(t.Protocol, dst); fe != nil && fe.Has("endpoint") {
		t.serves, t.Decision = true, "an endpoint's own address: the node's stack sends the packet unchanged"
	}
	return nil
}
