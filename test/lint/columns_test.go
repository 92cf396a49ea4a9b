package lint

import (
	"bytes"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// goColumns is the most characters of a line of Go, a tab as one.
const goColumns = 140

// TestGoLinesFit measures the lines of Go. Raw strings, which are other languages, and directives may
// be longer.
func TestGoLinesFit(t *testing.T) {
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := entry.Name(); entry.IsDir() && (name == "testdata" || name == ".git" || name == "node_modules") {
			return filepath.SkipDir
		}
		if filepath.Ext(path) != ".go" {
			return nil
		}
		source, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for _, line := range longLines(path, source) {
			t.Errorf("%s:%d has more than %d characters", path, line, goColumns)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var generated = regexp.MustCompile(`(?m)^// Code generated .* DO NOT EDIT\.$`)

// longLines returns the numbers of the lines that are too long.
func longLines(path string, source []byte) (numbers []int) {
	if generated.Match(source) {
		return nil
	}
	files := token.NewFileSet()
	file := files.AddFile(path, -1, len(source))
	var s scanner.Scanner
	s.Init(file, source, nil, scanner.ScanComments)
	free := map[int]bool{}
	for pos, tok, lit := s.Scan(); tok != token.EOF; pos, tok, lit = s.Scan() {
		first := files.Position(pos).Line
		switch {
		case tok == token.STRING && lit[0] == '`':
			for i := range 1 + strings.Count(lit, "\n") {
				free[first+i] = true
			}
		case tok == token.COMMENT && strings.HasPrefix(lit, "//go:"):
			free[first] = true
		}
	}
	for i, line := range strings.Split(string(source), "\n") {
		if utf8.RuneCountInString(line) > goColumns && !free[i+1] {
			numbers = append(numbers, i+1)
		}
	}
	return numbers
}

func TestALongLineIsFound(t *testing.T) {
	long := strings.Repeat("x", goColumns)
	source := "package p\n\n//go:generate " + long + "\nvar a = `" + long + "\n" + long + "x`\nvar b = \"" + long + "\"\n// " + long + "\n"
	if got := longLines("p.go", []byte(source)); !slices.Equal(got, []int{6, 7}) {
		t.Errorf("lines %v are too long, want 6 and 7", got)
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
