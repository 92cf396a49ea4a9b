package trace

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// styles are the colors of states.
var styles = map[State]page.Style{Decided: page.Good, Refused: page.Bad, Doubt: page.Warning}

// labelWidth is the width of the column of names.
const labelWidth = 18

// Write prints the report as text: the outcome first, then the steps.
func (r *Report) Write(w io.Writer) error {
	p := page.Of(w)
	out := &strings.Builder{}
	line := func(label string, style page.Style, text string) {
		text = p.Wrap(escape.Text(text), strings.Repeat(" ", labelWidth))
		fmt.Fprintf(out, "%s%s%s\n", p.Paint(style, label), strings.Repeat(" ", max(labelWidth-len(label), 0)), text[labelWidth:])
	}
	more := func(label string, text string) {
		if text != "" {
			fmt.Fprintln(out, p.Wrap(escape.Text(label+text), strings.Repeat(" ", labelWidth)))
		}
	}
	if r.Service != "" {
		line("Service", page.Strong, r.Service)
	}
	line("connection", page.Strong, fmt.Sprintf("%s, %s port %d, to %s port %d", r.Source, r.ProtocolName, r.ClientPort,
		r.Destination, r.DestinationPort))
	style := page.Good
	if r.Refused {
		style = page.Bad
	}
	line("decision", style, cmp.Or(r.Decision, "none"))
	for i, s := range r.Steps {
		if s.State == Doubt {
			line("look at", page.Warning, fmt.Sprintf("step %d, %s: %s", i+1, s.Name, cmp.Or(s.Follows, s.Found)))
		}
	}
	if r.Probe != nil {
		line("probe", r.Probe.style(), r.Probe.text())
	}
	fmt.Fprintln(out)
	for i, s := range r.Steps {
		line(fmt.Sprintf("%2d %s", i+1, s.Name), cmp.Or(styles[s.State], page.Strong), cmp.Or(s.Found, "-"))
		more("looked up: ", s.Lookup)
		more("-> ", s.Follows)
	}
	if r.Probe != nil && r.Probe.Skipped == "" {
		fmt.Fprintln(out)
		r.Probe.details(line)
	}
	for _, n := range r.Notes {
		fmt.Fprintln(out, p.Wrap(escape.Text("Note: "+n), ""))
	}
	if _, err := io.WriteString(p, out.String()); err != nil {
		return fmt.Errorf("write trace: %w", err)
	}
	return nil
}

// Failure says why the connection does not work; "": it does, as far as the steps and the probe tell.
func (r *Report) Failure() string {
	switch {
	case r.Refused:
		return r.Decision
	case r.Probe != nil && r.Probe.failed():
		return "the probe failed: " + r.Probe.text()
	}
	return ""
}

func (p *Probe) style() page.Style {
	switch {
	case p.Skipped != "":
		return page.Strong
	case p.failed():
		return page.Bad
	}
	return page.Good
}

// text is the outcome in one line.
func (p *Probe) text() string {
	switch {
	case p.Skipped != "":
		return "none: " + p.Skipped
	case p.failed():
		return p.Result + ": " + p.Conclusion
	}
	return p.Conclusion
}

// details prints what the probe left behind.
func (p *Probe) details(line func(string, page.Style, string)) {
	line("probe: remote", page.Strong, cmp.Or(p.Remote, "-"))
	if p.Flow != nil {
		line("probe: flow", page.Strong, flowText(p.Flow))
	} else {
		line("probe: flow", page.Strong, "no entry: sockets translate by themselves, and bypassed packets need none")
	}
	var increased []string
	for _, name := range slices.Sorted(maps.Keys(p.Counters)) {
		increased = append(increased, fmt.Sprintf("%s +%d", name, p.Counters[name]))
	}
	if len(increased) > 0 {
		line("probe: counters", page.Strong, strings.Join(increased, ", ")+" (with other packets of the node)")
	}
	for _, d := range p.Drops {
		where := d.Namespace
		if d.Pod != "" {
			where = "pod " + d.Pod + " (" + d.Namespace + ")"
		}
		line("probe: drop", page.Bad, fmt.Sprintf("%s in %s%s: %s", d.Reason, where, hop(&d), d.Meaning))
	}
}

// hop is where in a network namespace a packet was dropped.
func hop(d *drops.Drop) (text string) {
	for _, part := range []struct{ word, value string }{{" from ", d.Interface}, {" at ", d.Hook}, {", ", d.By}, {" ", d.Table},
		{"/", d.Chain}, {", ", d.Location}} {
		if part.value != "" {
			text += part.word + part.value
		}
	}
	return text
}
