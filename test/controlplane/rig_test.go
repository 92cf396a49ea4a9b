package controlplane

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/test/testbed/controlplane"
)

func TestACrowdOfServicesIsCreatedThroughTheAPI(t *testing.T) {
	k := client(t, shared)
	begin := time.Now()
	w := controlplane.Crowd{Namespace: "crowd", Services: 500, Endpoints: 10, Nodes: []string{"a", "b"}}
	if err := w.Create(t.Context(), k); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d Services x %d endpoints in %v", w.Services, w.Endpoints, time.Since(begin))
	services, err := k.CoreV1().Services("crowd").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(services.Items) != w.Services {
		t.Fatalf("%d Services, want %d (%v)", len(services.Items), w.Services, err)
	}
	slices, err := k.DiscoveryV1().EndpointSlices("crowd").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(slices.Items) != w.Services {
		t.Fatalf("%d slices, want %d (%v)", len(slices.Items), w.Services, err)
	}
}
