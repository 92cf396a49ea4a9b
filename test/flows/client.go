package flows

import corev1 "k8s.io/api/core/v1"

// clientCases are about what a client's socket sees. That getpeername and
// recvfrom name the Service's address is checked in every flow; these are the
// kinds of socket that other flows do not use.
func clientCases() []Case {
	svc := Service{Type: corev1.ServiceTypeNodePort, Endpoints: On(all...)}
	var unconnected, oneSocket, mapped []Flow
	for _, f := range []Flow{
		{From: "a1", To: ClusterIP, Want: Spread(Kept, all...)},
		{From: "a", To: ClusterIP, Want: Spread(Kept, all...)},
		{From: "a/host", To: ClusterIP, Want: Spread(Kept, all...)},
		{From: "client0", To: NodePort("a"), Want: Spread(KeptHere, all...)},
		{From: "a", To: NodePort("a"), Want: Spread(AnySource, all...)},
		{From: "b1", To: NodePort("a"), Want: Spread(KeptHere, all...)},
	} {
		m := f
		m.Mapped = true
		mapped = append(mapped, m)
		f.Unconnected = true
		unconnected = append(unconnected, f)
		m.Unconnected = true
		mapped = append(mapped, m)
		f.SameSocket, f.Want.Spread = true, false
		oneSocket = append(oneSocket, f)
	}
	return []Case{
		{
			Name:       "UDP sockets that never connect hear the Service's address",
			Objects:    []Object{svc},
			Everywhere: true,
			Flows:      unconnected,
		},
		{
			Name:    "A UDP socket that never connects keeps one endpoint",
			Objects: []Object{svc},
			Flows:   oneSocket,
		},
		{
			Name:    "IPv6 sockets reach IPv4 Services by their mapped addresses",
			Objects: []Object{svc},
			Flows:   mapped,
		},
		{
			Name: "One UDP socket talks to two Services and can tell them apart",
			Objects: []Object{
				Service{Name: "first", Endpoints: On("a0")},
				// The same server as one of them, too: only the address tells.
				Service{Name: "second", Endpoints: On("a0")},
				Service{Name: "third", Endpoints: On("b0")},
			},
			Flows: oneSocketFlows("first", "second", "third", "first", "third", "second"),
		},
		{
			Name:    "From one port a pod reaches a server through a Service and directly",
			Objects: []Object{Service{Endpoints: On("b0")}},
			Flows: []Flow{
				{From: "a2", To: ClusterIP, LocalPort: 5360, NoVM: true, Want: OneOf(Kept, "b0")},
				{From: "a2", To: Address("b0", 8080), LocalPort: 5360, NoVM: true, Want: OneOf(Kept, "b0")},
				{From: "a2", To: ClusterIP, LocalPort: 5360, NoVM: true, Want: OneOf(Kept, "b0")},
				{From: "a2/vm", To: ClusterIP, LocalPort: 5361, Want: OneOf(AnySource, "b0")},
				{From: "a2/vm", To: Address("b0", 8080), LocalPort: 5361, Want: OneOf(AnySource, "b0")},
				{From: "a2/vm", To: ClusterIP, LocalPort: 5361, Want: OneOf(AnySource, "b0")},
			},
		},
		{
			Name:    "A UDP socket that never connects also reaches a pod directly",
			Objects: []Object{Service{Endpoints: On("a0")}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Unconnected: true, Keep: "s", Want: OneOf(Kept, "a0")},
				{From: "a1", To: Address("b0", 8080), Unconnected: true, Keep: "s", Want: OneOf(Kept, "b0")},
				{From: "a1", To: Address("b0", 8080), Want: OneOf(Kept, "b0")},
				{From: "a", To: Address("b0", 8080), Want: OneOf(Kept, "b0")},
			},
		},
	}
}

// oneSocketFlows ask Services in turn through one socket.
func oneSocketFlows(services ...string) []Flow {
	server := map[string]string{"first": "a0", "second": "a0", "third": "b0"}
	var list []Flow
	for _, from := range []string{"a1", "c"} {
		for _, s := range services {
			list = append(list, Flow{
				From: from, To: ClusterIP.Of(s), Unconnected: true, Keep: "s", Want: OneOf(Kept, server[s]),
			})
		}
	}
	return list
}

// hairpinCases are about servers that are their own clients.
func hairpinCases() []Case {
	return []Case{
		{
			Name:       "A pod reaches itself through its own Service",
			Objects:    []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: On("a0")}},
			Everywhere: true,
			Flows: []Flow{
				{From: "a0", To: ClusterIP, Want: OneOf(AnySource, "a0")},
				{From: "a0", To: NodePort("a"), Want: OneOf(AnySource, "a0")},
				{From: "a0", To: NodePort("b"), Want: OneOf(AnySource, "a0")},
				{From: "a0", To: LoadBalancer("a"), Want: OneOf(AnySource, "a0")},
				{From: "a0", To: ClusterIP, Unconnected: true, Want: OneOf(AnySource, "a0")},
			},
		},
		{
			Name:    "A pod reaches itself and the others of its Service",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0", "a1", "b0")}},
			Flows: []Flow{
				{From: "a0", To: ClusterIP, Want: Spread(AnySource, "a0", "a1", "b0")},
				{From: "a0", To: NodePort("a"), Want: Spread(AnySource, "a0", "a1", "b0")},
			},
		},
		{
			Name:    "A pod on its node's network reaches itself through its own Service",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a")}},
			Flows: []Flow{
				{From: "a/host", To: ClusterIP, Want: OneOf(Kept, "a")},
				{From: "a/host", To: NodePort("a"), Want: OneOf(Kept, "a")},
				{From: "a/host", To: NodePort("b"), Want: OneOf(AnySource, "a")},
			},
		},
	}
}
