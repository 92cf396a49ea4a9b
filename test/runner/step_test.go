package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
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
	for _, want := range []string{"FAIL  step broken: exit status 3\nthe reason", "failed: step broken", "1 passed, 0 failed",
		"1.5s  tests           a TestOne"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
}

// TestAnInterruptReachesWhatAStepStarted: an interrupted run ends the children of its commands,
// which may have agents of their own to end.
func TestAnInterruptReachesWhatAStepStarted(t *testing.T) {
	dir := t.TempDir()
	child := `trap "touch ended; exit 1" INT; touch begun; while :; do sleep 0.1; done`
	ctx, interrupt := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		runSteps(ctx, []step{{name: "tests", dir: dir, argv: []string{"sh", "-c", "sh -c '" + child + "'; true"}}}, newReport(&bytes.Buffer{}))
	}()
	exists := func(name string) bool {
		_, err := os.Stat(filepath.Join(dir, name))
		return err == nil
	}
	await.True(t, "the child begins", func() bool { return exists("begun") })
	interrupt()
	<-done
	if !exists("ended") {
		t.Error("the interrupt did not reach the child")
	}
}
