package experiment

import (
	"context"
	"errors"
	"time"
)

// Experiment rebuilds a published experiment on this machine.
type Experiment struct {
	Name  string // on the command line: "snat-race"
	Title string
	// Question is what it asks; Published what was found, in prose.
	Question, Published string
	Sources             []Source
	// Packages are the programs that it needs and the Debian packages that hold them.
	Packages map[string]string
	// MachineWide says that it changes values of the whole machine.
	MachineWide bool
	Figures     []Figure
	Charts      []Chart
	// Scale says how this run differs in size from the published one.
	Scale func(Options) string
	Rows  func(Options) []Row
	// Conclude says in prose what was measured, and why it differs from what
	// was published, from the rows of a run.
	Conclude func(*Result) []string
}

// Source is where something was published.
type Source struct {
	Title string `json:"title"`
	URL   string `json:"url"`
}

// Options say how an experiment is to be run.
type Options struct {
	// Name is what the names of lab clusters begin with, at most 8 characters.
	Name string
	// Quick asks for seconds instead of minutes.
	Quick    bool
	Progress *Progress
}

// Figure is one column of an experiment's table.
type Figure struct {
	Key  string `json:"key"`
	Name string `json:"name"`
	Unit string `json:"unit,omitempty"`
	// Better is "higher", "lower", or "" where neither is.
	Better string `json:"better,omitempty"`
	// Exact says that the figure has no noise: a count that must be what it is.
	Exact bool `json:"exact,omitempty"`
}

// The kinds of Chart.
const (
	Bars    = "bars"    // a bar for each row, with the range of its samples
	Lines   = "lines"   // a line for each group, over the rows' X
	Latency = "latency" // the distribution of each row
	Over    = "over"    // a series over time for each row
)

// Chart is one picture of an experiment.
type Chart struct {
	Kind  string `json:"kind"`
	Title string `json:"title"`
	// Figure is the key that Bars and Lines show; Series the one of Over.
	Figure string `json:"figure,omitempty"`
	Series string `json:"series,omitempty"`
	XName  string `json:"x_name,omitempty"`
	LogX   bool   `json:"log_x,omitempty"`
	LogY   bool   `json:"log_y,omitempty"`
	// Group selects the rows of one group; "" selects all.
	Group string `json:"group,omitempty"`
}

// Row is one thing to measure.
type Row struct {
	Name string
	// Group and X place the row in a chart of lines; a table shows groups together.
	Group string
	X     float64
	// Published are figures that were published for this row, by key.
	Published map[string]float64
	// Needs says what is missing to run the row, and how to get it.
	Needs func() error
	// MachineWide says that it changes values of the whole machine, and takes the
	// lock on them itself.
	MachineWide bool
	// Takes is about how long it runs.
	Takes time.Duration
	// Run fills in what it measures. What it has filled in counts even after an
	// error. It must leave nothing behind, also when ctx ends.
	Run func(ctx context.Context, m *Measurement) error
}

// ErrNotBuilt is what Row.Needs wraps when a peer has not been built.
var ErrNotBuilt = errors.New("not built")

// Measurement is what a row measures.
type Measurement struct {
	Samples map[string][]float64
	Series  map[string][]Point
	// Distribution is latency in µs by percentile, 0 to 100.
	Distribution []Point
	Notes        []string
	// Log is the end of what the programs of a failed row have printed.
	Log string
}

// Add adds a sample of a figure.
func (m *Measurement) Add(key string, v float64) {
	if m.Samples == nil {
		m.Samples = map[string][]float64{}
	}
	m.Samples[key] = append(m.Samples[key], v)
}

// Point is one point of a curve.
type Point struct {
	X float64 `json:"x"`
	Y float64 `json:"y"`
}

// Note adds a remark, once.
func (m *Measurement) Note(text string) {
	for _, n := range m.Notes {
		if n == text {
			return
		}
	}
	m.Notes = append(m.Notes, text)
}
