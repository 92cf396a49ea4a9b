package server

import (
	"slices"
	"testing"
	"time"
)

// TestCountersGrowFromTheFirstReading: neither what the kernel counted before the agent nor what
// is older than a minute counts.
func TestCountersGrowFromTheFirstReading(t *testing.T) {
	var d recent
	began := time.Now()
	for _, row := range []struct {
		after  time.Duration
		counts map[string]uint64
		want   []growth
	}{
		{0, map[string]uint64{"old": 1000}, nil},
		{10 * time.Second, map[string]uint64{"old": 1000, "late": 7}, nil},
		{20 * time.Second, map[string]uint64{"old": 1003, "late": 9, "silent": 0},
			[]growth{{"late", 2, 10 * time.Second}, {"old", 3, 20 * time.Second}}},
		{65 * time.Second, map[string]uint64{"late": 9}, []growth{{"late", 2, 55 * time.Second}}},
		{85 * time.Second, map[string]uint64{"late": 9}, nil},
		{86 * time.Second, map[string]uint64{"late": 1}, nil}, // it was deleted and made again
	} {
		if got := d.add(reading{began.Add(row.after), row.counts}); !slices.Equal(got, row.want) {
			t.Errorf("after %v: %v, want %v", row.after, got, row.want)
		}
	}
	if n := len(d.readings); n > 4 {
		t.Errorf("%d readings of 86 s in memory", n)
	}
}
