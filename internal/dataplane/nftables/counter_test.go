package nftables

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestCountersTellWhatIsAskedForAndOutliveChanges(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	web := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:8080"))
	other := port("other", model.IPv4, clusterIP("10.96.0.2", intent.ToCluster), here("10.244.0.2:8080"))
	s := intent.State{Node: node(), Ports: []*intent.ServicePort{web, other}}
	replace(t, open(t), s) // without counters: they come with the flag

	b, err := New(t.Context(), Config{ServiceCounters: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	replace(t, b, s)
	for range 3 {
		if got := m.ask("pod2", "10.96.0.1:80"); !strings.HasPrefix(got, "pod1") {
			t.Fatalf("the pod hears %q", got)
		}
	}
	gone := intent.Changes{Deletes: []intent.PortID{other.ID}}
	if err := b.Apply(t.Context(), gone); err != nil {
		t.Fatal(err)
	}
	if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{other}}); err != nil {
		t.Fatal(err)
	}
	replace(t, b, s)
	if r := b.Repaired(); r.Any() {
		t.Errorf("repaired what it wrote itself: %+v", r)
	}
	out := run(t, "nft", "list", "set", "inet", "spillway", "services4-counters")
	for _, want := range []string{
		"10.96.0.1 . tcp . 80 counter packets 3 bytes 180", "10.96.0.2 . tcp . 80 counter packets 0 bytes 0",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
}
