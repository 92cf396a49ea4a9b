package controlplane

import (
	"context"
	"maps"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/internal/facts/kube"
)

// createNode creates a Node in zone a.
func createNode(t *testing.T, k kubernetes.Interface, name string) *corev1.Node {
	t.Helper()
	n := must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelTopologyZone: "a"}},
	}, create))
	t.Cleanup(func() { _ = k.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}) })
	return n
}

// rezone moves a Node to another zone.
func rezone(t *testing.T, k kubernetes.Interface, n *corev1.Node) *corev1.Node {
	t.Helper()
	n.Labels[corev1.LabelTopologyZone] += "a"
	return must[*corev1.Node](t)(k.CoreV1().Nodes().Update(t.Context(), n, update))
}

// zone returns the zone of a Node as the source knows it.
func (w *watcher) zone(name string) string {
	if n := w.world.Nodes[name]; n != nil {
		return n.Labels[corev1.LabelTopologyZone]
	}
	return ""
}

// TestTheNodesOfALargeClusterAreReadAndNotWatched changes another Node and then this one.
// A watch of all Nodes would deliver both, in this order.
func TestTheNodesOfALargeClusterAreReadAndNotWatched(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "large")
	own, other := createNode(t, k, "large-0"), createNode(t, k, "large-1")
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) {
		c.NodeName, c.Nodes = own.Name, kube.NodesConfig{Most: 1, Period: time.Hour, Delay: time.Millisecond}
	})
	w.until(t, "both Nodes", func() bool { return w.full() && w.zone(own.Name) == "a" && w.zone(other.Name) == "a" })

	rezone(t, k, other)
	own = rezone(t, k, own)
	w.until(t, "the change of the own Node", func() bool { return w.zone(own.Name) == "aa" })
	w.mu.Lock()
	if zone := w.zone(other.Name); zone != "a" {
		t.Errorf("the change of another Node was delivered: zone %s", zone)
	}
	w.mu.Unlock()

	createNode(t, k, "large-2")
	s := slice("named", "named", "10.1.2.3")
	name := "large-2"
	s.Endpoints[0].NodeName = &name
	s = createSlice(t, k, "large", s)
	w.until(t, "the Node that an endpoint names", func() bool { return w.zone("large-2") == "a" })

	// A name of no Node is not asked for again and again, and does no harm.
	missing := "large-none"
	s.Endpoints[0].NodeName = &missing
	s = must[*discoveryv1.EndpointSlice](t)(k.DiscoveryV1().EndpointSlices("large").Update(t.Context(), s, update))
	createNode(t, k, "large-3")
	name = "large-3"
	s.Endpoints[0].NodeName = &name
	must[*discoveryv1.EndpointSlice](t)(k.DiscoveryV1().EndpointSlices("large").Update(t.Context(), s, update))
	w.until(t, "the next Node that an endpoint names", func() bool { return w.zone("large-3") == "a" })
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.says(missing) || w.world.Nodes[missing] != nil {
		t.Errorf("problems %v, Nodes %v", w.problems, slices.Sorted(maps.Keys(w.world.Nodes)))
	}
}

func TestTheNodesOfALargeClusterAreReadAgain(t *testing.T) {
	k := client(t, shared)
	own, changed, deleted := createNode(t, k, "again-0"), createNode(t, k, "again-1"), createNode(t, k, "again-2")
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) {
		c.NodeName, c.Nodes = own.Name, kube.NodesConfig{Most: 1, Period: 50 * time.Millisecond, Delay: time.Millisecond}
	})
	w.until(t, "all Nodes", func() bool { return w.full() && w.zone(changed.Name) == "a" && w.zone(deleted.Name) == "a" })
	rezone(t, k, changed)
	if err := k.CoreV1().Nodes().Delete(t.Context(), deleted.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.until(t, "the changes", func() bool { return w.zone(changed.Name) == "aa" && w.zone(deleted.Name) == "" })
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.zone(own.Name) != "a" {
		t.Error("the own Node is missing")
	}
}

func TestModesThatNeedNoOtherNodesReadNone(t *testing.T) {
	k := client(t, shared)
	own, other := createNode(t, k, "only-0"), createNode(t, k, "only-1")
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) { c.NodeName, c.Nodes.OwnOnly = own.Name, true })
	w.until(t, "the own Node", func() bool { return w.full() && w.zone(own.Name) == "a" })
	rezone(t, k, other)
	rezone(t, k, own)
	w.until(t, "the change of the own Node", func() bool { return w.zone(own.Name) == "aa" })
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.world.Nodes) != 1 {
		t.Errorf("Nodes %v, want the own one alone", slices.Sorted(maps.Keys(w.world.Nodes)))
	}
}

// TestExternalIPsNeedTheOtherNodes: in a mode that watches its own Node alone, the podCIDRs of
// the others say which externalIPs are pods' addresses. The Full Delta waits for them.
func TestExternalIPsNeedTheOtherNodes(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "external")
	own, other := createNode(t, k, "external-0"), createNode(t, k, "external-1")
	external := func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"203.0.113.5"} }
	reads := func(with bool) func(*kube.Config) {
		return func(c *kube.Config) {
			c.NodeName, c.Nodes = own.Name, kube.NodesConfig{OwnOnly: true, WithExternalIPs: with, Period: time.Hour, Delay: time.Millisecond}
		}
	}
	later := watch(t, adminKubeconfig(t), reads(true))
	later.until(t, "the own Node", func() bool { return later.full() && later.zone(own.Name) == "a" })
	later.mu.Lock()
	if later.zone(other.Name) != "" {
		t.Error("another Node is known although no Service has externalIPs")
	}
	later.mu.Unlock()
	createService(t, k, "external", service("web", external))
	t.Cleanup(func() {
		_ = k.CoreV1().Services("external").Delete(context.Background(), "web", metav1.DeleteOptions{})
	})
	later.until(t, "the other Node", func() bool { return later.zone(other.Name) == "a" })

	first := watch(t, adminKubeconfig(t), reads(true))
	first.until(t, "the Full Delta", func() bool {
		if first.full() && first.zone(other.Name) != "a" {
			t.Error("the Full Delta lacks the other Node")
		}
		return first.full()
	})
	refuses := watch(t, adminKubeconfig(t), reads(false))
	refuses.until(t, "the Service", func() bool { return refuses.full() && refuses.service("external", "web") != nil })
	rezone(t, k, own)
	refuses.until(t, "the change of the own Node", func() bool { return refuses.zone(own.Name) == "aa" })
	refuses.mu.Lock()
	defer refuses.mu.Unlock()
	if refuses.zone(other.Name) != "" {
		t.Error("another Node is known although no externalIPs are served")
	}
}
