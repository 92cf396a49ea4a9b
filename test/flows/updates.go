package flows

import corev1 "k8s.io/api/core/v1"

// updateCases are about fields of a Service that change while it is served.
func updateCases() []Case {
	return []Case{
		{
			Name:    "A Service that changes its type is served at the addresses of the new type alone",
			Objects: []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: On("a0")}},
			Flows:   typeFlows(true, true, true),
			Then: []Step{
				{Name: "ClusterIP", Objects: []Object{Service{Endpoints: On("a0")}}, Flows: typeFlows(true, false, false)},
				{Name: "NodePort", Objects: []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0")}},
					Flows: typeFlows(true, true, false)},
				{Name: "ExternalName", Objects: []Object{Service{ExternalName: true, Endpoints: On("a0")}}, Flows: typeFlows(false, false, false)},
				{
					Name:    "LoadBalancer again",
					Objects: []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: On("a0")}},
					Flows:   typeFlows(true, true, true),
				},
				{
					Name:    "a load balancer of mode Proxy",
					Objects: []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, ProxyMode: true, Endpoints: On("a0")}},
					Flows:   typeFlows(true, true, false),
				},
			},
		},
		changedRanges(), changedFamilies(), changedNodePort(), changedPorts(), changedHealthCheck(), lateAddress(), deletedUDP(),
	}
}

// typeFlows ask for a Service of a0 at each kind of address.
func typeFlows(clusterIP, nodePort, loadBalancer bool) []Flow {
	want := func(served bool, s Source, otherwise Want) Want {
		if served {
			return OneOf(s, "a0")
		}
		return otherwise
	}
	return []Flow{
		{From: "a1", To: ClusterIP, Want: want(clusterIP, Kept, Unserved)},
		{From: "b", To: ClusterIP, Want: want(clusterIP, Kept, Unserved)},
		{From: "client0", To: NodePort("b"), Want: want(nodePort, KeptHere, Reject)},
		{From: "client0", To: LoadBalancer("a"), Want: want(loadBalancer, KeptHere, Unserved)},
		{From: "c1", To: LoadBalancer("a"), Want: want(loadBalancer, AnySource, Unserved)},
	}
}

func changedRanges() Case {
	allow := func(hosts ...string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, AllowFrom: hosts, Endpoints: On("a0")}}
	}
	ask := func(from string, want Want) Flow { return Flow{From: from, To: LoadBalancer("a"), Want: want} }
	served := OneOf(KeptHere, "a0")
	open := Flow{From: "client1", To: LoadBalancer("a"), Only: TCP, Keep: "s", Want: served}
	return Case{
		Name:    "Changed source ranges count for new connections",
		Objects: allow(), Flows: []Flow{ask("client0", served), ask("client1", served), ask("b", OneOf(AnySource, "a0")), open},
		Then: []Step{
			{Name: "client0", Objects: allow("client0"), Flows: []Flow{ask("client0", served), ask("client1", Drop), ask("b", Drop), open}},
			{Name: "client1 and b", Objects: allow("client1", "b"),
				Flows: []Flow{ask("client0", Drop), ask("client1", served), ask("b", OneOf(AnySource, "a0")), open}},
			{Name: "without ranges", Objects: allow(), Flows: []Flow{ask("client0", served), open}},
		},
	}
}

// elsewhere is a Service of another proxy with the addresses of the case's first one, for targets
// that the first one does not have.
func elsewhere() Service {
	return Service{Name: "elsewhere", Type: corev1.ServiceTypeNodePort, ProxyName: "somebody-else", ShareIP: "web", SharePort: "web"}
}

func changedFamilies() Case {
	with := func(families string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Families: families, Endpoints: On("a0")}, elsewhere()}
	}
	served := []Flow{
		{From: "a1", To: ClusterIP, Want: OneOf(Kept, "a0")},
		{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a0")},
	}
	return Case{
		Name:      "A dual-stack Service that becomes single-stack is no longer served in the other family",
		FilesOnly: "an API server gives a cluster IP to one Service",
		Objects:   with(""), Flows: served,
		Then: []Step{
			{Name: "IPv4", Objects: with("4"), Flows: append([]Flow{
				{From: "a1", To: ClusterIP.Of("elsewhere"), Only: V6, Want: Unserved},
				{From: "client0", To: NodePort("a").Of("elsewhere"), Only: V6, Want: Reject},
			}, served...)},
			{Name: "both", Objects: with(""), Flows: served},
			{Name: "IPv6", Objects: with("6"), Flows: append([]Flow{
				{From: "a1", To: ClusterIP.Of("elsewhere"), Only: V4, Want: Unserved},
				{From: "client0", To: NodePort("a").Of("elsewhere"), Only: V4, Want: Reject},
			}, served...)},
		},
	}
}

func changedNodePort() Case {
	at := func(port string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, SharePort: port, Endpoints: On("a0")}, elsewhere()}
	}
	served := Flow{From: "client0", To: NodePort("a"), Want: OneOf(KeptHere, "a0")}
	return Case{
		Name:      "A NodePort that becomes another one is refused at the old number",
		FilesOnly: "an API server gives a NodePort to one Service",
		Objects:   at(""), Flows: []Flow{served},
		Then: []Step{
			{Name: "another", Objects: at("other"), Flows: []Flow{served, {From: "client0", To: NodePort("a").Of("elsewhere"), Want: Reject}}},
			{Name: "the first again", Objects: at(""), Flows: []Flow{served}},
		},
	}
}

// changedPorts exchanges what two ports of a Service share: numbers, targets, and both.
func changedPorts() Case {
	with := func(web, admin, webTarget, adminTarget int32) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On("a0"), Ports: []Port{
			{Name: "web", Protocol: tcp, Port: web, Target: webTarget}, {Name: "admin", Protocol: tcp, Port: admin, Target: adminTarget},
			{Name: "web-udp", Protocol: udp, Port: web, Target: webTarget}, {Name: "admin-udp", Protocol: udp, Port: admin, Target: adminTarget},
		}}}
	}
	// flows have the servers of the ports web and admin, and the name of UDP port 80.
	flows := func(web, admin, at80, server80 string) []Flow {
		return []Flow{
			{From: "b1", To: ClusterIP.At("web"), Want: OneOf(Kept, web)},
			{From: "b1", To: ClusterIP.At("admin"), Want: OneOf(Kept, admin)},
			{From: "client0", To: NodePort("b").At("web"), Want: OneOf(KeptHere, web)},
			{From: "client0", To: NodePort("a").At("admin-udp"), Want: OneOf(KeptHere, admin)},
			{From: "client0", To: NodePort("a").At("web-udp"), Keep: "w", Want: OneOf(KeptHere, web)},
			{From: "b1/vm", To: ClusterIP.At(at80), Keep: "80", Want: OneOf(Kept, server80)},
			{From: "b", To: ClusterIP.At(at80), Keep: "80", Unconnected: true, Want: OneOf(Kept, server80)},
		}
	}
	const first, second = "a0", "a0:8081"
	return Case{
		Name:    "Two ports of a Service that exchange numbers or targets lead to the new targets, with open UDP flows",
		Objects: with(80, 81, 8080, 8081), Flows: flows(first, second, "web-udp", first),
		Then: []Step{
			{Name: "numbers", Objects: with(81, 80, 8080, 8081), Flows: flows(first, second, "admin-udp", second)},
			{Name: "targets", Objects: with(81, 80, 8081, 8080), Flows: flows(second, first, "admin-udp", first)},
			{Name: "both", Objects: with(80, 81, 8080, 8081), Flows: flows(first, second, "web-udp", first)},
		},
	}
}

func changedHealthCheck() Case {
	with := func(local bool) []Object {
		return []Object{Service{Type: corev1.ServiceTypeLoadBalancer, ExternalLocal: local, Via: []string{"a"}, Endpoints: On("a0")}}
	}
	ask := func(want Want) []Flow { return []Flow{{From: "client0", To: HealthCheck("a"), Want: want}} }
	return Case{
		Name:    "The health check port closes when the policy becomes Cluster",
		Objects: with(true), Flows: ask(Status(200)),
		Then: []Step{
			{Name: "Cluster", Objects: with(false), Flows: ask(Reject)},
			{Name: "Local again", Objects: with(true), Flows: ask(Status(200))},
		},
	}
}

// lateAddress sends datagrams to an address before it is a load balancer's: conntrack then has
// an entry without a translation.
func lateAddress() Case {
	flows := func(want Want) []Flow {
		return []Flow{
			{From: "client0", To: LoadBalancer("a"), Only: UDP, Keep: "s", Want: want},
			{From: "a1", To: LoadBalancer("a"), Only: UDP, Keep: "s", Unconnected: true, Want: want},
			{From: "c1/vm", To: LoadBalancer("a"), Only: UDP, Keep: "s", Want: want},
			{From: "b", To: LoadBalancer("a"), Only: UDP, Keep: "s", Unconnected: true, Want: want},
		}
	}
	with := func(via ...string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeLoadBalancer, Via: via, Endpoints: On("b0")}}
	}
	return Case{
		Name:    "A UDP flow that began before its load balancer had the address is served",
		Objects: with(), Flows: flows(Unserved),
		Then: []Step{{Name: "with the address", Objects: with("a"), Flows: flows(OneOf(AnySource, "b0"))}},
	}
}

func deletedUDP() Case {
	with := func(server string) []Object {
		return []Object{Service{Type: corev1.ServiceTypeNodePort, Endpoints: On(server)}}
	}
	flows := func(outside, inside Want) []Flow {
		return []Flow{
			{From: "client0", To: NodePort("a"), Only: UDP, Keep: "s", Want: outside},
			{From: "a1", To: ClusterIP, Only: UDP, Keep: "s", Unconnected: true, Want: inside},
			{From: "c1/vm", To: ClusterIP, Only: UDP, Keep: "s", Want: inside},
			{From: "b", To: ClusterIP, Only: UDP, Keep: "s", Unconnected: true, Want: inside},
		}
	}
	return Case{
		Name:    "A UDP flow of a Service that is deleted is served again when it is back",
		Objects: with("a0"), Flows: flows(OneOf(KeptHere, "a0"), OneOf(Kept, "a0")),
		Then: []Step{
			{Name: "deleted", Objects: gone("web"), Flows: flows(Unserved, Unserved)},
			{Name: "back", Objects: with("b0"), Flows: flows(OneOf(KeptHere, "b0"), OneOf(AnySource, "b0"))},
		},
	}
}
