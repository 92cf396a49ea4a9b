package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

const stream = `{"Action":"run","Package":"spillway.dev/spillway/a","Test":"TestOne"}
{"Action":"pass","Package":"spillway.dev/spillway/a","Test":"TestOne","Elapsed":1.5}
{"Action":"output","Package":"spillway.dev/spillway/a","Test":"TestTwo/x","Output":"=== RUN   TestTwo/x\n"}
{"Action":"output","Package":"spillway.dev/spillway/a","Test":"TestTwo/x","Output":"needs IPv6\n"}
{"Action":"skip","Package":"spillway.dev/spillway/a","Test":"TestTwo/x"}
{"Action":"pass","Package":"spillway.dev/spillway/a","Elapsed":1}
{"Action":"skip","Package":"spillway.dev/spillway/empty"}
`

func TestSkipsNeedLeave(t *testing.T) {
	const failed = `{"Action":"output","Package":"spillway.dev/spillway/a","Test":"TestF","Output":"boom\n"}
{"Action":"fail","Package":"spillway.dev/spillway/a","Test":"TestF"}
{"Action":"fail","Package":"spillway.dev/spillway/a"}
`
	const panicked = `{"Action":"run","Package":"spillway.dev/spillway/a","Test":"TestF"}
{"Action":"output","Package":"spillway.dev/spillway/a","Test":"TestF","Output":"panic: boom\n"}
{"Action":"fail","Package":"spillway.dev/spillway/a"}
`
	const unbuilt = `{"ImportPath":"spillway.dev/spillway/b","Action":"build-output","Output":"b.go:1: undefined: x\n"}
{"Action":"fail","Package":"spillway.dev/spillway/b","FailedBuild":"spillway.dev/spillway/b"}
`
	for _, c := range []struct {
		name, in, allow string
		ok              bool
		says            string
	}{
		{"a skip that is not allowed fails", stream, "", false, "skipped, but not in the allow list: a TestTwo/x"},
		{"a skip with leave passes", stream, "a TestTwo/x # no IPv6 there", true, "1 passed, 0 failed, 1 skipped"},
		{"a skip is shown with its reason", stream, "a TestTwo/x # no IPv6 there", true, "skip  a TestTwo/x (ebpf): needs IPv6\n"},
		{"a star takes subtests in", stream, "a TestTwo* # no IPv6 there", true, "(0 not allowed)"},
		{"leave is for one package", stream, "b TestTwo* # no IPv6 there", false, "a TestTwo/x"},
		{"a failed test fails and shows its output", stream + failed, "a TestTwo* # x", false, "boom"},
		{"a failed test is shown with its stage", stream + failed, "a TestTwo* # x", false, "FAIL  a TestF (ebpf)\nboom"},
		{"a package that does not build fails and shows why", stream + unbuilt, "a TestTwo* # x", false, "undefined: x"},
		{"a panic fails and is shown", stream + panicked, "a TestTwo* # x", false, "panic: boom"},
		{"leave without a reason is no leave", stream, "a TestTwo/x", false, "write PACKAGE TEST"},
		{"no test at all fails", "", "", false, "no test ran"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "allow.txt")
			if err := os.WriteFile(file, []byte("# comment\n\n"+c.allow+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			var out bytes.Buffer
			r := newReport(&out)
			failed, err := r.readStage("ebpf", strings.NewReader(c.in))
			r.stepEnded("ebpf", time.Second, err, failed)
			allowed, err := readAllowed(file)
			if err != nil {
				out.WriteString(err.Error())
			}
			if got := r.finish(allowed) && err == nil; got != c.ok {
				t.Errorf("passed is %v, want %v", got, c.ok)
			}
			if !strings.Contains(out.String(), c.says) {
				t.Errorf("output lacks %q:\n%s", c.says, out.String())
			}
		})
	}
}

// TestAllowedTestsExist finds a line of allow.txt whose test has another name now.
func TestAllowedTestsExist(t *testing.T) {
	allowed, err := readAllowed("allow.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range allowed {
		pkg, name, _ := strings.Cut(line, " ")
		name, _, _ = strings.Cut(name, "/") // subtests are named by code
		files, err := filepath.Glob(filepath.Join("../..", pkg, "*_test.go"))
		if err != nil {
			t.Fatal(err)
		}
		if !slices.ContainsFunc(files, func(file string) bool { return hasTest(t, file, name) }) {
			t.Errorf("%s: there is no such test", line)
		}
	}
}

// hasTest reports whether a file has a test that a pattern of allow.txt matches.
func hasTest(t *testing.T, file, pattern string) bool {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(f.Decls, func(d ast.Decl) bool {
		fn, ok := d.(*ast.FuncDecl)
		return ok && fn.Recv == nil && matches(pattern, fn.Name.Name)
	})
}
