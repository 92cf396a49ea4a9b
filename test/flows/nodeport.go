package flows

import corev1 "k8s.io/api/core/v1"

// nodePortCases are about NodePorts beyond the matrix.
func nodePortCases() []Case {
	np := func(endpoints ...string) Service {
		return Service{Type: corev1.ServiceTypeNodePort, Endpoints: On(endpoints...)}
	}
	return []Case{
		{
			Name:       "A NodePort reaches the only endpoint on the node that was asked",
			Objects:    []Object{np("a0")},
			Everywhere: true,
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "b1", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "b", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "b/host", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "a1", To: NodePort("a"), Want: OneOf(AnySource, "a0")},
				{From: "a", To: NodePort("a"), Want: OneOf(AnySource, "a0")},
				{From: "a/host", To: NodePort("a"), Want: OneOf(AnySource, "a0")},
			},
		},
		{
			Name:       "A NodePort reaches the only endpoint on another node",
			Objects:    []Object{np("b0")},
			Everywhere: true,
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "b0")},
				{From: "c1", To: NodePort("a"), Want: OneOf(KeptHere, "b0")},
				{From: "b1", To: NodePort("a"), Want: OneOf(KeptHere, "b0")},
				{From: "a1", To: NodePort("a"), Want: OneOf(AnySource, "b0")},
				{From: "a", To: NodePort("a"), Want: OneOf(AnySource, "b0")},
			},
		},
		{
			Name:       "A NodePort reaches an endpoint on the network of this or another node",
			Objects:    []Object{np("a")},
			Everywhere: true,
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a")},
				{From: "client0", To: NodePort("b"), Want: OneOf(KeptHere, "a")},
				{From: "a1", To: NodePort("a"), Want: OneOf(AnySource, "a")},
				{From: "a", To: NodePort("a"), Want: OneOf(AnySource, "a")},
				{From: "b", To: NodePort("a"), Want: OneOf(KeptHere, "a")},
				{From: "b1", To: NodePort("b"), Want: OneOf(AnySource, "a")},
				{From: "b1", To: NodePort("a"), Want: OneOf(KeptHere, "a")},
			},
		},
		{
			Name:    "A NodePort answers on every address of the node but not on loopback",
			Objects: []Object{np("a0", "b0")},
			Flows: []Flow{
				{From: "a", To: NodePort("a").On("bridge"), Want: Spread(AnySource, "a0", "b0")},
				{From: "a1", To: NodePort("a").On("bridge"), Want: Spread(AnySource, "a0", "b0")},
				{From: "a", To: NodePort("a").On("loopback"), Want: Reject},
				{From: "a/host", To: NodePort("a").On("loopback"), Want: Reject},
			},
		},
		{
			Name:    "A host port leads to the Pod of its node",
			Objects: []Object{HostPorts{"a0", 18080}},
			Flows: []Flow{
				{From: "client0", To: Address("a", 18080), Want: OneOf(Kept, "a0")},
				{From: "b1", To: Address("a", 18080), Want: OneOf(AnySource, "a0")},
				{From: "b", To: Address("a", 18080), Want: OneOf(AnySource, "a0")},
				{From: "a1", To: Address("a", 18080), Want: OneOf(AnySource, "a0")},
				{From: "a", To: Address("a", 18080), Want: OneOf(AnySource, "a0")},
				{From: "a0", To: Address("a", 18080), Want: OneOf(AnySource, "a0")},
				{From: "client0", To: Address("b", 18080), Want: Reject},
			},
			Then: []Step{
				{Name: "another Pod has it", Objects: []Object{HostPorts{"a2", 18080}}, Flows: []Flow{
					{From: "client0", To: Address("a", 18080), Want: OneOf(Kept, "a2")},
					{From: "a", To: Address("a", 18080), Want: OneOf(AnySource, "a2")},
				}},
				{Name: "no Pod has it", Objects: []Object{Pods{"a2"}}, Flows: []Flow{
					{From: "client0", To: Address("a", 18080), Want: Reject},
					{From: "a", To: Address("a", 18080), Want: Reject},
				}},
			},
		},
		{
			Name:      "One NodePort number has a TCP and a UDP Service",
			FilesOnly: "an API server gives a NodePort to one Service, and both protocols to ports of that one alone",
			Objects: []Object{
				Service{Name: "tcp", Type: corev1.ServiceTypeNodePort,
					Ports: []Port{{Name: "dns", Protocol: tcp, Port: 53, Target: 8080}}, Endpoints: On("a0")},
				Service{Name: "udp", Type: corev1.ServiceTypeNodePort, SharePort: "tcp",
					Ports: []Port{{Name: "dns", Protocol: udp, Port: 53, Target: 8080}}, Endpoints: On("b0")},
			},
			Flows: []Flow{
				{From: "client0", To: NodePort("a").Of("tcp"), Want: OneOf(KeptHere, "a0")},
				{From: "client0", To: NodePort("a").Of("udp"), Want: OneOf(KeptHere, "b0")},
			},
		},
		samePort("A client reaches one endpoint through two NodePorts from one port at once", false, "b0", 5380),
		samePort("So does one whose address is kept", true, "a0", 5382),
		{
			Name:      "A node's address may be an external IP beside its NodePorts",
			FilesOnly: "with an API server, nftables and iptables read the other Nodes a little after the Service",
			Objects:   []Object{Service{Type: corev1.ServiceTypeNodePort, Take: []string{"a"}, Ports: port9080, Endpoints: On("a0")}},
			Flows: []Flow{
				{From: "client0", To: Address("a", 9080), Want: OneOf(KeptHere, "a0")},
				{From: "b", To: Address("a", 9080), Want: OneOf(AnySource, "a0")},
				{From: "a1", To: Address("a", 9080), Want: OneOf(AnySource, "a0")},
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "client0", To: Address("a", 8080), Want: OneOf(Kept, "a")},
				{From: "b", To: Address("a", 8080), Want: OneOf(AnySource, "a")},
			},
		},
		{
			Name:    "A client may come again from the same port",
			Objects: []Object{np("a0", "b0")},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), LocalPort: 5353, Tries: 6, Want: OneOf(KeptHere, "a0", "b0")},
				{From: "c1", To: NodePort("a"), LocalPort: 5354, Tries: 6, Want: OneOf(KeptHere, "a0", "b0")},
				{From: "c1", To: ClusterIP, LocalPort: 5355, Tries: 6, Want: OneOf(Kept, "a0", "b0")},
			},
		},
		{
			Name: "Health check ports tell which nodes have an endpoint",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, ExternalLocal: true, Via: []string{"a"}, Endpoints: On("a0"),
			}},
			Flows: []Flow{
				{From: "client0", To: HealthCheck("a"), Want: Status(200)},
				{From: "client0", To: HealthCheck("b"), Want: Status(503)},
			},
			Then: []Step{{
				Name: "after the endpoint has moved",
				Objects: []Object{Service{
					Type: corev1.ServiceTypeLoadBalancer, ExternalLocal: true, Via: []string{"a"}, Endpoints: On("b0"),
				}},
				Flows: []Flow{
					{From: "client0", To: HealthCheck("a"), Want: Status(503)},
					{From: "client0", To: HealthCheck("b"), Want: Status(200)},
				},
			}},
		},
	}
}

var port9080 = []Port{{Name: "tcp", Protocol: tcp, Port: 9080, Target: 8080}, {Name: "udp", Protocol: udp, Port: 9080, Target: 8080}}

// samePort has two Services of one endpoint, which a client asks in turn through two sockets that
// have the same port: the endpoint must be able to tell them apart.
func samePort(name string, local bool, host string, port int) Case {
	one := Service{Name: "one", Type: corev1.ServiceTypeNodePort, ExternalLocal: local, Endpoints: On(host)}
	two := one
	two.Name = "two"
	c := Case{Name: name, Objects: []Object{one, two}}
	for _, s := range []string{"one", "two", "one", "two"} {
		c.Flows = append(c.Flows, Flow{From: "client0", To: NodePort("a").Of(s), LocalPort: port, Keep: s, Want: OneOf(AnySource, host)})
	}
	return c
}

// externalCases are about externalIPs and load balancer addresses.
func externalCases() []Case {
	return []Case{
		{
			Name: "External IPs are served on every node",
			Objects: []Object{Service{
				Via: []string{"a", "b"}, Endpoints: On("a0", "b0"),
			}},
			Everywhere: true,
			Flows: []Flow{
				{From: "client0", To: ExternalIP("a"), Want: Spread(KeptHere, "a0", "b0")},
				{From: "client0", To: ExternalIP("b"), Want: Spread(KeptHere, "a0", "b0")},
				{From: "a1", To: ExternalIP("b"), Want: Spread(AnySource, "a0", "b0")},
				{From: "c", To: ExternalIP("a"), Want: Spread(AnySource, "a0", "b0")},
				{From: "c/host", To: ExternalIP("a"), Want: Spread(AnySource, "a0", "b0")},
			},
		},
		{
			Name: "External IPs with policy Local serve only where an endpoint is",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeNodePort, Via: []string{"a", "b"}, ExternalLocal: true, Endpoints: On("a0"),
			}},
			Flows: []Flow{
				{From: "client0", To: ExternalIP("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: ExternalIP("b"), Want: Drop},
				{From: "b1", To: ExternalIP("b"), Want: OneOf(AnySource, "a0")},
			},
		},
		sharedAddress(),
		{
			Name: "Load balancer addresses of mode Proxy are left to the load balancer",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ProxyMode: true, Endpoints: On("a0"),
			}},
			Flows: []Flow{
				{From: "client0", To: LoadBalancer("a"), Want: Unserved},
				{From: "a1", To: LoadBalancer("a"), Want: Unserved},
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
			},
		},
		{
			Name: "Source ranges allow the clients they name and drop all others",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a", "b"},
				AllowFrom: []string{"client0", "a1"}, Endpoints: On("a0"),
			}},
			Everywhere: true,
			Flows: []Flow{
				{From: "client0", To: LoadBalancer("a"), Want: OneOf(KeptHere, "a0")},
				{From: "client0", To: LoadBalancer("b"), Want: OneOf(KeptHere, "a0")},
				{From: "client1", To: LoadBalancer("a"), Want: Drop},
				{From: "client1", To: LoadBalancer("b"), Want: Drop},
				{From: "a1", To: LoadBalancer("a"), Want: OneOf(AnySource, "a0")},
				{From: "b1", To: LoadBalancer("a"), Want: Drop},
				// They are about the load balancer's address alone.
				{From: "client1", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "a0")},
			},
		},
		{
			Name: "Source ranges of one family close the other",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"},
				AllowFrom: []string{"client0"}, AllowFamily: "4", Endpoints: On("a0"),
			}},
			Flows: []Flow{
				{From: "client0", To: LoadBalancer("a"), Only: []Combo{TCP4, UDP4}, Want: OneOf(KeptHere, "a0")},
				{From: "client0", To: LoadBalancer("a"), Only: []Combo{TCP6, UDP6}, Want: Drop},
				{From: "client1", To: LoadBalancer("a"), Want: Drop},
				{From: "client1", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
			},
		},
	}
}

// sharedAddress has two Services with one address of a load balancer, as MetalLB gives it.
func sharedAddress() Case {
	service := func(name, share string, port int32, host string) Service {
		return Service{Name: name, Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ShareVia: share, Endpoints: On(host), Ports: []Port{
			{Name: "tcp", Protocol: tcp, Port: port, Target: 8080}, {Name: "udp", Protocol: udp, Port: port, Target: 8080},
		}}
	}
	restricted, local := service("restricted", "", 80, "a0"), service("local", "restricted", 81, "b0")
	restricted.AllowFrom = []string{"client0"}
	open := local
	local.ExternalLocal = true
	return Case{
		Name:    "Services that share an address have their own source ranges and policies",
		Objects: []Object{restricted, local},
		Flows: []Flow{
			{From: "client0", To: LoadBalancer("a").Of("restricted"), Want: OneOf(KeptHere, "a0")},
			{From: "client1", To: LoadBalancer("a").Of("restricted"), Want: Drop},
			{From: "client0", To: LoadBalancer("a").Of("local"), Want: Drop},
			{From: "a1", To: LoadBalancer("a").Of("local"), Want: OneOf(AnySource, "b0")},
		},
		Then: []Step{{Name: "one is gone", Objects: []Object{open}, Flows: []Flow{
			{From: "client1", To: LoadBalancer("a").Of("local"), Want: OneOf(KeptHere, "b0")},
		}}},
	}
}
