package controlplane

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

func adminKubeconfig(t *testing.T) string {
	t.Helper()
	return must[string](t)(shared.AdminKubeconfig())
}

func TestTheFirstDeltaIsTheWholeWorld(t *testing.T) {
	k := client(t, shared)
	w := controlplane.Crowd{Namespace: "whole", Services: 50, Endpoints: 3, Nodes: []string{"here", "there"}}
	if err := w.Create(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	must[*networkingv1.NetworkPolicy](t)(k.NetworkingV1().NetworkPolicies("whole").Create(t.Context(), policy("p"), create))
	must[*corev1.Pod](t)(k.CoreV1().Pods("whole").Create(t.Context(), pod("mine", "here", nil), create))
	must[*corev1.Pod](t)(k.CoreV1().Pods("whole").Create(t.Context(), pod("other", "there", nil), create))

	got := watch(t, adminKubeconfig(t), nil)
	got.until(t, "a full delta", got.full)
	got.mu.Lock()
	defer got.mu.Unlock()
	if got.early != 0 || got.fulls != 1 {
		t.Errorf("%d deltas before the full one, %d full ones", got.early, got.fulls)
	}
	services, slices := 0, 0
	for n := range got.world.Services {
		if n.Namespace == "whole" {
			services++
		}
	}
	for n, s := range got.world.Slices {
		if n.Namespace == "whole" && len(s.Endpoints) == 3 {
			slices++
		}
	}
	if services != 50 || slices != 50 {
		t.Errorf("%d Services and %d slices, want 50 each", services, slices)
	}
	if got.world.NetworkPolicies[model.Name{Namespace: "whole", Name: "p"}] == nil {
		t.Error("the NetworkPolicy is missing")
	}
	if got.world.Pods[model.Name{Namespace: "whole", Name: "mine"}] == nil {
		t.Error("the Pod of this node is missing")
	}
	if got.world.Pods[model.Name{Namespace: "whole", Name: "other"}] != nil {
		t.Error("a Pod of another node is there")
	}
}

func TestServicesForOthersAreLeftAlone(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "select")
	label := func(value string) func(*corev1.Service) {
		return func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": value}
		}
	}
	createService(t, k, "select", service("plain", nil))
	createService(t, k, "select", service("headless", func(s *corev1.Service) { s.Spec.ClusterIP = "None" }))
	createService(t, k, "select", service("outside", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalName = corev1.ServiceTypeExternalName, "example.org"
	}))
	createService(t, k, "select", service("mine", label("spillway")))
	createService(t, k, "select", service("theirs", label("other")))

	for _, c := range []struct {
		proxy string
		want  string
	}{{"", "plain"}, {"spillway", "mine"}} {
		w := watch(t, adminKubeconfig(t), func(cfg *kube.Config) { cfg.ProxyName = c.proxy })
		w.until(t, "a full delta", w.full)
		w.mu.Lock()
		for n := range w.world.Services {
			if n.Namespace == "select" && n.Name != c.want {
				t.Errorf("proxy %q has Service %s", c.proxy, n)
			}
		}
		if w.service("select", c.want) == nil {
			t.Errorf("proxy %q does not have Service %s", c.proxy, c.want)
		}
		w.mu.Unlock()
	}

	// A label moves a running Service from one proxy to the other.
	w := watch(t, adminKubeconfig(t), nil)
	w.until(t, "the Service", func() bool { return w.service("select", "plain") != nil })
	s := must[*corev1.Service](t)(k.CoreV1().Services("select").Get(t.Context(), "plain", metav1.GetOptions{}))
	label("spillway")(s)
	must[*corev1.Service](t)(k.CoreV1().Services("select").Update(t.Context(), s, update))
	w.until(t, "the Service gone to another proxy", func() bool { return w.service("select", "plain") == nil })
}

func TestWhatIsNotUsedIsNotKept(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "slim")
	createService(t, k, "slim", service("applied", func(s *corev1.Service) {
		s.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "other": "no", "spillway.dev/kept": "yes"}
	}))
	w := watch(t, adminKubeconfig(t), nil)
	w.until(t, "the Service", func() bool { return w.service("slim", "applied") != nil })
	w.mu.Lock()
	if got := w.service("slim", "applied").Annotations; len(got) != 1 || got["spillway.dev/kept"] != "yes" {
		t.Errorf("annotations %v", got)
	}
	w.mu.Unlock()
}

func TestObjectsMayComeInAnyOrder(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "order")
	w := watch(t, adminKubeconfig(t), nil)
	w.until(t, "a full delta", w.full)
	createSlice(t, k, "order", slice("early", "web", "10.1.0.1"))
	w.until(t, "a slice without its Service", func() bool { return w.slice("order", "early") != nil })
	createService(t, k, "order", service("web", nil))
	// The same endpoint in two slices: intent decides which counts.
	createSlice(t, k, "order", slice("twice", "web", "10.1.0.1"))
	w.until(t, "all of them", func() bool {
		return w.service("order", "web") != nil && w.slice("order", "early") != nil && w.slice("order", "twice") != nil
	})
	if err := k.CoreV1().Services("order").Delete(t.Context(), "web", remove); err != nil {
		t.Fatal(err)
	}
	w.until(t, "the Service gone before its slices", func() bool {
		return w.service("order", "web") == nil && w.slice("order", "early") != nil
	})
}

// awaitRequests waits for so many more requests of this process that end with a status code.
func awaitRequests(t *testing.T, code string, more float64) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(kube.RequestCollectors()...)
	count := func() (sum float64) {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, family := range families {
			for _, m := range family.Metric {
				if family.GetName() == "rest_client_requests_total" && m.Label[0].GetValue() == code {
					sum += m.GetCounter().GetValue()
				}
			}
		}
		return sum
	}
	want := count() + more
	await.True(t, "more requests that end with "+code, func() bool { return count() >= want })
}

func TestTheLastStateStandsWhileTheServerIsAway(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "away")
	createService(t, k, "away", service("stays", nil))
	w := watch(t, adminKubeconfig(t), nil)
	w.until(t, "the Service", func() bool { return w.service("away", "stays") != nil })
	w.mu.Lock()
	deletes := w.deletes
	w.mu.Unlock()

	shared.StopAPIServer()
	w.until(t, "a problem", func() bool { return w.says("cannot be reached: connection refused; the last state stays in effect") })
	awaitRequests(t, "<error>", 4)
	w.mu.Lock()
	if w.service("away", "stays") == nil || w.deletes != deletes || w.fulls != 1 {
		t.Errorf("the world changed while the server was away: %d deletes, %d full deltas", w.deletes-deletes, w.fulls)
	}
	w.mu.Unlock()

	if err := shared.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	createService(t, k, "away", service("new", nil))
	w.until(t, "the new Service, and no problem any more", func() bool {
		return w.service("away", "new") != nil && !w.says("API server")
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.service("away", "stays") == nil || w.fulls != 1 {
		t.Errorf("the old Service is gone, or there were %d full deltas", w.fulls)
	}
}

func TestAWatchThatExpiredIsListedAnew(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "gone")
	old := createService(t, k, "gone", service("old", nil))
	createService(t, k, "gone", service("kept", nil))
	line := newLine(t, shared.Server())
	w := watch(t, must[string](t)(shared.KubeconfigAt(line.server(), controlplane.User{Name: "x", Groups: []string{"system:masters"}})), nil)
	w.until(t, "both Services", func() bool { return w.service("gone", "old") != nil && w.service("gone", "kept") != nil })

	line.setCut(true)
	if err := k.CoreV1().Services("gone").Delete(t.Context(), "old", remove); err != nil {
		t.Fatal(err)
	}
	createService(t, k, "gone", service("new", nil))
	if err := shared.Compact(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The server has forgotten the changes since the last version.
	follow, err := k.CoreV1().Services("gone").Watch(t.Context(), metav1.ListOptions{ResourceVersion: old.ResourceVersion})
	if err == nil {
		e := <-follow.ResultChan()
		err = apierrors.FromObject(e.Object)
		follow.Stop()
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Fatalf("a watch from before the compaction gives %v, want 410", err)
	}
	line.setCut(false)
	w.until(t, "what happened meanwhile", func() bool {
		return w.service("gone", "old") == nil && w.service("gone", "new") != nil && w.service("gone", "kept") != nil
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.fulls != 1 {
		t.Errorf("%d full deltas, want 1: a relist delivers the difference", w.fulls)
	}
}

func TestForbiddenNetworkPoliciesDoNotKeepTheAgentFromServing(t *testing.T) {
	k := client(t, shared)
	const user = "limited"
	grant(t, k, user, "", "services", "nodes", "pods")
	grant(t, k, user, "discovery.k8s.io", "endpointslices")
	w := watch(t, must[string](t)(shared.Kubeconfig(controlplane.User{Name: user})), nil)
	w.until(t, "a full delta", w.full)
	w.mu.Lock()
	if !w.unknown || !w.says("networkpolicies.networking.k8s.io: no traffic bypasses netfilter") {
		t.Errorf("policies unknown: %v; problems: %v", w.unknown, w.problems)
	}
	w.mu.Unlock()

	namespace(t, k, "forbidden")
	must[*networkingv1.NetworkPolicy](t)(k.NetworkingV1().NetworkPolicies("forbidden").Create(t.Context(), policy("p"), create))
	grant(t, k, user, "networking.k8s.io", "networkpolicies")
	w.until(t, "the policies", func() bool { return !w.unknown && !w.says("RBAC") })
	w.mu.Lock()
	if w.world.NetworkPolicies[model.Name{Namespace: "forbidden", Name: "p"}] == nil {
		t.Error("policies count as known, but one is missing")
	}
	w.mu.Unlock()
}

func TestTheFirstDeltaWaitsForEveryKind(t *testing.T) {
	k := client(t, shared)
	groups := map[string]string{"services": "", "nodes": "", "endpointslices": "discovery.k8s.io"}
	for withheld := range groups {
		user := "without-" + withheld
		grant(t, k, user, "", "pods")
		grant(t, k, user, "networking.k8s.io", "networkpolicies")
		for resource, group := range groups {
			if resource != withheld {
				grant(t, k, user, group, resource)
			}
		}
		w := watch(t, must[string](t)(shared.Kubeconfig(controlplane.User{Name: user})), nil)
		w.until(t, "a problem", func() bool { return w.says(withheld) && w.says("RBAC forbids to") })
		awaitRequests(t, "403", 2) // again; other kinds are not refused
		w.mu.Lock()
		if w.fulls+w.early != 0 {
			t.Errorf("something was delivered without %s", withheld)
		}
		w.mu.Unlock()
		grant(t, k, user, groups[withheld], withheld)
		w.until(t, "a full delta", func() bool { return w.full() && !w.says("RBAC") })
	}
}

func TestBadCredentialsAreNamed(t *testing.T) {
	expired := controlplane.User{Name: "late", Groups: []string{"system:masters"}, Until: time.Now().Add(-time.Hour)}
	for what, kubeconfig := range map[string]string{
		"a wrong token":          must[string](t)(shared.TokenKubeconfig("wrong")),
		"an expired certificate": must[string](t)(shared.Kubeconfig(expired)),
	} {
		w := watch(t, kubeconfig, nil)
		w.until(t, what, func() bool { return w.says("rejects the credentials") })
	}
	strange, _, err := kube.Connect(kube.Access{Kubeconfig: "/nonexistent/kubeconfig"})
	if err == nil {
		t.Errorf("a kubeconfig that does not exist gives %v", strange)
	}
}

func TestAServerThatIsNotWhoItShouldBeIsNamed(t *testing.T) {
	// The public authorities do not know the lab's server.
	w := watch(t, must[string](t)(shared.StrangerKubeconfig()), nil)
	w.until(t, "a problem", func() bool { return w.says("unknown authority") })
}

func TestANodeWithoutAnObjectIsAProblem(t *testing.T) {
	k := client(t, shared)
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) { c.NodeName = "late-node" })
	w.until(t, "a problem", func() bool { return w.full() && w.says("Node late-node: does not exist") })
	node := must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(), &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "late-node", Labels: map[string]string{corev1.LabelTopologyZone: "a", "x": "y"}},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.244.9.0/24"}, PodCIDR: "10.244.9.0/24"},
	}, create))
	w.until(t, "the Node", func() bool { return w.world.Nodes["late-node"] != nil && !w.says("late-node") })
	w.mu.Lock()
	if n := w.world.Nodes["late-node"]; len(n.Labels) != 2 || n.Leaving || len(n.PodCIDRs) != 1 {
		t.Errorf("the Node is %+v", n)
	}
	w.mu.Unlock()
	node.Spec.Taints = []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule}}
	must[*corev1.Node](t)(k.CoreV1().Nodes().Update(t.Context(), node, update))
	w.until(t, "the Node leaving", func() bool { return w.world.Nodes["late-node"].Leaving })
}
