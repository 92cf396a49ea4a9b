package kube

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/model"
)

// TestServicesOfOtherProxiesAreCounted follows the label of Services, and the line of the
// log: one when the first such Service appears.
func TestServicesOfOtherProxiesAreCounted(t *testing.T) {
	service := func(name string, label ...string) *corev1.Service {
		o := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
			Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []corev1.ServicePort{{Port: 80}}}}
		for _, value := range label {
			o.Labels = map[string]string{proxyNameLabel: value}
		}
		return o
	}
	for _, c := range []struct {
		proxy  string
		served *corev1.Service
		others [2]*corev1.Service
	}{
		{"", service("web"), [2]*corev1.Service{service("web", "spillway"), service("dns", "")}},
		{"spillway", service("web", "spillway"), [2]*corev1.Service{service("web", "spilway"), service("dns", "other")}},
	} {
		var log bytes.Buffer
		s := newSource(t, Config{ProxyName: c.proxy, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		s.started = true
		s.deliver = func(model.Delta, []model.Problem) {}
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		check := func(step string, served, others, lines int) {
			t.Helper()
			if n := len(s.services.known); n != served {
				t.Errorf("%q, %s: serves %d, want %d", c.proxy, step, n, served)
			}
			registry := prometheus.NewRegistry()
			registry.MustRegister(s.Collectors()...)
			families, err := registry.Gather()
			must(err)
			if n := families[0].GetMetric()[0].GetGauge().GetValue(); n != float64(others) {
				t.Errorf("%q, %s: counts %v, want %d", c.proxy, step, n, others)
			}
			if n := strings.Count(log.String(), "services are not served"); n != lines {
				t.Errorf("%q, %s: %d lines, want %d:\n%s", c.proxy, step, n, lines, &log)
			}
		}
		must(s.services.Add(c.served))
		check("served", 1, 0, 0)
		must(s.services.Update(c.others[0]))
		check("labeled", 0, 1, 1)
		must(s.services.Add(c.others[1]))
		check("another", 0, 2, 1)
		must(s.services.Update(c.served))
		check("label removed", 1, 1, 1)
		must(s.services.Delete(c.others[1]))
		check("deleted", 1, 0, 1)
		must(s.services.Replace([]any{c.others[0], c.others[1]}, ""))
		check("listed", 0, 2, 2)
		must(s.services.Replace([]any{c.served}, ""))
		check("listed without", 1, 0, 2)
	}
}
