package inspect

import (
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

func TestEachRefusalHasAMeaning(t *testing.T) {
	spec, err := objects.LoadTC()
	must.Do(t, err)
	names, err := objects.VerdictNames(spec)
	must.Do(t, err)
	known := map[string]bool{}
	for _, name := range names {
		known[name] = true
		if (meanings[name] != "") != Refuses(name) {
			t.Errorf("verdict %s: meaning %q, refuses %v", name, meanings[name], Refuses(name))
		}
	}
	for name := range meanings {
		if !known[name] {
			t.Errorf("%s is no verdict", name)
		}
	}
}

func TestFlowStatesHaveNames(t *testing.T) {
	for state := objects.TCFlowStateFLOW_NEW; state <= objects.TCFlowStateFLOW_CLOSED; state++ {
		if flowStates[state] == "" {
			t.Errorf("flow state %d has no name", state)
		}
	}
}
