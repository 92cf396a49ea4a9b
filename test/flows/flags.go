package flows

import corev1 "k8s.io/api/core/v1"

// FlagCases are about agents that were started with other flags:
//
//	a  --nodeport-addresses=<the LAN> --localhost-nodeports --bypass=never
//	b  --service-proxy-name=spillway --allow-external-ips=false
//	c  --masquerade-all --localhost-nodeports --host-ports
func FlagCases() []Case {
	np := Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0", "b0")}
	labeled := np
	labeled.ProxyName = "spillway"
	external, refused := Service{Via: []string{"a"}, Endpoints: On("a0", "b0")}, labeled
	refused.Via = []string{"b"}
	loopback := []Flow{
		{From: "c", To: NodePort("c").On("loopback"), Want: Spread(AnySource, "a0", "c0", "c")},
		{From: "c/host", To: NodePort("c").On("loopback"), Want: Spread(AnySource, "a0", "c0", "c")},
	}
	for _, f := range []Flow{{Unconnected: true}, {Mapped: true}, {Unconnected: true, Mapped: true}} {
		f.From, f.To, f.Want = loopback[0].From, loopback[0].To, loopback[0].Want
		loopback = append(loopback, f)
	}
	return []Case{
		{
			Name:    "With the flag for it, processes of the node have NodePorts on loopback",
			Modes:   []string{"ebpf"},
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0", "c0", "c")}},
			Flows: append(loopback,
				Flow{From: "c", To: NodePort("c").On("loopback"), Unconnected: true, SameSocket: true, Want: OneOf(AnySource, "a0", "c0", "c")},
				Flow{From: "c1", To: NodePort("c").On("loopback"), Want: Reject},
			),
		},
		{
			Name:    "Host ports are not on loopback, also with the flag for NodePorts",
			Objects: []Object{HostPorts{"c0", 18081}},
			Flows: []Flow{
				{From: "c", To: Address("c", 18081).On("loopback"), Want: Reject},
				{From: "c/host", To: Address("c", 18081).On("loopback"), Want: Reject},
				{From: "c", To: Address("c", 18081), Want: OneOf(AnySource, "c0")},
				{From: "client0", To: Address("c", 18081), Want: OneOf(NodeSource, "c0")},
			},
		},
		{
			Name:    "NodePorts are not on loopback if the address flag names other addresses",
			Objects: []Object{np},
			Flows:   []Flow{{From: "a", To: NodePort("a").On("loopback"), Want: Reject}},
		},
		{
			Name:    "A NodePort without endpoints is refused on loopback",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort}},
			Flows:   []Flow{{From: "c", To: NodePort("c").On("loopback"), Want: Reject}},
		},
		{
			Name:  "On loopback a NodePort of policy Local has the endpoints of all nodes",
			Modes: []string{"ebpf"},
			Objects: []Object{Service{
				Type: corev1.ServiceTypeNodePort, ExternalLocal: true, Endpoints: On("a0", "b0"),
			}},
			Flows: []Flow{{From: "c", To: NodePort("c").On("loopback"), Want: Spread(AnySource, "a0", "b0")}},
		},
		{
			Name:    "NodePorts are served on the addresses that the flag names and no others",
			Objects: []Object{np},
			Flows: []Flow{
				{From: "client0", To: NodePort("a"), Want: Spread(KeptHere, "a0", "b0")},
				{From: "a", To: NodePort("a"), Want: Spread(AnySource, "a0", "b0")},
				{From: "a", To: NodePort("a").On("bridge"), Want: Reject},
				{From: "a1", To: NodePort("a").On("bridge"), Want: Reject},
			},
		},
		{
			Name: "Health check ports are open on the addresses that the flag names and no others",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeLoadBalancer, ExternalLocal: true, Via: []string{"a"}, Endpoints: On("a0"),
			}},
			Flows: []Flow{
				{From: "client0", To: HealthCheck("a"), Want: Status(200)},
				{From: "a", To: HealthCheck("a").On("bridge"), Want: Reject},
			},
		},
		{
			Name:    "A named proxy serves labeled Services",
			Objects: []Object{labeled},
			Flows: []Flow{
				{From: "b1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")},
				{From: "client0", To: NodePort("b"), Want: Spread(KeptHere, "a0", "b0")},
				{From: "a1", To: ClusterIP, Want: Unserved},
				{From: "client0", To: NodePort("a"), Want: Reject},
			},
		},
		{
			Name:    "A named proxy leaves all other Services alone",
			Objects: []Object{np},
			Flows: []Flow{
				{From: "b1", To: ClusterIP, Want: Unserved},
				{From: "client0", To: NodePort("b"), Want: Reject},
				{From: "a1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")},
			},
		},
		{
			Name:    "externalIPs are served unless a flag disables them",
			Objects: []Object{external},
			Flows:   []Flow{{From: "client0", To: ExternalIP("a"), Want: Spread(KeptHere, "a0", "b0")}},
		},
		{
			Name:    "An agent that refuses externalIPs serves the Service's other addresses",
			Objects: []Object{refused},
			Flows: []Flow{
				{From: "client0", To: ExternalIP("b"), Want: Unserved},
				{From: "b1", To: ExternalIP("b"), Want: Unserved},
				{From: "b1", To: ClusterIP, Want: Spread(Kept, "a0", "b0")},
				{From: "client0", To: NodePort("b"), Want: Spread(KeptHere, "a0", "b0")},
			},
		},
		{
			Name:    "With the flag for it every Service packet gets the node's address",
			Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0", "c0")}},
			Flows: []Flow{
				{From: "client0", To: NodePort("c"), Want: Spread(NodeSource, "a0", "c0")},
				{From: "c1/vm", To: ClusterIP, Want: Spread(NodeSource, "a0", "c0")},
			},
		},
		{
			Name: "Without a bypass netfilter sees every packet to a pod",
			Objects: []Object{Service{
				Type: corev1.ServiceTypeNodePort, Ports: policedPorts, Endpoints: On("a3"),
			}, Pods{"a3"}},
			Rules: map[string][]string{"a": {
				"ip daddr ${a3} meta l4proto { tcp, udp } th dport 8090 drop",
				"ip6 daddr ${a3.6} meta l4proto { tcp, udp } th dport 8090 drop",
			}},
			Flows: []Flow{{From: "client0", To: NodePort("a"), Want: Drop}},
		},
	}
}
