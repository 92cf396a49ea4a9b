package path

import (
	"fmt"
	"io"
	"strings"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
)

// EndToEndReport holds the results of a run of EndToEnd. In each comparison Base has no
// agent in the kernel and Service has, except for the rows with a VXLAN.
type EndToEndReport struct {
	Report
	// Order is the order of the measurements: A without agents, B with agents.
	Order string `json:"order"`
}

// widestRange is the width of a 95 % range above which a median says too little to judge a
// target by.
const widestRange = 0.2

// newEndToEndReport computes the rows from the complete rounds.
func newEndToEndReport(cfg EndToEndConfig, m experiment.Machine, rows []endRow, phases []phase) *EndToEndReport {
	r := &EndToEndReport{Report: Report{Machine: m, Mode: cfg.Mode, Rounds: cfg.Rounds, Seconds: cfg.Duration.Seconds(),
		Connections: cfg.Connections, Conntrack: true}}
	for _, p := range phases {
		r.Order += string("AB"[p.state])
	}
	for _, row := range rows {
		trial := trialOf(row, phases)
		if len(trial.A) == 0 {
			continue
		}
		var target *experiment.Target
		if row.least > 0 && cfg.Mode == "ebpf" {
			target = &experiment.Target{Limit: row.least}
		}
		c := compared(rateOf, target, trial, controlOf(row.base, phases))
		if c.Ratio.High-c.Ratio.Low > widestRange {
			c.Met = nil
		}
		c.Name, c.Load, c.Figure = row.name, row.loadName(), "requests/s"
		r.Comparisons = append(r.Comparisons, c)
	}
	return r
}

// trialOf returns the samples of both sides of a row, round by round. The first phase is of
// no round.
func trialOf(row endRow, phases []phase) (t experiment.Trial[harness.Sample]) {
	var of [2][]phase
	for i, p := range phases {
		if i > 0 {
			of[p.state] = append(of[p.state], p)
		}
	}
	for i := range min(len(of[without]), len(of[with])) {
		t.A = append(t.A, of[row.base.state][i].samples[row.base])
		t.B = append(t.B, of[row.service.state][i].samples[row.service])
	}
	return t
}

// controlOf compares a probe with itself in neighboring phases of its state.
func controlOf(p probe, phases []phase) (t experiment.Trial[harness.Sample]) {
	for i := 1; i < len(phases); i++ {
		if phases[i].state == p.state && phases[i-1].state == p.state {
			t.A = append(t.A, phases[i-1].samples[p])
			t.B = append(t.B, phases[i].samples[p])
		}
	}
	return t
}

// Write prints the report as text of at most 80 columns; -o wide adds columns.
func (r *EndToEndReport) Write(w io.Writer) error {
	p := page.Of(w)
	fmt.Fprintln(p, p.Wrap(r.Machine.String(), ""))
	fmt.Fprintf(p, "--proxy-mode %s, %d rounds, %gs a measurement, %d connections\n\n", r.Mode, r.Rounds, r.Seconds, r.Connections)
	t := page.NewTable(page.Text("ROW"), page.Text("LOAD"), page.Number("RATIO"), page.Text("95 %"), page.Text("A/A 95 %"),
		page.Text("TARGET"), page.Text(""),
		page.Number("BASE /s").OnlyWide(), page.Number("WITH /s").OnlyWide(), page.Text("CPU/REQUEST").OnlyWide(),
		page.Text("LOWEST–HIGHEST").OnlyWide())
	met, missed, unsure := 0, 0, 0
	for _, c := range r.Comparisons {
		target, verdict := "-", ""
		switch {
		case c.Target == nil:
		case c.Met == nil:
			target, verdict = c.Target.String(), "unsure"
			unsure++
		case *c.Met:
			target, verdict = c.Target.String(), "met"
			met++
		default:
			target, verdict = c.Target.String(), "missed"
			missed++
		}
		t.Row(c.Name, c.Load, fmt.Sprintf("%.3f", c.Ratio.Median), spread(c.Ratio), spread(c.Control), target, verdict,
			fmt.Sprintf("%.0f", c.Base), fmt.Sprintf("%.0f", c.Service), c.CPU, fmt.Sprintf("%.2f–%.2f", c.Ratio.Min, c.Ratio.Max))
	}
	if err := t.Write(p); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	fmt.Fprintln(p, p.Wrap(fmt.Sprintf("%d met, %d missed, %d unsure%s", met, missed, unsure, r.failures()), ""))
	_, err := fmt.Fprint(p, p.Reflow(`
RATIO: median of the rounds, requests/s with agents ÷ without. 95 %: where the true median lies with
that confidence; of fewer than six rounds the extremes. unsure: fewer rounds than six, or a range
wider than 0.2. A/A: the base against itself in neighboring
measurements, without a change of the nodes in between: noise.
Rows with →: traffic that is no Service's. metal, pod: without agents, the server on the node itself,
or the pod's own address. here, away: the pod is on the receiving node, on the other one. Rows with
VXLAN: ÷ host-gw, both with agents, or both without (pod → pod). by a node: without agents, the pod's
address by way of the other node, which forwards and masquerades.
keep-alive: connections stay open. new: one connection a request. stream: bodies of 1 MiB on four
connections. -o wide adds rates, CPU time and extremes.
`))
	return err
}

// spread is "0.97–1.02", or "-" without numbers.
func spread(s experiment.Summary) string {
	if s.N == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f–%.2f", s.Low, s.High)
}

// failures names the failed requests of all rows, "" for none.
func (r *EndToEndReport) failures() string {
	var out []string
	for _, c := range r.Comparisons {
		if len(c.Errors) > 0 {
			out = append(out, fmt.Sprintf("%s, %s: %s", c.Name, c.Load, errorList(c.Errors)))
		}
	}
	if len(out) == 0 {
		return ", no failed requests"
	}
	return "; failed requests: " + strings.Join(out, "; ")
}
