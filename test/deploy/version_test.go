package deploy

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// version returns the content of the file VERSION.
func version(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "VERSION"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(text))
}

func TestTheChartHasTheVersion(t *testing.T) {
	m, want := load(t).Metadata, version(t)
	if m.Version != want || m.AppVersion != want {
		t.Errorf("Chart.yaml has version %s and appVersion %s, want %s", m.Version, m.AppVersion, want)
	}
}

// versions finds the version of the image or of the chart's archive in a text.
var versions = regexp.MustCompile(`(?:spillway:|spillway-|tag: )v?(\d+\.\d+\.\d+)`)

func TestDocumentsNameTheVersion(t *testing.T) {
	want, found := version(t), 0
	for _, dir := range []string{"README.md", "docs", "deploy"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, m := range versions.FindAllStringSubmatch(string(text), -1) {
				found++
				if m[1] != want {
					t.Errorf("%s: %q, want version %s", path, m[0], want)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found == 0 {
		t.Error("no file names a version")
	}
}
