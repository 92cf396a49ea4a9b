package doctor

import (
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/conntrack"
)

// A pod makes as many network namespaces as it likes, with as many rules. They do not keep the node
// from being examined.
func TestNamespacesOfPodsHaveALimitedTime(t *testing.T) {
	before := othersTimeout
	othersTimeout = 0
	defer func() { othersTimeout = before }()
	first, second := newNamespace(t, "late1"), newNamespace(t, "late2")
	n, err := Load(t.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) {
		return []conntrack.Namespace{conntrack.OwnNamespace(), first, second}, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(n.Namespaces) != 1 || !n.Namespaces[0].Namespace.Own {
		t.Errorf("examined: %v", n.Namespaces)
	}
	i := slices.IndexFunc(n.Problems, func(p Problem) bool { return strings.Contains(p.What, "not read within") })
	if i < 0 || len(n.Problems[i].Namespaces) != 2 {
		t.Errorf("problems %+v", n.Problems)
	}
}
