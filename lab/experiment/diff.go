package experiment

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"

	"spillway.dev/spillway/internal/page"
)

// Difference is one figure of one row that both runs have.
type Difference struct {
	Experiment string  `json:"experiment"`
	Row        string  `json:"row"`
	Figure     string  `json:"figure"`
	Unit       string  `json:"unit,omitempty"`
	A          Summary `json:"a"`
	B          Summary `json:"b"`
	// Verdict is "better", "worse", "changed" (neither is better), "noise"
	// (the ranges overlap), or "unknown": the noise of a single measurement is
	// unknown.
	Verdict string `json:"verdict"`
}

// Comparison lists the differences of two runs, and the rows that only one of them has.
type Comparison struct {
	Differences []Difference `json:"differences"`
	OnlyA       []string     `json:"only_a,omitempty"`
	OnlyB       []string     `json:"only_b,omitempty"`
}

// Comparable returns an error if two runs must not be compared: their figures
// would differ even if Spillway had not changed.
func Comparable(a, b *Run) error {
	var errs []error
	check := func(what string, x, y any) {
		if x != y {
			errs = append(errs, fmt.Errorf("%s: %v, %v", what, x, y))
		}
	}
	check("kernel", a.Machine.Kernel, b.Machine.Kernel)
	check("architecture", a.Machine.Arch, b.Machine.Arch)
	check("CPU", a.Machine.CPU, b.Machine.CPU)
	check("cores", a.Machine.Cores, b.Machine.Cores)
	check("quick", a.Quick, b.Quick)
	if len(errs) > 0 {
		return fmt.Errorf("compare results: they are not of the same machine and length: %w: use --force to compare them nevertheless",
			errors.Join(errs...))
	}
	return nil
}

// Compare returns for every figure of both runs whether it changed beyond noise.
func Compare(a, b *Run) Comparison {
	var c Comparison
	theirs := map[string]*RowResult{}
	for _, res := range b.Results {
		for i := range res.Rows {
			theirs[res.Name+": "+res.Rows[i].Name] = &res.Rows[i]
		}
	}
	for _, res := range a.Results {
		for _, row := range res.Rows {
			name := res.Name + ": " + row.Name
			other := theirs[name]
			delete(theirs, name)
			if other == nil || row.Status != OK || other.Status != OK {
				if row.Status == OK {
					c.OnlyA = append(c.OnlyA, name)
				} else if other != nil && other.Status == OK {
					c.OnlyB = append(c.OnlyB, name)
				}
				continue
			}
			c.compareRow(res, row, other)
		}
	}
	for _, res := range b.Results {
		for _, row := range res.Rows {
			if name := res.Name + ": " + row.Name; theirs[name] != nil && row.Status == OK {
				c.OnlyB = append(c.OnlyB, name)
			}
		}
	}
	return c
}

func (c *Comparison) compareRow(res Result, a RowResult, b *RowResult) {
	for _, f := range res.Figures {
		x, inA := a.Value(f.Key)
		y, inB := b.Value(f.Key)
		if inA && inB {
			c.Differences = append(c.Differences, Difference{Experiment: res.Name, Row: a.Name,
				Figure: f.Name, Unit: f.Unit, A: x, B: y, Verdict: verdict(f, x, y)})
		}
	}
}

// verdict compares the ranges in which the medians lie: if they do not overlap,
// the figure changed.
func verdict(f Figure, a, b Summary) string {
	switch {
	case a.Median == b.Median:
		return "noise"
	case !f.Exact && (a.N < 2 || b.N < 2):
		return "unknown"
	case !f.Exact && a.Low <= b.High && b.Low <= a.High:
		return "noise"
	case f.Better == "":
		return "changed"
	case (b.Median > a.Median) == (f.Better == "higher"):
		return "better"
	}
	return "worse"
}

// unknownBelow is the ratio below which Write omits two single measurements: rows
// of an idle machine differ by as much.
const unknownBelow = 1.25

// far returns the distance of a ratio from 1, in either direction; infinite if one
// median is 0.
func (d Difference) far() float64 {
	if d.A.Median <= 0 || d.B.Median <= 0 {
		return math.Inf(1)
	}
	return max(d.A.Median/d.B.Median, d.B.Median/d.A.Median)
}

// shown returns the differences to print: first the differences beyond noise, then
// the ones with unknown noise, the largest first.
func (c Comparison) shown() (out []Difference) {
	var unknown []Difference
	for _, d := range c.Differences {
		switch {
		case d.Verdict == "unknown" && d.far() >= unknownBelow:
			unknown = append(unknown, d)
		case d.Verdict != "unknown" && d.Verdict != "noise":
			out = append(out, d)
		}
	}
	slices.SortStableFunc(unknown, func(a, b Difference) int { return cmp.Compare(b.far(), a.far()) })
	return append(out, unknown...)
}

// Write prints the changes as text.
func (c Comparison) Write(w io.Writer) error {
	counts := map[string]int{}
	t := page.NewTable(page.Text("EXPERIMENT"), page.Text("ROW").Shrinks(16), page.Text("FIGURE").Shrinks(10),
		page.Text("VERDICT"), page.Number("B ÷ A"),
		page.Text("A").Shrinks(9), page.Text("B").Shrinks(9))
	for _, d := range c.Differences {
		counts[d.Verdict]++
	}
	for _, d := range c.shown() {
		ratio := "-"
		if d.A.Median != 0 {
			ratio = fmt.Sprintf("%.2f", d.B.Median/d.A.Median)
		}
		t.Row(d.Experiment, d.Row, d.Figure, d.Verdict, ratio, FormatRange(d.A, d.Unit), FormatRange(d.B, d.Unit))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, n := range c.OnlyA {
		fmt.Fprintf(w, "only in A: %s\n", n)
	}
	for _, n := range c.OnlyB {
		fmt.Fprintf(w, "only in B: %s\n", n)
	}
	_, err := fmt.Fprintln(w, page.Of(w).Wrap(fmt.Sprintf(
		"%d better, %d worse, %d changed, %d within noise, %d of single measurements with unknown noise (shown from a ratio of %.2f)",
		counts["better"], counts["worse"], counts["changed"], counts["noise"], counts["unknown"], unknownBelow), ""))
	return err
}
