package flows

import (
	"fmt"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// A namespace with many busy Services leaves series to the others.
func TestANamespaceTakesNoSeriesOfOthers(t *testing.T) {
	all := map[intent.PortID]*dataplane.ServiceCounters{}
	port := func(namespace string, number uint16, connections uint64) intent.PortID {
		id := intent.PortID{Service: model.Name{Namespace: namespace, Name: fmt.Sprint("web", number)}, Number: number, Family: model.IPv4}
		all[id] = &dataplane.ServiceCounters{Connections: connections}
		return id
	}
	for i := range uint16(50) {
		port("noisy", i, 1_000_000)
	}
	busy, quiet := port("calm", 1, 10), port("calm", 2, 1)
	other := port("other", 1, 0)
	all[other].Refused = map[string]uint64{"source range": 5}

	top := topServices(all, 8)
	if len(top) != 8 || !slices.Contains(top, busy) || !slices.Contains(top, quiet) || !slices.Contains(top, other) {
		t.Errorf("top 8: %v", top)
	}
	// Within a turn, and within a namespace, traffic decides.
	if got := topServices(all, 2); got[0].Service.Namespace != "noisy" || got[1] != busy {
		t.Errorf("top 2: %v", got)
	}
	if got := topServices(all, 0); len(got) != len(all) {
		t.Errorf("all: %d of %d", len(got), len(all))
	}
}
