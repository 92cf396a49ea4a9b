// Command skips reads the output of go test -json, shows what a person wants
// to see of it, and fails when a test failed or skipped without leave.
//
//	go test -json ./... | go run ./test/skips -allow test/skips/allow.txt
//
// A test that cannot run on some machine skips. A test that skips everywhere tests
// nothing, so each skip needs a line with a reason in the allow list.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
)

const module = "spillway.dev/spillway/"

func main() {
	allow := flag.String("allow", "", "file of tests that may skip")
	flag.Parse()
	ok, err := check(os.Stdin, os.Stdout, *allow)
	if err != nil {
		fmt.Fprintf(os.Stderr, "skips: %v\n", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// event is a line of go test -json.
type event struct {
	Action      string
	Package     string
	ImportPath  string // of build-output
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

// report gathers what the events say.
type report struct {
	out            io.Writer
	output         map[string][]string // by package and test
	passed, failed int
	skipped        []string // "package test"
	broken         bool     // a package failed
}

func check(in io.Reader, out io.Writer, allowFile string) (ok bool, err error) {
	allowed, err := readAllowed(allowFile)
	if err != nil {
		return false, err
	}
	r := &report{out: out, output: map[string][]string{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			fmt.Fprintln(out, lines.Text()) // what go itself has to say
			continue
		}
		r.take(e)
	}
	if err := lines.Err(); err != nil {
		return false, fmt.Errorf("read test output: %w", err)
	}
	unexpected := r.unexpected(allowed)
	for _, s := range unexpected {
		fmt.Fprintf(out, "skipped without leave: %s: make it run, or give a reason in %s\n", s, allowFile)
	}
	fmt.Fprintf(out, "tests: %d passed, %d failed, %d skipped (%d without leave)\n",
		r.passed, r.failed, len(r.skipped), len(unexpected))
	if r.passed+r.failed == 0 {
		return false, fmt.Errorf("no test ran")
	}
	return r.failed == 0 && !r.broken && len(unexpected) == 0, nil
}

func (r *report) take(e event) {
	pkg := strings.TrimPrefix(e.Package, module)
	key := pkg + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		if e.Action == "build-output" {
			key = "build " + e.ImportPath
		}
		r.output[key] = append(r.output[key], e.Output)
		return
	case "pass":
		if e.Test == "" {
			fmt.Fprintf(r.out, "ok    %-40s %6.1fs\n", pkg, e.Elapsed)
		} else {
			r.passed++
		}
	case "skip":
		if e.Test != "" {
			r.skipped = append(r.skipped, key)
			fmt.Fprintf(r.out, "skip  %s\n%s", key, strings.Join(r.output[key], ""))
		}
	case "fail":
		if e.Test == "" {
			r.broken = true
			fmt.Fprintf(r.out, "FAIL  %-40s %6.1fs\n%s", pkg, e.Elapsed, strings.Join(r.output["build "+e.FailedBuild], ""))
		} else {
			r.failed++
		}
		fmt.Fprint(r.out, strings.Join(r.output[key], ""))
	default:
		return
	}
	delete(r.output, key)
}

// unexpected lists the skips that no pattern allows.
func (r *report) unexpected(allowed []string) []string {
	bad := map[string]bool{}
	for _, s := range r.skipped {
		if !slices.ContainsFunc(allowed, func(p string) bool { return matches(p, s) }) {
			bad[s] = true
		}
	}
	return slices.Sorted(maps.Keys(bad))
}

// matches compares package and test; * stands for anything in a test's name,
// its subtests included.
func matches(pattern, skip string) bool {
	flat := strings.NewReplacer("/", "\x00")
	ok, err := path.Match(flat.Replace(pattern), flat.Replace(skip))
	return err == nil && ok
}

// readAllowed reads "PACKAGE TEST  # reason" lines. A line without a reason is
// an error.
func readAllowed(file string) ([]string, error) {
	if file == "" {
		return nil, nil
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read allowed skips: %w", err)
	}
	var out []string
	for i, line := range strings.Split(string(data), "\n") {
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "#") {
			continue
		}
		entry, reason, _ := strings.Cut(line, "#")
		fields := strings.Fields(entry)
		if len(fields) != 2 || strings.TrimSpace(reason) == "" {
			return nil, fmt.Errorf("read allowed skips: %s:%d: write PACKAGE TEST  # reason", file, i+1)
		}
		out = append(out, fields[0]+" "+fields[1])
	}
	return out, nil
}
