package controlplane

import (
	"encoding/json"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// createViewer creates the viewer's objects of a manifest, and deletes them at the end.
func createViewer(t *testing.T, c *controlplane.ControlPlane, objects [][]byte) {
	t.Helper()
	d := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(c.REST()))
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(client(t, c).Discovery()))
	for _, object := range objects {
		u := &unstructured.Unstructured{}
		if err := json.Unmarshal(object, &u.Object); err != nil {
			t.Fatal(err)
		}
		if kind := u.GroupVersionKind(); strings.Contains(u.GetName(), "viewer") {
			m, err := mapper.RESTMapping(kind.GroupKind(), kind.Version)
			if err != nil {
				t.Fatal(err)
			}
			var at dynamic.ResourceInterface = d.Resource(m.Resource)
			if u.GetNamespace() != "" {
				at = d.Resource(m.Resource).Namespace(u.GetNamespace())
			}
			must[*unstructured.Unstructured](t)(at.Create(t.Context(), u, create))
			t.Cleanup(func() { _ = at.Delete(t.Context(), u.GetName(), metav1.DeleteOptions{}) })
		}
	}
}

// restAs returns the access of a user; "" is the administrator.
func restAs(c *controlplane.ControlPlane, user string) *rest.Config {
	cfg := c.REST()
	if user != "" {
		cfg.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:authenticated"}}
	}
	return cfg
}

// as returns the client of a user.
func as(t *testing.T, user string) *kubernetes.Clientset {
	t.Helper()
	return must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(restAs(shared, user)))
}

// askExec asks for an exec. The Pod does not exist: an allowed request is not found.
func askExec(t *testing.T, user, verb, namespace, pod, container, command string) error {
	t.Helper()
	r := as(t, user).CoreV1().RESTClient().Verb(verb).Namespace(namespace).Resource("pods").Name(pod).SubResource("exec").
		Param("container", container).Param("stdin", "true").Param("stdout", "true")
	for _, word := range strings.Fields(command) {
		r = r.Param("command", word)
	}
	return r.Do(t.Context()).Error()
}

// TestAViewerReachesTheAgentsAndNothingElse asks a real API server what the chart's roles and
// policy allow.
func TestAViewerReachesTheAgentsAndNothingElse(t *testing.T) {
	const byPolicy, byRole, allowed = `the Role spillway-viewer allows "spillway api-pipe"`, "cannot create resource", ""
	k := client(t, shared)
	// A group that may exec everywhere without being viewers.
	must[*rbacv1.ClusterRole](t)(k.RbacV1().ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "exec-everywhere"},
		Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: []string{"pods/exec"}, Verbs: []string{"create"}}},
	}, create))
	must[*rbacv1.ClusterRoleBinding](t)(k.RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "exec-everywhere"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "exec-everywhere"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: "on-call"}},
	}, create))
	createViewer(t, shared, manifest(t, "viewer"))

	// Until the API server has read the policy, it would prove nothing.
	await.True(t, "the policy is active", func() bool {
		err := askExec(t, "viewer", "POST", "kube-system", "spillway-abcde", "agent", "sh")
		return err != nil && strings.Contains(err.Error(), byPolicy)
	})
	for _, c := range []struct{ name, user, verb, namespace, pod, container, command, refused string }{
		{"the viewer connects to an agent", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "spillway api-pipe", allowed},
		{"by WebSocket", "viewer", "GET", "kube-system", "spillway-abcde", "agent", "spillway api-pipe", allowed},
		{"a shell", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "sh", byPolicy},
		{"a shell, by GET", "viewer", "GET", "kube-system", "spillway-abcde", "agent", "sh", byPolicy},
		{"another command", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "spillway agent --cleanup", byPolicy},
		{"an argument", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "spillway api-pipe /run/containerd.sock", byPolicy},
		{"the path of another program", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "/tmp/spillway api-pipe", byPolicy},
		{"no command", "viewer", "POST", "kube-system", "spillway-abcde", "agent", "", byPolicy},
		{"another container", "viewer", "POST", "kube-system", "spillway-abcde", "debugger", "spillway api-pipe", byPolicy},
		{"no container", "viewer", "POST", "kube-system", "spillway-abcde", "", "spillway api-pipe", byPolicy},
		{"another Pod", "viewer", "POST", "kube-system", "etcd-node0", "agent", "spillway api-pipe", byPolicy},
		{"a Pod with a longer name", "viewer", "POST", "kube-system", "spillway-x-abcde", "agent", "spillway api-pipe", byPolicy},
		{"another namespace", "viewer", "POST", "default", "spillway-abcde", "agent", "spillway api-pipe", byRole},
		{"a stranger", "stranger", "POST", "kube-system", "spillway-abcde", "agent", "spillway api-pipe", byRole},
		{"an administrator is not limited", "", "POST", "kube-system", "spillway-abcde", "agent", "sh", allowed},
		{"nor in other Pods", "", "POST", "kube-system", "etcd-node0", "etcd", "sh", allowed},
		{"nor others with a right of their own", "on-call", "POST", "kube-system", "spillway-abcde", "agent", "sh", allowed},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := askExec(t, c.user, c.verb, c.namespace, c.pod, c.container, c.command)
			if c.refused == allowed && !apierrors.IsNotFound(err) {
				t.Errorf("got %v, want an error of the Pod that does not exist", err)
			}
			if c.refused != allowed && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.refused)) {
				t.Errorf("got %v, want %q", err, c.refused)
			}
		})
	}

	viewer := as(t, "viewer").CoreV1()
	list := func(what string, err error, wanted bool) {
		if wanted && err != nil || !wanted && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := viewer.Pods("kube-system").List(t.Context(), metav1.ListOptions{})
	list("the agents' Pods", err, true)
	_, err = viewer.Nodes().List(t.Context(), metav1.ListOptions{})
	list("nodes", err, true)
	_, err = viewer.Pods("").List(t.Context(), metav1.ListOptions{})
	list("all Pods", err, false)
	_, err = viewer.Secrets("kube-system").List(t.Context(), metav1.ListOptions{})
	list("secrets", err, false)
	_, err = as(t, "viewer").RbacV1().ClusterRoleBindings().List(t.Context(), metav1.ListOptions{})
	list("ClusterRoleBindings", err, false)
}
