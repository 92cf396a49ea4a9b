package manifest

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
)

// A reader decodes one object strictly and converts it. ok is false if the object is
// unusable. A nil object with ok needs no proxy.
type reader func(raw []byte) (object any, ok bool, problems []problem)

// kind describes how the objects of one kind are read.
type kind struct {
	apiVersion string
	read       reader
}

// kinds lists the kinds that are read.
var kinds = map[string]kind{
	"Service":       {"v1", typed(kubeobject.Service)},
	"Node":          {"v1", typed(kubeobject.Node)},
	"Pod":           {"v1", typed(kubeobject.Pod)},
	"EndpointSlice": {"discovery.k8s.io/v1", typed(endpointSlice)},
	"NetworkPolicy": {"networking.k8s.io/v1", typed(kubeobject.NetworkPolicy)},
	"Namespace":     {"v1", typed(kubeobject.Namespace)},

	"DoNotTrackPolicy": {v1alpha1.SchemeGroupVersion.String(), typed(kubeobject.DoNotTrackPolicy)},
}

// readVersions holds the apiVersions of kinds. An unknown kind in one of them is more
// likely a typo than an object of another program.
var readVersions = map[string]bool{
	corev1.SchemeGroupVersion.String():       true,
	discoveryv1.SchemeGroupVersion.String():  true,
	networkingv1.SchemeGroupVersion.String(): true,
	v1alpha1.SchemeGroupVersion.String():     true,
}

// readGroups holds the API groups of kinds; "" is the core group. All others are ignored
// silently: a directory may hold a whole application and its custom resources.
var readGroups = set(corev1.GroupName, discoveryv1.GroupName, networkingv1.GroupName, ownGroup)

// ignoredKinds are ignored kinds of groups that contain a known kind. They are listed one
// by one, so that a misspelled Service is reported.
var ignoredKinds = set("/ConfigMap", "/Event", "/LimitRange",
	"/PersistentVolume", "/PersistentVolumeClaim", "/PodTemplate",
	"/ReplicationController", "/ResourceQuota", "/Secret", "/ServiceAccount",
	"networking.k8s.io/Ingress", "networking.k8s.io/IngressClass",
	"networking.k8s.io/IPAddress", "networking.k8s.io/ServiceCIDR")

// clusterScoped holds the kinds without a namespace.
var clusterScoped = set("Node", "Namespace", "DoNotTrackPolicy")

// ownGroup is the API group of Spillway's policies.
var ownGroup = v1alpha1.SchemeGroupVersion.Group

func set(members ...string) map[string]bool {
	m := make(map[string]bool, len(members))
	for _, s := range members {
		m[s] = true
	}
	return m
}

// groupOf returns the API group of an apiVersion, "" for the core group.
func groupOf(apiVersion string) string {
	group, _, grouped := strings.Cut(apiVersion, "/")
	if !grouped {
		return ""
	}
	return group
}

// ignored reports whether objects of a kind are for other programs.
func ignored(group, kind string) bool {
	return !readGroups[group] || ignoredKinds[group+"/"+kind]
}

// endpointSlice converts a slice and reports a slice without a Service. From an API
// server such an object belongs to another program. In a file the label was forgotten.
func endpointSlice(o *discoveryv1.EndpointSlice) (*model.EndpointSlice, []model.Problem) {
	s, problems := kubeobject.EndpointSlice(o)
	if s == nil && len(problems) == 0 && o.Labels[discoveryv1.LabelServiceName] == "" {
		problems = []model.Problem{{
			Field: "metadata.labels[" + discoveryv1.LabelServiceName + "]",
			What:  "is missing; it names the Service that the endpoints belong to",
		}}
	}
	return s, problems
}

// typed returns a reader for a conversion.
func typed[T, M any](convert func(*T) (*M, []model.Problem)) reader {
	return func(raw []byte) (any, bool, []problem) {
		o := new(T)
		if problems := strict(raw, o); len(problems) > 0 {
			return nil, false, problems
		}
		m, found := convert(o)
		var problems []problem
		for _, p := range found {
			problems = append(problems, problem{field: p.Field, what: p.What})
		}
		if m == nil {
			return nil, len(problems) == 0, problems
		}
		return m, true, problems
	}
}
