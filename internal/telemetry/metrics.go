// Package telemetry is what other machines and people see of a running agent:
// Prometheus metrics, health, and the healthCheckNodePorts of Services.
//
// Metrics that kube-proxy has keep kube-proxy's names, types and buckets, so
// that dashboards and alerts go on working; Spillway's own are spillway_*.
package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Build says which Spillway this is.
type Build struct {
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"goVersion"`
	Platform  string `json:"platform"`
}

// Metrics is a registry and the metrics that reconcile feeds. Dataplanes add
// their own with Register. It is safe for concurrent use.
type Metrics struct {
	registry *prometheus.Registry

	syncs, fullSyncs, partialSyncs prometheus.Histogram
	lastSynced, lastQueued         prometheus.Gauge
	svcTotal, epTotal              prometheus.Counter
	svcPending, epPending          prometheus.Gauge
	programming                    prometheus.Histogram
	noLocal                        *prometheus.GaugeVec
	healthz, livez                 *prometheus.CounterVec

	ports                              *prometheus.GaugeVec
	unsupported                        prometheus.Gauge
	policies, policyKept, policiesHeld prometheus.Gauge
	policyTargets                      *prometheus.GaugeVec // without a label: it may have no series
	policiesRefused                    *prometheus.GaugeVec
	problems                           prometheus.Gauge
	syncErrors                         *prometheus.CounterVec
	cleanupErrors                      *prometheus.CounterVec
	auditDiffs                         *prometheus.CounterVec
}

// NewMetrics makes a registry that holds all metrics of this package and those
// of the Go runtime and the process.
func NewMetrics(b Build) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.addKubeProxy()
	m.addOwn(b)
	m.registry.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return m
}

// Register adds a collector, such as a dataplane's. It fails when a metric of
// that name is there already.
func (m *Metrics) Register(c prometheus.Collector) error { return m.registry.Register(c) }

// Gatherer gives all metrics as they stand.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// add registers metrics that only this package makes; two of one name are a
// fault of the program.
func add[C prometheus.Collector](m *Metrics, c C) C {
	m.registry.MustRegister(c)
	return c
}

func (m *Metrics) addKubeProxy() {
	name := func(n string) string { return "kubeproxy_" + n }
	gauge := func(n, help string) prometheus.Gauge {
		return add(m, prometheus.NewGauge(prometheus.GaugeOpts{Name: name(n), Help: help}))
	}
	counter := func(n, help string) prometheus.Counter {
		return add(m, prometheus.NewCounter(prometheus.CounterOpts{Name: name(n), Help: help}))
	}
	histogram := func(n, help string, buckets []float64) prometheus.Histogram {
		return add(m, prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name(n), Help: help, Buckets: buckets,
		}))
	}
	syncBuckets := prometheus.ExponentialBuckets(0.001, 2, 15)
	m.syncs = histogram("sync_proxy_rules_duration_seconds", "Time one sync took, full or partial.", syncBuckets)
	m.fullSyncs = histogram("sync_full_proxy_rules_duration_seconds", "Time one full sync took.", syncBuckets)
	m.partialSyncs = histogram("sync_partial_proxy_rules_duration_seconds", "Time one partial sync took.", syncBuckets)
	m.lastSynced = gauge("sync_proxy_rules_last_timestamp_seconds", "When everything known was last in the kernel.")
	m.lastQueued = gauge("sync_proxy_rules_last_queued_timestamp_seconds", "When a change was last queued for a sync.")
	m.svcTotal = counter("sync_proxy_rules_service_changes_total", "Service changes seen.")
	m.svcPending = gauge("sync_proxy_rules_service_changes_pending", "Service changes not in the kernel yet.")
	m.epTotal = counter("sync_proxy_rules_endpoint_changes_total", "EndpointSlice changes seen.")
	m.epPending = gauge("sync_proxy_rules_endpoint_changes_pending", "EndpointSlice changes not in the kernel yet.")
	m.programming = histogram("network_programming_duration_seconds",
		"Time from a change of a Service's endpoints in the cluster to the kernel of this node.", programmingBuckets())
	m.noLocal = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: name("sync_proxy_rules_no_local_endpoints_total"),
		Help: "Service ports with a Local traffic policy and no endpoint on this node.",
	}, []string{"traffic_policy"}))
	m.healthz = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: name("proxy_healthz_total"), Help: "Answers of /healthz by status code.",
	}, []string{"code"}))
	m.livez = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: name("proxy_livez_total"), Help: "Answers of /livez by status code.",
	}, []string{"code"}))
}

// programmingBuckets are kube-proxy's: fine below a minute, coarse to five.
// The first one, 0, is there too.
func programmingBuckets() []float64 {
	b := []float64{0}
	b = append(b, prometheus.LinearBuckets(0.25, 0.25, 2)...)
	b = append(b, prometheus.LinearBuckets(1, 1, 59)...)
	b = append(b, prometheus.LinearBuckets(60, 5, 12)...)
	return append(b, prometheus.LinearBuckets(120, 30, 7)...)
}

func (m *Metrics) addOwn(b Build) {
	add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_build_info", Help: "Always 1; the labels say which Spillway runs.",
	}, []string{"version", "commit", "go_version"})).WithLabelValues(b.Version, b.Commit, b.GoVersion).Set(1)
	m.ports = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_service_ports", Help: "Service ports by the dataplane that serves them.",
	}, []string{"dataplane"}))
	m.policies = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_policies", Help: "DoNotTrackPolicies known.",
	}))
	m.policyTargets = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_targets", Help: "Ranges of ports of addresses on this node that a DoNotTrackPolicy is applied to; no series while that is not known (spillway_do_not_track_held).",
	}, nil))
	m.policyTargets.WithLabelValues().Set(0)
	m.policyKept = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_kept", Help: "Pairs of addresses, and ports, that stay tracked although a DoNotTrackPolicy would leave them untracked, because somebody translates connections there.",
	}))
	m.policiesHeld = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_held", Help: "1 while what an earlier agent wrote of DoNotTrackPolicies is left as it is, because something of them cannot be read.",
	}))
	m.policiesRefused = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_refused", Help: "What DoNotTrackPolicies ask for and does not hold on this node, by reason; the log and the policies' condition Applied name each.",
	}, []string{"reason"}))
	m.unsupported = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_unsupported_service_ports", Help: "Service ports that no dataplane of this node can serve.",
	}))
	m.problems = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_problems", Help: "Problems known now; the log names each.",
	}))
	m.syncErrors = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_sync_errors_total", Help: "Syncs that failed as a whole and were repeated in full.",
	}, []string{"dataplane"}))
	m.cleanupErrors = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_cleanup_errors_total", Help: "Attempts to clean up a dataplane that is not in use any more which failed and are repeated.",
	}, []string{"dataplane"}))
	m.auditDiffs = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_audit_differences_total", Help: "Service ports (nftables, iptables: elements, chains and other objects) that the kernel did not hold as they were written.",
	}, []string{"dataplane"}))
}

// ChangesQueued counts what a source delivered.
func (m *Metrics) ChangesQueued(services, endpointSlices int, at time.Time) {
	m.svcTotal.Add(float64(services))
	m.epTotal.Add(float64(endpointSlices))
	m.lastQueued.Set(seconds(at))
}

// SetPending says how many changes are not in the kernel yet.
func (m *Metrics) SetPending(services, endpointSlices int) {
	m.svcPending.Set(float64(services))
	m.epPending.Set(float64(endpointSlices))
}

// SyncDone observes one attempt to write, whatever came of it.
func (m *Metrics) SyncDone(full bool, took time.Duration) {
	m.syncs.Observe(took.Seconds())
	if full {
		m.fullSyncs.Observe(took.Seconds())
	} else {
		m.partialSyncs.Observe(took.Seconds())
	}
}

// SyncSucceeded notes that everything known is in the kernel.
func (m *Metrics) SyncSucceeded(at time.Time) { m.lastSynced.Set(seconds(at)) }

// SyncFailed counts a sync that failed as a whole.
func (m *Metrics) SyncFailed(dataplane string) { m.syncErrors.WithLabelValues(dataplane).Inc() }

// CleanupFailed counts a clean-up of a dataplane that is not in use.
func (m *Metrics) CleanupFailed(dataplane string) { m.cleanupErrors.WithLabelValues(dataplane).Inc() }

// NetworkProgrammed observes the time from a change in the cluster to the kernel.
func (m *Metrics) NetworkProgrammed(d time.Duration) { m.programming.Observe(d.Seconds()) }

// SetNoLocalEndpoints counts Service ports whose Local policy drops traffic.
func (m *Metrics) SetNoLocalEndpoints(internal, external int) {
	m.noLocal.WithLabelValues("internal").Set(float64(internal))
	m.noLocal.WithLabelValues("external").Set(float64(external))
}

// SetPorts counts Service ports by dataplane, and those without one.
func (m *Metrics) SetPorts(byDataplane map[string]int, unsupported int) {
	for name, n := range byDataplane {
		m.ports.WithLabelValues(name).Set(float64(n))
	}
	m.unsupported.Set(float64(unsupported))
}

// SetPolicies tells how many do-not-track policies are known, and how many ranges of
// ports of addresses on this node they are applied to, and for how many pairs of addresses
// nothing is left untracked.
func (m *Metrics) SetPolicies(policies, targets, kept int) {
	m.policies.Set(float64(policies))
	m.policyKept.Set(float64(kept))
	m.policyTargets.WithLabelValues().Set(float64(targets))
	m.policiesHeld.Set(0)
}

// SetPoliciesHeld tells that an earlier agent's do-not-track policies are left as they
// are, and how many are known, of which none is applied.
func (m *Metrics) SetPoliciesHeld(policies int) {
	m.policies.Set(float64(policies))
	m.policyTargets.Reset()
	m.policiesHeld.Set(1)
}

// SetRefused counts what policies ask for and does not hold, by reason. A reason that
// is not there any more has no series.
func (m *Metrics) SetRefused(byReason map[string]int) {
	m.policiesRefused.Reset()
	for reason, n := range byReason {
		m.policiesRefused.WithLabelValues(reason).Set(float64(n))
	}
}

// SetProblems counts the problems known now.
func (m *Metrics) SetProblems(n int) { m.problems.Set(float64(n)) }

// AuditDifferences counts what an audit found changed by somebody else.
func (m *Metrics) AuditDifferences(dataplane string, n int) {
	m.auditDiffs.WithLabelValues(dataplane).Add(float64(n))
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
