package intent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func stringsOf[T fmt.Stringer](list []T) []string {
	var out []string
	for _, v := range list {
		out = append(out, v.String())
	}
	return out
}

func equalStrings(a, b []string) bool { return slices.Equal(a, b) }

func TestNodeAddrs(t *testing.T) {
	kernel := []string{"192.168.0.1", "127.0.0.1", "::1", "fe80::1%eth0", "fe80::1", "169.254.1.1", "2001:db8::1", "0.0.0.0", "224.0.0.1",
		"192.168.0.1", "::ffff:10.0.0.5"}
	object := &model.Node{Name: here, Addresses: addrs("192.168.0.1", "203.0.113.1")}
	rows := []struct {
		name   string
		config []netip.Prefix
		addrs  []string
		ports  []string
	}{
		{"all but loopback and link-local, and NodePorts on all of them", nil,
			[]string{"10.0.0.5", "192.168.0.1", "203.0.113.1", "2001:db8::1"}, []string{"10.0.0.5", "192.168.0.1", "203.0.113.1", "2001:db8::1"}},
		{"no prefixes are all", prefixes(),
			[]string{"10.0.0.5", "192.168.0.1", "203.0.113.1", "2001:db8::1"}, []string{"10.0.0.5", "192.168.0.1", "203.0.113.1", "2001:db8::1"}},
		{"NodePorts in the prefixes only", prefixes("192.168.0.0/16", "2001:db8::/32", "127.0.0.0/8"),
			[]string{"10.0.0.5", "192.168.0.1", "203.0.113.1", "2001:db8::1"}, []string{"192.168.0.1", "2001:db8::1"}},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			tr := New(Config{NodeName: here, NodePortAddresses: row.config})
			tr.Apply(delta(object))
			c := setNodeAddrs(tr, addrs(kernel...))
			if c.Node == nil {
				t.Fatal("the node did not change")
			}
			same(t, "addresses", strings.Join(stringsOf(c.Node.Addrs), " "), strings.Join(row.addrs, " "))
			same(t, "NodePort addresses", strings.Join(stringsOf(c.Node.NodePortAddrs), " "), strings.Join(row.ports, " "))
			if again := setNodeAddrs(tr, addrs(kernel...)); !again.Empty() {
				t.Errorf("the same addresses again change %+v", again)
			}
		})
	}
}

func TestSourceRangesWithTheNodeAllowLoadBalancerAddressesThatItHas(t *testing.T) {
	own, node := "192.0.2.1", "192.168.0.1"
	rows := []struct {
		name   string
		ranges []string
		kernel []string
		object []string // addresses of the Node
		want   []string
	}{
		{"the node is in a range", []string{"192.168.0.0/16"}, []string{node, own}, []string{node}, []string{"192.0.2.1/32", "192.168.0.0/16"}},
		{"it is in none", []string{"10.0.0.0/8"}, []string{node, own}, []string{node}, []string{"10.0.0.0/8"}},
		{"only the bridge of its pods is", []string{"10.0.0.0/8"}, []string{node, own, "10.1.0.1"}, []string{node}, []string{"10.0.0.0/8"}},
		{"it has not the address", []string{"192.168.0.0/16"}, []string{node}, []string{node}, []string{"192.168.0.0/16"}},
		{"its Node is unknown", []string{"192.168.0.0/16"}, []string{node, own}, nil, []string{"192.0.2.1/32", "192.168.0.0/16"}},
		{"there are no ranges", nil, []string{node, own}, []string{node}, nil},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			tr := New(Config{NodeName: here})
			service := web(loadBalancer(own, "192.0.2.2"))
			if row.ranges != nil {
				from(row.ranges...)(service)
			}
			tr.Apply(delta(service, sliceOf("s", at("10.1.0.2", there))))
			setNodeAddrs(tr, addrs(row.kernel...))
			if row.object != nil {
				tr.Apply(delta(&model.Node{Name: here, Addresses: addrs(row.object...)}))
			}
			for _, f := range tr.State().Ports[0].Frontends {
				if got := stringsOf(f.SourceRanges); f.Kind == LoadBalancerIP && !equalStrings(got, row.want) {
					t.Errorf("%s allows %v, want %v", f.Addr, got, row.want)
				}
			}
		})
	}
}

func TestLoopbackNodePorts(t *testing.T) {
	v4, v6 := []model.Family{model.IPv4}, []model.Family{model.IPv6}
	both := []model.Family{model.IPv4, model.IPv6}
	rows := []struct {
		name   string
		config Config
		want   []model.Family
	}{
		{"off by default", Config{}, nil},
		{"off, although the ranges have loopback", Config{NodePortAddresses: prefixes("127.0.0.0/8", "::1/128")}, nil},
		{"without ranges", Config{LocalhostNodePorts: true}, both},
		{"the ranges have all addresses", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("0.0.0.0/0", "::/0")}, both},
		{"the ranges have other addresses", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("192.168.0.0/16", "2001:db8::/32")},
			nil},
		{"the ranges have 127.0.0.0/8", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("192.168.0.0/16", "127.0.0.0/8")}, v4},
		{"the ranges have 127.0.0.1", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("127.0.0.1/32")}, v4},
		{"the ranges have another loopback address", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("127.0.0.2/32")}, nil},
		{"the ranges have ::1", Config{LocalhostNodePorts: true, NodePortAddresses: prefixes("::1/128")}, v6},
		{"primary", Config{LocalhostNodePorts: true, NodePortPrimary: true}, nil},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			row.config.NodeName = here
			tr := New(row.config)
			tr.Apply(delta(&model.Node{Name: here, Addresses: addrs("192.168.0.1")}, web(nodePort(30000))))
			setNodeAddrs(tr, addrs("192.168.0.1", "2001:db8::1", "127.0.0.1"))
			n := tr.State().Node
			if !slices.Equal(n.LoopbackNodePorts, row.want) {
				t.Errorf("families %v, want %v", n.LoopbackNodePorts, row.want)
			}
			if slices.ContainsFunc(n.NodePortAddrs, netip.Addr.IsLoopback) {
				t.Errorf("packets have NodePorts on loopback: %v", n.NodePortAddrs)
			}
			at := netip.MustParseAddrPort("127.8.9.10:30000")
			if served := tr.PortAt(model.TCP, at) != (PortID{}); served != slices.Contains(row.want, model.IPv4) {
				t.Errorf("%s is served: %t", at, served)
			}
		})
	}
}

func TestClusterCIDRsAreTheFlagAndAllNodesPodCIDRs(t *testing.T) {
	tr := New(Config{NodeName: here, ClusterCIDRs: prefixes("10.1.0.0/16"), MasqueradeAll: true})
	a := &model.Node{Name: here, PodCIDRs: prefixes("10.1.0.0/24", "fd00:1::/64")}
	b := &model.Node{Name: there, PodCIDRs: prefixes("10.1.1.7/24")}
	c := tr.Apply(delta(a, b))
	same(t, "ranges", fmt.Sprint(c.Node.ClusterCIDRs), "[10.1.0.0/16 10.1.0.0/24 10.1.1.0/24 fd00:1::/64]")
	same(t, "own ranges", fmt.Sprint(c.Node.PodCIDRs), "[10.1.0.0/24 fd00:1::/64]")
	if !c.Node.MasqueradeAll || c.Node.Name != here {
		t.Errorf("node is %+v", c.Node)
	}
	if c := tr.Apply(delta(&model.Node{Name: there, PodCIDRs: b.PodCIDRs, Labels: labels{"a": "b"}})); !c.Empty() {
		t.Errorf("another node's labels change %+v", c)
	}
	c = tr.Apply(delta(&model.Node{Name: here, PodCIDRs: prefixes("10.1.0.0/24")}, b))
	same(t, "own ranges after one is gone", fmt.Sprint(c.Node.PodCIDRs), "[10.1.0.0/24]")
	tr.Apply(delta(a))
	c = tr.Apply(model.Delta{Nodes: map[string]*model.Node{there: nil}})
	same(t, "ranges without the other node", fmt.Sprint(c.Node.ClusterCIDRs), "[10.1.0.0/16 10.1.0.0/24 fd00:1::/64]")
}

func TestTheFirstCallReportsTheNode(t *testing.T) {
	tr := New(Config{NodeName: here})
	if c := tr.Apply(model.Delta{}); c.Node == nil || c.Node.Name != here {
		t.Errorf("got %+v", c)
	}
	if c := tr.Apply(model.Delta{}); !c.Empty() {
		t.Errorf("the second call reports %+v", c)
	}
}

func TestAZoneThatChangesMovesTraffic(t *testing.T) {
	tr := newTracker(web(), inZone("zone-1"), web(called("plain"), clusterIPs("10.96.0.2")),
		sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", there, forZones("zone-2"))))
	c := tr.Apply(delta(inZone("zone-2")))
	same(t, "changed ports", describe(c.Upserts), clusterIPLeadsTo+"-> 10.1.0.2:8080 cluster")
	c = tr.Apply(model.Delta{Nodes: map[string]*model.Node{here: nil}})
	same(t, "ports without a zone", describe(c.Upserts), clusterIPLeadsTo+"-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 cluster")
}

func TestNewNodeAddressesMakeEndpointsHost(t *testing.T) {
	tr := newTracker(web(), sliceOf("s", at("192.168.0.1", here)), web(called("plain"), clusterIPs("10.96.0.2")))
	c := setNodeAddrs(tr, addrs("192.168.0.1"))
	same(t, "changed ports", describe(c.Upserts), clusterIPLeadsTo+"-> 192.168.0.1:8080 cluster here host")
	c = setNodeAddrs(tr, nil)
	same(t, "ports without the address", describe(c.Upserts), clusterIPLeadsTo+"-> 192.168.0.1:8080 cluster here")
}

func TestConfigIsValidated(t *testing.T) {
	rows := []struct {
		name   string
		config Config
		want   string
	}{
		{"a good one", Config{NodeName: here, ClusterCIDRs: prefixes("10.0.0.0/8")}, ""},
		{"no node name", Config{}, "--hostname-override"},
		{"a bad NodePort range", Config{NodeName: here, NodePortAddresses: []netip.Prefix{{}}}, "--nodeport-addresses"},
		{"a bad cluster range", Config{NodeName: here, ClusterCIDRs: []netip.Prefix{{}}}, "--cluster-cidr"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			err := row.config.Validate()
			if (err == nil) != (row.want == "") || err != nil && !strings.Contains(err.Error(), row.want) {
				t.Errorf("got %v, want %q", err, row.want)
			}
		})
	}
}

func TestANodeThatNobodyKnowsIsReportedWithThoseThatAreKnown(t *testing.T) {
	nodes := func(names ...string) model.Delta {
		d := model.Delta{Nodes: map[string]*model.Node{}}
		for _, n := range names {
			d.Nodes[n] = &model.Node{Name: n}
		}
		return d
	}
	tr := New(Config{NodeName: here})
	if c := tr.Apply(delta(web())); len(c.Problems) > 0 {
		t.Errorf("no Node is known, and yet: %v", c.Problems)
	}
	want := "Node node-a: is not among the Nodes known (n1, n2, n3, n4, n5 and 2 more), so that no endpoint is taken for one of this " +
		"node; give --hostname-override"
	if c := tr.Apply(nodes("n7", "n6", "n5", "n4", "n3", "n2", "n1")); len(c.Problems) != 1 || c.Problems[0].String() != want {
		t.Errorf("problems %v, want %s", c.Problems, want)
	}
	if c := tr.Apply(nodes("n7")); c.Problems != nil {
		t.Errorf("the same Nodes again: %v", c.Problems)
	}
	if c := tr.Apply(model.Delta{Nodes: map[string]*model.Node{"n7": nil, "n6": nil}}); len(c.Problems) != 1 ||
		!strings.Contains(c.Problems[0].What, "(n1, n2, n3, n4, n5),") {
		t.Errorf("after two Nodes went: %v", c.Problems)
	}
	if c := tr.Apply(nodes(here)); c.Problems == nil || len(c.Problems) > 0 {
		t.Errorf("after the Node came: %v", c.Problems)
	}
}

// TestANodeWithoutPodCIDRsIsReportedToADataplaneThatSeesPacketsOnly, unless the user gave
// the cluster's ranges.
func TestANodeWithoutPodCIDRsIsReportedToADataplaneThatSeesPacketsOnly(t *testing.T) {
	for _, c := range []struct {
		cidrs []netip.Prefix
		want  int
	}{{nil, 1}, {prefixes("10.0.0.0/8"), 0}} {
		tr := New(Config{NodeName: here, DetectLocal: LocalClusterCIDR, LocalBySource: true, ClusterCIDRs: c.cidrs})
		tr.Apply(delta(&model.Node{Name: here}))
		if got := tr.Problems(); len(got) != c.want || c.want > 0 && !strings.Contains(got[0].What, "give another mode, --cluster-cidr, or") {
			t.Errorf("--cluster-cidr %v: %v", c.cidrs, got)
		}
	}
}

func TestANodeWithoutPodCIDRsIsReportedWhereTheyAreNeeded(t *testing.T) {
	bare, whole := &model.Node{Name: here}, &model.Node{Name: here, PodCIDRs: prefixes("10.1.0.0/24")}
	for mode, want := range map[LocalMode]int{LocalNodeCIDR: 1, LocalClusterCIDR: 0} {
		tr := New(Config{NodeName: here, DetectLocal: mode})
		for range 2 { // it comes and goes
			tr.Apply(delta(bare))
			if got := tr.Problems(); len(got) != want || want > 0 && got[0].Field != "spec.podCIDRs" {
				t.Errorf("%s: problems %v, want %d", mode, got, want)
			}
			tr.Apply(delta(whole))
			if got := tr.Problems(); len(got) != 0 {
				t.Errorf("%s with podCIDRs: problems %v", mode, got)
			}
		}
	}
}

func TestAddressesOfPodsByNode(t *testing.T) {
	tr := New(Config{NodeName: here})
	want := func(what string, claimed, others, cidrs string) {
		t.Helper()
		n := tr.State().Node
		same(t, what+": claimed pods", strings.Join(stringsOf(n.KnownPods), " "), claimed)
		same(t, what+": other pods", strings.Join(stringsOf(n.OtherPods), " "), others)
		same(t, what+": other podCIDRs", strings.Join(stringsOf(n.OtherPodCIDRs), " "), cidrs)
	}
	tr.Apply(delta(
		&model.Node{Name: here, PodCIDRs: prefixes("10.1.0.0/24")}, &model.Node{Name: there, PodCIDRs: prefixes("10.1.1.7/24", "fd00:2::/64")},
		podObject("p", here, nil, "10.1.0.2", "::ffff:10.1.0.3"), podObject("q", there, nil, "10.1.1.2"), podObject("r", "", nil, "10.1.9.9")))
	want("at first", "10.1.0.2 10.1.0.3", "10.1.1.2", "10.1.1.0/24 fd00:2::/64")
	if c := tr.Apply(delta(podObject("p", there, nil, "10.1.0.2"), podObject("s", there, nil, "10.1.1.2"))); c.Node == nil {
		t.Error("the node did not change")
	}
	want("after a move", "", "10.1.0.2 10.1.1.2", "10.1.1.0/24 fd00:2::/64")
	if c := tr.Apply(model.Delta{Pods: map[model.Name]*model.Pod{name("q"): nil}}); c.Node != nil {
		t.Errorf("a Pod went whose address another has: node changed to %+v", c.Node)
	}
	tr.Apply(model.Delta{Pods: map[model.Name]*model.Pod{name("p"): nil, name("s"): nil}, Nodes: map[string]*model.Node{there: nil}})
	want("at last", "", "", "")
}
