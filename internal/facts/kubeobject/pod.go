package kubeobject

import (
	"cmp"
	"encoding/hex"
	"maps"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// Pod converts a Pod. It returns nil for a Pod on the host's network, whose addresses are
// the node's and to which NetworkPolicies do not apply. It also returns nil for a Pod
// that has ended, because another Pod may have its addresses now.
func Pod(o *corev1.Pod) (*model.Pod, []model.Problem) {
	c, name := newChecker("Pod", &o.ObjectMeta)
	if o.Spec.HostNetwork || o.Status.Phase == corev1.PodSucceeded || o.Status.Phase == corev1.PodFailed {
		return nil, c.problems
	}
	p := &model.Pod{Name: name, Labels: maps.Clone(o.Labels), Node: o.Spec.NodeName}
	status := field.NewPath("status")
	if ips := o.Status.PodIPs; len(ips) == 0 && o.Status.PodIP != "" {
		if a, ok := c.addr(status.Child("podIP"), o.Status.PodIP); ok {
			p.IPs = append(p.IPs, a)
		}
	} else {
		for i, ip := range ips {
			if a, ok := c.addr(status.Child("podIPs").Index(i).Child("ip"), ip.IP); ok {
				p.IPs = append(p.IPs, a)
			}
		}
	}
	p.UnhookedUID = c.unhooked(o)
	if p.HostPorts = hostPorts(o.Spec.InitContainers, hostPorts(o.Spec.Containers, nil)); len(p.HostPorts) > 0 {
		p.UID = string(o.UID)
	}
	if c.invalid {
		return nil, c.problems
	}
	return p, c.problems
}

// SocketHooksAnnotation excludes a Pod from the socket hooks of eBPF with the value "off".
const SocketHooksAnnotation = model.AnnotationPrefix + "socket-hooks"

// unhooked returns Pod.UnhookedUID. Another value than "off" changes nothing, and is reported
// if it is not "on".
func (c *checker) unhooked(o *corev1.Pod) string {
	switch value, set := o.Annotations[SocketHooksAnnotation]; {
	case !set || value == "on":
		return ""
	case value != "off":
		c.notef(field.NewPath("metadata", "annotations").Key(SocketHooksAnnotation), "%q is ignored; use on or off", clip(value))
		return ""
	}
	// The kubelet names the cgroup of a static Pod by the file, not by the mirror Pod.
	if hash := o.Annotations[corev1.MirrorPodAnnotationKey]; isStaticUID(hash) {
		return hash
	}
	return string(o.UID)
}

// isStaticUID reports whether a UID may be that of a static Pod: an MD5 in hexadecimal. Any
// author of a Pod may set the annotation of mirror Pods, and would exclude another's Pod by
// its UID, which has another form (RFC 9562).
func isStaticUID(uid string) bool {
	sum, err := hex.DecodeString(uid)
	return err == nil && len(sum) == 16
}

var podProtocols = map[corev1.Protocol]model.Protocol{corev1.ProtocolTCP: model.TCP, corev1.ProtocolUDP: model.UDP,
	corev1.ProtocolSCTP: model.SCTP}

// hostPorts adds the host ports of containers. It ignores an invalid port or hostIP and keeps the
// Pod: the API server accepts no such port.
func hostPorts(containers []corev1.Container, out []model.HostPort) []model.HostPort {
	for i := range containers {
		for _, p := range containers[i].Ports {
			proto, known := podProtocols[cmp.Or(p.Protocol, corev1.ProtocolTCP)]
			ip, err := netip.ParseAddr(p.HostIP) // invalid without one
			if known && isPort(p.HostPort) && isPort(p.ContainerPort) && (err == nil || p.HostIP == "") {
				out = append(out, model.HostPort{Protocol: proto, Port: uint16(p.ContainerPort), Host: uint16(p.HostPort), IP: ip.Unmap()})
			}
		}
	}
	return out
}

func isPort(n int32) bool { return n > 0 && n <= 65535 }
