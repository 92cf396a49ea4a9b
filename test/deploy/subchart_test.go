package deploy

import (
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

// platform renders a chart that depends on Spillway's chart, once for each alias. Each
// dependency has a condition, as Helm's documentation shows.
func platform(t *testing.T, values string, aliases ...string) (string, error) {
	t.Helper()
	parent := &chart.Chart{Metadata: &chart.Metadata{APIVersion: "v2", Name: "platform", Version: "1.0.0"}}
	for _, alias := range aliases {
		dependency := &chart.Dependency{Name: "spillway", Version: "*", Condition: alias + ".enabled"}
		if alias != "spillway" {
			dependency.Alias = alias
		}
		parent.Metadata.Dependencies = append(parent.Metadata.Dependencies, dependency)
	}
	parent.AddDependency(load(t))
	var v map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &v); err != nil {
		t.Fatal(err)
	}
	if err := chartutil.ProcessDependencies(parent, v); err != nil {
		t.Fatal(err)
	}
	return renderChart(parent, common.ReleaseOptions{Name: "platform", Namespace: "kube-system"}, v)
}

func TestTheChartIsAConditionalDependency(t *testing.T) {
	for _, c := range []struct {
		name, values string
		installed    bool
	}{
		{"condition true", "{spillway: {enabled: true, k8sServiceHost: 10.1.2.3}}", true},
		{"condition false", "{spillway: {enabled: false, k8sServiceHost: 10.1.2.3}}", false},
		{"no condition", "{spillway: {k8sServiceHost: 10.1.2.3}}", true},
		{"global values", "{global: {imageRegistry: example.com, nested: {a: [1]}}, spillway: {enabled: true, k8sServiceHost: 10.1.2.3}}", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := platform(t, c.values, "spillway")
			if err != nil || strings.Contains(got, "kind: DaemonSet\nmetadata:\n  name: platform\n") != c.installed {
				t.Errorf("error %v, want installed: %v\n%s", err, c.installed, got)
			}
		})
	}
}

// objects returns the rendered objects.
func objects(t *testing.T, manifests string) (list []*unstructured.Unstructured) {
	t.Helper()
	for text := range strings.SplitSeq(manifests, "---\n") {
		o := &unstructured.Unstructured{}
		if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
			t.Fatal(err)
		}
		if o.Object != nil {
			list = append(list, o)
		}
	}
	return list
}

// names counts the objects by kind, namespace and name.
func names(t *testing.T, manifests string) map[string]int {
	t.Helper()
	found := map[string]int{}
	for _, o := range objects(t, manifests) {
		found[o.GetKind()+" "+o.GetNamespace()+"/"+o.GetName()]++
	}
	return found
}

// One release may have two kinds of agents, for two kinds of nodes. Neither DaemonSet
// selects the Pods of the other.
func TestTwoDependenciesOfOneReleaseShareNoObject(t *testing.T) {
	const common = "k8sServiceHost: 10.1.2.3, podMonitor: {enabled: true}, metrics: {bindAddress: 0.0.0.0}, dashboard: {enabled: true}, " +
		"prometheusRule: {enabled: true}"
	got, err := platform(t, "{edge: {nameOverride: edge, nodeSelector: {pool: edge}, "+common+
		"}, core: {fullnameOverride: core-proxy, nodeSelector: {pool: core}, "+common+"}}", "edge", "core")
	if err != nil {
		t.Fatal(err)
	}
	found := names(t, got)
	for name, n := range found {
		if n > 1 {
			t.Errorf("%d objects are %s", n, name)
		}
	}
	for _, want := range []string{"DaemonSet kube-system/platform-edge", "DaemonSet kube-system/core-proxy",
		"ServiceAccount kube-system/core-proxy"} {
		if found[want] != 1 {
			t.Errorf("%s is missing: %v", want, found)
		}
	}
	selectors := map[string]bool{}
	for _, o := range objects(t, got) {
		if labels, _, _ := unstructured.NestedStringMap(o.Object, "spec", "selector", "matchLabels"); o.GetKind() == "DaemonSet" {
			if selectors[labels["app.kubernetes.io/instance"]] || labels["app.kubernetes.io/name"] != "spillway" {
				t.Errorf("%s selects %v", o.GetName(), labels)
			}
			selectors[labels["app.kubernetes.io/instance"]] = true
		}
	}
}

// Helm refuses to install objects without a namespace that another release has.
func TestReleasesOfOneNameInTwoNamespacesShareNoObject(t *testing.T) {
	values := map[string]any{"k8sServiceHost": "10.1.2.3", "viewer": map[string]any{"enabled": false}}
	seen := map[string]string{}
	for _, namespace := range []string{"a", "b"} {
		got, err := renderChart(load(t), common.ReleaseOptions{Name: "spillway", Namespace: namespace}, values)
		if err != nil {
			t.Fatal(err)
		}
		for name := range names(t, got) {
			if other := seen[name]; other != "" {
				t.Errorf("the releases in %s and %s both have %s", other, namespace, name)
			}
			seen[name] = namespace
		}
	}
}

func TestNamesOfTheChart(t *testing.T) {
	for values, want := range map[string]string{
		"{}":                       "proxy-spillway-1",
		"{nameOverride: spillway}": "proxy-spillway-1",
		"{nameOverride: edge}":     "proxy-spillway-1-edge",
		"{nameOverride: edge, fullnameOverride: core}": "core",
	} {
		v := map[string]any{"k8sServiceHost": "10.1.2.3", "viewer": map[string]any{"enabled": false}}
		if err := yaml.Unmarshal([]byte(values), &v); err != nil {
			t.Fatal(err)
		}
		got, err := renderChart(load(t), common.ReleaseOptions{Name: "proxy-spillway-1", Namespace: "net"}, v)
		if err != nil || names(t, got)["DaemonSet net/"+want] != 1 || !strings.Contains(got, "serviceAccountName: "+want+"\n") {
			t.Errorf("%s: error %v, want the name %s\n%v", values, err, want, names(t, got))
		}
	}
}
