package controlplane

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"

	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// schedule binds the Pods of a DaemonSet to their nodes, as the scheduler does, and has their
// containers run, as kubelets do. It returns the names of the Pods by node.
func schedule(t *testing.T, k kubernetes.Interface, set *appsv1.DaemonSet, nodes int) map[string]string {
	t.Helper()
	pods, names := k.CoreV1().Pods(set.Namespace), map[string]string{}
	await.NoError(t, func() error {
		list, err := pods.List(t.Context(), metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(set.Spec.Selector)})
		if err != nil {
			return err
		}
		clear(names)
		for _, p := range list.Items {
			if owner := metav1.GetControllerOf(&p); owner == nil || owner.UID != set.UID || p.DeletionTimestamp != nil || p.Spec.Affinity == nil {
				continue // of imitate, or leaving
			}
			node := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0].MatchFields[0].Values[0]
			names[node] = p.Name
			if p.Spec.NodeName == "" {
				if err := pods.Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.Name},
					Target: corev1.ObjectReference{Kind: "Node", Name: node}}, create); err != nil {
					return err
				}
			}
			if err := runAgent(t, k, set.Namespace, p.Name); err != nil {
				return err
			}
		}
		if len(names) != nodes {
			return fmt.Errorf("the DaemonSet has Pods %v, want %d", names, nodes)
		}
		return nil
	})
	return names
}

// runAgent writes the status of a Pod whose container agent runs.
func runAgent(t *testing.T, k kubernetes.Interface, namespace, name string) error {
	pods := k.CoreV1().Pods(namespace)
	return retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller may adopt the Pod
		p, err := pods.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		p.Status.Phase = corev1.PodRunning
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "agent",
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}}}
		_, err = pods.UpdateStatus(t.Context(), p, update)
		return err
	})
}

// imitate creates a running Pod that looks like a DaemonSet's.
func imitate(t *testing.T, k kubernetes.Interface, set *appsv1.DaemonSet, node, name string, change func(*corev1.Pod)) {
	t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app.kubernetes.io/name": "spillway"}}}
	set.Spec.Template.Spec.DeepCopyInto(&p.Spec)
	p.Spec.NodeName = node
	change(p)
	must[*corev1.Pod](t)(k.CoreV1().Pods(set.Namespace).Create(t.Context(), p, create))
	if err := runAgent(t, k, set.Namespace, name); err != nil {
		t.Fatal(err)
	}
}

// TestAgentsAreThePodsOfTheDaemonSet has the real DaemonSet controller create and update the
// Pods. The viewer and the administrator find those alone.
func TestAgentsAreThePodsOfTheDaemonSet(t *testing.T) {
	dir := must[string](t)(makeDir())
	removeAtEnd(t, dir)
	c, err := controlplane.Up(t.Context(), controlplane.Config{Dir: dir, Controllers: []string{"daemonset-controller"},
		APIServerArgs: asInClusters})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Down)
	k := client(t, c)
	for node, os := range map[string]string{"node-a": "linux", "node-b": "linux", "other": ""} {
		must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(),
			&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{corev1.LabelOSStable: os}}}, create))
	}
	objects := manifest(t, "viewer")
	createViewer(t, c, objects)
	must[*rbacv1.ClusterRoleBinding](t)(k.RbacV1().ClusterRoleBindings().Create(t.Context(),
		find[*rbacv1.ClusterRoleBinding](t, objects), create))
	if err := ensureNamespace(t.Context(), k, "tenant"); err != nil {
		t.Fatal(err)
	}
	set := find[*appsv1.DaemonSet](t, objects)
	set.Spec.UpdateStrategy = appsv1.DaemonSetUpdateStrategy{Type: appsv1.OnDeleteDaemonSetStrategyType}
	tenants := set.DeepCopy()
	tenants.Namespace, tenants.Spec.Template.Spec.PriorityClassName = "tenant", ""
	set = must[*appsv1.DaemonSet](t)(k.AppsV1().DaemonSets(set.Namespace).Create(t.Context(), set, create))
	tenants = must[*appsv1.DaemonSet](t)(k.AppsV1().DaemonSets("tenant").Create(t.Context(), tenants, create))
	names := schedule(t, k, set, 2)
	schedule(t, k, tenants, 2)

	wantAgents := func() {
		t.Helper()
		for _, user := range []string{"viewer", ""} {
			list, _, err := must[*reach.Cluster](t)(reach.New(reach.Config{REST: restAs(c, user)})).Agents(t.Context())
			if err != nil || len(list) < 2 {
				t.Fatalf("user %q: %+v, %v", user, list, err)
			}
			for _, a := range list {
				if want := names[a.Node]; a.Pod != want || a.Pod != "" && (a.Namespace != set.Namespace || a.Err != nil) {
					t.Errorf("user %q: %+v, want Pod %q", user, a, want)
				}
				if a.Node == "other" && (a.Err == nil || !strings.Contains(a.Err.Error(), "no DaemonSet owns it")) {
					t.Errorf("user %q: %v", user, a.Err)
				}
			}
		}
	}
	wantAgents()

	imitate(t, k, set, "other", "spillway-label", func(*corev1.Pod) {})
	imitate(t, k, set, "other", "spillway-owner", func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "DaemonSet", Name: set.Name, UID: tenants.UID,
			Controller: ptr.To(true)}}
	})
	// The controller adopts a Pod with all labels of its selector, and gives it the true UID.
	imitate(t, k, set, "other", "spillway-zzzzzz", func(p *corev1.Pod) {
		p.Labels, p.Spec.Containers[0].Image = set.Spec.Selector.MatchLabels, "evil"
	})
	await.True(t, "the Pod with another image is adopted", func() bool {
		p, err := k.CoreV1().Pods(set.Namespace).Get(t.Context(), "spillway-zzzzzz", metav1.GetOptions{})
		owner := metav1.GetControllerOf(p)
		return err == nil && owner != nil && owner.UID == set.UID
	})
	wantAgents()

	// An update has replaced one Pod of two.
	before := set.Spec.Template.Spec.Containers[0].Image
	err = retry.RetryOnConflict(retry.DefaultBackoff, func() error { // the controller writes its status
		set = must[*appsv1.DaemonSet](t)(k.AppsV1().DaemonSets(set.Namespace).Get(t.Context(), set.Name, metav1.GetOptions{}))
		set.Spec.Template.Spec.Containers[0].Image = before + "-next"
		updated, err := k.AppsV1().DaemonSets(set.Namespace).Update(t.Context(), set, update)
		if err == nil {
			set = updated
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.CoreV1().Pods(set.Namespace).Delete(t.Context(), names["node-b"],
		metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil {
		t.Fatal(err)
	}
	old := names["node-b"]
	if names = schedule(t, k, set, 2); names["node-b"] == old {
		t.Fatalf("%v", names)
	}
	p := must[*corev1.Pod](t)(k.CoreV1().Pods(set.Namespace).Get(t.Context(), names["node-b"], metav1.GetOptions{}))
	if p.Spec.Containers[0].Image != before+"-next" {
		t.Fatalf("image %s", p.Spec.Containers[0].Image)
	}
	wantAgents()
	if image, _, err := reach.Image(t.Context(), k, ""); image != before+"-next" || err != nil {
		t.Errorf("image %s, %v", image, err)
	}
}
