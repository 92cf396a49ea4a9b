package kube

import (
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"spillway.dev/spillway/internal/facts/model"
)

// TestAListKeepsOnlyTheMetadataThatIsRead has the labels and annotations of a tenant that wants
// to fill the memory of every agent.
func TestAListKeepsOnlyTheMetadataThatIsRead(t *testing.T) {
	large := strings.Repeat("x", 256<<10)
	read := map[string]string{
		model.AnnotationPrefix + "weight": "7", corev1.EndpointsLastChangeTriggerTime: "2026-01-02T03:04:05Z",
		"service.beta.kubernetes.io/load-balancer-source-ranges": "10.0.0.0/8",
	}
	labels := map[string]string{
		discoveryv1.LabelServiceName: "web", corev1.IsHeadlessService: "", proxyNameLabel: "other",
	}
	meta := func() metav1.ObjectMeta {
		m := metav1.ObjectMeta{Name: "web", Annotations: maps.Clone(read), Labels: maps.Clone(labels)}
		m.Annotations[corev1.LastAppliedConfigAnnotation], m.Annotations["example.com/notes"] = large, large
		m.Labels["example.com/team"] = "a"
		return m
	}
	svc, slice, policy := &corev1.Service{ObjectMeta: meta()}, &discoveryv1.EndpointSlice{ObjectMeta: meta()},
		&networkingv1.NetworkPolicy{ObjectMeta: meta()}
	for _, o := range []struct {
		object metav1.Object
		trim   cache.TransformFunc
	}{
		{svc, (&kindStore[*corev1.Service, model.Service]{trim: trimMetadata[*corev1.Service]}).Transformer()},
		{slice, (&kindStore[*discoveryv1.EndpointSlice, model.EndpointSlice]{trim: trimMetadata[*discoveryv1.EndpointSlice]}).Transformer()},
		{policy, (&kindStore[*networkingv1.NetworkPolicy, model.NetworkPolicy]{trim: trimNetworkPolicy}).Transformer()},
	} {
		o.object.SetFinalizers([]string{large})
		o.object.SetOwnerReferences([]metav1.OwnerReference{{Name: large}})
		if _, err := o.trim(o.object); err != nil || o.object.GetFinalizers() != nil || o.object.GetOwnerReferences() != nil {
			t.Errorf("error %v: finalizers or owners are left", err)
		}
	}
	for _, m := range []metav1.ObjectMeta{svc.ObjectMeta, slice.ObjectMeta} {
		if !maps.Equal(m.Annotations, read) || !maps.Equal(m.Labels, labels) {
			t.Errorf("annotations %v, labels %v; want %v, %v", slices.Sorted(maps.Keys(m.Annotations)), m.Labels, read, labels)
		}
	}
	if policy.Annotations != nil || policy.Labels != nil {
		t.Errorf("a NetworkPolicy keeps labels %v and %d annotations", policy.Labels, len(policy.Annotations))
	}
}

// TestThisNodesAnnotationsAreRead: other Nodes keep none.
func TestThisNodesAnnotationsAreRead(t *testing.T) {
	s := &Source{cfg: Config{NodeName: "here"}}
	read := map[string]string{model.AnnotationPrefix + "egress-addresses": "203.0.113.0/28"}
	for name, want := range map[string]map[string]string{"here": read, "there": nil} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: maps.Clone(read)}}
		n.Annotations["example.com/notes"] = "x"
		if s.trimNode(n); !maps.Equal(n.Annotations, want) {
			t.Errorf("%s keeps annotations %v, want %v", name, n.Annotations, want)
		}
	}
}
