package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// Report is the result of a run.
type Report struct {
	Label string // of the run
	CNI   string // of the cluster; empty if it is not known
	Time  time.Duration
	Tests []Test // those that were selected, sorted by name
}

// Test is the result of one test.
type Test struct {
	Name    string
	State   State
	Time    time.Duration
	Message string // of a failed or skipped test
}

// State says how a test ended.
type State string

// The states. Any other end of a test counts as Failed.
const (
	Passed  State = "passed"
	Failed  State = "failed"
	Skipped State = "skipped" // by the test itself, since the cluster lacks something
)

// read reads a JSON report of Ginkgo's.
func read(path, label string) (*Report, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	type failure struct{ Message string }
	var suites []struct {
		RunTime                    time.Duration
		SpecialSuiteFailureReasons []string
		SpecReports                []struct {
			ContainerHierarchyTexts    []string
			LeafNodeType, LeafNodeText string
			State                      string
			RunTime                    time.Duration
			NumAttempts                int
			Failure                    failure
		}
	}
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("read %s: %w", path, err)
	}
	r := &Report{Label: label}
	for _, suite := range suites {
		r.Time += suite.RunTime
		for _, spec := range suite.SpecReports {
			t := Test{
				Name:    strings.TrimSpace(strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")),
				State:   State(spec.State),
				Time:    spec.RunTime,
				Message: spec.Failure.Message,
			}
			switch {
			case spec.LeafNodeType != "It":
				// Preparations are listed only if they fail, as no test runs then.
				if t.State == Passed || t.State == Skipped {
					continue
				}
				t.Name = spec.LeafNodeType + " " + t.Name
			case t.State == Skipped && spec.NumAttempts == 0: // not selected
				continue
			}
			if t.State != Passed && t.State != Skipped {
				t.State = Failed
			}
			r.Tests = append(r.Tests, t)
		}
	}
	if len(r.Tests) == 0 {
		return nil, errors.New("no test ran")
	}
	slices.SortFunc(r.Tests, func(a, b Test) int { return strings.Compare(a.Name, b.Name) })
	return r, nil
}

// Count returns how many tests ended in a state.
func (r *Report) Count(s State) (n int) {
	for _, t := range r.Tests {
		if t.State == s {
			n++
		}
	}
	return n
}

// Table compares runs, in Markdown: their counts, and every test that did not pass in each.
func Table(reports ...*Report) string {
	var b strings.Builder
	b.WriteString("| proxy | passed | failed | skipped | minutes |\n|---|---|---|---|---|\n")
	for _, r := range reports {
		fmt.Fprintf(&b, "| %s | %d | %d | %d | %.0f |\n", r.Label, r.Count(Passed), r.Count(Failed), r.Count(Skipped), r.Time.Minutes())
	}
	states := map[string]map[string]State{} // of each test, by run
	for _, r := range reports {
		for _, t := range r.Tests {
			if states[t.Name] == nil {
				states[t.Name] = map[string]State{}
			}
			states[t.Name][r.Label] = t.State
		}
	}
	var rows []string
	for name, of := range states {
		row := "| " + strings.TrimPrefix(name, "[sig-network] ")
		failed := false
		for _, r := range reports {
			failed = failed || of[r.Label] == Failed
			row += " | " + string(of[r.Label])
		}
		if failed {
			rows = append(rows, row+" |\n")
		}
	}
	if len(rows) == 0 {
		return b.String()
	}
	slices.Sort(rows)
	b.WriteString("\n| failed test")
	for _, r := range reports {
		b.WriteString(" | " + r.Label)
	}
	b.WriteString(" |\n|---" + strings.Repeat("|---", len(reports)) + "|\n")
	b.WriteString(strings.Join(rows, ""))
	return b.String()
}
