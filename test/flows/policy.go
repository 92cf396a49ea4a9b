package flows

import corev1 "k8s.io/api/core/v1"

// policedPort is served by all servers, and used by bypass cases alone: their
// rules drop it on the way to a pod.
var policedPorts = []Port{
	{Name: "tcp", Protocol: tcp, Port: 80, Target: 8090},
	{Name: "udp", Protocol: udp, Port: 80, Target: 8090},
}

// bypassCases check which packets traverse netfilter: rules that enforce a
// NetworkPolicy must see them; other packets may bypass it. Only these cases use the
// pods a3, b3 and c3.
func bypassCases() []Case {
	svc := func(endpoints ...string) Service {
		return Service{Type: corev1.ServiceTypeNodePort, Ports: policedPorts, Endpoints: On(endpoints...)}
	}
	dropTo := func(pod string) map[string][]string {
		return map[string][]string{pod[:1]: {
			"ip daddr ${" + pod + "} meta l4proto { tcp, udp } th dport 8090 drop",
			"ip6 daddr ${" + pod + ".6} meta l4proto { tcp, udp } th dport 8090 drop",
		}}
	}
	followed := func(endpoint string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On(endpoint)}, Policy{Pods: []string{"b3"}}}
	}
	followedFlows := func(server string) []Flow {
		return []Flow{{From: "b3", To: ClusterIP, Only: UDP, Keep: "c", NoVM: true, Want: OneOf(AnySource, server)}}
	}
	return []Case{
		{
			Name:    "A pod that a NetworkPolicy selects is reached past the rules that enforce it",
			Objects: []Object{svc("a3"), Policy{Pods: []string{"a3"}}},
			Rules:   dropTo("a3"),
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: Drop},
				{From: "client0", To: NodePort("b"), Want: Drop},
				{From: "b1", To: ClusterIP, Want: Drop},
				{From: "b", To: ClusterIP, Want: Drop},
			},
		},
		{
			Name:    "A pod that a NetworkPolicy selects is served when no rule objects",
			Objects: []Object{svc("b3"), Policy{Pods: []string{"b3"}}},
			Flows: []Flow{
				{From: "client0", To: NodePort("b"), Want: OneOf(KeptHere, "b3:8090")},
				{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "b3:8090")},
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "b3:8090")},
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "b3:8090")},
				{From: "b", To: NodePort("b"), Want: OneOf(AnySource, "b3:8090")},
			},
		},
		{
			// Its first endpoint is on the same bridge, the others need the stack.
			Name:    "A connected UDP socket of a pod that a NetworkPolicy selects follows its Service",
			Objects: followed("b0"),
			Flows:   followedFlows("b0"),
			Then: []Step{
				{Name: "with a0 instead", Objects: followed("a0"), Flows: followedFlows("a0")},
				{Name: "with b1 instead", Objects: followed("b1"), Flows: followedFlows("b1")},
				{Name: "with b0 again", Objects: followed("b0"), Flows: followedFlows("b0")},
			},
		},
		{
			Name:    "A pod without NetworkPolicies is reached without netfilter",
			Modes:   []string{"ebpf"},
			Objects: []Object{svc("c3"), Pods{"c3"}},
			Rules:   dropTo("c3"),
			Flows: []Flow{
				{From: "client0", To: NodePort("c"), Want: OneOf(Kept, "c3:8090")},
				{From: "a1", To: NodePort("c"), Want: OneOf(Kept, "c3:8090")},
			},
			Then: []Step{
				{
					Name:    "a NetworkPolicy comes",
					Objects: []Object{svc("c3"), Policy{Pods: []string{"c3"}}},
					Flows:   []Flow{{From: "client0", To: NodePort("c"), Want: Drop}},
				},
				{
					Name:    "the NetworkPolicy goes",
					Objects: []Object{svc("c3"), Pods{"c3"}},
					Flows:   []Flow{{From: "client0", To: NodePort("c"), Want: OneOf(Kept, "c3:8090")}},
				},
			},
		},
	}
}
