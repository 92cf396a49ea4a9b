package doctor

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"spillway.dev/spillway/internal/escape"
)

// Report is the result of a visit.
type Report struct {
	Kernel     string    `json:"kernel"`
	Namespaces int       `json:"namespaces"` // that were looked at
	InUse      int       `json:"in_use"`     // of them, with conntrack in use
	Findings   []Finding `json:"findings"`
	Problems   []Problem `json:"problems"` // what could not be looked at
	Fixed      []Fixed   `json:"fixed,omitempty"`
	Checks     []string  `json:"checks"` // names of what was looked at
}

// NewReport makes a Report of a node and what was found on it.
func NewReport(n *Node, findings []Finding) *Report {
	r := &Report{Kernel: n.Kernel.String(), Namespaces: len(n.Namespaces), InUse: n.InUse(), Findings: findings, Problems: n.Problems}
	if r.Problems == nil {
		r.Problems = []Problem{}
	}
	for _, c := range Checks {
		r.Checks = append(r.Checks, c.Name())
	}
	return r
}

// Worst is the worst severity found; "" if nothing was.
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

// columns is the width of a page. Commands go on behind a backslash; what
// stands in quotes is not broken and may be wider.
const columns = 80

// How much of one finding, and of one kind of finding, is shown; -o json has all.
const (
	shownLines    = 6
	shownFindings = 3
)

// Write prints the report for people.
func (r *Report) Write(out io.Writer) error {
	w := bufio.NewWriter(out)
	for _, s := range Severities {
		r.writeSeverity(w, s)
	}
	if len(r.Findings) == 0 {
		r.writeWell(w)
	}
	if len(r.Problems) > 0 {
		fmt.Fprintln(w, "NOT LOOKED AT")
		for _, p := range r.Problems {
			what := p.What
			if len(p.Namespaces) > 0 {
				what += " (in " + names(p.Namespaces) + ")"
			}
			wrap(w, "  ", "    ", what)
		}
		fmt.Fprintln(w)
	}
	if len(r.Fixed) > 0 {
		fmt.Fprintln(w, "FIXED")
		for _, f := range r.Fixed {
			wrap(w, "  ", "    ", f.String())
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w, r.Summary())
	return w.Flush()
}

// String says in one line what became of a fix.
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
	line := plural(len(r.Findings), "finding")
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
		line += fmt.Sprintf("; %d of %s applied", r.done(), plural(len(r.Fixed), "fix"))
	case r.Fixed != nil:
		line += "; nothing for --fix to do"
	case fixable > 0:
		line += fmt.Sprintf("; --fix mends %d", fixable)
	}
	if len(r.Problems) > 0 {
		line += "; " + plural(len(r.Problems), "thing") + " not looked at"
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

func plural(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "x"):
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// writeSeverity writes the findings of one severity, of each kind a few.
func (r *Report) writeSeverity(w *bufio.Writer, s Severity) {
	if r.count(s) == 0 {
		return
	}
	fmt.Fprintf(w, "%s\n\n", strings.ToUpper(string(s)))
	shown := map[string]int{}
	rest := map[string][]string{}
	var order []string
	for _, f := range r.Findings {
		if f.Severity != s {
			continue
		}
		if shown[f.ID]++; shown[f.ID] > shownFindings {
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
		wrap(w, "  ", "    ", fmt.Sprintf("%s: %d more, in %s; -o json has them all", id, shown[id]-shownFindings, names(rest[id])))
		fmt.Fprintln(w)
	}
}

func (f *Finding) write(w *bufio.Writer) {
	head := f.ID
	if f.Namespace != "" {
		head += " in " + f.Namespace
	}
	fmt.Fprintf(w, "  %s\n", escape.Text(head))
	wrap(w, "    ", "    ", f.Title)
	few(f.Evidence, func(line string) { wrap(w, "    - ", "      ", line) })
	wrap(w, "    Packets: ", "      ", f.Packets)
	wrap(w, "    Mend: ", "      ", f.Mend)
	few(f.Commands, func(line string) { command(w, line) })
	for line := range strings.Lines(f.Settings) {
		fmt.Fprintf(w, "      %s", line)
	}
	if f.Fixable {
		fmt.Fprintln(w, "    --fix does this.")
	}
	fmt.Fprintln(w)
}

// few shows the first lines of many.
func few(lines []string, show func(string)) {
	for i, line := range lines {
		if i == shownLines {
			show(fmt.Sprintf("# and %d more: -o json has them all", len(lines)-i))
			return
		}
		show(line)
	}
}

// wrap writes text that begins with first, and its other lines with next.
func wrap(w io.Writer, first, next, text string) {
	fold(w, first, next, strings.Fields(escape.Text(text)), "")
}

// command writes a line for a shell, broken where the shell allows it: between
// words, and never inside quotes.
func command(w io.Writer, line string) {
	if !escape.Shown(line) {
		wrap(w, "      ", "      # ", "# a command with characters that cannot be shown: -o json has it")
		return
	}
	fold(w, "      ", "        ", escape.ShellWords(line), ` \`)
}

func fold(w io.Writer, first, next string, words []string, end string) {
	line := first
	empty := true
	for _, word := range words {
		if !empty && len([]rune(line))+1+len([]rune(word))+len(end) > columns {
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

// writeWell writes the page for a node on which nothing was found: what
// was looked at.
func (r *Report) writeWell(w *bufio.Writer) {
	verdict := "All is well on this node"
	if len(r.Problems) > 0 {
		verdict = "Nothing is wrong with what could be looked at"
	}
	wrap(w, "", "", fmt.Sprintf("%s (Linux %s). Looked at %s, in %d of which conntrack is in use, and there at:",
		verdict, r.Kernel, plural(r.Namespaces, "network namespace"), r.InUse))
	fmt.Fprintln(w)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range Checks {
		fmt.Fprintf(tw, "  %s\t%s\n", c.Name(), c.About())
	}
	tw.Flush()
	fmt.Fprintln(w)
}
