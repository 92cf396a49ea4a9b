package report

import (
	"encoding/json"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/net/html"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/browser"
)

// inspect runs in the page. It looks for texts that cover each other or extend beyond
// their picture, and for a page that is wider than its window.
const inspect = `<script>
addEventListener("load", () => {
  const bad = [];
  for (const d of document.querySelectorAll("details")) d.open = true;
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, r] of texts)
      if (r.left < frame.left - 1 || r.right > frame.right + 1 || r.top < frame.top - 1 || r.bottom > frame.bottom + 1)
        bad.push(svg.getAttribute("aria-label") + ": outside: " + text);
    texts.forEach(([a, r], i) => texts.slice(i + 1).forEach(([b, s]) => {
      if (r.left < s.right - 1 && s.left < r.right - 1 && r.top < s.bottom - 3 && s.top < r.bottom - 3)
        bad.push(svg.getAttribute("aria-label") + ": " + a + " covers " + b);
    }));
  }
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) bad.push("the page is " + wide + " wide in a window of " + innerWidth);
  const pre = document.createElement("pre");
  pre.id = "inspected";
  const scrolled = [...document.querySelectorAll(".table")].filter(t => t.scrollWidth > t.clientWidth + 1).length;
  const sizes = [...document.querySelectorAll(".table *")].map(e => parseFloat(getComputedStyle(e).fontSize));
  pre.textContent = JSON.stringify({texts: document.querySelectorAll("svg text").length, bad, scrolled, smallest: Math.min(...sizes)});
  document.body.append(pre);
});
</script>`

type inspected struct {
	Texts    int
	Bad      []string
	Scrolled int     // tables of which not all is seen
	Smallest float64 // CSS pixels of the smallest text in a table
}

// look opens a page in a window of a width and returns its faults.
func look(t *testing.T, page string, width int) inspected {
	t.Helper()
	path := filepath.Join(t.TempDir(), "inspect.html")
	if err := os.WriteFile(path, []byte(strings.Replace(page, "</body>", inspect+"</body>", 1)), 0o644); err != nil {
		t.Fatal(err)
	}
	// A window narrower than 500 is not given; a frame in it is.
	frame := filepath.Join(filepath.Dir(path), "frame.html")
	if err := os.WriteFile(frame, fmt.Appendf(nil, `<iframe id="f" src="inspect.html" width="%d" height="900" style="border:0"></iframe>
<script>addEventListener("load", () => setTimeout(() => document.body.append(document.getElementById("f").contentDocument.getElementById("inspected").cloneNode(true)), 200));</script>`, width), 0o644); err != nil {
		t.Fatal(err)
	}
	dom := browser.Run(t, "--allow-file-access-from-files", "--virtual-time-budget=3000", "--window-size=1400,1000",
		"--dump-dom", "file://"+frame)
	m := regexp.MustCompile(`(?s)<pre id="inspected">(.*?)</pre>`).FindStringSubmatch(dom)
	if m == nil {
		t.Fatalf("the page was not inspected: %.2000s", dom)
	}
	var got inspected
	if err := json.Unmarshal([]byte(html.UnescapeString(m[1])), &got); err != nil {
		t.Fatal(err)
	}
	return got
}

func TestPageInABrowser(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens reports of the lab in a browser")
	}
	page, err := HTML(sampleRun(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, width := range []int{1200, 390, 360} {
		got := look(t, string(page), width)
		if len(got.Bad) > 0 || got.Texts < 50 {
			t.Errorf("at a width of %d, %d texts: %s", width, got.Texts, strings.Join(got.Bad, "\n"))
		}
	}
	// The inspection itself must find faults.
	broken := strings.Replace(string(page), "<main>", `<main><div style="width:3000px">x</div>`, 1)
	broken = strings.Replace(broken, "</svg>", `<text x="10" y="50">one</text><text x="12" y="52">two</text></svg>`, 1)
	if got := look(t, broken, 1200); len(got.Bad) < 2 {
		t.Errorf("a page that is too wide, with texts that cover each other, was found well: %v", got.Bad)
	}
}

// The README's picture is an image: a page scales it with its text.
func TestTheHeadlineIsReadable(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens reports of the lab in a browser")
	}
	run, err := experiment.ReadRun("../../" + headlineResults)
	if err != nil {
		t.Fatal(err)
	}
	files, err := headlineFiles(run)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range headlinePictures {
		// Widths of text on GitHub, in CSS pixels, and the least size of its letters.
		page, least := 838.0, 10.0
		if strings.Contains(p.media, "max-width") {
			page, least = 358, 13
		}
		var width float64
		if _, err := fmt.Sscanf(string(files[p.file]), `<svg xmlns="http://www.w3.org/2000/svg" width="%g"`, &width); err != nil {
			t.Fatal(err)
		}
		if size := 13 * min(page/width, 1); size < least {
			t.Errorf("%s: letters of %.1f pixels, want %.0f", p.file, size, least)
		}
		got := look(t, "<!doctype html><html><body>"+string(files[p.file])+"</body></html>", int(width)+20)
		if len(got.Bad) > 0 || got.Texts < 20 {
			t.Errorf("%s, %d texts: %s", p.file, got.Texts, strings.Join(got.Bad, "\n"))
		}
	}
}

// Paper does not scroll: a table of twelve columns must have room on it. The rules
// for paper are applied to a window as wide as a page.
func TestAWideTableFitsOnPaper(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens reports of the lab in a browser")
	}
	run := sampleRun()
	res := &run.Results[0]
	for _, name := range []string{"failed", "over 1 s", "p50", "p99", "most entries", "in a pod", "most expectations", "insert_failed", "drop",
		"early_drop", "kernel log lines"} {
		res.Figures = append(res.Figures, experiment.Figure{Key: name, Name: name, Unit: "%"})
		for i := range res.Rows {
			if res.Rows[i].Values != nil {
				res.Rows[i].Values[name] = experiment.Summarize([]float64{123456, 234567})
			}
		}
	}
	page, err := HTML(run, "")
	if err != nil {
		t.Fatal(err)
	}
	if got := look(t, string(page), 360); got.Scrolled != 1 || len(got.Bad) > 0 {
		t.Errorf("on a telephone %d tables are scrolled, want 1: %s", got.Scrolled, strings.Join(got.Bad, "\n"))
	}
	const paper = 700              // CSS pixels between the margins of A4
	const readable = 8 * 96 / 72.0 // 8 pt in CSS pixels
	got := look(t, strings.ReplaceAll(string(page), "@media print", "@media all"), paper)
	if got.Scrolled != 0 || len(got.Bad) > 0 {
		t.Errorf("on paper not all of %d tables is seen: %s", got.Scrolled, strings.Join(got.Bad, "\n"))
	}
	if got.Smallest < readable-0.01 {
		t.Errorf("on paper a table has text of %.1f pixels, want %.1f", got.Smallest, readable)
	}
}

// Screen readers and keyboards: axe-core finds no fault in the page, closed and open, in
// light and dark.
func TestPageIsAccessible(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens reports of the lab in a browser")
	}
	page, err := HTML(sampleRun(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		page string
		args []string
	}{
		{"closed", string(page), nil},
		{"open", strings.ReplaceAll(string(page), "<details", "<details open"), nil},
		{"dark", strings.ReplaceAll(string(page), "<details", "<details open"), []string{"--blink-settings=preferredColorScheme=0"}},
	} {
		if faults := axe(t, tt.page, tt.args...); len(faults) > 0 {
			t.Errorf("%s: %s", tt.name, strings.Join(faults, "\n"))
		}
	}
	// The check itself must find faults.
	broken := strings.Replace(string(page), "<main>", `<main><img src="x.png"><p style="color:#ccc;background:#fff">pale</p>`, 1)
	if faults := axe(t, broken); len(faults) < 2 {
		t.Errorf("a page with a picture without a name, and pale text, was found well: %v", faults)
	}
}

// axe returns the faults that axe-core finds in a page.
func axe(t *testing.T, page string, args ...string) []string {
	t.Helper()
	dir := t.TempDir()
	const run = `<script src="axe.js"></script><script>
addEventListener("load", () => axe.run().then(r => {
  const pre = document.createElement("pre");
  pre.id = "found";
  pre.textContent = JSON.stringify({passes: r.passes.length, faults: r.violations.flatMap(v => v.nodes.map(n => v.id + ": " + n.html.slice(0, 200) + ": " + n.failureSummary))});
  document.body.append(pre);
}));
</script></body>`
	for name, text := range map[string]string{"axe.js": browser.Axe(t), "page.html": strings.Replace(page, "</body>", run, 1)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	dom := browser.Run(t, append(args, "--allow-file-access-from-files", "--virtual-time-budget=20000", "--window-size=1000,2000",
		"--dump-dom", "file://"+dir+"/page.html")...)
	m := regexp.MustCompile(`(?s)<pre id="found">(.*?)</pre>`).FindStringSubmatch(dom)
	if m == nil {
		t.Fatalf("axe-core did not report: %.1000s", dom)
	}
	var found struct {
		Passes int
		Faults []string
	}
	if err := json.Unmarshal([]byte(html.UnescapeString(m[1])), &found); err != nil {
		t.Fatal(err)
	}
	if found.Passes < 10 {
		t.Errorf("axe-core checked only %d rules", found.Passes)
	}
	return found.Faults
}

// TestScreenshot checks the painted text and bars, in light and dark.
func TestScreenshot(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: opens reports of the lab in a browser")
	}
	dir := t.TempDir()
	path, err := Write(dir, sampleRun(), "")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		args []string
		page color.RGBA // the background, --page of style.css
		bar  color.RGBA // --spillway
	}{
		{"light", nil, color.RGBA{0xff, 0xff, 0xff, 0xff}, color.RGBA{0x1f, 0x6f, 0xb2, 0xff}},
		{"dark", []string{"--blink-settings=preferredColorScheme=0", "--force-dark-mode"}, color.RGBA{0x14, 0x18, 0x1d, 0xff},
			color.RGBA{0x5b, 0x9d, 0xe0, 0xff}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			shot := filepath.Join(dir, tt.name+".png")
			browser.Run(t, append(tt.args, "--window-size=1000,2600", "--screenshot="+shot, "file://"+path)...)
			f, err := os.Open(shot)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			img, err := png.Decode(f)
			if err != nil {
				t.Fatal(err)
			}
			page, bars, others := count(img, tt.page, tt.bar)
			total := img.Bounds().Dx() * img.Bounds().Dy()
			if page < total/2 || bars < 1000 || others < total/100 {
				t.Errorf("of %d pixels %d are page, %d bars and %d others", total, page, bars, others)
			}
		})
	}
	if to := os.Getenv("SPILLWAY_SCREENSHOTS"); to != "" {
		if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
			t.Error(err)
		}
	}
}

func count(img image.Image, page, bar color.RGBA) (pages, bars, others int) {
	b := img.Bounds()
	for y := b.Min.Y; y < b.Max.Y; y++ {
		for x := b.Min.X; x < b.Max.X; x++ {
			switch color.RGBAModel.Convert(img.At(x, y)) {
			case page:
				pages++
			case bar:
				bars++
			default:
				others++
			}
		}
	}
	return pages, bars, others
}
