package kubeobject

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"spillway.dev/spillway/internal/model"
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
	if c.invalid {
		return nil, c.problems
	}
	return p, c.problems
}
