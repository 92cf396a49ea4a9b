package soak

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"spillway.dev/spillway/internal/page"
)

// Report is the result of a run.
type Report struct {
	Seed     uint64        `json:"seed"`
	Only     []string      `json:"only,omitempty"`
	Mode     string        `json:"proxy_mode"`
	Upgrades int           `json:"upgrades"` // further programs
	Budget   int           `json:"budget"`
	Began    time.Time     `json:"began"`
	Ran      time.Duration `json:"ran"`
	Actions  int           `json:"actions"`
	// Connections are TCP connections, UDP sockets and TFTP transfers.
	Connections int64 `json:"connections"`
	Questions   int64 `json:"questions"` // answered
	Lost        int   `json:"lost"`
	// Excused counts losses by the document that allows them.
	Excused map[string]int `json:"excused"`
	Rows    []Row          `json:"by_action"`
	Losses  []*Loss        `json:"losses"` // some of each sort
	Growth  []Growth       `json:"growth"`
	CPU     float64        `json:"cpu"` // mean number of busy CPUs: agents, load, servers
	// Failed is why the run ended early, "" if it did not.
	Failed string `json:"failed,omitempty"`
}

// Row is one kind of action.
type Row struct {
	Action  string  `json:"action"`
	Times   int     `json:"times"`
	Seconds float64 `json:"seconds"` // of all
	// Sockets is the mean number of TCP connections and UDP sockets that were kept open when it began.
	Sockets int `json:"open_sockets"`
	Excused int `json:"excused"`
	Lost    int `json:"lost"`

	streams int
}

// Grown returns the figures that grew beyond their bounds.
func (r *Report) Grown() (list []string) {
	for _, g := range r.Growth {
		list = append(list, g.Over...)
	}
	return list
}

// Err returns why the run was no success, nil if it was one.
func (r *Report) Err() error {
	var errs []error
	if r.Lost > r.Budget {
		errs = append(errs, fmt.Errorf("%d honest questions or connections were lost, the budget is %d: seed %d", r.Lost, r.Budget, r.Seed))
	}
	if grown := r.Grown(); len(grown) > 0 {
		errs = append(errs, fmt.Errorf("resources grew beyond their bounds: %s", strings.Join(grown, ", ")))
	}
	return errors.Join(errs...)
}

// conclude completes the report.
func (r *run) conclude(err error) {
	total := r.totals()
	l := r.ledger
	l.mu.Lock()
	defer l.mu.Unlock()
	p := r.report
	p.Connections, p.Questions = total.Connections, total.Questions
	if p.Ran == 0 {
		p.Ran = time.Since(p.Began).Round(time.Second)
	}
	p.Lost, p.Excused, p.Losses = l.lost, l.excused, l.losses
	for _, row := range l.byKind {
		if row.Times > 0 {
			row.Sockets = row.streams / row.Times
		}
		p.Rows = append(p.Rows, *row)
	}
	slices.SortFunc(p.Rows, func(a, b Row) int { return strings.Compare(a.Action, b.Action) })
	if err != nil {
		p.Failed = err.Error()
	}
}

// shownLosses is how many losses the text names.
const shownLosses = 10

// Write prints the report as text, in 80 columns.
func (r *Report) Write(w io.Writer) error {
	p := page.Of(w)
	fmt.Fprintf(w, "%s\n\n", p.Wrap(fmt.Sprintf("%s, seed %d: %d actions, %d connections, %d questions, %.2f CPUs busy",
		elapsed(r.Ran), r.Seed, r.Actions, r.Connections, r.Questions, r.CPU), ""))
	t := page.NewTable(page.Text("ACTION"), page.Number("TIMES"), page.Number("MEAN s"), page.Number("SOCKETS"),
		page.Number("EXCUSED"), page.Number("LOST"))
	for _, row := range r.Rows {
		t.Row(row.Action, row.Times, fmt.Sprintf("%.1f", row.Seconds/float64(max(1, row.Times))), row.Sockets, row.Excused, row.Lost)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, reason := range sortedKeys(r.Excused) {
		fmt.Fprintln(w, p.Wrap(fmt.Sprintf("excused %d: %s", r.Excused[reason], reason), "  "))
	}
	fmt.Fprintln(w)
	if err := r.writeGrowth(w); err != nil {
		return err
	}
	shown := 0
	for _, x := range r.Losses {
		if x.Excuse == "" && shown < shownLosses {
			fmt.Fprintln(w, p.Wrap("lost: "+x.String(), "  "))
			shown++
		}
	}
	return r.writeVerdict(w)
}

// writeGrowth prints each node's figures as START-END.
func (r *Report) writeGrowth(w io.Writer) error {
	if len(r.Growth) == 0 {
		return nil
	}
	columns := []page.Column{page.Text("START, END")}
	for _, g := range r.Growth {
		columns = append(columns, page.Number(g.Start.Node), page.Number(""))
	}
	t := page.NewTable(columns...)
	for _, b := range bounds {
		name := b.name
		if b.unit == mib {
			name += " MiB"
		}
		row := []any{name}
		for _, g := range r.Growth {
			row = append(row, b.of(g.Start)/b.unit, b.of(g.End)/b.unit)
		}
		t.Row(row...)
	}
	if err := t.Write(w); err != nil {
		return err
	}
	_, err := fmt.Fprintln(w)
	return err
}

func (r *Report) writeVerdict(w io.Writer) error {
	t := page.NewTable()
	switch err := r.Err(); {
	case r.Failed != "":
		t.Verdict(page.Bad, "ended early", "%s", r.Failed)
	case err != nil:
		t.Verdict(page.Bad, "failed", "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	default:
		t.Verdict(page.Good, "passed", "%d lost, budget %d", r.Lost, r.Budget)
	}
	return t.Write(w)
}

func sortedKeys(m map[string]int) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// events writes what happens into the report's directory.
type events struct {
	dir string
	mu  sync.Mutex
	out *os.File // nil without a directory
}

func newEvents(dir string) (*events, error) {
	if dir == "" {
		return &events{}, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make directory for the report: %w", err)
	}
	out, err := os.Create(filepath.Join(dir, "events.log"))
	if err != nil {
		return nil, fmt.Errorf("write into the directory for the report: %w", err)
	}
	return &events{dir: dir, out: out}, nil
}

// path returns the path of a file in the directory, "" without one.
func (e *events) path(name string) string {
	if e.dir == "" {
		return ""
	}
	path, err := filepath.Abs(filepath.Join(e.dir, name))
	if err != nil {
		return ""
	}
	return path
}

func (e *events) log(format string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.out != nil {
		fmt.Fprintf(e.out, "%s %s\n", time.Now().Format("15:04:05.000"), fmt.Sprintf(format, args...))
	}
}

// write writes the report as JSON.
func (e *events) write(r *Report) error {
	if e.dir == "" {
		return nil
	}
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return os.WriteFile(e.path("report.json"), append(text, '\n'), 0o644)
}

func (e *events) close() {
	if e.out != nil {
		e.out.Close()
	}
}
