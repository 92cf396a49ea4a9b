package autopilot

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the metrics of the autopilot.
type metrics struct {
	steps     *prometheus.CounterVec
	changed   prometheus.Gauge
	readOnly  prometheus.Gauge
	needs     prometheus.Gauge
	within    prometheus.Gauge
	measuring prometheus.Counter
}

func newMetrics() *metrics {
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_conntrack_autopilot_" + name, Help: help})
	}
	return &metrics{
		steps: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_conntrack_autopilot_steps_total",
			Help: "Changes of conntrack settings, by sysctl, direction (raise, shorten, back) and outcome (done, advised, refused).",
		}, []string{"setting", "direction", "outcome"}),
		changed:  gauge("changed_settings", "Settings that currently differ from the values found at the start."),
		readOnly: gauge("unwritable_settings", "Settings that could not be written; the log and an Event of the Node name each."),
		needs:    gauge("fullest_entries", "Entries in the fullest network namespace, including its growth in the next 30 s."),
		within:   gauge("entries_in_budget", "Entries that fit into --conntrack-autopilot-memory."),
		measuring: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "spillway_conntrack_autopilot_measuring_seconds_total", Help: "Time spent on measurements, in seconds.",
		}),
	}
}

func (m *metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.steps, m.changed, m.readOnly, m.needs, m.within, m.measuring}
}

// Describe implements prometheus.Collector. The zero Pilot describes its metrics too.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range newMetrics().all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

func (m *metrics) count(s step, outcome string) {
	m.steps.WithLabelValues(s.Sysctl, s.direction(), outcome).Inc()
}

// measured records the result and the duration of a measurement.
func (m *metrics) measured(seen measured, took time.Duration) {
	most := 0.0
	for _, s := range seen.Spaces {
		most = max(most, float64(s.Entries)+max(0, s.Growth)*horizon.Seconds())
	}
	m.needs.Set(most)
	m.measuring.Add(took.Seconds())
}
