package autopilot

import (
	"log/slog"
	"slices"
	"testing"
	"time"
)

// TestAdviceDoesNotFlap: more is advised at once, less when it stayed less for a while.
func TestAdviceDoesNotFlap(t *testing.T) {
	var notes []string
	p := &Pilot{
		Config:  Config{Log: slog.New(slog.DiscardHandler), Event: func(note string) { notes = append(notes, note) }},
		advised: map[setting]advice{}, metrics: newMetrics(),
	}
	at := time.Now()
	say := func(after time.Duration, sysctl string, from, to, want int) {
		t.Helper()
		notes, at = nil, at.Add(after)
		p.advise(step{setting: setting{Sysctl: sysctl}, From: from, To: to, Why: "full"}, at)
		if len(notes) != want {
			t.Errorf("%s %d -> %d notes %q, want %d", sysctl, from, to, slices.Clone(notes), want)
		}
	}
	say(0, sizeMax, 1000, 2000, 1)
	say(time.Second, sizeMax, 1000, 2000, 0)
	say(time.Second, sizeMax, 1000, 4000, 1)
	say(time.Second, sizeMax, 1000, 2000, 0)
	say(time.Second, sizeMax, 1000, 4000, 0)
	say(Calm-time.Second, sizeMax, 1000, 2000, 0)
	say(time.Second, sizeMax, 1000, 2000, 1)
	say(0, timeoutUDP, 30, 20, 1)
	say(time.Second, timeoutUDP, 30, 25, 0)
	say(time.Second, timeoutUDP, 30, 10, 1)
}
