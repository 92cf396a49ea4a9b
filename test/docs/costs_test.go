package docs

import (
	"regexp"
	"strings"
	"testing"
)

// TestCostsAreMeasured: each figure of the page about costs is one of the benchmarks.
func TestCostsAreMeasured(t *testing.T) {
	figure := regexp.MustCompile(`([0-9][0-9.,]*) (?:MiB|KB|ms|ns|s|%)(?:\W|$)`)
	docs := documents(t)
	measured := map[string]bool{}
	for _, number := range regexp.MustCompile(`[0-9][0-9.,]*`).FindAllString(docs["docs/reference/benchmarks.md"], -1) {
		measured[strings.TrimRight(number, ".,")] = true
	}
	figures := figure.FindAllStringSubmatch(docs["docs/explanation/costs.md"], -1)
	if len(figures) < 20 {
		t.Fatalf("%d figures: are they still found?", len(figures))
	}
	for _, m := range figures {
		if !measured[m[1]] {
			t.Errorf("docs/explanation/costs.md has %q, which docs/reference/benchmarks.md has not", m[0])
		}
	}
}
