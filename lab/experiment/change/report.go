package change

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"

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
	fmt.Fprintln(w, r.Machine)
	fmt.Fprintf(w, "%d endpoints a Service, %d single changes\n\n", r.Endpoints, r.Changes)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "DATAPLANE\tSERVICES\tCOLD s\tCHANGE p50 ms\tp99 ms\tCPU ms\tFULL s\tCONNECT µs\tFIRST PACKET ÷ 10\tRSS MiB\tKERNEL MiB\t")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%d\t%.2f\t%.3f\t%.3f\t%.3f\t%.2f\t%.0f\t%s\t%.0f\t%.0f\t\n",
			row.Mode, row.Services, row.Cold.Seconds, percentile(row.Batch.Millis, 0.5), percentile(row.Batch.Millis, 0.99),
			row.Batch.CPU, row.Batch.Full, row.Connect, row.FirstPacket, row.Batch.RSS, row.Cold.KernelMiB)
	}
	if err := t.Flush(); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	_, err := fmt.Fprint(w, `
COLD: first sync of everything, from facts to the kernel's last word. CHANGE: one endpoint, the same way.
CPU: of the process and its children, for one change. FULL: a full sync of what is there already. CONNECT:
one request on a connection of its own, through a NodePort. FIRST PACKET: the same, divided by that on a
node of ten Services, in turns. RSS: of the process. KERNEL: slab, vmalloc and per-CPU memory of the machine.
`)
	return err
}
