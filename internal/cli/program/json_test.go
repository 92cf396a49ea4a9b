package program

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// snake finds keys of JSON with underscores.
var snake = regexp.MustCompile(`json:"[A-Za-z0-9]*_[^"]*"`)

// The keys of what commands print are camelCase. The names of the kernel's timeouts are values.
func TestKeysOfJSONAreCamelCase(t *testing.T) {
	seen := 0
	for _, dir := range []string{"cli", "diagnosis", "node", "dataplane", "proxymode", "telemetry"} {
		err := filepath.WalkDir(filepath.Join("../..", dir), func(path string, e fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasSuffix(path, "capacity.go") {
				return err
			}
			text, err := os.ReadFile(path)
			seen += strings.Count(string(text), "json:\"")
			if found := snake.Find(text); found != nil {
				t.Errorf("%s: %s", path, found)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if seen < 100 {
		t.Errorf("only %d keys seen", seen)
	}
}
