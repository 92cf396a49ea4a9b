package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestEveryMapHasARow: a reader of bpftool's output looks up each map of bpf/maps.h in the reference.
func TestEveryMapHasARow(t *testing.T) {
	header, err := os.ReadFile(filepath.Join(root, "bpf/maps.h"))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(root, "docs/reference/ebpf-maps.md"))
	if err != nil {
		t.Fatal(err)
	}
	// Later sections have tables of some maps.
	tables, _, found := strings.Cut(string(page), "\n## Flags\n")
	if !found {
		t.Fatal("docs/reference/ebpf-maps.md has no heading Flags behind its tables of maps")
	}
	maps := definedMaps(string(header))
	if len(maps) < 45 {
		t.Fatalf("%d maps in bpf/maps.h: are they still found?", len(maps))
	}
	for _, name := range maps {
		if !strings.Contains(tables, "\n| `"+name+"` ") {
			t.Errorf("docs/reference/ebpf-maps.md has no row for the map %s of bpf/maps.h: add one", name)
		}
	}
}

// definedMaps returns the names of the maps that a header defines, by a macro or by a struct.
func definedMaps(header string) (names []string) {
	for _, m := range regexp.MustCompile(`(?m)^(?:[A-Z_]+\((\w+),|} (\w+) SEC\("\.maps"\))`).FindAllStringSubmatch(header, -1) {
		names = append(names, m[1]+m[2])
	}
	return names
}
