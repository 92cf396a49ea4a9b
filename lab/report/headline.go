package report

import (
	"bytes"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// The files of the README's figures, from the root of the source tree.
const (
	headlineResults = "docs/results/lab.json"
	headlineAssets  = "docs/assets/headline"
	readme          = "README.md"
	markBegin       = "<!-- headline -->\n"
	markEnd         = "<!-- /headline -->"
)

// headlineCards is how many cards the README shows.
const headlineCards = 3

// headlinePictures are the pictures of the README: the first whose media query is true is
// shown, and the last has none.
var headlinePictures = []struct {
	file, media string
	columns     int
	colors      colors
}{
	{headlineAssets + "-narrow-dark.svg", "(max-width: 700px) and (prefers-color-scheme: dark)", 1, darkColors},
	{headlineAssets + "-narrow-light.svg", "(max-width: 700px)", 1, lightColors},
	{headlineAssets + "-dark.svg", "(prefers-color-scheme: dark)", headlineCards, darkColors},
	{headlineAssets + "-light.svg", "", headlineCards, lightColors},
}

// headlineWords explains words of the cards that new readers do not know.
var headlineWords = []struct{ word, meaning string }{
	{"do-not-track", "A [do-not-track policy](docs/how-to/do-not-track.md) keeps the traffic of chosen pods out of conntrack."},
	{"sync of", "A sync is the write of a change to the kernel, without the way from the API server. kube-proxy's is its faster mode's, by " +
		"its own metric."},
	{"metal", "Metal is the same server at its machine's own address, without CNI and Service."},
}

// WriteHeadline writes results into the source tree, and the pictures and the block of
// the README that are made from them.
func WriteHeadline(root string, run *experiment.Run) error {
	run = slim(run)
	files, err := headlineFiles(run)
	if err != nil {
		return err
	}
	if files[headlineResults], err = encode(run); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(root, readme))
	if err != nil {
		return fmt.Errorf("write headline: %w", err)
	}
	before, _, after, err := cutBlock(text)
	if err != nil {
		return err
	}
	files[readme] = bytes.Join([][]byte{before, files[readme], after}, nil)
	for name, content := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("write headline: %w", err)
		}
		if err := write(path, content); err != nil {
			return fmt.Errorf("write headline: %w", err)
		}
	}
	return nil
}

// slim returns a copy of a run with the summaries of its figures alone.
func slim(run *experiment.Run) *experiment.Run {
	out := *run
	out.Results = nil
	for _, res := range run.Results {
		var rows []experiment.RowResult
		for _, row := range res.Rows {
			row.Samples, row.Series, row.Distribution, row.Log = nil, nil, nil, ""
			rows = append(rows, row)
		}
		res.Rows = rows
		out.Results = append(out.Results, res)
	}
	return &out
}

// cutBlock splits the README at its markers, which stay with the outer parts.
func cutBlock(text []byte) (before, block, after []byte, err error) {
	i := bytes.Index(text, []byte(markBegin))
	j := bytes.Index(text, []byte(markEnd))
	if i < 0 || j < i {
		return nil, nil, nil, fmt.Errorf("write headline: %s has no line %q with a %q behind it", readme, strings.TrimSpace(markBegin), markEnd)
	}
	i += len(markBegin)
	return text[:i], text[i:j], text[j:], nil
}

// headlineFiles returns the README's block, under the README's name, and the pictures.
func headlineFiles(run *experiment.Run) (map[string][]byte, error) {
	var cards []*experiment.Card
	for _, res := range run.Results {
		if res.Card != nil && len(cards) < headlineCards {
			cards = append(cards, res.Card)
		}
	}
	if len(cards) < headlineCards {
		return nil, fmt.Errorf("write headline: %d of %d figures were measured", len(cards), headlineCards)
	}
	files := map[string][]byte{readme: []byte(headlineBlock(run, cards))}
	for _, p := range headlinePictures {
		files[p.file] = headlinePicture(cards, p.columns, p.colors)
	}
	return files, nil
}

// headlineBlock returns the README's text between the markers.
func headlineBlock(run *experiment.Run, cards []*experiment.Card) string {
	var b strings.Builder
	b.WriteString("<picture>\n")
	for _, p := range headlinePictures {
		if p.media != "" {
			fmt.Fprintf(&b, "<source media=\"%s\" srcset=\"%s\">\n", p.media, p.file)
		} else {
			fmt.Fprintf(&b, "<img src=\"%s\" alt=\"%s\">\n", p.file, html.EscapeString(headlineAlt(cards)))
		}
	}
	b.WriteString("</picture>\n\n")
	for _, c := range cards {
		fmt.Fprintf(&b, "- %s\n", strings.Replace(strings.ToUpper(c.Verdict[:1])+c.Verdict[1:], c.Number, "**"+c.Number+"**", 1))
	}
	b.WriteString("\n")
	form := ""
	if run.Quick {
		form = ", in its quick form"
	}
	commit := run.Versions["commit"]
	for _, w := range headlineWords {
		if strings.Contains(headlineAlt(cards), w.word) {
			b.WriteString(w.meaning + "\n")
		}
	}
	fmt.Fprintf(&b, "Measured by `spillway-lab lab run all`%s: %d cores, Linux %s, %s, commit %s ([all results](%s)).\n",
		form, run.Machine.Cores, kernelVersion(run.Machine.Kernel), run.Started.Format("2006-01-02"),
		commit[:min(len(commit), 7)], headlineResults)
	return b.String()
}

// kernelVersion leaves out what a distribution adds to a kernel's version.
func kernelVersion(release string) string {
	version, _, _ := strings.Cut(release, "-")
	return version
}

func headlineAlt(cards []*experiment.Card) string {
	var parts []string
	for _, c := range cards {
		parts = append(parts, c.Question+" "+c.Verdict+".")
	}
	return strings.Join(parts, " ")
}

// colors are those of style.css: a picture in a README has no style sheet.
type colors struct{ text, soft, spillway, other string }

var (
	lightColors = colors{text: "#1c2127", soft: "#56606b", spillway: "#1f6fb2", other: "#98a1ab"}
	darkColors  = colors{text: "#e4e8ec", soft: "#a3adb8", spillway: "#5b9de0", other: "#717b86"}
)

// headlinePicture draws the cards in columns. Its size is that of its text: a page shrinks
// it to fit, and does not enlarge it.
func headlinePicture(cards []*experiment.Card, columns int, col colors) []byte {
	const gap = 30.0
	var c canvas
	bottom := 0.0
	for i, row := 0, 0.0; i < len(cards); i, row = i+columns, bottom+gap {
		line := cards[i:min(i+columns, len(cards))]
		top := 0.0 // of the numbers: questions have different lengths
		for _, card := range line {
			top = max(top, float64(19*len(wrap(card.Question, 44))))
		}
		for k, card := range line {
			drawing, height := headlineCard(card, top)
			c.add(`<g transform="translate(%.0f %.0f)">%s</g>`+"\n", float64(k)*(width+gap), row, drawing)
			bottom = max(bottom, row+height)
		}
	}
	wide := float64(columns)*(width+gap) - gap
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" width="%[1]g" height="%[2]g" viewBox="0 0 %[1]g %[2]g" role="img" aria-label="%[3]s">
<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: %[4]s; }
.question { font-weight: 600; }
.number { font-size: 30px; font-weight: 700; fill: %[5]s; }
.soft { fill: %[6]s; }
.spillway { fill: %[5]s; } .other { fill: %[7]s; } .metal { fill: none; stroke: %[6]s; } .range { stroke: %[4]s; stroke-width: 1.5; }
</style>
%[8]s</svg>
`, wide, bottom, html.EscapeString(headlineAlt(cards)), col.text, col.spillway, col.soft, col.other, c.b.String())
	return out.Bytes()
}

// headlineCard draws a card with its number below top, and returns its height.
func headlineCard(card *experiment.Card, top float64) (drawing string, height float64) {
	const digit, bars = 20.0, 52.0 // width of a digit of the number, room for the number
	var c canvas
	for i, line := range wrap(card.Question, 44) {
		c.text(0, float64(16+19*i), "start", "question", line)
	}
	c.text(0, top+36, "start", "number", card.Number)
	x := digit*float64(len([]rune(card.Number))) + 8
	unit := wrap(card.Unit, int((width-x)/charWidth))
	for i, line := range unit {
		c.text(x, top+36-float64(17*(len(unit)-1-i)), "start", "soft", strings.TrimSpace(line))
	}
	var in canvas
	var list []bar
	for _, b := range card.Bars {
		list = append(list, bar{name: b.Name, class: classOf(b.Side), value: b.Value})
	}
	writeBars(&in, list, barScale(list, false))
	c.add(`<g transform="translate(0 %.0f)">%s</g>`, top+bars, in.b.String())
	return c.b.String(), top + bars + in.height
}
