package doctor

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// Report is the result of examining a node.
type Report struct {
	Kernel     string    `json:"kernel"`
	Namespaces int       `json:"namespaces"` // examined ones
	InUse      int       `json:"inUse"`      // examined ones with conntrack in use
	Findings   []Finding `json:"findings"`
	Problems   []Problem `json:"problems"` // parts that could not be read
	Fixed      []Fixed   `json:"fixed,omitempty"`
	Checks     []string  `json:"checks"` // names of the checks that ran
	// Only are the ids of the requested findings; empty if all were requested.
	Only []string `json:"only,omitempty"`

	ran []Check
}

// NewReport returns a Report of a node and its findings, of the requested ids; of all
// without ids.
func NewReport(n *Node, findings []Finding, ids ...string) *Report {
	r := &Report{Only: ids, Kernel: n.Kernel.String(), Namespaces: len(n.Namespaces), InUse: n.inUse(),
		Findings: findings, Problems: n.Problems}
	if r.Problems == nil {
		r.Problems = []Problem{}
	}
	for _, c := range checksOf(ids) {
		if n.Traffic != nil || !slices.Contains(agentChecks, c) {
			r.ran, r.Checks = append(r.ran, c), append(r.Checks, c.Name())
		}
	}
	return r
}

// Worst returns the worst severity of the findings; "" without findings.
func (r *Report) Worst() Severity {
	for _, s := range Severities {
		if r.count(s) > 0 {
			return s
		}
	}
	return ""
}

func (r *Report) count(s Severity) int {
	n := 0
	for _, f := range r.Findings {
		if f.Severity == s {
			n++
		}
	}
	return n
}

// columns is the width of the report, unless the page is narrower. A long command
// continues after a backslash. Quoted text is not broken and may be wider.
const columns = 80

// Limits of Write for one finding, and for one kind of finding, without -o wide.
const (
	shownLines    = 6
	shownFindings = 3
)

// printer writes a report to a page.
type printer struct {
	*bufio.Writer
	page    *page.Page
	columns int
}

func newPrinter(out io.Writer) *printer {
	w := &printer{page: page.Of(out), columns: columns}
	w.Writer = bufio.NewWriter(w.page)
	if w.page.Width > 0 {
		w.columns = min(columns, w.page.Width)
	}
	return w
}

// styles are the colors of the severities.
var styles = map[Severity]page.Style{Critical: page.Bad, Warning: page.Warning, Info: page.Strong}

// Write prints the report as text.
func (r *Report) Write(out io.Writer) error {
	w := newPrinter(out)
	for _, s := range Severities {
		r.writeSeverity(w, s)
	}
	if len(r.Findings) == 0 {
		if err := r.writeHealthy(w); err != nil {
			return err
		}
	}
	if len(r.Problems) > 0 {
		fmt.Fprintln(w, "NOT EXAMINED")
		for _, p := range r.Problems {
			what := p.What
			if len(p.Namespaces) > 0 {
				what += " (in " + names(p.Namespaces) + ")"
			}
			w.wrap("  ", "    ", what)
		}
		fmt.Fprintln(w)
	}
	if len(r.Fixed) > 0 {
		fmt.Fprintln(w, "FIXED")
		for _, f := range r.Fixed {
			w.wrap("  ", "    ", f.String())
		}
		fmt.Fprintln(w)
	}
	w.wrap("", "", r.Summary())
	return w.Flush()
}

// String returns the result of a fix as one line.
func (f Fixed) String() string {
	s := "done: " + f.Does
	if !f.Done {
		s = "failed: " + f.Does + ": " + f.Error
	}
	if f.Note != "" {
		s += " (" + f.Note + ")"
	}
	return s
}

// Summary is the last line: "3 findings: 1 critical, 2 info".
func (r *Report) Summary() string {
	var parts []string
	for _, s := range Severities {
		if n := r.count(s); n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, s))
		}
	}
	line := page.Counted(len(r.Findings), "finding")
	if len(parts) > 0 {
		line += ": " + strings.Join(parts, ", ")
	}
	fixable := 0
	for _, f := range r.Findings {
		if f.Fixable {
			fixable++
		}
	}
	switch {
	case len(r.Fixed) > 0:
		line += fmt.Sprintf("; %d of %s applied", r.done(), page.Counted(len(r.Fixed), "fix"))
	case r.Fixed != nil:
		line += "; --fix has nothing to do"
	case fixable > 0:
		line += fmt.Sprintf("; --fix can fix %d", fixable)
	}
	if len(r.Problems) > 0 {
		line += "; " + page.Counted(len(r.Problems), "thing") + " not examined"
	}
	return line
}

func (r *Report) done() int {
	done := 0
	for _, f := range r.Fixed {
		if f.Done {
			done++
		}
	}
	return done
}

// writeSeverity writes the findings of one severity, the first few of each kind.
func (r *Report) writeSeverity(w *printer, s Severity) {
	if r.count(s) == 0 {
		return
	}
	fmt.Fprintf(w, "%s\n\n", w.page.Paint(styles[s], strings.ToUpper(string(s))))
	shown := map[string]int{}
	rest := map[string][]string{}
	var order []string
	for _, f := range r.Findings {
		if f.Severity != s {
			continue
		}
		if shown[f.ID]++; shown[f.ID] > shownFindings && !w.page.Wide {
			if rest[f.ID] == nil {
				order = append(order, f.ID)
			}
			if !slices.Contains(rest[f.ID], f.Namespace) {
				rest[f.ID] = append(rest[f.ID], f.Namespace)
			}
			continue
		}
		f.write(w)
	}
	for _, id := range order {
		w.wrap("  ", "    ", fmt.Sprintf("%s: %d more, in %s; -o wide shows all", id, shown[id]-shownFindings, names(rest[id])))
		fmt.Fprintln(w)
	}
}

func (f *Finding) write(w *printer) {
	head := f.ID
	if f.Namespace != "" {
		head += " in " + f.Namespace
	}
	fmt.Fprintf(w, "  %s\n", w.page.Paint(page.Strong, escape.Text(head)))
	w.wrap("    ", "    ", f.Title)
	w.few(f.Evidence, func(line string) { w.wrap("    - ", "      ", line) })
	w.wrap("    Packets: ", "      ", f.Packets)
	w.wrap("    Fix: ", "      ", f.Remedy)
	w.few(f.Commands, w.command)
	for line := range strings.Lines(f.Settings) {
		fmt.Fprintf(w, "      %s", line)
	}
	if f.Fixable {
		fmt.Fprintln(w, "    --fix does this.")
	}
	if f.Documentation != "" {
		w.wrap("    Runbook: ", "      ", f.Documentation)
	}
	fmt.Fprintln(w)
}

// few shows the first lines of a list.
func (w *printer) few(lines []string, show func(string)) {
	for i, line := range lines {
		if i == shownLines && !w.page.Wide {
			show(fmt.Sprintf("# and %d more: -o wide shows all", len(lines)-i))
			return
		}
		show(line)
	}
}

// wrap writes text that begins with first, and its other lines with next.
func (w *printer) wrap(first, next, text string) {
	w.fold(first, next, strings.Fields(escape.Text(text)), "")
}

// command writes a shell line. It breaks the line between words, never inside quotes.
func (w *printer) command(line string) {
	if !escape.Shown(line) {
		w.wrap("      ", "      # ", "# a command with characters that cannot be shown: -o json has it")
		return
	}
	w.fold("      ", "        ", escape.ShellWords(line), ` \`)
}

func (w *printer) fold(first, next string, words []string, end string) {
	line := first
	empty := true
	for _, word := range words {
		if !empty && len([]rune(line))+1+len([]rune(word))+len(end) > w.columns {
			fmt.Fprintln(w, line+end)
			line, empty = next, true
		}
		if !empty {
			line += " "
		}
		line, empty = line+word, false
	}
	fmt.Fprintln(w, line)
}

// writeHealthy writes the page of a node without findings: the list of checks.
func (r *Report) writeHealthy(w *printer) error {
	verdict := "No problem found on this node"
	if len(r.Only) > 0 {
		verdict = "No finding " + strings.Join(r.Only, " or ") + " on this node"
	}
	if len(r.Problems) > 0 {
		verdict = strings.TrimSuffix(verdict, " on this node") + " in the parts that could be read"
	}
	w.wrap("", "", fmt.Sprintf("%s (Linux %s). Examined %s, %d of them with conntrack in use. Checks:",
		verdict, r.Kernel, page.Counted(r.Namespaces, "network namespace"), r.InUse))
	fmt.Fprintln(w)
	if len(r.ran) == 0 {
		w.wrap("  ", "  ", "none")
		fmt.Fprintln(w)
		return nil
	}
	if err := w.Flush(); err != nil {
		return err
	}
	t := page.NewTable(page.Text(""), page.Text(""), page.Text("").Shrinks(20))
	for _, c := range r.ran {
		t.Row("", c.Name(), c.About())
	}
	t.Foot("")
	return t.Write(w.page)
}
