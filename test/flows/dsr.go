package flows

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
)

// DSR returns the cases for agents with --forwarding dsr. Each Service that names no way to
// choose its endpoints gets maglev, which DSR replies need. An endpoint on another node
// than the one that got the packet sees the address of a client outside the cluster, too.
// Services with session affinity get the annotation, and nothing changes for them.
func DSR(cases []Case) []Case {
	direct := slices.Clone(cases)
	for i := range direct {
		c := &direct[i]
		if choosesEndpoints(*c) {
			continue
		}
		c.Objects = balancedByClient(c.Objects)
		c.Flows = keptFlows(c.Flows, c.Objects)
		c.Then = slices.Clone(c.Then)
		objects := c.Objects
		for j := range c.Then {
			step := &c.Then[j]
			if step.Objects != nil {
				step.Objects = balancedByClient(step.Objects)
				objects = step.Objects
			}
			step.Flows = keptFlows(step.Flows, objects)
		}
	}
	return direct
}

// choosesEndpoints reports whether a Service of the case names a way to choose its endpoints. Then
// its connections would begin in one way, and go on while their Service has another.
func choosesEndpoints(c Case) bool {
	chooses := func(o Object) bool {
		s, ok := o.(Service)
		return ok && s.Annotations[intent.BalanceAnnotation] != ""
	}
	return slices.ContainsFunc(c.Objects, chooses) ||
		slices.ContainsFunc(c.Then, func(s Step) bool { return slices.ContainsFunc(s.Objects, chooses) })
}

// balancedByClient returns objects with Services that choose endpoints by maglev.
func balancedByClient(objects []Object) []Object {
	objects = slices.Clone(objects)
	for i, o := range objects {
		if s, ok := o.(Service); ok {
			objects[i] = s.annotated(intent.BalanceAnnotation, "maglev")
		}
	}
	return objects
}

// annotated returns the Service with one more annotation.
func (s Service) annotated(key, value string) Service {
	s.Annotations = maps.Clone(s.Annotations)
	if s.Annotations == nil {
		s.Annotations = map[string]string{}
	}
	s.Annotations[key] = value
	return s
}

// keptFlows returns flows whose endpoints answer directly where they can.
func keptFlows(flows []Flow, objects []Object) []Flow {
	flows = slices.Clone(flows)
	services := ServicesOf(objects)
	for i := range flows {
		f := &flows[i]
		s, err := pickService(f.To, services)
		if err == nil && strings.HasPrefix(f.From, "client") && f.Want.Source == KeptHere && s.Affinity == 0 {
			f.Want.Source = Kept
		}
	}
	return flows
}

// DSRCases are about Services with DSR, for agents with --forwarding dsr.
func DSRCases() []Case {
	everywhere := []string{"a0", "b0", "c0", "a", "b", "c"}
	return []Case{
		{
			Name:    "Endpoints on all nodes see the client, whichever node it reaches",
			Objects: []Object{lbBy("maglev", "", everywhere...)},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: Spread(Kept, everywhere...)},
				{From: "client0", To: NodePort("b"), Want: Spread(Kept, everywhere...)},
				{From: "client0", To: NodePort("c"), Want: Spread(Kept, everywhere...)},
				{From: "client1", To: LoadBalancer("a"), Want: Spread(Kept, everywhere...)},
				{From: "client1", To: LoadBalancer("b"), Want: Spread(Kept, everywhere...)},
			},
		},
		{
			Name:    "Clients in the cluster reach endpoints as without DSR replies",
			Objects: []Object{lbBy("maglev", "", "b0", "b2")},
			Flows: []Flow{
				{From: "c1", To: NodePort("a"), Want: Spread(NodeSource, "b0", "b2")},
				{From: "c", To: NodePort("a"), Want: Spread(NodeSource, "b0", "b2")},
				{From: "c/host", To: NodePort("a"), Want: Spread(NodeSource, "b0", "b2")},
				{From: "b1", To: NodePort("a"), Want: Spread(NodeSource, "b0", "b2")},
				{From: "b0", To: NodePort("a"), Want: Spread(NodeSource, "b0", "b2")},
				{From: "a1", To: LoadBalancer("a"), Want: Spread(AnySource, "b0", "b2")},
				{From: "a", To: NodePort("c"), Want: Spread(AnySource, "b0", "b2")},
			},
		},
		forwardingCase("With hybrid, TCP clients are seen and UDP clients are not", "hybrid", Kept, NodeSource),
		forwardingCase("With snat, endpoints see the node that the client reached", "snat", NodeSource, NodeSource),
		{
			Name:    "Without maglev, no endpoint answers directly",
			Objects: []Object{lbBy("", "dsr", "b0", "b")},
			Flows:   outsideFlows(nil, NodeSource, "b0", "b"),
		},
		{
			Name:    "A Local policy and DSR replies go together",
			Objects: []Object{localOnly(lbBy("maglev", "", "a0", "b0"))},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: OneOf(Kept, "a0")},
				{From: "client0", To: LoadBalancer("b"), Want: OneOf(Kept, "b0")},
				{From: "client0", To: NodePort("c"), Want: Drop},
			},
		},
		{
			Name:    "A client's port reaches an endpoint by several addresses",
			Objects: []Object{lbBy("maglev", "", "b0")},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), LocalPort: 5370, Want: OneOf(Kept, "b0")},
				// The TCP connections have ended. The endpoint could not tell two UDP flows apart.
				{From: "client0", To: LoadBalancer("a"), LocalPort: 5370, Only: TCP, Want: OneOf(Kept, "b0")},
				{From: "client0", To: LoadBalancer("a"), LocalPort: 5370, Only: UDP, Want: OneOf(NodeSource, "b0")},
				{From: "client0", To: NodePort("c"), LocalPort: 5370, Only: TCP, Want: OneOf(Kept, "b0")},
				{From: "client0", To: NodePort("b"), LocalPort: 5370, Want: OneOf(Kept, "b0")},
			},
		},
		dsrConnections(),
		switchedCase(),
	}
}

// lbBy is a load balancer with these ways to choose endpoints and to forward to them ("": none).
func lbBy(balance, forwarding string, endpoints ...string) Service {
	s := Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a", "b"}, Endpoints: On(endpoints...)}
	if balance != "" {
		s = s.annotated(intent.BalanceAnnotation, balance)
	}
	if forwarding != "" {
		s = s.annotated(intent.ForwardingAnnotation, forwarding)
	}
	return s
}

func localOnly(s Service) Service {
	s.ExternalLocal = true
	return s
}

// outsideFlows ask nodes without the endpoint, for these combinations.
func outsideFlows(only []Combo, source Source, servers ...string) []Flow {
	return []Flow{
		{From: "client0", To: NodePort("a"), Only: only, Want: Spread(source, servers...)},
		{From: "client0", To: NodePort("c"), Only: only, Want: Spread(source, servers...)},
		{From: "client1", To: LoadBalancer("a"), Only: only, Want: Spread(source, servers...)},
	}
}

// forwardingCase has endpoints on node b see these sources.
func forwardingCase(name, forwarding string, ofTCP, ofUDP Source) Case {
	return Case{
		Name:    name,
		Objects: []Object{lbBy("maglev", forwarding, "b0", "b")},
		Flows:   append(outsideFlows(TCP, ofTCP, "b0", "b"), outsideFlows(UDP, ofUDP, "b0", "b")...),
	}
}

// dsrConnections stay with their endpoint while others come and go, and it ends.
func dsrConnections() Case {
	svc := func(endpoints ...Endpoint) []Object {
		s := lbBy("maglev", "")
		s.Endpoints = endpoints
		return []Object{s}
	}
	kept := func(only []Combo, servers ...string) []Flow {
		return []Flow{
			{From: "client0", To: NodePort("a"), Only: only, Keep: "a", Want: Sticky(Kept, servers...)},
			{From: "client0", To: NodePort("c"), Only: only, Keep: "c", Want: Sticky(Kept, servers...)},
			{From: "client1", To: LoadBalancer("b"), Only: only, Keep: "b", Want: Sticky(Kept, servers...)},
		}
	}
	newFlow := Flow{From: "client0", To: NodePort("c"), Want: OneOf(Kept, "a0")}
	two, six := []string{"b0", "c0"}, []string{"a0", "a1", "b0", "b1", "c0", "c1"}
	return Case{
		Name:    "DSR connections stay with their endpoint while others come and go, and it ends",
		Objects: svc(On(two...)...),
		Flows:   kept(nil, two...),
		Then: []Step{
			{Name: "with others", Objects: svc(On(six...)...), Flows: kept(nil, six...)},
			{Name: "without others", Objects: svc(On(two...)...), Flows: kept(nil, two...)},
			{Name: "both end", Objects: svc(append(On("a0"), Terminating(two...)...)...), Flows: append(kept(TCP, two...), newFlow)},
			{Name: "both have ended", Objects: svc(On("a0")...), Flows: append(kept(TCP, two...), newFlow)},
		},
	}
}

// switchedCase changes how new flows are forwarded, while connections are open.
func switchedCase() Case {
	kept := []Flow{
		{From: "client0", To: NodePort("a"), Only: TCP, Keep: "direct", Want: OneOf(Kept, "b0")},
		{From: "client1", To: LoadBalancer("a"), Only: TCP, Keep: "direct", Want: OneOf(Kept, "b0")},
	}
	other := []Flow{{From: "client0", To: NodePort("a"), Only: TCP, Keep: "by the node", Want: OneOf(NodeSource, "b0")}}
	return Case{
		Name:    "A connection goes on as it began when its Service is forwarded in another way",
		Objects: []Object{lbBy("maglev", "dsr", "b0")},
		Flows:   kept,
		Then: []Step{
			{Name: "snat", Objects: []Object{lbBy("maglev", "snat", "b0")}, Flows: slices.Concat(kept, other, outsideFlows(nil, NodeSource, "b0"))},
			{Name: "hybrid", Objects: []Object{lbBy("maglev", "hybrid", "b0")},
				Flows: slices.Concat(kept, other, outsideFlows(TCP, Kept, "b0"), outsideFlows(UDP, NodeSource, "b0"))},
			{Name: "without maglev", Objects: []Object{lbBy("", "dsr", "b0")},
				Flows: slices.Concat(kept, other, outsideFlows(nil, NodeSource, "b0"))},
		},
	}
}
