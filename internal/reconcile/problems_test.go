package reconcile

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// watchedLog returns problems, the text of their log, and a function that reports at a time
// after the start.
func watchedLog() (*problems, *bytes.Buffer, func(time.Duration, ...model.Problem)) {
	var log bytes.Buffer
	p := &problems{log: slog.New(slog.NewTextHandler(&log, nil))}
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return p, &log, func(at time.Duration, ps ...model.Problem) {
		p.set(fromSource, ps)
		p.report(start.Add(at))
	}
}

func wantLines(t *testing.T, log *bytes.Buffer, began, lasting, ended int) {
	t.Helper()
	text := log.String()
	l := strings.Count(text, " since=")
	b, e := strings.Count(text, "msg=problem ")-l, strings.Count(text, `msg="problem resolved"`)
	if b != began || l != lasting || e != ended {
		t.Errorf("%d lines of a begin, %d reminders, %d of an end; want %d, %d, %d:\n%s", b, l, e, began, lasting, ended, text)
	}
}

// TestATurnWithoutAChangeLooksAtNoProblem: a tenant can make any number of them, and each turn
// reports.
func TestATurnWithoutAChangeLooksAtNoProblem(t *testing.T) {
	p, _, report := watchedLog()
	bad := model.ServiceProblem(model.Name{Namespace: "ns", Name: "web"}, "spec", "is bad")
	report(0, bad)
	p.known = nil // what a look would find again
	report(time.Second, bad)
	if p.known != nil {
		t.Error("a turn without a change looks at the Problems")
	}
	if report(reminderPeriod, bad); len(p.known) != 1 {
		t.Errorf("when a reminder is due: %v, want the Problem", p.known)
	}
	if report(reminderPeriod+time.Second, bad, bad); len(p.known) != 1 {
		t.Errorf("after a change: %v, want the Problem once", p.known)
	}
}

// TestALastingFaultIsOneLineHoweverItsTextChanges has a server whose answers change with
// each attempt, and are sometimes right.
func TestALastingFaultIsOneLineHoweverItsTextChanges(t *testing.T) {
	_, log, report := watchedLog()
	at := time.Duration(0)
	for i := range 10_000 {
		at = time.Duration(i) * time.Second
		switch i % 4 {
		case 0, 1:
			report(at, model.Problem{Where: "API server x", What: fmt.Sprint("fails: ", i)})
		case 2:
			report(at, model.Problem{Where: "API server x", Field: "pods", What: fmt.Sprint("forbids: ", i)})
		case 3:
			report(at)
		}
	}
	wantLines(t, log, 2, 4, 0) // 10,000 s are 2.8 hours
	report(at + time.Minute/2)
	wantLines(t, log, 2, 4, 0)
	report(at + 2*time.Minute)
	wantLines(t, log, 2, 4, 2)
	report(at + 24*time.Hour)
	wantLines(t, log, 2, 4, 2)
}

// TestASecondProblemOfAPlaceIsReported tells two Problems of one place apart by number.
func TestASecondProblemOfAPlaceIsReported(t *testing.T) {
	p, log, report := watchedLog()
	svc := model.Name{Namespace: "a", Name: "b"}
	first, second := model.ServiceProblem(svc, "spec", "x"), model.ServiceProblem(svc, "spec", "a")
	report(0, first)
	report(time.Second, first, second)
	wantLines(t, log, 2, 0, 0)
	report(2*time.Second, first)
	wantLines(t, log, 2, 0, 1)
	if !strings.HasSuffix(log.String(), "what=a\n") {
		t.Errorf("another one was resolved:\n%s", log)
	}
	report(3 * time.Second)
	wantLines(t, log, 2, 0, 2)
	if len(p.faults) != 0 || !p.next.IsZero() {
		t.Errorf("kept: %v, next report %v", p.faults, p.next)
	}
}

// TestAnEditOfAManifestIsANewProblem has one place in a file that an operator changes.
func TestAnEditOfAManifestIsANewProblem(t *testing.T) {
	_, log, report := watchedLog()
	report(0, model.Problem{Where: "a.yaml", What: "line 1", Version: "1"})
	report(1, model.Problem{Where: "a.yaml", What: "line 1", Version: "2"})
	wantLines(t, log, 1, 0, 0)
	report(2, model.Problem{Where: "a.yaml", What: "line 2", Version: "3"})
	wantLines(t, log, 2, 0, 1)
	report(3)
	wantLines(t, log, 2, 0, 2)
}

// TestRemindersAreBounded has more problems than fit in the log.
func TestRemindersAreBounded(t *testing.T) {
	p, log, report := watchedLog()
	var ps []model.Problem
	for i := range 1000 {
		ps = append(ps, model.ServiceProblem(model.Name{Name: fmt.Sprint(i)}, "", "x"))
	}
	report(0, ps...)
	if p.next.IsZero() {
		t.Error("no reminder is due")
	}
	report(time.Hour, ps...)
	wantLines(t, log, maxProblemLines, maxProblemLines, 0)
	if n := strings.Count(log.String(), "count=980"); n != 2 {
		t.Errorf("%d lines count the others, want 2:\n%s", n, log)
	}
}
