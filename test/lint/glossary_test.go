package lint

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestTermsOfTheGlossaryAreUsed checks that each term of the glossary occurs in code or in another
// document, as words or in an identifier. A term that nothing uses only costs its reader.
func TestTermsOfTheGlossaryAreUsed(t *testing.T) {
	const guide = "docs/contributing/style.md"
	terms := glossary(t, filepath.Join(root, guide))
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == "node_modules" || name == "dist" || name == ".git") {
			return filepath.SkipDir
		}
		if !slices.Contains([]string{".go", ".md", ".c", ".h"}, filepath.Ext(path)) || path == filepath.Join(root, guide) {
			return nil
		}
		content, err := os.ReadFile(path)
		for term, pattern := range terms {
			if pattern.Match(content) {
				delete(terms, term)
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for term := range terms {
		t.Errorf("%s: the glossary has %q, which occurs nowhere else: delete it", guide, term)
	}
}

// glossary returns the terms of the style guide with their patterns.
func glossary(t *testing.T, path string) map[string]*regexp.Regexp {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(content), "\n| term | meaning |\n")
	section, _, _ = strings.Cut(section, "\n\n")
	parenthesis := regexp.MustCompile(` \(.*?\)`)
	terms := map[string]*regexp.Regexp{}
	for _, row := range strings.Split(section, "\n")[1:] {
		cell := strings.Split(row, "|")[1]
		for term := range strings.SplitSeq(parenthesis.ReplaceAllString(cell, ""), ",") {
			words := strings.Fields(term)
			for i := range words {
				words[i] = strings.ReplaceAll(regexp.QuoteMeta(words[i]), "…", `\w+`)
			}
			terms[strings.TrimSpace(term)] = regexp.MustCompile(`(?i)` + strings.Join(words, `[\s_-]?`))
		}
	}
	if len(terms) < 30 {
		t.Fatalf("%s: %d terms found: is the table still read?", path, len(terms))
	}
	return terms
}
