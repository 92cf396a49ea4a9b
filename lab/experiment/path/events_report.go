package path

import (
	"fmt"
	"io"
	"slices"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
)

// EventsReport holds the results of a run of Events.
type EventsReport struct {
	Machine     experiment.Machine `json:"machine"`
	Rounds      int                `json:"rounds"`
	Seconds     float64            `json:"seconds_per_measurement"`
	Connections int                `json:"connections"`
	// Sides are the compared flags, the base first.
	Sides []EventsSide   `json:"sides"`
	Rows  []EventsResult `json:"rows"`
}

// EventsSide names the flags of the agent of a side.
type EventsSide struct {
	Name  string `json:"name"`
	Flags string `json:"flags"`
}

// EventsResult compares one side with the default flags under one load.
type EventsResult struct {
	Path       string  `json:"path"`
	Load       string  `json:"load"`
	WantedRate float64 `json:"wanted_rate,omitempty"`
	With       string  `json:"with"`
	// Rates are the medians of requests/s, or connections/s; the ratio is With ÷ Base,
	// round by round.
	BaseRate  float64            `json:"base_rate"`
	Rate      float64            `json:"rate"`
	RateRatio experiment.Summary `json:"rate_ratio"`
	// CPU times are medians for each request, in µs, of clients, nodes, servers, agent and
	// reader together. AgentCPU and ReaderCPU are means.
	BaseCPU   float64            `json:"base_cpu_per_request_us"`
	CPU       float64            `json:"cpu_per_request_us"`
	CPURatio  experiment.Summary `json:"cpu_per_request_ratio"`
	AgentCPU  float64            `json:"agent_cpu_per_request_us"`
	ReaderCPU float64            `json:"reader_cpu_per_request_us"`
	// Events are the sums of all rounds.
	Events EventCounts `json:"events"`
	// Errors counts failed requests of both sides by kind.
	Errors map[string]int64 `json:"errors,omitempty"`
	// ClientLimited counts measurements of either side in which the generator was always
	// busy.
	ClientLimited int `json:"client_limited"`
}

// newEventsReport computes the rows from the complete rounds.
func newEventsReport(cfg EventsConfig, m experiment.Machine, rows []eventsRow, samples [][][]EventsSample) *EventsReport {
	r := &EventsReport{Machine: m, Rounds: cfg.Rounds, Seconds: cfg.Duration.Seconds(), Connections: cfg.Connections}
	for _, s := range eventsSides {
		r.Sides = append(r.Sides, EventsSide{s.name, s.flagsText()})
	}
	for i, row := range rows {
		if len(samples[i]) == 0 {
			continue
		}
		for side, s := range eventsSides {
			if side > 0 {
				r.Rows = append(r.Rows, eventsResult(row, s.name, samples[i], side))
			}
		}
	}
	return r
}

func eventsResult(row eventsRow, with string, rounds [][]EventsSample, side int) EventsResult {
	var t experiment.Trial[EventsSample]
	for _, samples := range rounds {
		t.A, t.B = append(t.A, samples[0]), append(t.B, samples[side])
	}
	rate := func(s EventsSample) float64 { return s.Rate }
	cpu := func(s EventsSample) float64 { return s.CPUPerRequest }
	middle := func(side []EventsSample, figure func(EventsSample) float64) float64 {
		return experiment.Median(experiment.Figures(side, figure))
	}
	r := EventsResult{
		Path: row.path, Load: row.loadName(), WantedRate: row.rate, With: with,
		BaseRate: middle(t.A, rate), Rate: middle(t.B, rate), RateRatio: t.Ratio(rate),
		BaseCPU: middle(t.A, cpu), CPU: middle(t.B, cpu), CPURatio: t.Ratio(cpu),
	}
	var requests float64
	for _, s := range t.B {
		requests += float64(s.Requests)
		r.AgentCPU += s.AgentCPU * float64(s.Requests)
		r.ReaderCPU += s.ReaderCPU * float64(s.Requests)
		r.Events = r.Events.plus(s.Counts)
	}
	if requests > 0 {
		r.AgentCPU, r.ReaderCPU = r.AgentCPU/requests, r.ReaderCPU/requests
	}
	for _, s := range slices.Concat(t.A, t.B) {
		if s.ClientLimited {
			r.ClientLimited++
		}
		for kind, n := range s.Errors {
			if r.Errors == nil {
				r.Errors = map[string]int64{}
			}
			r.Errors[kind] += n
		}
	}
	return r
}

// Lost is the number of events that did not reach the agent or the reader.
func (r *EventsReport) Lost() (n int64) {
	for _, row := range r.Rows {
		n += row.Events.Lost + row.Events.Missed
	}
	return n
}

// Write prints the report as text of at most 80 columns; -o wide adds columns.
func (r *EventsReport) Write(w io.Writer) error {
	p := page.Of(w)
	fmt.Fprintln(p, p.Wrap(r.Machine.String(), ""))
	fmt.Fprintf(p, "%d rounds, %gs a measurement, %d connections\n\n", r.Rounds, r.Seconds, r.Connections)
	t := page.NewTable(page.Text("PATH"), page.Text("LOAD"), page.Text("WITH"), page.Number("RATE"), page.Text("95 %"),
		page.Number("CPU"), page.Text("95 %"), page.Number("LOST"),
		page.Number("BASE /s").OnlyWide(), page.Number("WITH /s").OnlyWide(), page.Number("BASE CPU µs").OnlyWide(),
		page.Number("CPU µs").OnlyWide(),
		page.Number("AGENT µs").OnlyWide(), page.Number("READER µs").OnlyWide(), page.Number("EVENTS").OnlyWide(), page.Number("READ").OnlyWide(),
		page.Number("LEFT OUT").OnlyWide(), page.Text("FAILED").OnlyWide())
	failed := map[string]int64{}
	for _, row := range r.Rows {
		t.Row(row.Path, row.Load, row.With, fmt.Sprintf("%.2f", row.RateRatio.Median), spread(row.RateRatio),
			fmt.Sprintf("%.2f", row.CPURatio.Median), spread(row.CPURatio), row.Events.Lost+row.Events.Missed,
			fmt.Sprintf("%.0f", row.BaseRate), fmt.Sprintf("%.0f", row.Rate), fmt.Sprintf("%.1f", row.BaseCPU), fmt.Sprintf("%.1f", row.CPU),
			fmt.Sprintf("%.1f", row.AgentCPU), fmt.Sprintf("%.1f", row.ReaderCPU), row.Events.Received, row.Events.Read,
			row.Events.LeftOut, errorList(row.Errors))
		for kind, n := range row.Errors {
			failed[kind] += n
		}
	}
	if err := t.Write(p); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	lost := "No event was lost"
	if n := r.Lost(); n > 0 {
		lost = fmt.Sprintf("%d events were lost", n)
	}
	fmt.Fprintln(p, p.Wrap(fmt.Sprintf("\n%s. Failed requests: %s.", lost, errorList(failed)), ""))
	for _, s := range r.Sides {
		fmt.Fprintln(p, p.Wrap(fmt.Sprintf("  %s: %s", s.Name, s.Flags), "  "))
	}
	_, err := fmt.Fprint(p, p.Reflow(`
RATE, CPU: median of the rounds, ÷ the same load with the default flags; requests/s, and CPU time for each
request of clients, nodes, servers, agent and reader. 95 %: where the true median lies with that
confidence; of fewer than six rounds the extremes. A/A control: the default flags on another cluster.
keep-alive: connections stay open. new: one connection a request, as fast as possible, or at a rate.
LOST: events that did not reach the agent or the reader. here, away: the pod is on the receiving
node, on the other one. ClusterIP: from a pod; the socket hooks translate it.
-o wide adds the figures of both sides.
`))
	return err
}
