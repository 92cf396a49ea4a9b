package change

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
	Changes   int                `json:"changes"`
	Endpoints int                `json:"endpoints_per_service"`
	Rows      []Row              `json:"rows"`
}

// Row is one dataplane with one number of Services.
type Row struct {
	Mode     string `json:"mode"`
	Services int    `json:"services"`
	Cold     Cold   `json:"cold"`
	Batch    Batch  `json:"changes"`
	// Connect is the median time of a connection with one request, in µs. FirstPacket is
	// that time divided by the time on a node of ten Services.
	Connect     float64            `json:"connect_us"`
	FirstPacket experiment.Summary `json:"first_packet_ratio"`
}

// percentile p (0 to 1) of some numbers.
func percentile(values []float64, p float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}

// Percentile returns percentile p (0 to 1) of the changes, in ms.
func (b Batch) Percentile(p float64) float64 { return percentile(b.Millis, p) }

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	fmt.Fprintf(w, "%d endpoints a Service, %d single changes\n\n", r.Endpoints, r.Changes)
	t := page.NewTable(page.Text("DATAPLANE").Shrinks(10), page.Number("SERVICES"), page.Number("COLD s"),
		page.Number("CHANGE p50 ms").Shrinks(6), page.Number("p99 ms"),
		page.Number("CPU ms"), page.Number("CONNECT µs").Shrinks(7), page.Number("FIRST PACKET ÷ 10").Shrinks(11),
		page.Number("FULL s").OnlyWide(), page.Number("RSS MiB").OnlyWide(), page.Number("KERNEL MiB").OnlyWide())
	f := func(format string, v any) string { return fmt.Sprintf(format, v) }
	for _, row := range r.Rows {
		t.Row(row.Mode, row.Services, f("%.2f", row.Cold.Seconds), f("%.3f", percentile(row.Batch.Millis, 0.5)),
			f("%.3f", percentile(row.Batch.Millis, 0.99)),
			f("%.3f", row.Batch.CPU), f("%.0f", row.Connect), row.FirstPacket, f("%.2f", row.Batch.Full), f("%.0f", row.Batch.RSS),
			f("%.0f", row.Cold.KernelMiB))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
COLD: first sync of everything, from facts to the kernel's last word. CHANGE: one endpoint, the same way.
CPU: of the process and its children, for one change. CONNECT:
one request on a connection of its own, through a NodePort. FIRST PACKET: the same, divided by that on a
node of ten Services, in turns. -o wide adds FULL, a full sync of
what is there already, RSS, of the process, and KERNEL, slab, vmalloc and per-CPU memory of the machine.
`))
	return err
}
