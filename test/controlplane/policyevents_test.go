package controlplane

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// speaker is the part of an agent that reports on policies.
type speaker struct {
	*kube.PolicyStatus
	w    *watcher
	stop func()
}

// speak starts the parts of a node's agent that write status and Events.
func speak(t *testing.T, k kubernetes.Interface, node string) *speaker {
	t.Helper()
	w := watch(t, adminKubeconfig(t), func(c *kube.Config) {
		c.NetworkPolicies, c.NodeName = false, node
		c.DoNotTrack = must[dynamic.Interface](t)(kube.ConnectDynamic(kube.Access{Kubeconfig: adminKubeconfig(t)}))
	})
	events := kube.NewEvents(k, node, w.source.UID, slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug})))
	s := &speaker{PolicyStatus: kube.NewPolicyStatus(w.source, events), w: w}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 2)
	go func() { done <- events.Run(ctx) }()
	go func() { done <- s.Run(ctx) }()
	s.stop = func() {
		cancel()
		<-done
		<-done
	}
	w.until(t, "a full delta", w.full)
	return s
}

// policyEvents are the Events of a policy as `kubectl describe` looks for them.
func policyEvents(t *testing.T, k kubernetes.Interface, u *unstructured.Unstructured) []corev1.Event {
	t.Helper()
	uid, kind, none := string(u.GetUID()), u.GetKind(), ""
	name := u.GetName()
	which := k.CoreV1().Events("").GetFieldSelector(&name, &none, &kind, &uid)
	return must[*corev1.EventList](t)(k.CoreV1().Events("").List(t.Context(), metav1.ListOptions{FieldSelector: which.String()})).Items
}

// refusals returns the refusals of a policy at n addresses.
func refusals(policy, reason string, n int) (out []model.PolicyRefusal) {
	for i := range n {
		out = append(out, model.PolicyRefusal{
			Policy: policy, Field: "spec.deny", Reason: reason,
			Message: "is not applied to 10.0.0." + string(rune('1'+i)) + ": " + reason + "; leave it out",
		})
	}
	return out
}

// TestTheOwnerOfAPolicyHearsOnceWhatDoesNotHold has one node refuse a policy for one
// reason after another, over resyncs and a restart. The agent writes Events in order, so
// the last Event shows that no other is pending.
func TestTheOwnerOfAPolicyHearsOnceWhatDoesNotHold(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	spec := "{" + cachePods + ", ingress: [{ports: [{port: 11211}]}]}"
	u := must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "heard", spec), create))
	t.Cleanup(func() { _ = api.Delete(context.Background(), "heard", remove) })
	ours := func(node string) (notes map[string][]string) {
		notes = map[string][]string{}
		for _, e := range policyEvents(t, k, u) {
			if e.Type != corev1.EventTypeWarning || e.Namespace != "default" || e.InvolvedObject.APIVersion != v1alpha1.SchemeGroupVersion.String() {
				t.Errorf("event %+v", e)
			}
			if e.ReportingInstance == node {
				notes[e.Reason] = append(notes[e.Reason], e.Message)
			}
		}
		return notes
	}
	s := speak(t, k, "hears")
	tell := func(reason string, refused []model.PolicyRefusal, failed error) {
		t.Helper()
		s.Update(refused, failed)
		await.True(t, "an Event "+reason, func() bool { return len(ours("hears")[reason]) > 0 })
	}
	s.Update(nil, nil)
	await.True(t, "Applied", conditionIs(t, api, "heard", v1alpha1.Applied, "True", "Applied"))
	tell("Contradiction", refusals("heard", "Contradiction", 3), nil)
	for n := 3; n > 0; n-- { // resyncs, and pods that go
		s.Update(refusals("heard", "Contradiction", n), nil)
		time.Sleep(50 * time.Millisecond) // so that each is seen
	}
	tell("ServiceNeedsNAT", append(refusals("heard", "Contradiction", 1), refusals("heard", "ServiceNeedsNAT", 1)...), nil)
	tell("NotWritten", nil, errTest)
	s.Update(nil, nil)
	await.True(t, "Applied again", conditionIs(t, api, "heard", v1alpha1.Applied, "True", "Applied"))
	tell("HostPortNeedsNAT", refusals("heard", "HostPortNeedsNAT", 1), nil)

	s.stop() // another agent starts in the same state
	s = speak(t, k, "hears")
	s.Update(refusals("heard", "HostPortNeedsNAT", 2), nil)
	time.Sleep(50 * time.Millisecond)
	tell("ServiceNotSeen", refusals("heard", "ServiceNotSeen", 1), nil)
	s.Update(refusals("heard", "Contradiction", 1), nil) // it was not so, and is again
	await.True(t, "another Event Contradiction", func() bool { return len(ours("hears")["Contradiction"]) > 1 })
	s.stop()

	for reason, notes := range ours("hears") {
		slices.Sort(notes)
		if n := len(notes); n != 1 && (n != 2 || reason != "Contradiction") {
			t.Errorf("%s was told %d times: %q", reason, n, notes)
		}
		want := "node hears: spec.deny: is not applied to 10.0.0.1: " + reason + "; leave it out"
		switch reason {
		case "Contradiction":
			if notes[1] != want+" (and 2 more like it on this node)" {
				t.Errorf("Contradiction at three addresses: %q", notes[1])
			}
		case "NotWritten":
			want = "node hears: no table; the previous rules stay in effect, and the agent retries"
		}
		if notes[0] != want {
			t.Errorf("%s: %q, want %q", reason, notes[0], want)
		}
	}
}

var errTest = errText("no table")

type errText string

func (e errText) Error() string { return string(e) }

// TestAPolicyThatIsNotAcceptedIsToldOnceByAllNodes has two nodes find the same.
func TestAPolicyThatIsNotAcceptedIsToldOnceByAllNodes(t *testing.T) {
	api, k := policies(t, shared), client(t, shared)
	bad := func(key string) string {
		return "{" + cachePods + ", ingress: [{ports: [{port: 1}], from: [{podSelector: {matchLabels: {'" + key + "': c}}}]}]}"
	}
	var both []*speaker
	for _, node := range []string{"hears-a", "hears-b"} {
		s := speak(t, k, node)
		s.Update(nil, nil)
		both = append(both, s)
	}
	u := must[*unstructured.Unstructured](t)(api.Create(t.Context(), doNotTrack(t, "unheard", bad("a b")), create))
	t.Cleanup(func() { _ = api.Delete(context.Background(), "unheard", remove) })
	told := func(n int) func() bool { return func() bool { return len(policyEvents(t, k, u)) >= n } }
	await.True(t, "an Event", told(1))
	next := must[*unstructured.Unstructured](t)(api.Get(t.Context(), "unheard", metav1.GetOptions{}))
	next.Object["spec"] = doNotTrack(t, "unheard", bad("c d")).Object["spec"]
	must[*unstructured.Unstructured](t)(api.Update(t.Context(), next, update))
	await.True(t, "another, of what it says now", told(2))
	for _, s := range both {
		s.stop()
	}
	var keys []string
	for _, e := range policyEvents(t, k, u) {
		if e.Reason != "NotAccepted" || !strings.HasPrefix(e.Message, "spec.ingress[0].from[0].podSelector") ||
			!strings.Contains(e.Message, "fix the policy") {
			t.Errorf("event %+v", e)
		}
		for _, key := range []string{"a b", "c d"} {
			if strings.Contains(e.Message, `"`+key+`"`) {
				keys = append(keys, key)
			}
		}
	}
	if slices.Sort(keys); !slices.Equal(keys, []string{"a b", "c d"}) {
		t.Errorf("Events about %q, want one for each version", keys)
	}
}
