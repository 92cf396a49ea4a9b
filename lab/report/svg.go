package report

import (
	"fmt"
	"html"
	"html/template"
	"math"
	"slices"
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// Sizes of charts, in the units of their viewBox; text is 13 of them high. The
// page never shows a chart smaller than minWidth of style.css.
const (
	width      = 600.0
	lineHeight = 18.0
	charWidth  = 7.4 // of the widest usual letters, so that estimates are large enough
	colors     = 8   // classes c0 ... in style.css
	dashes     = 5   // d0 ...
)

// canvas collects the elements of one SVG.
type canvas struct {
	b      strings.Builder
	height float64
}

func (c *canvas) add(format string, args ...any) { fmt.Fprintf(&c.b, format, args...) }

// text writes at the baseline y; anchor is start, middle or end.
func (c *canvas) text(x, y float64, anchor, class, text string) {
	c.add(`<text x="%.1f" y="%.1f" text-anchor="%s" class="%s">%s</text>`, x, y, anchor, class, html.EscapeString(text))
}

func (c *canvas) line(x1, y1, x2, y2 float64, class string) {
	c.add(`<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" class="%s"/>`, x1, y1, x2, y2, class)
}

func (c *canvas) svg(title string) template.HTML {
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">%s</svg>`,
		width, c.height, html.EscapeString(title), c.b.String()))
}

// fit shortens a text to a width.
func fit(text string, w float64) string {
	r := []rune(text)
	if most := int(w / charWidth); len(r) > most {
		return string(r[:max(most-1, 0)]) + "…"
	}
	return text
}

// Picture is one chart, and the legend of its colors.
type Picture struct {
	Title  string
	Note   string
	SVG    template.HTML
	Legend []LegendEntry
}

// LegendEntry names one color and dash pattern.
type LegendEntry struct {
	Color, Dash int
	Name        string
}

// draw draws a chart, or returns nil if its rows have no values.
func draw(chart experiment.Chart, res *experiment.Result) *Picture {
	var rows []*experiment.RowResult
	for i := range res.Rows {
		if chart.Group == "" || res.Rows[i].Group == chart.Group {
			rows = append(rows, &res.Rows[i])
		}
	}
	figure := experiment.Figure{Name: chart.Title}
	for _, f := range res.Figures {
		if f.Key == chart.Figure {
			figure = f
		}
	}
	switch chart.Kind {
	case experiment.Bars:
		return bars(chart, figure, rows)
	case experiment.Lines:
		return lines(chart, figure, rows)
	case experiment.Latency:
		return curves(chart, rows, func(r *experiment.RowResult) []experiment.Point { return tail(r.Distribution) },
			axis{name: "percentile", log: true, label: percentile}, axis{name: "latency, ms", log: true})
	case experiment.Over:
		return curves(chart, rows, func(r *experiment.RowResult) []experiment.Point { return r.Series[chart.Series] },
			axis{name: "seconds", tight: true}, axis{name: chart.Title, log: chart.LogY})
	}
	return nil
}

// bars draws a bar for each row, with its name above and its number behind it. A
// published figure is an outlined bar below the measured one.
func bars(chart experiment.Chart, f experiment.Figure, rows []*experiment.RowResult) *Picture {
	const valueRoom = 190.0
	values, any := []float64{}, false
	for _, r := range rows {
		if v, ok := r.Value(f.Key); ok {
			values, any = append(values, v.Min, v.Max), true
		}
		if p, ok := r.Published[f.Key]; ok {
			values = append(values, p)
		}
	}
	if !any {
		return nil
	}
	s := newScale(values, chart.LogY, 0, width-valueRoom)
	var c canvas
	published := false
	for _, r := range rows {
		name := r.Name
		c.text(0, c.height+lineHeight-5, "start", "name", fit(name, width))
		c.height += lineHeight
		v, ok := r.Value(f.Key)
		if !ok {
			c.text(4, c.height+13, "start", "soft", r.Status)
			c.height += lineHeight
		} else {
			bar(&c, s, v, f.Unit)
		}
		if p, ok := r.Published[f.Key]; ok {
			published = true
			x := s.at(p)
			c.add(`<rect x="0.5" y="%.1f" width="%.1f" height="10" class="published"/>`, c.height+3, max(x-1, 1))
			c.text(x+6, c.height+12, "start", "soft", "published: "+experiment.FormatNumber(p))
			c.height += lineHeight
		}
		c.height += 6
	}
	p := &Picture{Title: chart.Title, SVG: c.svg(chart.Title)}
	p.Note = unitNote(f)
	if published {
		p.Note += " Outlined: as published, on another machine and kernel."
	}
	if chart.LogY {
		p.Note += " Logarithmic."
	}
	return p
}

func bar(c *canvas, s scale, v experiment.Summary, unit string) {
	x := s.at(v.Median)
	c.add(`<rect x="0" y="%.1f" width="%.1f" height="14" class="bar"/>`, c.height+1, max(x, 1))
	end := x
	if v.Min != v.Max {
		low, high := s.at(v.Min), s.at(v.Max)
		y := c.height + 8
		c.line(low, y, high, y, "range")
		c.line(low, y-4, low, y+4, "range")
		c.line(high, y-4, high, y+4, "range")
		end = max(x, high)
	}
	c.text(end+6, c.height+13, "start", "value", fit(experiment.FormatRange(v, ""), width-end-6))
	c.height += lineHeight
}

func unitNote(f experiment.Figure) string {
	note := f.Name
	if f.Unit != "" {
		note += ", " + f.Unit
	}
	switch f.Better {
	case "higher":
		note += "; more is better."
	case "lower":
		note += "; less is better."
	default:
		note += "."
	}
	return note
}

// lines shows a line for each group over the rows' X.
func lines(chart experiment.Chart, f experiment.Figure, rows []*experiment.RowResult) *Picture {
	byGroup := map[string][]experiment.Point{}
	var order []*experiment.RowResult
	for _, r := range rows {
		v, ok := r.Value(f.Key)
		if !ok {
			continue
		}
		if byGroup[r.Group] == nil {
			order = append(order, &experiment.RowResult{Name: r.Group})
		}
		byGroup[r.Group] = append(byGroup[r.Group], experiment.Point{X: r.X, Y: v.Median})
	}
	p := curves(chart, order, func(r *experiment.RowResult) []experiment.Point { return byGroup[r.Name] },
		axis{name: chart.XName, log: chart.LogX}, axis{name: f.Name + unitOf(f), log: chart.LogY})
	if p != nil {
		p.Note = unitNote(f)
	}
	return p
}

func unitOf(f experiment.Figure) string {
	if f.Unit == "" {
		return ""
	}
	return ", " + f.Unit
}

// axis describes one direction of a chart.
type axis struct {
	name  string
	log   bool
	tight bool                 // ends with the last value
	label func(float64) string // of a tick; nil is a number
}

// curves draws a curve for each row.
func curves(chart experiment.Chart, rows []*experiment.RowResult, points func(*experiment.RowResult) []experiment.Point, xa, ya axis) *Picture {
	var xs, ys []float64
	for _, r := range rows {
		for _, p := range points(r) {
			xs, ys = append(xs, p.X), append(ys, p.Y)
		}
	}
	if len(xs) == 0 {
		return nil
	}
	const left, right, top, bottom = 62.0, 16.0, 26.0, 42.0
	c := canvas{height: 330}
	x := newScale(xs, xa.log, left, width-right)
	if xa.tight {
		x.high = max(slices.Max(xs), x.low+1)
	}
	y := newScale(ys, ya.log, c.height-bottom, top)
	grid(&c, x, y, xa, ya, left, width-right, top, c.height-bottom)
	p := &Picture{Title: chart.Title}
	shown := 0
	for _, r := range rows {
		all := slices.DeleteFunc(slices.Clone(points(r)), func(p experiment.Point) bool {
			return xa.log && p.X <= 0 || ya.log && p.Y <= 0 || math.IsNaN(p.Y)
		})
		if len(all) == 0 {
			continue
		}
		key := LegendEntry{shown % colors, shown / 4 % dashes, r.Name}
		curve(&c, all, x, y, key)
		p.Legend = append(p.Legend, key)
		shown++
	}
	p.SVG = c.svg(chart.Title)
	return p
}

func grid(c *canvas, x, y scale, xa, ya axis, left, right, top, bottom float64) {
	label := func(a axis, v float64, name string) string {
		if a.label != nil {
			return a.label(v)
		}
		return name
	}
	values, names := y.ticks()
	for i, v := range values {
		c.line(left, y.at(v), right, y.at(v), "grid")
		c.text(left-6, y.at(v)+4, "end", "tick", label(ya, v, names[i]))
	}
	values, names = x.ticks()
	end := math.Inf(-1)
	for i, v := range values {
		c.line(x.at(v), top, x.at(v), bottom, "grid")
		name := label(xa, v, names[i])
		half := float64(len([]rune(name))) * charWidth / 2
		middle := min(x.at(v), width-half)
		if middle-half < end+6 {
			continue // it would touch the name before
		}
		c.text(middle, bottom+18, "middle", "tick", name)
		end = middle + half
	}
	c.line(left, bottom, right, bottom, "axis")
	c.line(left, top, left, bottom, "axis")
	c.text(0, 14, "start", "soft", fit(ya.name, width/2))
	c.text(right, bottom+36, "end", "soft", fit(xa.name, width/2))
}

// curve draws points as a line, and as marks too while they are few.
func curve(c *canvas, points []experiment.Point, x, y scale, key LegendEntry) {
	var d strings.Builder
	for i, p := range points {
		letter := "L"
		if i == 0 {
			letter = "M"
		}
		fmt.Fprintf(&d, "%s%.1f %.1f", letter, x.at(p.X), y.at(p.Y))
	}
	c.add(`<path d="%s" class="curve c%d d%d"/>`, d.String(), key.Color, key.Dash)
	if len(points) > 12 {
		return
	}
	for _, p := range points {
		c.add(`<circle cx="%.1f" cy="%.1f" r="3.5" class="mark c%d"/>`, x.at(p.X), y.at(p.Y), key.Color)
	}
}

// tail converts percentiles to 1/(1-p). The distances of 90, 99 and 99.9 then match their
// importance. Latency is in ms, as in tables.
func tail(distribution []experiment.Point) []experiment.Point {
	var out []experiment.Point
	for _, p := range distribution {
		if p.X < 100 {
			out = append(out, experiment.Point{X: 100 / (100 - p.X), Y: p.Y / 1000})
		}
	}
	return out
}

// percentile names a tick of a tail: 10 is "90 %".
func percentile(v float64) string {
	p := 100 - 100/v
	text := fmt.Sprintf("%.4f", p)
	return strings.TrimRight(strings.TrimRight(text, "0"), ".") + " %"
}
