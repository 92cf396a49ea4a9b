package kubeobject

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
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
// of a headless Service, or with host names. Ports and addresses that cannot be used are
// left out: one address must not keep the others from being served, or from changing.
// Problems are about the Service, where people look for Events.
func EndpointSlice(o *discoveryv1.EndpointSlice) (*model.EndpointSlice, []model.Problem) {
	c, name := newChecker("EndpointSlice", &o.ObjectMeta)
	service := model.Name{Namespace: name.Namespace, Name: o.Labels[discoveryv1.LabelServiceName]}
	if service.Name != "" {
		c.object = model.ObjectRef{Kind: model.KindService, Name: service}
	}
	kind := c.addressType(o.AddressType)
	if _, ok := o.Labels[headlessLabel]; ok || service.Name == "" || kind == "FQDN" {
		return nil, c.problems
	}
	c.atMost(field.NewPath("endpoints"), len(o.Endpoints), maxEndpoints)
	c.atMost(field.NewPath("ports"), len(o.Ports), maxEndpointPorts)
	if c.invalid {
		return nil, c.problems
	}
	s := &model.EndpointSlice{
		Name:      name,
		Service:   service,
		Family:    model.IPv4,
		Ports:     c.endpointPorts(field.NewPath("ports"), o.Ports),
		Weight:    c.weight(o.Annotations),
		Triggered: c.triggered(o.Annotations),
	}
	if kind == "IPv6" {
		s.Family = model.IPv6
	}
	c.endpoints(field.NewPath("endpoints"), s, o.Endpoints)
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
	for i := range list {
		var one model.EndpointPort
		left := c.leaveOut("port", func() { one = c.endpointPort(ports.Index(i), &list[i], names) })
		if left {
			continue
		}
		names[one.Name] = true
		out = append(out, one)
	}
	return out
}

// endpointPort parses a port; names are those of the ports before it.
func (c *checker) endpointPort(p *field.Path, ep *discoveryv1.EndpointPort, names map[string]bool) model.EndpointPort {
	name := shared(deref(ep.Name))
	c.portName(p.Child("name"), name)
	if names[name] {
		c.invalidf(p.Child("name"), "%q is listed twice; use unique names, since Service ports refer to them", name)
	}
	out := model.EndpointPort{Name: name, Protocol: c.protocol(p.Child("protocol"), string(deref(ep.Protocol)))}
	if ep.Port == nil {
		// In the API this means "all ports", which no Service port can use.
		c.invalidf(p.Child("port"), "is missing; give the port that the endpoints listen on")
		return out
	}
	out.Port = c.port(p.Child("port"), *ep.Port)
	return out
}

// endpoints adds the endpoints that have an address. It reports all addresses that are
// left out as one problem, without their positions: a slice may have a thousand of them,
// controllers reorder slices, and each problem is an Event.
func (c *checker) endpoints(p *field.Path, s *model.EndpointSlice, list []discoveryv1.Endpoint) {
	var left []string
	hints := map[string]*model.Hints{}
	s.Endpoints = slices.Grow(s.Endpoints, len(list))
	for i := range list {
		ep, addresses := &list[i], p.Index(i).Child("addresses")
		if c.leaveOut("endpoint", func() {
			if len(ep.Addresses) == 0 {
				c.invalidf(addresses, "is empty; give the endpoint an address or remove it")
			}
			c.atMost(addresses, len(ep.Addresses), maxAddresses)
		}) {
			continue
		}
		var addr netip.Addr
		for _, text := range ep.Addresses {
			a, why := endpointAddr(text, s.Family)
			if why != "" {
				left = append(left, why)
			} else if !addr.IsValid() {
				addr = a
			}
		}
		if addr.IsValid() {
			s.Endpoints = append(s.Endpoints, endpoint(ep, addr, s.Namespace, hints))
		}
	}
	if len(left) > 0 {
		c.notef(p, "%s", withoutTraffic(left))
	}
}

// endpointAddr parses an address of an endpoint, or returns why it cannot be used.
func endpointAddr(text string, family model.Family) (a netip.Addr, why string) {
	if a, why, _ = parseAddr(text); why != "" {
		return a, why
	}
	if kind := unusable(a, true); kind != "" {
		return a, fmt.Sprintf("%s is %s", a, kind)
	}
	if model.FamilyOf(a) != family {
		return a, fmt.Sprintf("%s is not %s, which the slice's addressType says", a, family)
	}
	return a, ""
}

// maxNamed limits the addresses that one problem names.
const maxNamed = 4

// withoutTraffic describes addresses that are left out, in the same words whatever their
// order.
func withoutTraffic(left []string) string {
	slices.Sort(left)
	left = slices.Compact(left)
	named, more, count := left, "", "1 address gets"
	if len(left) > maxNamed {
		named, more = left[:maxNamed], fmt.Sprintf(", and %d more", len(left)-maxNamed)
	}
	if len(left) > 1 {
		count = fmt.Sprintf("%d addresses get", len(left))
	}
	return fmt.Sprintf("%s no traffic: %s%s; correct the slice, or the program that writes it", count, strings.Join(named, ", "), more)
}

// endpoint converts an endpoint. hints are those of the endpoints before it.
func endpoint(ep *discoveryv1.Endpoint, addr netip.Addr, namespace string, hints map[string]*model.Hints) model.Endpoint {
	out := model.Endpoint{
		Addr:        addr,
		Ready:       ep.Conditions.Ready == nil || *ep.Conditions.Ready,
		Terminating: deref(ep.Conditions.Terminating),
		Node:        shared(deref(ep.NodeName)),
		Pod:         targetPod(ep.TargetRef, namespace),
	}
	out.Serving = out.Ready
	if ep.Conditions.Serving != nil {
		out.Serving = *ep.Conditions.Serving
	}
	if h := ep.Hints; h != nil && len(h.ForZones)+len(h.ForNodes) > 0 {
		var own model.Hints
		key := ""
		for _, z := range h.ForZones {
			own.Zones, key = append(own.Zones, shared(z.Name)), key+strconv.Quote(z.Name)
		}
		for _, n := range h.ForNodes {
			own.Nodes, key = append(own.Nodes, shared(n.Name)), key+"/"+strconv.Quote(n.Name)
		}
		if hints[key] == nil {
			hints[key] = &own
		}
		out.Hints = hints[key]
	}
	return out
}

// targetPod names the Pod behind an endpoint. A reference without a namespace means the
// slice's. The API server checks neither; a text that no Pod can have as its name means none.
func targetPod(ref *corev1.ObjectReference, namespace string) model.Name {
	if ref == nil || ref.Kind != "Pod" || ref.Name == "" || !mayBeName(ref.Name) || !mayBeName(ref.Namespace) {
		return model.Name{}
	}
	if ref.Namespace != "" && ref.Namespace != namespace {
		namespace = shared(ref.Namespace)
	}
	return model.Name{Namespace: namespace, Name: ref.Name}
}

// mayBeName reports whether a text has the length and the characters of names. It is fast, since
// there may be a million endpoints.
func mayBeName(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f {
			return false
		}
	}
	return len(s) <= validation.DNS1123SubdomainMaxLength
}

// WeightAnnotation gives the endpoints of a slice a weight.
const WeightAnnotation = model.AnnotationPrefix + "weight"

func (c *checker) weight(annotations map[string]string) *uint8 {
	text, set := annotations[WeightAnnotation]
	if !set {
		return nil
	}
	v, err := strconv.ParseUint(text, 10, 8)
	if err != nil || v > model.MaxWeight {
		c.notef(field.NewPath("metadata", "annotations").Key(WeightAnnotation), "%q is not a weight from 0 to %d, and is left out",
			clip(text), model.MaxWeight)
		return nil
	}
	weight := uint8(v)
	return &weight
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
		c.notef(field.NewPath("metadata", "annotations").Key(corev1.EndpointsLastChangeTriggerTime),
			"%q is not an RFC 3339 time and is left out", v)
	}
	return t
}
