package intent

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func portNumber(number uint16) func(*model.Service) {
	return func(s *model.Service) { s.Ports[0].Port = number }
}

func udp(s *model.Service) { s.Ports[0].Protocol = model.UDP }

func TestAnAddressThatHidesSomethingIsServedAndReported(t *testing.T) {
	node := &model.Node{Name: here, Addresses: addrs("192.168.0.1", "fd00:1::1")}
	hides := func(ip string, more ...func(*model.Service)) *model.Service {
		return web(append([]func(*model.Service){called("hider"), clusterIPs("10.96.0.9"), externalIPs(ip), portNumber(30080)}, more...)...)
	}
	hc := func(s *model.Service) {
		s.Type, s.ExternalLocal, s.HealthCheckNodePort = model.LoadBalancer, true, 30080
	}
	endpoint := []any{web(), sliceOf("s", at("10.1.0.1", here, pod("p")))}
	rows := []struct {
		name    string
		objects []any
		want    string // field and words, "" for no Problem
	}{
		{"a NodePort at the node's address", []any{web(nodePort(30080)), hides("192.168.0.1")},
			"spec.externalIPs[0]: 192.168.0.1:30080/TCP is an address of this node, where it hides NodePort 30080/TCP (IPv4) of Service " +
				"ns/web; change one of the two"},
		{"by a LoadBalancer IP", []any{web(nodePort(30080)),
			hides("192.0.2.1", func(s *model.Service) { s.ExternalIPs = nil }, loadBalancer("192.168.0.1"))},
			"status.loadBalancer.ingress: 192.168.0.1:30080/TCP is an address of this node"},
		{"a healthCheckNodePort", []any{web(hc), hides("192.168.0.1")}, "hides healthCheckNodePort 30080 of Service ns/web"},
		{"a NodePort of the Service's other port", []any{hides("192.168.0.1", ports(
			model.ServicePort{Name: "a", Protocol: model.TCP, Port: 30080},
			model.ServicePort{Name: "b", Protocol: model.TCP, Port: 80, NodePort: 30080}))},
			"of Service ns/hider"},
		{"an endpoint, by a LoadBalancer IP", append(endpoint,
			hides("192.0.2.1", portNumber(8080), func(s *model.Service) { s.ExternalIPs = nil }, loadBalancer("10.1.0.1"))),
			"status.loadBalancer.ingress: 10.1.0.1:8080/TCP hides an endpoint of Service ns/web, which has this address and port; change one " +
				"of the two"},

		{"a node's address alone is no conflict", []any{web(nodePort(30081)), hides("192.168.0.1")}, ""},
		{"another protocol is no conflict", []any{web(nodePort(30080)), hides("192.168.0.1", udp)}, ""},
		{"another family is no conflict", []any{web(nodePort(30080)), hides("fd00:1::1", clusterIPs("fd00::9"))}, ""},
		{"another address is no conflict", []any{web(nodePort(30080)), hides("192.168.0.2")}, ""},
		{"its own NodePort is no conflict", []any{hides("192.168.0.1", nodePort(30080))}, ""},
		{"an endpoint's other port is no conflict", append(endpoint, hides("10.1.0.1", portNumber(8081))), ""},
		{"an endpoint's other protocol is no conflict", append(endpoint, hides("10.1.0.1", portNumber(8080), udp)), ""},
		{"its own endpoint is no conflict", []any{ofService(sliceOf("s", at("192.168.0.1", here)), "hider"),
			hides("192.168.0.1", portNumber(8080))}, ""},
		{"only the Service that holds the address reports", []any{web(nodePort(30080)), hides("192.168.0.1"),
			web(called("z"), born(2000), clusterIPs("10.96.0.8"), externalIPs("192.168.0.1"), portNumber(30080))}, "ns/hider"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			tr := newTracker(append(row.objects, node)...)
			var got []string
			for _, p := range tr.Problems() {
				if strings.Contains(p.What, "hides") {
					got = append(got, p.String())
				}
			}
			switch {
			case row.want == "" && len(got) > 0:
				t.Errorf("reported: %q", got)
			case row.want != "" && (len(got) != 1 || !strings.HasPrefix(got[0], "Service ns/hider: ") || !strings.Contains(got[0], row.want)):
				t.Errorf("reported %q, want %q", got, row.want)
			}
			served := describe(tr.State().Ports)
			for _, kind := range []string{"ExternalIP 192", "ExternalIP 10", "ExternalIP [fd00", "LoadBalancerIP 192", "LoadBalancerIP 10"} {
				if strings.Contains(served, "\n"+kind) {
					return
				}
			}
			t.Errorf("the address is not served:\n%s", served)
		})
	}
}

func TestAnExternalIPDoesNotTakeAnEndpoint(t *testing.T) {
	thief := web(called("thief"), clusterIPs("10.96.0.9"), externalIPs("10.1.0.1"), portNumber(8080))
	for _, pods := range []*model.EndpointSlice{sliceOf("s", at("10.1.0.1", here, pod("p"))), sliceOf("s", at("10.1.0.1", ""))} {
		tr := newTracker(web(), thief, pods)
		want := "Service ns/thief: spec.externalIPs[0]: 10.1.0.1:8080/TCP is an endpoint of Service ns/web, and is not served; remove it"
		if p := tr.Problems(); len(p) != 1 || p[0].String() != want {
			t.Errorf("problems %v, want %s", p, want)
		}
		if served := describe(tr.State().Ports); strings.Contains(served, "ExternalIP 10") {
			t.Errorf("the address is served:\n%s", served)
		}
		// The endpoint moves, and the address is free.
		tr.Apply(delta(sliceOf("s", at("10.1.0.2", here, pod("p")))))
		if served := describe(tr.State().Ports); !strings.Contains(served, "ExternalIP 10") || len(tr.Problems()) > 0 {
			t.Errorf("the address is free, and is not served:\n%s", served)
		}
	}
}

func TestAConflictWithTheNodeFollowsItsAddresses(t *testing.T) {
	tr := newTracker(web(nodePort(30080)), web(called("hider"), clusterIPs("10.96.0.9"), externalIPs("192.168.0.1"), portNumber(30080)))
	if p := tr.Problems(); len(p) > 0 {
		t.Errorf("before the node has the address: %v", p)
	}
	if c := setNodeAddrs(tr, addrs("192.168.0.1")); len(c.Problems) != 1 || len(c.Upserts) > 0 {
		t.Errorf("the node gets the address: %+v", c)
	}
	if c := setNodeAddrs(tr, nil); c.Problems == nil || len(c.Problems) > 0 {
		t.Errorf("the node loses the address: %+v", c)
	}
	elsewhere := New(Config{NodeName: here, NodePortAddresses: prefixes("10.0.0.0/8")})
	setNodeAddrs(elsewhere, addrs("192.168.0.1"))
	elsewhere.Apply(delta(web(nodePort(30080)), web(called("hider"), clusterIPs("10.96.0.9"), externalIPs("192.168.0.1"), portNumber(30080))))
	if p := elsewhere.Problems(); len(p) > 0 {
		t.Errorf("an address on which no NodePort is served: %v", p)
	}
}

// The work for one NodePort's change must not grow with the Services around it:
// only those that may hide it are decided again.
func TestANodePortTouchesOnlyThoseThatHideIt(t *testing.T) {
	tr := newTracker(&model.Node{Name: here, Addresses: addrs("192.168.0.1")})
	for i := range 200 {
		ip := netip.AddrFrom4([4]byte{10, 97, 0, byte(i)}).String()
		tr.Apply(delta(web(called("s"+ip), clusterIPs(ip), externalIPs("192.168.0.1"), portNumber(uint16(1000+i)))))
	}
	tr.facts.Apply(delta(web(called("np"), clusterIPs("10.96.0.8"), nodePort(1007))))
	tr.planDirty()
	if n := len(tr.dirty); n != 2 {
		t.Errorf("%d Services are decided again, want 2", n)
	}
	if c := tr.Changes(); len(c.Problems) != 1 {
		t.Errorf("problems: %v", c.Problems)
	}
}
