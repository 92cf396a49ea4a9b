package inspect

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

func TestFlowStatesHaveNames(t *testing.T) {
	for state := objects.TCFlowStateFLOW_NEW; state <= objects.TCFlowStateFLOW_CLOSED; state++ {
		if flowStates[state] == "" {
			t.Errorf("flow state %d has no name", state)
		}
	}
}
