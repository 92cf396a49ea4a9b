package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// matrix runs rows.
type matrix struct {
	dir   string // of the module
	nodes string // directory of the clusters: cluster.Dir
	logs  string // directory of the rows' output
	short bool
	start time.Time

	mu    sync.Mutex // of the rest
	out   io.Writer
	wrote time.Time // when out got a line
	last  string    // line of a test's output
}

// result is what a row found.
type result struct {
	row
	ok       bool
	took     time.Duration
	passed   int      // tests and their parts
	failed   []string // the same
	clusters []string // that the tests started
	counts   []count  // what the tests counted, in the order of their first report
}

// count is the sum of a number that tests reported with t.Attr.
type count struct {
	name string
	sum  int
}

func (m *matrix) run(ctx context.Context, rows []row) []result {
	m.start = time.Now()
	var results []result
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go m.reportSilence(ctx)
	for i, r := range rows {
		if ctx.Err() != nil {
			break
		}
		m.progress("%s (%d of %d)", r.name, i+1, len(rows))
		res, err := m.runRow(ctx, r)
		res.ok = err == nil
		if err != nil {
			m.progress("%s: %v", r.name, err)
		}
		results = append(results, res)
		for _, name := range res.clusters {
			if _, err := os.Stat(filepath.Join(m.nodes, name)); err == nil { // the test was ended before its cleanup
				m.progress("  cluster left: bin/spillway-cluster down -name %s", name)
			}
		}
	}
	return results
}

// reportSilence writes a line a minute while tests write none.
func (m *matrix) reportSilence(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Second):
		}
		m.mu.Lock()
		silent, last := time.Since(m.wrote) > time.Minute, m.last
		m.mu.Unlock()
		if silent {
			m.progress("  ... %s", last)
		}
	}
}

// progress writes a line of at most 80 columns with the time since the start.
func (m *matrix) progress(format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wrote = time.Now()
	fmt.Fprintln(m.out, cut(clock(time.Since(m.start))+" "+fmt.Sprintf(format, args...)))
}

func clock(d time.Duration) string {
	s := int(d / time.Second)
	return fmt.Sprintf("%d:%02d:%02d", s/3600, s/60%60, s%60)
}

func (m *matrix) runRow(ctx context.Context, r row) (res result, err error) {
	res.row = r
	started := time.Now()
	defer func() { res.took = time.Since(started) }()
	if err := os.MkdirAll(m.logs, 0o755); err != nil {
		return res, err
	}
	log, err := os.Create(filepath.Join(m.logs, strings.NewReplacer(" ", "-", "/", "-").Replace(r.name)+".log"))
	if err != nil {
		return res, err
	}
	defer log.Close()
	flags := []string{"test", "-json", "-count=1", "-timeout=90m"}
	if m.short {
		flags = append(flags, "-short")
	}
	cmd := exec.CommandContext(ctx, "go", slices.Concat(flags, r.args)...)
	cmd.Dir, cmd.Stderr = m.dir, log
	// go test does not pass a signal on.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return res, err
	}
	if err := cmd.Start(); err != nil {
		return res, err
	}
	err = errors.Join(m.read(&res, out, log), cmd.Wait())
	return res, err
}

// event is what go test -json writes.
type event struct {
	Action, Test, Output string
	Key, Value           string // of t.Attr
	Elapsed              float64
}

// read follows the tests of a row, and writes their output to log.
func (m *matrix) read(res *result, out io.Reader, log io.Writer) error {
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var e event
		if err := json.Unmarshal(line, &e); err != nil {
			_, _ = log.Write(line) // of go itself
			continue
		}
		m.note(res, e, log)
	}
}

func (m *matrix) note(res *result, e event, log io.Writer) {
	switch e.Action {
	case "output", "build-output":
		_, _ = io.WriteString(log, e.Output)
		if text := strings.TrimSpace(e.Output); text != "" {
			m.mu.Lock()
			m.last = text
			m.mu.Unlock()
		}
	case "attr":
		if e.Key == "cluster" {
			res.clusters = append(res.clusters, e.Value)
		} else if n, err := strconv.Atoi(e.Value); err == nil {
			res.count(e.Key, n)
		}
	case "pass", "fail", "skip":
		if e.Test == "" {
			return // the package
		}
		switch e.Action {
		case "pass":
			res.passed++
		case "fail":
			res.failed = append(res.failed, e.Test)
		}
		if strings.Count(e.Test, "/") < 2 {
			m.progress("  %s %s (%.0f s)", e.Action, e.Test, e.Elapsed)
		}
	}
}

func (r *result) count(name string, n int) {
	i := slices.IndexFunc(r.counts, func(c count) bool { return c.name == name })
	if i < 0 {
		r.counts = append(r.counts, count{name: name})
		i = len(r.counts) - 1
	}
	r.counts[i].sum += n
}

const width = 80

// cut makes text fit on a line.
func cut(text string) string {
	if runes := []rune(text); len(runes) > width {
		text = string(runes[:width-1]) + "…"
	}
	return strings.TrimRight(text, " ")
}

// table shows all results in lines of at most 80 columns.
func table(results []result) string {
	name := len("row")
	for _, r := range results {
		name = max(name, len(r.name))
	}
	var b strings.Builder
	line := func(cells ...any) {
		fmt.Fprintln(&b, cut(fmt.Sprintf("%-*s  %-6s  %7s  %s", append([]any{name}, cells...)...)))
	}
	line("row", "result", "time", "counted")
	var failed int
	for _, r := range results {
		state := "ok"
		if !r.ok {
			state = "FAILED"
			failed++
		}
		line(r.name, state, clock(r.took), r.summary())
		for _, t := range r.failed {
			line("  "+t, "", "", "")
		}
	}
	fmt.Fprintf(&b, "%d of %d rows failed\n", failed, len(results))
	return b.String()
}

// summary is what the tests counted, or else the number of tests.
func (r *result) summary() string {
	if len(r.counts) == 0 {
		return fmt.Sprintf("%d passed", r.passed)
	}
	var parts []string
	for _, c := range r.counts {
		parts = append(parts, fmt.Sprintf("%d %s", c.sum, c.name))
	}
	return strings.Join(parts, ", ")
}
