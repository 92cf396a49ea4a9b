package kubeadm

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/test/cluster/clustertest"
	"spillway.dev/spillway/test/cluster/programs"
)

// document is docs/tutorials/kubeadm.md: its blocks of code by their headings. A test runs
// them as written, with values for the words in capitals.
type document struct {
	t      *testing.T
	blocks map[string][]string
	unused map[string]bool // texts of blocks
	values *strings.Replacer
}

// read reads the document. values replaces words.
func read(t *testing.T, values ...string) *document {
	t.Helper()
	root, err := programs.Root()
	clustertest.Must(t, err)
	text, err := os.ReadFile(filepath.Join(root, "docs/tutorials/kubeadm.md"))
	clustertest.Must(t, err)
	d := &document{t: t, blocks: map[string][]string{}, unused: map[string]bool{}, values: strings.NewReplacer(values...)}
	var heading string
	var block *strings.Builder
	for line := range strings.Lines(string(text)) {
		title, isHeading := strings.CutPrefix(line, "## ")
		switch {
		case strings.HasPrefix(line, "```") && block == nil:
			block = &strings.Builder{}
		case strings.HasPrefix(line, "```"):
			d.blocks[heading] = append(d.blocks[heading], block.String())
			d.unused[block.String()] = true
			block = nil
		case block != nil:
			block.WriteString(line)
		case isHeading:
			heading = strings.TrimSpace(title)
		}
	}
	return d
}

// block returns the i-th block below a heading. The text before the first has "".
func (d *document) block(heading string, i int) string {
	d.t.Helper()
	if i >= len(d.blocks[heading]) {
		d.t.Fatalf("docs/tutorials/kubeadm.md: %q has %d blocks of code, want more: headings are %q",
			heading, len(d.blocks[heading]), slices.Sorted(maps.Keys(d.blocks)))
	}
	text := d.blocks[heading][i]
	delete(d.unused, text)
	return d.values.Replace(text)
}

// wantAllUsed fails if the test ran only a part of what is below these headings.
func (d *document) wantAllUsed(headings ...string) {
	d.t.Helper()
	for _, heading := range headings {
		for _, text := range d.blocks[heading] {
			if d.unused[text] {
				d.t.Errorf("docs/tutorials/kubeadm.md: %q: no test runs this:\n%s", heading, text)
			}
		}
	}
}

// TestEveryHeadingHasATest finds blocks of code below a heading that no test names.
func TestEveryHeadingHasATest(t *testing.T) {
	tested := slices.Concat(newCluster, runningCluster)
	for heading := range read(t).blocks {
		if !slices.Contains(tested, heading) {
			t.Errorf("docs/tutorials/kubeadm.md: %q: no test runs its blocks of code", heading)
		}
	}
}
