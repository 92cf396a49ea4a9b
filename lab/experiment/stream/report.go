package stream

import (
	"fmt"
	"io"
	"slices"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
)

// Report holds the results of a run.
type Report struct {
	Machine   experiment.Machine `json:"machine"`
	Services  int                `json:"services"`
	Endpoints int                `json:"endpoints_per_service"`
	Rate      int                `json:"changes_per_second"`
	Seconds   float64            `json:"seconds"`
	Rows      []Row              `json:"rows"`
}

// Row is one proxy.
type Row struct {
	Mode    string `json:"mode"`
	Changes int    `json:"changes"` // that the API server has accepted
	// Millis is the duration of each probe, from the write to the first connection with
	// the new state. API is the API server's time to answer.
	Millis []float64 `json:"ms"`
	// Told is the part of Millis until a watch like the proxy's has the change, Rest the
	// part after it. So Told and Rest of one probe add up to its Millis. Rest is below
	// zero if the proxy's watch is faster than this one.
	Told    []float64 `json:"told_ms"`
	Rest    []float64 `json:"rest_ms"`
	API     []float64 `json:"api_ms"`
	Lost    int       `json:"lost"`    // probes that did not arrive
	Skipped int       `json:"skipped"` // probes that were not written, since the previous one had not arrived
	Settled bool      `json:"settled"` // at the end the kernel has exactly the last written state
	CPU     float64   `json:"cpu_seconds"`
	RSS     float64   `json:"rss_mib"`
	Peak    float64   `json:"peak_rss_mib"`
}

// percentile p (0 to 1) of some numbers.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	fmt.Fprintf(w, "%d Services of %d endpoints, %d changes a second for %.0f s\n\n", r.Services, r.Endpoints, r.Rate, r.Seconds)
	wide := func(name string) page.Column { return page.Number(name).OnlyWide() }
	t := page.NewTable(page.Text("PROXY"), page.Number("p50 ms"), page.Number("p99 ms"), page.Number("MAX ms"), page.Number("LOST"),
		page.Text("IN THE END").Shrinks(7),
		page.Number("CPU s"), page.Number("RSS MiB"), wide("PEAK MiB"), wide("CHANGES"), wide("PROBES"), wide("SKIPPED"),
		wide("API p50 ms"), wide("API p99 ms"), wide("TOLD p50 ms"), wide("TOLD p99 ms"), wide("REST p50 ms"), wide("REST p99 ms"))
	f := func(v float64) string { return fmt.Sprintf("%.1f", v) }
	at := func(millis []float64, p float64) string { return f(percentile(millis, p)) }
	for _, row := range r.Rows {
		end := "differs"
		if row.Settled {
			end = "the same"
		}
		t.Row(row.Mode, at(row.Millis, 0.5), at(row.Millis, 0.99), at(row.Millis, 1), row.Lost, end,
			f(row.CPU), fmt.Sprintf("%.0f", row.RSS), fmt.Sprintf("%.0f", row.Peak), row.Changes, len(row.Millis), row.Skipped,
			at(row.API, 0.5), at(row.API, 0.99), at(row.Told, 0.5), at(row.Told, 0.99), at(row.Rest, 0.5), at(row.Rest, 0.99))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
PROBES: changes that a pod has waited for, connecting again and again; p50, p99, MAX from the moment before
the request to the API server to the first connection that meets the change. API: until the API server has
answered. TOLD: until a watch like the proxy's has the change; REST: from there to that connection, which is
the proxy's part. SKIPPED: probes not written because the one before had not arrived. IN THE END: the
endpoints that the kernel holds against those written last. CPU, RSS: of the proxy; kube-proxy's nft with it.
-o wide shows all columns.
`))
	return err
}
