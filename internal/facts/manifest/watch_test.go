package manifest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// watched is a running Source and its output.
type watched struct {
	t   *testing.T
	dir string

	mu       sync.Mutex
	serves   map[string]string
	problems []model.Problem
	calls    []string // each call, as "name=ip ..."
	full     int
}

func startWatch(t *testing.T, dir string, tweak func(*Source)) *watched {
	t.Helper()
	s, err := New(Config{Dir: dir, Poll: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	s.check = 20 * time.Millisecond
	if tweak != nil {
		tweak(s)
	}
	w := &watched{t: t, dir: dir, serves: map[string]string{}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, w.take) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	w.until("the first call", func() bool { return w.full == 1 })
	return w
}

func (w *watched) take(d model.Delta, problems []model.Problem) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if d.Full {
		w.full++
		clear(w.serves)
	}
	for n, ip := range ips(d) {
		if w.serves[n] = ip; ip == "gone" {
			delete(w.serves, n)
		}
	}
	if problems != nil {
		w.problems = problems
	}
	w.calls = append(w.calls, fmt.Sprint(ips(d)))
}

// until waits for cond, which is called with the lock held.
func (w *watched) until(what string, cond func() bool) {
	w.t.Helper()
	await.NoError(w.t, func() error {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !cond() {
			return fmt.Errorf("%s did not happen: serves %v, problems %q, calls %q", what, w.serves, w.problems, w.calls)
		}
		return nil
	})
}

func (w *watched) serve(want string) {
	w.t.Helper()
	wanted := map[string]string{}
	for _, s := range strings.Fields(want) {
		n, ip, _ := strings.Cut(s, "=")
		wanted[n] = ip
	}
	w.until("serving "+want, func() bool { return fmt.Sprint(w.serves) == fmt.Sprint(wanted) })
}

func (w *watched) report(want string) {
	w.t.Helper()
	w.until("a report of "+want, func() bool {
		return want == "" && len(w.problems) == 0 || want != "" && strings.Contains(lines(w.problems), want)
	})
}

func (w *watched) write(name, text string) {
	w.t.Helper()
	write(w.t, w.dir, name, text)
}

// forget clears the list of calls and returns the old one.
func (w *watched) forget() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	calls := w.calls
	w.calls = nil
	return calls
}

func TestRunFollowsChanges(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("a", "10.0.0.1"))
	w := startWatch(t, dir, nil)
	w.serve("a=10.0.0.1")
	w.report("")
	w.write("b.yaml", service("b", "10.0.0.2"))
	w.serve("a=10.0.0.1 b=10.0.0.2")
	w.write("b.yaml", service("b", "10.0.0.3"))
	w.serve("a=10.0.0.1 b=10.0.0.3")
	w.write("b.yaml", badYAML)
	w.report("b.yaml, document 1: line 1 is not YAML")
	w.serve("a=10.0.0.1 b=10.0.0.3")
	w.write("b.yaml", service("b", "10.0.0.3"))
	w.report("")
	_ = os.Remove(filepath.Join(dir, "a.yaml"))
	w.serve("b=10.0.0.3")
}

func TestRunTakesAnEditorsRenameAsOneChange(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a.yaml", service("a", "10.0.0.1"))
	w := startWatch(t, dir, nil)
	w.forget()
	// vim: the old file becomes a backup, a new one is written, the backup is deleted.
	path := filepath.Join(dir, "a.yaml")
	if err := os.Rename(path, path+"~"); err != nil {
		t.Fatal(err)
	}
	w.write("a.yaml", service("a", "10.0.0.2"))
	_ = os.Remove(path + "~")
	w.serve("a=10.0.0.2")
	// Other editors: a new file replaces the old one by a rename.
	w.write(".a.yaml.tmp", service("a", "10.0.0.3"))
	if err := os.Rename(filepath.Join(dir, ".a.yaml.tmp"), path); err != nil {
		t.Fatal(err)
	}
	w.serve("a=10.0.0.3")
	if calls := w.forget(); len(calls) != 2 || strings.Contains(fmt.Sprint(calls), "gone") {
		t.Errorf("calls: %q", calls)
	}
}

func TestRunFollowsAConfigMap(t *testing.T) {
	dir := t.TempDir()
	version := func(name, a, b string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name), "a.yaml", service("a", a))
		write(t, filepath.Join(dir, name), "b.yaml", service("b", b))
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	version("..1", "10.0.0.1", "10.0.1.1")
	for _, name := range []string{"a.yaml", "b.yaml"} {
		if err := os.Symlink("..data/"+name, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	w := startWatch(t, dir, nil)
	w.serve("a=10.0.0.1 b=10.0.1.1")
	w.forget()
	version("..2", "10.0.0.2", "10.0.1.2")
	if err := os.RemoveAll(filepath.Join(dir, "..1")); err != nil {
		t.Fatal(err)
	}
	w.serve("a=10.0.0.2 b=10.0.1.2")
	if calls := w.forget(); len(calls) != 1 {
		t.Errorf("the change was not seen whole: %q", calls)
	}
}

func TestRunCoalescesABurst(t *testing.T) {
	w := startWatch(t, t.TempDir(), nil)
	w.forget()
	const files = 200
	for i := range files {
		w.write(fmt.Sprintf("%d.yaml", i), service(fmt.Sprintf("s%d", i), "10.0.0.1"))
	}
	w.until("all files", func() bool { return len(w.serves) == files })
	if calls := w.forget(); len(calls) > files/10 {
		t.Errorf("%d calls for one burst", len(calls))
	}
}

// A burst waits for quiet, but not for ever. Time is simulated.
func TestArmWaitsForQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := &watch{timer: time.NewTimer(time.Hour)}
		fires := func(gap time.Duration, events int) time.Duration {
			w.since = time.Time{}
			start := time.Now()
			for range events {
				w.arm()
				select {
				case <-w.timer.C:
					return time.Since(start)
				case <-time.After(gap):
				}
			}
			<-w.timer.C
			return time.Since(start)
		}
		if got := fires(10*time.Millisecond, 4); got != 80*time.Millisecond {
			t.Errorf("4 events in 30 ms were read after %v, not after 10 ms more and 50 ms of quiet", got)
		}
		if got := fires(10*time.Millisecond, 1000); got != 500*time.Millisecond {
			t.Errorf("events without end were read after %v, not after 500 ms", got)
		}
	})
}

func TestRunPicksUpADirectoryThatComesBack(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "manifests")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, dir, "a.yaml", service("a", "10.0.0.1"))
	w := startWatch(t, dir, nil)
	for i, lose := range []func() error{
		func() error { return os.Rename(dir, dir+".aside") },
		func() error { return os.RemoveAll(dir) },
	} {
		if err := lose(); err != nil {
			t.Fatal(err)
		}
		w.report(dir + ": no such file or directory; the last state stays in effect")
		w.serve(fmt.Sprintf("a=10.0.0.%d", i+1))
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		w.write("a.yaml", service("a", fmt.Sprintf("10.0.0.%d", i+2)))
		w.serve(fmt.Sprintf("a=10.0.0.%d", i+2))
		w.report("")
		// It is watched again, not only read again: this test has no polling.
		w.write("b.yaml", service("b", "10.0.0.9"))
		w.serve(fmt.Sprintf("a=10.0.0.%d b=10.0.0.9", i+2))
		_ = os.Remove(filepath.Join(dir, "b.yaml"))
		w.serve(fmt.Sprintf("a=10.0.0.%d", i+2))
	}
}

func TestRunFollowsALinkToADirectory(t *testing.T) {
	top := t.TempDir()
	link := filepath.Join(top, "current")
	point := func(name, ip string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(top, name), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(top, name), "a.yaml", service("a", ip))
		if err := os.Symlink(name, link+".tmp"); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(link+".tmp", link); err != nil {
			t.Fatal(err)
		}
	}
	point("one", "10.0.0.1")
	w := startWatch(t, link, nil)
	w.serve("a=10.0.0.1")
	point("two", "10.0.0.2")
	w.serve("a=10.0.0.2")
	w.write("a.yaml", service("a", "10.0.0.3"))
	w.serve("a=10.0.0.3")
}

func TestRunWatchesWhereALinkLeads(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	write(t, outside, "x.txt", service("a", "10.0.0.1")) // a name that is not read
	link(t, filepath.Join(outside, "x.txt"), filepath.Join(dir, "a.yaml"))
	w := startWatch(t, dir, nil) // without polling
	w.serve("a=10.0.0.1")
	write(t, outside, "x.txt", service("a", "10.0.0.2"))
	w.serve("a=10.0.0.2")
	write(t, outside, "tmp", service("a", "10.0.0.3"))
	if err := os.Rename(filepath.Join(outside, "tmp"), filepath.Join(outside, "x.txt")); err != nil {
		t.Fatal(err)
	}
	w.serve("a=10.0.0.3")
	// A link is added, replaced by one to another place, and the first one is deleted.
	other := t.TempDir()
	write(t, other, "b", service("b", "10.0.1.1"))
	link(t, filepath.Join(other, "b"), filepath.Join(dir, "b.yaml"))
	_ = os.Remove(filepath.Join(dir, "a.yaml"))
	w.serve("b=10.0.1.1")
	write(t, other, "b", service("b", "10.0.1.2"))
	w.serve("b=10.0.1.2")
}

func link(t *testing.T, to, name string) {
	t.Helper()
	if err := os.Symlink(to, name); err != nil {
		t.Fatal(err)
	}
}

func TestRunPollsWhatCannotBeWatched(t *testing.T) {
	outside, dir := t.TempDir(), t.TempDir()
	write(t, outside, "1", service("a", "10.0.0.1"))
	write(t, outside, "2", service("a", "10.0.0.2"))
	between := filepath.Join(t.TempDir(), "link")
	link(t, filepath.Join(outside, "1"), between)
	link(t, between, filepath.Join(dir, "a.yaml"))
	w := startWatch(t, dir, func(s *Source) { s.config.Poll = 30 * time.Millisecond })
	link(t, filepath.Join(outside, "2"), between+".tmp")
	if err := os.Rename(between+".tmp", between); err != nil {
		t.Fatal(err)
	}
	w.serve("a=10.0.0.2")
}

func TestRunFailsIfTheDirectoryIsGoneAtTheStart(t *testing.T) {
	dir := t.TempDir()
	s, err := New(Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(dir)
	err = s.Run(context.Background(), func(model.Delta, []model.Problem) { t.Error("called") })
	if err == nil || !strings.HasPrefix(err.Error(), "read manifests: stat ") {
		t.Errorf("Run: %v", err)
	}
}

func TestEmitSaysOnlyWhatChanged(t *testing.T) {
	var calls []string
	e := emitter{fn: func(d model.Delta, problems []model.Problem) {
		calls = append(calls, fmt.Sprintf("%v %v %d", d.Full, problems != nil, len(problems)))
	}}
	a := []model.Problem{{Where: "a"}}
	node := model.Delta{Nodes: map[string]*model.Node{"n": nil}}
	e.emit(model.Delta{Full: true}, nil)
	e.emit(model.Delta{}, nil)
	e.emit(model.Delta{}, a)
	e.emit(model.Delta{}, a)
	e.emit(node, a)
	e.emit(model.Delta{}, nil)
	want := "[true true 0 false true 1 false false 0 false true 0]"
	if got := fmt.Sprint(calls); got != want {
		t.Errorf("calls %s\nwant  %s", got, want)
	}
}
