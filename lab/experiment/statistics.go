package experiment

import (
	"fmt"
	"slices"
)

// Summary is the middle and the extremes of some numbers. Of no numbers all
// fields are 0.
type Summary struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	N      int     `json:"n"`
}

// Summarize returns the summary of the values, in any order.
func Summarize(values []float64) Summary {
	if len(values) == 0 {
		return Summary{}
	}
	return Summary{Median: Median(values), Min: slices.Min(values), Max: slices.Max(values), N: len(values)}
}

// Median returns the middle value, of an even number the mean of the middle
// two, and 0 of none. The values are left as they are.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	mid := len(sorted) / 2
	if len(sorted)%2 == 1 {
		return sorted[mid]
	}
	return (sorted[mid-1] + sorted[mid]) / 2
}

// String is the form for tables: "0.98 (0.95–1.01)".
func (s Summary) String() string {
	if s.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%.3f (%.2f–%.2f)", s.Median, s.Min, s.Max)
}

// Target is what a median must reach.
type Target struct {
	Limit float64 `json:"limit"`
	// AtMost makes the limit an upper one; otherwise it is a lower one.
	AtMost bool `json:"at_most,omitempty"`
}

// Met reports whether the median of s is on the right side of the limit. A
// summary of nothing meets no target.
func (t Target) Met(s Summary) bool {
	if s.N == 0 {
		return false
	}
	if t.AtMost {
		return s.Median <= t.Limit
	}
	return s.Median >= t.Limit
}

// String is the form for tables: "≥ 0.97" or "≤ 1.10".
func (t Target) String() string {
	sign := "≥"
	if t.AtMost {
		sign = "≤"
	}
	return fmt.Sprintf("%s %.2f", sign, t.Limit)
}
