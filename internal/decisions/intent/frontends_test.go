package intent

import (
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

func TestFrontends(t *testing.T) {
	two := sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there))
	two6 := sliceOf("s6", at("fd00:1::1", here))
	everywhere := []func(*model.Service){nodePort(30080), loadBalancer("192.0.2.1"), externalIPs("198.51.100.1")}
	full := func(more ...func(*model.Service)) *model.Service { return web(append(everywhere, more...)...) }

	runDecisions(t, []decision{
		{"a ClusterIP leads to all ready endpoints", []any{web(), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"a LoadBalancer Service is served on every kind of address", []any{full(), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside cluster inside cluster
			ExternalIP 198.51.100.1:80 outside cluster inside cluster
			LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"externalTrafficPolicy Local keeps outside clients on this node and lets inside ones use all", []any{full(externalLocal), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside local inside cluster
			ExternalIP 198.51.100.1:80 outside local inside cluster
			LoadBalancerIP 192.0.2.1:80 outside local inside cluster
			-> 10.1.0.1:8080 cluster local here
			-> 10.1.0.2:8080 cluster`},
		{"internalTrafficPolicy Local concerns the ClusterIP alone", []any{full(internalLocal), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside local inside local
			NodePort *:30080 outside cluster inside cluster
			ExternalIP 198.51.100.1:80 outside cluster inside cluster
			LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster local here
			-> 10.1.0.2:8080 cluster`},
		{"both policies Local", []any{web(nodePort(30080), externalLocal, internalLocal), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside local inside local
			NodePort *:30080 outside local inside cluster
			-> 10.1.0.1:8080 cluster local here
			-> 10.1.0.2:8080 cluster`},
		{"internalTrafficPolicy Local without external addresses leaves out endpoints elsewhere", []any{web(internalLocal), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside local inside local
			-> 10.1.0.1:8080 local here`},
		{"externalTrafficPolicy Local without external addresses does nothing", []any{web(externalLocal), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"no endpoints anywhere is a refusal, with Local policies too", []any{web(nodePort(30080), externalLocal, internalLocal)}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside reject inside reject
			NodePort *:30080 outside reject inside reject`},
		{"endpoints that do not serve are as none", []any{full(externalLocal),
			sliceOf("s", at("10.1.0.1", here, notReady), at("10.1.0.2", there, gone))}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside reject inside reject
			NodePort *:30080 outside reject inside reject
			ExternalIP 198.51.100.1:80 outside reject inside reject
			LoadBalancerIP 192.0.2.1:80 outside reject inside reject`},
		{"externalTrafficPolicy Local without an endpoint here drops clients outside only",
			[]any{full(externalLocal), sliceOf("s", at("10.1.0.2", there))}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside drop inside cluster
			ExternalIP 198.51.100.1:80 outside drop inside cluster
			LoadBalancerIP 192.0.2.1:80 outside drop inside cluster
			-> 10.1.0.2:8080 cluster`},
		{"internalTrafficPolicy Local without an endpoint here drops everybody at the ClusterIP",
			[]any{web(internalLocal), sliceOf("s", at("10.1.0.2", there))}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside drop inside drop`},
		{"endpoints elsewhere that terminate make a Local policy drop, not refuse",
			[]any{web(internalLocal), sliceOf("s", at("10.1.0.2", there, draining))}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside drop inside drop`},
		{"source ranges stand on LoadBalancer frontends only", []any{full(from("203.0.113.7/24", "10.0.0.0/8", "10.0.0.0/8")), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside cluster inside cluster
			ExternalIP 198.51.100.1:80 outside cluster inside cluster
			LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster from [10.0.0.0/8 203.0.113.0/24]
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"source ranges are divided by family, and a family without any is closed", []any{
			web(clusterIPs("10.96.0.1", "fd00::1"), loadBalancer("192.0.2.1", "2001:db8::1"), from("10.0.0.0/8")), two, two6}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster from [10.0.0.0/8]
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster
			ns/web:80/TCP/IPv6
			ClusterIP [fd00::1]:80 outside cluster inside cluster
			LoadBalancerIP [2001:db8::1]:80 outside cluster inside cluster from []
			-> [fd00:1::1]:8080 cluster here`},
		{"an address that is both externalIP and LoadBalancer IP keeps its source ranges", []any{
			web(loadBalancer("192.0.2.1"), externalIPs("192.0.2.1", "192.0.2.1"), from("10.0.0.0/8")), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster from [10.0.0.0/8]
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"a dual-stack Service is one port a family, each with its own endpoints", []any{
			web(clusterIPs("fd00::1", "10.96.0.1"), nodePort(30080), externalIPs("2001:db8::9", "198.51.100.1")), two, two6}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside cluster inside cluster
			ExternalIP 198.51.100.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster
			ns/web:80/TCP/IPv6
			ClusterIP [fd00::1]:80 outside cluster inside cluster
			NodePort *:30080 outside cluster inside cluster
			ExternalIP [2001:db8::9]:80 outside cluster inside cluster
			-> [fd00:1::1]:8080 cluster here`},
		{"a dual-stack Service refuses in the family that has no endpoints", []any{web(clusterIPs("10.96.0.1", "fd00::1")), two}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster
			ns/web:80/TCP/IPv6
			ClusterIP [fd00::1]:80 outside reject inside reject`},
		{"a family without a clusterIP is not served at all",
			[]any{web(nodePort(30080), loadBalancer("2001:db8::1"), externalIPs("2001:db8::2")), two, two6}, `
			ns/web:80/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			NodePort *:30080 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			-> 10.1.0.2:8080 cluster`},
		{"slices without a Service are nothing", []any{two}, ``},
		{"a Service for another proxy is nothing", []any{web(func(s *model.Service) { s.ProxyName = "other" }), two}, ``},
		{"ClientIP affinity keeps its time-out", []any{web(func(s *model.Service) { s.Affinity = 3 * time.Hour })}, `
			ns/web:80/TCP/IPv4 affinity 3h0m0s
			ClusterIP 10.96.0.1:80 outside reject inside reject`},
		{"named ports find their endpoint ports by name and protocol", []any{
			web(ports(
				model.ServicePort{Name: "https", Protocol: model.TCP, Port: 443, AppProtocol: "https"},
				model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53, NodePort: 30053},
				model.ServicePort{Name: "dns-tcp", Protocol: model.TCP, Port: 53, NodePort: 30053})),
			withPorts(sliceOf("s", at("10.1.0.1", here)),
				model.EndpointPort{Name: "dns", Protocol: model.UDP, Port: 5353},
				model.EndpointPort{Name: "dns", Protocol: model.TCP, Port: 1},
				model.EndpointPort{Name: "dns-tcp", Protocol: model.TCP, Port: 5354},
				model.EndpointPort{Name: "https", Protocol: model.TCP, Port: 8443})}, `
			ns/web:dns/UDP/IPv4
			ClusterIP 10.96.0.1:53 outside cluster inside cluster
			NodePort *:30053 outside cluster inside cluster
			-> 10.1.0.1:5353 cluster here
			ns/web:dns-tcp/TCP/IPv4
			ClusterIP 10.96.0.1:53 outside cluster inside cluster
			NodePort *:30053 outside cluster inside cluster
			-> 10.1.0.1:5354 cluster here
			ns/web:https/TCP/IPv4
			ClusterIP 10.96.0.1:443 outside cluster inside cluster
			-> 10.1.0.1:8443 cluster here`},
		{"one target port may stand behind two Service ports", []any{
			web(ports(model.ServicePort{Name: "a", Protocol: model.TCP, Port: 80}, model.ServicePort{Name: "b", Protocol: model.TCP, Port: 81})),
			withPorts(sliceOf("s", at("10.1.0.1", here)), model.EndpointPort{Name: "a", Protocol: model.TCP, Port: 8080},
				model.EndpointPort{Name: "b", Protocol: model.TCP, Port: 8080})}, `
			ns/web:a/TCP/IPv4
			ClusterIP 10.96.0.1:80 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here
			ns/web:b/TCP/IPv4
			ClusterIP 10.96.0.1:81 outside cluster inside cluster
			-> 10.1.0.1:8080 cluster here`},
		{"SCTP is a protocol like the others here", []any{web(ports(model.ServicePort{Protocol: model.SCTP, Port: 3868})),
			withPorts(sliceOf("s", at("10.1.0.1", there)), model.EndpointPort{Protocol: model.SCTP, Port: 3868})}, `
			ns/web:3868/SCTP/IPv4
			ClusterIP 10.96.0.1:3868 outside cluster inside cluster
			-> 10.1.0.1:3868 cluster`},
	})
}

func TestServiceProxyNameSelectsServicesThatAskForIt(t *testing.T) {
	tr := New(Config{NodeName: here, ProxyName: "spillway"})
	ours := web(func(s *model.Service) { s.ProxyName = "spillway" })
	others := web(called("other"), clusterIPs("10.96.0.2"))
	tr.Apply(delta(ours, others))
	same(t, "state", describe(tr.State().Ports), text(`
		ns/web:80/TCP/IPv4
		ClusterIP 10.96.0.1:80 outside reject inside reject`))
	c := tr.Apply(delta(web()))
	if len(c.Deletes) != 1 || len(tr.State().Ports) != 0 {
		t.Errorf("a Service that lost the label is still served: %+v", c)
	}
}

func TestUnfitAddressesAreLeftOutAndReported(t *testing.T) {
	rows := []struct {
		name    string
		service *model.Service
		field   string
		what    string
	}{
		{"an unspecified externalIP", web(externalIPs("0.0.0.0")), "spec.externalIPs[0]", "0.0.0.0 is the unspecified address; remove it"},
		{"a loopback externalIP", web(externalIPs("192.0.2.1", "127.0.0.1")), "spec.externalIPs[1]",
			"127.0.0.1 is a loopback address; remove it"},
		{"a mapped loopback externalIP", web(externalIPs("::ffff:127.0.0.1")), "spec.externalIPs[0]",
			"127.0.0.1 is a loopback address; remove it"},
		{"a multicast externalIP", web(externalIPs("224.0.0.251")), "spec.externalIPs[0]", "224.0.0.251 is a multicast address; remove it"},
		{"a link-local externalIP", web(externalIPs("169.254.169.254")), "spec.externalIPs[0]",
			"169.254.169.254 is a link-local address; remove it"},
		{"a loopback LoadBalancer IP", web(loadBalancer("127.0.0.2")), "status.loadBalancer.ingress",
			"127.0.0.2 is a loopback address; remove it"},
		{"a loopback clusterIP", web(clusterIPs("127.0.0.3"), nodePort(30000)), "spec.clusterIPs[0]",
			"127.0.0.3 is a loopback address; remove it"},
		{"an externalIP of a family that the Service has not", web(externalIPs("2001:db8::1")), "spec.externalIPs[0]",
			"2001:db8::1 is IPv6, but the Service has no clusterIP of that family; remove it or make the Service dual-stack"},
		{"a port that is there twice", web(ports(model.ServicePort{Protocol: model.TCP, Port: 80},
			model.ServicePort{Protocol: model.TCP, Port: 80})),
			"spec.ports[1]", "repeats an earlier port; remove one of the two"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			tr := newTracker(row.service)
			want := model.Problem{Object: model.ObjectRef{Kind: model.KindService, Name: model.Name{Namespace: "ns", Name: "web"}},
				Where: "Service ns/web", Field: row.field, What: row.what}
			if got := tr.Problems(); len(got) != 1 || got[0] != want {
				t.Errorf("problems %v, want %v", got, want)
			}
			for _, sp := range tr.State().Ports {
				for _, f := range sp.Frontends {
					if f.Addr.IsValid() && whyInvalid(f.Kind, f.Addr) != "" {
						t.Errorf("%v is served", f.Addr)
					}
				}
			}
			c := tr.Apply(delta(web()))
			if c.Problems == nil || len(c.Problems) != 0 {
				t.Errorf("after mending, problems are %#v, want an empty list", c.Problems)
			}
		})
	}
}
