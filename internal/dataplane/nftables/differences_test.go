package nftables

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
)

// Every shape of a Service is found as it was written, and what another program changes of it
// is named.
func TestDifferencesOfAPort(t *testing.T) {
	enter(t)
	for _, name := range slices.Sorted(maps.Keys(shapes())) {
		b := open(t)
		ports := shapes()[name]
		replace(t, b, intent.State{Node: node(), Ports: ports})
		for _, p := range ports {
			if found := differences(t, b, p.ID, 20); len(found) > 0 {
				t.Errorf("%s: %q", name, found)
			}
		}
		if err := Cleanup(t.Context(), Config{}); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		shape, edit, want string
		n                 int
	}{
		{"many", "delete element inet spillway services4 { 10.96.0.1 . tcp . 80 }", "10.96.0.1 tcp 80: services4 has no element", 1},
		{"many", "flush map inet spillway services4-16", "10.96.0.1 tcp 80 0: services4-16 has no element", 10},
		{"one-endpoint", "delete element inet spillway services4-1 { 10.96.0.1 . tcp . 80 }; add element inet spillway services4-1 { " +
			"10.96.0.1 . tcp . 80 : 10.9.9.9 . 8080 }",
			"10.96.0.1 tcp 80: services4-1 has 10.9.9.9 8080, not 10.244.0.2 8080", 1},
		{"many", "flush chain inet spillway services4", "table inet spillway: its chains, rules or sets are not as they were written", 1},
		{"many", "add chain inet spillway mine", "table inet spillway: its chains, rules or sets are not as they were written", 1},
	} {
		b := open(t)
		p := shapes()[test.shape][0]
		replace(t, b, intent.State{Node: node(), Ports: shapes()[test.shape]})
		if out, err := runNft(test.edit); err != nil {
			t.Fatalf("%s: %v %s", test.edit, err, out)
		}
		found := differences(t, b, p.ID, 20)
		if len(found) != test.n || !slices.Contains(found, test.want) {
			t.Errorf("%s: %d differences, want %d with %q:\n%s", test.edit, len(found), test.n, test.want, strings.Join(found, "\n"))
		}
		if found = differences(t, b, p.ID, 1); len(found) != 1 {
			t.Errorf("%s: %d differences, at most 1 was asked for", test.edit, len(found))
		}
		replace(t, b, intent.State{Node: node(), Ports: shapes()[test.shape]})
		if err := Cleanup(t.Context(), Config{}); err != nil {
			t.Fatal(err)
		}
	}
}

func differences(t *testing.T, b *Backend, id intent.PortID, limit int) []string {
	t.Helper()
	found, err := b.Differences(t.Context(), id, limit)
	if err != nil {
		t.Fatal(err)
	}
	return found
}
