package nftables

import (
	"maps"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// withEgress is the node whose pods of these ranges get its address in egress.
func withEgress(sources, keep []netip.Prefix) intent.Node {
	n := node()
	n.Egress = egress.Plan{Sources: sources, Keep: keep}
	return n
}

// plan makes up a Plan of egress.
func (w *world) plan() egress.Plan {
	sources := prefixes("10.244.0.0/24", "10.244.4.0/22", "10.244.5.0/24", "0.0.0.0/0", "fd44::/64", "fd44:1::/64")
	keep := prefixes("10.0.0.0/8", "10.244.0.0/16", "169.254.169.254/32", "224.0.0.0/4", "0.0.0.0/0", "fc00::/7", "ff00::/8", "::/0")
	some := func(all []netip.Prefix) (out []netip.Prefix) {
		for _, p := range all {
			if w.r.IntN(3) == 0 {
				out = append(out, p)
			}
		}
		return out
	}
	var own []netip.Addr
	for _, a := range []string{"172.30.0.10", "172.30.0.11", "fd30::a"} {
		if w.r.IntN(4) == 0 {
			own = append(own, netip.MustParseAddr(a))
		}
	}
	return egress.Plan{Sources: some(sources), Keep: some(keep), Addresses: own}
}

func TestPodsLeaveWithTheNodesAddress(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	for _, x := range netnstest.OutsideFamilies {
		only := netip.MustParseAddr(x.Pod1)
		keep := []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr(x.Other), only.BitLen())}
		replace(t, b, intent.State{Node: withEgress(prefixes(x.Pods), keep)})
		for _, network := range []string{"tcp", "udp"} {
			m.Sees(network, "pod1", x.Pod1, x.Server, x.Node)
			m.Sees(network, "pod1", x.Pod1, x.Other, x.Pod1)
			m.Sees(network, "node", x.Node, x.Server, x.Node)
			// A process of the node asks the node itself: by lo.
			m.Sees(network, "node", x.Gateway, x.Node, x.Gateway)
		}
		if err := b.Apply(t.Context(), intent.Changes{Node: new(withEgress(prefixes(x.Pods), nil))}); err != nil {
			t.Fatal(err)
		}
		m.Sees("tcp", "pod1", x.Pod1, x.Other, x.Node)
		one := []netip.Prefix{netip.PrefixFrom(only, only.BitLen())}
		if err := b.Apply(t.Context(), intent.Changes{Node: new(withEgress(one, nil))}); err != nil {
			t.Fatal(err)
		}
		m.Sees("tcp", "pod1", x.Pod1, x.Other, x.Node)
		m.Sees("tcp", "pod2", x.Pod2, x.Other, x.Pod2)
		if err := b.Apply(t.Context(), intent.Changes{Node: new(node())}); err != nil {
			t.Fatal(err)
		}
		m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Pod1)
	}
}

// A rule that keeps the client's port where it is free lets two connections that begin at once get
// the same one.
func TestPortsOfPodsThatLeaveAreRandom(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	replace(t, open(t), intent.State{Node: withEgress(prefixes(netnstest.OutsideIPv4.Pods, netnstest.OutsideIPv6.Pods), nil)})
	for _, x := range netnstest.OutsideFamilies {
		for _, network := range []string{"tcp", "udp"} {
			if kept := m.PortsKept(network, x); kept > 1 {
				t.Errorf("%s to %s: %d of 8 connections kept their port", network, x.Server, kept)
			}
		}
	}
}

// The last bits of a pod's address choose: egress.Plan.ForPods. Pod 1 ends in 2, pod 2 in 3.
func TestPodsLeaveWithAddressesOfTheNode(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	for i, x := range netnstest.OutsideFamilies {
		more := m.Own(x)
		n := withEgress(prefixes(x.Pods), nil)
		n.Egress.Addresses = []netip.Addr{netip.MustParseAddr(more[0]), netip.MustParseAddr(more[1])}
		want := fresh(t, intent.State{Node: n})
		replace(t, b, intent.State{Node: n})
		same(t, "addresses", holds(t, b), want)
		m.SeesPodsAs(x, more)
		// The other family has none.
		other := netnstest.OutsideFamilies[1-i]
		n.Egress.Sources = append(n.Egress.Sources, netip.MustParsePrefix(other.Pods))
		n.Egress.Addresses = n.Egress.Addresses[:1]
		if err := b.Apply(t.Context(), intent.Changes{Node: &n}); err != nil {
			t.Fatal(err)
		}
		m.Sees("tcp", "pod2", x.Pod2, x.Server, more[0])
		own, _ := m.Ask("tcp", "pod1", other.Pod1, other.Server) // which one, the kernel decides
		m.Sees("tcp", "pod2", other.Pod2, other.Server, own.Addr().String())
		replace(t, b, intent.State{Node: withEgress(prefixes(x.Pods), nil)})
		own, _ = m.Ask("tcp", "pod1", x.Pod1, x.Server)
		m.Sees("tcp", "pod2", x.Pod2, x.Server, own.Addr().String())
	}
}

func TestConnectionsToServicesAreNotOnesToTheOutside(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	for i, x := range netnstest.OutsideFamilies {
		service := []string{"10.96.0.1", "fd96::1"}[i]
		family := []model.Family{model.IPv4, model.IPv6}[i]
		web := port("web", family, clusterIP(service, intent.ToCluster), endpoints(net.JoinHostPort(x.Server, "8080")))
		web.Frontends[0].Port = 8080
		replace(t, b, intent.State{Node: withEgress(prefixes(x.Pods), nil), Ports: []*intent.ServicePort{web}})
		m.Sees("tcp", "pod1", x.Pod1, service, x.Pod1)
		m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Node)
	}
}

// The CNI's rule decides about the rest, and an operator's rule about all.
func TestTheRuleForPodsThatLeaveIsBetweenTheOperatorsAndTheCNIs(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	x := netnstest.OutsideIPv4
	for _, row := range []struct {
		priority          string
		outside, keptFrom string // the clients that the servers see
	}{
		{"srcnat", x.Node, "198.51.100.77"}, {"srcnat - 1", x.Node, "198.51.100.77"},
		{"srcnat - 5", x.Node, "198.51.100.77"}, {"srcnat - 10", "198.51.100.77", "198.51.100.77"},
	} {
		rule := "add table ip cni; add chain ip cni leave { type nat hook postrouting priority " + row.priority +
			"; }; add rule ip cni leave ip saddr 10.244.0.0/16 snat to 198.51.100.77"
		for _, before := range []bool{true, false} { // chains of one priority: the younger is first
			install := func() { run(t, "nft", rule) }
			if before {
				install()
			}
			replace(t, b, intent.State{Node: withEgress(prefixes(x.Pods), prefixes(x.Other+"/32"))})
			if !before {
				install()
			}
			m.Sees("tcp", "pod1", x.Pod1, x.Server, row.outside)
			m.Sees("tcp", "pod1", x.Pod1, x.Other, row.keptFrom)
			run(t, "nft", "delete", "table", "ip", "cni")
			if err := Cleanup(t.Context(), Config{}); err != nil {
				t.Fatal(err)
			}
			m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Pod1)
		}
	}
}

func TestEditsOfTheRuleForPodsThatLeaveAreUndone(t *testing.T) {
	enter(t)
	b := open(t)
	s := intent.State{Node: withEgress(prefixes("10.244.0.0/24", "fd44::/64"), prefixes("10.0.0.0/8", "fc00::/7"))}
	want := fresh(t, s)
	replace(t, b, s)
	same(t, "without a Service", holds(t, b), want)
	for edit, found := range map[string]string{
		"flush chain inet spillway egress":                                    "rules of chain egress",
		"insert rule inet spillway egress accept":                             "rules of chain egress",
		"flush set inet spillway egress-keep4":                                "element of egress-keep4",
		"delete element inet spillway egress-sources6 { fd44::/64 }":          "element of egress-sources6",
		"add element inet spillway egress-sources4 { 10.245.0.0/16 }":         "element of egress-sources4",
		"flush chain inet spillway egress; delete chain inet spillway egress": "rules of chain egress",
	} {
		if out, err := runNft(edit); err != nil {
			t.Fatalf("%s: %v %s", edit, err, out)
		}
		if !heard(b, time.Minute) {
			t.Fatalf("%s is not heard", edit)
		}
		replace(t, b, s)
		if r := b.Repaired(); !strings.HasPrefix(r.Found, found) {
			t.Errorf("%s: repaired %+v", edit, r)
		}
		same(t, "after "+edit, holds(t, b), want)
	}
}

func TestBesideAnotherDataplanePodsThatLeaveAreNotThisOnes(t *testing.T) {
	enter(t)
	b, err := New(t.Context(), Config{Beside: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	n := withEgress(prefixes("10.244.0.0/24"), prefixes("10.0.0.0/8"))
	replace(t, b, intent.State{Node: n, Ports: shapes()["sctp"]})
	if got := run(t, "nft", "list", "table", "inet", "spillway"); strings.Contains(got, "egress") {
		t.Errorf("the table is\n%s", got)
	}
}

func TestAFamilyWithoutPodsThatLeaveHasNoObjects(t *testing.T) {
	enter(t)
	b := open(t)
	replace(t, b, intent.State{Node: withEgress(prefixes("10.244.0.0/24"), prefixes("10.0.0.0/8", "::/0"))})
	got := run(t, "nft", "list", "table", "inet", "spillway")
	if !strings.Contains(got, "egress-keep4") || strings.Contains(got, "egress-keep6") || strings.Contains(got, "egress-sources6") {
		t.Errorf("the table is\n%s", got)
	}
	replace(t, b, intent.State{Node: withEgress(nil, prefixes("0.0.0.0/0", "::/0"))})
	if got := run(t, "nft", "list", "table", "inet", "spillway"); strings.Contains(got, "egress") {
		t.Errorf("with nothing to translate, the table is\n%s", got)
	}
}

// egressConnections is what the metric of connections says, by family.
func egressConnections(t *testing.T, b *Backend) map[string]float64 {
	return countersOf(t, b, egressDesc)
}

func TestConnectionsOfPodsThatLeaveAreCounted(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	connect := func(ipv4, ipv6 int) {
		t.Helper()
		for i, n := range []int{ipv4, ipv6} {
			for range n {
				x := netnstest.OutsideFamilies[i]
				m.Ask("tcp", "pod1", x.Pod1, x.Server)
				m.Ask("tcp", "node", x.Node, x.Server) // no pod's
			}
		}
	}
	want := func(when string, want map[string]float64) {
		t.Helper()
		if got := egressConnections(t, b); !maps.Equal(got, want) {
			t.Errorf("%s: counted %v, want %v", when, got, want)
		}
	}
	four, six := netnstest.OutsideIPv4.Pods, netnstest.OutsideIPv6.Pods
	replace(t, b, intent.State{Node: node()})
	want("no plan", map[string]float64{})
	replace(t, b, intent.State{Node: withEgress(prefixes(four, six), nil)})
	want("no connection", map[string]float64{"IPv4": 0, "IPv6": 0})
	connect(3, 2)
	want("connections", map[string]float64{"IPv4": 3, "IPv6": 2})
	replace(t, b, intent.State{Node: withEgress(prefixes(four, six), prefixes("192.0.2.0/24"))}) // writes the rules anew
	connect(1, 1)
	want("rules written anew", map[string]float64{"IPv4": 4, "IPv6": 3})
	want("read again", map[string]float64{"IPv4": 4, "IPv6": 3})
	for i, n := range []int{2, 1} { // two tables whose rules have the same handles
		run(t, "nft", "delete", "table", "inet", "spillway")
		replace(t, b, intent.State{Node: withEgress(prefixes(four), nil)})
		connect(n, 1)
		want("a new table", map[string]float64{"IPv4": float64(6 + i), "IPv6": 3})
	}
	replace(t, b, intent.State{Node: node()})
	want("no plan any more", map[string]float64{"IPv4": 7, "IPv6": 3})

	b = open(t)
	replace(t, b, intent.State{Node: withEgress(prefixes(four), nil)})
	connect(2, 0)
	want("a restart", map[string]float64{"IPv4": 2})
}

// Another node translated the request. It does not know an answer of this node's address.
func TestAnswersThatAHelperExpectsKeepTheirSource(t *testing.T) {
	enter(t)
	m := netnstest.NewOutside(t)
	b := open(t)
	for i, x := range netnstest.OutsideFamilies {
		boot := port("boot", []model.Family{model.IPv4, model.IPv6}[i], protocol(model.UDP), helped(intent.TFTP),
			clusterIP([]string{"10.96.0.1", "fd96::1"}[i], intent.ToCluster), here(net.JoinHostPort(x.Pod1, "69")))
		replace(t, b, intent.State{Node: withEgress(prefixes(x.Pods), nil), Ports: []*intent.ServicePort{boot}})
		if got := m.AskTFTP(x); got.String() != x.Pod1 {
			t.Errorf("the client gets an answer from %s, want %s", got, x.Pod1)
		}
	}
}
