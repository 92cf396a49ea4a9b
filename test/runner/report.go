package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"
)

const module = "spillway.dev/spillway/"

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

// report collects the results of all stages.
type report struct {
	mu             sync.Mutex // stages run at once
	out            io.Writer
	passed, failed int
	skipped        []string // "package test"
	broken         []string // failed packages and stages
}

func newReport(out io.Writer) *report { return &report{out: out} }

func (r *report) printf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	fmt.Fprintf(r.out, format, args...)
}

// stageReport is the part of a report that one stage adds.
type stageReport struct {
	*report
	name          string
	output        map[string][]string // of running tests and builds, by "package test" or "build package"
	ran           bool                // a test ended
	failedPackage bool
}

// readStage adds the output of go test -json in a stage, and reports whether a package
// failed.
func (r *report) readStage(name string, in io.Reader) (failed bool, err error) {
	s := stageReport{report: r, name: name, output: map[string][]string{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			r.printf("%s\n", lines.Text()) // a message of the go command
			continue
		}
		s.add(e)
	}
	if err := lines.Err(); err != nil {
		_, _ = io.Copy(io.Discard, in) // otherwise go test blocks on the full pipe
		return s.failedPackage, fmt.Errorf("read test output: %w", err)
	}
	if !s.ran {
		return s.failedPackage, errors.New("no test ran")
	}
	return s.failedPackage, nil
}

// stageFailed records that a stage as a whole did not succeed.
func (r *report) stageFailed(name string, err error) {
	r.printf("FAIL  stage %s: %v\n", name, err)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.broken = append(r.broken, "stage "+name)
}

func (s *stageReport) add(e event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	pkg := strings.TrimPrefix(e.Package, module)
	key := pkg + " " + e.Test
	if e.Test == "" {
		s.addPackage(pkg, key, e)
		return
	}
	switch e.Action {
	case "output":
		s.output[key] = append(s.output[key], e.Output)
		return
	case "pass":
		s.passed++
		delete(s.output, key)
	case "skip":
		s.skipped = append(s.skipped, key)
		fmt.Fprintf(s.out, "skip  %s (%s)\n", key, s.name)
		s.flush(key)
	case "fail":
		s.failed++
		fmt.Fprintf(s.out, "FAIL  %s (%s)\n", key, s.name)
		s.flush(key)
	default:
		return
	}
	s.ran = true
}

// addPackage adds an event of a package, or of its build.
func (s *stageReport) addPackage(pkg, key string, e event) {
	switch e.Action {
	case "build-output":
		key = "build " + e.ImportPath
		fallthrough
	case "output":
		s.output[key] = append(s.output[key], e.Output)
	case "pass":
		fmt.Fprintf(s.out, "ok    %-40s %-15s %6.1fs\n", pkg, s.name, e.Elapsed)
		delete(s.output, key)
	case "fail":
		s.failedPackage = true
		s.broken = append(s.broken, fmt.Sprintf("%s (%s)", pkg, s.name))
		fmt.Fprintf(s.out, "FAIL  %-40s %-15s %6.1fs\n", pkg, s.name, e.Elapsed)
		s.flush("build " + e.FailedBuild)
		// A panic or a timeout ended these tests before they reported.
		for _, key := range slices.Sorted(maps.Keys(s.output)) {
			if strings.HasPrefix(key, pkg+" ") {
				s.flush(key)
			}
		}
	}
}

// flush prints the output of a test and forgets it.
func (s *stageReport) flush(key string) {
	fmt.Fprint(s.out, strings.Join(s.output[key], ""))
	delete(s.output, key)
}

// finish prints the totals. It returns false if something failed or skipped without a
// line in the allow list.
func (r *report) finish(allowed []string) bool {
	unexpected := r.unexpected(allowed)
	for _, s := range unexpected {
		fmt.Fprintf(r.out, "skipped, but not in the allow list: %s: make it run, or give a reason in %s\n", s, allowFile)
	}
	for _, b := range r.broken {
		fmt.Fprintf(r.out, "failed: %s\n", b)
	}
	fmt.Fprintf(r.out, "tests: %d passed, %d failed, %d skipped (%d not allowed)\n",
		r.passed, r.failed, len(r.skipped), len(unexpected))
	return r.failed == 0 && len(r.broken) == 0 && len(unexpected) == 0
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
