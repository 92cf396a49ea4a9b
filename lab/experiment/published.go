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
	// Question is the experiment's question; Published describes the published result.
	Question, Published string
	Sources             []Source
	// Packages maps the needed programs to their Debian packages.
	Packages map[string]string
	// MachineWide reports that it changes values of the whole machine.
	MachineWide bool
	Figures     []Figure
	Charts      []Chart
	// Scale describes how this run differs in size from the published one.
	Scale func(Options) string
	Rows  func(Options) []Row
	// Conclude describes the results of a run, and why they differ from the published
	// ones, from the rows.
	Conclude func(*Result) []string
	// Card returns the short answer, or nil as long as Spillway's figure is missing.
	Card func(*Result) *Card
}

// Source is a publication.
type Source struct {
	Title string `json:"title"`
	URL   string `json:"url"`
}

// Options configure the run of an experiment.
type Options struct {
	// Name is the prefix of the names of lab clusters, at most 8 characters.
	Name string
	// Quick selects seconds instead of minutes.
	Quick    bool
	Progress *Progress
}

// Figure is one column of an experiment's table.
type Figure struct {
	Key  string `json:"key"`
	Name string `json:"name"`
	Unit string `json:"unit,omitempty"`
	// Better is "higher", "lower", or "" if neither is.
	Better string `json:"better,omitempty"`
	// Exact reports that the figure has no noise, such as an exact count.
	Exact bool `json:"exact,omitempty"`
}

// The kinds of Chart.
const (
	Bars    = "bars"    // a bar for each row, with the range of its samples
	Lines   = "lines"   // a line for each group, over the rows' X
	Latency = "latency" // the distribution of each row
	Over    = "over"    // a series over time for each row
)

// Chart is one chart of an experiment.
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

// Row is one measurement.
type Row struct {
	Name string
	// Table is the title of the row's table in reports. Rows with one title follow each other. ""
	// is the only table of an experiment.
	Table string
	// Group and X place the row in a chart of lines; a table shows groups together.
	Group string
	X     float64
	Side  Side
	// Published are figures that were published for this row, by key.
	Published map[string]float64
	// Needs returns what the row lacks to run, and how to get it.
	Needs func() error
	// MachineWide reports that it changes values of the whole machine, and takes the lock
	// on them itself.
	MachineWide bool
	// Takes is the approximate duration.
	Takes time.Duration
	// Run sets the results. They count even after an error. Run must leave nothing
	// behind, also when ctx ends.
	Run func(ctx context.Context, m *Measurement) error
}

// ErrNotBuilt is the error in Row.Needs for a peer that has not been built.
var ErrNotBuilt = errors.New("not built")

// Measurement holds the results of a row.
type Measurement struct {
	Samples map[string][]float64
	Series  map[string][]Point
	// Distribution is latency in µs by percentile, 0 to 100.
	Distribution []Point
	Notes        []string
	// Log is the end of the output of a failed row's programs.
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
