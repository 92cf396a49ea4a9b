package kube

import (
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// TestAMissingNodeIsOneProblem has no Node at all. If other Nodes exist, intent reports
// the missing Node.
func TestAMissingNodeIsOneProblem(t *testing.T) {
	client, _, err := Connect(without(t))
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Client: client, NodeName: "a"})
	if err != nil {
		t.Fatal(err)
	}
	nodes := s.kinds[2].(*nodeKind)
	for _, c := range []struct {
		listed bool
		known  string
		want   int
	}{{false, "", 0}, {true, "", 1}, {true, "b", 0}, {true, "a", 0}} {
		nodes.listed = c.listed
		clear(nodes.known)
		if c.known != "" {
			nodes.known[model.Name{Name: c.known}] = &model.Node{Name: c.known}
		}
		if got := s.problems(); len(got) != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}
