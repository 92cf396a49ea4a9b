package lint

import (
	"bufio"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// TestProseOfStringsAndBPFComments checks what vale does not read: texts in Go code, and
// comments of the eBPF programs. The words are vale's.
func TestProseOfStringsAndBPFComments(t *testing.T) {
	rules := bannedWords(t)
	seen := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "testdata" || name == ".git") {
			return filepath.SkipDir
		}
		var texts []text
		switch {
		case strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go"):
			texts, err = goStrings(path)
		case strings.HasPrefix(path, filepath.Join(root, "bpf")) && (strings.HasSuffix(path, ".c") || strings.HasSuffix(path, ".h")):
			texts, err = cComments(path)
		}
		seen += len(texts)
		for _, x := range texts {
			for _, r := range rules {
				if found := r.FindString(flagNames.ReplaceAllString(x.text, "")); found != "" {
					t.Errorf("%s:%d: %q: see the words in docs/contributing/style.md", strings.TrimPrefix(path, root+"/"), x.line, found)
				}
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if seen < 1000 {
		t.Fatalf("%d texts found: are files still read?", seen)
	}
}

// flagNames are contracts, whatever words they contain.
var flagNames = regexp.MustCompile(`--[a-z][a-z-]*`)

// bannedWords returns the patterns of vale's rules, which ignore case and match words.
func bannedWords(t *testing.T) (rules []*regexp.Regexp) {
	t.Helper()
	for _, file := range []string{"People.yml", "Words.yml"} {
		content, err := os.ReadFile(filepath.Join(root, "hack/vale/styles/Spillway", file))
		if err != nil {
			t.Fatal(err)
		}
		var rule struct {
			Tokens []string
			Swap   map[string]string
		}
		if err := yaml.Unmarshal(content, &rule); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for word := range rule.Swap {
			rule.Tokens = append(rule.Tokens, word)
		}
		if len(rule.Tokens) == 0 {
			t.Fatalf("%s: no words found", file)
		}
		for _, word := range rule.Tokens {
			rules = append(rules, regexp.MustCompile(`(?i)\b(?:`+word+`)\b`))
		}
	}
	return rules
}

type text struct {
	line int
	text string
}

// goStrings returns the string literals of a Go file with at least three words.
func goStrings(path string) (texts []text, err error) {
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if lit, ok := n.(*ast.BasicLit); ok && lit.Kind == token.STRING {
			value, _ := strconv.Unquote(lit.Value) // the parser has checked it
			if len(strings.Fields(value)) >= 3 {
				texts = append(texts, text{files.Position(lit.Pos()).Line, value})
			}
		}
		return true
	})
	return texts, nil
}

// cComments returns the comments of a C file, line by line.
func cComments(path string) (texts []text, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	inside := false
	lines := bufio.NewScanner(f)
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		from := strings.Index(line, "/*")
		if slashes := strings.Index(line, "//"); from < 0 && slashes >= 0 && !inside {
			texts = append(texts, text{n, line[slashes:]})
			continue
		}
		if from >= 0 {
			inside, line = true, line[from:]
		}
		if inside {
			texts = append(texts, text{n, line})
		}
		if strings.Contains(line, "*/") {
			inside = false
		}
	}
	return texts, lines.Err()
}
