package reach

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
)

// lookAlikes are Pods that are no agents, by what makes them different.
var lookAlikes = []struct {
	name  string
	makes func(*corev1.Pod)
	lacks string
}{
	{"the label alone", func(p *corev1.Pod) { p.OwnerReferences = nil }, "no DaemonSet owns it"},
	{"a reference that is not the controller's", func(p *corev1.Pod) { p.OwnerReferences[0].Controller = nil }, "no DaemonSet owns it"},
	{"a reference with a wrong UID", func(p *corev1.Pod) { p.OwnerReferences[0].UID = "forged" },
		"its owner, DaemonSet spillway with UID forged, is no DaemonSet of agents in this namespace"},
	{"the UID of a DaemonSet of another namespace", func(p *corev1.Pod) { p.OwnerReferences[0].UID = "set-in-tenant" },
		"is no DaemonSet of agents in this namespace"},
	{"another image", func(p *corev1.Pod) { p.Spec.Containers[0].Image = "evil:\x1b[2J" },
		`its image is evil:\x1b[2J, and DaemonSet spillway has spillway:2`},
	{"another ServiceAccount", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		"its ServiceAccount is default, and that of DaemonSet spillway is spillway"},
	{"no ServiceAccount", func(p *corev1.Pod) { p.Spec.ServiceAccountName = "" }, "its ServiceAccount is default"},
	{"a network of its own", func(p *corev1.Pod) { p.Spec.HostNetwork = false }, "it is not on the host network"},
}

// lookAlike adds a Pod that is newer than the agent of a node and runs. Its program counts.
func (s *apiServer) lookAlike(node string, executed *atomic.Int32, makes func(*corev1.Pod)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := podOf(s.sets[0], node)
	p.Name = "spillway-zzzzz"
	p.CreationTimestamp = metav1.Now()
	makes(&p)
	s.pods = append(s.pods, p)
	s.exec[p.Name] = func(context.Context, io.Reader, io.Writer, io.Writer) int {
		executed.Add(1)
		return 1
	}
}

func TestALookAlikeIsNotAsked(t *testing.T) {
	for _, c := range lookAlikes {
		t.Run(c.name, func(t *testing.T) {
			var executed atomic.Int32
			s := newAPIServer(t)
			s.sets = append(s.sets, daemonSet("tenant", "evil"))
			s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
			s.nodes = append(s.nodes, "bare")
			s.lookAlike("node1", &executed, c.makes)
			s.lookAlike("bare", &executed, c.makes)
			cluster := s.cluster(t, nil)
			results := Each(t.Context(), cluster, agents(t, cluster), status)
			if len(results) != 2 || results[1].Value.GetNode() != "node1" {
				t.Fatalf("%+v", results)
			}
			want := "Pod spillway-zzzzz has the agents' label but is no agent: "
			if err := results[0].Err; err == nil || err.Reason != NotProven || !strings.Contains(err.Error(), want) ||
				!strings.Contains(err.Error(), c.lacks) || strings.ContainsAny(err.Error(), "\n\x1b") {
				t.Errorf("%v, want %s%s", err, want, c.lacks)
			}
			for node, want := range map[string]string{"node1": "", "bare": c.lacks} {
				if _, err := nodeclient.New(cluster.Node(node)).Status(t.Context(), &nodev1alpha1.StatusRequest{}); want == "" && err != nil ||
					want != "" && !strings.Contains(fmt.Sprint(err), want) {
					t.Errorf("node %s: %v, want %q", node, err, want)
				}
			}
			if n := executed.Load(); n != 0 {
				t.Errorf("%d execs in the Pod that looks like an agent", n)
			}
		})
	}
}

// revision returns the one of a DaemonSet's template, as its controller writes it.
func revision(t *testing.T, set appsv1.DaemonSet) appsv1.ControllerRevision {
	t.Helper()
	text, err := json.Marshal(map[string]any{"spec": map[string]any{"template": set.Spec.Template}})
	if err != nil {
		t.Fatal(err)
	}
	return appsv1.ControllerRevision{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: set.Namespace, Name: "spillway-" + string(set.UID), Labels: set.Spec.Template.Labels,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(&set, appsv1.SchemeGroupVersion.WithKind("DaemonSet"))},
		},
		Data: runtime.RawExtension{Raw: text},
	}
}

// An update leaves Pods of the template before it. It may also change the ServiceAccount.
func TestAnUpdateThatIsNotFinished(t *testing.T) {
	s := newAPIServer(t)
	s.add("before", pipeTo(t, &agentAPI{node: "before"}))
	var executed atomic.Int32
	s.nodes = append(s.nodes, "mixed", "other")
	// Image and account must be of one revision.
	s.lookAlike("mixed", &executed, func(p *corev1.Pod) { p.Spec.ServiceAccountName = "spillway-next" })
	s.lookAlike("other", &executed, func(p *corev1.Pod) { p.Spec.Containers[0].Image = "evil" })
	s.revisions = append(s.revisions, revision(t, s.sets[0]))
	s.sets[0].Spec.Template.Spec.ServiceAccountName = "spillway-next"
	s.sets[0].Spec.Template.Spec.Containers[0].Image = "spillway:3"
	s.revisions = append(s.revisions, revision(t, s.sets[0]))
	foreign := daemonSet(s.namespace, "evil") // of a DaemonSet that is not there
	foreign.UID = "other"
	s.revisions = append(s.revisions, revision(t, foreign))
	s.add("after", pipeTo(t, &agentAPI{node: "after"}))
	cluster := s.cluster(t, nil)
	want := map[string]string{"before": "", "after": "", "mixed": "its image is spillway:2, and DaemonSet spillway has spillway:3",
		"other": "its ServiceAccount is spillway,"}
	check := func() {
		t.Helper()
		for _, r := range Each(t.Context(), cluster, agents(t, cluster), status) {
			if want := want[r.Agent.Node]; (want == "") != (r.Err == nil) || r.Err != nil &&
				(r.Err.Reason != NotProven || !strings.Contains(r.Err.Error(), want)) {
				t.Errorf("%s: %v, want %q", r.Agent.Node, r.Err, want)
			}
		}
	}
	check()
	s.denied["controllerrevisions kube-system"] = true
	for _, node := range []string{"before", "mixed", "other"} {
		want[node] = "and you may not list controllerrevisions, which have earlier templates"
	}
	check()
	if executed.Load() != 0 {
		t.Error("an exec in a Pod that looks like an agent")
	}
}

// binding returns the ClusterRoleBinding of agents, as the chart renders it.
func binding(namespaces ...string) rbacv1.ClusterRoleBinding {
	b := rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "spillway", Labels: map[string]string{
		"app.kubernetes.io/name": "spillway", "app.kubernetes.io/component": "agent",
	}}}
	for _, ns := range namespaces {
		b.Subjects = append(b.Subjects, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Name: "spillway", Namespace: ns})
	}
	return b
}

// A tenant who may create DaemonSets in a namespace of his own, and Pods, is not asked, and
// keeps no one from asking.
func TestTheNamespaceOfTheAgents(t *testing.T) {
	viewers := binding("tenant")
	viewers.Labels = agentLabels
	for _, c := range []struct {
		name            string
		at, given       string
		bindings        []rbacv1.ClusterRoleBinding
		mayNotList      bool
		wanted, refused string
	}{
		{name: "kube-system", at: "kube-system", wanted: "kube-system"},
		{name: "kube-system, without the right to list bindings", at: "kube-system", mayNotList: true, wanted: "kube-system"},
		{name: "that of the binding", at: "proxy", bindings: []rbacv1.ClusterRoleBinding{binding("proxy"), viewers}, wanted: "proxy"},
		{name: "a binding of the viewers is not the agents'", at: "kube-system",
			bindings: []rbacv1.ClusterRoleBinding{viewers}, wanted: "kube-system"},
		{name: "that the user gives", at: "proxy", given: "proxy", mayNotList: true, wanted: "proxy"},
		{name: "that the user gives, of several", at: "proxy", given: "proxy",
			bindings: []rbacv1.ClusterRoleBinding{binding("proxy", "other")}, wanted: "proxy"},
		{name: "several", at: "proxy", bindings: []rbacv1.ClusterRoleBinding{binding("proxy"), binding("other")},
			refused: "agents have ClusterRoleBindings in several namespaces (other, proxy): choose one with --agent-namespace"},
		{name: "another, without the right to list bindings", at: "proxy", mayNotList: true,
			refused: "namespace kube-system has no DaemonSet of agents (label app.kubernetes.io/name=spillway, container agent, hostNetwork): " +
				"name the agents' namespace with --agent-namespace, or install Spillway"},
		{name: "no agents at all", at: "tenant", refused: "namespace kube-system has no DaemonSet of agents"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := newAPIServer(t)
			s.namespace, s.bindings = c.at, c.bindings
			s.denied["clusterrolebindings"] = c.mayNotList
			s.sets = []appsv1.DaemonSet{daemonSet(c.at, "spillway:2"), daemonSet("tenant", "evil")}
			s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
			executed := false
			evil := podOf(s.sets[1], "node1")
			evil.Name, evil.CreationTimestamp = "spillway-evil", metav1.Now()
			s.pods = append(s.pods, evil)
			s.exec[evil.Name] = func(context.Context, io.Reader, io.Writer, io.Writer) int { executed = true; return 1 }
			cluster := s.cluster(t, func(cfg *Config) { cfg.Namespace = c.given })
			list, _, err := cluster.Agents(t.Context())
			image, pull, imageErr := Image(t.Context(), cluster.client, c.given)
			if c.refused != "" {
				for _, err := range []error{err, imageErr} {
					if err == nil || !strings.Contains(err.Error(), c.refused) {
						t.Errorf("%v, %v, want %q", list, err, c.refused)
					}
				}
				return
			}
			if err != nil || len(list) != 1 || list[0].Namespace != c.wanted || list[0].Pod != "spillway-node1" {
				t.Fatalf("%v, %v, want the agent of %s", list, err, c.wanted)
			}
			if imageErr != nil || image != "spillway:2" || pull != corev1.PullNever {
				t.Errorf("image %q, %q, %v", image, pull, imageErr)
			}
			if r := Each(t.Context(), cluster, list, status)[0]; r.Err != nil || executed {
				t.Errorf("%+v, in the tenant's Pod: %v", r, executed)
			}
		})
	}
}

func TestDaemonSetsThatAreNoAgents(t *testing.T) {
	for name, change := range map[string]func(*appsv1.DaemonSet){
		"without the label":        func(d *appsv1.DaemonSet) { d.Labels = nil },
		"without the container":    func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Containers[0].Name = "other" },
		"without the host network": func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.HostNetwork = false },
	} {
		s := newAPIServer(t)
		change(&s.sets[0])
		s.add("node1", pipeTo(t, &agentAPI{node: "node1"}))
		if list, _, err := s.cluster(t, nil).Agents(t.Context()); err == nil || !strings.Contains(err.Error(), "has no DaemonSet of agents") {
			t.Errorf("%s: %v, %v", name, list, err)
		}
	}
}

func TestImagesOfSeveralDaemonSets(t *testing.T) {
	s := newAPIServer(t)
	other := daemonSet(s.namespace, "spillway:3")
	other.Name, other.UID = "other", types.UID("other")
	s.sets = append(s.sets, other)
	if image, _, err := Image(t.Context(), s.cluster(t, nil).client, ""); err == nil ||
		err.Error() != "the DaemonSets of agents in namespace kube-system have several images" {
		t.Errorf("%q, %v", image, err)
	}
}

// Pods that only have the label come first, by their names, and fill pages.
func TestAllPagesAreRead(t *testing.T) {
	s := newAPIServer(t)
	var executed atomic.Int32
	for i := range 600 {
		s.lookAlike(fmt.Sprintf("node%03d", i), &executed, func(p *corev1.Pod) { p.Name, p.OwnerReferences = fmt.Sprintf("a%03d", i), nil })
	}
	for i := range 600 {
		s.add(fmt.Sprintf("node%03d", i), nil)
	}
	list, complete, err := s.cluster(t, nil).Agents(t.Context())
	if err != nil || !complete || len(list) != 600 || s.pages < 3 {
		t.Fatalf("%d agents, complete: %v, %d pages before the last, %v", len(list), complete, s.pages, err)
	}
	for _, a := range list {
		if a.Err != nil || a.Pod != "spillway-"+a.Node {
			t.Errorf("%+v", a)
		}
	}
}
