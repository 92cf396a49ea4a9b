package autopilot

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are what the autopilot tells Prometheus.
type metrics struct {
	steps    *prometheus.CounterVec
	changed  prometheus.Gauge
	readOnly prometheus.Gauge
	needs    prometheus.Gauge
	within   prometheus.Gauge
	looking  prometheus.Counter
}

func newMetrics() *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_conntrack_autopilot_" + name, Help: help})
	}
	return &metrics{
		steps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_conntrack_autopilot_steps_total",
			Help: "Changes of conntrack's settings, by sysctl, direction (raise, shorten, back) and outcome (done, advised, refused).",
		}, []string{"setting", "direction", "outcome"}),
		changed:  gauge("changed_settings", "Settings that differ now from what was found at the start."),
		readOnly: gauge("unwritable_settings", "Settings that could not be written."),
		needs:    gauge("fullest_entries", "Entries in the fullest network namespace, those that it grows by in 30 s included."),
		within:   gauge("entries_in_budget", "Entries that fit into --conntrack-autopilot-memory."),
		looking: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "spillway_conntrack_autopilot_measuring_seconds_total", Help: "Time spent measuring.",
		}),
	}
}

func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.steps, m.changed, m.readOnly, m.needs, m.within, m.looking}
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

func (m *metrics) count(s Step, outcome string) {
	m.steps.WithLabelValues(s.Sysctl, s.Direction(), outcome).Inc()
}

// measured notes what a measurement saw and took.
func (m *metrics) measured(seen Measured, took time.Duration) {
	most := 0.0
	for _, s := range seen.Spaces {
		most = max(most, float64(s.Entries)+max(0, s.Growth)*horizon.Seconds())
	}
	m.needs.Set(most)
	m.looking.Add(took.Seconds())
}
