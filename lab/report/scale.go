package report

import (
	"math"

	"spillway.dev/spillway/lab/experiment"
)

// scale maps values to a length on paper.
type scale struct {
	low, high float64 // values at both ends
	from, to  float64 // paper
	log       bool
}

// manyDecades is the span of a logarithmic scale above which only powers of ten
// are named.
const manyDecades = 200

// newScale returns a scale for all values. A logarithmic one omits values that are not
// positive.
func newScale(values []float64, log bool, from, to float64) scale {
	s := scale{low: math.Inf(1), high: math.Inf(-1), from: from, to: to, log: log}
	for _, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) || log && v <= 0 {
			continue
		}
		s.low, s.high = min(s.low, v), max(s.high, v)
	}
	if s.low > s.high { // nothing
		s.low, s.high = 0, 1
		if log {
			s.low = 0.1
		}
	}
	if log {
		s.low, s.high = lower125(s.low), upper125(s.high)
		if s.low == s.high {
			s.high *= 10
		}
		if s.high/s.low > manyDecades { // their ends need a label
			s.low = math.Pow(10, math.Floor(math.Log10(s.low)+1e-9))
			s.high = math.Pow(10, math.Ceil(math.Log10(s.high)-1e-9))
		}
		return s
	}
	s.low = min(s.low, 0)
	step := niceStep(s.high - s.low)
	s.low, s.high = math.Floor(s.low/step)*step, math.Ceil(s.high/step)*step
	if s.low == s.high {
		s.high = s.low + 1
	}
	return s
}

// at returns the position of a value on paper; a value outside the scale is at its nearer
// end.
func (s scale) at(v float64) float64 {
	v = min(max(v, s.low), s.high)
	share := (v - s.low) / (s.high - s.low)
	if s.log {
		share = math.Log(v/s.low) / math.Log(s.high/s.low)
	}
	return s.from + share*(s.to-s.from)
}

// ticks are the values that an axis names, and their names.
func (s scale) ticks() (values []float64, names []string) {
	if !s.log {
		step := niceStep(s.high - s.low)
		for i := 0; ; i++ {
			v := s.low + float64(i)*step
			if v > s.high+step*1e-6 {
				break
			}
			values = append(values, v)
		}
	} else {
		factors := []float64{1}
		if s.high/s.low <= manyDecades {
			factors = []float64{1, 2, 5}
		}
		for d := math.Pow(10, math.Floor(math.Log10(s.low)+1e-9)); d <= s.high*1.0001; d *= 10 {
			for _, f := range factors {
				if v := d * f; v >= s.low*0.9999 && v <= s.high*1.0001 {
					values = append(values, v)
				}
			}
		}
	}
	for _, v := range values {
		names = append(names, tickName(v))
	}
	return values, names
}

// tickName is a number without digits that rounding left.
func tickName(v float64) string {
	switch abs := math.Abs(v); {
	case abs >= 1e6:
		return experiment.FormatNumber(round(v/1e6)) + "M"
	case abs >= 1e4:
		return experiment.FormatNumber(round(v/1e3)) + "k"
	}
	return experiment.FormatNumber(round(v))
}

func round(v float64) float64 {
	if v == 0 {
		return 0
	}
	unit := math.Pow(10, math.Floor(math.Log10(math.Abs(v)))-3)
	return math.Round(v/unit) * unit
}

// niceStep returns 1, 2 or 5 times a power of ten. About four such steps make the span.
func niceStep(span float64) float64 {
	if span <= 0 {
		return 1
	}
	raw := span / 4
	d := math.Pow(10, math.Floor(math.Log10(raw)))
	for _, f := range []float64{1, 2, 5} {
		if raw <= f*d*1.0001 {
			return f * d
		}
	}
	return 10 * d
}

func lower125(v float64) float64 {
	d := math.Pow(10, math.Floor(math.Log10(v)+1e-9))
	for _, f := range []float64{5, 2} {
		if v >= f*d*0.9999 {
			return f * d
		}
	}
	return d
}

func upper125(v float64) float64 {
	d := math.Pow(10, math.Floor(math.Log10(v)+1e-9))
	for _, f := range []float64{1, 2, 5} {
		if v <= f*d*1.0001 {
			return f * d
		}
	}
	return 10 * d
}
