package docs

import (
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestGroupsNameTheirPackages: the package comment of each group below internal is the map
// that a reader meets first, so it names every package of the group.
func TestGroupsNameTheirPackages(t *testing.T) {
	architecture, err := os.ReadFile(filepath.Join(root, "docs/explanation/architecture.md"))
	if err != nil {
		t.Fatal(err)
	}
	groups, err := os.ReadDir(filepath.Join(root, "internal"))
	if err != nil || len(groups) < 8 {
		t.Fatalf("%d groups: %v", len(groups), err)
	}
	for _, group := range groups {
		if !strings.Contains(string(architecture), "\n  "+group.Name()+"/ ") {
			t.Errorf("docs/explanation/architecture.md: the repository map has no line for internal/%s", group.Name())
		}
		folder := filepath.Join(root, "internal", group.Name())
		comment := packageComment(t, folder)
		for _, sub := range packagesBelow(t, folder) {
			if !regexp.MustCompile(`(?m)^\s+` + sub + `\b`).MatchString(comment) {
				t.Errorf("the package comment of internal/%s has no line for %s", group.Name(), sub)
			}
		}
	}
}

// packageComment returns the comment of the package in a folder.
func packageComment(t *testing.T, folder string) string {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(folder, "*.go"))
	for _, f := range files {
		parsed, err := parser.ParseFile(token.NewFileSet(), f, nil, parser.PackageClauseOnly|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if parsed.Doc != nil {
			return parsed.Doc.Text()
		}
	}
	t.Errorf("%s has no package comment", folder)
	return ""
}

// packagesBelow returns the names of the packages in folders below a folder.
func packagesBelow(t *testing.T, folder string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(folder, func(path string, e os.DirEntry, err error) error {
		if err != nil || !e.IsDir() || path == folder {
			return err
		}
		if e.Name() == "testdata" {
			return filepath.SkipDir
		}
		if files, _ := filepath.Glob(filepath.Join(path, "*.go")); len(files) > 0 {
			names = append(names, e.Name())
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}
