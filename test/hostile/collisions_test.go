package hostile

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/decisions/intent"
)

// collision draws objects of the tenant that name something of others. They would take it if one
// rule of the product failed: the tenant's endpoint answers at whatever the tenant gets.
type collision struct {
	name string
	// note says what an API server refuses, or who else writes it; "": the tenant may write it.
	note string
	draw func(g *tenant) []any
}

// What collisions ask for.
var (
	servicePort   = []int32{80}
	endpointPorts = []int32{endpointUp, policedPort}
	reservedPorts = []int32{179, 2379, 2380, 4789, 6081, 8472, 10249, 10250, 10256, 51820}
	honestNames   = []string{"tight", "moving", "policed", "old", "young", "named", "local", "far", "denied"}
)

const byController, byAPIServer, byKubelet = "a controller writes it", "an API server refuses it", "a kubelet writes it"

// collisions have an order, which names their objects. A tenant draws each once before it draws
// one again.
var collisions = []collision{
	{name: "externalIPs of Services", draw: func(g *tenant) []any {
		return g.grab(servicePort, func(o *corev1.Service) {
			o.Spec.ExternalIPs = texts(g.their.clusterIPs, g.their.external, g.their.young)
		})
	}},
	{name: "externalIPs of Pods", draw: func(g *tenant) []any {
		return g.grab(endpointPorts, func(o *corev1.Service) { o.Spec.ExternalIPs = texts(g.their.pods, g.their.ranged) })
	}},
	{name: "externalIPs of nodes", draw: func(g *tenant) []any {
		return g.grab(reservedPorts, func(o *corev1.Service) { o.Spec.ExternalIPs = texts(g.their.machines) })
	}},
	{name: "load balancers at Services", note: byController, draw: func(g *tenant) []any {
		return g.grab(servicePort, func(o *corev1.Service) { balanceAt(o, g.their.clusterIPs, g.their.balancers) })
	}},
	{name: "load balancers at nodes", note: byController, draw: func(g *tenant) []any {
		return g.grab(reservedPorts, func(o *corev1.Service) { balanceAt(o, g.their.machines) })
	}},
	{name: "NodePorts", note: byAPIServer, draw: func(g *tenant) []any {
		return g.grab(g.their.nodePorts, func(o *corev1.Service) {
			o.Spec.Type = corev1.ServiceTypeNodePort
			for i := range o.Spec.Ports {
				o.Spec.Ports[i].NodePort = o.Spec.Ports[i].Port
			}
		})
	}},
	{name: "healthCheckNodePort", note: byAPIServer, draw: func(g *tenant) []any {
		return g.grab([]int32{8081}, func(o *corev1.Service) {
			balanceAt(o)
			o.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
			o.Spec.HealthCheckNodePort = one(g, g.their.nodePorts, []int32{g.their.healthPort}, []int32{10249, 10256})
		})
	}},
	{name: "names of others", draw: (*tenant).namesakes},
	{name: "false endpoints", draw: func(g *tenant) []any { return append(g.lead(endpointPorts, g.their.pods), g.allPolicy()) }},
	{name: "endpoints at Services", draw: func(g *tenant) []any {
		return g.lead(servicePort, slices.Concat(g.their.clusterIPs, g.their.external, g.their.young))
	}},
	{name: "endpoints at nodes", draw: func(g *tenant) []any { return g.lead([]int32{80, endpointUp, 10250, 10256}, g.their.nodes) }},
	{name: "endpoints twice", draw: func(g *tenant) []any {
		both := g.lead(endpointPorts, g.their.pods)
		return append(both, g.slicesOf(both[0].(*corev1.Service).Name, "again", endpointPorts, 0, g.lie, g.their.pods)...)
	}},
	{name: "Pods with addresses of others", note: byKubelet, draw: (*tenant).otherPods},
	{name: "host ports", draw: (*tenant).hostPorts},
	{name: "source ranges", draw: (*tenant).manyRanges},
	{name: "many Services", draw: (*tenant).manyServices},
	{name: "a way around policies", draw: func(g *tenant) []any {
		o := g.serviceOf(0, servicePort)
		o.Spec.ClusterIPs = texts(aroundIPs)
		sure := func(a netip.Addr) discoveryv1.Endpoint {
			e := g.lie(a)
			e.Conditions = discoveryv1.EndpointConditions{}
			if !g.chance(4) { // the Pod is there, and no policy selects it
				e.NodeName, e.TargetRef = ptr("node0"), &corev1.ObjectReference{Kind: "Pod", Namespace: honestNamespace,
					Name: draw(g, "a0", "a1", "a2")}
			}
			return e
		}
		return append([]any{o}, g.slicesOf(o.Name, o.Name, servicePort, policedPort, sure, g.their.policed)...)
	}},
}

func balanceAt(o *corev1.Service, lists ...[]netip.Addr) {
	o.Spec.Type = corev1.ServiceTypeLoadBalancer
	for _, a := range texts(lists...) {
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress,
			corev1.LoadBalancerIngress{IP: a, IPMode: ptr(corev1.LoadBalancerIPModeVIP)})
	}
}

// policedPort is the port of Pods that policies protect.
const policedPort = 8090

// aroundIPs are those of the tenant's Service that leads to Pods with a policy.
var aroundIPs = []netip.Addr{netip.MustParseAddr("10.96.204.1"), netip.MustParseAddr("fd96::cc01")}

// collide draws the objects of a collision, or deletes them. It describes that, and returns how many
// objects it has drawn.
func (g *tenant) collide() (change string, objects int) {
	if len(g.deck) == 0 {
		g.deck = g.r.Perm(len(collisions))
	}
	g.place, g.deck = g.deck[0], g.deck[1:]
	c := collisions[g.place]
	key := "collision: " + c.name
	if g.docs[key] != "" && g.chance(4) {
		delete(g.docs, key)
		return key + " is deleted", 0
	}
	g.legal = true
	var text []string
	for _, o := range c.draw(g) {
		doc, err := yaml.Marshal(o)
		if err != nil {
			panic(err) // a type of this file
		}
		text = append(text, string(doc))
	}
	g.docs[key] = strings.Join(text, "---\n")
	if c.note != "" {
		key += "; " + c.note
	}
	return key, len(text)
}

func texts(lists ...[]netip.Addr) (out []string) {
	for _, a := range slices.Concat(lists...) {
		out = append(out, a.String())
	}
	return out
}

// serviceOf is the tenant's i-th Service of the collision that is drawn.
func (g *tenant) serviceOf(i int, ports []int32) *corev1.Service {
	o := &corev1.Service{TypeMeta: typeOf("v1", "Service"), ObjectMeta: g.meta(fmt.Sprintf("c%d-%d", g.place, i))}
	o.Spec.Type = corev1.ServiceTypeClusterIP
	o.Spec.ClusterIPs = []string{fmt.Sprintf("10.96.%d.%d", 210+g.place, 1+i), fmt.Sprintf("fd96::%x", 0xd000+16*g.place+i)}
	for _, port := range ports {
		for _, p := range bothProtocols {
			o.Spec.Ports = append(o.Spec.Ports, corev1.ServicePort{Name: portName(p, port), Protocol: p, Port: port})
		}
	}
	return o
}

var bothProtocols = []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP}

func portName(p corev1.Protocol, port int32) string {
	return fmt.Sprintf("%s-%d", strings.ToLower(string(p)), port)
}

// slicesOf are EndpointSlices, of each family, with all endpoints. Ports lead to target, or
// to their own number if it is 0.
func (g *tenant) slicesOf(service, name string, ports []int32, target int32, endpoints func(netip.Addr) discoveryv1.Endpoint,
	at []netip.Addr) (out []any) {
	for _, v6 := range []bool{false, true} {
		o := &discoveryv1.EndpointSlice{TypeMeta: typeOf("discovery.k8s.io/v1", "EndpointSlice"),
			ObjectMeta: g.meta(fmt.Sprintf("%s-%t", name, v6))}
		o.Labels[discoveryv1.LabelServiceName] = service
		o.AddressType = map[bool]discoveryv1.AddressType{false: discoveryv1.AddressTypeIPv4, true: discoveryv1.AddressTypeIPv6}[v6]
		for _, a := range at {
			if a.Is6() == v6 {
				o.Endpoints = append(o.Endpoints, endpoints(a))
			}
		}
		for _, port := range ports {
			for _, p := range bothProtocols {
				o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: ptr(portName(p, port)), Protocol: &p, Port: ptr(cmp.Or(target, port))})
			}
		}
		out = append(out, o)
	}
	return out
}

// ready is an endpoint of the tenant's own.
func ready(a netip.Addr) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{a.String()}, NodeName: ptr("node0")}
}

// grab is a Service that leads to the tenant's own endpoints.
func (g *tenant) grab(ports []int32, change func(*corev1.Service)) []any {
	o := g.serviceOf(0, ports)
	change(o)
	return append([]any{o}, g.slicesOf(o.Name, o.Name, ports, endpointUp, ready, g.their.own)...)
}

// lead is a Service that leads to addresses of others. Their EndpointSlices say anything of them.
func (g *tenant) lead(ports []int32, at []netip.Addr) []any {
	o := g.serviceOf(0, ports)
	return append([]any{o}, g.slicesOf(o.Name, o.Name, ports, 0, g.lie, at)...)
}

// lie is an endpoint of others with false conditions, node and Pod.
func (g *tenant) lie(a netip.Addr) discoveryv1.Endpoint {
	state := draw(g, [3]bool{true, true, false}, [3]bool{false, true, true}, [3]bool{false, false, true}, [3]bool{false, false, false})
	e := discoveryv1.Endpoint{
		Addresses:  []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: &state[0], Serving: &state[1], Terminating: &state[2]},
	}
	if node := draw(g, "node0", "node0", "node1", "node1", "gone", ""); node != "" {
		e.NodeName = &node
	}
	if g.chance(2) {
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: draw(g, tenantNamespace, honestNamespace),
			Name: draw(g, "p0", "a0", "b1", selected)}
	}
	return e
}

// allPolicy selects all Pods of the namespace.
func (g *tenant) allPolicy() any {
	o := &networkingv1.NetworkPolicy{TypeMeta: typeOf("networking.k8s.io/v1", "NetworkPolicy"), ObjectMeta: g.meta(fmt.Sprint("c", g.place))}
	o.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	return o
}

// namesakes are Services with the names of others', and EndpointSlices alone with such labels.
func (g *tenant) namesakes() (out []any) {
	for i, name := range honestNames {
		if g.chance(2) {
			o := g.serviceOf(i, servicePort)
			o.Name, o.Annotations = name, map[string]string{intent.LocalRedirectAnnotation: draw(g, honestNames...)}
			out = append(out, o)
		}
		slices := g.slicesOf(name, fmt.Sprintf("c%d-%d", g.place, i), servicePort, endpointUp, ready, g.their.own)
		for _, s := range slices { // names of ports as in honest Services
			for j := range s.(*discoveryv1.EndpointSlice).Ports {
				p := &s.(*discoveryv1.EndpointSlice).Ports[j]
				p.Name = ptr(strings.ToLower(string(*p.Protocol)))
			}
		}
		out = append(out, slices...)
	}
	return out
}

// hostPorts are Pods on each node that want the ports of others there.
func (g *tenant) hostPorts() (out []any) {
	for i, node := range []string{"node0", "node1"} {
		o := &corev1.Pod{TypeMeta: typeOf("v1", "Pod"), ObjectMeta: g.meta(fmt.Sprintf("c%d-%d", g.place, i))}
		o.Labels["addresses"] = "own"
		o.Spec.NodeName, o.Status.Phase = node, corev1.PodRunning
		for _, a := range g.their.own {
			o.Status.PodIPs = append(o.Status.PodIPs, corev1.PodIP{IP: a.String()})
		}
		c := corev1.Container{Name: "c", Image: "none"}
		add := func(port int32, at string) {
			for _, p := range bothProtocols {
				c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: endpointUp, HostPort: port, Protocol: p, HostIP: at})
			}
		}
		for _, port := range slices.Concat(reservedPorts, g.their.nodePorts, []int32{g.their.healthPort}) {
			add(port, draw(g, "", "", one(g, g.their.machines).String()))
		}
		for _, a := range slices.Concat(g.their.clusterIPs, g.their.external, g.their.young) {
			add(80, a.String())
		}
		for _, a := range g.their.pods {
			add(endpointUp, a.String())
		}
		o.Spec.Containers = []corev1.Container{c}
		out = append(out, o)
	}
	return out
}

// otherPods have addresses of others.
func (g *tenant) otherPods() []any {
	out := []any{g.allPolicy()}
	for i, a := range g.their.pods {
		o := &corev1.Pod{TypeMeta: typeOf("v1", "Pod"), ObjectMeta: g.meta(fmt.Sprintf("c%d-%d", g.place, i))}
		o.Labels["addresses"] = "others"
		o.Spec.NodeName, o.Status.Phase = draw(g, "node0", "node1"), corev1.PodRunning
		o.Status.PodIPs = []corev1.PodIP{{IP: a.String()}}
		o.Spec.Containers = []corev1.Container{{Name: "c", Image: "none"}}
		out = append(out, o)
	}
	return out
}

// manyRanges are Services that together ask for more source ranges than a node has room for.
func (g *tenant) manyRanges() (out []any) {
	ports := make([]int32, draw(g, 4, 64))
	for i := range ports {
		ports[i] = int32(80 + i)
	}
	for i := range 6 {
		o := g.serviceOf(i, ports)
		o.Spec.Type = corev1.ServiceTypeLoadBalancer
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", 110+i)},
			{IP: fmt.Sprintf("2001:db8:ff::7%02x", i)}}
		for range 32 {
			n := g.r.IntN(1 << 16)
			o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, fmt.Sprintf("198.18.%d.%d/32", n>>8, n&255),
				fmt.Sprintf("2001:db8:2:%x::/64", n))
		}
		out = append(out, o)
		out = append(out, g.slicesOf(o.Name, o.Name, ports, endpointUp, ready, g.their.own)...)
	}
	return out
}

// manyServices are as many as others notice.
func (g *tenant) manyServices() (out []any) {
	for i := range 12 {
		ports := make([]int32, 1+g.r.IntN(8))
		for j := range ports {
			ports[j] = int32(80 + j)
		}
		o := g.serviceOf(i, ports)
		out = append(append(out, o), g.slicesOf(o.Name, o.Name, ports, endpointUp, ready, g.their.own)...)
	}
	return out
}
