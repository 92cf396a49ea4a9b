package report

import (
	"bytes"
	"encoding/json"
	"image"
	_ "image/png"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/net/html"

	"spillway.dev/spillway/lab/experiment"
)

// sampleRun has all parts of a report: all kinds of charts, long names, rows of every
// status, texts that look like HTML.
func sampleRun() *experiment.Run {
	row := func(name, group string, x float64, samples ...float64) experiment.RowResult {
		return experiment.RowResult{Name: name, Group: group, X: x, Status: experiment.OK,
			Values: map[string]experiment.Summary{"rate": experiment.Summarize(samples)},
			Distribution: []experiment.Point{{X: 0, Y: 50 + x/100}, {X: 50, Y: 120 + x/50}, {X: 90, Y: 300 + x/10}, {X: 99, Y: 2400 + x},
				{X: 99.9, Y: 26000 + x}},
			Series: map[string][]experiment.Point{"entries": {{X: 0, Y: 0}, {X: 1, Y: x / 2}, {X: 2, Y: x}, {X: 3, Y: x * 0.9}}}}
	}
	res := experiment.Result{Name: "sample", Title: "A sample of everything", Question: "Is <all> of it & more shown?",
		Published: "8500, then 1000.", Sources: []experiment.Source{{Title: "Where", URL: "https://example.test/a"}},
		Scale:   "Smaller.",
		Figures: []experiment.Figure{{Key: "rate", Name: "transfers", Unit: "per s", Better: "higher"}, {Key: "none", Name: "never measured"}},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "Transfers", Figure: "rate"},
			{Kind: experiment.Bars, Title: "Transfers, logarithmic", Figure: "rate", LogY: true},
			{Kind: experiment.Lines, Title: "Against size", Figure: "rate", XName: "Services", LogX: true, LogY: true},
			{Kind: experiment.Latency, Title: "Latency"},
			{Kind: experiment.Over, Title: "Entries over time", Series: "entries"},
			{Kind: experiment.Bars, Title: "Nothing to show", Figure: "none"},
		},
		Rows: []experiment.RowResult{
			row("metal", "Spillway", 100, 8213, 8491, 8650),
			row("a name that is much longer than any row should have, so that it must be cut somewhere & somehow", "Spillway", 1000, 912),
			row("kube-proxy", "kube-proxy", 100, 4100, 3000, 5200),
			row("kube-proxy, larger", "kube-proxy", 50000, 41, 30, 52),
			{Name: "broken <b>", Status: experiment.Failed, Error: "start agent: no", Log: "last </script><b>words"},
			{Name: "peer", Status: experiment.NotBuilt, Error: "run \"make peers\""},
		},
		Conclusion: []string{"It was measured."},
		Card: &experiment.Card{Question: "Is <all> of it shown?", Number: "8,491", Unit: "transfers/s",
			Verdict: "8,491 transfers/s; kube-proxy 4,100",
			Claim:   "transfers 8,491 & more", Published: "8,500, then 1,000", Caption: "transfers/s", Bars: []experiment.CardBar{
				{Name: "Spillway", Side: experiment.Spillway, Value: experiment.Summarize([]float64{8213, 8491, 8650})},
				{Name: "metal", Side: experiment.Metal, Value: experiment.Summarize([]float64{9000})},
				{Name: "kube-proxy", Value: experiment.Summarize([]float64{4100, 3000, 5200})}}},
	}
	res.Rows[0].Side, res.Rows[1].Side = experiment.Metal, experiment.Spillway
	res.Rows[0].Published = map[string]float64{"rate": 8500}
	res.Rows[1].Published = map[string]float64{"rate": 1000}
	res.Rows[2].Notes = []string{"The generator was busy."}
	return &experiment.Run{Format: experiment.Format, Machine: experiment.Machine{Kernel: "6.1", Arch: "x86_64", CPU: "A CPU", Cores: 2},
		Versions: map[string]string{"spillway": "v1", "kube-proxy": "v1.36"}, Command: []string{"spillway-lab", "lab", "run", "sample"},
		Quick: true, Started: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Seconds: 61, Results: []experiment.Result{res}}
}

func TestWriteMakesAllFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made")
	path, err := Write(dir, sampleRun(), "")
	if err != nil {
		t.Fatal(err)
	}
	if path != filepath.Join(dir, "index.html") {
		t.Errorf("path is %s", path)
	}
	for _, name := range []string{"results.json", "sample.json"} {
		got, err := experiment.ReadRun(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(sampleRun(), got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	picture, err := os.ReadFile(filepath.Join(dir, socialFile))
	if err != nil {
		t.Fatal(err)
	}
	if c, form, err := image.DecodeConfig(bytes.NewReader(picture)); err != nil || form != "png" || c.Width != 1200 || c.Height != 630 {
		t.Errorf("%s: %s of %d by %d: %v", socialFile, form, c.Width, c.Height, err)
	}
	if left, _ := filepath.Glob(dir + "/*.new"); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
	md, err := os.ReadFile(dir + "/report.md")
	for _, want := range []string{"# Spillway transfers 8,491 & more\n", "| metal | 8,491 (8,213–8,650) | 8,500 |", "**failed**",
		"**not built**", "last </script>", "[Where](https://example.test/a)"} {
		if err != nil || !strings.Contains(string(md), want) {
			t.Errorf("report.md lacks %q (%v)", want, err)
		}
	}
}

// Services that show a picture for a link accept no relative address.
func TestALinkToThePageHasAPicture(t *testing.T) {
	for url, want := range map[string]string{"": `og:image" content="card.png"`,
		"https://example.test/run/":           `og:image" content="https://example.test/run/card.png"`,
		"https://example.test/run/index.html": `og:image" content="https://example.test/run/card.png"`} {
		page, err := HTML(sampleRun(), url)
		if err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(string(page), want) || strings.Contains(string(page), `og:url"`) != (url != "") {
			t.Errorf("at %q the page lacks %q", url, want)
		}
	}
}

// Another run must not destroy the results of a finished one.
func TestTheReportOfAnotherRunIsKept(t *testing.T) {
	dir := t.TempDir()
	first, second := sampleRun(), sampleRun()
	second.Started = second.Started.Add(time.Hour)
	second.Results[0].Name = "other"
	foreign := filepath.Join(dir, "mine.json")
	if err := os.WriteFile(foreign, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, run := range []*experiment.Run{first, first, second, second} {
		if _, err := Write(dir, run, ""); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]*experiment.Run{"results.json": second, "other.json": second,
		Previous + "/results.json": first, Previous + "/sample.json": first} {
		got, err := experiment.ReadRun(filepath.Join(dir, path))
		if err != nil || !got.Started.Equal(want.Started) {
			t.Errorf("%s: %v", path, err)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "sample.json")); err == nil {
		t.Error("a file of the run before stands beside those of this one")
	}
	if _, err := os.Stat(foreign); err != nil {
		t.Error("a file of another program is gone")
	}
}

func TestCurvesOfOneSideDiffer(t *testing.T) {
	run := sampleRun()
	res := &run.Results[0]
	for len(res.Rows) < 14 {
		res.Rows = append(res.Rows, res.Rows[2])
		res.Rows[len(res.Rows)-1].Name = "kube-proxy " + strconv.Itoa(len(res.Rows))
	}
	seen := map[string]bool{}
	p := draw(experiment.Chart{Kind: experiment.Latency}, res)
	for _, e := range p.Panels[0].Legend {
		if seen[e.Class] {
			t.Errorf("two curves are %q", e.Class)
		}
		seen[e.Class] = true
	}
	if len(seen) != 12 {
		t.Errorf("%d curves", len(seen))
	}
}

// Rows of one case stand in one small picture. A case without any loss is a sentence, and
// published figures are never in the picture of measured ones.
func TestSmallMultiples(t *testing.T) {
	row := func(name string, v float64) experiment.RowResult {
		return experiment.RowResult{Name: name, Status: experiment.OK,
			Values: map[string]experiment.Summary{"lost": experiment.Summarize([]float64{v})}}
	}
	res := &experiment.Result{Figures: []experiment.Figure{{Key: "lost", Name: "lost"}}, Rows: []experiment.RowResult{
		row("TCP: A", 0), row("TCP: B", 0), row("few ports: A", 43), row("few ports: B", 0.5), row("DNS: A", 0), row("DNS: B", 0)}}
	res.Rows[2].Published = map[string]float64{"lost": 4321}
	chart := experiment.Chart{Kind: experiment.Bars, Title: "Lost", Figure: "lost"}
	p := draw(chart, res)
	if len(p.Panels) != 2 || p.Panels[0].Name != "few ports" || p.Zero != "0 in every row of: TCP; DNS." {
		t.Fatalf("%q, %d panels: %+v", p.Zero, len(p.Panels), p.Panels)
	}
	if strings.Contains(string(p.Panels[0].SVG), "4,321") || !strings.Contains(string(p.Panels[1].SVG), "4,321") {
		t.Error("the published figure is not in a panel of its own")
	}
	for i := range res.Rows {
		res.Rows[i].Values["lost"] = experiment.Summarize([]float64{0})
	}
	if p = draw(chart, res); len(p.Panels) != 0 || p.Zero != "0 in every row." {
		t.Errorf("of bars that are all 0: %q, %d panels", p.Zero, len(p.Panels))
	}
}

// The page must be self-contained, and its raw data must be the results, whatever the
// texts are.
func TestPageIsSelfContainedAndHoldsTheRawData(t *testing.T) {
	page, err := HTML(sampleRun(), "")
	if err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`(?i)(src=|@import|url\(|<link|<iframe)[^>]{0,40}`).Find(page); m != nil {
		t.Errorf("the page needs something else: %s", m)
	}
	doc, err := html.Parse(strings.NewReader(string(page)))
	if err != nil {
		t.Fatal(err)
	}
	var raw string
	svgs, bold := 0, 0
	for n := range doc.Descendants() {
		switch {
		case n.Type == html.ElementNode && n.Data == "script":
			raw = n.FirstChild.Data
		case n.Type == html.ElementNode && n.Data == "svg" && slices.Contains(n.Attr, html.Attribute{Key: "role", Val: "img"}):
			svgs++
		case n.Type == html.ElementNode && n.Data == "b" && n.FirstChild != nil && strings.Contains(n.FirstChild.Data, "words"):
			bold++
		}
	}
	var got experiment.Run
	if err := json.Unmarshal([]byte(raw), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sampleRun(), &got); diff != "" {
		t.Errorf("raw data (-want +got):\n%s", diff)
	}
	if svgs != 8 { // a card, two charts of bars with published figures beside them, three of lines
		t.Errorf("%d pictures, want 8: what has nothing to show is left out", svgs)
	}
	if bold != 0 {
		t.Error("a log became HTML")
	}
	for _, want := range []string{"spillway-lab lab run sample --quick", "prefers-color-scheme: dark", "@media print",
		"<title>Spillway transfers 8,491 &amp; more</title>", "published transfers", "start agent: no", "The generator was busy."} {
		if !strings.Contains(string(page), want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if strings.Contains(string(page), "never measured</th>") {
		t.Error("a figure that no row has is in the table")
	}
}

func TestScale(t *testing.T) {
	tests := []struct {
		name   string
		values []float64
		log    bool
		want   []string
	}{
		{"linear", []float64{3, 87}, false, []string{"0", "50", "100"}},
		{"decades", []float64{100, 50000}, true, []string{"100", "1,000", "10k", "100k"}},
		{"one decade", []float64{12, 80}, true, []string{"10", "20", "50", "100"}},
		{"zero has no place", []float64{0, 0.03, 0.2}, true, []string{"0.02", "0.05", "0.1", "0.2"}},
		{"nothing", nil, true, []string{"0.1", "0.2", "0.5", "1"}},
		{"one value", []float64{5}, true, []string{"5", "10", "20", "50"}},
		{"all zero", []float64{0}, false, []string{"0", "0.5", "1"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := newScale(tt.values, tt.log, 0, 100)
			_, names := s.ticks()
			if diff := cmp.Diff(tt.want, names); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			for _, v := range append(tt.values, -1, 1e12) {
				if at := s.at(v); !(at >= 0 && at <= 100) {
					t.Errorf("%v is at %v, outside of the paper", v, at)
				}
			}
		})
	}
}

func TestText(t *testing.T) {
	var b strings.Builder
	if err := Text(&b, sampleRun()); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ROW", "8,491 (8,213–8,650)", "failed: start agent: no", "not built: run \"make peers\""} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("lacks %q:\n%s", want, b.String())
		}
	}
}

// Long names, errors and headings wrap, and figures that do not fit are left out.
func TestTextFitsATerminal(t *testing.T) {
	row := func(name, status, failure string, values ...float64) experiment.RowResult {
		r := experiment.RowResult{Name: name, Status: status, Error: failure, Values: map[string]experiment.Summary{}}
		for i, v := range values {
			r.Values[strconv.Itoa(i)] = experiment.Summarize([]float64{v, 2 * v})
		}
		return r
	}
	res := experiment.Result{Name: "narrow", Title: strings.Repeat("a long title ", 10), Rows: []experiment.RowResult{
		row("short", experiment.OK, "", 1, 22222, 3, 4, 5, 6, 7),
		row("a name that is longer than its column is wide, and also "+strings.Repeat("w", 50), experiment.OK, "", 1234567, 2),
		row("failed", experiment.Failed, strings.Repeat("a long error ", 20)+"\nin two lines"),
	}}
	for i := range 7 {
		res.Figures = append(res.Figures, experiment.Figure{Key: strconv.Itoa(i), Name: "figure number " + strconv.Itoa(i), Unit: "ms"})
	}
	var b strings.Builder
	if err := Text(&b, &experiment.Run{Results: []experiment.Result{res}}); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimRight(line, "\n")); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
	for want, there := range map[string]bool{"NUMBER 0,": true, "1,851,850": true, "NUMBER 6,": false, "in two lines": true} {
		if strings.Contains(b.String(), want) != there {
			t.Errorf("%q is there: %v, want %v:\n%s", want, !there, there, b.String())
		}
	}
}

func TestVerdictsFitATerminal(t *testing.T) {
	run := sampleRun()
	run.Results = append(run.Results, experiment.Result{Name: "tftp-nodeport",
		Error: "a program is missing\n" + strings.Repeat("install it ", 20)},
		experiment.Result{Name: "none"})
	var b strings.Builder
	if err := Verdicts(&b, run); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	if len(lines) != len(run.Results) {
		t.Errorf("%d lines for %d experiments:\n%s", len(lines), len(run.Results), b.String())
	}
	for i, want := range []string{"8,491 transfers/s; kube-proxy 4,100", "not measured: a program is missing; install", "not measured"} {
		if n := utf8.RuneCountInString(lines[i]); n > 80 || !strings.Contains(lines[i], want) {
			t.Errorf("%d columns, want %q: %s", n, want, lines[i])
		}
	}
}

// The README shows what the committed results say.
func TestHeadlineIsCurrent(t *testing.T) {
	const root = "../.."
	const again = "run \"spillway-lab lab headline docs/results/lab.json\""
	run, err := experiment.ReadRun(filepath.Join(root, headlineResults))
	if err != nil {
		t.Fatal(err)
	}
	files, err := headlineFiles(run)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(root, name))
		if err == nil && name == readme {
			_, got, _, err = cutBlock(got)
		}
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s is not what the results give (-want +got): %s\n%s", name, again, diff)
		}
	}
}

// Rows with titles are in tables of their own, each with its own figures alone.
func TestRowsOfTwoTitlesAreTwoTables(t *testing.T) {
	run := sampleRun()
	res := &run.Results[0]
	for i := range res.Rows {
		res.Rows[i].Table = "First <table>"
		if i > 1 {
			res.Rows[i].Table = "Second table"
		}
	}
	res.Rows[1].Values["none"] = experiment.Summarize([]float64{7})
	tables := newTables(res)
	if len(tables) != 2 || len(tables[0].Rows) != 2 || len(tables[1].Rows) != len(res.Rows)-2 {
		t.Fatalf("tables: %+v", tables)
	}
	if diff := cmp.Diff([]string{"row", "transfers, per s", "published transfers", "never measured"}, tables[0].Head); diff != "" {
		t.Errorf("head of the first table (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"row", "transfers, per s"}, tables[1].Head); diff != "" {
		t.Errorf("head of the second table (-want +got):\n%s", diff)
	}
	page, err := HTML(run, "")
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := Text(&text, run); err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]struct{ text, first, second string }{
		"page":     {string(page), "First &lt;table&gt;</h4>", "Second table</h4>"},
		"markdown": {Markdown(run), "### First <table>\n", "### Second table\n"},
		"terminal": {text.String(), "\nFirst <table>\nROW", "\nSecond table\nROW"},
	} {
		first, second := strings.Index(got.text, got.first), strings.Index(got.text, got.second)
		if first < 0 || second < first || !strings.Contains(got.text[second:], "kube-proxy, larger") {
			t.Errorf("%s: titles at %d and %d", name, first, second)
		}
	}
}

// An experiment without rows has the head of a table.
func TestNoRowsAreOneTable(t *testing.T) {
	if got := newTables(&experiment.Result{}); len(got) != 1 || len(got[0].Rows) != 0 || got[0].Title != "" {
		t.Errorf("tables: %+v", got)
	}
}
