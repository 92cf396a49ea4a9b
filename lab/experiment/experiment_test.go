package experiment

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMedian(t *testing.T) {
	tests := []struct {
		name string
		in   []float64
		want float64
	}{
		{"none", nil, 0},
		{"one", []float64{3}, 3},
		{"odd, unsorted", []float64{9, 1, 5}, 5},
		{"even", []float64{4, 1, 3, 2}, 2.5},
		{"outliers do not count", []float64{1, 1, 1, 1000, -1000}, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Median(tt.in); got != tt.want {
				t.Errorf("Median(%v) = %v, want %v", tt.in, got, tt.want)
			}
		})
	}
}

func TestMedianLeavesItsInputAlone(t *testing.T) {
	in := []float64{3, 1, 2}
	Median(in)
	if diff := cmp.Diff([]float64{3, 1, 2}, in); diff != "" {
		t.Error(diff)
	}
}

func TestPairRunsABBA(t *testing.T) {
	var order strings.Builder
	var progress []int
	n := 0.0
	side := func(name string) Arm[float64] {
		return func(context.Context) (float64, error) {
			order.WriteString(name)
			n++
			return n, nil
		}
	}
	p := Pair[float64]{Name: "x", A: side("A"), B: side("B"), Rounds: 3,
		Progress: func(done, total int) { progress = append(progress, done, total) }}
	trial, err := p.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	if order.String() != "ABBAAB" {
		t.Errorf("measured in order %s, want ABBAAB", order.String())
	}
	want := Trial[float64]{Name: "x", A: []float64{1, 4, 5}, B: []float64{2, 3, 6}}
	if diff := cmp.Diff(want, trial); diff != "" {
		t.Errorf("results are in the wrong place (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{0, 6, 1, 6, 2, 6, 3, 6, 4, 6, 5, 6, 6, 6}, progress); diff != "" {
		t.Errorf("progress (-want +got):\n%s", diff)
	}
}

// A machine that slows down all the time must not cause a difference.
func TestDriftFallsOut(t *testing.T) {
	speed := 1000.0
	arm := func(context.Context) (float64, error) { speed *= 0.98; return speed, nil }
	p := Pair[float64]{Name: "drift", A: arm, Rounds: 10}.Control()
	trial, err := p.Run(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	r := trial.Ratio(func(v float64) float64 { return v })
	if math.Abs(r.Median-1) > 0.001 {
		t.Errorf("median ratio is %v, want 1", r.Median)
	}
	if r.Min > 0.985 || r.Max < 1.015 {
		t.Errorf("range is %v–%v: it must show the drift", r.Min, r.Max)
	}
	if trial.Name != "drift (A/A control)" {
		t.Errorf("name is %q", trial.Name)
	}
}

func TestRatioPairsRounds(t *testing.T) {
	trial := Trial[float64]{A: []float64{10, 20, 0, 40}, B: []float64{5, 20, 7, 60}}
	got := trial.Ratio(func(v float64) float64 { return v })
	want := Summary{Median: 1, Min: 0.5, Max: 1.5, Low: 0.5, High: 1.5, N: 3}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("ratio (-want +got):\n%s", diff)
	}
}

func TestFailureKeepsCompleteRounds(t *testing.T) {
	broken := errors.New("server gone")
	calls := 0
	arm := func(context.Context) (int, error) {
		calls++
		if calls == 6 {
			return 0, broken
		}
		return calls, nil
	}
	trial, err := Pair[int]{Name: "p", A: arm, B: arm, Rounds: 5}.Run(context.Background())
	if !errors.Is(err, broken) || !strings.Contains(err.Error(), "run p: round 3: side B") {
		t.Errorf("error is %v", err)
	}
	if len(trial.A) != 2 || len(trial.B) != 2 {
		t.Errorf("kept %d and %d results, want the 2 complete rounds", len(trial.A), len(trial.B))
	}
}

func TestEndOfContextEndsTheRun(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	calls := 0
	arm := func(context.Context) (int, error) {
		if calls++; calls == 3 {
			cancel()
		}
		return 0, nil
	}
	trial, err := Pair[int]{A: arm, B: arm, Rounds: 5}.Run(ctx)
	if !errors.Is(err, context.Canceled) || calls != 3 || len(trial.A) != 1 {
		t.Errorf("error %v after %d calls, %d rounds kept", err, calls, len(trial.A))
	}
}

func TestPairWithoutRoundsOrSides(t *testing.T) {
	arm := func(context.Context) (int, error) { return 0, nil }
	if _, err := (Pair[int]{A: arm, B: arm}).Run(context.Background()); err == nil {
		t.Error("no rounds: no error")
	}
	if _, err := (Pair[int]{A: arm, Rounds: 1}).Run(context.Background()); err == nil {
		t.Error("no side B: no error")
	}
}

func TestTarget(t *testing.T) {
	tests := []struct {
		target Target
		median float64
		n      int
		met    bool
		text   string
	}{
		{Target{Limit: 0.97}, 0.97, 10, true, "≥ 0.97"},
		{Target{Limit: 0.97}, 0.969, 10, false, "≥ 0.97"},
		{Target{Limit: 1.1, AtMost: true}, 1.1, 10, true, "≤ 1.10"},
		{Target{Limit: 1.1, AtMost: true}, 1.2, 10, false, "≤ 1.10"},
		{Target{Limit: 1.1, AtMost: true}, 0, 0, false, "≤ 1.10"},
	}
	for _, tt := range tests {
		if got := tt.target.Met(Summary{Median: tt.median, N: tt.n}); got != tt.met || tt.target.String() != tt.text {
			t.Errorf("%s with %v: met %v, want %v", tt.target, tt.median, got, tt.met)
		}
	}
}

// The ranks are from tables of the sign test, for 95 %.
func TestTheMedianIsHeldByRanks(t *testing.T) {
	for n, want := range map[int]int{1: 0, 5: 0, 6: 0, 8: 0, 9: 1, 12: 2, 20: 5, 30: 9, 100: 39} {
		if got := medianRank(n); got != want {
			t.Errorf("of %d numbers %d are cut off at each end, want %d", n, got, want)
		}
	}
	values := make([]float64, 20)
	for i := range values {
		values[19-i] = float64(i + 1)
	}
	if s := Summarize(values); s.Low != 6 || s.High != 15 || s.Min != 1 || s.Max != 20 {
		t.Errorf("got %+v, want 6 to 15 of 1 to 20", s)
	}
	if Summarize(values[:5]).Sure() || !Summarize(values[:6]).Sure() {
		t.Error("five numbers hold a median with 94 %, six with 97 %")
	}
}

func TestSummaryString(t *testing.T) {
	s := Summarize([]float64{0.953, 0.981, 1.007})
	if got, want := s.String(), "0.981 (0.95–1.01)"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := Summarize(nil).String(); got != "-" {
		t.Errorf("of nothing: %q", got)
	}
}

func TestParseBusy(t *testing.T) {
	got, err := parseBusy([]byte("cpu  100 20 300 9999 888 4 50 7000 60 1\ncpu0 1 2 3\n"))
	if want := 4.74; err != nil || got != want {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	for _, bad := range []string{"", "cpu 1 2 3", "cpu a b c d e f g h", "intr 1 2 3 4 5 6 7 8"} {
		if _, err := parseBusy([]byte(bad)); err == nil {
			t.Errorf("%q: no error", bad)
		}
	}
	if v, err := BusyCPU(); err != nil || v <= 0 {
		t.Errorf("BusyCPU: %v, %v", v, err)
	}
}

func TestMachine(t *testing.T) {
	info := "processor\t: 0\nmodel name\t: Fast  CPU @ 3GHz\nprocessor\t: 1\nmodel name\t: Other\n"
	if got := cpuModel([]byte(info)); got != "Fast CPU @ 3GHz" {
		t.Errorf("model is %q", got)
	}
	if got := cpuModel([]byte("BogoMIPS : 50\n")); got != "an unnamed CPU" {
		t.Errorf("model is %q", got)
	}
	m := Machine{Kernel: "6.1.0", Arch: "x86_64", CPU: "Fast CPU", Cores: 2, Date: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
	if got, want := m.String(), "Linux 6.1.0 x86_64, 2 cores of Fast CPU, 2026-01-02"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if m, err := ReadMachine(); err != nil || m.Kernel == "" || m.Cores < 1 {
		t.Errorf("this machine: %+v, %v", m, err)
	}
}
