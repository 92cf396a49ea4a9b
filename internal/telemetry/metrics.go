// Package telemetry exports the state of a running agent: Prometheus metrics, health, and
// the healthCheckNodePorts of Services.
//
// Metrics that kube-proxy has keep kube-proxy's names, types and buckets, so that
// dashboards and alerts continue to work; Spillway's own are spillway_*.
package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// Build identifies the version of Spillway.
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
	features                       *prometheus.GaugeVec

	ports                              *prometheus.GaugeVec
	unsupported                        prometheus.Gauge
	policies, policyKept, policiesHeld prometheus.Gauge
	policyTargets                      *prometheus.GaugeVec // without a label: it may have no series
	policiesRefused                    *prometheus.GaugeVec
	problems, ejected                  prometheus.Gauge
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

// Register adds a collector, such as a dataplane's. It fails if a metric of that name
// exists.
func (m *Metrics) Register(c prometheus.Collector) error { return m.registry.Register(c) }

// Gatherer returns a gatherer of all metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// add registers a metric of this package. It panics if the name exists, which is a bug.
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
		Help: "Service ports whose traffic is dropped on this node: a Local traffic policy, and no endpoint here.",
	}, []string{"traffic_policy"}))
	m.healthz = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: name("proxy_healthz_total"), Help: "Responses of /healthz by status code.",
	}, []string{"code"}))
	m.livez = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: name("proxy_livez_total"), Help: "Responses of /livez by status code.",
	}, []string{"code"}))
	m.features = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kubernetes_feature_enabled", Help: "1 if the agent does what a feature gate of kube-proxy is about, 0 if not. Gates that " +
			"have no effect here have no series.",
	}, []string{"name", "stage"}))
}

// programmingBuckets are kube-proxy's: fine below a minute, coarse to five.
// They include the first one, 0.
func programmingBuckets() []float64 {
	b := []float64{0}
	b = append(b, prometheus.LinearBuckets(0.25, 0.25, 2)...)
	b = append(b, prometheus.LinearBuckets(1, 1, 59)...)
	b = append(b, prometheus.LinearBuckets(60, 5, 12)...)
	return append(b, prometheus.LinearBuckets(120, 30, 7)...)
}

func (m *Metrics) addOwn(b Build) {
	add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_build_info", Help: "Always 1; the labels have the version of the running Spillway.",
	}, []string{"version", "commit", "go_version"})).WithLabelValues(b.Version, b.Commit, b.GoVersion).Set(1)
	m.ports = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_service_ports", Help: "Service ports by the dataplane that serves them.",
	}, []string{"dataplane"}))
	m.policies = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_policies", Help: "Number of DoNotTrackPolicies.",
	}))
	m.policyTargets = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_targets", Help: "Port ranges of addresses on this node to which a DoNotTrackPolicy applies; no series " +
			"while that is unknown (spillway_do_not_track_held).",
	}, nil))
	m.policyTargets.WithLabelValues().Set(0)
	m.policyKept = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_kept", Help: "Pairs of addresses and ports that stay tracked although a DoNotTrackPolicy selects them, " +
			"because a NAT rule translates their connections.",
	}))
	m.policiesHeld = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_held", Help: "1 while changes of DoNotTrackPolicies have no effect, because a policy or an object that " +
			"it needs cannot be read. The rules of an earlier agent stay.",
	}))
	m.policiesRefused = add(m, prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_do_not_track_refused", Help: "Parts of DoNotTrackPolicies that are not applied on this node, by reason; the log and " +
			"the policies' condition Applied name each.",
	}, []string{"reason"}))
	m.unsupported = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_unsupported_service_ports", Help: "Service ports that are not served on this node, because no dataplane supports " +
			"them; Events of the Services name the cause.",
	}))
	m.ejected = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_ejected_endpoints", Help: "Number of endpoints that get no new connections for a while, because they did not accept " +
			"their last ones.",
	}))
	m.problems = add(m, prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "spillway_problems", Help: "Number of current problems; the log names them, at most 20 of those that appear together.",
	}))
	m.syncErrors = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_sync_errors_total", Help: "Syncs that failed and are repeated in full; the log has the error.",
	}, []string{"dataplane"}))
	m.cleanupErrors = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_cleanup_errors_total", Help: "Failed attempts to remove the rules of a dataplane that is no longer in use; they are " +
			"repeated, and the log has the error.",
	}, []string{"dataplane"}))
	m.auditDiffs = add(m, prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "spillway_audit_differences_total", Help: "Service ports (nftables, iptables: elements, chains and other objects) that " +
			"another program changed in the kernel; the agent repairs them.",
	}, []string{"dataplane"}))
}

// SetFeature records whether a feature gate of kube-proxy that is generally available (stage
// "") is on.
func (m *Metrics) SetFeature(gate string, on bool) {
	value := 0.0
	if on {
		value = 1
	}
	m.features.WithLabelValues(gate, "").Set(value)
}

// ChangesQueued counts changes that a source delivered.
func (m *Metrics) ChangesQueued(services, endpointSlices int, at time.Time) {
	m.svcTotal.Add(float64(services))
	m.epTotal.Add(float64(endpointSlices))
	m.lastQueued.Set(seconds(at))
}

// SetPending sets the number of changes that are not in the kernel yet.
func (m *Metrics) SetPending(services, endpointSlices int) {
	m.svcPending.Set(float64(services))
	m.epPending.Set(float64(endpointSlices))
}

// SyncDone observes one sync, successful or not.
func (m *Metrics) SyncDone(full bool, took time.Duration) {
	m.syncs.Observe(took.Seconds())
	if full {
		m.fullSyncs.Observe(took.Seconds())
	} else {
		m.partialSyncs.Observe(took.Seconds())
	}
}

// SyncSucceeded records that the kernel has every known change.
func (m *Metrics) SyncSucceeded(at time.Time) { m.lastSynced.Set(seconds(at)) }

// SyncFailed counts a sync that failed as a whole.
func (m *Metrics) SyncFailed(dataplane string) { m.syncErrors.WithLabelValues(dataplane).Inc() }

// CleanupFailed counts a failed cleanup of a dataplane that is not in use.
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

// SetPolicies sets the number of do-not-track policies, of port ranges on this node to
// which they apply, and of pairs of addresses that stay tracked.
func (m *Metrics) SetPolicies(policies, targets, kept int) {
	m.policies.Set(float64(policies))
	m.policyKept.Set(float64(kept))
	m.policyTargets.WithLabelValues().Set(float64(targets))
	m.policiesHeld.Set(0)
}

// SetPoliciesHeld records that the rules of an earlier agent stay, and sets the number of
// known policies, none of which is applied.
func (m *Metrics) SetPoliciesHeld(policies int) {
	m.policies.Set(float64(policies))
	m.policyTargets.Reset()
	m.policiesHeld.Set(1)
}

// SetRefused sets the number of parts of policies that are not applied, by reason. A
// reason that no longer occurs has no series.
func (m *Metrics) SetRefused(byReason map[string]int) {
	m.policiesRefused.Reset()
	for reason, n := range byReason {
		m.policiesRefused.WithLabelValues(reason).Set(float64(n))
	}
}

// SetEjected sets the number of ejected endpoints.
func (m *Metrics) SetEjected(n int) { m.ejected.Set(float64(n)) }

// SetProblems sets the number of current problems.
func (m *Metrics) SetProblems(n int) { m.problems.Set(float64(n)) }

// AuditDifferences counts changes by other programs that an audit found.
func (m *Metrics) AuditDifferences(dataplane string, n int) {
	m.auditDiffs.WithLabelValues(dataplane).Add(float64(n))
}

func seconds(t time.Time) float64 { return float64(t.UnixNano()) / 1e9 }
