package flows_test

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
)

// paper is a cluster that exists on paper alone: nodes a, b and c with four
// pods each, and two clients.
type paper struct{}

func (paper) Addr(host string, v6 bool) netip.Addr {
	n := cluster.ParseName(host)
	net4, net6, last := "172.30.0.%d", "fd30::%x", 0
	switch {
	case n.IsClient():
		last = 200 + int(n.Base[len("client")]-'0')
	case n.Extra == "loopback":
		net4, net6, last = "127.0.0.%d", "::%x", 1
	case n.IsPod(), n.Extra == "bridge":
		node := n.Base[0] - 'a'
		net4, net6, last = fmt.Sprintf("10.244.%d.%%d", node), fmt.Sprintf("fd44:0:0:%x::%%x", node), 1
		if n.IsPod() {
			last = 2 + int(n.Base[1]-'0')
		}
	default:
		last = 10 + int(n.Base[0]-'a')
	}
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf(net6, last))
	}
	return netip.MustParseAddr(fmt.Sprintf(net4, last))
}

func (paper) NodeName(host string) string {
	if cluster.ParseName(host).IsClient() {
		return ""
	}
	return host[:1]
}

func (p paper) Zone(host string) string {
	return map[string]string{"a": "east", "b": "west", "c": "east"}[p.NodeName(host)]
}

func (paper) External(node string, i int, v6 bool) netip.Addr {
	return new(cluster.Cluster).External(node, i, v6)
}

// hosts are all short names that can answer.
func (p paper) hosts() []string {
	list := []string{"client0", "client1"}
	for _, node := range []string{"a", "b", "c"} {
		list = append(list, node, node+"0", node+"1", node+"2", node+"3")
	}
	return list
}

// server is what the server at an endpoint calls itself.
func (p paper) server(ep netip.AddrPort) string {
	for _, h := range p.hosts() {
		if p.Addr(h, ep.Addr().Is6()) == ep.Addr() {
			if ep.Port() != 8080 {
				return fmt.Sprintf("%s:%d", h, ep.Port())
			}
			return h
		}
	}
	return ep.String()
}

// TestCasesAgreeWithIntent works out on paper what must come of every flow: the
// manifests of the case are read as an agent reads them, intent decides for
// each node, and the route that the packet meets is compared with what the
// case wants. What is left to test with packets is that a dataplane does it.
func TestCasesAgreeWithIntent(t *testing.T) {
	asked := checkCases(t, flows.Cases(), nil)
	if asked < 500 {
		t.Errorf("%d flows were compared, which cannot be all", asked)
	}
}

// TestFlagCasesAgreeWithIntent is the same for agents with other flags.
func TestFlagCasesAgreeWithIntent(t *testing.T) {
	checkCases(t, flows.FlagCases(), map[string]intent.Config{
		"a": {NodePortAddresses: []netip.Prefix{netip.MustParsePrefix("172.30.0.0/24"), netip.MustParsePrefix("fd30::/64")},
			LocalhostNodePorts: true},
		"b": {ProxyName: "spillway", RefuseExternalIPs: true},
		"c": {MasqueradeAll: true, LocalhostNodePorts: true, HostPorts: true},
	})
}

// TestDSRCasesAgreeWithIntent is the same for agents with --forwarding dsr.
func TestDSRCasesAgreeWithIntent(t *testing.T) {
	cfg := intent.Config{MaglevSize: 251, CanForwardByDSR: true, Forwarding: intent.DSR}
	checkCases(t, dsrCases(), map[string]intent.Config{"a": cfg, "b": cfg, "c": cfg})
}

// checkCases compares all flows of cases, and returns how many.
func checkCases(t *testing.T, cases []flows.Case, cfg map[string]intent.Config) (asked int) {
	t.Helper()
	var numbers flows.Numbers
	for i, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			scope := flows.NewScope(fmt.Sprintf("case-%03d", i), paper{}, &numbers)
			objects := c.Objects
			for _, step := range append([]flows.Step{{Name: "at first", Flows: c.Flows}}, c.Then...) {
				if step.Objects != nil {
					objects = step.Objects
				}
				nodes := decide(t, scope, objects, cfg)
				for _, f := range step.Flows {
					if f.Want.Kind == flows.Dropped && c.Rules != nil || f.To.Kind == flows.ToHealthCheck ||
						f.To.Kind == flows.ToAddress || f.Keep != "" && len(f.Only) > 0 {
						continue // not a question of routes, or one of a socket that keeps its own
					}
					asked += checkFlow(t, scope, objects, nodes, f, step.Name)
				}
			}
		})
	}
	return asked
}

// decide loads objects as the agents of the three nodes do.
func decide(t *testing.T, scope *flows.Scope, objects []flows.Object, cfg map[string]intent.Config) map[string]intent.State {
	t.Helper()
	text, err := scope.YAML(objects)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "case.yaml"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	delta, problems, err := manifest.Load(dir)
	if err != nil || len(problems) > 0 {
		t.Fatalf("load manifests: %v, problems %v in\n%s", err, problems, text)
	}
	states := map[string]intent.State{}
	delta.Nodes = map[string]*model.Node{}
	for _, node := range []string{"a", "b", "c"} {
		delta.Nodes[node] = &model.Node{
			Name: node, Addresses: []netip.Addr{paper{}.Addr(node, false), paper{}.Addr(node, true)},
			Labels: map[string]string{"topology.kubernetes.io/zone": paper{}.Zone(node)},
		}
	}
	for _, node := range []string{"a", "b", "c"} {
		config := cfg[node]
		config.NodeName = node
		tracker := intent.New(config)
		var own []netip.Addr
		for _, addr := range []string{node, node + "/bridge"} {
			own = append(own, paper{}.Addr(addr, false), paper{}.Addr(addr, true))
		}
		tracker.SetNodeAddrs(own)
		tracker.Apply(delta)
		states[node] = tracker.State()
	}
	return states
}

// checkFlow compares one flow, and returns for how many combinations.
func checkFlow(t *testing.T, scope *flows.Scope, objects []flows.Object, nodes map[string]intent.State, f flows.Flow, step string) int {
	t.Helper()
	asked := 0
	for _, combo := range f.Combos(objects) {
		asked++
		dst, err := scope.Address(f.To, flows.ServicesOf(objects), combo)
		if err != nil {
			t.Fatal(err)
		}
		got := travel(nodes, f, dst, combo)
		if got.kind == flows.Rejected && f.Want.Kind == flows.NotServed {
			got.kind = flows.NotServed
		}
		slices.Sort(got.servers)
		want := slices.Sorted(slices.Values(f.Want.From))
		if got.kind != f.Want.Kind || !slices.Equal(got.servers, want) {
			t.Errorf("%s: %s to %s, %s: intent says kind %d of %v, the case wants kind %d of %v",
				step, f.From, f.To, combo, got.kind, got.servers, f.Want.Kind, want)
		}
		checkSource(t, f, got, step+", "+string(combo))
	}
	if asked == 0 {
		t.Errorf("%s: %s to %s is asked for no combination", step, f.From, f.To)
	}
	return asked
}

// checkSource compares the source that a client outside the cluster keeps at an endpoint on
// another node than the one it reached. What another flow of the client's port does to it is no
// matter of intent.
func checkSource(t *testing.T, f flows.Flow, got outcome, step string) {
	t.Helper()
	elsewhere := slices.ContainsFunc(got.servers, func(s string) bool { return paper{}.NodeName(s) != receiver(f) })
	if !cluster.ParseName(f.From).IsClient() || got.kind != flows.Answered || !elsewhere || f.LocalPort != 0 {
		return
	}
	if kept := f.Want.Source == flows.Kept; kept != got.direct && f.Want.Source != flows.AnySource {
		t.Errorf("%s: %s to %s: intent says DSR replies %v, the case wants the client's address %v",
			step, f.From, f.To, got.direct, kept)
	}
}

// outcome is what intent has come of a flow.
type outcome struct {
	kind    flows.Kind
	servers []string
	direct  bool // servers on other nodes answer the client themselves
}

// receiver is the node that gets a flow's packets, if the client's own has not served them.
func receiver(f flows.Flow) string {
	if f.To.Node == "" && (paper{}).NodeName(f.From) == "" {
		return "a" // clients route cluster IPs to it
	}
	return f.To.Node
}

// travel follows a packet: the client's own node decides first; what it does
// not serve goes on to the node that has the address or the route to it.
func travel(nodes map[string]intent.State, f flows.Flow, dst netip.AddrPort, combo flows.Combo) outcome {
	home := paper{}.NodeName(f.From)
	client := paper{}.Addr(cluster.ParseName(f.From).Base, combo.IPv6())
	if home != "" {
		if got, found := meet(nodes[home], dst, combo, client, true); found {
			return got
		}
	}
	if next := receiver(f); next != "" && next != home {
		if got, found := meet(nodes[next], dst, combo, client, false); found {
			return got
		}
	}
	if f.To.Kind == flows.ToNodePort {
		return outcome{kind: flows.Rejected} // the node itself, without a listener
	}
	return outcome{kind: flows.NotServed}
}

// meet finds what a node's proxy does with a packet.
func meet(s intent.State, dst netip.AddrPort, combo flows.Combo, client netip.Addr, inside bool) (outcome, bool) {
	for _, p := range s.Ports {
		if (p.ID.Family == model.IPv6) != combo.IPv6() || (p.ID.Protocol == model.UDP) != (combo.Protocol() == "udp") {
			continue
		}
		for _, fe := range p.Frontends {
			if fe.Port != dst.Port() || fe.Kind != intent.NodePort && fe.Addr != dst.Addr() ||
				fe.Kind == intent.NodePort && !hasNodePorts(s.Node, dst.Addr(), client) {
				continue
			}
			route := fe.ExternalRoute
			if inside {
				route = fe.InternalRoute
			}
			kind, servers := routed(p, fe, route, client)
			return outcome{kind, servers, p.DSR && route == intent.ToCluster}, true
		}
	}
	return outcome{}, false
}

// hasNodePorts reports whether a client has NodePorts at an address. Only a process of the node
// has them on loopback.
func hasNodePorts(n intent.Node, a, client netip.Addr) bool {
	if a.IsLoopback() {
		return slices.Contains(n.Addrs, client) && slices.Contains(n.LoopbackNodePorts, model.FamilyOf(a))
	}
	return slices.Contains(n.NodePortAddrs, a)
}

func routed(p *intent.ServicePort, fe intent.Frontend, route intent.Route, client netip.Addr) (flows.Kind, []string) {
	if fe.SourceRanges != nil && !slices.ContainsFunc(fe.SourceRanges, func(r netip.Prefix) bool { return r.Contains(client) }) {
		return flows.Dropped, nil
	}
	switch route {
	case intent.Reject:
		return flows.Rejected, nil
	case intent.Drop:
		return flows.Dropped, nil
	}
	var servers []string
	for _, ep := range p.Endpoints {
		if route == intent.ToCluster && ep.ClusterPolicy || route == intent.ToLocal && ep.LocalPolicy {
			servers = append(servers, paper{}.server(ep.Addr))
		}
	}
	return flows.Answered, servers
}
