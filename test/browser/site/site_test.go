// Package site tests the site of the documents in chromium.
package site

import (
	"encoding/json"
	"fmt"
	"html"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/browser"
)

// inspect runs in a page of the site. It looks for a page that is wider than its window, for
// text that is not painted, and for anything fetched from another host.
const inspect = `<script>
addEventListener("load", () => {
  const bad = [];
  const wide = document.documentElement.scrollWidth;
  if (wide > innerWidth) bad.push("the page is " + wide + " wide in a window of " + innerWidth);
  for (const r of performance.getEntriesByType("resource"))
    if (new URL(r.name).host !== location.host) bad.push("fetches " + r.name);
  for (const i of document.images) if (!i.naturalWidth) bad.push("no image: " + i.src);
  const h1 = document.querySelector("article h1"), box = h1.getBoundingClientRect();
  const style = getComputedStyle(document.querySelector(".md-header"));
  if (style.position !== "sticky" && style.position !== "fixed") bad.push("no style sheet");
  const pre = document.createElement("pre");
  pre.id = "inspected";
  pre.textContent = JSON.stringify({path: location.pathname, width: innerWidth, title: h1.firstChild.textContent, seen: box.width > 50 && box.height > 10, bad,
    links: [...document.querySelectorAll(".md-nav a, .md-tabs a")].length});
  document.body.append(pre);
});
</script>`

type inspected struct {
	Path  string
	Width int
	Title string
	Seen  bool // the title is painted
	Bad   []string
	Links int // of the navigation
}

// TestTheSite builds the site, which fails on a broken link, and opens pages in a browser as
// wide as a desktop's window and as a telephone.
func TestTheSite(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: builds the site and opens it in a browser")
	}
	dir := t.TempDir()
	build := exec.Command("../../../hack/docs/build", dir)
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the site: %v\n%s", err, out)
	}
	wantWholeWords(t, filepath.Join(dir, "search", "search_index.json"))
	server := httptest.NewServer(siteHandler(dir))
	defer server.Close()
	frames := server.URL + "/?" + url.Values{"frame": slices.Collect(maps.Keys(titles))}.Encode()
	dom := browser.Run(t, "--window-size=1400,1000", "--virtual-time-budget=10000", "--dump-dom", frames)
	reports := regexp.MustCompile(`(?s)<pre id="inspected">(.*?)</pre>`).FindAllStringSubmatch(dom, -1)
	if len(reports) != 2*len(titles) {
		t.Fatalf("%d pages were inspected, want %d: %.2000s", len(reports), 2*len(titles), dom)
	}
	for _, r := range reports {
		var got inspected
		if err := json.Unmarshal([]byte(html.UnescapeString(r[1])), &got); err != nil {
			t.Fatal(err)
		}
		if got.Title != titles[got.Path] || !got.Seen || got.Links < 10 || len(got.Bad) > 0 {
			t.Errorf("%s: want title %q: %+v", got.Path, titles[got.Path], got)
		}
	}
	if to := os.Getenv("SPILLWAY_SCREENSHOTS"); to != "" {
		browser.Run(t, "--window-size=1800,16000", "--virtual-time-budget=10000", "--screenshot="+filepath.Join(to, "site.png"), frames)
	}
}

// wantWholeWords splits texts as the search of the site does: punctuation is no part of a word.
func wantWholeWords(t *testing.T, file string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var index struct {
		Config struct{ Separator string }
		Docs   []struct{ Text string }
	}
	if err := json.Unmarshal(text, &index); err != nil {
		t.Fatal(err)
	}
	separator := regexp.MustCompile(index.Config.Separator)
	found := map[string]int{}
	for _, d := range index.Docs {
		for _, word := range separator.Split(d.Text, -1) {
			found[word]++
		}
	}
	for _, word := range []string{"Istio", "Linkerd", "10.96.0.10", "conntrack", "kube"} {
		if found[word] == 0 {
			t.Errorf("the search does not find %q: is it a word by the separator %q?", word, separator)
		}
	}
	for word := range found {
		if strings.HasPrefix(word, "(") || strings.HasSuffix(word, ",") {
			t.Errorf("the search has the word %q", word)
		}
	}
}

// titles are the titles of pages of each kind.
var titles = map[string]string{
	"/":                        "Spillway",
	"/runbooks/SpillwayDrops/": "SpillwayDrops",
	"/runbooks/stalls/":        "Users see stalls of 1 s, 3 s or 5 s",
	"/reference/limits/":       "Limits and differences from kube-proxy",
}

// siteHandler serves the site in dir, each page with inspect. The parameter frame asks for a
// page that shows others in two widths: a window narrower than 500 is not given, a frame is.
func siteHandler(dir string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if pages := r.URL.Query()["frame"]; pages != nil {
			fmt.Fprint(w, `<body style="margin:0">`)
			for _, page := range pages {
				for _, width := range []int{1280, 390} {
					fmt.Fprintf(w, `<iframe src="%s" width="%d" height="1900" style="border:0"></iframe>`, html.EscapeString(page), width)
				}
			}
			fmt.Fprint(w, `<script>addEventListener("load", () => setTimeout(() => {
for (const f of [...document.querySelectorAll("iframe")]) document.body.append(f.contentDocument.getElementById("inspected").cloneNode(true));
}, 500));</script>`)
			return
		}
		path := filepath.Join(dir, filepath.FromSlash(r.URL.Path))
		if !strings.HasSuffix(r.URL.Path, "/") {
			http.ServeFile(w, r, path)
			return
		}
		page, err := os.ReadFile(filepath.Join(path, "index.html"))
		if err != nil {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, strings.Replace(string(page), "</body>", inspect+"</body>", 1))
	})
}
