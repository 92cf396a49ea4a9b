package kube

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// Snapshot lists once, for the whole cluster, every object that DoNotTrackPolicies depend
// on.
func Snapshot(ctx context.Context, client kubernetes.Interface, policies dynamic.Interface) (model.Delta, []model.Problem, error) {
	d := model.Delta{Full: true}
	var problems []model.Problem
	all := metav1.ListOptions{}
	core := client.CoreV1()
	services, err := core.Services("").List(ctx, all)
	if err != nil {
		return d, nil, fmt.Errorf("list services: %w", err)
	}
	convertAll(services.Items, kubeobject.Service, func(m *model.Service) { enter(&d.Services, m.Name, m) }, &problems)
	slices, err := client.DiscoveryV1().EndpointSlices("").List(ctx, all)
	if err != nil {
		return d, nil, fmt.Errorf("list endpointslices: %w", err)
	}
	convertAll(slices.Items, kubeobject.EndpointSlice, func(m *model.EndpointSlice) { enter(&d.Slices, m.Name, m) }, &problems)
	nodes, err := core.Nodes().List(ctx, all)
	if err != nil {
		return d, nil, fmt.Errorf("list nodes: %w", err)
	}
	convertAll(nodes.Items, kubeobject.Node, func(m *model.Node) { enter(&d.Nodes, m.Name, m) }, &problems)
	namespaces, err := core.Namespaces().List(ctx, all)
	if err != nil {
		return d, nil, fmt.Errorf("list namespaces: %w", err)
	}
	convertAll(namespaces.Items, kubeobject.Namespace, func(m *model.Namespace) { enter(&d.Namespaces, m.Name, m) }, &problems)
	pods, err := core.Pods("").List(ctx, all)
	if err != nil {
		return d, nil, fmt.Errorf("list pods: %w", err)
	}
	convertAll(pods.Items, kubeobject.Pod, func(m *model.Pod) { enter(&d.Pods, m.Name, m) }, &problems)
	network, err := client.NetworkingV1().NetworkPolicies("").List(ctx, all)
	if err != nil { // only hints depend on them
		problems = append(problems, model.Problem{Where: "NetworkPolicies", What: fmt.Sprintf("cannot be listed: %v", err)})
	} else {
		convertAll(network.Items, kubeobject.NetworkPolicy, func(m *model.NetworkPolicy) { enter(&d.NetworkPolicies, m.Name, m) }, &problems)
	}
	err = snapshotPolicies(ctx, policies, &d, &problems)
	return d, problems, err
}

func snapshotPolicies(ctx context.Context, policies dynamic.Interface, d *model.Delta, problems *[]model.Problem) error {
	list, err := policies.Resource(v1alpha1.DoNotTrackPolicies).List(ctx, metav1.ListOptions{})
	if apierrors.IsNotFound(err) {
		return fmt.Errorf("the API server does not know DoNotTrackPolicies: %s", noCRD)
	}
	if err != nil {
		return fmt.Errorf("list donottrackpolicies: %w", err)
	}
	for i := range list.Items {
		var o v1alpha1.DoNotTrackPolicy
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(list.Items[i].Object, &o); err != nil {
			*problems = append(*problems, unreadable(list.Items[i].GetName(), err))
			continue
		}
		convertAll([]v1alpha1.DoNotTrackPolicy{o}, kubeobject.DoNotTrackPolicy,
			func(m *model.DoNotTrackPolicy) { enter(&d.DoNotTrackPolicies, m.Name, m) }, problems)
	}
	return nil
}

// convertAll converts objects and calls put with each result that is not nil.
func convertAll[A, M any](items []A, convert func(*A) (*M, []model.Problem), put func(*M), problems *[]model.Problem) {
	for i := range items {
		m, found := convert(&items[i])
		*problems = append(*problems, found...)
		if m != nil {
			put(m)
		}
	}
}
