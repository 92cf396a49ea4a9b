package page

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
	"github.com/jedib0t/go-pretty/v6/table"
	align "github.com/jedib0t/go-pretty/v6/text"

	"spillway.dev/spillway/internal/escape"
)

// Column describes a column of a Table. Columns that identify a row come first.
type Column struct {
	Name  string // with the unit, such as "P99 µs"
	Right bool   // numbers are aligned to the right
	Wide  bool   // shown with -o wide only
	// Least, if not 0, makes this a column that gives way if the table is too wide: to as
	// few columns as this. Its text is broken, or cut at its end if Cut is set.
	Least int
	Cut   bool
}

// Text returns a column of text.
func Text(name string) Column { return Column{Name: name} }

// Number returns a column of numbers.
func Number(name string) Column { return Column{Name: name, Right: true} }

// OnlyWide returns the column as one of -o wide.
func (c Column) OnlyWide() Column {
	c.Wide = true
	return c
}

// Shrinks returns the column as one that gives way, to as few columns as least.
func (c Column) Shrinks(least int) Column {
	c.Least = least
	return c
}

// Table is a table for people: without borders, with headings, and with a verdict below.
type Table struct {
	columns []Column
	rows    [][]string
	foot    []line
}

// line is a line below a table.
type line struct {
	style      Style
	word, text string
}

// NewTable returns an empty table.
func NewTable(columns ...Column) *Table { return &Table{columns: columns} }

// Row adds a row with a value for each column, also for those of -o wide. It makes the
// values safe to print.
func (t *Table) Row(values ...any) {
	row := make([]string, len(t.columns))
	for i := range row {
		if i < len(values) {
			row[i] = escape.Text(fmt.Sprint(values[i]))
		}
	}
	t.rows = append(t.rows, row)
}

// Foot adds a line below the table.
func (t *Table) Foot(format string, args ...any) {
	t.foot = append(t.foot, line{text: fmt.Sprintf(format, args...)})
}

// Verdict adds a line below the table that begins with a word in the color of its style.
func (t *Table) Verdict(s Style, word, format string, args ...any) {
	t.foot = append(t.foot, line{s, word, fmt.Sprintf(": "+format, args...)})
}

// gap is the space between two columns.
const gap = 2

// Write prints the table so that it fits the page.
func (t *Table) Write(w io.Writer) error {
	p := Of(w)
	var out strings.Builder
	if len(t.rows) > 0 {
		text, heading := t.render(p)
		for i, line := range strings.Split(text, "\n") {
			line = strings.TrimRight(line, " ")
			if i < heading {
				line = p.Paint(Strong, line)
			}
			out.WriteString(line + "\n")
		}
	}
	for _, line := range t.foot {
		text := p.Paint(line.style, line.word) + line.text
		if p.Width > 0 {
			text = p.Wrap(text, "")
		}
		out.WriteString(text + "\n")
	}
	if _, err := io.WriteString(p, out.String()); err != nil {
		return fmt.Errorf("write table: %w", err)
	}
	return nil
}

// render returns the lines of the table, and the number of those of the headings.
func (t *Table) render(p *Page) (text string, heading int) {
	var shown []int
	for i, c := range t.columns {
		if !c.Wide || p.Wide {
			shown = append(shown, i)
		}
	}
	widths := t.widths(p, shown)
	out := table.NewWriter()
	out.SetStyle(style)
	head := table.Row{}
	var configs []table.ColumnConfig
	for k, i := range shown {
		c := t.columns[i]
		head = append(head, c.Name)
		heading = max(heading, 1+strings.Count(wrapped(c.Name, widths[k]), "\n"))
		config := table.ColumnConfig{Number: k + 1, WidthMax: widths[k], WidthMaxEnforcer: wrapped}
		if c.Cut {
			config.WidthMaxEnforcer = cut
		}
		if c.Right {
			config.Align, config.AlignHeader = align.AlignRight, align.AlignRight
		}
		configs = append(configs, config)
	}
	out.SetColumnConfigs(configs)
	if slices.ContainsFunc(shown, func(i int) bool { return t.columns[i].Name != "" }) {
		out.AppendHeader(head)
	} else {
		heading = 0
	}
	for _, row := range t.rows {
		cells := table.Row{}
		for _, i := range shown {
			cells = append(cells, row[i])
		}
		out.AppendRow(cells)
	}
	return out.Render(), heading
}

var style = table.Style{
	Box:    table.BoxStyle{PaddingRight: strings.Repeat(" ", gap)},
	Format: table.FormatOptions{Header: align.FormatDefault, Row: align.FormatDefault, HeaderVAlign: align.VAlignBottom},
}

func wrapped(cell string, width int) string { return broken(cell, width, ansi.Wrap) }

func cut(cell string, width int) string { return ansi.Truncate(cell, width, "…") }

// widths returns the widths of the shown columns. Where the page is too narrow, the widest
// of the columns that give way is narrowed first: to its longest word, and where that is
// not enough, to its least width.
func (t *Table) widths(p *Page, shown []int) []int {
	widths, words := make([]int, len(shown)), make([]int, len(shown))
	all := gap * (len(shown) - 1)
	for k, i := range shown {
		cells := []string{t.columns[i].Name}
		for _, row := range t.rows {
			cells = append(cells, row[i])
		}
		for _, cell := range cells {
			widths[k] = max(widths[k], ansi.StringWidth(cell))
			for _, word := range strings.Fields(cell) {
				words[k] = max(words[k], ansi.StringWidth(word))
			}
		}
		all += widths[k]
	}
	if p.Width <= 0 || p.Wide {
		return widths
	}
	for _, whole := range []bool{true, false} {
		for ; all > p.Width; all-- {
			widest := -1
			for k, i := range shown {
				least := t.columns[i].Least
				if whole && !t.columns[i].Cut {
					least = max(least, words[k])
				}
				if t.columns[i].Least > 0 && widths[k] > least && (widest < 0 || widths[k] > widths[widest]) {
					widest = k
				}
			}
			if widest < 0 {
				break
			}
			widths[widest]--
		}
	}
	return widths
}
