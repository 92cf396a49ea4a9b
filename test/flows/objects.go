package flows

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Object is something a case puts into the manifest directories.
type Object interface {
	// manifests builds the Kubernetes objects, with the addresses of a scope.
	manifests(*Scope) []runtime.Object
}

// Service describes a Service and its EndpointSlices. Cluster IPs, NodePorts
// and the rest are given by the Scope.
type Service struct {
	Name      string // "" is "web"
	Type      corev1.ServiceType
	Ports     []Port // nil: TCP and UDP 80 to 8080
	Endpoints []Endpoint
	// Slices are further slices; see also Endpoints.
	Slices []Slice
	// Families is "", "4" or "6"; "" is dual stack.
	Families string

	ExternalLocal   bool
	InternalLocal   bool
	PublishNotReady bool
	Affinity        time.Duration
	// Via are the nodes through which clients reach the Service's external or
	// load balancer addresses: one address for each node.
	Via []string
	// ProxyMode makes load balancer addresses of ipMode Proxy.
	ProxyMode bool
	// AllowFrom are the hosts in loadBalancerSourceRanges.
	AllowFrom []string
	// AllowFamily is the only family ("4" or "6") of AllowFrom that counts; "" is both.
	AllowFamily  string
	Distribution string
	Annotations  map[string]string
	ProxyName    string // label service.kubernetes.io/service-proxy-name
	Headless     bool
	ExternalName bool
	// ShareIP, SharePort and ShareVia claim the cluster IP, the NodePorts, or the
	// addresses by Via, of another Service of the case.
	ShareIP, SharePort, ShareVia string
	// Take are hosts whose own addresses are externalIPs.
	Take []string
	// SlicesOnly leaves out the Service itself.
	SlicesOnly bool
	// Age is how long ago the Service was created.
	Age time.Duration
}

// Port is a port of a Service.
type Port struct {
	Name     string
	Protocol corev1.Protocol
	Port     int32
	Target   int32
}

var defaultPorts = []Port{
	{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: 8080},
	{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, Target: 8080},
}

// Slice is an EndpointSlice for some of the Service's ports (nil: all).
type Slice struct {
	Ports     []string
	Endpoints []Endpoint
	Weight    string // annotation spillway.dev/weight; "" is none
}

// Endpoint is an endpoint on a host, ready unless it says otherwise.
type Endpoint struct {
	On          string // a short name; a node stands for a pod on its network
	NotReady    bool
	NotServing  bool // meant with NotReady or Terminating
	Terminating bool
	Zones       []string // hints.forZones
	Nodes       []string // hints.forNodes, short names
	NoNode      bool     // leave nodeName and targetRef out, as in a manual slice
	ClaimNode   string   // nodeName is that of this node, not of the host's own
	// ExternalOf makes the address that of a Service through the node On.
	ExternalOf string
}

// On lists ready endpoints.
func On(hosts ...string) []Endpoint {
	var list []Endpoint
	for _, h := range hosts {
		list = append(list, Endpoint{On: h})
	}
	return list
}

// Terminating lists endpoints that are going away but still serve.
func Terminating(hosts ...string) []Endpoint {
	var list []Endpoint
	for _, h := range hosts {
		list = append(list, Endpoint{On: h, NotReady: true, Terminating: true})
	}
	return list
}

// NotReady lists endpoints that neither are ready nor serve.
func NotReady(hosts ...string) []Endpoint {
	var list []Endpoint
	for _, h := range hosts {
		list = append(list, Endpoint{On: h, NotReady: true, NotServing: true})
	}
	return list
}

// name is the Service's name, with its default.
func (s Service) name() string {
	if s.Name == "" {
		return "web"
	}
	return s.Name
}

func (s Service) ports() []Port {
	if s.Ports == nil {
		return defaultPorts
	}
	return s.Ports
}

// families are the IP families in use: false is IPv4.
func (s Service) families() []bool {
	switch s.Families {
	case "4":
		return []bool{false}
	case "6":
		return []bool{true}
	}
	return []bool{false, true}
}

// Elsewhere are objects of another namespace.
type Elsewhere []Object

func (e Elsewhere) manifests(s *Scope) []runtime.Object {
	there := *s
	there.Namespace += "-elsewhere"
	return there.Objects(e)
}

// Policy is a NetworkPolicy that selects pods, for both directions. It allows
// everything; the proxy only has to know that another program enforces it.
type Policy struct {
	Pods []string
}

func (p Policy) manifests(s *Scope) []runtime.Object {
	var objects []runtime.Object
	for _, pod := range p.Pods {
		objects = append(objects, &networkingv1.NetworkPolicy{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
			ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: "select-" + pod},
			Spec: networkingv1.NetworkPolicySpec{
				PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"pod": pod}},
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
				Ingress:     []networkingv1.NetworkPolicyIngressRule{{}},
				Egress:      []networkingv1.NetworkPolicyEgressRule{{}},
			},
		}, s.pod(pod))
	}
	return objects
}

// Pods are Pod objects without anything else.
type Pods []string

func (p Pods) manifests(s *Scope) []runtime.Object {
	var objects []runtime.Object
	for _, pod := range p {
		objects = append(objects, s.pod(pod))
	}
	return objects
}

// HostPorts is a Pod whose container's port 8080 is a port of its node, too, for both protocols.
type HostPorts struct {
	Pod  string
	Port int
}

func (h HostPorts) manifests(s *Scope) []runtime.Object {
	pod := s.pod(h.Pod)
	for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		pod.Spec.Containers[0].Ports = append(pod.Spec.Containers[0].Ports,
			corev1.ContainerPort{Protocol: protocol, ContainerPort: 8080, HostPort: int32(h.Port)})
	}
	return []runtime.Object{pod}
}

// StartingPods are Pods that have no podIPs yet, in a namespace whose NetworkPolicy
// selects every Pod.
type StartingPods []string

func (p StartingPods) manifests(s *Scope) []runtime.Object {
	objects := []runtime.Object{&networkingv1.NetworkPolicy{
		TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "NetworkPolicy"},
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: "select-all"},
		Spec: networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress,
			networkingv1.PolicyTypeEgress}},
	}}
	for _, host := range p {
		pod := s.pod(host)
		pod.Status = corev1.PodStatus{Phase: corev1.PodPending}
		objects = append(objects, pod)
	}
	return objects
}

// pod builds the Pod object of a host as the case's namespace knows it.
func (s *Scope) pod(host string) *corev1.Pod {
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: s.Namespace, Name: host, Labels: map[string]string{"pod": host},
		},
		Spec: corev1.PodSpec{NodeName: s.plan.NodeName(host), Containers: []corev1.Container{{Name: "server", Image: "none"}}},
	}
	pod.Status.Phase = corev1.PodRunning
	for _, v6 := range []bool{false, true} {
		pod.Status.PodIPs = append(pod.Status.PodIPs, corev1.PodIP{IP: s.plan.Addr(host, v6).String()})
	}
	pod.Status.PodIP = pod.Status.PodIPs[0].IP
	return pod
}
