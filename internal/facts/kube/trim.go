package kube

import (
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// trimMetadata leaves the labels and annotations that are read. A tenant may write 256 KiB of
// annotations, and any number of labels, into each of thousands of objects, and a Reflector
// collects all of them at its start.
func trimMetadata[A metav1.Object](o A) {
	maps.DeleteFunc(o.GetAnnotations(), func(key, _ string) bool { return !kubeobject.ReadsAnnotation(key) })
	maps.DeleteFunc(o.GetLabels(), func(key, _ string) bool { return !kubeobject.ReadsLabel(key) })
}

func trimNetworkPolicy(o *networkingv1.NetworkPolicy) { o.Annotations, o.Labels = nil, nil }

// trimNode removes unused fields of a Node: a cluster has thousands of Nodes with dozens
// of labels each. Other Nodes keep the zone label. This node keeps all labels, since
// policies may select them, and the annotations that are read.
func (s *Source) trimNode(n *corev1.Node) {
	maps.DeleteFunc(n.Annotations, func(key, _ string) bool { return !strings.HasPrefix(key, model.AnnotationPrefix) })
	if zone, ok := n.Labels[zoneLabel]; n.Name != s.cfg.NodeName {
		n.Annotations, n.Labels = nil, nil
		if ok {
			n.Labels = map[string]string{zoneLabel: zone}
		}
	}
	n.Status = corev1.NodeStatus{Addresses: n.Status.Addresses}
}

// trimPod keeps the fields that decide whether a policy selects the Pod, and whether it has
// socket hooks.
func trimPod(p *corev1.Pod) {
	maps.DeleteFunc(p.Annotations, func(key, _ string) bool {
		return key != kubeobject.SocketHooksAnnotation && key != corev1.MirrorPodAnnotationKey
	})
	p.Spec = corev1.PodSpec{
		NodeName: p.Spec.NodeName, HostNetwork: p.Spec.HostNetwork,
		Containers: trimContainers(p.Spec.Containers), InitContainers: trimContainers(p.Spec.InitContainers),
	}
	p.Status = corev1.PodStatus{Phase: p.Status.Phase, PodIP: p.Status.PodIP, PodIPs: p.Status.PodIPs}
}

// trimContainers keeps container ports with a hostPort. Few containers have any.
func trimContainers(containers []corev1.Container) (out []corev1.Container) {
	for i := range containers {
		for _, p := range containers[i].Ports {
			if p.HostPort != 0 {
				out = append(out, corev1.Container{Ports: []corev1.ContainerPort{p}})
			}
		}
	}
	return out
}
