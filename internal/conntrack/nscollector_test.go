package conntrack

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// gathered is what a collector gives, by metric and netns.
func gathered(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	if err := reg.Register(c); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			out[name] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return out
}

func TestEveryNamespaceInUseHasItsSeries(t *testing.T) {
	used, idle := namespaceNamed(t, name(t, "shown")), namespaceNamed(t, name(t, "unused"))
	err := used.Do(func(*Conn) error {
		plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	got := gathered(t, NewNamespaceCollector(func() ([]Namespace, error) { return []Namespace{used, idle}, nil }))
	if got["spillway_conntrack_namespaces"] != 1 || got["spillway_conntrack_namespace_entries "+used.Names[0]] != 1 {
		t.Errorf("got %v", got)
	}
}

// The kernel is not asked here: it would take more namespaces than a test makes.
func TestTheNumberOfSeriesHasABound(t *testing.T) {
	const all = shownNamespaces + 20
	gone, drops := 0, uint64(1)
	c := NewNamespaceCollector(func() (list []Namespace, _ error) {
		for i := range all {
			list = append(list, Namespace{Inode: uint64(i + 1), Names: []string{fmt.Sprintf("pod%d", i)}})
		}
		return list, nil
	})
	c.read = func(_ context.Context, n Namespace) (Report, error) {
		if int(n.Inode) <= gone {
			return Report{}, os.ErrNotExist
		}
		return Report{Namespace: n, Entries: 2, Counters: Counters{Drop: drops}}, nil
	}
	got := gathered(t, c)
	others := "spillway_conntrack_namespace_drops_total " + otherNamespaces
	if len(got) != 1+6*(shownNamespaces+1) || got["spillway_conntrack_namespace_entries "+otherNamespaces] != 40 || got[others] != 20 {
		t.Errorf("%d series, others %v and %v dropped", len(got), got["spillway_conntrack_namespace_entries "+otherNamespaces], got[others])
	}
	// Shown ones go, and one of the others: their sum must not go down.
	gone, drops, c.at = 129, 3, time.Time{}
	if got = gathered(t, c); got[others] != 20+19*2 || got["spillway_conntrack_namespaces"] != 19 {
		t.Errorf("others dropped %v, %v namespaces", got[others], got["spillway_conntrack_namespaces"])
	}
}

// What 200 pods cost every 15 s.
func BenchmarkReadCounts(b *testing.B) {
	list, _ := Namespaces()
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ReadCounts(b.Context(), list[0]); err != nil {
			b.Fatal(err)
		}
	}
}
