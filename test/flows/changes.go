package flows

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// changeCases are about objects that change while clients are there.
func changeCases() []Case {
	np := func(endpoints ...Endpoint) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: endpoints}}
	}
	// Other cases have NetworkPolicies. A pod that no Pod object claims may be one that
	return []Case{
		{
			Name:    "Endpoints come and go",
			Objects: np(On("a0")...),
			Flows:   onlyServers("a0"),
			Then: []Step{
				{Name: "with b0", Objects: np(On("a0", "b0")...), Flows: onlyServers("a0", "b0")},
				{Name: "without a0", Objects: np(On("b0")...), Flows: onlyServers("b0")},
				{Name: "without any", Objects: np(), Flows: []Flow{
					{From: "a1", To: ClusterIP, Want: Reject}, {From: "client0", To: NodePort("a"), Want: Reject},
				}},
				{Name: "with a0 again", Objects: np(On("a0")...), Flows: onlyServers("a0")},
			},
		},
		{
			Name:    "A Service that is deleted is served no more, and again when it is back",
			Objects: np(On("a0")...),
			Flows:   onlyServers("a0"),
			Then: []Step{
				{Name: "deleted", Objects: gone("web"), Flows: []Flow{
					{From: "a1", To: ClusterIP, Want: Unserved}, {From: "a", To: ClusterIP, Want: Unserved},
					{From: "client0", To: NodePort("a"), Want: Reject}, {From: "a", To: NodePort("a"), Want: Reject},
				}},
				{Name: "back", Objects: np(On("b0")...), Flows: onlyServers("b0")},
			},
		},
		{
			Name:    "A UDP flow that was refused begins when an endpoint comes",
			Objects: np(),
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Only: UDP, Keep: "s", Want: Reject},
				{From: "a1", To: ClusterIP, Only: UDP, Want: Reject},
			},
			Then: []Step{{Name: "with a0", Objects: np(On("a0")...), Flows: udpFlows("a0")}},
		},
		{
			Name:    "A policy changes from Cluster to Local and back",
			Objects: np(On("a0")...),
			Flows:   []Flow{{From: "client0", To: NodePort("b"), Want: OneOf(KeptHere, "a0")}},
			Then: []Step{
				{
					Name: "Local",
					Objects: []Object{Service{
						Type: corev1.ServiceTypeNodePort, ExternalLocal: true, InternalLocal: true, Endpoints: On("a0"),
					}},
					Flows: []Flow{
						{From: "client0", To: NodePort("b"), Want: Drop},
						{From: "b1", To: ClusterIP, Want: Drop},
						{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
					},
				},
				{Name: "Cluster", Objects: np(On("a0")...), Flows: onlyServers("a0")},
			},
		},
	}
}

// gone puts a Service without consequence in the place of another, so that
// targets can still name it: nothing proxies a Service of another proxy.
func gone(name string) []Object {
	return []Object{Service{Name: name, Type: corev1.ServiceTypeNodePort, ProxyName: "somebody-else", Endpoints: On("a0")}}
}

// onlyServers are flows that exactly the servers answer.
func onlyServers(servers ...string) []Flow {
	return []Flow{
		{From: "a1", To: ClusterIP, Want: Spread(Kept, servers...)},
		{From: "a", To: ClusterIP, Want: Spread(Kept, servers...)},
		{From: "client0", To: NodePort("a"), Want: Spread(KeptHere, servers...)},
	}
}

// udpFlows use one socket that never connects, because the socket hook translates a connected socket
// only when it connects.
func udpFlows(server string) []Flow {
	return []Flow{
		{From: "client0", To: NodePort("a"), Only: UDP, Keep: "s", Want: OneOf(KeptHere, server)},
		{From: "a1/vm", To: ClusterIP, Only: UDP, Keep: "s", Want: OneOf(Kept, server)},
		{From: "a1", To: ClusterIP, Only: UDP, Keep: "s", Unconnected: true, NoVM: true, Want: OneOf(Kept, server)},
		{From: "a", To: ClusterIP, Only: UDP, Keep: "s", Unconnected: true, Want: OneOf(Kept, server)},
	}
}

func keptTCP(server string) []Flow {
	return []Flow{
		{From: "client0", To: NodePort("a"), Only: TCP, Keep: "s", Want: OneOf(KeptHere, server)},
		{From: "client0", To: NodePort("b"), Only: TCP, Keep: "t", Want: OneOf(KeptHere, server)},
		{From: "a1", To: ClusterIP, Only: TCP, Keep: "s", Want: OneOf(Kept, server)},
		{From: "b1", To: ClusterIP, Only: TCP, Keep: "s", Want: OneOf(Kept, server)},
	}
}

// conflictCases are about address conflicts between two Services, and about Services
// of other proxies.
func conflictCases() []Case {
	older := Service{Name: "older", Type: corev1.ServiceTypeNodePort, Age: time.Hour, Endpoints: On("a0")}
	younger := Service{Name: "younger", Type: corev1.ServiceTypeNodePort, ShareIP: "older", SharePort: "older", Endpoints: On("b0")}
	return []Case{
		{
			Name:      "Of two Services with one address the older is served, and the younger takes over",
			FilesOnly: "an API server gives a cluster IP, and a NodePort, to one Service",
			Objects:   []Object{younger},
			Flows:     claimFlows("younger", "b0"),
			Then: []Step{
				{Name: "the older one comes", Objects: []Object{younger, older}, Flows: claimFlows("older", "a0")},
				{Name: "the older one goes", Objects: []Object{younger}, Flows: claimFlows("younger", "b0")},
			},
		},
		{
			Name: "A Service of another proxy is left alone",
			Objects: []Object{
				Service{Name: "mine", Type: corev1.ServiceTypeNodePort, Endpoints: On("a0")},
				Service{Name: "theirs", Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ProxyName: "somebody-else", Endpoints: On("a0")},
			},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "a1", To: ClusterIP.Of("theirs"), Want: Unserved},
				{From: "a", To: ClusterIP.Of("theirs"), Want: Unserved},
				{From: "client0", To: NodePort("a").Of("theirs"), Want: Reject},
				{From: "client0", To: LoadBalancer("a").Of("theirs"), Want: Unserved},
			},
		},
	}
}

func claimFlows(service, server string) []Flow {
	return []Flow{
		{From: "a1", To: ClusterIP.Of(service), Want: OneOf(Kept, server)},
		{From: "client0", To: NodePort("a").Of(service), Want: OneOf(KeptHere, server)},
	}
}
