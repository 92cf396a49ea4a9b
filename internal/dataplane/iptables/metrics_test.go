package iptables

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// gather sums each metric over its labels.
func gather(t testing.TB, be *Backend) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(be); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]float64{}
	for _, f := range families {
		for _, m := range f.Metric {
			sums[f.GetName()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			for _, l := range m.Label {
				sums[f.GetName()+"/"+l.GetValue()] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sums
}
