package deploy

import (
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"
	"sigs.k8s.io/yaml"
)

// cluster is a cluster with DaemonSets and the Service kubernetes, as Helm sees it.
type cluster struct{ dynamic.Interface }

func newCluster(t *testing.T, there ...string) cluster {
	t.Helper()
	var objects []runtime.Object
	for _, text := range there {
		o := &unstructured.Unstructured{Object: map[string]any{}}
		if err := yaml.Unmarshal([]byte(text), &o.Object); err != nil {
			t.Fatal(err)
		}
		o.SetAPIVersion("apps/v1")
		o.SetKind("DaemonSet")
		objects = append(objects, o)
	}
	objects = append(objects, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "v1", "kind": "Service", "metadata": map[string]any{"namespace": "default", "name": "kubernetes"},
		"spec": map[string]any{"clusterIPs": []any{"10.96.0.1", "fd00:96::1"}},
	}})
	kinds := map[schema.GroupVersionResource]string{daemonSets: "DaemonSetList", services: "ServiceList"}
	return cluster{fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds, objects...)}
}

var (
	daemonSets = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "daemonsets"}
	services   = schema.GroupVersionResource{Version: "v1", Resource: "services"}
)

// GetClientFor implements engine.ClientProvider. Of other kinds there are no objects.
func (c cluster) GetClientFor(_, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	if kind == "Service" {
		return c.Resource(services), true, nil
	}
	return c.Resource(daemonSets), true, nil
}

// install renders the chart as release spillway in kube-system.
func (c cluster) install(t *testing.T, values string) error {
	t.Helper()
	v := map[string]any{"k8sServiceHost": "10.1.2.3"}
	if err := yaml.Unmarshal([]byte(values), &v); err != nil {
		t.Fatal(err)
	}
	chart := load(t)
	all, err := util.ToRenderValues(chart, v, common.ReleaseOptions{Name: "spillway", Namespace: "kube-system"}, common.DefaultCapabilities)
	if err != nil {
		t.Fatal(err)
	}
	_, err = engine.RenderWithClientProvider(chart, all, c)
	return err
}

func daemonSet(namespace, name, pod string) string {
	return "{metadata: {name: " + name + ", namespace: " + namespace +
		", labels: {app.kubernetes.io/name: spillway, app.kubernetes.io/instance: " + name + "}}, spec: {template: {spec: " + pod + "}}}"
}

func TestASecondReleaseOnTheSameNodesIsRefused(t *testing.T) {
	linux := "{nodeSelector: {kubernetes.io/os: linux}}"
	edge := "{nodeSelector: {kubernetes.io/os: linux, pool: edge}}"
	affine := "{affinity: {nodeAffinity: {}}}"
	for _, c := range []struct {
		name, there, values string
		refused             bool
	}{
		{"another name", daemonSet("kube-system", "other", linux), "{}", true},
		{"another namespace", daemonSet("default", "spillway", linux), "{}", true},
		{"beside kube-proxy", daemonSet("kube-system", "other", linux), "{mode: beside}", true},
		{"every node and a pool", daemonSet("kube-system", "other", linux), "{nodeSelector: {pool: edge}}", true},
		{"the same pool", daemonSet("kube-system", "other", edge), "{nodeSelector: {pool: edge}}", true},
		{"a pool and every node", daemonSet("kube-system", "other", edge), "{}", true},
		{"two pools", daemonSet("kube-system", "other", edge), "{nodeSelector: {pool: core}}", false},
		{"another architecture", daemonSet("kube-system", "other", "{nodeSelector: {kubernetes.io/arch: arm64}}"),
			"{nodeSelector: {kubernetes.io/arch: amd64}}", false},
		{"an affinity there", daemonSet("kube-system", "other", affine), "{}", false},
		{"an affinity here", daemonSet("kube-system", "other", linux),
			"{affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {}}}}", false},
		{"an upgrade", daemonSet("kube-system", "spillway", linux), "{}", false},
		{"another program", "{metadata: {name: kindnet, namespace: kube-system}, spec: {template: {spec: {}}}}", "{}", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := newCluster(t, c.there).install(t, c.values)
			if (err != nil) != c.refused {
				t.Fatalf("got %v, want refused: %v", err, c.refused)
			}
			if err != nil && !strings.Contains(err.Error(), "already runs Spillway on these nodes") {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Before the agent runs, nothing serves the Service.
func TestTheAddressOfTheServiceKubernetesIsRefused(t *testing.T) {
	for values, refused := range map[string]bool{
		"{k8sServiceHost: 10.96.0.1}": true, "{k8sServiceHost: 'fd00:96::1'}": true, "{k8sServiceHost: 10.96.0.1, takeover: true}": true,
		"{k8sServiceHost: 10.96.0.2}": false, "{k8sServiceHost: 10.96.0.1, mode: beside}": false,
	} {
		err := newCluster(t).install(t, values)
		if (err != nil) != refused || err != nil && !strings.Contains(err.Error(), `this is the Service "kubernetes"`) {
			t.Errorf("%s: %v, want refused: %v", values, err, refused)
		}
	}
}
