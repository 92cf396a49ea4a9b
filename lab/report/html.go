package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"html/template"
	"maps"
	"regexp"
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

// The addresses of the project and of its commits.
const (
	project = "https://spillway.dev"
	commits = "https://spillway.dev/spillway/commit/"
)

// section is one experiment on the page.
type section struct {
	experiment.Result
	CardPicture template.HTML
	Tables      []table
	Pictures    []*Picture
	Command     string
	Raw         template.HTML
}

// HTML returns the page. The url, if not "", is the address at which it will be found.
func HTML(run *experiment.Run, url string) ([]byte, error) {
	data := struct {
		Published                 bool // a card is there
		Run                       *experiment.Run
		URL, SocialCard           string
		Title, Description        string
		Style                     template.CSS
		Sections                  []section
		Versions                  []string
		Command, Date, Took       string
		Project, Commit, AtCommit string
	}{Run: run, URL: url, SocialCard: socialFile, Title: title(run), Description: description(run), Style: template.CSS(style),
		Versions: versions(run), Command: strings.Join(run.Command, " "),
		Date: run.Started.Format("2006-01-02 15:04 MST"), Took: took(run.Seconds), Project: project, Commit: run.Versions["commit"]}
	if commitRule.MatchString(data.Commit) {
		data.AtCommit = commits + data.Commit
	}
	if url != "" {
		data.SocialCard = strings.TrimSuffix(url, "index.html")
		data.SocialCard = strings.TrimSuffix(data.SocialCard, "/") + "/" + socialFile
	}
	for i := range run.Results {
		res := &run.Results[i]
		s := section{Result: *res, Tables: newTables(res), Command: commandOf(run, res)}
		if res.Card != nil {
			s.CardPicture = cardPicture(res.Card)
			data.Published = true
		}
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

var commitRule = regexp.MustCompile(`^[0-9a-f]{40}$`)

// title is the result of the run: what its first two cards claim.
func title(run *experiment.Run) string {
	var claims []string
	for _, res := range run.Results {
		if res.Card != nil && res.Card.Claim != "" && len(claims) < 2 {
			claims = append(claims, res.Card.Claim)
		}
	}
	if len(claims) == 0 {
		return "Published experiments, reproduced with Spillway"
	}
	return "Spillway " + strings.Join(claims, ", and ")
}

// description is what a link to the page shows below its title.
func description(run *experiment.Run) string {
	var parts []string
	for _, res := range run.Results {
		if res.Card != nil {
			parts = append(parts, res.Name+": "+res.Card.Verdict)
		}
	}
	return strings.Join(append(parts, run.Machine.String()), ". ") + "."
}

// cardPicture draws the bars of a card.
func cardPicture(card *experiment.Card) template.HTML {
	var list []bar
	for _, b := range card.Bars {
		list = append(list, bar{name: b.Name, class: classOf(b.Side), value: b.Value})
	}
	return drawBars(card.Caption, "", list, barScale(list, false))
}

// versions lists the programs of the run, "kube-proxy v1.36.3" and so on. The commit
// stands apart.
func versions(run *experiment.Run) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(run.Versions)) {
		if name != "commit" {
			out = append(out, name+" "+run.Versions[name])
		}
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
	Title string // "" for the only table of an experiment
	Head  []string
	Rows  []tableRow
}

type tableRow struct {
	Name, Group   string
	Cells         []cell
	Status, Error string // "" if it is ok
	Log           string
	Notes         []string
}

// cell is a figure: its median, and the lowest and the highest if they differ.
type cell struct{ Median, Low, High string }

// String is the cell in one line.
func (c cell) String() string {
	if c.Low == "" {
		return c.Median
	}
	return c.Median + " (" + c.Low + "–" + c.High + ")"
}

// newTables returns the tables of an experiment, one for each title in the order of the rows.
// There is one if there is no row.
func newTables(res *experiment.Result) []table {
	var out []table
	for first, i := 0, 1; i <= len(res.Rows); i++ {
		if i == len(res.Rows) || res.Rows[i].Table != res.Rows[first].Table {
			out = append(out, newTable(res.Figures, res.Rows[first:i]))
			first = i
		}
	}
	if len(out) == 0 {
		out = append(out, newTable(res.Figures, nil))
	}
	return out
}

// newTable leaves out figures that no row has. Published figures have a column of their
// own behind the measured ones.
func newTable(figures []experiment.Figure, rows []experiment.RowResult) table {
	t := table{Head: []string{"row"}}
	if len(rows) > 0 {
		t.Title = rows[0].Table
	}
	type column struct {
		key       string
		published bool
	}
	var shown []column
	for _, f := range figures {
		measured, published := false, false
		for i := range rows {
			_, ok := rows[i].Value(f.Key)
			_, has := rows[i].Published[f.Key]
			measured, published = measured || ok, published || has
		}
		if measured {
			shown, t.Head = append(shown, column{f.Key, false}), append(t.Head, f.Name+unitOf(f))
		}
		if published {
			shown, t.Head = append(shown, column{f.Key, true}), append(t.Head, "published "+f.Name)
		}
	}
	for i := range rows {
		r := &rows[i]
		row := tableRow{Name: r.Name, Group: r.Group, Log: r.Log, Error: r.Error, Notes: r.Notes}
		if r.Status != experiment.OK {
			row.Status = r.Status
		}
		for _, col := range shown {
			c := cell{Median: "-"}
			if p, ok := r.Published[col.key]; ok && col.published {
				c.Median = experiment.FormatNumber(p)
			} else if col.published {
				c.Median = ""
			} else if v, ok := r.Value(col.key); ok {
				c.Median = experiment.FormatNumber(v.Median)
				if v.Min != v.Max {
					c.Low, c.High = experiment.FormatNumber(v.Min), experiment.FormatNumber(v.Max)
				}
			}
			row.Cells = append(row.Cells, c)
		}
		t.Rows = append(t.Rows, row)
	}
	return t
}
