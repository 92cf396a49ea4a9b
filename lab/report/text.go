package report

import (
	"fmt"
	"io"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"spillway.dev/spillway/lab/experiment"
)

// A terminal has 80 columns. Names of rows and figures wrap; figures that do not fit are
// in the report.
const (
	terminalWidth = 80
	nameWidth     = 42
	figureWidth   = 14 // of a heading; values are not wrapped
	gap           = 2
)

// Verdicts writes one line for each experiment, in 80 columns.
func Verdicts(w io.Writer, run *experiment.Run) error {
	const names = terminalWidth - experiment.VerdictWidth
	var b strings.Builder
	for _, res := range run.Results {
		text := "not measured"
		switch {
		case res.Card != nil:
			text = res.Card.Verdict
		case res.Error != "":
			text += ": " + res.Error
		}
		b.WriteString(fmt.Sprintf("%-*s", names, res.Name) + ansi.Truncate(strings.ReplaceAll(text, "\n", "; "),
			experiment.VerdictWidth, "…") + "\n")
	}
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write verdicts: %w", err)
	}
	return nil
}

// Text writes the first figures of all experiments for a terminal, in 80 columns.
func Text(w io.Writer, run *experiment.Run) error {
	var b strings.Builder
	b.WriteString(paragraph(run.Machine.String(), ""))
	for i := range run.Results {
		res := &run.Results[i]
		b.WriteString("\n" + paragraph(res.Name+": "+res.Title, ""))
		for _, t := range newTables(res) {
			if t.Title != "" {
				b.WriteString("\n" + paragraph(t.Title, ""))
			}
			writeTable(&b, t)
		}
	}
	b.WriteString("\n" + paragraph("Median (lowest–highest). Published figures come from other machines and kernels. The report has "+
		"all figures.", ""))
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write report: %w", err)
	}
	return nil
}

func writeTable(b *strings.Builder, t table) {
	head := make([]string, len(t.Head))
	for i, name := range t.Head {
		head[i] = strings.ToUpper(name)
	}
	lines := [][]string{head}
	for _, row := range t.Rows {
		line := []string{row.Name}
		for _, c := range row.Cells {
			line = append(line, c.String())
		}
		if row.Status != "" {
			line = line[:1]
		}
		lines = append(lines, line)
	}
	widths := columns(lines)
	writeLine(b, lines[0], widths)
	for i, row := range t.Rows {
		writeLine(b, lines[i+1], widths)
		if row.Status != "" {
			b.WriteString(paragraph(row.Status+": "+row.Error, "    "))
		}
	}
}

// columns returns the widths of the name and of the figures that fit.
func columns(lines [][]string) []int {
	widths := []int{0}
	for _, line := range lines {
		widths[0] = min(max(widths[0], ansi.StringWidth(line[0])), nameWidth)
	}
	used := widths[0]
	for k := 1; k < len(lines[0]); k++ {
		width := 0
		for _, part := range wrap(lines[0][k], figureWidth) {
			width = max(width, ansi.StringWidth(part))
		}
		for _, line := range lines[1:] {
			if k < len(line) {
				width = max(width, ansi.StringWidth(line[k]))
			}
		}
		if used += gap + width; used > terminalWidth {
			break
		}
		widths = append(widths, width)
	}
	return widths
}

// writeLine writes one row of a table, on as many lines as its longest cell needs.
func writeLine(b *strings.Builder, cells []string, widths []int) {
	var parts [][]string
	height := 0
	for i, width := range widths[:min(len(widths), len(cells))] {
		part := wrap(cells[i], width)
		parts = append(parts, part)
		height = max(height, len(part))
	}
	for y := range height {
		var line strings.Builder
		for i, part := range parts {
			text := ""
			// Names stand at the top of their row, headings of figures at the bottom.
			if k := y - (height-len(part))*min(i, 1); k >= 0 && k < len(part) {
				text = strings.TrimSpace(part[k])
			}
			space := strings.Repeat(" ", widths[i]-ansi.StringWidth(text))
			if i == 0 {
				line.WriteString(text + space)
			} else {
				line.WriteString(strings.Repeat(" ", gap) + space + text)
			}
		}
		b.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
}

// paragraph returns a text in lines of the terminal's width, each with an indent.
func paragraph(text, indent string) string {
	lines := wrap(strings.ReplaceAll(text, "\n", "; "), terminalWidth-len(indent))
	return indent + strings.Join(lines, "\n"+indent) + "\n"
}

// wrap breaks a text at its blanks. ansi.Wrap breaks at hyphens too, but not at this one.
func wrap(text string, width int) []string {
	const hyphen = "\u2011"
	text = ansi.Wrap(strings.ReplaceAll(text, "-", hyphen), width, "")
	return strings.Split(strings.ReplaceAll(text, hyphen, "-"), "\n")
}
