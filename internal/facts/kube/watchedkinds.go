package kube

import (
	"context"

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
	serviceStore = kindStore[*corev1.Service, model.Service]
	nodeStore    = kindStore[*corev1.Node, model.Node]
)

// allKinds returns the kinds to watch, and sets services and nodes.
func (s *Source) allKinds() []watched {
	c := s.cfg.Client
	labeled := ""
	if s.cfg.ProxyName != "" {
		labeled = proxyNameLabel
	}
	s.services = &serviceStore{
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
		&kindStore[*discoveryv1.EndpointSlice, model.EndpointSlice]{
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
		s.pods = &kindStore[*corev1.Pod, model.Pod]{
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
		&kindStore[*networkingv1.NetworkPolicy, model.NetworkPolicy]{
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
