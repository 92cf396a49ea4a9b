package experiment

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// FormatNumber writes a number with three or so digits that mean something:
// "0", "0.0042", "3.14", "27.1", "8,552".
func FormatNumber(v float64) string {
	switch abs := math.Abs(v); {
	case v == math.Trunc(v) && abs < 1000:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case abs < 0.0001:
		return strconv.FormatFloat(v, 'e', 1, 64)
	case abs < 1:
		return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(v, 'f', 1-int(math.Floor(math.Log10(abs))), 64), "0"), ".")
	case abs < 10:
		return strconv.FormatFloat(v, 'f', 2, 64)
	case abs < 100:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return thousands(strconv.FormatFloat(v, 'f', 0, 64))
}

func thousands(digits string) string {
	sign := ""
	if strings.HasPrefix(digits, "-") {
		sign, digits = "-", digits[1:]
	}
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return sign + digits
}

// FormatRange writes a summary for a table: "8,552 (7,900–9,100)", the median
// and the extremes, or the one number that there is.
func FormatRange(s Summary, unit string) string {
	if s.N == 0 {
		return "-"
	}
	text := FormatNumber(s.Median)
	if s.Min != s.Max {
		text += fmt.Sprintf(" (%s–%s)", FormatNumber(s.Min), FormatNumber(s.Max))
	}
	if unit != "" {
		text += " " + unit
	}
	return text
}
