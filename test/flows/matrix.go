package flows

import corev1 "k8s.io/api/core/v1"

// all are the short names of one pod on each node.
var all = []string{"a0", "b0", "c0"}

// matrixCases are kube-proxy's matrix: {pod, node, outside} to {cluster IP,
// NodePort, load balancer} with {no policy, externalTrafficPolicy Local,
// internalTrafficPolicy Local}.
func matrixCases() []Case {
	lb := Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a", "b"}}
	plain := lb
	plain.Endpoints = On(all...)
	external := lb
	external.ExternalLocal, external.Endpoints = true, On("a0")
	internal := lb
	internal.InternalLocal, internal.Endpoints = true, On("a0")
	both := lb
	both.ExternalLocal, both.InternalLocal, both.Endpoints = true, true, On("a0", "b0")
	return []Case{
		{
			Name:       "A load balancer without policies reaches every endpoint from everywhere",
			Objects:    []Object{plain},
			Everywhere: true,
			Flows:      plainMatrix(),
		},
		{
			Name:       "External traffic policy Local serves outside clients only where an endpoint is",
			Objects:    []Object{external},
			Everywhere: true,
			Flows:      externalLocalMatrix(),
		},
		{
			Name:    "Internal traffic policy Local serves cluster IPs only where an endpoint is",
			Objects: []Object{internal},
			Flows:   internalLocalMatrix(),
		},
		{
			Name:    "Both policies Local keep all traffic on the node it reached",
			Objects: []Object{both},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "b0")},
				{From: "c1", To: ClusterIP, Want: Drop},
				{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: NodePort("b"), Want: OneOf(Kept, "b0")},
				{From: "client0", To: NodePort("c"), Want: Drop},
				{From: "client0", To: LoadBalancer("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: LoadBalancer("b"), Want: OneOf(Kept, "b0")},
			},
		},
	}
}

func plainMatrix() []Flow {
	var list []Flow
	for _, from := range []string{"a1", "b1", "a", "b", "a/host", "c/host"} {
		list = append(list, Flow{From: from, To: ClusterIP, Want: Spread(Kept, all...)})
		list = append(list, Flow{From: from, To: LoadBalancer("a"), Want: Spread(AnySource, all...)})
	}
	list = append(list, Flow{From: "client0", To: ClusterIP, Want: Spread(KeptHere, all...)})
	for _, node := range []string{"a", "b"} {
		list = append(list,
			Flow{From: "client0", To: NodePort(node), Want: Spread(KeptHere, all...)},
			Flow{From: "client0", To: LoadBalancer(node), Want: Spread(KeptHere, all...)},
			Flow{From: node + "1", To: NodePort(node), Want: Spread(AnySource, all...)},
			Flow{From: node, To: NodePort(node), Want: Spread(AnySource, all...)},
			Flow{From: node + "/host", To: NodePort(node), Want: Spread(AnySource, all...)},
			Flow{From: "c1", To: NodePort(node), Want: Spread(KeptHere, all...)},
			Flow{From: "c", To: NodePort(node), Want: Spread(KeptHere, all...)},
			Flow{From: "c/host", To: NodePort(node), Want: Spread(KeptHere, all...)},
		)
	}
	return list
}

func externalLocalMatrix() []Flow {
	list := []Flow{
		{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
		{From: "client0", To: NodePort("b"), Want: Drop},
		{From: "client0", To: LoadBalancer("a"), Want: OneOf(Kept, "a0")},
		{From: "client0", To: LoadBalancer("b"), Want: Drop},
		{From: "client0", To: ClusterIP, Want: OneOf(KeptHere, "a0")},
		// Packets from a pod to another node arrive from outside, too.
		{From: "b1", To: NodePort("a"), Want: OneOf(Kept, "a0")},
		{From: "b", To: NodePort("a"), Want: OneOf(Kept, "a0")},
		{From: "a1", To: NodePort("b"), Want: Drop},
		{From: "a", To: NodePort("b"), Want: Drop},
	}
	// On the node itself clients inside take the short cut to all endpoints.
	for _, from := range []string{"b1", "b", "b/host"} {
		list = append(list,
			Flow{From: from, To: ClusterIP, Want: OneOf(Kept, "a0")},
			Flow{From: from, To: NodePort("b"), Want: OneOf(AnySource, "a0")},
			Flow{From: from, To: LoadBalancer("b"), Want: OneOf(AnySource, "a0")},
		)
	}
	return list
}

func internalLocalMatrix() []Flow {
	list := []Flow{{From: "client0", To: ClusterIP, Want: OneOf(KeptHere, "a0")}}
	for _, from := range []string{"a1", "a", "a/host"} {
		list = append(list, Flow{From: from, To: ClusterIP, Want: OneOf(Kept, "a0")})
	}
	for _, from := range []string{"b1", "b", "b/host"} {
		list = append(list,
			Flow{From: from, To: ClusterIP, Want: Drop},
			// The policy is about cluster IPs alone.
			Flow{From: from, To: NodePort("b"), Want: OneOf(AnySource, "a0")},
			Flow{From: from, To: LoadBalancer("b"), Want: OneOf(AnySource, "a0")},
		)
	}
	for _, node := range []string{"a", "b"} {
		list = append(list,
			Flow{From: "client0", To: NodePort(node), Want: OneOf(KeptHere, "a0")},
			Flow{From: "client0", To: LoadBalancer(node), Want: OneOf(KeptHere, "a0")},
		)
	}
	return list
}
