package server

import (
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/diagnosis/doctor"
)

// Findings are the current findings of a node: the one source of what answers, metrics and Events
// say about them.
type Findings struct {
	onBegin func(doctor.Finding)
	gauge   *prometheus.GaugeVec

	mu       sync.Mutex
	list     []doctor.Finding // with Since, the worst first
	problems []doctor.Problem
	seen     map[identity]sighting
}

// identity identifies a finding while it lasts.
type identity struct {
	id, namespace string
	object        doctor.Object
}

// sighting is when a finding began, and when it was last found.
type sighting struct{ began, last time.Time }

// NewFindings returns an empty list. onBegin, if not nil, receives each finding that begins, with
// the lock held: it must not block.
func NewFindings(onBegin func(doctor.Finding)) *Findings {
	return &Findings{onBegin: onBegin, seen: map[identity]sighting{}, gauge: prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "spillway_findings",
		Help: "Faults that spillway doctor finds in the agent's network namespace, by finding and severity, at the last evaluation. " +
			"Each finding has a runbook; spillway status and spillway services name the Services.",
	}, []string{"finding", "severity"})}
}

// Describe implements prometheus.Collector.
func (f *Findings) Describe(descs chan<- *prometheus.Desc) { f.gauge.Describe(descs) }

// Collect implements prometheus.Collector. A finding that has ended stays, with 0.
func (f *Findings) Collect(metrics chan<- prometheus.Metric) { f.gauge.Collect(metrics) }

// now returns the current findings, the worst first, and what could not be read.
func (f *Findings) now() ([]doctor.Finding, []doctor.Problem) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list, f.problems
}

// update replaces the findings by those of an evaluation, which it owns from then on.
func (f *Findings) update(list []doctor.Finding, problems []doctor.Problem, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for i := range list {
		one := &list[i]
		key := identity{one.ID, one.Namespace, one.Object}
		s, known := f.seen[key]
		if !known {
			s.began = now
		}
		s.last = now
		f.seen[key] = s
		one.Since = s.began
		if !known && f.onBegin != nil {
			f.onBegin(*one)
		}
	}
	for key, s := range f.seen {
		if now.Sub(s.last) > resumedWithin {
			delete(f.seen, key)
		}
	}
	f.count(list)
	f.list, f.problems = list, slices.Clone(problems)
}

// count sets the gauges.
func (f *Findings) count(list []doctor.Finding) {
	type label struct {
		id       string
		severity doctor.Severity
	}
	counts := map[label]int{}
	for _, one := range f.list {
		counts[label{one.ID, one.Severity}] = 0
	}
	for _, one := range list {
		counts[label{one.ID, one.Severity}]++
	}
	for l, n := range counts {
		f.gauge.WithLabelValues(l.id, string(l.severity)).Set(float64(n))
	}
}
