package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// story records the steps and the failures of a long test in few words. CI often
// keeps only the end of a failed test's output, so the story is printed after the
// logs of the agents. A nil story records nothing.
type story struct {
	mu     sync.Mutex
	steps  []string
	faults []string
}

// maxFaults and maxTold bound what a story ends with, in lines and in bytes of
// one: together they fit into the few hundred characters that a record keeps.
const (
	maxFaults = 4
	maxTold   = 200
)

// tellStory starts a story and prints it in a cleanup. Cleanups run in reverse order,
// so a test calls this first.
func tellStory(t *testing.T) *story {
	s := &story{}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(s.text())
		}
	})
	return s
}

// step says what the test does now.
func (s *story) step(format string, args ...any) {
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.steps = append(s.steps, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
	}
}

// errorf fails the test, and says so in the end once more.
func (s *story) errorf(t *testing.T, format string, args ...any) {
	t.Helper()
	text := fmt.Sprintf(format, args...)
	if s != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.faults = append(s.faults, text)
	}
	t.Error(text)
}

// text is the story: all its steps, then the first faults, cut to what counts.
func (s *story) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var b strings.Builder
	fmt.Fprintf(&b, "steps:\n%s\n", strings.Join(s.steps, "\n"))
	last := "the start"
	if len(s.steps) > 0 {
		last = s.steps[len(s.steps)-1]
	}
	fmt.Fprintf(&b, "in short: %d faults, the last step was %q", len(s.faults), last)
	for _, f := range s.faults[:min(len(s.faults), maxFaults)] {
		fmt.Fprintf(&b, "\n- %s", f[:min(len(f), maxTold)])
	}
	return b.String()
}

// tail is the end of a log, in lines.
func tail(text string, lines int) string {
	all := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func TestAStoryEndsWithWhatWentWrong(t *testing.T) {
	s := &story{}
	s.step("stop kube-proxy on %s", "a")
	for i := range maxFaults + 1 {
		s.faults = append(s.faults, fmt.Sprintf("fault %d %s", i, strings.Repeat("x", 2*maxTold)))
	}
	text := s.text()
	_, short, found := strings.Cut(text, "in short: ")
	if !found || !strings.Contains(short, `stop kube-proxy on a"`) || !strings.Contains(short, "- fault 0 x") {
		t.Errorf("the end %q names neither step nor fault", short)
	}
	if len(short) > (maxFaults+1)*(maxTold+3) {
		t.Errorf("the end is %d bytes long", len(short))
	}
	if got := tail("a\nb\nc\n", 2); got != "b\nc" {
		t.Errorf("tail %q", got)
	}
}
