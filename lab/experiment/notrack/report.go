package notrack

import (
	"fmt"
	"io"
	"slices"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
)

// Report holds the results of a run.
type Report struct {
	Machine     experiment.Machine `json:"machine"`
	Mode        string             `json:"mode"`
	Rounds      int                `json:"rounds"`
	Seconds     float64            `json:"seconds"`
	Rate        float64            `json:"rate"`
	Comparisons []Comparison       `json:"comparisons"`
	Ceilings    []Ceiling          `json:"ceilings"`
}

// Comparison is one figure of two sides.
type Comparison struct {
	Name   string             `json:"name"`
	Figure string             `json:"figure"`
	A      float64            `json:"a"` // medians
	B      float64            `json:"b"`
	Ratio  experiment.Summary `json:"ratio"` // B ÷ A, round by round
	Target *experiment.Target `json:"target,omitempty"`
	Met    *bool              `json:"met,omitempty"`
	// Answered and Failed are connections of all rounds, of both sides.
	AnsweredA, AnsweredB int64 `json:"-"`
	FailedA              int64 `json:"failed_a"`
	FailedB              int64 `json:"failed_b"`
	// EntriesA and EntriesB are the largest number of entries that one measurement left
	// in the table.
	EntriesA int `json:"conntrack_entries_a"`
	EntriesB int `json:"conntrack_entries_b"`
	// Errors counts failures of both sides by kind.
	Errors map[string]int64 `json:"errors,omitempty"`
}

// Ceiling is one long measurement at full speed.
type Ceiling struct {
	Name string `json:"name"`
	Sample
}

func (r *Report) add(p plan, t experiment.Trial[Sample]) {
	c := Comparison{
		Name: p.name, Figure: p.figure, Target: p.target, Ratio: t.Ratio(p.value),
		A: experiment.Median(experiment.Figures(t.A, p.value)), B: experiment.Median(experiment.Figures(t.B, p.value)),
	}
	for _, s := range t.A {
		c.AnsweredA, c.FailedA, c.EntriesA = c.AnsweredA+s.Answered, c.FailedA+s.Failed, max(c.EntriesA, s.Entries)
	}
	for _, s := range t.B {
		c.AnsweredB, c.FailedB, c.EntriesB = c.AnsweredB+s.Answered, c.FailedB+s.Failed, max(c.EntriesB, s.Entries)
	}
	for _, s := range slices.Concat(t.A, t.B) {
		for kind, n := range s.Errors {
			if c.Errors == nil {
				c.Errors = map[string]int64{}
			}
			c.Errors[kind] += n
		}
	}
	if p.target != nil && c.Ratio.Sure() {
		met := p.target.Met(c.Ratio)
		c.Met = &met
	}
	r.Comparisons = append(r.Comparisons, c)
}

// verdict is "-" without a target, or "≥ 0.95: met".
func (c *Comparison) verdict() string {
	switch {
	case c.Target == nil:
		return "-"
	case c.Met == nil:
		return c.Target.String() + ": too few rounds"
	case *c.Met:
		return c.Target.String() + ": met"
	}
	return c.Target.String() + ": missed"
}

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	fmt.Fprintf(w, "memcached, one get a connection, --proxy-mode %s, %d rounds of %gs a side\n\n", r.Mode, r.Rounds, r.Seconds)
	t := page.NewTable(page.Text("COMPARISON").Shrinks(16), page.Text("FIGURE").Shrinks(8), page.Text("B ÷ A").Shrinks(11), page.Text("95 %"),
		page.Text("TARGET").Shrinks(7),
		page.Number("FAILED"), page.Number("A").OnlyWide(), page.Number("B").OnlyWide(), page.Number("CONNTRACK").OnlyWide())
	for _, c := range r.Comparisons {
		sure := "-"
		if c.Ratio.Sure() {
			sure = fmt.Sprintf("%.2f–%.2f", c.Ratio.Low, c.Ratio.High)
		}
		t.Row(c.Name, c.Figure, c.Ratio, sure, c.verdict(), fmt.Sprintf("%d, %d", c.FailedA, c.FailedB),
			fmt.Sprintf("%.0f", c.A), fmt.Sprintf("%.0f", c.B), fmt.Sprintf("%d, %d", c.EntriesA, c.EntriesB))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, c := range r.Comparisons {
		if len(c.Errors) > 0 {
			fmt.Fprintf(w, "failed in %s: %v\n", c.Name, c.Errors)
		}
	}
	fmt.Fprintln(w)
	t = page.NewTable(page.Text("AS FAST AS IT GOES").Shrinks(20), page.Number("CONN/s"), page.Number("ANSWERED"), page.Number("FAILED"),
		page.Number("CONNTRACK"))
	for _, c := range r.Ceilings {
		t.Row(c.Name, fmt.Sprintf("%.0f", c.Rate), c.Answered, c.Failed, fmt.Sprintf("%+d", c.Entries))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
CPU: µs that clients, node, server and kernel threads ran for each connection, the table
holding all but 100,000 of what it can. Ratios: median of
the rounds (lowest–highest); 95 %: where the true median lies with that confidence. FAILED, CONNTRACK: of
side A and B; entries that one measurement left on the node at most (-o wide, with the figures of both sides).
`))
	return err
}
