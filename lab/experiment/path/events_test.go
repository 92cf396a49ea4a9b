package path

import (
	"context"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/load"
)

// eventsReport returns a report of two rows from rounds in which every side costs more than
// the one before it.
func eventsReport(lost int64) *EventsReport {
	rows := []eventsRow{{path: "NodePort away", kind: load.HTTP}, {path: "NodePort away", kind: load.Conn, rate: 20000}}
	samples := make([][][]EventsSample, len(rows))
	for i := range rows {
		for round := range 6 {
			var sides []EventsSample
			for side := range eventsSides {
				var s EventsSample
				s.Requests, s.Seconds, s.Rate = 8000, 0.4, 20000-float64(1000*max(side-1, 0)+100*round)
				s.CPUPerRequest = 50 + 5*float64(max(side-1, 0)) + float64(round)
				if eventsSides[side].reader && i == 1 {
					s.Counts = EventCounts{Received: 24000, Read: 24000, LeftOut: 7}
					s.ReaderCPU, s.AgentCPU = 2, 4
				}
				sides = append(sides, s)
			}
			samples[i] = append(samples[i], sides)
		}
	}
	last := samples[1][5]
	last[len(last)-1].Counts.Lost, last[len(last)-1].Counts.Missed = lost, lost
	last[0].Errors = map[string]int64{"not sent": 3}
	m := experiment.Machine{Kernel: "6.1.0", Arch: "x86_64", CPU: "Fast CPU", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)}
	return newEventsReport(EventsConfig{Rounds: 6, Duration: 400 * time.Millisecond, Connections: 32}, m, rows, samples)
}

func TestEventsReport(t *testing.T) {
	clitest.Pages(t, "events", eventsReport(0))
	r := eventsReport(21)
	if r.Lost() != 42 || !strings.Contains(text(t, r), "42 events were lost") {
		t.Errorf("42 events were lost, the report has %d:\n%s", r.Lost(), text(t, r))
	}
	if len(r.Rows) != 2*(len(eventsSides)-1) {
		t.Fatalf("%d results of two rows", len(r.Rows))
	}
	if c := r.Rows[0]; c.With != "A/A control" || c.RateRatio.Median != 1 || c.CPURatio.Median != 1 || c.RateRatio.N != 6 {
		t.Errorf("the control: %+v", c)
	}
	if c := r.Rows[7]; c.With != "every event" || c.CPURatio.Median < 1.25 || c.RateRatio.Median > 0.9 || c.Events.Read != 6*24000 ||
		c.ReaderCPU != 2 || c.Errors["not sent"] != 3 {
		t.Errorf("every event: %+v", c)
	}
	if got := newEventsReport(EventsConfig{}, experiment.Machine{}, []eventsRow{{}}, make([][][]EventsSample, 1)); got.Rows != nil {
		t.Errorf("a run without a round has %+v", got.Rows)
	}
}

func text(t *testing.T, r *EventsReport) string {
	t.Helper()
	var out strings.Builder
	if err := r.Write(&page.Page{Writer: &out}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestEventsFit80Columns(t *testing.T) {
	clitest.Fits(t, 80, text(t, eventsReport(0)))
}

func TestEventsConfig(t *testing.T) {
	good := EventsConfig{Name: "events", Rounds: 1, Duration: time.Second, Connections: 1, Rates: []int{20000}}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*EventsConfig){
		"at most 18 characters": func(c *EventsConfig) { c.Name = "a-name-that-is-long" },
		"rates are [0]":         func(c *EventsConfig) { c.Rates = []int{0} },
		"rounds is 0":           func(c *EventsConfig) { c.Rounds = 0 },
	} {
		bad := good
		change(&bad)
		if _, err := Events(context.Background(), bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", bad, err, want)
		}
	}
}
