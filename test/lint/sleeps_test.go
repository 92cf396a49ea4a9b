package lint

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestNoSleepsInTests finds fixed waits in tests and in the code of test/. What is in a bubble
// of testing/synctest takes no time.
func TestNoSleepsInTests(t *testing.T) {
	found := map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := strings.TrimPrefix(path, root+"/")
		if d.IsDir() {
			if d.Name() == "testdata" || d.Name() == ".git" {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, "_test.go") && (!strings.HasPrefix(name, "test/") || !strings.HasSuffix(name, ".go")) {
			return nil
		}
		functions, err := sleepers(path)
		for _, f := range functions {
			found[name+" "+f] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	allowed := exceptions(t)
	for _, f := range slices.Sorted(maps.Keys(found)) {
		if !allowed[f] {
			t.Errorf("%s sleeps: wait for a condition with test/await, or give a reason in test/lint/sleeps.txt", f)
		}
	}
	for _, f := range slices.Sorted(maps.Keys(allowed)) {
		if !found[f] {
			t.Errorf("test/lint/sleeps.txt: %s does not sleep: remove the line", f)
		}
	}
}

// exceptions returns the functions in sleeps.txt, each with a reason: "FILE FUNCTION # reason".
func exceptions(t *testing.T) map[string]bool {
	t.Helper()
	content, err := os.ReadFile("sleeps.txt")
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]bool{}
	for line := range strings.Lines(string(content)) {
		function, reason, _ := strings.Cut(line, "#")
		function = strings.TrimSpace(function)
		if function != "" && strings.TrimSpace(reason) == "" {
			t.Errorf("test/lint/sleeps.txt: %s has no reason", function)
		}
		if function != "" {
			list[function] = true
		}
	}
	return list
}

// sleepers returns the functions of a file that call time.Sleep, or wait for time.After alone.
func sleepers(path string) (functions []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, decl := range file.Decls {
		name := "variables"
		if f, ok := decl.(*ast.FuncDecl); ok {
			name = f.Name.Name
		}
		var visit func(n ast.Node) bool
		visit = func(n ast.Node) bool {
			sleeps := false
			switch n := n.(type) {
			case *ast.CallExpr:
				if isCall(n, "synctest", "Test") {
					return false
				}
				sleeps = isCall(n, "time", "Sleep")
			case *ast.ExprStmt:
				receive, ok := n.X.(*ast.UnaryExpr)
				sleeps = ok && isCall(receive.X, "time", "After")
			case *ast.CommClause: // of select: a limit of its other cases
				for _, s := range n.Body {
					ast.Inspect(s, visit)
				}
				return false
			}
			if sleeps {
				functions = append(functions, name)
			}
			return true
		}
		ast.Inspect(decl, visit)
	}
	return functions, nil
}

func isCall(n ast.Expr, pkg, function string) bool {
	call, ok := n.(*ast.CallExpr)
	if !ok {
		return false
	}
	selector, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	x, ok := selector.X.(*ast.Ident)
	return ok && x.Name == pkg && selector.Sel.Name == function
}
