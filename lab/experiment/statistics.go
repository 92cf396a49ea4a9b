package experiment

import (
	"fmt"
	"math"
	"slices"
)

// Summary is the middle and the extremes of some numbers. Of no numbers all
// fields are 0.
type Summary struct {
	Median float64 `json:"median"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	// Low and High contain the median of the population with a confidence of 95 %. With
	// fewer than MinSure numbers, they are Min and Max, and the confidence is lower.
	Low  float64 `json:"low"`
	High float64 `json:"high"`
	N    int     `json:"n"`
}

// MinSure is the number of samples for a confidence of 95 %. Of five, all lie on one side
// of the true median once in 16 times.
const MinSure = 6

// Sure reports whether Low and High contain the median with 95 % confidence.
func (s Summary) Sure() bool { return s.N >= MinSure }

// Summarize returns the summary of the values, in any order.
func Summarize(values []float64) Summary {
	if len(values) == 0 {
		return Summary{}
	}
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	rank := medianRank(n)
	return Summary{Median: Median(values), Min: sorted[0], Max: sorted[n-1],
		Low: sorted[rank], High: sorted[n-1-rank], N: n}
}

// medianRank returns how many of n sorted numbers may be cut off at each end so that the
// rest contains the median with 95 % confidence. It holds for any distribution. Each
// number is below the true median with probability 1/2. So the chance that at most rank
// numbers are below it is that of as many heads among n coins.
func medianRank(n int) int {
	chance := math.Pow(0.5, float64(n)) // of exactly i heads
	sum := chance
	for i := range n / 2 {
		if sum > 0.025 {
			return max(i-1, 0)
		}
		chance *= float64(n-i) / float64(i+1)
		sum += chance
	}
	return 0
}

// Median returns the middle value, for an even count the mean of the middle two, and 0
// for none. It does not change the values.
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

// Target is the limit for a median.
type Target struct {
	Limit float64 `json:"limit"`
	// AtMost makes it an upper limit; otherwise it is a lower one.
	AtMost bool `json:"at_most,omitempty"`
}

// Met reports whether the median of s is within the limit. An empty summary meets no
// target.
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
