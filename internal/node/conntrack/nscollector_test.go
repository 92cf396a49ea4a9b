package conntrack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
)

// gathered returns the metrics of a collector, by metric and netns.
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

// This test does not use the kernel: it would need more namespaces than a test can make.
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
	// Namespaces with series disappear, and one of the others: the sum of the others must
	// not decrease.
	gone, drops, c.at = 129, 3, time.Time{}
	if got = gathered(t, c); got[others] != 20+19*2 || got["spillway_conntrack_namespaces"] != 19 {
		t.Errorf("others dropped %v, %v namespaces", got[others], got["spillway_conntrack_namespaces"])
	}
}

// A process makes as many network namespaces as it likes, with names of its choice. Container
// runtimes bind those of pods to names below /run/netns, so these come first.
func TestNamespacesOfAProcessTakeNoSeriesOfPods(t *testing.T) {
	list := []Namespace{{Inode: 1, Own: true}}
	for i := range 2 * shownNamespaces {
		list = append(list, Namespace{Inode: uint64(100 + i), PID: 100 + i, Command: "!"})
	}
	var pods []Namespace
	for i := range 100 {
		pods = append(pods, Namespace{Inode: uint64(10_000 + i), Names: []string{fmt.Sprintf("cni-%d", i)}})
	}
	used := map[uint64]bool{}
	c := NewNamespaceCollector(func() ([]Namespace, error) { return list, nil })
	c.read = func(_ context.Context, n Namespace) (Report, error) {
		r := Report{Namespace: n}
		if !n.Own || used[n.Inode] {
			r.Entries = 1
		}
		return r, nil
	}
	gathered(t, c)
	// The pods, and the use of conntrack in the node's own namespace, come later.
	list, used[1], c.at = append(list, pods...), true, time.Time{}
	got := gathered(t, c)
	for _, n := range append(pods, list[0]) {
		if _, there := got["spillway_conntrack_namespace_entries "+n.String()]; !there {
			t.Fatalf("%s has no series", n)
		}
	}
	if most := 1 + 6*(shownNamespaces+1); len(got) > most {
		t.Errorf("%d series, want %d at most", len(got), most)
	}
}

// After its time, a scrape enters no namespace, and keeps the last state of the others.
func TestAScrapeEndsWithItsTime(t *testing.T) {
	list := []Namespace{{Inode: 1, Names: []string{"a"}}, {Inode: 2, PID: 2}, {Inode: 3, PID: 3}}
	c := NewNamespaceCollector(func() ([]Namespace, error) { return list, nil })
	ctx, stop := context.WithCancel(t.Context())
	reads, last := 0, 4
	c.read = func(_ context.Context, n Namespace) (Report, error) {
		if reads++; reads == last {
			stop()
		}
		return Report{Namespace: n, Entries: 1}, nil
	}
	c.refresh(ctx)
	c.refresh(ctx)
	if reads != last || len(c.seen) != len(list) {
		t.Errorf("%d readings and %d namespaces, want %d and %d", reads, len(c.seen), last, len(list))
	}
}

// A scrape has a limited time, and reads the list in its order.
func TestNamespacesOfProcessesComeLast(t *testing.T) {
	proc := t.TempDir()
	if err := os.MkdirAll(filepath.Join(proc, "200/ns"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink("net:[1]", filepath.Join(proc, "200/ns/net")),
		os.WriteFile(filepath.Join(proc, "200/comm"), []byte("!first\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	bound := namespaceNamed(t, name(t, "bound"))
	list, err := findNamespaces(proc, nameDirs)
	if err != nil {
		t.Fatal(err)
	}
	at := func(inode uint64) int {
		return slices.IndexFunc(list, func(n Namespace) bool { return n.Inode == inode })
	}
	if last := len(list) - 1; !list[0].Own || at(bound.Inode) < 1 || at(1) != last {
		t.Errorf("want the own one, those with names, %v: %+v", list[last], list)
	}
}

// Measures a scrape of 200 pods: it finds, enters and reads all of them.
func BenchmarkReadCounts(b *testing.B) {
	const pods, every = 200, 15 * time.Second
	names := map[string]bool{}
	for i := range pods {
		name := fmt.Sprintf("spw-counts-%d-%d", os.Getpid(), i)
		if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		b.Cleanup(func() { _ = exec.Command("ip", "netns", "del", name).Run() })
		names[name] = true
	}
	b.ReportAllocs()
	before := cpuTime(b)
	for b.Loop() {
		list, _ := Namespaces()
		n := 0
		for _, ns := range list {
			if len(ns.Names) == 0 || !names[ns.Names[0]] {
				continue // another test's
			}
			if _, err := readCounts(b.Context(), ns); err != nil {
				b.Fatal(err)
			}
			n++
		}
		if n != pods {
			b.Fatalf("%d namespaces", n)
		}
	}
	used := (cpuTime(b) - before) / time.Duration(b.N)
	b.ReportMetric(float64(used)/float64(every)*100, "%core")
}

// cpuTime returns the CPU time of this process, in user space and in the kernel.
func cpuTime(b *testing.B) time.Duration {
	b.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// Without rights, a machine of many pods gives no line for each.
func TestALackOfRightsIsReportedOnce(t *testing.T) {
	refused := func(_ context.Context, n Namespace) (Report, error) {
		if n.Own {
			return Report{Namespace: n, Entries: 1}, nil
		}
		return Report{}, fmt.Errorf("read conntrack of %s: %w", n, os.ErrPermission)
	}
	list := []Namespace{{Own: true}, {Names: []string{"a"}}, {Names: []string{"b"}}, {Names: []string{"c"}}}
	got, err := readAll(t.Context(), list, nil, refused)
	const want = "read conntrack of a: permission denied: run it as root with CAP_SYS_ADMIN and CAP_NET_ADMIN\nread conntrack of other " +
		"network namespaces (2): permission denied"
	if len(got) != 1 || err == nil || err.Error() != want {
		t.Errorf("%d read: %v", len(got), err)
	}
	if _, err := readAll(t.Context(), list[1:], nil, refused); !errors.Is(err, ErrNothingRead) {
		t.Errorf("%v", err)
	}
}

// A page without namespaces is correct if nothing uses conntrack, and an error if nothing
// could be read.
func TestThatNothingCouldBeReadIsSaid(t *testing.T) {
	const path = "/proc/self/ns/mnt" // no network namespace: no thread can enter it as one
	inode, err := namespaceInode(path)
	if err != nil {
		t.Fatal(err)
	}
	locked := Namespace{Inode: inode, path: path}
	if list, err := readAll(t.Context(), []Namespace{locked, locked}, nil, readReport); !errors.Is(err, ErrNothingRead) || len(list) > 0 {
		t.Errorf("%v, %v", list, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: reads conntrack")
	}
	if _, err := readAll(t.Context(), []Namespace{locked, OwnNamespace()}, nil, readReport); err == nil || errors.Is(err, ErrNothingRead) {
		t.Errorf("%v", err)
	}
}

// A pod names its processes, with any bytes. A label that is not UTF-8 would end the agent.
func TestAProcessNameOfAPodDoesNotEndTheScrape(t *testing.T) {
	proc := t.TempDir()
	dir := filepath.Join(proc, "4711", "ns")
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.Symlink("net:[4026532000]", filepath.Join(dir, "net")),
		os.WriteFile(filepath.Join(proc, "4711", "comm"), []byte("\xff\x1b[2J\n"), 0o600)); err != nil {
		t.Fatal(err)
	}
	c := NewNamespaceCollector(func() ([]Namespace, error) {
		list, err := findNamespaces(proc, nil)
		return slices.DeleteFunc(list, func(n Namespace) bool { return n.Own }), err
	})
	c.read = func(_ context.Context, n Namespace) (Report, error) { return Report{Namespace: n, Entries: 2}, nil }
	if got := gathered(t, c); got[`spillway_conntrack_namespace_entries \xff\x1b[2J[4711]`] != 2 {
		t.Errorf("got %v", got)
	}
}
