package experiment

import (
	"encoding/json"
	"fmt"
	"os"
	"time"
)

// Format is the version of the JSON that a Run is written as.
const Format = 1

// Run holds the results of one run. `lab diff` reads its JSON, and reports are drawn from
// it.
type Run struct {
	Format   int               `json:"format"`
	Machine  Machine           `json:"machine"`
	Versions map[string]string `json:"versions"` // spillway, commit, kube-proxy, iptables ...
	Command  []string          `json:"command"`
	Quick    bool              `json:"quick"`
	Started  time.Time         `json:"started"`
	Seconds  float64           `json:"seconds"`
	Results  []Result          `json:"results"`
}

// Result holds the results of one experiment, with everything that a report shows.
type Result struct {
	Name       string      `json:"name"`
	Title      string      `json:"title"`
	Question   string      `json:"question"`
	Published  string      `json:"published"`
	Sources    []Source    `json:"sources"`
	Scale      string      `json:"scale,omitempty"`
	Figures    []Figure    `json:"figures"`
	Charts     []Chart     `json:"charts"`
	Rows       []RowResult `json:"rows"`
	Conclusion []string    `json:"conclusion,omitempty"`
	Card       *Card       `json:"card,omitempty"`
	// Error is the reason why the experiment could not run at all.
	Error string `json:"error,omitempty"`
}

// The values of RowResult.Status.
const (
	OK          = "ok"
	Failed      = "failed"
	NotBuilt    = "not built"
	Interrupted = "interrupted" // while it ran, or before
)

// RowResult holds the results of a row.
type RowResult struct {
	Name         string               `json:"name"`
	Table        string               `json:"table,omitempty"`
	Group        string               `json:"group,omitempty"`
	X            float64              `json:"x,omitempty"`
	Side         Side                 `json:"side,omitempty"`
	Status       string               `json:"status"`
	Error        string               `json:"error,omitempty"`
	Log          string               `json:"log,omitempty"`
	Published    map[string]float64   `json:"published,omitempty"`
	Values       map[string]Summary   `json:"values,omitempty"`
	Samples      map[string][]float64 `json:"samples,omitempty"`
	Series       map[string][]Point   `json:"series,omitempty"`
	Distribution []Point              `json:"latency_us_by_percentile,omitempty"`
	Notes        []string             `json:"notes,omitempty"`
	Seconds      float64              `json:"seconds"`
}

// Value returns the summary of a figure, and whether the row has one.
func (r *RowResult) Value(key string) (Summary, bool) {
	s, ok := r.Values[key]
	return s, ok && s.N > 0
}

// Row returns the row of a name, or nil.
func (r *Result) Row(name string) *RowResult {
	for i := range r.Rows {
		if r.Rows[i].Name == name {
			return &r.Rows[i]
		}
	}
	return nil
}

// Begun reports whether anything was measured, or came to an end that is not an
// interruption.
func (r *Run) Begun() bool {
	for _, res := range r.Results {
		for _, row := range res.Rows {
			if row.Status != Interrupted || len(row.Samples) > 0 {
				return true
			}
		}
	}
	return false
}

// Unfinished counts rows and experiments that failed or were interrupted.
func (r *Run) Unfinished() (n int) {
	for _, res := range r.Results {
		if res.Error != "" && len(res.Rows) == 0 {
			n++ // otherwise its rows failed for that
		}
		for _, row := range res.Rows {
			if row.Status == Failed || row.Status == Interrupted {
				n++
			}
		}
	}
	return n
}

// ReadRun reads a file that a run has written.
func ReadRun(path string) (*Run, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read results: %w", err)
	}
	var r Run
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, fmt.Errorf("read results: %s: %w", path, err)
	}
	if r.Format != Format {
		return nil, fmt.Errorf("read results: %s: format is %d, this program knows %d: is it a file that \"lab run\" wrote?", path, r.Format,
			Format)
	}
	return &r, nil
}
