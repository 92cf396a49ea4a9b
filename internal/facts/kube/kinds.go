package kube

import (
	"context"
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	proxyNameLabel = "service.kubernetes.io/service-proxy-name"
	zoneLabel      = corev1.LabelTopologyZone
)

type (
	serviceKind = kind[*corev1.Service, model.Service]
	nodeKind    = kind[*corev1.Node, model.Node]
)

// allKinds returns the kinds to watch, and sets services and nodes.
func (s *Source) allKinds() []watched {
	c := s.cfg.Client
	labeled := ""
	if s.cfg.ProxyName != "" {
		labeled = proxyNameLabel
	}
	s.services = &serviceKind{
		source: s, name: model.KindService, known: map[model.Name]*model.Service{}, others: map[model.Name]struct{}{},
		convert: kubeobject.Service, trim: trimMetadata[*corev1.Service], foreign: s.ofAnotherProxy,
		lw: listWatch(c.CoreV1().Services("").List, c.CoreV1().Services("").Watch,
			metav1.ListOptions{LabelSelector: labeled, FieldSelector: "spec.clusterIP!=None"}),
		put: func(d *model.Delta, n model.Name, m *model.Service) {
			enter(&d.Services, n, m)
			s.noteExternalIPs(m)
		},
	}
	s.nodes = s.newNodes("Node")
	kinds := []watched{
		s.services,
		&kind[*discoveryv1.EndpointSlice, model.EndpointSlice]{
			source: s, name: "EndpointSlice", known: map[model.Name]*model.EndpointSlice{}, convert: kubeobject.EndpointSlice,
			trim: trimMetadata[*discoveryv1.EndpointSlice],
			// Not by the proxy's name: slices written by hand lack that label.
			lw: listWatch(c.DiscoveryV1().EndpointSlices("").List, c.DiscoveryV1().EndpointSlices("").Watch,
				metav1.ListOptions{LabelSelector: "!" + corev1.IsHeadlessService + "," + discoveryv1.LabelServiceName}),
			put: func(d *model.Delta, n model.Name, m *model.EndpointSlice) {
				enter(&d.Slices, n, m)
				s.noteNodes(m)
			},
		},
		s.nodes,
	}
	if s.cfg.NetworkPolicies || s.cfg.NodePods {
		s.pods = &kind[*corev1.Pod, model.Pod]{
			source: s, name: "Pod", known: map[model.Name]*model.Pod{}, convert: kubeobject.Pod, optional: true, trim: trimPod,
			lw: listWatch(c.CoreV1().Pods("").List, c.CoreV1().Pods("").Watch,
				metav1.ListOptions{FieldSelector: "spec.nodeName=" + s.cfg.NodeName}),
			put: s.putPod,
		}
		kinds = append(kinds, s.pods)
	}
	if !s.cfg.NetworkPolicies {
		return kinds
	}
	return append(kinds,
		&kind[*networkingv1.NetworkPolicy, model.NetworkPolicy]{
			source: s, name: "NetworkPolicy", known: map[model.Name]*model.NetworkPolicy{}, convert: kubeobject.NetworkPolicy, optional: true,
			trim: trimNetworkPolicy,
			lw:   listWatch(c.NetworkingV1().NetworkPolicies("").List, c.NetworkingV1().NetworkPolicies("").Watch, metav1.ListOptions{}),
			put:  func(d *model.Delta, n model.Name, m *model.NetworkPolicy) { enter(&d.NetworkPolicies, n, m) },
		},
	)
}

// ofAnotherProxy reports whether a Service's label leaves it to another proxy. kube-proxy
// does not list such Services; this agent counts them (otherproxies.go).
func (s *Source) ofAnotherProxy(o *corev1.Service) bool {
	name, labeled := o.Labels[proxyNameLabel]
	return labeled != (s.cfg.ProxyName != "") || name != s.cfg.ProxyName
}

// nodesMatching lists and watches the Nodes that a field selector selects.
func (s *Source) nodesMatching(fields string) cache.ListerWatcher {
	c := s.cfg.Client.CoreV1()
	return listWatch(c.Nodes().List, c.Nodes().Watch, metav1.ListOptions{FieldSelector: fields})
}

// listWatch binds a client's methods to a selection.
func listWatch[L runtime.Object](
	list func(context.Context, metav1.ListOptions) (L, error),
	follow func(context.Context, metav1.ListOptions) (watch.Interface, error),
	which metav1.ListOptions,
) cache.ListerWatcher {
	selected := func(o metav1.ListOptions) metav1.ListOptions {
		o.LabelSelector, o.FieldSelector = which.LabelSelector, which.FieldSelector
		return o
	}
	return &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return list(ctx, selected(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return follow(ctx, selected(o))
		},
	}
}

// enter adds a model to a Delta; nil means deleted.
func enter[K comparable, M any](m *map[K]*M, name K, v *M) {
	if *m == nil {
		*m = map[K]*M{}
	}
	(*m)[name] = v
}

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
