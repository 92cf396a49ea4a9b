package ui

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// The committed bundle, and the types from api/proto, are what the sources give. Types are
// checked, and the tests of the stores run. The packages of npm are those of its lockfile.
func TestTheBundleIsCurrent(t *testing.T) {
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("no npm: hack/deps ui installs it")
	}
	root, err := filepath.Abs("../../..")
	if err != nil {
		t.Fatal(err)
	}
	// A copy: what lies in ui stays as it is.
	copied := t.TempDir()
	for _, name := range []string{"api", "docs", "hack", "go.mod", "go.sum"} {
		if err := os.Symlink(filepath.Join(root, name), filepath.Join(copied, name)); err != nil {
			t.Fatal(err)
		}
	}
	page := filepath.Join(copied, "ui")
	committed := files(t, filepath.Join(root, "ui"))
	for path, text := range committed {
		to := filepath.Join(page, path)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefer-offline"}, {"run", "all"}} {
		cmd := exec.CommandContext(t.Context(), "npm", args...)
		cmd.Dir = page
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("npm %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	built := files(t, page)
	var differ []string
	for path := range built {
		if !bytes.Equal(built[path], committed[path]) {
			differ = append(differ, path)
		}
	}
	for path := range committed {
		if _, is := built[path]; !is {
			differ = append(differ, path)
		}
	}
	if len(differ) > 0 {
		slices.Sort(differ)
		t.Errorf("these files of ui are out of date; commit what \"make ui\" gives: %s", strings.Join(differ, ", "))
	}
}

// files returns the files of a folder without npm's packages, by path.
func files(t *testing.T, dir string) map[string][]byte {
	t.Helper()
	found := map[string][]byte{}
	err := fs.WalkDir(os.DirFS(dir), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if d.Name() == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		found[path], err = os.ReadFile(filepath.Join(dir, path))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}
