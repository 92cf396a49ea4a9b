package deploy

import (
	"regexp"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// KubeProxyDown and the dashboard "Kubernetes / Proxy" of kubernetes-mixin ask for the job
// kube-proxy. Spillway's own alerts ask for the job of the first endpoint.
func TestThePodMonitorAnswersForKubeProxy(t *testing.T) {
	const base = "k8sServiceHost: 10.1.2.3, metrics: {bindAddress: 0.0.0.0}, podMonitor: {enabled: true"
	if n := len(podEndpoints(t, "{"+base+"}}")); n != 1 {
		t.Errorf("%d endpoints without kubeProxy.enabled, want 1", n)
	}
	endpoints := podEndpoints(t, "{"+base+", kubeProxy: {enabled: true, labels: {cluster: 'a$b'}}}}")
	if len(endpoints) != 2 {
		t.Fatalf("%d endpoints, want 2", len(endpoints))
	}
	labels := map[string]string{}
	for _, r := range list(endpoints[1], "relabelings") {
		label, _ := r["targetLabel"].(string)
		labels[label], _ = r["replacement"].(string)
	}
	if labels["job"] != "kube-proxy" || labels["cluster"] != "a$$b" {
		t.Errorf("labels %v", labels)
	}
	for _, r := range list(endpoints[0], "relabelings") {
		if r["targetLabel"] == "job" {
			t.Error("the job of Spillway's own alerts is replaced")
		}
	}
	keep := list(endpoints[1], "metricRelabelings")
	if len(keep) != 1 || keep[0]["action"] != "keep" {
		t.Fatalf("metricRelabelings %v", keep)
	}
	names := regexp.MustCompile("^(?:" + keep[0]["regex"].(string) + ")$") // as Prometheus anchors it
	for name, want := range map[string]bool{
		// The dashboard asks for these.
		"kubeproxy_sync_proxy_rules_duration_seconds_bucket": true, "kubeproxy_network_programming_duration_seconds_count": true,
		"rest_client_requests_total": true, "rest_client_request_duration_seconds_bucket": true,
		"process_resident_memory_bytes": true, "process_cpu_seconds_total": true, "go_goroutines": true,
		"spillway_problems": false, "node_nf_conntrack_entries": false,
	} {
		if names.MatchString(name) != want {
			t.Errorf("%s is kept: %v, want %v", name, !want, want)
		}
	}
}

// The metrics by Service have a label namespace of their own. Prometheus would rename it to
// exported_namespace, for which the dashboard does not ask.
func TestThePodMonitorKeepsTheNamespaceOfAService(t *testing.T) {
	endpoints := podEndpoints(t, "{k8sServiceHost: 10.1.2.3, metrics: {bindAddress: 0.0.0.0}, podMonitor: {enabled: true}}")
	if endpoints[0]["honorLabels"] != true {
		t.Errorf("the endpoint %v has not honorLabels: true", endpoints[0])
	}
}

// podEndpoints returns the endpoints of the chart's PodMonitor.
func podEndpoints(t *testing.T, values string) []map[string]any {
	t.Helper()
	out, err := render(t, values)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects(t, out) {
		if o.GetKind() == "PodMonitor" {
			spec, _, _ := unstructured.NestedMap(o.Object, "spec")
			return list(spec, "podMetricsEndpoints")
		}
	}
	t.Fatal("no PodMonitor")
	return nil
}

func list(of map[string]any, name string) (found []map[string]any) {
	elements, _ := of[name].([]any)
	for _, e := range elements {
		found = append(found, e.(map[string]any))
	}
	return found
}
