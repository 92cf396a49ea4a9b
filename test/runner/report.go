package main

import (
	"bufio"
	"cmp"
	"context"
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
	"time"
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

// report collects the results of all steps.
type report struct {
	mu             sync.Mutex // steps run at once
	out            io.Writer
	passed, failed int
	skipped        []string // "package test"
	broken         []string // failed packages and steps
	running        []string // steps and packages
	took           map[string][]took
}

// took says how long something took.
type took struct {
	name, stage string
	seconds     float64
}

// What report.took lists.
const (
	tookSteps    = "steps"
	tookPackages = "slowest packages"
	tookTests    = "slowest tests"
)

func newReport(out io.Writer) *report { return &report{out: out, took: map[string][]took{}} }

// stepBegan prints that a step starts.
func (r *report) stepBegan(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = append(r.running, "step "+name)
	fmt.Fprintf(r.out, "      step %s ...\n", name)
}

// stepEnded records the result of a step. Its failure is printed unless that has been done.
func (r *report) stepEnded(name string, d time.Duration, err error, printed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.running = slices.DeleteFunc(r.running, func(s string) bool { return s == "step "+name })
	r.took[tookSteps] = append(r.took[tookSteps], took{name: name, seconds: d.Seconds()})
	switch {
	case err == nil:
		fmt.Fprintf(r.out, "ok    step %-51s %6.1fs\n", name, d.Seconds())
	case !printed:
		fmt.Fprintf(r.out, "FAIL  step %s: %v\n", name, err)
		r.broken = append(r.broken, "step "+name)
	}
}

// progress prints what runs, every half minute until the context ends.
func (r *report) progress(ctx context.Context, began time.Time) {
	for tick := time.NewTicker(30 * time.Second); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.mu.Lock()
			fmt.Fprintf(r.out, "%5s %d passed, %d failed; running: %s\n", time.Since(began).Round(time.Second), r.passed, r.failed,
				strings.Join(r.running, ", "))
			r.mu.Unlock()
		}
	}
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
			r.mu.Lock()
			fmt.Fprintln(r.out, lines.Text()) // a message of the go command
			r.mu.Unlock()
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
		s.ended(tookTests, key, e.Elapsed)
		delete(s.output, key)
	case "skip":
		s.skipped = append(s.skipped, key)
		fmt.Fprintf(s.out, "skip  %s (%s): %s\n", key, s.name, reason(s.output[key]))
		delete(s.output, key)
	case "fail":
		s.failed++
		s.ended(tookTests, key, e.Elapsed)
		fmt.Fprintf(s.out, "FAIL  %s (%s)\n", key, s.name)
		s.flush(key)
	default:
		return
	}
	s.ran = true
}

// reason returns what a test said before it skipped, in one line.
func reason(output []string) string {
	var said []string
	for _, line := range output {
		if line = strings.TrimSpace(line); !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			said = append(said, line)
		}
	}
	return strings.Join(said, " ")
}

// addPackage adds an event of a package, or of its build.
func (s *stageReport) addPackage(pkg, key string, e event) {
	name := fmt.Sprintf("%s (%s)", pkg, s.name)
	switch e.Action {
	case "start":
		s.running = append(s.running, name)
	case "pass", "fail", "skip":
		s.running = slices.DeleteFunc(s.running, func(r string) bool { return r == name })
	}
	switch e.Action {
	case "build-output":
		key = "build " + e.ImportPath
		fallthrough
	case "output":
		s.output[key] = append(s.output[key], e.Output)
	case "pass":
		s.ended(tookPackages, pkg, e.Elapsed)
		fmt.Fprintf(s.out, "ok    %-40s %-15s %6.1fs\n", pkg, s.name, e.Elapsed)
		delete(s.output, key)
	case "fail":
		s.failedPackage = true
		s.ended(tookPackages, pkg, e.Elapsed)
		s.broken = append(s.broken, name)
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

// ended records how long a package or a test took. A subtest counts with its test.
func (s *stageReport) ended(list, name string, seconds float64) {
	if _, test, _ := strings.Cut(name, " "); !strings.Contains(test, "/") {
		s.took[list] = append(s.took[list], took{name, s.name, seconds})
	}
}

// flush prints the output of a test and forgets it.
func (s *stageReport) flush(key string) {
	fmt.Fprint(s.out, strings.Join(s.output[key], ""))
	delete(s.output, key)
}

// slowest is the number of packages and of tests whose times are printed.
const slowest = 10

// printTimes prints what took longest.
func (r *report) printTimes() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, list := range []string{tookSteps, tookPackages, tookTests} {
		all := r.took[list]
		slices.SortStableFunc(all, func(a, b took) int { return cmp.Compare(b.seconds, a.seconds) })
		if list != tookSteps {
			all = all[:min(slowest, len(all))]
		}
		fmt.Fprintf(r.out, "\n%s:\n", list)
		for _, t := range all {
			fmt.Fprintf(r.out, "  %6.1fs  %-15s %s\n", t.seconds, t.stage, t.name)
		}
	}
	fmt.Fprintln(r.out)
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
