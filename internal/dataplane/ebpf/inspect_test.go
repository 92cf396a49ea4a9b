package ebpf

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane"
)

func TestTablesAndFlowStates(t *testing.T) {
	b := newMapsBackend(t, ownPlace(t))
	for _, table := range b.Tables() {
		if table.Size == 0 || table.Used != 0 {
			t.Errorf("table %+v of an instance without Services", table)
		}
	}
	if err := b.Flows(t.Context(), func(dataplane.Flow) bool { return true }); err != nil {
		t.Error(err)
	}
}
