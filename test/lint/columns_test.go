package lint

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"
)

// columns is the width of the programs' lines, as in bpf/.clang-format.
const columns = 100

// TestBPFLinesFit measures the lines of the programs, in characters. A tab ends at the next multiple
// of 8.
func TestBPFLinesFit(t *testing.T) {
	err := filepath.WalkDir(filepath.Join(root, "bpf"), func(path string, entry fs.DirEntry, err error) error {
		if ext := filepath.Ext(path); err != nil || entry.IsDir() || ext != ".c" && ext != ".h" {
			return err
		}
		text, err := os.ReadFile(path)
		n := 0
		for line := range bytes.Lines(text) {
			n++
			if w := width(strings.TrimSuffix(string(line), "\n")); w > columns {
				t.Errorf("%s:%d has %d columns, want %d", path, n, w, columns)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestBPFFilesHaveUniqueNames compares base names: comments often name a file without its folder.
func TestBPFFilesHaveUniqueNames(t *testing.T) {
	first := map[string]string{}
	err := filepath.WalkDir(filepath.Join(root, "bpf"), func(path string, entry fs.DirEntry, err error) error {
		if ext := filepath.Ext(path); err != nil || entry.IsDir() || ext != ".c" && ext != ".h" {
			return err
		}
		if other, found := first[entry.Name()]; found {
			t.Errorf("%s has the name of %s", path, other)
		}
		first[entry.Name()] = path
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func width(line string) (w int) {
	for i, part := range strings.Split(line, "\t") {
		if i > 0 {
			w += 8 - w%8
		}
		w += utf8.RuneCountInString(part)
	}
	return w
}
