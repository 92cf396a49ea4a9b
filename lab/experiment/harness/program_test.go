package harness

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSpillwayIsFound(t *testing.T) {
	given := spillway
	t.Cleanup(func() { spillway = given })
	dir := t.TempDir()
	program, text := filepath.Join(dir, "program"), filepath.Join(dir, "text")
	for path, mode := range map[string]os.FileMode{program: 0o755, text: 0o644} {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ flag, want, fails string }{
		{program, program, ""},
		{text, "", "text (--spillway): not a program"},
		{dir, "", "(--spillway): not a program"},
		{filepath.Join(dir, "none"), "", "none (--spillway): no such file"},
		{"", "", "/spillway (beside this program): no such file"}, // the test binary stands alone
	} {
		spillway = c.flag
		got, err := Spillway()
		if got != c.want || (err == nil) != (c.fails == "") {
			t.Errorf("--spillway %q: %q, %v; want %q", c.flag, got, err, c.want)
		}
		if err != nil && (!strings.Contains(err.Error(), c.fails) || !strings.HasSuffix(err.Error(), "or give --spillway PATH") ||
			strings.Contains(err.Error(), "\n")) {
			t.Errorf("--spillway %q: %v; want %q in one line", c.flag, err, c.fails)
		}
	}
}
