package path

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
)

// Report holds the results of a run.
type Report struct {
	Machine     experiment.Machine `json:"machine"`
	Mode        string             `json:"mode"`
	Rounds      int                `json:"rounds"`
	Seconds     float64            `json:"seconds_per_measurement"`
	Connections int                `json:"connections"`
	Conntrack   bool               `json:"conntrack_on_nodes"`
	warmup      time.Duration
	Comparisons []Comparison `json:"comparisons"`
}

// Comparison is one pair: a path through a Service and one without.
type Comparison struct {
	Name   string  `json:"name"`
	Load   string  `json:"load"`   // "keep-alive", "new connections", ...
	Figure string  `json:"figure"` // what is compared: "requests/s" or "p99.9 µs"
	Rate   float64 `json:"wanted_rate,omitempty"`
	// Base and Service are the medians of the two sides' figures.
	Base    float64 `json:"base"`
	Service float64 `json:"service"`
	// Ratio is Service ÷ Base round by round; Control compares Base with itself.
	Ratio   experiment.Summary `json:"ratio"`
	Control experiment.Summary `json:"control,omitzero"`
	// CPU is the ratio of the machine's busy time per request.
	CPU    experiment.Summary `json:"cpu_per_request_ratio"`
	Target *experiment.Target `json:"target,omitempty"`
	// Met is nil without a target, and with too few rounds to judge by.
	Met *bool `json:"met,omitempty"`
	// Conntrack is the largest number of entries that one load through the Service left
	// on the nodes. BaseConntrack is the same without the Service.
	Conntrack     int `json:"conntrack_entries"`
	BaseConntrack int `json:"base_conntrack_entries"`
	// Errors counts failed requests of both sides by kind.
	Errors map[string]int64 `json:"errors,omitempty"`
	// ClientLimited counts measurements in which the generator was always busy.
	ClientLimited int `json:"client_limited"`
	// Files holds figures of TFTP transfers only.
	Files *Files `json:"files,omitempty"`
}

// Files holds, for a comparison of files, the entries that the path through the Service
// left on the nodes, and the capacity of one core.
type Files struct {
	// Failed counts files through the Service that did not arrive.
	Failed int64 `json:"failed"`
	// Expectations is the largest number that one load left. Dropped counts the packets
	// that conntrack dropped and the entries that it evicted.
	Expectations int   `json:"expectations"`
	Dropped      int64 `json:"conntrack_dropped"`
	// ClientCore and ServerCore are the files/s that one core of the client or of the
	// server can handle. They are files for each second of its CPU time. That time
	// includes much of the kernel's work for the packets.
	ClientCore float64 `json:"client_core"`
	ServerCore float64 `json:"server_core"`
	// ClientBusy and ServerBusy are their shares of one core.
	ClientBusy float64 `json:"client_busy"`
	ServerBusy float64 `json:"server_busy"`
}

func clientCPU(s harness.Sample) float64 { return s.ClientCPUSeconds }
func serverCPU(s harness.Sample) float64 { return s.ServerCPUSeconds }

// busy returns the CPU time of cpu as a share of one core. It counts the warm-up, too.
func busy(cpu func(harness.Sample) float64, warmup time.Duration) func(harness.Sample) float64 {
	return func(s harness.Sample) float64 { return cpu(s) / (s.Seconds + warmup.Seconds()) }
}

// perCore returns the rate for each second of the CPU time of cpu.
func perCore(cpu func(harness.Sample) float64, warmup time.Duration) func(harness.Sample) float64 {
	return func(s harness.Sample) float64 {
		if cpu(s) == 0 {
			return 0
		}
		return s.Rate / busy(cpu, warmup)(s)
	}
}

// addFiles computes the figures of TFTP transfers. The figures of cores come from the
// base: the server is idle behind a Service that loses files.
func (c *Comparison) addFiles(trial experiment.Trial[harness.Sample], warmup time.Duration) {
	c.Figure, c.Files = "files/s", &Files{}
	f := c.Files
	f.ClientCore, f.ClientBusy = median(trial.A, perCore(clientCPU, warmup)), median(trial.A, busy(clientCPU, warmup))
	f.ServerCore, f.ServerBusy = median(trial.A, perCore(serverCPU, warmup)), median(trial.A, busy(serverCPU, warmup))
	for _, s := range trial.B {
		f.Failed += s.Failed()
		f.Expectations = max(f.Expectations, s.Expectations)
		f.Dropped += s.Dropped
	}
}

func newReport(cfg Config, m experiment.Machine) *Report {
	r := &Report{Machine: m, Mode: cfg.Mode, Rounds: cfg.Rounds, Seconds: cfg.Duration.Seconds(),
		Connections: cfg.Connections, Conntrack: !cfg.Untracked, warmup: cfg.Warmup}
	if cfg.Files != nil {
		r.Mode = strings.Join(cfg.Files, ", ")
	}
	return r
}

func rateOf(s harness.Sample) float64 { return s.Rate }
func tailOf(s harness.Sample) float64 { return s.Latency.P999 }
func cpuOf(s harness.Sample) float64  { return s.CPUPerRequest }

func median(side []harness.Sample, figure func(harness.Sample) float64) float64 {
	return experiment.Median(experiment.Figures(side, figure))
}

func loadName(p plan) string {
	name := map[load.Kind]string{load.HTTP: "keep-alive", load.Conn: "new connections", load.TFTP: "files of 5 KB"}[p.kind]
	if p.tail {
		name += ", half load"
	}
	if p.full {
		name += ", full table"
	}
	return name
}

// add computes one trial and appends it.
func (r *Report) add(p plan, rate float64, trial, control experiment.Trial[harness.Sample]) {
	figure, name := rateOf, "requests/s"
	if p.tail {
		figure, name = tailOf, "p99.9 µs"
	}
	c := compared(figure, p.target, trial, control)
	c.Name, c.Load, c.Figure, c.Rate = p.name, loadName(p), name, rate
	if p.kind == load.TFTP {
		c.addFiles(trial, r.warmup)
	}
	r.Comparisons = append(r.Comparisons, c)
}

// compared computes the figures of one trial. The caller names it.
func compared(figure func(harness.Sample) float64, target *experiment.Target, trial, control experiment.Trial[harness.Sample]) Comparison {
	c := Comparison{
		Target: target, Base: median(trial.A, figure), Service: median(trial.B, figure),
		Ratio: trial.Ratio(figure), Control: control.Ratio(figure), CPU: trial.Ratio(cpuOf),
	}
	if target != nil && c.Ratio.Sure() {
		met := target.Met(c.Ratio)
		c.Met = &met
	}
	for i, side := range [][]harness.Sample{trial.A, trial.B} {
		for _, s := range side {
			entries := []*int{&c.BaseConntrack, &c.Conntrack}[i]
			*entries = max(*entries, s.Conntrack)
			if s.ClientLimited {
				c.ClientLimited++
			}
			for kind, n := range s.Errors {
				if c.Errors == nil {
					c.Errors = map[string]int64{}
				}
				c.Errors[kind] += n
			}
		}
	}
	return c
}

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	tracked := "with"
	if !r.Conntrack {
		tracked = "without"
	}
	fmt.Fprintf(w, "--proxy-mode %s, %d rounds of %gs a side, %d connections, nodes %s conntrack\n\n",
		r.Mode, r.Rounds, r.Seconds, r.Connections, tracked)
	if err := r.writeRatios(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if err := r.writeCosts(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	if err := r.writeFiles(w); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
Ratios: median of the rounds (lowest–highest); 95 %: where the true median lies with that confidence.
A/A: the side without a Service compared with itself.
CPU/REQUEST: ratio of the whole machine's busy time, client included. CONNTRACK: most entries that one
load left on the nodes, through the Service and without it. Half load: an open loop at half of the rate
that both sides reach; latency counts from the intended send. -o wide adds the figures of both sides.
`))
	return err
}

func (r *Report) writeRatios(w io.Writer) error {
	t := page.NewTable(page.Text("COMPARISON").Shrinks(14), page.Text("LOAD").Shrinks(12), page.Text("RATIO").Shrinks(11), page.Text("95 %"),
		page.Text("TARGET").Shrinks(7),
		page.Text("FIGURE"), page.Number("WITHOUT").OnlyWide(), page.Number("SERVICE").OnlyWide())
	for _, c := range r.Comparisons {
		sure := "-"
		if c.Ratio.Sure() {
			sure = fmt.Sprintf("%.2f–%.2f", c.Ratio.Low, c.Ratio.High)
		}
		t.Row(c.Name, c.Load, c.Ratio, sure, c.verdict(), c.Figure, fmt.Sprintf("%.0f", c.Base), fmt.Sprintf("%.0f", c.Service))
	}
	return t.Write(w)
}

// verdict is "-" without a target, or "≥ 0.97: met".
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

func (r *Report) writeCosts(w io.Writer) error {
	fmt.Fprintln(w)
	t := page.NewTable(page.Text("COMPARISON").Shrinks(14), page.Text("LOAD").Shrinks(12), page.Text("A/A CONTROL").Shrinks(11),
		page.Text("CPU/REQUEST").Shrinks(11),
		page.Text("CONNTRACK"), page.Text("ERRORS").Shrinks(8))
	for _, c := range r.Comparisons {
		t.Row(c.Name, c.Load, c.Control, c.CPU, fmt.Sprintf("%d, %d", c.Conntrack, c.BaseConntrack), errorList(c.Errors))
	}
	return t.Write(w)
}

// writeFiles prints the figures of TFTP transfers.
func (r *Report) writeFiles(w io.Writer) error {
	if !slices.ContainsFunc(r.Comparisons, func(c Comparison) bool { return c.Files != nil }) {
		return nil
	}
	fmt.Fprintln(w)
	t := page.NewTable(page.Text("COMPARISON").Shrinks(14), page.Text("LOAD").Shrinks(8), page.Number("FAILED"),
		page.Number("EXPECTATIONS").Shrinks(6), page.Number("DROPPED"),
		page.Text("CLIENT: BUSY, A CORE").Shrinks(7), page.Text("SERVER: BUSY, A CORE").Shrinks(7), page.Number("SERVER ÷ CLIENT").Shrinks(8))
	for _, c := range r.Comparisons {
		f := c.Files
		if f == nil {
			continue
		}
		side := func(busy, core float64) string { return fmt.Sprintf("%.0f %%, %.0f files/s", 100*busy, core) }
		t.Row(c.Name, c.Load, f.Failed, f.Expectations, f.Dropped, side(f.ClientBusy, f.ClientCore), side(f.ServerBusy, f.ServerCore),
			fmt.Sprintf("%.2f", f.ServerCore/max(f.ClientCore, 1)))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
FAILED: files through the Service that did not arrive. EXPECTATIONS: the most that one load left on the nodes. DROPPED:
packets that the receiving node's conntrack dropped, and entries that it evicted, while files went through the
Service. BUSY, A CORE: the share of one core, and the files for each second of CPU time, of the client and of the server
without a Service; CPU time includes the kernel's work for sent packets. Full table: the node's conntrack table
is filled with unrelated flows for the side with the Service, and empty for the other.
`))
	return err
}

// errorList is "none" or "2 reset, 1 timeout".
func errorList(errors map[string]int64) string {
	var parts []string
	for _, kind := range slices.Sorted(maps.Keys(errors)) {
		parts = append(parts, fmt.Sprintf("%d %s", errors[kind], kind))
	}
	if len(parts) == 0 {
		return "none"
	}
	return strings.Join(parts, ", ")
}
