package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
)

// once prints the first page of what is read.
func once(t *testing.T, terminal bool, list []conntrack.Report, err error) (page, warned string, failed error) {
	t.Helper()
	var out, warn bytes.Buffer
	tp := topPages{out: &out, warn: &warn, once: true, terminal: terminal, read: func(context.Context) ([]conntrack.Report, error) { return list, err }}
	failed = tp.page(t.Context())
	return out.String(), warn.String(), failed
}

func TestAPageForAProgramHasWholeNamesAndNoEscapes(t *testing.T) {
	long := "cni-5b2c1d7e-0c3f-4a4e-9d8a-1f2e3d4c5b6a"
	list := []conntrack.Report{{Namespace: conntrack.Namespace{Inode: 1, Names: []string{long}}, Entries: 3}, {Namespace: conntrack.Namespace{Inode: 2, PID: 7, Command: "a\x1b[2J\nb"}}}
	page, _, _ := once(t, false, list, nil)
	if !strings.Contains(page, long+" ") || strings.Contains(page, "\x1b") || strings.Count(page, "\n") != 3 || !strings.Contains(page, `a\x1b[2J\nb[7]`) {
		t.Errorf("%q", page)
	}
	fields := strings.Fields(strings.Split(page, "\n")[1])
	if fields[3] != "-" { // nothing to compare with
		t.Errorf("growth without a second reading: %q", fields)
	}
	page, _, _ = once(t, true, list, nil)
	for line := range strings.Lines(page) {
		if len(line) > 81 {
			t.Errorf("%d columns: %q", len(line)-1, line)
		}
	}
	// Pages after one another are no screen either.
	var out bytes.Buffer
	tp := topPages{out: &out, warn: &out, read: func(context.Context) ([]conntrack.Report, error) { return list, nil }}
	for range 2 {
		if err := tp.page(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Contains(out.String(), "\x1b") || !strings.Contains(out.String(), " +0 ") {
		t.Errorf("%q", out.String())
	}
}

// That some processes may not be looked at is no failure where nothing uses
// conntrack; that nothing could be read is.
func TestAPageIsPrintedWhereConntrackIsNotInUse(t *testing.T) {
	page, warned, err := once(t, false, nil, os.ErrPermission)
	if err != nil || !strings.Contains(page, "conntrack is in use in no network namespace") || !strings.Contains(warned, "permission") {
		t.Errorf("%q, %q, %v", page, warned, err)
	}
	for _, failed := range []error{conntrack.ErrUnsupported, errors.Join(conntrack.ErrNothingRead, os.ErrPermission)} {
		if page, _, err := once(t, false, nil, failed); err == nil || page != "" {
			t.Errorf("%v: %q, %v", failed, page, err)
		}
	}
}

func TestWithoutRootCommandsSaySoInOneLine(t *testing.T) {
	real := euid
	t.Cleanup(func() { euid = real })
	euid = func() int { return 1000 }
	for _, line := range []string{"doctor", "doctor --fix", "doctor --fail-on critical", "doctor --netns nowhere", "doctor -o json", "top --once", "top"} {
		var out, errs bytes.Buffer
		code := run(strings.Fields(line), &out, &errs)
		if code != exitFailed || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 || errs.Len() > 80 || !strings.Contains(errs.String(), "not root") {
			t.Errorf("%s: exit code %d: %q, page %q", line, code, &errs, &out)
		}
	}
}

// An empty variable in a script must not widen what a command does.
func TestEmptyFiltersAreWrongUsage(t *testing.T) {
	for _, args := range [][]string{
		{"doctor", "--netns", ""}, {"doctor", "--fix", "--netns", "here,"}, {"doctor", "--fail-on", ""},
		{"drops", "--pod", ""}, {"drops", "--netns", ""}, {"drops", "--address", ""}, {"drops", "--reason", ""}, {"drops", "--protocol", ""}, {"drops", "--port", ""},
		{"drops", "--pod", "", "--netns", "here"}, {"drops", "--address", "10.0.0.1,", "--count", "1"},
	} {
		var out, errs bytes.Buffer
		if code := run(args, &out, &errs); code != exitUsage || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%q: exit code %d: %q", args, code, &errs)
		}
	}
}
