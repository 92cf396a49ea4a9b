package intent

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// TestPagesNameEachServiceOnce compares pages of all sizes with the sorted names.
func TestPagesNameEachServiceOnce(t *testing.T) {
	d := model.Delta{Services: map[model.Name]*model.Service{}}
	want := map[string][]model.Name{}
	for i := range 60 {
		s := web(clusterIPs(fmt.Sprintf("10.96.0.%d", i+1)))
		s.Name = model.Name{Namespace: []string{"a", "b", "c"}[i%3], Name: fmt.Sprint("s", rand.N(1000), "-", i)}
		d.Services[s.Name] = s
		want[""], want[s.Namespace] = append(want[""], s.Name), append(want[s.Namespace], s.Name)
	}
	foreign := web(called("foreign"), func(s *model.Service) { s.ProxyName = "other" })
	d.Services[foreign.Name] = foreign
	tr := New(Config{NodeName: here})
	tr.Apply(d)
	for _, namespace := range []string{"", "a", "b", "none"} {
		slices.SortFunc(want[namespace], model.Name.Compare)
		for _, size := range []int{1, 7, 20, 59, 60, 61} {
			var got []model.Name
			after := model.Name{}
			for {
				list := tr.InspectAfter(namespace, after, size)
				for _, s := range list {
					after = s.Spec.Name
					got = append(got, after)
				}
				if len(list) < size {
					break
				}
			}
			if !slices.Equal(got, want[namespace]) {
				t.Errorf("namespace %q in pages of %d: %v, want %v", namespace, size, got, want[namespace])
			}
		}
	}
	if list := tr.InspectAfter("", model.Name{}, 0); len(list) != 0 {
		t.Errorf("a page of 0 has %d", len(list))
	}
}

func TestInspectHasSlicesAndCountIsOfServedServices(t *testing.T) {
	tr := newTracker(web(), sliceOf("s2", at("10.1.0.2", there)), sliceOf("s1", at("10.1.0.1", here)), web(called("lost"), born(9999)))
	s, ok := tr.Inspect(name("web"))
	if !ok || len(s.Ports) != 1 || len(s.Slices) != 2 || s.Slices[0].Name != name("s1") || s.Spec.Name != name("web") {
		t.Errorf("web is %+v, %v", s, ok)
	}
	if lost, ok := tr.Inspect(name("lost")); !ok || len(lost.Ports) != 0 {
		t.Errorf("a Service that lost its only address is %+v, %v", lost, ok)
	}
	if _, ok := tr.Inspect(name("none")); ok {
		t.Error("a Service that does not exist is known")
	}
	if n := tr.Count(); n != 1 {
		t.Errorf("%d Services are counted", n)
	}
	tr.Apply(withoutService("web"))
	if s, ok := tr.Inspect(name("lost")); !ok || len(s.Ports) != 1 || tr.Count() != 1 {
		t.Errorf("after the other has gone: %+v, %v, %d counted", s, ok, tr.Count())
	}
	tr.Apply(withoutService("lost"))
	if n := tr.Count(); n != 0 {
		t.Errorf("%d Services are counted when none is left", n)
	}
}

func TestPortAt(t *testing.T) {
	tr := newTracker(web(nodePort(30080), externalIPs("198.51.100.1")))
	setNodeAddrs(tr, addrs("192.0.2.1"))
	tr.Apply(delta(&model.Node{Name: there, Addresses: addrs("192.0.2.3")}))
	tr.Changes()
	for _, row := range []struct {
		at    string
		proto model.Protocol
		known bool
	}{
		{"10.96.0.1:80", model.TCP, true},
		{"10.96.0.1:80", model.UDP, false},
		{"10.96.0.1:81", model.TCP, false},
		{"198.51.100.1:80", model.TCP, true},
		{"[::ffff:198.51.100.1]:80", model.TCP, true},
		{"192.0.2.1:30080", model.TCP, true},
		{"192.0.2.2:30080", model.TCP, false},
		{"192.0.2.3:30080", model.TCP, true},
		{"192.0.2.3:80", model.TCP, false},
		{"192.0.2.1:80", model.TCP, false},
	} {
		id := tr.PortAt(row.proto, netip.MustParseAddrPort(row.at))
		if (id.Service == name("web")) != row.known {
			t.Errorf("%s/%s is of %v", row.at, row.proto, id)
		}
	}
}

func TestEndpointOf(t *testing.T) {
	tr := newTracker(web(), web(called("api"), clusterIPs("10.96.0.2")), web(called("lost"), born(9999)),
		sliceOf("s1", at("10.1.0.1", here)), sliceOf("s2", at("10.1.0.1", here), at("10.1.0.2", there)),
		ofService(sliceOf("a", at("10.1.0.1", here)), "api"))
	for _, row := range []struct {
		at    string
		proto model.Protocol
		limit int
		want  []string
	}{
		{"10.1.0.1:8080", model.TCP, 8, []string{"ns/api", "ns/web"}},
		{"[::ffff:10.1.0.1]:8080", model.TCP, 8, []string{"ns/api", "ns/web"}},
		{"10.1.0.1:8080", model.TCP, 1, []string{"ns/api"}},
		{"10.1.0.2:8080", model.TCP, 8, []string{"ns/web"}},
		{"10.1.0.1:8080", model.UDP, 8, nil},
		{"10.1.0.1:80", model.TCP, 8, nil},
		{"10.96.0.1:80", model.TCP, 8, nil},
	} {
		var got []string
		for _, id := range tr.EndpointOf(row.proto, netip.MustParseAddrPort(row.at), row.limit) {
			got = append(got, id.Service.String())
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("%s/%s is an endpoint of %v, want %v", row.at, row.proto, got, row.want)
		}
	}
}

func TestPodAt(t *testing.T) {
	pod := func(n, node string, ips ...string) *model.Pod {
		return &model.Pod{Name: name(n), Node: node, IPs: addrs(ips...)}
	}
	named := at("10.1.0.9", there)
	named.Pod = name("elsewhere")
	foreign, disputed, again := named, named, named
	foreign.Addr, disputed.Addr, again.Addr = addr("10.1.0.7"), addr("10.1.0.6"), addr("10.1.0.6")
	foreign.Pod = model.Name{Namespace: "kube-system", Name: "coredns"}
	again.Pod, again.Node = model.Name{Namespace: "tenant", Name: "mine"}, ""
	tenant := sliceOf("t", again)
	tenant.Namespace, tenant.Service.Namespace = "tenant", "tenant"
	tr := newTracker(web(), pod("one", here, "10.1.0.1"), pod("host-a", here, "192.0.2.1"), pod("host-b", here, "192.0.2.1"),
		sliceOf("s", named, foreign, disputed), tenant)
	for at, want := range map[string][2]string{
		"10.1.0.1":        {"ns/one", here},
		"::ffff:10.1.0.1": {"ns/one", here},
		"192.0.2.1":       {"/", here},
		"10.1.0.9":        {"ns/elsewhere", there},
		"10.1.0.8":        {"/", ""},
		"10.1.0.7":        {"/", there}, // a slice names a pod of another namespace
		"10.1.0.6":        {"/", ""},    // two slices disagree
	} {
		if pod, node := tr.PodAt(addr(at)); pod.String() != want[0] || node != want[1] {
			t.Errorf("%s: %s on %q, want %v", at, pod, node, want)
		}
	}
	var got []string
	for _, p := range tr.PodsOf("ns", "") {
		got = append(got, fmt.Sprint(p.Name, p.Node == here, p.Addrs))
	}
	if want := []string{"ns/elsewhere false [10.1.0.6 10.1.0.9]", "ns/host-a true [192.0.2.1]", "ns/host-b true [192.0.2.1]",
		"ns/one true [10.1.0.1]"}; !slices.Equal(got, want) {
		t.Errorf("pods of ns: %q, want %q", got, want)
	}
	if pods := tr.PodsOf("", "mine"); len(pods) != 1 || pods[0].Namespace != "tenant" {
		t.Errorf("the pod of tenant: %v", pods)
	}
	if pods := tr.PodsOf("", "coredns"); len(pods) != 0 {
		t.Errorf("a pod that a foreign slice names: %v", pods)
	}
}

func TestNodeAt(t *testing.T) {
	nodeOf := func(n string, cidr string, ips ...string) *model.Node {
		return &model.Node{Name: n, Addresses: addrs(ips...), PodCIDRs: []netip.Prefix{netip.MustParsePrefix(cidr)}}
	}
	tr := newTracker(nodeOf("a", "10.1.0.0/24", "192.0.2.1", "192.0.2.9"), nodeOf("b", "10.1.1.0/24", "192.0.2.2", "192.0.2.9"),
		nodeOf("c", "10.1.1.0/24", "10.1.0.3"))
	for at, want := range map[string]string{
		"192.0.2.1": "a", "::ffff:192.0.2.2": "b", "10.1.0.7": "a", "192.0.2.3": "",
		"192.0.2.9": "",  // of two Nodes
		"10.1.1.7":  "",  // in the podCIDR of two Nodes
		"10.1.0.3":  "c", // an address of a Node in the podCIDR of another
	} {
		if node := tr.NodeAt(addr(at)); node != want {
			t.Errorf("%s: on %q, want %q", at, node, want)
		}
	}
}
