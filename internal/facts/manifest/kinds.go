package manifest

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"

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

// strict decodes JSON as an API server with fieldValidation=Strict does: names
// are case-sensitive, and unknown or repeated fields are errors with their path.
func strict(raw []byte, into any) []problem {
	unknown, err := kjson.UnmarshalStrict(raw, into)
	if err != nil {
		p := decodeProblem(err)
		if p.field == "" { // a time decodes itself, without its path
			if at, value := badTime("", raw); at != "" {
				p = problem{field: at, what: clip(string(value)) + ` is not a time; write one like "2026-01-31T12:00:00Z"`}
			}
		}
		return []problem{p}
	}
	var problems []problem
	for _, err := range unknown {
		p := problem{what: err.Error()}
		var at kjson.FieldError
		if errors.As(err, &at) {
			p.field, p.what = at.FieldPath(), "is unknown; check its spelling and its place"
			if strings.HasPrefix(err.Error(), "duplicate") {
				p.what = "is present twice; remove one"
			}
		}
		problems = append(problems, p)
	}
	return problems
}

// named lists the mappings whose keys the author chooses.
var named = set("labels", "annotations", "selector", "matchLabels", "nodeSelector")

// badTime returns the path and the value of the first invalid time. It finds times by the
// field names that all of Kubernetes uses.
func badTime(at string, raw json.RawMessage) (string, json.RawMessage) {
	var fields map[string]json.RawMessage
	var items []json.RawMessage
	if json.Unmarshal(raw, &fields) == nil {
		for _, name := range slices.Sorted(maps.Keys(fields)) {
			path := strings.TrimPrefix(at+"."+name, ".")
			if name == "time" || strings.HasSuffix(name, "Time") || strings.HasSuffix(name, "Timestamp") {
				if new(metav1.Time).UnmarshalJSON(fields[name]) != nil {
					return path, fields[name]
				}
			} else if !named[name] {
				if path, value := badTime(path, fields[name]); path != "" {
					return path, value
				}
			}
		}
	} else if json.Unmarshal(raw, &items) == nil {
		for i, item := range items {
			if path, value := badTime(fmt.Sprintf("%s[%d]", at, i), item); path != "" {
				return path, value
			}
		}
	}
	return "", nil
}

func decodeProblem(err error) problem {
	var mismatch *json.UnmarshalTypeError
	if errors.As(err, &mismatch) {
		got, _, _ := strings.Cut(mismatch.Value, " ")
		return problem{field: mismatch.Field, what: fmt.Sprintf("is of type %s; %s is expected", got, want(mismatch.Type))}
	}
	return problem{what: clip(strings.TrimPrefix(err.Error(), "json: "))}
}

// want names a Go type in YAML's terms.
func want(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string (quote it)"
	case reflect.Bool:
		return "true or false"
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "a mapping"
	case reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Int:
		return fmt.Sprintf("a whole number of %d bits", t.Bits())
	}
	return t.String()
}
