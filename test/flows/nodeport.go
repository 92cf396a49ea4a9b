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
	}
}
