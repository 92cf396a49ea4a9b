package demo

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

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
	fmt.Fprintf(w, "%s, --proxy-mode %s\n\n", r.Machine, r.Mode)
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "SERVICE\tWAY\tADDRESS\tFROM\tANSWERED BY (AND THE SOURCE IT SAW)")
	for _, v := range r.Visits {
		fmt.Fprintf(t, "%s %s\t%s\t%s\t%s\t%s\n", v.Protocol, v.Service, v.Way, v.Address, v.From, v.answeredBy())
	}
	return t.Flush()
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
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\n%s:\nPATH\tREQUESTS/S\tP50 µs\tP99 µs\tP99.9 µs\t÷ METAL\tCONNTRACK ENTRIES\tFAILED\n", loadTitles[kind])
	for _, s := range rows {
		fmt.Fprintf(t, "%s\t%.0f\t%.0f\t%.0f\t%.0f\t%.2f\t%d\t%d\n",
			s.Path, s.Rate, s.Latency.P50, s.Latency.P99, s.Latency.P999, s.ToMetal, s.Conntrack, s.Failed)
	}
	return t.Flush()
}
