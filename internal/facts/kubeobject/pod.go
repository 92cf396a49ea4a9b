package kubeobject

import (
	"cmp"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/facts/model"
)

// Pod converts a Pod. One on the host's network is nil, since its addresses are
// the node's and NetworkPolicies do not reach it; so is one that has ended,
// whose addresses another may hold by now.
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
	p.HostPorts = hostPorts(o.Spec.InitContainers, hostPorts(o.Spec.Containers, nil))
	if c.invalid {
		return nil, c.problems
	}
	return p, c.problems
}

var podProtocols = map[corev1.Protocol]model.Protocol{corev1.ProtocolTCP: model.TCP, corev1.ProtocolUDP: model.UDP, corev1.ProtocolSCTP: model.SCTP}

// hostPorts adds the host ports of containers. One that cannot be is no reason to know
// nothing of the Pod: the API server takes none.
func hostPorts(containers []corev1.Container, out []model.HostPort) []model.HostPort {
	for i := range containers {
		for _, p := range containers[i].Ports {
			proto, known := podProtocols[cmp.Or(p.Protocol, corev1.ProtocolTCP)]
			if known && isPort(p.HostPort) && isPort(p.ContainerPort) {
				out = append(out, model.HostPort{Protocol: proto, Port: uint16(p.ContainerPort), Host: uint16(p.HostPort)})
			}
		}
	}
	return out
}

func isPort(n int32) bool { return n > 0 && n <= 65535 }
