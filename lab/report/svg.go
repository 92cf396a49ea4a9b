package report

import (
	"cmp"
	"fmt"
	"html"
	"html/template"
	"math"
	"slices"
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// Sizes of charts, in the units of their viewBox; text is 13 of them high. A picture is
// as wide as a telephone's page, so that the page never scales its text much.
const (
	width      = 340.0
	nameChars  = 45 // of a name in one line of that width
	lineHeight = 18.0
	charWidth  = 7.4 // of the widest usual letters, so that estimates are large enough
	shades     = 3   // of each side: classes s0 ... and g0 ... in style.css
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

// svg returns the picture. A screen reader reads its label.
func (c *canvas) svg(label string) template.HTML {
	return template.HTML(fmt.Sprintf(`<svg viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">%s</svg>`,
		width, c.height, html.EscapeString(label), c.b.String()))
}

// fit shortens a text to a width.
func fit(text string, w float64) string {
	r := []rune(text)
	if most := int(w / charWidth); len(r) > most {
		return string(r[:max(most-1, 0)]) + "…"
	}
	return text
}

// Picture is one chart: small pictures side by side, with one scale.
type Picture struct {
	Title string
	Note  string
	// Zero names the rows whose values are all 0, instead of drawing them.
	Zero   string
	Panels []Panel
}

// Panel is one of the pictures of a chart, with the legend of its colors.
type Panel struct {
	Name   string
	SVG    template.HTML
	Legend []LegendEntry
}

// LegendEntry names one color and dash pattern.
type LegendEntry struct {
	Class string
	Name  string
}

// group holds the rows of one panel.
type group struct {
	name string
	rows []named
}

// named is a row and its name within its panel.
type named struct {
	*experiment.RowResult
	short string
}

// groups puts rows "CASE: NAME" of one case together, if that gives fewer panels than
// half of the rows.
func groups(rows []*experiment.RowResult) []group {
	var out []group
	for _, r := range rows {
		name, short, found := strings.Cut(r.Name, ": ")
		if !found {
			short = r.Name
		}
		i := slices.IndexFunc(out, func(g group) bool { return g.name == name })
		if i < 0 {
			i, out = len(out), append(out, group{name: name})
		}
		out[i].rows = append(out[i].rows, named{r, short})
	}
	if len(out) > 1 && 2*len(out) <= len(rows) {
		for i, g := range out {
			if len(g.rows) == 1 && g.rows[0].short == g.name {
				out[i].name = "" // the row says it
			}
		}
		return out
	}
	all := group{}
	for _, r := range rows {
		all.rows = append(all.rows, named{r, r.Name})
	}
	return []group{all}
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
		return curves(chart, groups(rows), func(r named) []experiment.Point { return tail(r.Distribution) },
			axis{name: "percentile", log: true, label: percentile}, axis{name: "latency, ms", log: true})
	case experiment.Over:
		return curves(chart, groups(rows), func(r named) []experiment.Point { return r.Series[chart.Series] },
			axis{name: "seconds", tight: true}, axis{log: chart.LogY})
	}
	return nil
}

// bar is one bar, with its name above it and its number behind it.
type bar struct {
	name, class string
	value       experiment.Summary
	status      string // instead of a value
}

// classOf returns the class of a side's bars.
func classOf(side experiment.Side) string {
	switch side {
	case experiment.Metal:
		return "metal"
	case experiment.Spillway:
		return "spillway"
	}
	return "other"
}

// bars draws a bar for each row. Published figures are in a panel of their own, with its
// own scale: other machines made them.
func bars(chart experiment.Chart, f experiment.Figure, rows []*experiment.RowResult) *Picture {
	var all, published []bar
	var zero []string
	type panel struct {
		name string
		bars []bar
	}
	var panels []panel
	for _, g := range groups(rows) {
		var list []bar
		some, measured := false, false
		for _, r := range g.rows {
			if p, ok := r.Published[f.Key]; ok {
				published = append(published, bar{name: r.Name, class: "published", value: experiment.Summarize([]float64{p})})
			}
			v, ok := r.Value(f.Key)
			if !ok && r.Status == experiment.OK {
				continue // the row does not measure this figure
			}
			list = append(list, bar{name: r.short, class: classOf(r.Side), value: v, status: r.Status})
			some, measured = some || v.Max != 0, measured || ok
		}
		switch {
		case !measured:
		case !some:
			zero = append(zero, cmp.Or(g.name, g.rows[0].Name))
		default:
			panels = append(panels, panel{g.name, list})
			all = append(all, list...)
		}
	}
	if len(panels)+len(zero) == 0 {
		return nil
	}
	p := &Picture{Title: chart.Title, Note: unitNote(f)}
	if len(zero) > 0 {
		p.Zero = "0 in every row"
		if len(panels) > 0 {
			p.Zero += " of: " + strings.Join(zero, "; ")
		}
		p.Zero += "."
	}
	for _, one := range panels {
		p.Panels = append(p.Panels, Panel{Name: one.name, SVG: drawBars(chart.Title, one.name, one.bars, barScale(all, chart.LogY))})
	}
	if chart.LogY {
		p.Note += " Logarithmic."
	}
	if len(published) > 0 && len(panels) > 0 {
		const name = "Published, on other machines: a scale of its own"
		p.Panels = append(p.Panels, Panel{Name: name, SVG: drawBars(chart.Title, name, published, barScale(published, chart.LogY))})
	}
	return p
}

// barScale returns the scale of bars, with room for the longest number behind the
// longest bar.
func barScale(all []bar, log bool) scale {
	var values []float64
	room := 0
	for _, b := range all {
		if b.value.N == 0 {
			continue
		}
		values = append(values, b.value.Median, b.value.Max)
		room = max(room, len([]rune(experiment.FormatRange(b.value, ""))))
	}
	s := newScale(values, log, 0, 0)
	if !log && len(values) > 0 {
		s.high = max(slices.Max(values), s.low+1e-12) // bars have no axis whose end needs a name
	}
	s.to = width - 8 - charWidth*float64(room)
	return s
}

// drawBars draws the bars of one panel.
func drawBars(title, panel string, list []bar, s scale) template.HTML {
	var c canvas
	read := writeBars(&c, list, s)
	if panel != "" {
		title += ", " + panel
	}
	return c.svg(title + ": " + read)
}

// writeBars writes bars below each other, and returns them as text.
func writeBars(c *canvas, list []bar, s scale) string {
	read := []string{}
	for _, b := range list {
		for _, line := range wrap(b.name, nameChars) {
			c.text(0, c.height+lineHeight-5, "start", "name", fit(line, width))
			c.height += lineHeight
		}
		text := experiment.FormatRange(b.value, "")
		if b.value.N == 0 {
			text = b.status
			c.text(0, c.height+13, "start", "soft", text)
		} else {
			drawBar(c, s, b, text)
		}
		read = append(read, b.name+" "+text)
		c.height += lineHeight + 6
	}
	return strings.Join(read, "; ")
}

func drawBar(c *canvas, s scale, b bar, text string) {
	v, x := b.value, s.at(b.value.Median)
	c.add(`<rect x="0.5" y="%.1f" width="%.1f" height="13" class="%s"/>`, c.height+1.5, max(x-0.5, 1), b.class)
	end := x
	if v.Min != v.Max {
		low, high := s.at(v.Min), s.at(v.Max)
		y := c.height + 8
		c.line(low, y, high, y, "range")
		c.line(low, y-4, low, y+4, "range")
		c.line(high, y-4, high, y+4, "range")
		end = max(x, high)
	}
	c.text(end+6, c.height+13, "start", "value", text)
}

func unitNote(f experiment.Figure) string {
	note := f.Name
	if f.Unit != "" {
		note += ", " + f.Unit
	}
	return note + ". " + betterNote(f)
}

func betterNote(f experiment.Figure) string {
	switch f.Better {
	case "higher":
		return "More is better."
	case "lower":
		return "Less is better."
	}
	return ""
}

// lines shows a line for each group over the rows' X.
func lines(chart experiment.Chart, f experiment.Figure, rows []*experiment.RowResult) *Picture {
	byGroup := map[string][]experiment.Point{}
	var all group
	for _, r := range rows {
		v, ok := r.Value(f.Key)
		if !ok {
			continue
		}
		if byGroup[r.Group] == nil {
			all.rows = append(all.rows, named{&experiment.RowResult{Name: r.Group, Side: r.Side}, r.Group})
		}
		byGroup[r.Group] = append(byGroup[r.Group], experiment.Point{X: r.X, Y: v.Median})
	}
	p := curves(chart, []group{all}, func(r named) []experiment.Point { return byGroup[r.Name] },
		axis{name: chart.XName, log: chart.LogX}, axis{name: f.Name + unitOf(f), log: chart.LogY})
	if p != nil {
		p.Note = betterNote(f)
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

// curves draws a curve for each row, and all panels to one scale.
func curves(chart experiment.Chart, list []group, points func(named) []experiment.Point, xa, ya axis) *Picture {
	var xs, ys []float64
	for _, g := range list {
		for _, r := range g.rows {
			for _, p := range points(r) {
				xs, ys = append(xs, p.X), append(ys, p.Y)
			}
		}
	}
	if len(xs) == 0 {
		return nil
	}
	p := &Picture{Title: chart.Title}
	if !slices.ContainsFunc(ys, func(y float64) bool { return y != 0 }) {
		p.Zero = "0 in every row, all the time."
		return p
	}
	const left, right, top, bottom, height = 50.0, 14.0, 26.0, 42.0, 260.0
	x := newScale(xs, xa.log, left, width-right)
	if xa.tight {
		x.high = max(slices.Max(xs), x.low+1)
	}
	y := newScale(ys, ya.log, height-bottom, top)
	for _, g := range list {
		c := canvas{height: height}
		grid(&c, x, y, xa, ya, left, width-right, top, height-bottom)
		panel := Panel{Name: g.name}
		names := []string{}
		used := map[experiment.Side]int{}
		for _, r := range g.rows {
			all := slices.DeleteFunc(slices.Clone(points(r)), func(p experiment.Point) bool {
				return xa.log && p.X <= 0 || ya.log && p.Y <= 0 || math.IsNaN(p.Y)
			})
			if len(all) == 0 {
				continue
			}
			key := LegendEntry{curveClass(r.Side, used[r.Side]), r.short}
			used[r.Side]++
			curve(&c, all, x, y, key.Class)
			panel.Legend = append(panel.Legend, key)
			names = append(names, r.short)
		}
		if len(names) == 0 {
			continue
		}
		panel.SVG = c.svg(strings.Trim(chart.Title+", "+g.name, ", ") + ": " + strings.Join(names, "; "))
		p.Panels = append(p.Panels, panel)
	}
	return p
}

// curveClass returns the classes of the n-th curve of a side. Shades come again after
// some; dashes differ then too.
func curveClass(side experiment.Side, n int) string {
	letter := "g"
	switch side {
	case experiment.Spillway:
		letter = "s"
	case experiment.Metal:
		return "curve m"
	}
	return fmt.Sprintf("curve %s%d d%d", letter, n%shades, n%dashes)
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
	c.text(0, 14, "start", "soft", fit(ya.name, width))
	c.text(right, bottom+36, "end", "soft", fit(xa.name, width/2))
}

// curve draws points as a line, and as marks too while they are few.
func curve(c *canvas, points []experiment.Point, x, y scale, class string) {
	var d strings.Builder
	for i, p := range points {
		letter := "L"
		if i == 0 {
			letter = "M"
		}
		fmt.Fprintf(&d, "%s%.1f %.1f", letter, x.at(p.X), y.at(p.Y))
	}
	c.add(`<path d="%s" class="%s"/>`, d.String(), class)
	if len(points) > 12 {
		return
	}
	for _, p := range points {
		c.add(`<circle cx="%.1f" cy="%.1f" r="3" class="mark %s"/>`, x.at(p.X), y.at(p.Y), strings.TrimPrefix(class, "curve "))
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
