package kube

import (
	"fmt"
	"log/slog"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/model"
)

// TestABadAddressCostsOnlyItself updates a slice that is served: a bad address must not
// keep the others in their old state, and is one Event about the Service.
func TestABadAddressCostsOnlyItself(t *testing.T) {
	s := newSource(t, Config{})
	events := NewEvents(s.cfg.Client, "a", s.UID, slog.New(slog.DiscardHandler))
	served := map[model.Name]*model.EndpointSlice{}
	known := 0
	s.started = true
	s.deliver = func(d model.Delta, problems []model.Problem) {
		maps.Copy(served, d.Slices)
		if problems != nil {
			known = len(problems)
			events.Emit(problems)
		}
	}
	service := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "1"},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
	if err := s.services.Update(service); err != nil {
		t.Fatal(err)
	}
	for i, c := range []struct {
		service   string
		addresses []string
		serves    string
		problems  int
		event     string
	}{
		{"web", []string{"10.0.0.1"}, "[10.0.0.1]", 0, ""},
		{"web", []string{"10.0.0.2", "255.255.255.255"}, "[10.0.0.2]", 1,
			"EndpointSlice shop/web-1: endpoints: 1 address gets no traffic: 255.255.255.255 is the broadcast address; correct the slice, or " +
				"the program that writes it"},
		{"web", []string{"255.255.255.255", "10.0.0.2", "10.0.0.3"}, "[10.0.0.2 10.0.0.3]", 1, ""}, // in another order
		{"web", []string{"10.0.0.3"}, "[10.0.0.3]", 0, ""},
		{"web", []string{"0.0.0.0"}, "[]", 1,
			"EndpointSlice shop/web-1: endpoints: 1 address gets no traffic: 0.0.0.0 is the unspecified address; correct the slice, or the " +
				"program that writes it"},
		{"another-proxy", []string{"127.0.0.1"}, "[]", 0, ""},
	} {
		slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discoveryv1.LabelServiceName: c.service}},
			AddressType: discoveryv1.AddressTypeIPv4}
		for _, a := range c.addresses {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{a}})
		}
		if err := s.kinds[1].Update(slice); err != nil {
			t.Fatal(err)
		}
		addresses := []string{}
		for _, ep := range served[model.Name{Namespace: "shop", Name: "web-1"}].Endpoints {
			addresses = append(addresses, ep.Addr.String())
		}
		if got := fmt.Sprint(addresses); got != c.serves || known != c.problems {
			t.Errorf("%d: serves %s with %d problems, want %s with %d", i, got, known, c.serves, c.problems)
		}
		event := ""
		for m, any := events.queue.pop(); any; m, any = events.queue.pop() {
			event += m.note
			if m.about.Kind != "Service" || m.about.Name != "web" || m.typ != corev1.EventTypeWarning {
				t.Errorf("%d: Event about %s %s, type %s", i, m.about.Kind, m.about.Name, m.typ)
			}
		}
		if event != c.event {
			t.Errorf("%d: Event %q, want %q", i, event, c.event)
		}
	}
}
