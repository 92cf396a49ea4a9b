package sysdump

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"spillway.dev/spillway/internal/diagnosis/sysdump"
)

// clusterOf collects from an API server with these objects.
func clusterOf(t *testing.T, objects map[string]any) *fromCluster {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(objects[r.URL.Path])
	}))
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return &fromCluster{client: client, redactor: sysdump.NewRedactor()}
}

// A namespace with many Events, large ones, or ones that look like a part of a key, leaves room to
// those of others.
func TestANamespaceHidesNoEventsOfOthers(t *testing.T) {
	var list corev1.EventList
	at := time.Unix(1_800_000_000, 0)
	add := func(namespace, message string) {
		list.Items = append(list.Items, corev1.Event{
			ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprint(len(list.Items)), CreationTimestamp: metav1.NewTime(at)},
			ReportingController: "spillway", Message: message,
		})
		at = at.Add(time.Second)
	}
	add("calm", "the first")
	for range 3 * mostEvents {
		add("noisy", "noise")
	}
	add("noisy", strings.Repeat("x", 1<<20))
	add("noisy", strings.Repeat("x", 1<<20))
	add("noisy", "-----END A PRIVATE KEY-----")
	add("noisy", "-----BEGIN A PRIVATE KEY-----")
	add("calm", "the last")
	var out bytes.Buffer
	err := clusterOf(t, map[string]any{"/api/v1/events": list}).events(t.Context(), &out)
	if err == nil || !strings.Contains(err.Error(), "2 Events") {
		t.Errorf("error %v, want that 2 Events are missing", err)
	}
	var got []corev1.Event
	text := sysdump.NewRedactor().Text(out.String())
	if err := json.Unmarshal([]byte(text), &got); err != nil || len(text) > sysdump.DefaultFileLimit || len(got) != mostEvents {
		t.Fatalf("%d bytes with %d Events: %v", len(text), len(got), err)
	}
	if got[0].Message != "the first" || got[len(got)-1].Message != "the last" {
		t.Errorf("from %q to %q", got[0].Message, got[len(got)-1].Message)
	}
}

// A namespace with many objects leaves room to those of others, whatever its name.
func TestANamespaceHidesNoObjectsOfOthers(t *testing.T) {
	var services corev1.ServiceList
	var endpoints discoveryv1.EndpointSliceList
	for i := range 30_000 {
		meta := metav1.ObjectMeta{Namespace: "a", Name: fmt.Sprint("noise", i)}
		if i >= 29_990 {
			meta.Namespace, meta.Name = "b", fmt.Sprint("calm", i)
		}
		services.Items = append(services.Items, corev1.Service{ObjectMeta: meta})
		endpoints.Items = append(endpoints.Items, discoveryv1.EndpointSlice{ObjectMeta: meta})
	}
	c := clusterOf(t, map[string]any{"/api/v1/services": services, "/apis/discovery.k8s.io/v1/endpointslices": endpoints})
	var first, second bytes.Buffer
	for _, err := range []error{c.services(t.Context(), &first), c.slices(t.Context(), &second)} {
		if err == nil || !strings.Contains(err.Error(), "of 30000 objects do not fit") {
			t.Errorf("error %v, want how many are missing", err)
		}
	}
	for _, text := range []string{first.String(), second.String()} {
		if n := strings.Count(text, "calm"); n != 10 || len(text) > sysdump.DefaultFileLimit || strings.Count(text, "noise") < 1000 {
			t.Errorf("%d of 10 objects, %d of the noise, %d bytes", n, strings.Count(text, "noise"), len(text))
		}
	}
}
