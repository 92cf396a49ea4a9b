package notrack

import (
	"testing"
	"time"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
)

func TestReportFitsTheTerminal(t *testing.T) {
	met := true
	r := &Report{Machine: experiment.Machine{Kernel: "6.18.0", Arch: "amd64", CPU: "CPU", Cores: 2,
		Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)},
		Mode: "nftables", Rounds: 10, Seconds: 1,
		Comparisons: []Comparison{{Name: "do-not-track ÷ policy that tracks, table full", Figure: "connections/s", A: 1234, B: 23456,
			Ratio: experiment.Summarize([]float64{1, 1.1, 0.9, 1, 1.1, 0.9}), Target: &experiment.Target{Limit: 0.95}, Met: &met,
			FailedA: 12345, EntriesA: 262144, EntriesB: 12}},
		Ceilings: []Ceiling{{Name: "policy that tracks, table full"}},
	}
	clitest.Pages(t, "report", r)
}
