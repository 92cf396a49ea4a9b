package demo

import (
	"fmt"
	"io"
	"strings"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
)

// Report holds the results of a demo.
type Report struct {
	Machine experiment.Machine `json:"machine"`
	Mode    string             `json:"mode"`
	Visits  []*Probe           `json:"visits"`
	Speeds  []Speed            `json:"speeds,omitempty"`
}

// Speed is the rate of one path: medians over the rounds.
type Speed struct {
	Path      string       `json:"path"`
	Kind      load.Kind    `json:"kind"`
	Rate      float64      `json:"rate"`
	Latency   load.Latency `json:"latency_us"`
	ToMetal   float64      `json:"ratio_to_metal"` // of the rates, round by round
	Conntrack int          `json:"conntrack_entries"`
	Failed    int64        `json:"failed"`
}

func newSpeed(path string, metal, samples []harness.Sample) Speed {
	med := func(figure func(harness.Sample) float64) float64 {
		return experiment.Median(experiment.Figures(samples, figure))
	}
	rate := func(s harness.Sample) float64 { return s.Rate }
	s := Speed{
		Path: path,
		Kind: samples[0].Kind,
		Rate: med(rate),
		Latency: load.Latency{
			P50:  med(func(s harness.Sample) float64 { return s.Latency.P50 }),
			P99:  med(func(s harness.Sample) float64 { return s.Latency.P99 }),
			P999: med(func(s harness.Sample) float64 { return s.Latency.P999 }),
			Max:  med(func(s harness.Sample) float64 { return s.Latency.Max }),
			Mean: med(func(s harness.Sample) float64 { return s.Latency.Mean }),
		},
		ToMetal: experiment.Trial[harness.Sample]{A: metal, B: samples}.Ratio(rate).Median,
	}
	for _, m := range samples {
		s.Conntrack = max(s.Conntrack, m.Conntrack)
		s.Failed += m.Failed()
	}
	return s
}

// unanswered returns an error that names the addresses that did not answer
// every time.
func (r *Report) unanswered() error {
	var bad []string
	for _, v := range r.Visits {
		if v.Failed > 0 {
			bad = append(bad, fmt.Sprintf("%s %s from %s", v.Protocol, v.Address, v.From))
		}
	}
	if len(bad) == 0 {
		return nil
	}
	return fmt.Errorf("ask Service addresses: %d of %d did not answer: %s", len(bad), len(r.Visits), strings.Join(bad, ", "))
}

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintf(w, "%s\n\n", page.Of(w).Wrap(fmt.Sprintf("%s, --proxy-mode %s", r.Machine, r.Mode), ""))
	if err := r.writeVisits(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	for _, kind := range []load.Kind{load.HTTP, load.Conn} {
		if err := r.writeSpeeds(w, kind); err != nil {
			return fmt.Errorf("write report: %w", err)
		}
	}
	return nil
}

func (r *Report) writeVisits(w io.Writer) error {
	t := page.NewTable(page.Text("SERVICE").Shrinks(8), page.Text("WAY").Shrinks(10), page.Text("ADDRESS"), page.Text("FROM"), page.Text("ANSWERED BY (SOURCE IT SAW)").Shrinks(20))
	for _, v := range r.Visits {
		t.Row(v.Protocol+" "+v.Service, v.Way, v.Address, v.From, v.answeredBy())
	}
	return t.Write(w)
}

var loadTitles = map[load.Kind]string{
	load.HTTP: "Requests over connections that stay open",
	load.Conn: "One connection for each request",
}

func (r *Report) writeSpeeds(w io.Writer, kind load.Kind) error {
	var rows []Speed
	for _, s := range r.Speeds {
		if s.Kind == kind {
			rows = append(rows, s)
		}
	}
	if len(rows) == 0 {
		return nil // an interrupted demo
	}
	fmt.Fprintf(w, "\n%s:\n", loadTitles[kind])
	t := page.NewTable(page.Text("PATH").Shrinks(20), page.Number("÷ METAL"), page.Number("REQUESTS/s"), page.Number("P50 µs"), page.Number("P99 µs"),
		page.Number("CONNTRACK ENTRIES").Shrinks(9), page.Number("FAILED"), page.Number("P99.9 µs").OnlyWide())
	whole := func(v float64) string { return fmt.Sprintf("%.0f", v) }
	for _, s := range rows {
		t.Row(s.Path, fmt.Sprintf("%.2f", s.ToMetal), whole(s.Rate), whole(s.Latency.P50), whole(s.Latency.P99), s.Conntrack, s.Failed, whole(s.Latency.P999))
	}
	return t.Write(w)
}
