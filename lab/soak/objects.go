package soak

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"spillway.dev/spillway/test/testbed/topology"
)

const namespace = "soak"

// The ports that every server listens on, and those of the Services.
const (
	echoPort    = 8080
	tftpPort    = 69
	servicePort = 80
	canaryPort  = 1000 // and up: one for each version
)

// state is the state of an endpoint.
type state string

// The states of an endpoint.
const (
	ready       state = "ready"
	terminating state = "terminating" // still serves
	absent      state = "absent"
)

// service is a Service with its endpoints.
type service struct {
	name   string
	number int // chooses its addresses and NodePorts
	ports  []corev1.ServicePort
	local  bool // externalTrafficPolicy
	// pods are the possible endpoints, states their states.
	pods   []*topology.Host
	states []state
}

// newService makes a Service of port 80, TCP and UDP.
func newService(name string, number int, pods ...*topology.Host) *service {
	s := &service{name: name, number: number, pods: pods, states: slices.Repeat([]state{ready}, len(pods))}
	for i, p := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		s.ports = append(s.ports, corev1.ServicePort{Name: strings.ToLower(string(p)), Protocol: p, Port: servicePort,
			TargetPort: intstr.FromInt32(echoPort), NodePort: int32(30000 + 10*number + i)})
	}
	return s
}

// clusterIP returns the cluster IP of a family.
func (s *service) clusterIP(v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x96, 15: byte(10 + s.number)})
	}
	return netip.AddrFrom4([4]byte{10, 96, 0, byte(10 + s.number)})
}

// external returns the load balancer address of a family. Clients route it to node0.
func (s *service) external(v6 bool) netip.Addr {
	if v6 {
		return netip.AddrFrom16([16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 5: 0xff, 15: byte(10 + s.number)})
	}
	return netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + s.number)})
}

// nodePort returns the NodePort of a protocol.
func (s *service) nodePort(protocol corev1.Protocol) uint16 {
	for _, p := range s.ports {
		if p.Protocol == protocol {
			return uint16(p.NodePort)
		}
	}
	return 0
}

// on returns the indexes of the endpoints of a state.
func (s *service) on(want state) (list []int) {
	for i, at := range s.states {
		if at == want {
			list = append(list, i)
		}
	}
	return list
}

// objects returns the Service and its EndpointSlices.
func (s *service) objects() []runtime.Object {
	spec := corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: s.clusterIP(false).String(),
		ClusterIPs: []string{s.clusterIP(false).String(), s.clusterIP(true).String()},
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		Ports:      s.ports,
	}
	if s.local {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		spec.HealthCheckNodePort = int32(32000 + s.number)
	}
	svc := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name}, Spec: spec,
	}
	for _, v6 := range []bool{false, true} {
		svc.Status.LoadBalancer.Ingress = append(svc.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: s.external(v6).String()})
	}
	return []runtime.Object{svc, s.slice(false), s.slice(true)}
}

func (s *service) slice(v6 bool) *discoveryv1.EndpointSlice {
	family, suffix := discoveryv1.AddressTypeIPv4, "v4"
	if v6 {
		family, suffix = discoveryv1.AddressTypeIPv6, "v6"
	}
	slice := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name + "-" + suffix,
			Labels: map[string]string{discoveryv1.LabelServiceName: s.name}},
		AddressType: family,
	}
	for _, p := range s.ports {
		target := p.TargetPort.IntVal
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &target, Protocol: &p.Protocol})
	}
	for i, pod := range s.pods {
		if s.states[i] == absent {
			continue
		}
		isReady, serving, ending := s.states[i] == ready, true, s.states[i] == terminating
		addr := pod.IPv4
		if v6 {
			addr = pod.IPv6
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{addr.String()}, NodeName: &pod.Node,
			Conditions: discoveryv1.EndpointConditions{Ready: &isReady, Serving: &serving, Terminating: &ending},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: namespace, Name: pod.Name},
		})
	}
	return slice
}

// pod returns the Pod object of a host, which policies select by its name.
func pod(h *topology.Host) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: h.Name, Labels: map[string]string{"pod": h.Name}},
		Spec:       corev1.PodSpec{NodeName: h.Node, Containers: []corev1.Container{{Name: "server", Image: "none"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: h.IPv4.String(),
			PodIPs: []corev1.PodIP{{IP: h.IPv4.String()}, {IP: h.IPv6.String()}}},
	}
}

// networkPolicy selects a pod in both directions and allows everything: the agent must
// leave the pod's packets to netfilter.
func networkPolicy(h *topology.Host) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "select-" + h.Name},
		Spec: networkingv1.NetworkPolicySpec{
			PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"pod": h.Name}},
			PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			Ingress:     []networkingv1.NetworkPolicyIngressRule{{}},
			Egress:      []networkingv1.NetworkPolicyEgressRule{{}},
		},
	}
}

// doNotTrackPolicy selects a pod and leaves the port of its server untracked, as YAML.
func doNotTrackPolicy(h *topology.Host) string {
	return fmt.Sprintf(`---
apiVersion: policy.spillway.dev/v1alpha1
kind: DoNotTrackPolicy
metadata: {name: %[1]s}
spec:
  podSelector: {matchLabels: {pod: %[1]s}}
  ingress:
  - ports: [{protocol: TCP, port: %[2]d}, {protocol: UDP, port: %[2]d}]
`, h.Name, echoPort)
}
