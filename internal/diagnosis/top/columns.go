package top

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
)

// Column is a column of a view. It is of printed pages and of the terminal view alike, but for In.
type Column struct {
	Name string
	In   Form
	// Least is the width in characters down to which a text gives way. 0: a number.
	Least int
	// Width is the width of a number in the terminal view, in characters. Texts share the rest of its line.
	Width int
	Cell  func(*Row) any
}

// Form is where a Column is shown.
type Form int

// The forms.
const (
	Both     Form = iota
	Pages         // printed pages
	Wide          // printed pages with -o wide
	Terminal      // the terminal view, which alone has drops of addresses
)

func (c Column) in(f Form) Column {
	c.In = f
	return c
}

func text(name string, least int, cell func(*Row) any) Column {
	return Column{Name: name, Least: least, Cell: cell}
}

func number(name string, width int, cell func(*Row) any) Column {
	return Column{Name: name, Width: width, Cell: cell}
}

// The columns of more than one view.
var (
	entries  = number("ENTRIES", 9, func(r *Row) any { return r.Entries })
	growth   = number("+/s", 8, func(r *Row) any { return r.Growth() })
	dropped  = number("DROPS", 8, func(r *Row) any { return r.Drops })
	dropRate = number("/s", 5, func(r *Row) any { return r.dropRate() }).in(Terminal)
)

// columns returns the columns of the view in some forms. The first one names the row.
func (v View) columns(forms ...Form) []Column {
	var list []Column
	switch v {
	case Namespaces:
		list = namespaceColumns
	case Egress:
		list = egressColumns
	default:
		heading := strings.ToUpper(strings.TrimSuffix(v.String(), "s"))
		list = []Column{text(heading, 20, nameCell), entries, growth, dropped.in(Terminal), dropRate}
	}
	return slices.DeleteFunc(slices.Clone(list), func(c Column) bool { return !slices.Contains(forms, c.In) })
}

// PageColumns returns the columns of printed pages of the view.
func (v View) PageColumns() []Column { return v.columns(Both, Pages, Wide) }

func nameCell(r *Row) any { return r.Name }

var egressColumns = []Column{
	text("POD", 12, func(r *Row) any { return r.pod() }),
	text("DESTINATION", 25, func(r *Row) any { return r.Address }), // any of IPv4
	entries, growth,
}

// Counters count from the creation of the namespace.
var namespaceColumns = []Column{
	text("NAMESPACE", 12, nameCell), entries, number("USE", 7, func(r *Row) any { return r.Use() }), growth, dropped, dropRate,
	printed("INSFAIL", func(r *Row) any { return r.Report.Counters.InsertFailed }),
	printed("INVALID", func(r *Row) any { return r.Report.Counters.Invalid }),
	printed("EXPECT", func(r *Row) any { return r.expectations() }),
	printed("MAX", func(r *Row) any { return r.Report.Limits.Max }).in(Wide),
	printed("BUCKETS", func(r *Row) any { return r.Report.Limits.Buckets }).in(Wide),
	printed("EVICTED", func(r *Row) any { return r.Report.Counters.EarlyDrop }).in(Wide),
	printed("FOUND", func(r *Row) any { return r.Report.Counters.Found }).in(Wide),
	printed("PID", func(r *Row) any { return r.Report.Namespace.PID }).in(Wide),
}

// printed is a number for which the terminal view has no room beside the names.
func printed(name string, cell func(*Row) any) Column { return number(name, 0, cell).in(Pages) }

// liveColumns returns the columns of the terminal view, with widths of texts that fill a line of width
// characters. Each text gets an equal share or its least; the first one gets the rest.
func (v View) liveColumns(width int) []Column {
	list := v.columns(Both, Terminal)
	rest, texts := width-(len(list)-1), 0
	for _, c := range list {
		rest -= c.Width
		if c.Least > 0 {
			texts++
		}
	}
	share := rest / texts
	for i := 1; i < len(list); i++ {
		if c := &list[i]; c.Least > 0 {
			c.Width = max(c.Least, share)
			rest -= c.Width
		}
	}
	list[0].Width = rest
	return list
}

// line joins a text for each column, made safe to print.
func line(columns []Column, cell func(*Column) any) string {
	cells := make([]string, len(columns))
	for i := range columns {
		c := &columns[i]
		cells[i] = escape.Text(fmt.Sprint(cell(c)))
		if c.Least > 0 {
			cells[i] = fmt.Sprintf("%-*s", c.Width, cut(cells[i], c.Width))
		} else {
			cells[i] = fmt.Sprintf("%*s", c.Width, cells[i])
		}
	}
	return strings.Join(cells, " ")
}
