package intent

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// byStranger moves an object to another namespace.
func byStranger[T *model.Service | *model.EndpointSlice](o T) T {
	switch o := any(o).(type) {
	case *model.Service:
		o.Name.Namespace = "evil"
	case *model.EndpointSlice:
		o.Name.Namespace, o.Service.Namespace = "evil", "evil"
	}
	return o
}

// victim is a Service with an externalIP of each family, and a port that is an endpoint's.
func victim() *model.Service {
	return web(clusterIPs("10.96.0.1", "fd00::1"), externalIPs("203.0.113.5", "2001:db8::5"), portNumber(8080))
}

// TestASliceOfAnotherNamespaceHidesNoExternalIP has slices that an author made up.
func TestASliceOfAnotherNamespaceHidesNoExternalIP(t *testing.T) {
	node := &model.Node{Name: there, Addresses: addrs("192.168.0.2", "2001:db8::6"), PodCIDRs: prefixes("10.1.0.0/24")}
	forged := func(n string, eps ...model.Endpoint) *model.EndpointSlice {
		return byStranger(ofService(sliceOf(n, eps...), "none"))
	}
	for _, row := range []struct {
		what    string
		service *model.Service
		objects []any
		problem string
	}{
		{"an endpoint that is not ready", victim(), []any{forged("s", at("203.0.113.5", "", notReady))},
			"EndpointSlice evil/s: endpoints: 203.0.113.5:8080/TCP is an address of Service ns/web (spec.externalIPs[0]), which may get its " +
				"connections"},
		{"at an IPv6 address", victim(), []any{forged("s", at("2001:db8::5", "", notReady))},
			"[2001:db8::5]:8080/TCP is an address of Service ns/web (spec.externalIPs[1])"},
		{"that names a Pod and a node", victim(), []any{forged("s", at("203.0.113.5", here, pod("p")))}, "EndpointSlice evil/s"},
		{"that names the Pod of another address", victim(),
			[]any{forged("s", at("203.0.113.5", here, pod("p"))), podObject("p", here, nil, "10.1.0.5")}, "EndpointSlice evil/s"},
		{"in two slices", victim(), []any{forged("s", at("203.0.113.5", "")), forged("a", at("203.0.113.5", there))}, "EndpointSlice evil/a"},
		{"of a Service that exists", victim(), []any{forged("s", at("203.0.113.5", "")),
			byStranger(web(called("none"), clusterIPs("10.96.0.9")))}, "EndpointSlice evil/s"},
		{"at a node's address", web(clusterIPs("10.96.0.1"), externalIPs("192.168.0.2"), portNumber(8080)),
			[]any{forged("s", at("192.168.0.2", there, pod("p")))}, "EndpointSlice evil/s"},
		{"at a node's IPv6 address", web(clusterIPs("fd00::1"), externalIPs("2001:db8::6"), portNumber(8080)),
			[]any{forged("s", at("2001:db8::6", there))}, "EndpointSlice evil/s"},
		{"in the name of the API servers", victim(), []any{ofAPI(forged("s", at("203.0.113.5", "")))}, "EndpointSlice evil/s"},
		{"by a LoadBalancer IP", web(loadBalancer("203.0.113.5"), portNumber(8080)), []any{forged("s", at("203.0.113.5", ""))},
			"203.0.113.5:8080/TCP is an address of Service ns/web (status.loadBalancer.ingress)"},
	} {
		t.Run(row.what, func(t *testing.T) {
			tr := newTracker(append(row.objects, node, &model.Node{Name: here}, row.service)...)
			for _, a := range append(row.service.ExternalIPs, row.service.LoadBalancerIPs...) {
				same(t, "owner of "+a.String(), ownerOf(tr, a.String()), "web")
			}
			wantProblem(t, row.what, tr, row.problem)
			for _, p := range tr.Problems() {
				if of, _ := p.Service(); of.Namespace == "ns" {
					t.Errorf("the victim has a problem: %v", p)
				}
			}
		})
	}
}

// ofAPI labels a slice as one of the Service of the API servers.
func ofAPI(s *model.EndpointSlice) *model.EndpointSlice {
	s.Service = apiServerService
	return s
}

// TestAnExternalIPThatIsAPodsIsNotServed: the pod may be of a headless Service, which the
// source does not deliver, or of none.
func TestAnExternalIPThatIsAPodsIsNotServed(t *testing.T) {
	thief := func(a string) *model.Service {
		return byStranger(web(called("thief"), clusterIPs("10.96.0.9", "fd00::9"), externalIPs(a), portNumber(5432)))
	}
	node := &model.Node{Name: there, Addresses: addrs("192.168.0.2", "10.1.0.250"), PodCIDRs: prefixes("10.1.0.0/24", "fd00:1::/64")}
	slice := sliceOf("s", at("10.9.0.1", there, pod("db")))
	slice.Ports[0].Port = 5432
	for _, row := range []struct {
		what    string
		cluster string // --cluster-cidr
		addr    string
		objects []any
		problem string // "" if the address is served
	}{
		{"in a podCIDR", "", "10.1.0.7", nil, "10.1.0.7:5432/TCP is in podCIDR 10.1.0.0/24 of Node node-b, and is not served; remove it"},
		{"in an IPv6 podCIDR", "", "fd00:1::7", nil, "[fd00:1::7]:5432/TCP is in podCIDR fd00:1::/64 of Node node-b, and is not served"},
		{"of a Pod", "", "10.9.0.1", []any{podObject("db", there, nil, "10.9.0.1")},
			"10.9.0.1:5432/TCP is the address of Pod ns/db, and is not served"},
		{"of a Pod, by IPv6", "", "2001:db8::9", []any{podObject("db", here, nil, "10.9.0.1", "2001:db8::9")},
			"[2001:db8::9]:5432/TCP is the address of Pod ns/db"},
		{"of a Pod and an endpoint", "", "10.9.0.1", []any{podObject("db", here, nil, "10.9.0.1"), slice},
			"10.9.0.1:5432/TCP is an endpoint of Service ns/web and the address of Pod ns/db"},
		{"in the cluster's range", "10.9.0.0/16", "10.9.0.1", nil, "10.9.0.1:5432/TCP is in --cluster-cidr 10.9.0.0/16, and is not served"},

		{"in a range that has nodes, too", "10.0.0.0/8", "10.9.0.1", nil, ""},
		{"a Node's address in its podCIDR", "", "10.1.0.250", nil, ""},
		{"of a Pod that has no node", "", "10.9.0.1", []any{podObject("db", "", nil, "10.9.0.1")}, ""},
		{"of nothing that is known", "10.8.0.0/16", "10.9.0.1", nil, ""},
	} {
		t.Run(row.what, func(t *testing.T) {
			cfg := Config{NodeName: here}
			if row.cluster != "" {
				cfg.ClusterCIDRs = prefixes(row.cluster)
			}
			tr := New(cfg)
			tr.Apply(whole(delta(append(row.objects, node, thief(row.addr), &model.Node{Name: here})...)))
			if row.problem == "" {
				same(t, "owner", ownerOf(tr, row.addr), "thief")
				wantProblem(t, row.what, tr)
				return
			}
			same(t, "owner", ownerOf(tr, row.addr), "")
			wantProblem(t, row.what, tr, "Service evil/thief: spec.externalIPs[0]: "+row.problem)
			if !strings.Contains(describe(tr.State().Ports), "ClusterIP 10.96.0.9:5432") {
				t.Error("the clusterIP is not served")
			}
		})
	}
	// A controller writes a LoadBalancer IP.
	tr := newTracker(node, web(loadBalancer("10.1.0.7")))
	same(t, "owner of a LoadBalancer IP", ownerOf(tr, "10.1.0.7"), "web")
}

// TestAddressesOfPodsFollowTheFacts changes what makes 10.1.0.7 a pod's.
func TestAddressesOfPodsFollowTheFacts(t *testing.T) {
	const address = "10.1.0.7"
	tr := New(Config{NodeName: here, ClusterCIDRs: prefixes("10.1.0.0/16")})
	node := func(podCIDR string, at ...string) model.Delta {
		return delta(&model.Node{Name: there, PodCIDRs: prefixes(podCIDR), Addresses: addrs(at...)})
	}
	tr.Apply(whole(delta(web(externalIPs(address)), &model.Node{Name: here, Addresses: addrs("10.1.0.1")})))
	for _, step := range []struct {
		what   string
		delta  model.Delta
		served bool
	}{
		{"a Node is in the cluster's range", model.Delta{}, true},
		{"a Node with another podCIDR", node("10.2.0.0/24"), true},
		{"a podCIDR", node("10.1.0.0/24"), false},
		{"another podCIDR", node("10.2.0.0/24"), true},
		{"the address of a Node in its podCIDR", node("10.1.0.0/24", address), true},
		{"no longer", node("10.1.0.0/24"), false},
		{"no Node", model.Delta{Nodes: map[string]*model.Node{there: nil}}, true},
		{"a Pod", delta(podObject("p", there, nil, address)), false},
		{"a Pod of another address", delta(podObject("p", there, nil, "10.1.0.8")), true},
		{"a Pod again", delta(podObject("p", there, nil, address)), false},
		{"no Pod", model.Delta{Pods: map[model.Name]*model.Pod{name("p"): nil}}, true},
		{"no Node in the cluster's range", delta(&model.Node{Name: here, Addresses: addrs("192.168.0.1")}), false},
	} {
		tr.Apply(step.delta)
		if got := ownerOf(tr, address) == "web"; got != step.served || (len(tr.Problems()) == 0) != step.served {
			t.Errorf("%s: served %v, want %v; problems %v", step.what, got, step.served, tr.Problems())
		}
	}
}

// TestANodeTouchesOnlyAddressesInItsRange: the work for a new Node must not grow with the
// Services that have externalIPs elsewhere.
func TestANodeTouchesOnlyAddressesInItsRange(t *testing.T) {
	tr := newTracker()
	for i := range 100 {
		a := netip.AddrFrom4([4]byte{10, byte(i), 0, 1}).String()
		tr.Apply(delta(web(called("s"+a), clusterIPs(netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}).String()), externalIPs(a))))
	}
	tr.facts.Apply(delta(&model.Node{Name: there, PodCIDRs: prefixes("10.7.0.0/24")}))
	if len(tr.dirty) != 1 {
		t.Errorf("%d Services are decided again, want 1", len(tr.dirty))
	}
}

// TestAPodMovesNoEndpointToThisNode: the status of a Pod of this node has the address of an
// endpoint. Packets to it would keep the client's address, and the answers miss this node.
func TestAPodMovesNoEndpointToThisNode(t *testing.T) {
	claimed := func(where string, nodes ...any) []any {
		return append(nodes, web(), sliceOf("s", at("10.1.0.1", where, pod("p"))), podObject("liar", here, nil, "10.1.0.1"))
	}
	node := func(n string, cidrs ...string) *model.Node { return &model.Node{Name: n, PodCIDRs: prefixes(cidrs...)} }
	want := func(flags string) string {
		return "ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside cluster inside cluster\n-> 10.1.0.1:8080 cluster" + flags
	}
	runDecisions(t, []decision{
		{"another node's range", claimed(there, node(there, "10.1.0.0/24")), want("")},
		{"another node's range, without a nodeName", claimed("", node(there, "10.1.0.0/24")), want("")},
		{"another node's range within this node's", claimed(there, node(here, "10.1.0.0/16"), node(there, "10.1.0.0/24")), want("")},
		{"this node's range", claimed(there, node(here, "10.1.0.0/24"), node(there, "10.1.1.0/24")), want(" here")},
		{"a range of both", claimed(there, node(here, "10.1.0.0/24"), node(there, "10.1.0.0/24")), want(" here")},
		{"no range", claimed(there), want(" here")},
		{"another node's range, although the slice names this node", claimed(here, node(there, "10.1.0.0/24")), want(" here")},
	})
}
