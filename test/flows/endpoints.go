package flows

import corev1 "k8s.io/api/core/v1"

// endpointCases are about readiness, termination, hints, and what happens when
// no endpoint is left.
func endpointCases() []Case {
	return []Case{
		withoutEndpoint("A Service without slices refuses every client"),
		withoutEndpoint("A Service whose endpoints are all unready refuses every client", NotReady("a0", "b0")...),
		withoutEndpoint("A Service with policy Local and no endpoint anywhere refuses", nil...).local(),
		{
			Name:    "Unready endpoints are not used while there are ready ones",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: append(On("a0", "b0"), NotReady("c0", "a2")...)}},
			Flows: []Flow{
				{From: "c1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")},
				{From: "client0", To: NodePort("c"), Want: Spread(KeptHere, "a0", "b0")},
			},
		},
		{
			Name:    "Terminating endpoints are not used while there are ready ones",
			Objects: []Object{Service{Endpoints: append(On("a0", "b0"), Terminating("c0")...)}},
			Flows:   []Flow{{From: "c1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")}},
		},
		{
			Name: "Terminating endpoints that still serve are used when no other is left",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: append(Terminating("a0", "b0"),
				Endpoint{On: "c0", NotReady: true, NotServing: true, Terminating: true})}},
			Flows: []Flow{
				{From: "c1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")},
				{From: "client0", To: NodePort("c"), Want: Spread(KeptHere, "a0", "b0")},
			},
		},
		{
			Name:    "Terminating endpoints that no longer serve are never used",
			Objects: []Object{Service{Endpoints: []Endpoint{{On: "a0", NotReady: true, NotServing: true, Terminating: true}}}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: Reject},
				{From: "b", To: ClusterIP, Want: Reject},
			},
		},
		{
			Name: "A pod may have the address of one that terminates on another node",
			Objects: []Object{
				Service{Type: corev1.ServiceTypeNodePort, Endpoints: []Endpoint{
					{On: "a0", NotReady: true, NotServing: true, Terminating: true, ClaimNode: "b"}, {On: "a0"},
				}},
				Service{Name: "later", Endpoints: On("a0"), Slices: []Slice{
					{Endpoints: []Endpoint{{On: "a0", NotReady: true, Terminating: true, ClaimNode: "b"}}},
				}},
			},
			Flows: []Flow{
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "c1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "client0", To: NodePort("b"), Want: OneOf(KeptHere, "a0")},
				{From: "b1", To: ClusterIP.Of("later"), Want: OneOf(Kept, "a0")},
			},
		},
		{
			Name: "With policy Local a node falls back to its own terminating endpoint",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ExternalLocal: true, InternalLocal: true,
				Endpoints: append(On("b0"), Terminating("a0")...),
			}},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: NodePort("b"), Want: OneOf(Kept, "b0")},
				{From: "client0", To: NodePort("c"), Want: Drop},
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				// healthCheckNodePort does not count a terminating endpoint.
				{From: "client0", To: HealthCheck("a"), Want: Status(503)},
				{From: "client0", To: HealthCheck("b"), Want: Status(200)},
			},
		},
		{
			Name: "publishNotReadyAddresses: endpoints that are not ready are used",
			Objects: []Object{Service{PublishNotReady: true, Endpoints: []Endpoint{
				// As the slice controller writes them for such a Service.
				{On: "a0", NotServing: true},
				{On: "b0", Terminating: true},
			}}},
			Flows: []Flow{{From: "c1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")}},
		},
	}
}

// withoutEndpoint returns a case in which every client is rejected: no endpoint is usable.
func withoutEndpoint(name string, endpoints ...Endpoint) Case {
	c := Case{
		Name:       name,
		Objects:    []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: endpoints}},
		Everywhere: true,
	}
	for _, from := range []string{"a1", "a", "a/host", "client0"} {
		c.Flows = append(c.Flows,
			Flow{From: from, To: ClusterIP, Want: Reject},
			Flow{From: from, To: NodePort("a"), Want: Reject},
			Flow{From: from, To: LoadBalancer("a"), Want: Reject},
		)
	}
	return c
}

// local returns the case with both traffic policies Local.
func (c Case) local() Case {
	s := c.Objects[0].(Service)
	s.ExternalLocal, s.InternalLocal = true, true
	c.Objects = []Object{s}
	return c
}

// hintCases are about topology: nodes a and c are in zone east, b in zone west.
func hintCases() []Case {
	zones := func(on, zone string) Endpoint { return Endpoint{On: on, Zones: []string{zone}} }
	nodes := func(on, node, zone string) Endpoint {
		return Endpoint{On: on, Nodes: []string{node}, Zones: []string{zone}}
	}
	return []Case{
		{
			Name: "Hints keep traffic in the zone of the client",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeNodePort, Distribution: "PreferClose",
				Endpoints: []Endpoint{zones("a0", "east"), zones("b0", "west"), zones("c0", "east")},
			}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: Spread(Kept, "a0", "c0")},
				{From: "c", To: ClusterIP, Want: Spread(Kept, "a0", "c0")},
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "b0")},
				{From: "client0", To: NodePort("b"), Want: OneOf(KeptHere, "b0")},
			},
		},
		{
			Name: "Hints keep traffic on the node of the client",
			Objects: []Object{Service{
				Distribution: "PreferSameNode",
				Endpoints:    []Endpoint{nodes("a0", "a", "east"), nodes("b0", "b", "west"), nodes("b2", "b", "west")},
			}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "b1", To: ClusterIP, Want: Spread(Kept, "b0", "b2")},
				// No endpoint is for node c, but one is for its zone.
				{From: "c1", To: ClusterIP, Want: OneOf(Kept, "a0")},
			},
		},
		{
			Name: "Hints are ignored unless every endpoint has them",
			Objects: []Object{Service{
				Distribution: "PreferClose",
				Endpoints:    []Endpoint{zones("a0", "east"), zones("b0", "west"), {On: "c0"}},
			}},
			Flows: []Flow{{From: "a1", To: ClusterIP, Want: Spread(Kept, all...)}},
		},
		{
			Name: "Hints are ignored where no endpoint is for the zone",
			Objects: []Object{Service{
				Distribution: "PreferSameZone",
				Endpoints:    []Endpoint{zones("a0", "east"), zones("c0", "east")},
			}},
			Flows: []Flow{{From: "b1", To: ClusterIP, Want: Spread(Kept, "a0", "c0")}},
		},
	}
}
