package flows

import corev1 "k8s.io/api/core/v1"

const (
	tcp = corev1.ProtocolTCP
	udp = corev1.ProtocolUDP
)

// clusterIPCases are about which endpoints a Service has.
func clusterIPCases() []Case {
	return []Case{
		{
			Name:       "A cluster IP reaches the only endpoint wherever it is",
			Objects:    []Object{Service{Endpoints: On("a0")}},
			Everywhere: true,
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "b1", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "a", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "b", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "a/host", To: ClusterIP, Want: OneOf(Kept, "a0")},
				{From: "b/host", To: ClusterIP, Want: OneOf(Kept, "a0")},
			},
		},
		{
			Name:       "A cluster IP reaches endpoints on the network of their node",
			Objects:    []Object{Service{Endpoints: On("a")}},
			Everywhere: true,
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(AnySource, "a")},
				{From: "b1", To: ClusterIP, Want: OneOf(AnySource, "a")},
				{From: "a", To: ClusterIP, Want: OneOf(Kept, "a")},
				{From: "a/host", To: ClusterIP, Want: OneOf(Kept, "a")},
				{From: "b", To: ClusterIP, Want: OneOf(Kept, "a")},
			},
		},
		severalPorts(),
		{
			Name: "A port without a name leads to the slice's port without a name",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeNodePort, Ports: []Port{{Protocol: udp, Port: 80, Target: 8080}},
				Endpoints: []Endpoint{{On: "client1", NoNode: true}},
			}},
			Flows: []Flow{
				{From: "a", To: ClusterIP, Want: OneOf(AnySource, "client1")},
				{From: "client0", To: NodePort("a"), Want: OneOf(NodeSource, "client1")},
			},
		},
		{
			Name: "TCP and UDP of one port number have endpoints of their own",
			Objects: []Object{Service{Slices: []Slice{
				{Ports: []string{"tcp"}, Endpoints: On("a0")},
				{Ports: []string{"udp"}, Endpoints: On("b0")},
			}}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Only: TCP, Want: OneOf(Kept, "a0")},
				{From: "a1", To: ClusterIP, Only: UDP, Want: OneOf(Kept, "b0")},
			},
		},
		{
			Name: "Several slices of one Service add up, and duplicates count once",
			Objects: []Object{Service{
				Endpoints: On("a0", "b0"),
				Slices:    []Slice{{Endpoints: On("b0", "c0")}, {Endpoints: On("c0")}},
			}},
			Flows: []Flow{{From: "a1", To: ClusterIP, Want: Spread(Kept, all...)}},
		},
		{
			Name: "A slice written by hand may name addresses outside the cluster",
			Objects: []Object{Service{
				Type:      corev1.ServiceTypeNodePort,
				Endpoints: []Endpoint{{On: "client1", NoNode: true}},
			}},
			Flows: []Flow{
				{From: "a", To: ClusterIP, Want: OneOf(Kept, "client1")},
				{From: "client0", To: NodePort("a"), Want: OneOf(NodeSource, "client1")},
			},
		},
		{
			Name:    "A slice written by hand may leave out the node of a pod",
			Objects: []Object{Service{Endpoints: []Endpoint{{On: "a0", NoNode: true}, {On: "b0", NoNode: true}}}},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: Spread(AnySource, "a0", "b0")},
				{From: "c", To: ClusterIP, Want: Spread(AnySource, "a0", "b0")},
			},
		},
		{
			Name: "Headless and ExternalName Services are ignored",
			Objects: []Object{
				Service{Endpoints: On("b0")},
				Service{Name: "headless", Headless: true, Endpoints: On("a0")},
				Service{Name: "alias", ExternalName: true, Via: []string{"a"}},
			},
			Flows: []Flow{
				{From: "a1", To: ClusterIP, Want: OneOf(Kept, "b0")},
				{From: "a1", To: Address("a0", 80), Want: Reject},
				{From: "a1", To: ClusterIP.Of("headless"), Want: Unserved},
				{From: "client0", To: ExternalIP("a").Of("alias"), Want: Unserved},
			},
		},
		singleStack("4", V4, V6), singleStack("6", V6, V4),
	}
}

func severalPorts() Case {
	return Case{
		Name: "Several named ports lead to the target port of the same name",
		Objects: []Object{Service{
			Type: corev1.ServiceTypeNodePort,
			Ports: []Port{
				{Name: "web", Protocol: tcp, Port: 80, Target: 8080},
				{Name: "admin", Protocol: tcp, Port: 81, Target: 8081},
				{Name: "query", Protocol: udp, Port: 81, Target: 8081},
			},
			Endpoints: On("a0"),
		}},
		Flows: []Flow{
			{From: "b1", To: ClusterIP.At("web"), Want: OneOf(Kept, "a0")},
			{From: "b1", To: ClusterIP.At("admin"), Want: OneOf(Kept, "a0:8081")},
			{From: "b1", To: ClusterIP.At("query"), Want: OneOf(Kept, "a0:8081")},
			{From: "client0", To: NodePort("b").At("web"), Want: OneOf(KeptHere, "a0")},
			{From: "client0", To: NodePort("b").At("admin"), Want: OneOf(KeptHere, "a0:8081")},
			{From: "client0", To: NodePort("b").At("query"), Want: OneOf(KeptHere, "a0:8081")},
		},
	}
}

// singleStack is a Service of one family, served while the other is not.
func singleStack(family string, served, not []Combo) Case {
	return Case{
		Name:      "A Service of IPv" + family + " alone is served in that family alone",
		FilesOnly: "an API server gives a NodePort to one Service, whatever the families",
		Objects: []Object{
			Service{Type: corev1.ServiceTypeNodePort, Families: family, Endpoints: On("a0")},
			// Takes the same NodePorts for itself in the other family.
			Service{Name: "other", Type: corev1.ServiceTypeNodePort, Families: otherFamily(family), SharePort: "web", Endpoints: On("b0")},
		},
		Flows: []Flow{
			{From: "a1", To: ClusterIP, Only: served, Want: OneOf(Kept, "a0")},
			{From: "client0", To: NodePort("a"), Only: served, Want: OneOf(KeptHere, "a0")},
			{From: "client0", To: NodePort("a").Of("other"), Only: not, Want: OneOf(KeptHere, "b0")},
		},
	}
}

func otherFamily(family string) string {
	if family == "4" {
		return "6"
	}
	return "4"
}
