package hostile

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// tenant draws the objects of one namespace. Most are such that an API server accepts them. What
// it refuses, or what only a controller or a kubelet may write, is drawn by refused; an agent that
// reads files has no API server before it.
type tenant struct {
	r     *rand.Rand
	their addresses
	docs  map[string]string // manifests by kind and name
	// legal says that the object that is drawn has nothing to refuse; notes say what it has.
	legal bool
	notes []string
	deck  []int // the collisions that are left to draw
	place int   // of the collision that is drawn
}

// addresses are those of other namespaces and of the cluster's machines.
type addresses struct {
	clusterIPs, external, young []netip.Addr // of honest Services: see honestObjects
	balancers                   []netip.Addr // those of external that a load balancer has
	nodePorts                   []int32      // of honest Services that are older than the tenant's
	healthPort                  int32
	pods, nodes, clients        []netip.Addr
	machines                    []netip.Addr // those of nodes that a Node object has
	policed                     []netip.Addr // those of pods that policies protect
	ranged                      []netip.Addr // of a pod that nothing else of the tenant names
	own                         []netip.Addr // of a Pod of the tenant
}

// tenantNamespace has the longest name that there may be.
var tenantNamespace = strings.Repeat("t", 63)

// longest is a name of the longest length.
func longest(n int) string { return strings.Repeat("x", n) }

const nonsense = "a\nlevel=ERROR msg=\"forged\" \x1b[2J\u2028\u202e=,0/"

// chance is true once in n draws.
func (g *tenant) chance(n int) bool { return g.r.IntN(n) == 0 }

// refused is true once in 8 draws for one of 3 objects, and notes what an API server would refuse.
func (g *tenant) refused(what string) bool {
	if g.legal || !g.chance(8) {
		return false
	}
	g.notes = append(g.notes, what)
	return true
}

func draw[T any](g *tenant, list ...T) T { return list[g.r.IntN(len(list))] }

// one draws from the lists, each with equal chance.
func one[T any](g *tenant, lists ...[]T) T { return draw(g, draw(g, lists...)...) }

// own is an address of the tenant, of its Services or Pods.
func (g *tenant) own() netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf(draw(g, "10.96.200.%d", "fd96::c8%02x", "10.244.0.%d", "203.0.113.%d"), 100+g.r.IntN(8)))
}

// special is an address that no packet between machines carries, or no address.
func (g *tenant) special() string {
	return draw(g, "127.0.0.1", "::1", "0.0.0.0", "::", "169.254.169.254", "fe80::1", "224.0.0.1", "ff02::1", "255.255.255.255",
		"::ffff:10.96.0.10", "010.96.0.10", "10.96.0.10/32", "", nonsense)
}

// annotations are Spillway's, with legal values and nonsense: an API server accepts both.
func (g *tenant) annotations() map[string]string {
	out := map[string]string{}
	values := map[string][]string{
		intent.BalanceAnnotation:         {"random", "least", "latency", "maglev", "weighted"},
		intent.WeightsAnnotation:         {"*=3", "0.0.0.0/0=255,::/0=0", "10.244.0.2=0 *=200", strings.Repeat("*=1,", 100)},
		intent.SlowStartAnnotation:       {"30s", "1h", "-1s"},
		intent.ForwardingAnnotation:      {intent.SNAT, intent.Hybrid, intent.DSR},
		intent.HelperAnnotation:          {"tftp", "ftp", "80=ftp", "p0=tftp"},
		intent.LocalRedirectAnnotation:   {"s0", "s1", "moving"},
		intent.OutlierEjectionAnnotation: {"on", "off"},
		intent.SYNFilterAnnotation:       {"1", "65535", "0"},
		model.AnnotationPrefix + "other": {"on"},
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		switch {
		case !g.chance(5):
		case g.chance(6):
			out[name] = draw(g, "", nonsense, longest(100000))
		default:
			out[name] = draw(g, values[name]...)
		}
	}
	return out
}

// meta is that of an object; the tenant's objects are younger than most honest ones.
func (g *tenant) meta(name string) metav1.ObjectMeta {
	m := metav1.ObjectMeta{
		Namespace: tenantNamespace, Name: name, UID: types.UID(fmt.Sprintf("%032x", g.r.Uint64())),
		CreationTimestamp: metav1.NewTime(time.Date(2025, 1, 1+g.r.IntN(300), 0, 0, 0, 0, time.UTC)),
		Labels:            map[string]string{"app": draw(g, "x", "y", longest(63))},
	}
	if g.refused("no creationTimestamp") {
		m.CreationTimestamp = metav1.Time{}
	}
	return m
}

// The names of the tenant's objects. They are few, so that random objects meet.
var tenantNames = map[string][]string{
	"Service":          {"s0", "s1", "s2", "s3", "s4", longest(63)},
	"EndpointSlice":    {"e0", "e1", "e2", "e3", "e4", "e5", longest(253)},
	"Pod":              {"p0", "p1", "p2", longest(253)},
	"NetworkPolicy":    {"n0", longest(253)},
	"DoNotTrackPolicy": {"d0", "d1"},
}

// change creates, replaces or deletes an object, and describes it.
func (g *tenant) change() string {
	kind := draw(g, "Service", "Service", "Service", "EndpointSlice", "EndpointSlice", "EndpointSlice", "Pod", "Pod",
		"NetworkPolicy", "DoNotTrackPolicy")
	name := draw(g, tenantNames[kind]...)
	key := kind + " " + name[:min(len(name), 8)]
	g.legal, g.notes = !g.chance(3), nil
	if g.chance(4) {
		delete(g.docs, key)
		return key + " is deleted"
	}
	if g.chance(40) { // what a file has while its author writes
		g.docs[key] = draw(g, "kind: Service", "{", "\x00", nonsense,
			"apiVersion: v1\nkind: "+kind+"\nmetadata: {name: "+name+", namespace: "+tenantNamespace+"}\nspec: 7")
		return key + " is no object"
	}
	var object any
	switch kind {
	case "Service":
		object = g.service(name)
	case "EndpointSlice":
		object = g.slice(name)
	case "Pod":
		object = g.pod(name)
	case "NetworkPolicy":
		object = g.networkPolicy(name)
	case "DoNotTrackPolicy":
		object = g.doNotTrackPolicy(name)
	}
	text, err := yaml.Marshal(object)
	if err != nil {
		panic(err) // a type of this file
	}
	g.docs[key] = string(text)
	if len(g.notes) > 0 {
		slices.Sort(g.notes)
		return fmt.Sprintf("%s; an API server refuses: %q", key, slices.Compact(g.notes))
	}
	return key
}

// file is the manifest of all objects.
func (g *tenant) file() []byte {
	text := "apiVersion: v1\nkind: Namespace\nmetadata: {name: " + tenantNamespace + ", labels: {kubernetes.io/metadata.name: " +
		tenantNamespace + "}}\n"
	for _, key := range slices.Sorted(maps.Keys(g.docs)) {
		text += "---\n" + g.docs[key] + "\n"
	}
	return []byte(text)
}

// shortFile is file with short lines.
func (g *tenant) shortFile() string {
	var out strings.Builder
	for line := range strings.Lines(string(g.file())) {
		out.WriteString(strings.TrimSuffix(line[:min(len(line), 100)], "\n") + "\n")
	}
	return out.String()
}

func (g *tenant) service(name string) *corev1.Service {
	o := &corev1.Service{TypeMeta: typeOf("v1", "Service"), ObjectMeta: g.meta(name)}
	spec := &o.Spec
	o.Annotations = g.annotations()
	spec.Type = draw(g, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if g.refused("type") {
		spec.Type = nonsense
	}
	spec.ClusterIPs = []string{fmt.Sprintf("10.96.201.%d", g.r.IntN(20)), fmt.Sprintf("fd96::c9%02x", g.r.IntN(20))}
	switch {
	case g.refused("clusterIPs of another Service"):
		spec.ClusterIPs = []string{draw(g, g.their.clusterIPs...).String()}
	case g.refused("clusterIPs"):
		spec.ClusterIPs = append(spec.ClusterIPs, g.special())
	case g.chance(8):
		spec.ClusterIPs = []string{corev1.ClusterIPNone}
	case g.chance(4):
		spec.ClusterIPs = spec.ClusterIPs[:1]
	}
	atNode := g.externalIPs(spec)
	g.servicePorts(spec, atNode)
	g.policies(spec)
	if spec.Type == corev1.ServiceTypeLoadBalancer {
		g.balancer(o)
	}
	if g.chance(12) {
		o.Labels = map[string]string{draw(g, "service.kubernetes.io/service-proxy-name", corev1.IsHeadlessService): draw(g, "", "other")}
	}
	return o
}

// externalIPs reports whether one of them is an address of a node.
func (g *tenant) externalIPs(spec *corev1.ServiceSpec) (atNode bool) {
	t := &g.their
	for range g.r.IntN(4) {
		a := one(g, t.clusterIPs, t.external, t.young, t.pods, t.nodes, t.clients, []netip.Addr{g.own()})
		atNode = atNode || slices.Contains(t.nodes, a)
		spec.ExternalIPs = append(spec.ExternalIPs, a.String())
	}
	switch {
	case g.refused("externalIPs"):
		spec.ExternalIPs = append(spec.ExternalIPs, g.special())
	case g.chance(20):
		spec.ExternalIPs = append(spec.ExternalIPs, "239.1.2.3") // an API server accepts it
	}
	return atNode
}

// servicePorts draws up to three ports, or 64. An externalIP at a node's address takes NodePorts
// of that number from others, as with kube-proxy: see docs/reference/limits.md.
func (g *tenant) servicePorts(spec *corev1.ServiceSpec, atNode bool) {
	count := 1 + g.r.IntN(3)
	if g.chance(6) {
		count = 64
	}
	for i := range count {
		p := corev1.ServicePort{
			Name: fmt.Sprint("p", i), Protocol: draw(g, corev1.ProtocolTCP, corev1.ProtocolTCP, corev1.ProtocolUDP,
				corev1.ProtocolUDP, corev1.ProtocolSCTP),
			Port: draw[int32](g, 80, 80, 80, 1, 22, 443, 8080, 8080, 8090, 8472, 10249, 10250, 10256, 65535),
		}
		if !atNode && g.chance(8) {
			p.Port = draw(g, g.their.nodePorts...)
		}
		if count > 3 {
			p.Port = int32(1 + i)
		}
		if spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer {
			p.NodePort = int32(32600 + g.r.IntN(64))
			switch {
			case g.refused("nodePort of another Service"):
				p.NodePort = draw(g, g.their.nodePorts...)
			case g.refused("nodePort"):
				p.NodePort = draw[int32](g, 0, -1, 22, 8080, 10249, 10250, 33800, 70000)
			}
		}
		switch {
		case g.refused("port"):
			p.Port = draw[int32](g, 0, -1, 65536)
		case g.refused("port name"):
			p.Name = draw(g, "", nonsense, longest(64))
		case g.refused("protocol"):
			p.Protocol = nonsense
		}
		spec.Ports = append(spec.Ports, p)
	}
	if g.refused("no ports") {
		spec.Ports = nil
	}
}

func (g *tenant) policies(spec *corev1.ServiceSpec) {
	if g.chance(3) {
		seconds := draw[int32](g, 1, 10800, 86400)
		if g.refused("timeoutSeconds") {
			seconds = draw[int32](g, 0, -1, 86401)
		}
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	if g.chance(2) {
		internal := draw(g, corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceInternalTrafficPolicyCluster)
		spec.InternalTrafficPolicy = &internal
	}
	if g.chance(3) {
		distribution := draw(g, "PreferClose", "PreferSameNode", nonsense)
		spec.TrafficDistribution = &distribution
	}
	if spec.Type != corev1.ServiceTypeClusterIP && g.chance(2) {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if g.refused("externalTrafficPolicy") {
		spec.ExternalTrafficPolicy = nonsense
	}
}

// balancer adds what a load balancer has. Its controller writes the status.
func (g *tenant) balancer(o *corev1.Service) {
	if o.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal {
		o.Spec.HealthCheckNodePort = int32(32700 + g.r.IntN(4))
		if g.refused("healthCheckNodePort") {
			o.Spec.HealthCheckNodePort = one(g, g.their.nodePorts, []int32{8080, 10249, 10256, -1})
		}
	}
	for range draw(g, 0, 0, 1, 2, 32) {
		a := one(g, g.their.clients, g.their.pods, []netip.Addr{g.own()})
		o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, netip.PrefixFrom(a, g.r.IntN(a.BitLen()+1)).Masked().String())
	}
	if g.refused("loadBalancerSourceRanges") {
		o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, draw(g, "10.0.0.1/33", nonsense))
	}
	for range g.r.IntN(3) {
		ip := g.own().String()
		switch {
		case g.refused("status of a load balancer with an address of another Service"):
			ip = one(g, g.their.clusterIPs, g.their.external).String()
		case g.refused("status of a load balancer"):
			ip = g.special()
		}
		mode := draw(g, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
		o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: ip, IPMode: &mode})
	}
}

func (g *tenant) slice(name string) *discoveryv1.EndpointSlice {
	o := &discoveryv1.EndpointSlice{TypeMeta: typeOf("discovery.k8s.io/v1", "EndpointSlice"), ObjectMeta: g.meta(name)}
	// "moving" is an honest Service, of another namespace.
	o.Labels[discoveryv1.LabelServiceName] = one(g, tenantNames["Service"], tenantNames["Service"], []string{"moving", "gone"})
	if g.chance(12) {
		delete(o.Labels, discoveryv1.LabelServiceName)
	}
	o.AddressType = draw(g, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeIPv6,
		discoveryv1.AddressTypeFQDN)
	if g.refused("addressType") {
		o.AddressType = nonsense
	}
	if g.chance(4) {
		o.Annotations = map[string]string{kubeobject.WeightAnnotation: draw(g, "0", "7", "255", "-1", nonsense),
			corev1.EndpointsLastChangeTriggerTime: draw(g, "2099-01-01T00:00:00Z", nonsense)}
	}
	for range draw(g, 0, 1, 2, 3, 100) {
		o.Endpoints = append(o.Endpoints, g.endpoint(o.AddressType == discoveryv1.AddressTypeIPv6))
	}
	for i := range draw(g, 1, 3, 64) {
		port := draw[int32](g, 8080, 8080, 8081, 80, 9999)
		p := discoveryv1.EndpointPort{Name: ptr(fmt.Sprint("p", i)), Port: &port, Protocol: ptr(draw(g, corev1.ProtocolTCP, corev1.ProtocolUDP))}
		switch {
		case g.chance(20):
			p.Port = nil
		case g.refused("port of an EndpointSlice"):
			*p.Port = draw[int32](g, 0, -1, 65536)
		case g.refused("port name of an EndpointSlice"):
			p.Name = ptr(draw(g, "p0", nonsense))
		}
		o.Ports = append(o.Ports, p)
	}
	return o
}

func typeOf(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}

func ptr[T any](v T) *T { return &v }

// endpoint has an address of the family at another tenant's Pod, a node, a Service or elsewhere.
func (g *tenant) endpoint(v6 bool) discoveryv1.Endpoint {
	t := &g.their
	a := one(g, t.pods, t.pods, t.nodes, t.clusterIPs, t.external, t.clients, []netip.Addr{g.own()})
	for a.Is6() != v6 {
		a = one(g, t.pods, t.nodes, t.clusterIPs, t.external)
	}
	e := discoveryv1.Endpoint{
		Addresses:  []string{a.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: ptr(!g.chance(4)), Serving: ptr(!g.chance(4)), Terminating: ptr(g.chance(4))},
	}
	if !g.chance(4) {
		e.NodeName = ptr(draw(g, "node0", "node1", "gone", longest(253)))
		e.Zone = ptr(draw(g, "zone0", "zone1", ""))
		e.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: draw(g, tenantNamespace, honestNamespace),
			Name: draw(g, "p0", "a0", selected)}
	}
	if g.chance(4) {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: draw(g, "zone0", "zone1")}}}
	}
	switch {
	case g.refused("address of an endpoint"):
		e.Addresses[0] = g.special()
	case g.refused("no address of an endpoint"):
		e.Addresses = nil
	}
	return e
}

// pod may have addresses of others: a kubelet writes the status.
func (g *tenant) pod(name string) *corev1.Pod {
	o := &corev1.Pod{TypeMeta: typeOf("v1", "Pod"), ObjectMeta: g.meta(name)}
	o.Spec.NodeName = draw(g, "node0", "node1", "gone", "")
	o.Spec.HostNetwork = g.chance(8)
	o.Status.Phase = draw(g, corev1.PodRunning, corev1.PodRunning, corev1.PodPending, corev1.PodFailed)
	o.Annotations = map[string]string{kubeobject.SocketHooksAnnotation: draw(g, "on", "off", nonsense)}
	o.Labels["addresses"] = "own"
	for range g.r.IntN(3) {
		a := g.own()
		if g.chance(2) {
			g.notes = append(g.notes, "status of a Pod with an address of others")
			a = one(g, g.their.pods, g.their.nodes, g.their.clusterIPs)
			o.Labels["addresses"] = "others"
		}
		o.Status.PodIPs = append(o.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	if g.refused("status of a Pod") {
		o.Status.PodIPs = append(o.Status.PodIPs, corev1.PodIP{IP: g.special()})
	}
	c := corev1.Container{Name: "c", Image: "none"}
	for range g.r.IntN(3) {
		p := corev1.ContainerPort{
			ContainerPort: draw[int32](g, 80, 8080), Protocol: draw(g, corev1.ProtocolTCP, corev1.ProtocolUDP),
			HostPort: one(g, g.their.nodePorts, []int32{80, 8472, 10249, 10250, 10256, 32650, 33800}),
			HostIP:   draw(g, "", "", "0.0.0.0", "::", one(g, g.their.nodes, g.their.pods, g.their.clusterIPs, g.their.external).String()),
		}
		switch {
		case g.refused("hostIP"):
			p.HostIP = nonsense
		case g.refused("hostPort"):
			p.HostPort = draw[int32](g, -1, 65536)
		}
		c.Ports = append(c.Ports, p)
	}
	o.Spec.Containers = []corev1.Container{c}
	return o
}

// selector selects some or all Pods of the namespace.
func (g *tenant) selector() *metav1.LabelSelector {
	s := draw(g, &metav1.LabelSelector{}, &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}},
		&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "NotIn", Values: []string{"y"}}}})
	if g.refused("selector") {
		s.MatchExpressions = []metav1.LabelSelectorRequirement{{Key: nonsense, Operator: nonsense}}
	}
	return s
}

func (g *tenant) networkPolicy(name string) *networkingv1.NetworkPolicy {
	o := &networkingv1.NetworkPolicy{TypeMeta: typeOf("networking.k8s.io/v1", "NetworkPolicy"), ObjectMeta: g.meta(name)}
	o.Spec.PodSelector = *g.selector()
	o.Spec.PolicyTypes = draw(g, nil, []networkingv1.PolicyType{"Ingress"}, []networkingv1.PolicyType{"Ingress", "Egress"})
	if g.refused("policyTypes") {
		o.Spec.PolicyTypes = []networkingv1.PolicyType{nonsense}
	}
	return o
}

// doNotTrackPolicy is one that an administrator has made for the tenant's namespace. It denies
// nothing to Pods with addresses of others.
func (g *tenant) doNotTrackPolicy(name string) *v1alpha1.DoNotTrackPolicy {
	o := &v1alpha1.DoNotTrackPolicy{TypeMeta: typeOf(v1alpha1.SchemeGroupVersion.String(), "DoNotTrackPolicy"), ObjectMeta: g.meta(name)}
	o.Namespace = ""
	o.Spec.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"kubernetes.io/metadata.name": tenantNamespace}}
	o.Spec.PodSelector = g.selector()
	o.Spec.Track = g.chance(3)
	if g.chance(3) {
		o.Spec.Deny = ptr(v1alpha1.DenyOthers)
		o.Spec.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"addresses": "own"}}
	}
	ports := []v1alpha1.Port{{Protocol: draw(g, "TCP", "UDP"), Port: 8080, EndPort: draw(g, nil, ptr[int32](8090))}}
	if g.refused("ports of a DoNotTrackPolicy") {
		ports = draw(g, nil, []v1alpha1.Port{{Protocol: nonsense, Port: -1}})
	}
	peer := v1alpha1.Peer{IPBlock: &v1alpha1.IPBlock{CIDR: draw(g, "0.0.0.0/0", "::/0", "10.244.0.0/16")}}
	o.Spec.Ingress = []v1alpha1.IngressRule{{Ports: ports, From: draw(g, nil, []v1alpha1.Peer{peer})}}
	if g.chance(2) {
		o.Spec.Egress = []v1alpha1.EgressRule{{Ports: ports, To: []v1alpha1.Peer{peer}}}
	}
	return o
}
