package flood

import (
	"fmt"
	"io"
	"slices"
	"time"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
)

// Report holds the results of a run.
type Report struct {
	Machine experiment.Machine `json:"machine"`
	Seconds float64            `json:"seconds_per_measurement"`
	Clients int                `json:"honest_clients"`
	Rate    int                `json:"wanted_syns_per_second,omitempty"`
	Rows    []Row              `json:"rows"`
}

// Row is one mode and location of the endpoint.
type Row struct {
	Mode     string  `json:"mode"`
	Endpoint string  `json:"endpoint"`
	SYNs     float64 `json:"syns_per_second"`
	// Quiet is without a flood, Flooded with one.
	Quiet   Probes `json:"quiet"`
	Flooded Probes `json:"flooded"`
	// Conntrack is how many entries the receiving node has after the flood.
	Conntrack int `json:"conntrack_entries"`
}

// Probes are new connections of honest clients.
type Probes struct {
	Tried int `json:"tried"`
	// InTime is the percentage that was answered within a second.
	InTime float64 `json:"in_time_percent"`
	// Median and P99 cover the connections of InTime, in milliseconds.
	Median float64 `json:"median_ms"`
	P99    float64 `json:"p99_ms"`
}

func newRow(mode, place string, rate float64, quiet, flooded probes, entries int) Row {
	return Row{Mode: mode, Endpoint: place, SYNs: rate, Quiet: summarize(quiet), Flooded: summarize(flooded), Conntrack: entries}
}

func summarize(v probes) Probes {
	out := Probes{Tried: v.tried}
	if v.tried == 0 || len(v.took) == 0 {
		return out
	}
	slices.Sort(v.took)
	at := func(q float64) float64 {
		return float64(v.took[int(q*float64(len(v.took)-1))]) / float64(time.Millisecond)
	}
	out.InTime, out.Median, out.P99 = 100*float64(len(v.took))/float64(v.tried), at(0.5), at(0.99)
	return out
}

// Write prints the report as text, in 80 columns.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	fmt.Fprintf(w, "%d honest clients, %gs without a flood and %gs with one\n\n", r.Clients, r.Seconds, r.Seconds)
	t := page.NewTable(page.Text("MODE"), page.Text("ENDPOINT").Shrinks(8), page.Number("IN 1 s"), page.Number("QUIET"), page.Number("P99 ms"),
		page.Number("SYN/s"), page.Number("CONNS"), page.Number("ENTRIES"))
	for _, row := range r.Rows {
		t.Row(row.Mode, row.Endpoint, experiment.FormatNumber(row.Flooded.InTime)+"%", experiment.FormatNumber(row.Quiet.InTime)+"%",
			experiment.FormatNumber(row.Flooded.P99), experiment.FormatNumber(row.SYNs), row.Flooded.Tried,
			experiment.FormatNumber(float64(row.Conntrack)))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
CONNS: new connections that honest clients began in the flood. IN 1 s: part of
them that had its first answer within a second, 99 % of these in P99; QUIET: the
same part without a flood. ENTRIES: of the receiving node's conntrack, after it.
`))
	return err
}
