package flows

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// long is an affinity timeout that no test outlives; short is one that a test
// can wait for.
const (
	long  = 3 * time.Hour
	short = time.Second
)

// affinityCases are about sessionAffinity ClientIP.
func affinityCases() []Case {
	svc := func(timeout time.Duration, endpoints ...string) Service {
		return Service{
			Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Affinity: timeout, Endpoints: On(endpoints...),
		}
	}
	return []Case{
		{
			Name:       "Affinity sends each client to one endpoint again and again",
			Objects:    []Object{svc(long, all...)},
			Everywhere: true,
			Flows:      stickyFlows(all...),
			Then:       []Step{{Name: "and again", Flows: stickyFlows(all...)}},
		},
		{
			Name:    "Affinity survives the removal of another endpoint",
			Objects: []Object{svc(long, all...)},
			Flows:   stickyFlows(all...),
			Then: []Step{
				{Name: "without c0", Objects: []Object{svc(long, "a0", "b0")}, Flows: stickyFlows("a0", "b0")},
				{Name: "with c1", Objects: []Object{svc(long, "a0", "b0", "c1")}, Flows: stickyFlows("a0", "b0", "c1")},
				{Name: "without a0", Objects: []Object{svc(long, "b0", "c1")}, Flows: stickyFlows("b0", "c1")},
			},
		},
		localAffinity(),
		affinityExpires(),
	}
}

// localAffinity changes the policy and the endpoints of a Service with affinity.
func localAffinity() Case {
	with := func(local bool, endpoints ...Endpoint) []Object {
		return []Object{Service{
			Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ExternalLocal: local, Affinity: long, Endpoints: endpoints,
		}}
	}
	flows := func(s Source, servers ...string) []Flow {
		return []Flow{
			{From: "client0", To: NodePort("a"), Want: Sticky(s, servers...)},
			{From: "client1", To: LoadBalancer("a"), Want: Sticky(s, servers...)},
		}
	}
	return Case{
		Name:    "Affinity holds with policy Local, and ends with the endpoint's readiness",
		Objects: with(true, On("a0", "a1", "b0")...), Flows: flows(Kept, "a0", "a1"),
		Then: []Step{
			{Name: "Cluster", Objects: with(false, On("a0", "a1", "b0")...), Flows: flows(KeptHere, "a0", "a1", "b0")},
			{Name: "a0 is not ready", Objects: with(false, append(On("a1", "b0"), NotReady("a0")...)...), Flows: flows(KeptHere, "a1", "b0")},
			{Name: "a1 terminates", Objects: with(false, append(On("b0"), Terminating("a1")...)...), Flows: flows(KeptHere, "b0")},
		},
	}
}

func stickyFlows(servers ...string) []Flow {
	return []Flow{
		{From: "a1", To: ClusterIP, Want: Sticky(Kept, servers...)},
		{From: "b1", To: ClusterIP, Want: Sticky(Kept, servers...)},
		{From: "c", To: ClusterIP, Want: Sticky(Kept, servers...)},
		{From: "client0", To: NodePort("a"), Want: Sticky(KeptHere, servers...)},
		{From: "client1", To: NodePort("a"), Want: Sticky(KeptHere, servers...)},
		{From: "client0", To: LoadBalancer("a"), Want: Sticky(KeptHere, servers...)},
	}
}

// affinityExpires sends requests after pauses longer than the timeout until a second
// server answers, which only expiry allows. The eBPF dataplane counts whole seconds, and so may
// keep an endpoint for a second longer. Each flow has a client
// address of its own, since flows of one client would keep it fresh.
func affinityExpires() Case {
	servers := []string{"a0", "b0", "c0"}
	want := func(s Source) Want {
		return Want{From: servers, Source: s, Distinct: 2, Pause: short + time.Second + 100*time.Millisecond}
	}
	return Case{
		Name: "Affinity ends after its timeout without a packet",
		Objects: []Object{Service{
			Type: corev1.ServiceTypeNodePort, Affinity: short, Endpoints: On(servers...),
		}},
		Flows: []Flow{
			{From: "a1", To: ClusterIP, NoVM: true, Want: want(Kept)},
			{From: "b1/vm", To: ClusterIP, Want: want(Kept)},
			{From: "client0", To: NodePort("a"), Want: want(KeptHere)},
		},
	}
}
