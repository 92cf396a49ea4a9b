package controlplane

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/test/testbed/controlplane"
)

var (
	ensureNamespace = controlplane.EnsureNamespace
	create          = metav1.CreateOptions{}
	update          = metav1.UpdateOptions{}
	remove          = metav1.DeleteOptions{}
)

func service(name string, change func(*corev1.Service)) *corev1.Service {
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}
	if change != nil {
		change(s)
	}
	return s
}

func slice(name, service, addr string) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080)}},
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{addr}}},
	}
}

func policy(name string) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}},
	}
}

func pod(name, node string, labels map[string]string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "none"}}},
	}
}

// must fails the test for an error of the API.
func must[T any](t *testing.T) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func createService(t *testing.T, k kubernetes.Interface, ns string, s *corev1.Service) *corev1.Service {
	t.Helper()
	return must[*corev1.Service](t)(k.CoreV1().Services(ns).Create(t.Context(), s, create))
}

func createSlice(t *testing.T, k kubernetes.Interface, ns string, s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	t.Helper()
	return must[*discoveryv1.EndpointSlice](t)(k.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), s, create))
}

// grant gives a user the rights to get, list and watch resources of one group, in all
// namespaces.
func grant(t *testing.T, k kubernetes.Interface, user, group string, resources ...string) {
	t.Helper()
	name := user + "-" + resources[0]
	must[*rbacv1.ClusterRole](t)(k.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{group}, Resources: resources, Verbs: []string{"get", "list", "watch"}}},
	}, create))
	must[*rbacv1.ClusterRoleBinding](t)(k.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}},
	}, create))
}
