package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestStepsRunInOrder(t *testing.T) {
	file := filepath.Join(t.TempDir(), "order")
	write := func(text string) []string { return []string{"sh", "-c", "echo " + text + " >>" + file} }
	var out bytes.Buffer
	r := newReport(&out)
	runSteps(t.Context(), []step{
		{name: "last", after: []string{"middle", "not planned"}, argv: write("last")},
		{name: "middle", after: []string{"broken"}, argv: write("middle")},
		{name: "broken", argv: []string{"sh", "-c", "echo the reason >&2; exit 3"}},
		{name: "tests", after: []string{"last"}, argv: []string{"echo", stream}, tests: true},
	}, r)
	if text, err := os.ReadFile(file); err != nil || string(text) != "middle\nlast\n" {
		t.Errorf("steps wrote %q, %v, want middle before last", text, err)
	}
	if r.finish([]string{"a TestTwo*"}) {
		t.Error("a failed step does not fail the run")
	}
	r.printTimes()
	for _, want := range []string{"FAIL  step broken: exit status 3\nthe reason", "failed: step broken", "1 passed, 0 failed", "1.5s  tests           a TestOne"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
}
