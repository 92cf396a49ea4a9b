package flows

import (
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
)

// balanceCases are about the shares of new flows that endpoints get.
func balanceCases() []Case {
	svc := func(weights string) Service {
		s := Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0", "b0", "c0")}
		if weights != "" {
			s.Annotations = map[string]string{intent.BalanceAnnotation: "weighted", intent.WeightsAnnotation: weights}
		}
		return s
	}
	bySlice := Service{
		Type: corev1.ServiceTypeNodePort, Annotations: map[string]string{intent.BalanceAnnotation: "weighted"},
		Slices: []Slice{{Weight: "90", Endpoints: On("a0")}, {Weight: "10", Endpoints: On("b0", "c0")}},
	}
	local := svc("b0=7 a*=0")
	local.ExternalLocal, local.InternalLocal = true, true
	return []Case{
		{
			Name:    "Without weights all endpoints have equal shares",
			Objects: []Object{svc("")},
			Flows:   sharedFlows(1, 1, 1),
		},
		{
			Name:    "Weights change while connections are open",
			Objects: []Object{svc("a0=1 *=0")},
			Flows:   newTCP(1, 0, 0),
			Then: []Step{
				{Name: "to others", Objects: []Object{svc("a0=0, b0=30, c0=10")}, Flows: newTCP(0, 3, 1)},
				{Name: "to all", Objects: []Object{svc("a0=5 b0=5 c0=40")}, Flows: newTCP(1, 1, 8)},
				{Name: "all zero", Objects: []Object{svc("*=0")}, Flows: newTCP(1, 1, 1)},
				{Name: "without the annotations", Objects: []Object{svc("")}, Flows: newTCP(1, 1, 1)},
			},
		},
		redirectCase(),
		{
			Name:    "An EndpointSlice gives its endpoints a weight",
			Objects: []Object{bySlice},
			Flows:   sharedFlows(9, 1, 1),
		},
		{
			Name:    "A Local policy uses this node's only endpoint although its weight is 0",
			Objects: []Object{local},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: NodePort("b"), Want: OneOf(Kept, "b0")},
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
			},
		},
	}
}

// redirectCase has a cache on two nodes in front of a Service. A cache that ends gets no new
// flow, while its connections stay.
func redirectCase() Case {
	web := Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("c0"),
		Annotations: map[string]string{intent.LocalRedirectAnnotation: "cache"}}
	cache := func(on []Endpoint, more ...Endpoint) Service {
		return Service{Name: "cache", Type: corev1.ServiceTypeClusterIP, Endpoints: append(on, more...)}
	}
	flows := func(a, b string) []Flow {
		return []Flow{
			{From: "a1", To: ClusterIP.Of("web"), Want: OneOf(Kept, a)},
			{From: "a", To: ClusterIP.Of("web"), Want: OneOf(Kept, a)},
			{From: "client0", To: NodePort("a").Of("web"), Want: OneOf(KeptHere, a)},
			{From: "b1", To: ClusterIP.Of("web"), Want: OneOf(Kept, b)},
			{From: "c", To: ClusterIP.Of("web"), Want: OneOf(Kept, "c0")},
		}
	}
	kept := Flow{From: "a1", To: ClusterIP.Of("web"), Only: TCP, Keep: "s", Want: OneOf(Kept, "a0")}
	return Case{
		Name:    "A Service redirects to a cache of this node while it is ready",
		Objects: []Object{web, cache(On("a0"), On("b0")...)},
		Flows:   append(flows("a0", "b0"), kept),
		Then: []Step{
			{Name: "one ends", Objects: []Object{web, cache(Terminating("a0"), On("b0")...)}, Flows: append(flows("c0", "b0"), kept)},
			{Name: "its successor is not ready", Objects: []Object{web, cache(NotReady("a2"), On("b0")...)}, Flows: flows("c0", "b0")},
			{Name: "it is ready", Objects: []Object{web, cache(On("a2"), On("b0")...)}, Flows: flows("a2", "b0")},
			{Name: "there is no cache", Objects: []Object{web}, Flows: flows("c0", "c0")},
		},
	}
}

// newTCP are connections that stay open with a0, and new ones in these shares. A UDP socket
// with the port of an earlier one continues its flow.
func newTCP(shares ...int) []Flow {
	flows := sharedFlows(shares...)
	for i := range flows {
		flows[i].Only = TCP
	}
	return append(keptTCP("a0"), flows...)
}

// sharedFlows are flows that a0, b0 and c0 answer in these shares.
func sharedFlows(shares ...int) []Flow {
	return []Flow{
		{From: "a1", To: ClusterIP, Want: InShares(Kept, shares, "a0", "b0", "c0")},
		{From: "a", To: ClusterIP, Only: TCP, Want: InShares(Kept, shares, "a0", "b0", "c0")},
		{From: "client0", To: NodePort("a"), Want: InShares(KeptHere, shares, "a0", "b0", "c0")},
	}
}
