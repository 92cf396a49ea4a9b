package kubeobject

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// Limits of one slice. The API server accepts 1000 endpoints and 20,000 ports; a file may
// have more endpoints.
const (
	maxEndpoints     = 1 << 14
	maxEndpointPorts = 20000
	maxAddresses     = 100 // of an endpoint, as in the API server
)

// EndpointSlice converts an EndpointSlice. It returns nil for a slice without a Service,
// of a headless Service, or with host names.
func EndpointSlice(o *discoveryv1.EndpointSlice) (*model.EndpointSlice, []model.Problem) {
	c, name := newChecker("EndpointSlice", &o.ObjectMeta)
	kind := c.addressType(o.AddressType)
	service := o.Labels[discoveryv1.LabelServiceName]
	if _, ok := o.Labels[headlessLabel]; ok || service == "" || kind == "FQDN" {
		return nil, c.problems
	}
	s := &model.EndpointSlice{
		Name:      name,
		Service:   model.Name{Namespace: name.Namespace, Name: service},
		Family:    model.IPv4,
		Ports:     c.endpointPorts(field.NewPath("ports"), o.Ports),
		Triggered: c.triggered(o.Annotations),
	}
	if kind == "IPv6" {
		s.Family = model.IPv6
	}
	c.atMost(field.NewPath("endpoints"), len(o.Endpoints), maxEndpoints)
	c.atMost(field.NewPath("ports"), len(o.Ports), maxEndpointPorts)
	if c.invalid {
		return nil, c.problems
	}
	for i := range o.Endpoints {
		s.Endpoints = append(s.Endpoints, c.endpoint(field.NewPath("endpoints").Index(i), &o.Endpoints[i], s))
	}
	if c.invalid {
		return nil, c.problems
	}
	return s, c.problems
}

// addressType has no default: the API requires it.
func (c *checker) addressType(t discoveryv1.AddressType) string {
	p := field.NewPath("addressType")
	if t == "" {
		c.invalidf(p, "is missing; use IPv4 or IPv6")
		return ""
	}
	return c.oneOf(p, string(t), "IPv4", "IPv6", "FQDN")
}

func (c *checker) endpointPorts(ports *field.Path, list []discoveryv1.EndpointPort) []model.EndpointPort {
	var out []model.EndpointPort
	names := map[string]bool{}
	for i, ep := range list {
		p := ports.Index(i)
		name := deref(ep.Name)
		c.portName(p.Child("name"), name)
		if names[name] {
			c.invalidf(p.Child("name"), "%q is listed twice; use unique names, since Service ports refer to them", name)
		}
		names[name] = true
		protocol := c.protocol(p.Child("protocol"), string(deref(ep.Protocol)))
		if ep.Port == nil {
			// In the API this means "all ports", which no Service port can use.
			c.notef(p.Child("port"), "is missing, and the port is left out; give the port that the endpoints listen on")
			continue
		}
		out = append(out, model.EndpointPort{
			Name:     name,
			Protocol: protocol,
			Port:     c.port(p.Child("port"), *ep.Port),
		})
	}
	return out
}

func (c *checker) endpoint(p *field.Path, ep *discoveryv1.Endpoint, s *model.EndpointSlice) model.Endpoint {
	addresses := p.Child("addresses")
	if len(ep.Addresses) == 0 {
		c.invalidf(addresses, "is empty; give the endpoint an address or remove it")
	}
	c.atMost(addresses, len(ep.Addresses), maxAddresses)
	out := model.Endpoint{
		Addresses:   c.addrs(addresses, ep.Addresses, true),
		Ready:       ep.Conditions.Ready == nil || *ep.Conditions.Ready,
		Terminating: deref(ep.Conditions.Terminating),
		Node:        deref(ep.NodeName),
	}
	out.Serving = out.Ready
	if ep.Conditions.Serving != nil {
		out.Serving = *ep.Conditions.Serving
	}
	for i, a := range out.Addresses {
		if model.FamilyOf(a) != s.Family {
			c.invalidf(addresses.Index(i), "%s is not %s, which the slice's addressType says", a, s.Family)
		}
	}
	if ep.Hints != nil {
		for _, z := range ep.Hints.ForZones {
			out.HintZones = append(out.HintZones, z.Name)
		}
		for _, n := range ep.Hints.ForNodes {
			out.HintNodes = append(out.HintNodes, n.Name)
		}
	}
	out.Pod = targetPod(ep.TargetRef, s.Namespace)
	return out
}

// targetPod names the Pod behind an endpoint. A reference without a namespace means the
// slice's.
func targetPod(ref *corev1.ObjectReference, namespace string) model.Name {
	if ref == nil || ref.Kind != "Pod" || ref.Name == "" {
		return model.Name{}
	}
	if ref.Namespace != "" {
		namespace = ref.Namespace
	}
	return model.Name{Namespace: namespace, Name: ref.Name}
}

// triggered parses the time of the change that led to this slice. Only a latency metric
// needs it, so an invalid time is ignored.
func (c *checker) triggered(annotations map[string]string) time.Time {
	v := annotations[corev1.EndpointsLastChangeTriggerTime]
	if v == "" {
		return time.Time{}
	}
	t, err := time.Parse(time.RFC3339Nano, v)
	if err != nil {
		c.notef(field.NewPath("metadata", "annotations").Key(corev1.EndpointsLastChangeTriggerTime), "%q is not an RFC 3339 time and is left out", v)
	}
	return t
}
