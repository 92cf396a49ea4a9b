package flows

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"

	"spillway.dev/spillway/internal/facts/kubeobject"
)

// epoch is when Services without an Age were created.
var epoch = time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)

func (s Service) manifests(sc *Scope) []runtime.Object {
	var objects []runtime.Object
	if !s.SlicesOnly {
		objects = append(objects, s.service(sc))
	}
	for i, slice := range append([]Slice{{Endpoints: s.Endpoints}}, s.Slices...) {
		if len(slice.Endpoints) == 0 {
			continue
		}
		for _, v6 := range s.families() {
			objects = append(objects, s.slice(sc, slice, i, v6))
		}
	}
	return objects
}

func (s Service) service(sc *Scope) *corev1.Service {
	o := &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace:         sc.Namespace,
			Name:              s.name(),
			UID:               "", // a manifest has none
			CreationTimestamp: metav1.NewTime(epoch.Add(-s.Age)),
		},
		Spec: corev1.ServiceSpec{
			Type:                     s.Type,
			PublishNotReadyAddresses: s.PublishNotReady,
		},
	}
	if s.ProxyName != "" {
		o.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": s.ProxyName}
	}
	o.Annotations = s.Annotations
	if s.Distribution != "" {
		o.Spec.TrafficDistribution = &s.Distribution
	}
	s.policies(sc, &o.Spec)
	s.addresses(sc, o)
	s.servicePorts(sc, &o.Spec)
	return o
}

// policies fills in traffic policies and affinity.
func (s Service) policies(sc *Scope, spec *corev1.ServiceSpec) {
	if s.ExternalLocal {
		spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		if s.Type == corev1.ServiceTypeLoadBalancer {
			spec.HealthCheckNodePort = int32(sc.healthCheckPort(s.name()))
		}
	}
	if s.InternalLocal {
		local := corev1.ServiceInternalTrafficPolicyLocal
		spec.InternalTrafficPolicy = &local
	}
	if s.Affinity > 0 {
		seconds := int32(s.Affinity / time.Second)
		spec.SessionAffinity = corev1.ServiceAffinityClientIP
		spec.SessionAffinityConfig = &corev1.SessionAffinityConfig{
			ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &seconds},
		}
	}
}

// addresses fills in every address that clients may use.
func (s Service) addresses(sc *Scope, o *corev1.Service) {
	spec := &o.Spec
	for _, v6 := range s.families() {
		family := corev1.IPv4Protocol
		if v6 {
			family = corev1.IPv6Protocol
		}
		spec.IPFamilies = append(spec.IPFamilies, family)
		if s.ExternalName {
			continue
		}
		spec.ClusterIPs = append(spec.ClusterIPs, s.clusterIP(sc, v6))
		for _, host := range s.AllowFrom {
			addr := sc.plan.Addr(host, v6)
			if s.AllowFamily != "" && v6 != (s.AllowFamily == "6") {
				continue
			}
			spec.LoadBalancerSourceRanges = append(spec.LoadBalancerSourceRanges, fmt.Sprintf("%s/%d", addr, addr.BitLen()))
		}
	}
	for _, host := range s.Take {
		for _, v6 := range s.families() {
			spec.ExternalIPs = append(spec.ExternalIPs, sc.plan.Addr(host, v6).String())
		}
	}
	owner := cmp.Or(s.ShareVia, s.name())
	for _, node := range s.Via {
		for _, v6 := range s.families() {
			ip := sc.ExternalIP(owner, node, v6).String()
			if s.Type == corev1.ServiceTypeLoadBalancer {
				o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, s.ingress(ip))
				continue
			}
			spec.ExternalIPs = append(spec.ExternalIPs, ip)
		}
	}
	if s.ExternalName {
		spec.Type, spec.ExternalName, spec.IPFamilies = corev1.ServiceTypeExternalName, "example.invalid", nil
		return
	}
	policy := corev1.IPFamilyPolicySingleStack
	if len(spec.IPFamilies) > 1 {
		policy = corev1.IPFamilyPolicyRequireDualStack
	}
	spec.IPFamilyPolicy = &policy
	spec.ClusterIP = spec.ClusterIPs[0]
	if s.Headless {
		spec.ClusterIP, spec.ClusterIPs = corev1.ClusterIPNone, []string{corev1.ClusterIPNone}
	}
}

func (s Service) clusterIP(sc *Scope, v6 bool) string {
	owner := s.name()
	if s.ShareIP != "" {
		owner = s.ShareIP
	}
	return sc.ClusterIP(owner, v6).String()
}

func (s Service) ingress(ip string) corev1.LoadBalancerIngress {
	mode := corev1.LoadBalancerIPModeVIP
	if s.ProxyMode {
		mode = corev1.LoadBalancerIPModeProxy
	}
	return corev1.LoadBalancerIngress{IP: ip, IPMode: &mode}
}

func (s Service) servicePorts(sc *Scope, spec *corev1.ServiceSpec) {
	hasNodePorts := s.Type == corev1.ServiceTypeNodePort || s.Type == corev1.ServiceTypeLoadBalancer
	owner := s.name()
	if s.SharePort != "" {
		owner = s.SharePort
	}
	for _, p := range s.ports() {
		port := corev1.ServicePort{
			Name: p.Name, Protocol: p.Protocol, Port: p.Port, TargetPort: intstr.FromInt32(p.Target),
		}
		if hasNodePorts {
			port.NodePort = int32(sc.NodePort(owner, p.Name))
		}
		spec.Ports = append(spec.Ports, port)
	}
}

// slice builds the i-th EndpointSlice of a family.
func (s Service) slice(sc *Scope, from Slice, i int, v6 bool) *discoveryv1.EndpointSlice {
	family, suffix := discoveryv1.AddressTypeIPv4, "v4"
	if v6 {
		family, suffix = discoveryv1.AddressTypeIPv6, "v6"
	}
	o := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Namespace: sc.Namespace,
			Name:      fmt.Sprintf("%s-%s-%d", s.name(), suffix, i),
			Labels:    map[string]string{discoveryv1.LabelServiceName: s.name()},
		},
		AddressType: family,
	}
	if from.Weight != "" {
		o.Annotations = map[string]string{kubeobject.WeightAnnotation: from.Weight}
	}
	if s.Headless { // as the slice controller marks them
		o.Labels[corev1.IsHeadlessService] = ""
	}
	for _, p := range s.ports() {
		if from.Ports == nil || strings.Contains(" "+strings.Join(from.Ports, " ")+" ", " "+p.Name+" ") {
			o.Ports = append(o.Ports, discoveryv1.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &p.Target})
		}
	}
	for _, e := range from.Endpoints {
		o.Endpoints = append(o.Endpoints, e.endpoint(sc, v6))
	}
	return o
}

func (e Endpoint) endpoint(sc *Scope, v6 bool) discoveryv1.Endpoint {
	ready, serving, terminating := !e.NotReady, !e.NotServing, e.Terminating
	addr := sc.plan.Addr(e.On, v6)
	if e.ExternalOf != "" {
		addr = sc.ExternalIP(e.ExternalOf, e.On, v6)
	}
	o := discoveryv1.Endpoint{
		Addresses:  []string{addr.String()},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
	}
	if !e.NoNode {
		at := e.On
		if e.ClaimNode != "" {
			at = e.ClaimNode
		}
		node, zone := sc.plan.NodeName(at), sc.plan.Zone(at)
		o.NodeName, o.Zone = &node, &zone
		o.TargetRef = &corev1.ObjectReference{Kind: "Pod", Namespace: sc.Namespace, Name: e.On}
	}
	if len(e.Zones)+len(e.Nodes) > 0 {
		o.Hints = &discoveryv1.EndpointHints{}
	}
	for _, zone := range e.Zones {
		o.Hints.ForZones = append(o.Hints.ForZones, discoveryv1.ForZone{Name: zone})
	}
	for _, node := range e.Nodes {
		o.Hints.ForNodes = append(o.Hints.ForNodes, discoveryv1.ForNode{Name: sc.plan.NodeName(node)})
	}
	return o
}
