package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
)

func TestPlanSaysThePublishedCeiling(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"plan", "--load", "tcp=4000", "--table", "524288", "-o", "json"}, &out, &errs); code != exitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	var p planReport
	if err := json.Unmarshal(out.Bytes(), &p); err != nil {
		t.Fatal(err)
	}
	if p.Entries != 480000 || p.Table != 640000 || int(p.Ceilings[0]) != 4369 {
		t.Errorf("%+v", p)
	}
	out.Reset()
	if code := run([]string{"plan", "--table", "131072", "--timeout", "tcp_time_wait=2m"}, &out, &errs); code != exitDone || !strings.Contains(out.String(), "1092/s") {
		t.Errorf("exit code %d: %s%s", code, &out, &errs)
	}
}

func TestPlanRefusesWhatItCannotRead(t *testing.T) {
	for _, args := range [][]string{{}, {"--load", "tcp"}, {"--load", "pigeon=3"}, {"--load", "tcp=1,soon"}, {"--load", "tcp=-1"},
		{"--load", "tcp=1", "--timeout", "udp"}, {"--load", "tcp=1", "--timeout", "udp=-1s"}, {"--load", "tcp=1", "--timeout", "pigeon=3s"}, {"--load", "tcp=1", "--head-room", "1"},
		{"--load", "tcp=1", "--head-room", "nan"}, {"--load", "tcp=1", "--head-room", "inf"}, {"--load", "tftp=1", "--lost", "nan"}, {"--load", "tcp=nan"}, {"--load", "tcp=inf"}, {"--load", "tcp=1", "-o", "xml"}} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"plan"}, args...), &out, &errs); code != exitUsage || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%v: exit code %d: %q", args, code, errs.String())
		}
	}
}

// No number that does not exist, and none that wrapped around, is printed.
func TestPlanRefusesWhatHasNoNumber(t *testing.T) {
	for _, args := range [][]string{
		{"--load", "tcp=1000000", "--head-room", "0.999999999999999"},
		{"--load", "tftp=1e300", "--timeout", "udp=0s"},
		{"--load", "udp=1", "--timeout", "udp=0s", "--table", "1000"},
	} {
		for _, format := range []string{"table", "json"} {
			var out, errs bytes.Buffer
			code := run(append([]string{"plan", "-o", format}, args...), &out, &errs)
			if code != exitFailed || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 || !strings.HasPrefix(errs.String(), "spillway: plan: ") {
				t.Errorf("%v: exit code %d: %s%s", args, code, &out, &errs)
			}
		}
	}
}

func TestPlanSaysThatExpectationsDoNotFit(t *testing.T) {
	for lost, want := range map[string]bool{"1": false, "0": true} {
		args := []string{"plan", "--lost", lost, "--load", "tftp=10"}
		var out, errs bytes.Buffer
		run(args, &out, &errs)
		said := strings.Contains(out.String(), "3000 of 12: they do not fit; set nf_conntrack_expect_max to 3000 or more\n")
		if said == want {
			t.Errorf("lost %s: said %v: %s%s", lost, said, &out, &errs)
		}
		out.Reset()
		run(append(args, "-o", "json"), &out, &errs)
		var got struct {
			Fit *bool `json:"expect_fit"`
		}
		if err := json.Unmarshal(out.Bytes(), &got); err != nil || got.Fit == nil || *got.Fit != want {
			t.Errorf("lost %s: %v: %s%s", lost, err, &out, &errs)
		}
	}
}

func TestTopShowsTheFullestFirstAndSaysOnceWhatItCannotRead(t *testing.T) {
	reports := []conntrack.Report{
		{Namespace: conntrack.Namespace{Inode: 1, Own: true}, Entries: 5, Limits: conntrack.Limits{Max: 1000}},
		{Namespace: conntrack.Namespace{Inode: 2, Names: []string{"pod"}}, Entries: 700, Limits: conntrack.Limits{Max: 1000},
			Counters: conntrack.Counters{Drop: 42}, Expectations: map[string]int{"tftp": 2, "ftp": 1}},
	}
	var out, warn bytes.Buffer
	tp := topPages{out: &out, warn: &warn, once: true, read: func(context.Context) ([]conntrack.Report, error) {
		return reports, errors.New("one namespace is locked")
	}}
	for range 2 {
		if err := tp.page(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	lines := strings.Split(out.String(), "\n")
	if !strings.HasPrefix(lines[1], "pod ") || !strings.Contains(lines[1], "70.0%") || !strings.Contains(lines[1], " 42 ") || !strings.HasSuffix(lines[1], " 3") || !strings.HasPrefix(lines[2], "(here) ") {
		t.Errorf("page:\n%s", &out)
	}
	for _, l := range lines {
		if len(l) > 80 {
			t.Errorf("%d columns: %q", len(l), l)
		}
	}
	if n := strings.Count(warn.String(), "locked"); n != 1 {
		t.Errorf("said %d times", n)
	}
	reports[1].Entries, reports[1].Counters.Drop = 800, 52
	rows := tp.rows(reports, tp.at.Add(2e9))
	if rows[0].PerSecond != 50 || rows[0].DropsPerSec != 5 {
		t.Errorf("rates %v and %v, want 50 and 5", rows[0].PerSecond, rows[0].DropsPerSec)
	}
	tp.read = func(context.Context) ([]conntrack.Report, error) { return nil, conntrack.ErrUnsupported }
	if err := tp.page(t.Context()); !errors.Is(err, conntrack.ErrUnsupported) {
		t.Errorf("nothing could be read: %v", err)
	}
}
