package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
)

const aModule = "module example.test\n\ngo 1.26\n"

const someTests = `package some

import "testing"

func TestCounts(t *testing.T) {
	for _, lost := range []string{"0", "2"} {
		t.Run("part", func(t *testing.T) {
			t.Attr("lost", lost)
			t.Attr("questions", "1000")
			t.Attr("cluster", "left")
			t.Attr("cluster", "removed")
		})
	}
}

func TestWaits(t *testing.T) { t.Log("is waiting"); select {} }

func TestFails(t *testing.T) { t.Run("deep", func(t *testing.T) { t.Error("on purpose") }) }
`

func TestAFailedRowDoesNotStopTheOthers(t *testing.T) {
	m, out := newMatrix(t)
	rows := []row{
		{"fails", []string{"./some", "-skip", "Waits"}},
		{"is not built", []string{"./broken"}},
		{"passes", []string{"./some", "-run", "Counts"}},
		{"a name of a row that is too long for the line and that says nothing", []string{"./some", "-run", "Counts"}},
	}
	for _, name := range []string{"left", "of-another-test"} {
		if err := os.Mkdir(filepath.Join(m.nodes, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	results := m.run(t.Context(), rows)
	if text := out.String(); !strings.Contains(text, "-name left\n") || strings.Contains(text, "removed\n") ||
		strings.Contains(text, "another-test") {
		t.Errorf("clusters that are left of the rows: want \"left\" alone:\n%s", text)
	}
	var ok []bool
	for _, r := range results {
		ok = append(ok, r.ok)
		if r.took <= 0 {
			t.Errorf("%s took no time", r.name)
		}
	}
	if len(ok) != 4 || ok[0] || ok[1] || !ok[2] || !ok[3] {
		t.Fatalf("rows ended with %v, want two that failed and two that passed:\n%s", ok, out.String())
	}
	for row, want := range map[string]string{"fails": "on purpose", "is-not-built": "cannot use"} {
		if log, err := os.ReadFile(filepath.Join(m.logs, row+".log")); err != nil || !strings.Contains(string(log), want) {
			t.Errorf("the log of %s has no %q: %v\n%s", row, want, err, log)
		}
	}
	text := table(results)
	for line := range strings.Lines(out.String() + text) {
		if n := len([]rune(strings.TrimSpace(line))); n > width {
			t.Errorf("a line has %d columns: %s", n, line)
		}
	}
	for _, want := range []string{"FAILED", "2 lost, 2000 questions", "TestFails/deep\n", "2 of 4 rows failed"} {
		if !strings.Contains(table(results[:3])+text, want) {
			t.Errorf("the table has no %q:\n%s", want, text)
		}
	}
}

// newMatrix returns a matrix of the module above, and its output.
func newMatrix(t *testing.T) (*matrix, *bytes.Buffer) {
	t.Helper()
	var out bytes.Buffer
	m := &matrix{dir: t.TempDir(), nodes: t.TempDir(), logs: t.TempDir(), out: &out}
	for name, text := range map[string]string{
		"go.mod": aModule, "some/some_test.go": someTests, "broken/broken_test.go": "package broken\n\nvar x int = \"\"\n",
	} {
		path := filepath.Join(m.dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m, &out
}

func TestAnInterruptEndsTheRowAndAllOthers(t *testing.T) {
	m, out := newMatrix(t)
	ctx, interrupt := context.WithCancel(t.Context())
	go func() {
		_ = await.Error(func() error {
			log, err := os.ReadFile(filepath.Join(m.logs, "waits.log"))
			if err == nil && !strings.Contains(string(log), "is waiting") {
				err = errors.New("it does not wait yet")
			}
			return err
		})
		interrupt()
	}()
	results := m.run(ctx, []row{{"waits", []string{"./some", "-run", "Waits"}}, {"passes", []string{"./some", "-run", "Counts"}}})
	if len(results) != 1 || results[0].ok {
		t.Errorf("%d rows ended, want one that failed:\n%s", len(results), out)
	}
}
