package controlplane

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/kubeobject"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// policies serves the CRD of the chart on an API server and returns a client for it.
func policies(t *testing.T, c *controlplane.ControlPlane) dynamic.ResourceInterface {
	t.Helper()
	d := must[*dynamic.DynamicClient](t)(dynamic.NewForConfig(c.REST()))
	text := must[[]byte](t)(os.ReadFile("../../deploy/helm/spillway/crds/donottrackpolicies.yaml"))
	crd := object(t, string(text))
	kind := corev1.SchemeGroupVersion.WithResource("customresourcedefinitions")
	kind.Group = "apiextensions.k8s.io"
	if _, err := d.Resource(kind).Create(t.Context(), crd, create); err != nil && !apierrors.IsAlreadyExists(err) {
		t.Fatal(err)
	}
	await.True(t, "the CRD", func() bool {
		_, err := d.Resource(v1alpha1.DoNotTrackPolicies).List(t.Context(), metav1.ListOptions{})
		return err == nil
	})
	return d.Resource(v1alpha1.DoNotTrackPolicies)
}

func object(t *testing.T, text string) *unstructured.Unstructured {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return u
}

func doNotTrack(t *testing.T, name, spec string) *unstructured.Unstructured {
	t.Helper()
	return object(t, "apiVersion: policy.spillway.dev/v1alpha1\nkind: DoNotTrackPolicy\nmetadata: {name: "+name+"}\nspec: "+spec)
}

const cachePods = "podSelector: {matchLabels: {app: cache}}"

// policySpecs maps specs to the invalid field of each; "" is a valid spec. The API
// server's schema and the manifest reader must agree.
var policySpecs = map[string]string{
	"{" + cachePods + ", deny: others, ingress: [{ports: [{port: 11211, endPort: 11212}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: " +
		"[10.1.0.0/16]}}]}]}": "",
	"{nodeSelector: {matchLabels: {a: b}}, track: true, egress: [{ports: [{port: 53, protocol: UDP}], to: [{namespaceSelector: {}}]}]}": "",
	"{podSelector: {}, namespaceSelector: {matchLabels: {a: b}}, ingress: [{ports: [{port: 1}]}]}":                                      "",

	"{podSelector: {}, ingress: [{ports: [{port: " +
		"1}]}]}": "spec.podSelector",
	"{podSelector: {}, namespaceSelector: {}, ingress: [{ports: [{port: " +
		"1}]}]}": "spec.podSelector",
	"{nodeSelector: {}, ingress: [{ports: [{port: " +
		"1}]}]}": "spec.nodeSelector",
	"{" + cachePods + ", nodeSelector: {matchLabels: {a: b}}, ingress: [{ports: [{port: 1}]}]}": "spec.nodeSelector",
	"{ingress: [{ports: [{port: 1}]}]}":                                "spec",
	"{" + cachePods + "}":                                              "spec",
	"{" + cachePods + ", deny: all, ingress: [{ports: [{port: 1}]}]}":  "spec.deny",
	"{" + cachePods + ", ingress: [{ports: []}]}":                      "spec.ingress[0].ports",
	"{" + cachePods + ", ingress: [{ports: [{port: 0}]}]}":             "spec.ingress[0].ports[0].port",
	"{" + cachePods + ", ingress: [{ports: [{port: 2, endPort: 1}]}]}": "spec.ingress[0].ports[0].endPort",
	"{" + cachePods + ", ingress: [{ports: [{port: 2, protocol: " +
		"ICMP}]}]}": "spec.ingress[0].ports[0].protocol",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{}]}]}": "spec.ingress[0].from[0]",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"10.0.0.0}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: " +
		"[x]}}]}]}": "spec.ingress[0].from[0].ipBlock.except[0]",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: " +
		"[11.0.0.0/16]}}]}]}": "spec.ingress[0].from[0].ipBlock.except",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: " +
		"[10.0.0.0/8]}}]}]}": "spec.ingress[0].from[0].ipBlock.except",
	"{" + cachePods + ", egress: [{ports: [{port: 1}], to: [{ipBlock: {cidr: 10.0.0.0/8}, podSelector: " +
		"{}}]}]}": "spec.egress[0].to[0]",
	"{podSelector: {matchExpressions: [{key: a, operator: Like, values: [b]}]}, ingress: [{ports: [{port: " +
		"1}]}]}": "spec.podSelector.matchExpressions[0].operator",
	"{podSelector: {matchExpressions: [{key: a, operator: In}]}, ingress: [{ports: [{port: " +
		"1}]}]}": "spec.podSelector.matchExpressions[0].values",
	"{" + cachePods + ", egress: [{ports: [{port: 1}], to: [{ipBlock: {cidr: 'fd00::/8', except: " +
		"['10.0.0.0/16']}}]}]}": "spec.egress[0].to[0].ipBlock.except",
	"{" + cachePods + ", egress: [{ports: [{port: 1}], to: [{ipBlock: {cidr: 'fd00::/8', except: ['fd00::1/128']}}]}], x: 1}": "spec.x",
	"{" + cachePods + ", egress: [{ports: [{port: http}], to: [{ipBlock: {cidr: 'fd00::/8', except: " +
		"['fd00::1/128']}}]}]}": "spec.egress[0].ports[0].port",
	"{" + cachePods + ", egress: [{ports: [{port: 70000}], to: [{ipBlock: {cidr: 'fd00::/8', except: " +
		"['fd00::1/128']}}]}]}": "spec.egress[0].ports[0].port",
	"{" + cachePods + ", egress: [{ports: [{port: 7, endPort: 70000}], to: [{ipBlock: {cidr: 'fd00::/8'}}]}], ingress: " +
		"[]}": "spec.egress[0].ports[0].endPort",
	"{" + cachePods + ", egress: [{ports: [{port: 7}], to: [{ipBlock: {cidr: '10.0.0.0/33'}}]}], ingress: " +
		"[]}": "spec.egress[0].to[0].ipBlock.cidr",

	// Bits behind the length: a slip of the pen in the length would open the whole range.
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.1/32}}, {ipBlock: {cidr: 0.0.0.0/0}}, {ipBlock: " +
		"{cidr: '::/0'}}, {ipBlock: {cidr: 'fd00::1/128'}}]}]}": "",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"10.0.0.1/8}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", egress: [{ports: [{port: 1}], to: [{podSelector: {}}, {ipBlock: {cidr: " +
		"'fd00::1/8'}}]}]}": "spec.egress[0].to[1].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 10.0.0.0/8, except: " +
		"[10.1.0.1/16]}}]}]}": "spec.ingress[0].from[0].ipBlock.except[0]",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: 'fd00::/8', except: ['fd00::', " +
		"'fd00::1/64']}}]}]}": "spec.ingress[0].from[0].ipBlock.except[0]",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"'::ffff:10.0.0.0/104'}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"010.0.0.0/8}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"10.0.0.0/08}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"''}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",
	"{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{ipBlock: {cidr: " +
		"'fe80::%eth0/64'}}]}]}": "spec.ingress[0].from[0].ipBlock.cidr",

	"{" + cachePods + ", deny: '', ingress: [{ports: [{port: 1}]}]}":    "spec.deny",
	"{" + cachePods + ", deny: null, ingress: [{ports: [{port: 1}]}]}":  "",
	"{" + cachePods + ", track: null, ingress: [{ports: [{port: 1}]}]}": "",
}

func init() {
	one := "{ports: [{port: 1}]}"
	many := func(text string, n int) string { return strings.TrimSuffix(strings.Repeat(text+", ", n), ", ") }
	for n, field := range map[int]string{16: "", 17: "spec.ingress"} {
		policySpecs["{"+cachePods+", ingress: ["+many(one, n)+"]}"] = field
	}
	for n, field := range map[int]string{32: "", 33: "spec.egress[0].to[0].ipBlock.except"} {
		policySpecs["{"+cachePods+", egress: [{ports: [{port: 1}], to: [{ipBlock: {cidr: 10.0.0.0/8, except: ["+
			many("10.1.0.0/16", n)+"]}}]}]}"] = field
	}
	for n, field := range map[int]string{64: "", 65: "spec.ingress[0].ports"} {
		policySpecs["{"+cachePods+", ingress: [{ports: ["+many("{port: 1}", n)+"]}]}"] = field
	}
	for n, field := range map[int]string{128: "", 129: "spec.ingress[0].from"} {
		policySpecs["{"+cachePods+", ingress: [{ports: [{port: 1}], from: ["+many("{podSelector: {}}", n)+"]}]}"] = field
	}
}

func TestTheServerAcceptsAndRefusesPolicies(t *testing.T) {
	api := policies(t, shared)
	// A policy without the field track shows the default.
	made := must[*unstructured.Unstructured](t)(api.Create(t.Context(),
		doNotTrack(t, "untold", "{"+cachePods+", ingress: [{ports: [{port: 1}]}]}"), create))
	if track, found, _ := unstructured.NestedBool(made.Object, "spec", "track"); !found || track {
		t.Errorf("track is %v (%v) of a policy that says nothing of it", track, found)
	}
	t.Cleanup(func() { _ = api.Delete(context.Background(), "untold", remove) })
	for spec, field := range policySpecs {
		u := doNotTrack(t, "one", spec)
		_, err := api.Create(t.Context(), u, strictly)
		if (err != nil) != (field != "") || err != nil && !strings.Contains(err.Error(), field) {
			t.Errorf("%s: the server says %v, want a fault at %q", spec, err, field)
		}
		if field == "spec.x" || field == "spec.egress[0].ports[0].port" && strings.Contains(spec, "http") {
			continue // a reader of files finds unknown fields and wrong types before this
		}
		var o v1alpha1.DoNotTrackPolicy
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o); err != nil {
			t.Fatal(err)
		}
		m, problems := kubeobject.DoNotTrackPolicy(&o)
		if (m == nil) != (field != "") || field != "" && !strings.HasPrefix(problems[0].Field, field) {
			t.Errorf("%s: read as %v with %v, want a fault at %q", spec, m, problems, field)
		}
	}
}

// conditionIs reports whether a policy has a condition with a reason.
func conditionIs(t *testing.T, api dynamic.ResourceInterface, name, typ, status, reason string) func() bool {
	return func() bool {
		u, err := api.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return false
		}
		var o v1alpha1.DoNotTrackPolicy
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o); err != nil {
			return false
		}
		c := meta.FindStatusCondition(o.Status.Conditions, typ)
		return c != nil && string(c.Status) == status && c.Reason == reason && c.ObservedGeneration == o.Generation
	}
}

// TestPoliciesBringWhatTheyNeed checks which objects a source watches without a policy,
// with some, and without any again.
func TestPoliciesBringWhatTheyNeed(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	for _, ns := range []string{"dnt-a", "dnt-b"} {
		namespace(t, k, ns)
		must[*corev1.Pod](t)(k.CoreV1().Pods(ns).Create(t.Context(), pod("here", "here", map[string]string{"app": "cache"}), create))
		must[*corev1.Pod](t)(k.CoreV1().Pods(ns).Create(t.Context(), pod("peer", "there", map[string]string{"app": "web"}), create))
		must[*corev1.Pod](t)(k.CoreV1().Pods(ns).Create(t.Context(), pod("stranger", "there", map[string]string{"app": "other"}), create))
	}
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) {
		c.NetworkPolicies = false
		c.DoNotTrack = must[dynamic.Interface](t)(kube.ConnectDynamic(kube.Access{Kubeconfig: adminKubeconfig(t)}))
	})
	status := kube.NewPolicyStatus(w.source, nil)
	ctx, stop := context.WithCancel(context.Background())
	t.Cleanup(stop)
	go func() { _ = status.Run(ctx) }()
	w.until(t, "a full delta", w.full)
	counted := func(pods, namespaces, dnt int) func() bool {
		return func() bool {
			return len(w.world.Pods) == pods && (len(w.world.Namespaces) > 0) == (namespaces > 0) && len(w.world.DoNotTrackPolicies) == dnt
		}
	}
	w.until(t, "nothing without a policy", counted(0, 0, 0))

	spec := "{" + cachePods + ", ingress: [{ports: [{port: 11211}], from: [{podSelector: {matchLabels: {app: web}}, namespaceSelector: " +
		"{matchLabels: {kubernetes.io/metadata.name: dnt-a}}}]}]}"
	must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "needs", spec), create))
	w.until(t, "pods here, and the peers of one namespace", counted(3, 0, 1))
	if w.world.Pods[model.Name{Namespace: "dnt-b", Name: "peer"}] != nil {
		t.Error("a pod of another namespace is watched")
	}

	// Before an agent reports a state, the condition must not be True.
	time.Sleep(100 * time.Millisecond)
	if conditionIs(t, api, "needs", v1alpha1.Applied, "True", "Applied")() {
		t.Error("a policy is called applied before it was")
	}
	status.Update(nil, nil)
	await.True(t, "Accepted", conditionIs(t, api, "needs", v1alpha1.Accepted, "True", "Valid"))
	await.True(t, "Applied", conditionIs(t, api, "needs", v1alpha1.Applied, "True", "Applied"))
	status.Update([]model.PolicyRefusal{{Policy: "needs", Field: "spec.deny", Reason: "Contradiction", Message: "is not applied"}}, nil)
	await.True(t, "Applied is false", conditionIs(t, api, "needs", v1alpha1.Applied, "False", "Contradiction"))
	status.Update(nil, nil)
	await.True(t, "Applied again", conditionIs(t, api, "needs", v1alpha1.Applied, "True", "Applied"))

	// A report of another node stays only while that node exists.
	must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "dnt-other"}}, create))
	w.until(t, "the other node", func() bool { return w.world.Nodes["dnt-other"] != nil })
	said := `{"status":{"reportingNodeName":"dnt-other","conditions":[{"type":"Applied","status":"False","reason":"Contradiction","message":"node dnt-other: no","observedGeneration":1,"lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`
	must[*unstructured.Unstructured](t)(api.Patch(t.Context(), "needs", types.MergePatchType, []byte(said), metav1.PatchOptions{}, "status"))
	await.True(t, "Accepted beside it", conditionIs(t, api, "needs", v1alpha1.Accepted, "True", "Valid"))
	if !conditionIs(t, api, "needs", v1alpha1.Applied, "False", "Contradiction")() {
		t.Error("what another node said is overwritten")
	}
	if err := k.CoreV1().Nodes().Delete(t.Context(), "dnt-other", remove); err != nil {
		t.Fatal(err)
	}
	w.until(t, "the other node gone", func() bool { return w.world.Nodes["dnt-other"] == nil })
	status.Update(nil, nil)
	await.True(t, "what a node said that is gone is taken back", conditionIs(t, api, "needs", v1alpha1.Applied, "True", "Applied"))

	u := must[*unstructured.Unstructured](t)(api.Get(t.Context(), "needs", metav1.GetOptions{}))
	u.Object["spec"] = doNotTrack(t, "needs", "{"+cachePods+
		", ingress: [{ports: [{port: 11211}], from: [{podSelector: {matchLabels: {app: web}}, namespaceSelector: {matchLabels: {team: "+
		"web}}}]}]}").Object["spec"]
	must[*unstructured.Unstructured](t)(api.Update(t.Context(), u, update))
	w.until(t, "peers of every namespace, and namespaces", counted(4, 1, 1))
	await.True(t, "the condition of the new generation", conditionIs(t, api, "needs", v1alpha1.Applied, "True", "Applied"))

	// The schema accepts this policy, but no selector can have this key.
	bad := "{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{podSelector: {matchLabels: {'a b': c}}}]}]}"
	must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "bad", bad), create))
	await.True(t, "a policy that cannot be read", conditionIs(t, api, "bad", v1alpha1.Accepted, "False", "Invalid"))
	await.True(t, "it is not applied", conditionIs(t, api, "bad", v1alpha1.Applied, "False", "NotAccepted"))

	for _, name := range []string{"needs", "bad"} {
		if err := api.Delete(t.Context(), name, remove); err != nil {
			t.Fatal(err)
		}
	}
	w.until(t, "nothing without a policy", counted(0, 0, 0))
}

// TestAPolicyWaitsForItsPeers withholds the objects that a policy needs: the agent must
// not apply it while it would deny unknown peers.
func TestAPolicyWaitsForItsPeers(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	namespace(t, k, "dnt-wait")
	must[*corev1.Pod](t)(k.CoreV1().Pods("dnt-wait").Create(t.Context(), pod("peer", "there", map[string]string{"app": "waited-for"}), create))
	const user = "waiting"
	grant(t, k, user, "", "services", "nodes")
	grant(t, k, user, "discovery.k8s.io", "endpointslices")
	grant(t, k, user, v1alpha1.SchemeGroupVersion.Group, "donottrackpolicies")
	kubeconfig := must[string](t)(shared.Kubeconfig(controlplane.User{Name: user}))
	w := watch(t, kubeconfig, func(c *kube.Config) {
		c.NetworkPolicies = false
		c.DoNotTrack = must[dynamic.Interface](t)(kube.ConnectDynamic(kube.Access{Kubeconfig: kubeconfig}))
	})
	w.until(t, "a full delta", w.full)
	spec := "{" + cachePods + ", deny: others, ingress: [{ports: [{port: 11211}], from: [{podSelector: {matchLabels: {app: waited-for}}, " +
		"namespaceSelector: {matchLabels: {team: web}}}]}]}"
	must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "waits", spec), create))
	t.Cleanup(func() { _ = api.Delete(context.Background(), "waits", remove) })
	for _, resource := range []string{"namespaces", "pods"} {
		w.until(t, "a problem of "+resource, func() bool {
			return w.says(resource + ": DoNotTrackPolicies that need them are not applied: RBAC forbids")
		})
		awaitRequests(t, "403", 2) // an unexpected delta needs no answer
		w.mu.Lock()
		if len(w.world.DoNotTrackPolicies) > 0 {
			t.Errorf("the policy is there before %s are", resource)
		}
		w.mu.Unlock()
		grant(t, k, user, "", resource)
	}
	w.until(t, "the policy", func() bool {
		there := w.world.DoNotTrackPolicies["waits"] != nil
		if there && (w.world.Pods[model.Name{Namespace: "dnt-wait", Name: "peer"}] == nil || w.world.Namespaces["dnt-wait"] == nil) {
			t.Error("the policy came before its peers")
		}
		return there
	})
}

// TestExplainAsksAnAPIServer runs the program as operators do.
func TestExplainAsksAnAPIServer(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	namespace(t, k, "dnt-why")
	must[*corev1.Node](t)(k.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "dnt-why-node"}}, create))
	t.Cleanup(func() { _ = k.CoreV1().Nodes().Delete(context.Background(), "dnt-why-node", remove) })
	for name, ip := range map[string]string{"cache": "10.99.0.1", "web": "10.99.0.2", "evil": "10.99.0.3"} {
		p := must[*corev1.Pod](t)(k.CoreV1().Pods("dnt-why").Create(t.Context(),
			pod(name, "dnt-why-node", map[string]string{"why": name}), create))
		p.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}}
		must[*corev1.Pod](t)(k.CoreV1().Pods("dnt-why").UpdateStatus(t.Context(), p, update))
	}
	spec := "{podSelector: {matchLabels: {why: cache}}, deny: others, ingress: [{ports: [{port: 11211}], from: [{podSelector: " +
		"{matchLabels: {why: web}}}]}]}"
	must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "why", spec), create))
	t.Cleanup(func() { _ = api.Delete(context.Background(), "why", remove) })
	for from, want := range map[string]string{"web": "allowed, not tracked", "evil": "denied"} {
		out, err := exec.CommandContext(t.Context(), must[string](t)(binary()), "donottrack", "explain", "--kubeconfig", adminKubeconfig(t),
			"--from", "dnt-why/"+from, "--to", "dnt-why/cache", "--port", "11211").CombinedOutput()
		text := string(out)
		if err != nil || !strings.HasPrefix(text, "dnt-why/"+from+" to dnt-why/cache, TCP port 11211: "+want+"\n") ||
			!strings.Contains(text, "ingress of 10.99.0.1  why ") {
			t.Errorf("from %s: %v\n%s", from, err, text)
		}
	}
}
