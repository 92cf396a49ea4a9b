package kube

import (
	"context"
	"net/url"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/tools/metrics"
)

// RequestCollectors returns metrics of all requests of this process to API servers.
// Names, labels and buckets are kube-proxy's, so its dashboards keep working. client-go
// has one listener for each process, so every call returns the same collectors.
var RequestCollectors = sync.OnceValue(func() []prometheus.Collector {
	r := requests{
		results: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "rest_client_requests_total",
			Help: "Requests to API servers by status code (\"<error>\" without an answer), method and host.",
		}, []string{"code", "method", "host"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "rest_client_request_duration_seconds",
			Help:    "Response time of API servers in seconds, by verb and host.",
			Buckets: []float64{0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60},
		}, []string{"verb", "host"}),
	}
	metrics.Register(metrics.RegisterOpts{RequestResult: r, RequestLatency: r})
	return []prometheus.Collector{r.results, r.latency}
})

// requests receives each request's result from client-go.
type requests struct {
	results *prometheus.CounterVec
	latency *prometheus.HistogramVec
}

// Increment counts an answer; it implements client-go's metrics.ResultMetric.
func (r requests) Increment(_ context.Context, code, method, host string) {
	r.results.WithLabelValues(code, method, host).Inc()
}

// Observe records a latency; it implements client-go's metrics.LatencyMetric.
func (r requests) Observe(_ context.Context, verb string, u url.URL, latency time.Duration) {
	r.latency.WithLabelValues(verb, u.Host).Observe(latency.Seconds())
}
