package kube

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

func TestRequestsAreCountedByCode(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }))
	defer server.Close()
	collectors := RequestCollectors()
	client, host, err := Connect(Access{Master: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	if err := client.Discovery().RESTClient().Get().AbsPath("/version").Do(t.Context()).Error(); err == nil {
		t.Fatal("418 is no error")
	}
	// Another test's requests are counted too, at hosts of their own.
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors...)
	found, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	for _, family := range found {
		for _, m := range family.GetMetric() {
			labels := map[string]string{}
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if labels["host"] == host {
				seen = append(seen, fmt.Sprint(family.GetName(), " ", labels["code"], labels["method"], labels["verb"], " ",
					m.GetCounter().GetValue(), m.GetHistogram().GetSampleCount()))
			}
		}
	}
	want := []string{"rest_client_request_duration_seconds GET 0 1", "rest_client_requests_total 418GET 1 0"}
	if !slices.Equal(seen, want) {
		t.Errorf("metrics of %s: %q, not %q", host, seen, want)
	}
}
