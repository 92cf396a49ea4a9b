package experiment

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// oneRow is a run with one row of one figure.
func oneRow(status string, samples ...float64) *Run {
	return &Run{Format: Format, Machine: Machine{Kernel: "6.1", CPU: "x", Cores: 2}, Results: []Result{{Name: "e",
		Figures: []Figure{{Key: "v", Name: "value", Better: "higher"}},
		Rows:    []RowResult{{Name: "r", Status: status, Values: map[string]Summary{"v": Summarize(samples)}}}}}}
}

func TestCompareSeesBeyondNoise(t *testing.T) {
	tests := []struct {
		name string
		a, b []float64
		want string
	}{
		{"ranges meet", []float64{10, 11, 12}, []float64{12, 13, 14}, "noise"},
		{"higher", []float64{10, 11, 12}, []float64{12.1, 13, 14}, "better"},
		{"lower", []float64{12.1, 13, 14}, []float64{10, 11, 12}, "worse"},
		{"single ones", []float64{10}, []float64{20}, "unknown"},
		{"the same", []float64{10}, []float64{10}, "noise"},
		// Of 9 numbers the lowest and the highest may be cut off: an outlier hides
		// nothing.
		{"outliers", []float64{1, 10, 10, 10, 10, 10, 10, 10, 99}, []float64{1, 20, 20, 20, 20, 20, 20, 20, 99}, "better"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Compare(oneRow(OK, tt.a...), oneRow(OK, tt.b...))
			if len(c.Differences) != 1 || c.Differences[0].Verdict != tt.want {
				t.Errorf("got %+v, want %s", c.Differences, tt.want)
			}
		})
	}
	exact := Figure{Exact: true}
	if v := verdict(exact, Summarize([]float64{0}), Summarize([]float64{1})); v != "changed" {
		t.Errorf("an exact figure that neither is better of: %s", v)
	}
}

// Write prints differences with unknown noise by size. It omits those that are as small
// as differences between runs on an idle machine.
func TestSingleMeasurementsAreShownBySize(t *testing.T) {
	figures := func(values ...float64) *Run {
		run := oneRow(OK, 1)
		row := RowResult{Name: "r", Status: OK, Values: map[string]Summary{}}
		run.Results[0].Figures = nil
		for i, v := range values {
			key := string(rune('a' + i))
			run.Results[0].Figures = append(run.Results[0].Figures, Figure{Key: key, Name: key})
			row.Values[key] = Summarize([]float64{v})
		}
		run.Results[0].Rows = []RowResult{row}
		return run
	}
	var order []string
	for _, d := range Compare(figures(10, 10, 10, 0), figures(11, 20, 1, 5)).shown() {
		order = append(order, d.Figure)
	}
	if diff := cmp.Diff([]string{"d", "c", "b"}, order); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestCompareNamesRowsOfOneRunOnly(t *testing.T) {
	c := Compare(oneRow(OK, 1), oneRow(Failed))
	if diff := cmp.Diff(Comparison{OnlyA: []string{"e: r"}}, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	other := oneRow(OK, 1)
	other.Results[0].Rows[0].Name = "new"
	c = Compare(oneRow(OK, 1), other)
	if diff := cmp.Diff(Comparison{OnlyA: []string{"e: r"}, OnlyB: []string{"e: new"}}, c); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	var text strings.Builder
	if err := c.Write(&text); err != nil || !strings.Contains(text.String(), "only in B: e: new") {
		t.Errorf("written as %q, error %v", text.String(), err)
	}
}

func TestRunsOfOtherMachinesAreNotComparable(t *testing.T) {
	a, b := oneRow(OK, 1), oneRow(OK, 1)
	if err := Comparable(a, b); err != nil {
		t.Errorf("the same machine: %v", err)
	}
	b.Machine.Kernel, b.Quick = "6.18", true
	err := Comparable(a, b)
	for _, want := range []string{"kernel: 6.1, 6.18", "quick: false, true", "--force"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error is %v, want it to say %q", err, want)
		}
	}
}

func TestReadRun(t *testing.T) {
	path := t.TempDir() + "/run.json"
	for text, want := range map[string]string{"{}": "format is 0", "no": "invalid character"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadRun(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want %s", text, err, want)
		}
	}
	text, err := json.Marshal(oneRow(OK, 1, 2))
	if err == nil {
		err = os.WriteFile(path, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	got, err := ReadRun(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(oneRow(OK, 1, 2), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestFormatNumber(t *testing.T) {
	for v, want := range map[float64]string{0.998: "1", 0: "0", 7: "7", 0.0042: "0.0042", 0.5: "0.5", 3.14159: "3.14", 27.06: "27.1",
		100: "100", 999.6: "1,000", 8552.4: "8,552", 1234567: "1,234,567", -1500: "-1,500", 0.00001: "1.0e-05", 1000: "1,000"} {
		if got := FormatNumber(v); got != want {
			t.Errorf("%v: %q, want %q", v, got, want)
		}
	}
}
