package kubeobject

import (
	"net/netip"
	"slices"
	"strings"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

const (
	proxyNameLabel         = "service.kubernetes.io/service-proxy-name"
	sourceRangesAnnotation = "service.beta.kubernetes.io/load-balancer-source-ranges"

	// Limits and the default of sessionAffinityConfig.clientIP.timeoutSeconds.
	defaultAffinitySeconds = 10800
	maxAffinitySeconds     = 86400
)

// Service converts a Service. It returns nil for a headless or ExternalName Service, or
// one without ports, since they need no proxy.
func Service(o *corev1.Service) (*model.Service, []model.Problem) {
	c, name := newChecker("Service", &o.ObjectMeta)
	spec := field.NewPath("spec")
	kind := c.oneOf(spec.Child("type"), string(o.Spec.Type), "ClusterIP", "NodePort", "LoadBalancer", "ExternalName")
	if kind == "ExternalName" || headless(o) || len(o.Spec.Ports) == 0 {
		return nil, c.problems
	}
	s := &model.Service{
		Name:            name,
		UID:             string(o.UID),
		Created:         o.CreationTimestamp.Time,
		Type:            model.ServiceType(kind),
		ProxyName:       o.Labels[proxyNameLabel],
		ClusterIPs:      c.clusterIPs(spec, &o.Spec),
		ExternalIPs:     c.addrs(spec.Child("externalIPs"), o.Spec.ExternalIPs, true),
		LoadBalancerIPs: c.ingressIPs(o),
		SourceRanges:    c.sourceRanges(spec.Child("loadBalancerSourceRanges"), o),
		Affinity:        c.affinity(spec, &o.Spec),
		ExternalLocal:   c.oneOf(spec.Child("externalTrafficPolicy"), string(o.Spec.ExternalTrafficPolicy), "Cluster", "Local") == "Local",
		InternalLocal:   c.oneOf(spec.Child("internalTrafficPolicy"), string(deref(o.Spec.InternalTrafficPolicy)), "Cluster", "Local") == "Local",
		Annotations:     c.ownAnnotations(o.Annotations),
		Ports:           c.servicePorts(spec.Child("ports"), &o.Spec),
	}
	c.trafficDistribution(spec.Child("trafficDistribution"), o.Spec.TrafficDistribution)
	c.bounded(spec, s)
	s.HealthCheckNodePort = c.healthCheckNodePort(spec.Child("healthCheckNodePort"), s, o.Spec.HealthCheckNodePort)
	if c.invalid {
		return nil, c.problems
	}
	return s, c.problems
}

// Limits of one Service. Each port is served on each address, and checked against each
// range, so a Service of 1 MB could need hundreds of millions of entries.
const (
	maxFrontends   = 1 << 16 // ports times addresses, NodePorts included
	maxPortsRanges = 1 << 16 // ports times loadBalancerSourceRanges
)

// bounded refuses a Service that would use the capacity of all others on the node.
func (c *checker) bounded(spec *field.Path, s *model.Service) {
	addrs := len(s.ClusterIPs) * 2 // each family has its NodePorts
	addrs += len(s.ExternalIPs) + len(s.LoadBalancerIPs)
	if n := len(s.Ports) * addrs; n > maxFrontends {
		c.invalidf(spec, "asks for %d frontends (%d ports on %d addresses); the maximum is %d; split it into several Services", n,
			len(s.Ports), addrs, maxFrontends)
	}
	if n := len(s.Ports) * len(s.SourceRanges); n > maxPortsRanges {
		c.invalidf(spec.Child("loadBalancerSourceRanges"), "has %d entries; the maximum is %d for %d ports; split it into several Services",
			len(s.SourceRanges), maxPortsRanges/len(s.Ports), len(s.Ports))
	}
}

// maxOwnAnnotations is more than there are. A Service may have 16,000 of such names.
const maxOwnAnnotations = 32

// ownAnnotations returns the annotations that are read, nil if there are none. The others
// may have 256 KiB, in each of thousands of Services. The API server checks no value, and
// no message of the agent's API can have one that is not UTF-8.
func (c *checker) ownAnnotations(all map[string]string) (out map[string]string) {
	var own []string
	for key := range all {
		if strings.HasPrefix(key, model.AnnotationPrefix) {
			own = append(own, key)
		}
	}
	slices.Sort(own)
	if n := len(own); n > maxOwnAnnotations {
		c.notef(field.NewPath("metadata", "annotations"), "has %d names with %s; the first %d count", n,
			model.AnnotationPrefix, maxOwnAnnotations)
		own = own[:maxOwnAnnotations]
	}
	for _, key := range own {
		if out == nil {
			out = map[string]string{}
		}
		out[key] = strings.ToValidUTF8(clip(all[key]), string(unicode.ReplacementChar))
	}
	return out
}

func headless(o *corev1.Service) bool {
	if _, ok := o.Labels[headlessLabel]; ok {
		return true
	}
	return o.Spec.ClusterIP == corev1.ClusterIPNone ||
		len(o.Spec.ClusterIPs) > 0 && o.Spec.ClusterIPs[0] == corev1.ClusterIPNone
}

// clusterIPs parses clusterIP and clusterIPs. clusterIP is the older field and repeats
// the first of clusterIPs. A file may have either.
func (c *checker) clusterIPs(spec *field.Path, s *corev1.ServiceSpec) []netip.Addr {
	p, list := spec.Child("clusterIPs"), s.ClusterIPs
	switch {
	case len(list) == 0 && s.ClusterIP == "":
		c.invalidf(spec.Child("clusterIP"), "is missing, and no allocator runs here; set an address, or None")
		return nil
	case len(list) == 0:
		a, ok := c.addr(spec.Child("clusterIP"), s.ClusterIP)
		if !ok || c.refuse(spec.Child("clusterIP"), a, false) {
			return nil
		}
		c.families(spec.Child("ipFamilies"), s.IPFamilies, []netip.Addr{a})
		return []netip.Addr{a}
	case s.ClusterIP != "" && s.ClusterIP != list[0]:
		c.invalidf(p.Index(0), "%q differs from spec.clusterIP %q; make them equal, or leave one out", list[0], s.ClusterIP)
	}
	out := c.addrs(p, list, false)
	if len(out) < len(list) {
		return nil
	}
	if len(out) > 2 || len(out) == 2 && model.FamilyOf(out[0]) == model.FamilyOf(out[1]) {
		c.invalidf(p, "has %d addresses; use one, or one of each family", len(out))
	}
	c.families(spec.Child("ipFamilies"), s.IPFamilies, out)
	return out
}

// families checks that ipFamilies, if set, matches the addresses and their order. The
// first family is the Service's primary one.
func (c *checker) families(p *field.Path, list []corev1.IPFamily, addrs []netip.Addr) {
	for i, f := range list {
		fam := c.oneOf(p.Index(i), string(f), "IPv4", "IPv6")
		switch {
		case i >= len(addrs):
			c.invalidf(p.Index(i), "%s has no address in spec.clusterIPs, and no allocator runs here; add an address there", fam)
		case fam != model.FamilyOf(addrs[i]).String():
			c.invalidf(p.Index(i), "is %s, but cluster IP %s is not; use the same order in both", fam, addrs[i])
		}
	}
}

// ingressIPs parses the addresses in status.loadBalancer that are still the destination
// when a packet reaches the node.
func (c *checker) ingressIPs(o *corev1.Service) []netip.Addr {
	p := field.NewPath("status", "loadBalancer", "ingress")
	ingress := o.Status.LoadBalancer.Ingress
	if len(ingress) > 0 && o.Spec.Type != corev1.ServiceTypeLoadBalancer {
		c.notef(p, "is not used: spec.type is not LoadBalancer")
		return nil
	}
	var out []netip.Addr
	for i, in := range ingress {
		if in.IP == "" { // a host name: the balancer sends to node ports
			continue
		}
		// Not the author of the Service writes its status, but a controller.
		c.leaveOut("address", func() {
			mode := c.oneOf(p.Index(i).Child("ipMode"), string(deref(in.IPMode)), "VIP", "Proxy")
			ip := p.Index(i).Child("ip")
			if a, ok := c.addr(ip, in.IP); ok && mode == "VIP" && !c.refuse(ip, a, false) && !c.invalid {
				out = append(out, a)
			}
		})
	}
	return out
}

// sourceRanges parses loadBalancerSourceRanges, or the older annotation.
func (c *checker) sourceRanges(p *field.Path, o *corev1.Service) []netip.Prefix {
	list := o.Spec.LoadBalancerSourceRanges
	if v := strings.TrimSpace(o.Annotations[sourceRangesAnnotation]); len(list) == 0 && v != "" {
		p, list = field.NewPath("metadata", "annotations").Key(sourceRangesAnnotation), strings.Split(v, ",")
	}
	if len(list) > 0 && o.Spec.Type != corev1.ServiceTypeLoadBalancer {
		c.invalidf(p, "is only for Services of type LoadBalancer; here it would have no effect, and every client would be allowed")
		return nil
	}
	var out []netip.Prefix
	for i, s := range list {
		if n, ok := c.prefix(p.Index(i), strings.TrimSpace(s)); ok {
			out = append(out, n)
		}
	}
	return out
}

func (c *checker) affinity(spec *field.Path, s *corev1.ServiceSpec) time.Duration {
	if c.oneOf(spec.Child("sessionAffinity"), string(s.SessionAffinity), "None", "ClientIP") == "None" {
		return 0
	}
	seconds := int32(defaultAffinitySeconds)
	if cfg := s.SessionAffinityConfig; cfg != nil && cfg.ClientIP != nil && cfg.ClientIP.TimeoutSeconds != nil {
		seconds = *cfg.ClientIP.TimeoutSeconds
	}
	if seconds < 1 || seconds > maxAffinitySeconds {
		c.invalidf(spec.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), "is %d; use 1 to %d seconds", seconds, maxAffinitySeconds)
	}
	return time.Duration(seconds) * time.Second
}

// trafficDistribution reports an unknown preference. The control plane turns preferences
// into hints, so an unknown one costs locality, not the Service.
func (c *checker) trafficDistribution(p *field.Path, v *string) {
	switch s := deref(v); s {
	case "", corev1.ServiceTrafficDistributionPreferClose,
		corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode:
	default:
		c.notef(p, "%q is unknown and left out; use PreferSameZone or PreferSameNode", s)
	}
}

func (c *checker) healthCheckNodePort(p *field.Path, s *model.Service, port int32) uint16 {
	if port != 0 && (s.Type != model.LoadBalancer || !s.ExternalLocal) {
		c.invalidf(p, "is only for type LoadBalancer with externalTrafficPolicy Local; remove it")
		return 0
	}
	return c.optionalPort(p, port)
}

// servicePorts parses spec.ports, whose names and numbers must be unique.
func (c *checker) servicePorts(ports *field.Path, s *corev1.ServiceSpec) []model.ServicePort {
	type number struct {
		protocol model.Protocol
		port     uint16
	}
	names, numbers, nodePorts := map[string]bool{}, map[number]bool{}, map[number]bool{}
	out := make([]model.ServicePort, 0, len(s.Ports))
	for i := range s.Ports {
		p := ports.Index(i)
		sp := c.servicePort(p, &s.Ports[i], s.Type, len(s.Ports) > 1)
		if n := (number{sp.Protocol, sp.Port}); numbers[n] {
			c.invalidf(p.Child("port"), "%s port %d is listed twice; use each port once", n.protocol, n.port)
		} else if sp.Port != 0 {
			numbers[n] = true
		}
		if n := (number{sp.Protocol, sp.NodePort}); nodePorts[n] {
			c.invalidf(p.Child("nodePort"), "%s node port %d is listed twice; use a different one per port", n.protocol, n.port)
		} else if sp.NodePort != 0 {
			nodePorts[n] = true
		}
		if sp.Name != "" && names[sp.Name] {
			c.invalidf(p.Child("name"), "%q is listed twice; use unique names, since endpoints refer to them", sp.Name)
		}
		names[sp.Name] = true
		out = append(out, sp)
	}
	return out
}

func (c *checker) servicePort(p *field.Path, sp *corev1.ServicePort, kind corev1.ServiceType, several bool) model.ServicePort {
	if sp.Name == "" && several {
		c.invalidf(p.Child("name"), "is missing; a Service with several ports must name each")
	}
	c.portName(p.Child("name"), sp.Name)
	nodePort := p.Child("nodePort")
	switch {
	case sp.NodePort == 0 && kind == corev1.ServiceTypeNodePort:
		c.invalidf(nodePort, "is missing, and no allocator runs here; choose a port, usually from 30000 to 32767")
	case sp.NodePort != 0 && (kind == "" || kind == corev1.ServiceTypeClusterIP):
		c.invalidf(nodePort, "is only for types NodePort and LoadBalancer; set spec.type or remove it")
	}
	return model.ServicePort{
		Name:        sp.Name,
		Protocol:    c.protocol(p.Child("protocol"), string(sp.Protocol)),
		Port:        c.port(p.Child("port"), sp.Port),
		NodePort:    c.optionalPort(nodePort, sp.NodePort),
		AppProtocol: deref(sp.AppProtocol),
	}
}

// portName checks the name of a port. The caller decides about "".
func (c *checker) portName(p *field.Path, name string) {
	if name == "" {
		return
	}
	if errs := validation.IsDNS1123Label(name); len(errs) > 0 {
		c.invalidf(p, "%q is not a port name: %s", name, strings.Join(errs, "; "))
	}
}
