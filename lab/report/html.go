package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
)

//go:embed page.html
var pageText string

//go:embed style.css
var style string

var page = template.Must(template.New("page").Parse(pageText))

// section is one experiment on the page.
type section struct {
	experiment.Result
	Table    table
	Pictures []*Picture
	Command  string
	Raw      template.HTML
}

// HTML returns the page.
func HTML(run *experiment.Run) ([]byte, error) {
	data := struct {
		Run      *experiment.Run
		Style    template.CSS
		Sections []section
		Versions []string
		Command  string
		Date     string
		Took     string
	}{Run: run, Style: template.CSS(style), Versions: versions(run), Command: strings.Join(run.Command, " "),
		Date: run.Started.Format("2006-01-02 15:04 MST"), Took: took(run.Seconds)}
	for i := range run.Results {
		res := &run.Results[i]
		s := section{Result: *res, Table: newTable(res), Command: commandOf(run, res)}
		for _, chart := range res.Charts {
			if p := draw(chart, res); p != nil {
				s.Pictures = append(s.Pictures, p)
			}
		}
		one := *run
		one.Results = run.Results[i : i+1]
		// Marshal writes <, > and & as escapes, so nothing in it can end the element.
		raw, err := json.Marshal(&one)
		if err != nil {
			return nil, fmt.Errorf("write report: %w", err)
		}
		s.Raw = template.HTML(fmt.Sprintf(`<script type="application/json" id="raw-%s">%s</script>`, template.HTMLEscapeString(res.Name), raw))
		data.Sections = append(data.Sections, s)
	}
	var b bytes.Buffer
	if err := page.Execute(&b, data); err != nil {
		return nil, fmt.Errorf("write report: %w", err)
	}
	return b.Bytes(), nil
}

// versions lists the programs of the run, "kube-proxy v1.36.3" and so on.
func versions(run *experiment.Run) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(run.Versions)) {
		out = append(out, name+" "+run.Versions[name])
	}
	return out
}

// commandOf returns the command that repeats one experiment.
func commandOf(run *experiment.Run, res *experiment.Result) string {
	text := "spillway-lab lab run " + res.Name
	if run.Quick {
		text += " --quick"
	}
	return text
}

func took(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}

// table holds the results of rows, for any form of report.
type table struct {
	Head []string
	Rows []tableRow
}

type tableRow struct {
	Name, Group   string
	Cells         []cell
	Status, Error string // "" if it is ok
	Log           string
	Notes         []string
}

type cell struct{ Measured, Published string }

// newTable leaves out figures that no row has.
func newTable(res *experiment.Result) table {
	t := table{Head: []string{"what"}}
	var shown []experiment.Figure
	for _, f := range res.Figures {
		has := func(r experiment.RowResult) bool {
			_, measured := r.Value(f.Key)
			_, published := r.Published[f.Key]
			return measured || published
		}
		if slices.ContainsFunc(res.Rows, has) {
			shown = append(shown, f)
			t.Head = append(t.Head, f.Name+unitOf(f))
		}
	}
	for i := range res.Rows {
		r := &res.Rows[i]
		row := tableRow{Name: r.Name, Group: r.Group, Log: r.Log, Error: r.Error, Notes: r.Notes}
		if r.Status != experiment.OK {
			row.Status = r.Status
		}
		for _, f := range shown {
			c := cell{Measured: "-"}
			if v, ok := r.Value(f.Key); ok {
				c.Measured = experiment.FormatRange(v, "")
			}
			if p, ok := r.Published[f.Key]; ok {
				c.Published = experiment.FormatNumber(p)
			}
			row.Cells = append(row.Cells, c)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
