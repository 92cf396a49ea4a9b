package suite

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/lab/experiment"
)

// made is an experiment of simulated rows.
func made(name string, rows ...experiment.Row) experiment.Experiment {
	return experiment.Experiment{Name: name, Figures: []experiment.Figure{{Key: "v", Name: "value"}},
		Rows: func(experiment.Options) []experiment.Row { return rows }}
}

func measures(name string, values ...float64) experiment.Row {
	return experiment.Row{Name: name, Takes: time.Second, Run: func(_ context.Context, m *experiment.Measurement) error {
		for _, v := range values {
			m.Add("v", v)
		}
		return nil
	}}
}

func statuses(run *experiment.Run) (out []string) {
	for _, res := range run.Results {
		for _, row := range res.Rows {
			out = append(out, row.Name+" "+row.Status)
		}
	}
	return out
}

func TestADisturbedRowSaysSo(t *testing.T) {
	asked := 0
	busy := func(context.Context) string {
		if asked++; asked == 2 {
			return "another program was busy"
		}
		return ""
	}
	run, err := Run(context.Background(), Config{Disturbed: busy}, []experiment.Experiment{made("one", measures("a", 1), measures("b", 2))})
	if err != nil {
		t.Fatal(err)
	}
	rows := run.Results[0].Rows
	if len(rows[0].Notes) != 0 || len(rows[1].Notes) != 1 || rows[1].Notes[0] != "another program was busy" {
		t.Errorf("remarks %v and %v", rows[0].Notes, rows[1].Notes)
	}
	if got := Summary(run); got != "rows: 2 ok; 1 with remarks: see the report" {
		t.Errorf("summary %q", got)
	}
}

func TestRowsThatChangeNothingKeepThoseAwayWhoDo(t *testing.T) {
	held, log := false, []string{}
	row := func(name string, machineWide bool) experiment.Row {
		r := measures(name, 1)
		r.MachineWide = machineWide
		run := r.Run
		r.Run = func(ctx context.Context, m *experiment.Measurement) error {
			log = append(log, fmt.Sprint(name, " ", held))
			return run(ctx, m)
		}
		return r
	}
	share := func(context.Context, func()) (func(), error) {
		held = true
		return func() { held = false }, nil
	}
	if _, err := Run(context.Background(), Config{Share: share},
		[]experiment.Experiment{made("one", row("a", false), row("b", true), row("c", false))}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"a true", "b false", "c true"}, log); diff != "" || held {
		t.Errorf("lock while rows ran (-want +got), held at the end: %v:\n%s", held, diff)
	}
}

func TestAFailedRowIsShownAndTheRestGoesOn(t *testing.T) {
	broken := experiment.Row{Name: "broken", Run: func(_ context.Context, m *experiment.Measurement) error {
		m.Add("v", 1)
		m.Log = "agent on node0:\nlast words\n"
		return errors.New("planted fault")
	}}
	absent := experiment.Row{Name: "absent", Needs: func() error {
		return fmt.Errorf("find kube-proxy: %w: run \"make peers\"", experiment.ErrNotBuilt)
	}, Run: func(context.Context, *experiment.Measurement) error { panic("a row ran whose needs were not met") }}
	seen := 0
	run, err := Run(context.Background(), Config{Finished: func(*experiment.Run) { seen++ }},
		[]experiment.Experiment{made("one", broken, absent, measures("good", 3, 1, 2)), made("two", measures("also good", 5))})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"broken failed", "absent not built", "good ok", "also good ok"}, statuses(run)); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	rows := run.Results[0].Rows
	if rows[0].Error != "planted fault" || rows[0].Log != "agent on node0:\nlast words" || rows[0].Values["v"].N != 1 {
		t.Errorf("the failed row is %+v", rows[0])
	}
	if !strings.Contains(rows[1].Error, "make peers") {
		t.Errorf("the row that is not built says %q", rows[1].Error)
	}
	if v, _ := rows[2].Value("v"); v.Median != 2 || v.Min != 1 || v.Max != 3 {
		t.Errorf("summary is %+v", v)
	}
	if run.Unfinished() != 1 || seen != 4 || Summary(run) != "rows: 2 ok, 1 failed, 1 not built" {
		t.Errorf("%d unfinished, written %d times, %q", run.Unfinished(), seen, Summary(run))
	}
}

func TestAnInterruptMarksWhatIsLeft(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stopped := experiment.Row{Name: "stopped", Run: func(ctx context.Context, m *experiment.Measurement) error {
		m.Add("v", 7)
		cancel()
		return ctx.Err()
	}}
	left := func(name string) experiment.Row {
		return experiment.Row{Name: name, Run: func(context.Context, *experiment.Measurement) error {
			t.Errorf("row %q ran after the interrupt", name)
			return nil
		}}
	}
	run, err := Run(ctx, Config{}, []experiment.Experiment{made("one", measures("good", 1), stopped, left("left")),
		made("two", left("left too"))})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"good ok", "stopped interrupted", "left interrupted", "left too interrupted"}, statuses(run)); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if v, ok := run.Results[0].Rows[1].Value("v"); !ok || v.Median != 7 {
		t.Error("what was measured before the interrupt is lost")
	}
}

func TestMissingProgramsAreNamedWithTheirPackages(t *testing.T) {
	e := made("one", measures("row", 1))
	e.Packages = map[string]string{"no-such-program": "no-such-package"}
	run, err := Run(context.Background(), Config{}, []experiment.Experiment{e, made("two", measures("other", 1))})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"row failed", "other ok"}, statuses(run)); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if e := run.Results[0].Error; !strings.Contains(e, "apt-get install no-such-package") {
		t.Errorf("the experiment says %q", e)
	}
}

func TestOnlyChoosesRows(t *testing.T) {
	only := func(e, row string) bool { return e+"/"+row == "two/b" }
	run, err := Run(context.Background(), Config{Only: only},
		[]experiment.Experiment{made("one", measures("a", 1)), made("two", measures("a", 1), measures("b", 1))})
	if err != nil || len(run.Results) != 1 || len(run.Results[0].Rows) != 1 || run.Results[0].Rows[0].Name != "b" {
		t.Errorf("ran %+v, error %v", run, err)
	}
	if _, err := Run(context.Background(), Config{Only: func(string, string) bool { return false }}, nil); err == nil {
		t.Error("nothing to run: no error")
	}
}

func TestTimeLeftNeverRises(t *testing.T) {
	at := time.Now()
	p := plan{}
	for range 6 {
		p.add(10 * time.Second)
	}
	check := func(when string, want time.Duration) {
		t.Helper()
		if got := p.left(at); got != want {
			t.Errorf("%s: %v left, want %v", when, got, want)
		}
	}
	begin := func() { p.begin(10 * time.Second); p.since = at }
	finish := func(took time.Duration) { p.finish(10*time.Second, took); p.since = at }
	begin()
	check("before", time.Minute)
	finish(0) // a program is not built
	begin()
	check("after a row that failed at once", 50*time.Second)
	at = at.Add(4 * time.Second)
	check("in a row", 46*time.Second)
	at = at.Add(20 * time.Second)
	check("in a row that takes longer", 40*time.Second)
	finish(24 * time.Second) // the other four would take 96 s
	begin()
	check("after a slow row", 40*time.Second)
	if got, want := p.bar(), "[#####...........] 3 of 6, 40s left  "; got != want {
		t.Errorf("bar is %q, want %q", got, want)
	}
	finish(1 * time.Second)
	finish(1 * time.Second)
	finish(1 * time.Second)
	check("after fast rows", 10*time.Second)
}

func TestRefuseKubelet(t *testing.T) {
	proc := t.TempDir()
	for pid, name := range map[string]string{"12": "bash", "345": "kubelet"} {
		if err := os.Mkdir(proc+"/"+pid, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(proc+"/"+pid+"/comm", []byte(name+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := refuseKubelet(proc)
	if err == nil || !strings.Contains(err.Error(), "process 345") || !strings.Contains(err.Error(), "--yes-on-this-node") {
		t.Errorf("error is %v", err)
	}
	os.RemoveAll(proc + "/345")
	if err := refuseKubelet(proc); err != nil {
		t.Errorf("no kubelet: %v", err)
	}
}
