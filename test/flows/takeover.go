package flows

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// takeoverCases are about authors of objects who name the addresses of others.
func takeoverCases() []Case {
	at80 := []Port{{Name: "tcp", Protocol: tcp, Port: 80, Target: 80}, {Name: "udp", Protocol: udp, Port: 80, Target: 80}}
	at8080 := []Port{{Name: "tcp", Protocol: tcp, Port: 8080, Target: 8080}, {Name: "udp", Protocol: udp, Port: 8080, Target: 8080}}
	served := []Flow{
		{From: "client0", To: ExternalIP("a"), Want: Spread(KeptHere, "a0", "b0")},
		{From: "a1", To: ExternalIP("a"), Want: Spread(AnySource, "a0", "b0")},
		{From: "b", To: ExternalIP("a"), Want: Spread(AnySource, "a0", "b0")},
	}
	victim := Service{Via: []string{"a"}, Endpoints: On("a0", "b0")}
	forged := func(e Endpoint) []Object {
		e.On, e.ExternalOf = "a", "web"
		return []Object{victim, Elsewhere{Service{Name: "forged", SlicesOnly: true, Ports: at80, Endpoints: []Endpoint{e}}}}
	}
	return append([]Case{
		{
			Name:      "An EndpointSlice of another namespace does not hide an external IP",
			FilesOnly: "the client of the API server writes to one namespace",
			Objects:   []Object{victim},
			Flows:     served,
			Then: []Step{
				{Name: "an endpoint that is not ready", Objects: forged(Endpoint{NoNode: true, NotReady: true, NotServing: true}), Flows: served},
				{Name: "an endpoint that names a Pod", Objects: forged(Endpoint{}), Flows: served},
			},
		},
		{
			Name:      "An external IP that is a pod's address leaves the pod's connections alone",
			FilesOnly: "with an API server, nftables and iptables read the other Nodes a little after the Service",
			Objects: []Object{
				Service{Name: "database", Headless: true, Ports: at8080, Endpoints: On("b3")},
				Service{Name: "thief", Ports: at8080, Take: []string{"b3"}, Endpoints: On("a0")},
			},
			Flows: []Flow{
				{From: "a1", To: Address("b3", 8080), Want: OneOf(Kept, "b3")},
				{From: "b1", To: Address("b3", 8080), Want: OneOf(Kept, "b3")},
				{From: "c", To: Address("b3", 8080), Want: OneOf(Kept, "b3")},
				{From: "c1", To: ClusterIP.Of("thief"), Want: OneOf(Kept, "a0")},
			},
		},
	}, loadBalancerTakeovers()...)
}

// loadBalancerTakeover has an external IP that lies in wait for an address of a load balancer.
func loadBalancerTakeovers() []Case {
	thief := Service{Name: "thief", Via: []string{"a"}, ShareVia: "web", Endpoints: On("b0"), Age: time.Hour}
	pending := Service{Type: corev1.ServiceTypeLoadBalancer, Endpoints: On("a0")}
	assigned := pending
	assigned.Via = []string{"a"}
	to := func(server string) []Flow {
		return []Flow{
			{From: "client0", To: LoadBalancer("a").Of("web"), Want: OneOf(KeptHere, server)},
			{From: "a1", To: LoadBalancer("a").Of("web"), Want: OneOf(AnySource, server)},
			{From: "c", To: LoadBalancer("a").Of("web"), Want: OneOf(AnySource, server)},
		}
	}
	datagrams := func(server string) []Flow {
		return []Flow{{From: "client0", To: LoadBalancer("a").Of("web"), Only: UDP, Keep: "s", Want: OneOf(KeptHere, server)}}
	}
	open := Flow{From: "client0", To: LoadBalancer("a").Of("web"), Only: TCP, Keep: "s", Want: OneOf(KeptHere, "b0")}
	return []Case{
		{
			Name:    "A load balancer gets an address that an older Service has as an external IP",
			Objects: []Object{thief, pending},
			Flows:   append(to("b0"), open),
			Then: []Step{
				{Name: "assigned", Objects: []Object{thief, assigned}, Flows: append(to("a0"), open)},
				{Name: "no longer assigned", Objects: []Object{thief, pending}, Flows: append(to("b0"), open)},
			},
		},
		{
			Name:    "A UDP flow follows an address to the load balancer that gets it",
			Objects: []Object{thief, pending},
			Flows:   datagrams("b0"),
			Then:    []Step{{Name: "assigned", Objects: []Object{thief, assigned}, Flows: datagrams("a0")}},
		},
	}
}
