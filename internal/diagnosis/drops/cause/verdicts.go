package cause

import (
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/drops"
)

// Verdicts names the actions of Spillway's tc programs, by the growth of their counters.
type Verdicts struct {
	bpffs string
	last  map[string]uint64
}

// ReadVerdicts reads the counters of the instance with pins below bpffs. Without such
// an instance, Explain does nothing.
func ReadVerdicts(bpffs string) *Verdicts {
	last, _ := inspect.PinnedVerdicts(bpffs)
	return &Verdicts{bpffs, last}
}

// Explain sets the cause of a drop in a tc program if counters of Spillway grew since
// the drop before.
func (v *Verdicts) Explain(d *drops.Drop) {
	if v.last == nil || !strings.HasPrefix(d.Reason, "TC_") {
		return
	}
	now, err := inspect.PinnedVerdicts(v.bpffs)
	if err != nil {
		return
	}
	var increased []string
	for _, name := range slices.Sorted(maps.Keys(now)) {
		verdict, _ := inspect.VerdictOf(name)
		if verdict.Effect.Ends() && !strings.HasPrefix(name, "socket_") && now[name] > v.last[name] {
			increased = append(increased, name)
		}
	}
	v.last = now
	if len(increased) > 0 {
		d.By, d.Meaning = "spillway", "Spillway's eBPF dataplane did it; its counters that grew: "+strings.Join(increased, ", ")
	}
}
