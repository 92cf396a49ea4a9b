package demo

import (
	"fmt"
	"io"
	"maps"
	"slices"
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
	Requests  int64        `json:"requests"` // answered, in all rounds
	Failed    int64        `json:"failed"`
	// Errors counts the failed requests by cause.
	Errors map[string]int64 `json:"errors,omitempty"`
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
		s.Requests += m.Requests
		for cause, n := range m.Errors {
			if s.Errors == nil {
				s.Errors = map[string]int64{}
			}
			s.Errors[cause] += n
			s.Failed += n
		}
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
	if err := r.writeVerdicts(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func (r *Report) writeVisits(w io.Writer) error {
	t := page.NewTable(page.Text("SERVICE").Shrinks(8), page.Text("WAY").Shrinks(10), page.Text("ADDRESS"), page.Text("FROM"),
		page.Text("ANSWERED BY (SOURCE IT SAW)").Shrinks(20))
	for _, v := range r.Visits {
		t.Row(v.Protocol+" "+v.Service, v.Way, v.Address, v.From, v.answeredBy())
	}
	t.Foot("The brackets name the source address that the server saw: the client's, or a node's if the endpoint is on another node.")
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
	t := page.NewTable(page.Text("PATH").Shrinks(20), page.Number("÷ METAL"), page.Number("REQUESTS/s"),
		page.Number("P50 µs"), page.Number("P99 µs"),
		page.Number("CONNTRACK ENTRIES").Shrinks(9), page.Number("FAILED"), page.Number("P99.9 µs").OnlyWide())
	whole := func(v float64) string { return fmt.Sprintf("%.0f", v) }
	for _, s := range rows {
		t.Row(s.Path, ratio(s.ToMetal), whole(s.Rate), whole(s.Latency.P50), whole(s.Latency.P99), s.Conntrack, s.Failed, whole(s.Latency.P999))
	}
	if kind == load.Conn {
		t.Foot("÷ METAL: requests/s divided by those of a server on the node itself. Above 1 is faster.")
		t.Foot("CONNTRACK ENTRIES: the most after a round. FAILED: no answer within %v, or an error.", patience)
		t.Foot("This is a first look: ratios of such short rounds vary by tenths, and more beside other load.")
	}
	return t.Write(w)
}

func ratio(v float64) string { return fmt.Sprintf("%.2f", v) }

// writeVerdicts ends the report: a line for each question.
func (r *Report) writeVerdicts(w io.Writer) error {
	t := page.NewTable(page.Text(""), page.Text("").Shrinks(20))
	answered := len(r.Visits)
	for _, v := range r.Visits {
		if v.Failed > 0 {
			answered--
		}
	}
	t.Row("Services", fmt.Sprintf("%d of %d addresses answered every time", answered, len(r.Visits)))
	if len(r.Speeds) > 0 {
		r.speedVerdicts(t)
	}
	fmt.Fprintln(w)
	return t.Write(w)
}

// speedVerdicts adds what the measurements say.
func (r *Report) speedVerdicts(t *page.Table) {
	// Each path has a Speed for each kind of load.
	of := func(path string) (open, each Speed) {
		for _, s := range r.Speeds {
			switch {
			case s.Path == path && s.Kind == load.HTTP:
				open = s
			case s.Path == path:
				each = s
			}
		}
		return open, each
	}
	open, each := of(toNodePort)
	t.Row("NodePort", fmt.Sprintf("%s of metal's requests/s, %s of its new connections/s", ratio(open.ToMetal), ratio(each.ToMetal)))
	podOpen, podEach := of(podToPod)
	viaOpen, viaEach := of(toClusterIP)
	t.Row("ClusterIP", fmt.Sprintf("%s of the pod's own requests/s, %s of its new connections/s", ratio(viaOpen.Rate/podOpen.Rate),
		ratio(viaEach.Rate/podEach.Rate)))
	served, other := 0, 0
	var requests, failed int64
	causes := map[string]int64{}
	for _, s := range r.Speeds {
		if s.Path == toNodePort || s.Path == toClusterIP {
			served = max(served, s.Conntrack)
		} else {
			other = max(other, s.Conntrack)
		}
		requests += s.Requests + s.Failed
		failed += s.Failed
		for cause, n := range s.Errors {
			causes[cause] += n
		}
	}
	t.Row("conntrack", fmt.Sprintf("%s entries at most with a Service, %s without", experiment.FormatNumber(float64(served)),
		experiment.FormatNumber(float64(other))))
	text := fmt.Sprintf("%d of %s requests", failed, experiment.FormatNumber(float64(requests)))
	for i, cause := range slices.Sorted(maps.Keys(causes)) {
		text += []string{": ", ", "}[min(i, 1)] + fmt.Sprintf("%d %s", causes[cause], cause)
	}
	t.Row("failed", text)
}
