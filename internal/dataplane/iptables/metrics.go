package iptables

import "github.com/prometheus/client_golang/prometheus"

// metrics are kube-proxy's, with its names, and one of Spillway's. They are safe for
// concurrent use.
type metrics struct {
	total, last               *prometheus.GaugeVec
	failures, partialFailures prometheus.Counter
	differences               prometheus.Counter
}

func newMetrics() *metrics {
	const prefix = "kubeproxy_sync_proxy_rules_iptables_"
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + name, Help: help}, []string{"table"})
	}
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := &metrics{
		total:    gauge("total", "Rules of ours in the kernel."),
		last:     gauge("last", "Rules that the last sync wrote."),
		failures: counter(prefix+"restore_failures_total", "Restores that failed."),
		partialFailures: counter(prefix+"partial_restore_failures_total",
			"Restores of changed chains alone that failed; everything was written then."),
		differences: counter("spillway_iptables_differences_total",
			"Chains and rules that the kernel did not hold as they were written, found by audits and by --verify-partial-sync."),
	}
	for _, table := range allTables {
		m.total.WithLabelValues(table).Set(0)
		m.last.WithLabelValues(table).Set(0)
	}
	return m
}

// synced records the number of rules in the kernel, and how many of them a sync wrote.
func (m *metrics) synced(families []*family, written map[string]int) {
	for _, table := range allTables {
		n := 0
		for _, f := range families {
			n += f.count(table)
		}
		m.total.WithLabelValues(table).Set(float64(n))
		m.last.WithLabelValues(table).Set(float64(written[table]))
	}
}

func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.total, m.last, m.failures, m.partialFailures, m.differences}
}

// Describe implements prometheus.Collector. The zero Backend describes its metrics too.
func (b *Backend) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range newMetrics().all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (b *Backend) Collect(ch chan<- prometheus.Metric) {
	for _, c := range b.metrics.all() {
		c.Collect(ch)
	}
}
