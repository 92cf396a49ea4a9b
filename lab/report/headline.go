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
	headlineLight   = "docs/assets/headline-light.svg"
	headlineDark    = "docs/assets/headline-dark.svg"
	readme          = "README.md"
	markBegin       = "<!-- headline -->\n"
	markEnd         = "<!-- /headline -->"
)

// headlineCards is how many cards the README shows.
const headlineCards = 3

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
	return map[string][]byte{
		readme:        []byte(headlineBlock(run, cards)),
		headlineLight: headlinePicture(cards, lightColors),
		headlineDark:  headlinePicture(cards, darkColors),
	}, nil
}

// headlineBlock returns the README's text between the markers.
func headlineBlock(run *experiment.Run, cards []*experiment.Card) string {
	var b strings.Builder
	fmt.Fprintf(&b, `<picture>
<source media="(prefers-color-scheme: dark)" srcset="%s">
<img src="%s" width="100%%" alt="%s">
</picture>

`, headlineDark, headlineLight, html.EscapeString(headlineAlt(cards)))
	for _, c := range cards {
		fmt.Fprintf(&b, "- %s\n", strings.Replace(strings.ToUpper(c.Verdict[:1])+c.Verdict[1:], c.Number, "**"+c.Number+"**", 1))
	}
	b.WriteString("\n")
	form := ""
	if run.Quick {
		form = ", in its quick form"
	}
	commit := run.Versions["commit"]
	fmt.Fprintf(&b, "Measured by `spillway-lab lab run all`%s: %d cores, Linux %s, %s, commit %s ([all results](%s)).\n",
		form, run.Machine.Cores, kernelVersion(run.Machine.Kernel), run.Started.Format("2006-01-02"), commit[:min(len(commit), 7)], headlineResults)
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

// headlinePicture draws the cards side by side.
func headlinePicture(cards []*experiment.Card, col colors) []byte {
	const gap, top, numberChar = 30.0, 106.0, 20.0
	var c canvas
	height := 0.0
	for i, card := range cards {
		x := float64(i) * (width + gap)
		var in canvas
		y := 16.0
		for _, line := range wrap(card.Question, 44) {
			in.text(0, y, "start", "question", line)
			y += 19
		}
		in.add(`<text x="0" y="%.1f" class="number">%s<tspan class="soft" dx="8">%s</tspan></text>`, 96.0, html.EscapeString(card.Number), html.EscapeString(fit(card.Unit, width-numberChar*float64(len([]rune(card.Number))))))
		c.add(`<g transform="translate(%.0f 0)">%s<g transform="translate(0 %.0f)">`, x, in.b.String(), top)
		var bars canvas
		var list []bar
		for _, b := range card.Bars {
			list = append(list, bar{name: b.Name, class: classOf(b.Side), value: b.Value})
		}
		writeBars(&bars, list, barScale(list, false))
		c.add("%s</g></g>\n", bars.b.String())
		height = max(height, top+bars.height)
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" role="img" aria-label="%s">
<style>
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: %s; }
.question { font-weight: 600; }
.number { font-size: 30px; font-weight: 700; fill: %s; }
.soft { font-size: 13px; font-weight: 400; fill: %s; }
.spillway { fill: %s; } .other { fill: %s; } .metal { fill: none; stroke: %s; } .range { stroke: %s; stroke-width: 1.5; }
</style>
%s</svg>
`, 3*width+2*gap, height, html.EscapeString(headlineAlt(cards)), col.text, col.spillway, col.soft, col.spillway, col.other, col.soft, col.text, c.b.String())
	return out.Bytes()
}
