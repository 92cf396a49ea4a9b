package conntrack

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
)

func TestSizeAndLimitsAreTheNamespaces(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	for i := range 3 {
		plant(t, unix.IPPROTO_UDP, fmt.Sprintf("192.0.2.1:%d", 4000+i), "10.96.0.10:53", "10.244.0.2:53")
	}
	plant(t, unix.IPPROTO_TCP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
	n, limit, err := c.Size()
	if err != nil || n != 4 || limit == 0 {
		t.Errorf("size %d of %d, want 4: %v", n, limit, err)
	}
	if err := os.WriteFile(filepath.Join(sysctlDir, "nf_conntrack_udp_timeout"), []byte("17"), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := ReadLimits()
	if err != nil || l.Max != int(limit) || l.Buckets == 0 || l.ExpectMax == 0 {
		t.Errorf("limits %+v: %v", l, err)
	}
	if l.Timeouts["udp"] != 17*time.Second || l.Timeouts["tcp_established"] == 0 || l.Timeouts["udp_stream"] == 0 {
		t.Errorf("timeouts %v", l.Timeouts)
	}
}

func TestCountersCountWhatGoesWrong(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	if sum, err := c.Stats(t.Context()); err != nil || sum.Any() {
		t.Fatalf("counters of a new namespace: %+v: %v", sum, err)
	}
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "nft", "add table ip t; add chain ip t c { type filter hook output priority 0; }; add rule ip t c ct state invalid counter")
	// A TCP segment that belongs to no connection and starts none.
	run(t, "nft", "add chain ip t p { type filter hook prerouting priority 0; }")
	sendNullSegment(t)
	sum, err := c.Stats(t.Context())
	if err != nil || sum.Invalid == 0 {
		t.Errorf("counters after an invalid packet: %+v: %v", sum, err)
	}
	cpus, err := c.cpuStats(t.Context())
	if err != nil || len(cpus) == 0 || cpus[len(cpus)-1].CPU != len(cpus)-1 {
		t.Errorf("CPUs: %+v: %v", cpus, err)
	}
}

func TestExpectationsAreCountedByHelper(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "nft", `add table ip t; add ct helper ip t tftp { type "tftp" protocol udp; }; add chain ip t c { type filter hook output priority 0; }; add rule ip t c udp dport 69 ct helper set "tftp"`)
	sendTFTPRequest(t)
	got, err := c.Expectations(t.Context())
	if err != nil || got["tftp"] != 1 {
		t.Errorf("expectations %v, want one of tftp: %v", got, err)
	}
	var helper string
	c.Dump(t.Context(), Filter{}, func(e *Entry) bool { helper = e.Helper; return true })
	if helper != "tftp" {
		t.Errorf("the entry's helper is %q", helper)
	}
}

func TestEveryNamespaceIsFoundAndOnlyThoseInUseAreShown(t *testing.T) {
	used, idle := name(t, "used"), name(t, "idle")
	ns := namespaceNamed(t, used)
	err := ns.Do(func(*Conn) error {
		plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	namespaceNamed(t, idle)
	// A namespace that only a process holds.
	sleeper := exec.Command("unshare", "-n", "sleep", "60")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sleeper.Process.Kill(); sleeper.Wait() })
	held := func() bool {
		list, err := Namespaces()
		if fatal(err) {
			t.Fatal(err)
		}
		return slices.ContainsFunc(list, func(n Namespace) bool { return n.PID == sleeper.Process.Pid && len(n.Names) == 0 })
	}
	await.True(t, "the namespace that only a process holds", held)
	reports, err := ReadAll(t.Context())
	if fatal(err) {
		t.Fatal(err)
	}
	shown := map[string]int{}
	for _, r := range reports {
		shown[r.Namespace.String()] = r.Entries
	}
	if _, there := shown[idle]; there || shown[used] != 1 {
		t.Errorf("shown: %v", shown)
	}
}

func TestConntrackIsInUseWhereItHoldsOrHeldSomething(t *testing.T) {
	for _, row := range []struct {
		r    Report
		want bool
	}{
		{Report{}, false},
		{Report{Limits: Limits{Max: 10}}, false},
		{Report{Entries: 1}, true},
		{Report{Counters: Counters{Invalid: 1}}, true},
		{Report{Expectations: map[string]int{"tftp": 1}}, true},
	} {
		if got := row.r.InUse(); got != row.want {
			t.Errorf("%+v: %v", row.r, got)
		}
	}
}

func TestANamespaceThatVanishesIsSaidToBeGone(t *testing.T) {
	n := namespaceNamed(t, name(t, "gone"))
	run(t, "ip", "netns", "del", n.Names[0])
	if _, err := readReport(t.Context(), n); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v, want one that says that it does not exist", err)
	}
	if err := (Namespace{Inode: 1, path: "/proc/self/ns/net"}).Do(func(*Conn) error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("another namespace behind the same path: %v", err)
	}
	file := filepath.Join(t.TempDir(), "name")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := (Namespace{Inode: 1, path: file}).Do(func(*Conn) error { return nil }); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a name without its namespace: %v", err)
	}
}

func TestTheKernelLogIsCounted(t *testing.T) {
	counts := countLog(strings.NewReader(strings.Join([]string{
		"4,100,1000000,-;nf_conntrack: nf_conntrack: table full, dropping packet",
		"4,101,1500000,-;nf_conntrack: nf_conntrack: table full in netns 4026532177, dropping packet",
		"4,102,3000000,-;nf_conntrack: nf_conntrack: table full, dropping packet",
		"4,103,3000000,-;net_ratelimit: 12 callbacks suppressed",
		"4,104,4000000,-;nf_conntrack: expectation table full",
		"12,105,5000000,-;nf_conntrack: table full, says some program",
		// A process chooses its name, and that of its program (show_signal_msg).
		"6,107,7000000,-;nf_conntrack[71]: segfault at 0 ip 0000000000401000 sp 00007ffd00000000 error 4 in table full[401000,401000+1000]",
		"6,108,7000000,-;nf_conntrack: t[71]: segfault at 0 ip 0000000000401000 sp 00007ffd00000000 error 4 in expectation table " +
			"full[401000,401000+1000]",
		"6,106,6000000,-;nf_conntrack: default automatic helper assignment has been turned off",
		"rubbish", "4,1;x", "a,b,c;nf_conntrack: table full",
	}, "\n")))
	full := counts[TableFull]
	if full.Lines != 3 || full.rate() != 1 || counts[ExpectTableFull].Lines != 1 || counts[ExpectTableFull].rate() != 0 || len(counts) != 2 {
		t.Errorf("counts: %+v", counts)
	}
	if by := full.ByNetns; len(by) != 2 || by[0].Lines != 2 || by[0].Last != 3e9 || by[4026532177].Lines != 1 || by[4026532177].Last != 1.5e9 {
		t.Errorf("counts by namespace: %+v", by)
	}
	if _, err := KernelLog(t.Context()); err != nil {
		t.Errorf("the real log: %v", err)
	}
}

func TestTheCollectorHasNodeExportersNames(t *testing.T) {
	netnstest.Enter(t)
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
	c := open(t)
	reg := prometheus.NewPedanticRegistry()
	// Gather collects on other threads, which are in another namespace.
	if err := reg.Register(&Collector{open: func() (*Conn, error) { return &Conn{dump: c.dump, ask: c.ask}, nil }}); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
	}
	for _, want := range []string{"entries", "entries_limit", "stat_drop", "stat_early_drop", "stat_found", "stat_insert",
		"stat_insert_failed", "stat_invalid", "stat_search_restart"} {
		if _, there := got["node_nf_conntrack_"+want]; !there {
			t.Errorf("no node_nf_conntrack_%s among %v", want, got)
		}
	}
	if got["node_nf_conntrack_entries"] != 1 || got["node_nf_conntrack_entries_limit"] == 0 {
		t.Errorf("got %v", got)
	}
}

func run(t testing.TB, program string, args ...string) {
	t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

// fatal ignores errors of processes that even root cannot inspect, as in a sandbox.
func fatal(err error) bool { return err != nil && !errors.Is(err, os.ErrPermission) }

func name(t *testing.T, role string) string { return fmt.Sprintf("spw-ct-%d-%s", os.Getpid(), role) }

// namespaceNamed creates a namespace and finds it.
func namespaceNamed(t *testing.T, name string) Namespace {
	t.Helper()
	run(t, "ip", "netns", "add", name)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	list, err := Namespaces()
	if fatal(err) {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(n Namespace) bool { return slices.Contains(n.Names, name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	return list[i]
}

func sendTFTPRequest(t *testing.T) {
	t.Helper()
	fd := socket(t, unix.SOCK_DGRAM, 0)
	if err := unix.Sendto(fd, []byte("\x00\x01boot\x00octet\x00"), 0, &unix.SockaddrInet4{Port: 69, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
}

// sendNullSegment sends a TCP header with no flags at all, which no connection has.
func sendNullSegment(t *testing.T) {
	t.Helper()
	fd := socket(t, unix.SOCK_RAW, unix.IPPROTO_TCP)
	segment := make([]byte, 20)
	segment[1], segment[3], segment[12] = 9, 9, 5<<4
	if err := unix.Sendto(fd, segment, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil && !errors.Is(err, unix.EPERM) {
		t.Fatal(err)
	}
}

func socket(t *testing.T, kind, protocol int) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// countLog counts the records of a log in the format of /dev/kmsg, one per line.
func countLog(r io.Reader) map[LogKind]LogCount {
	counts := map[LogKind]LogCount{}
	for s := bufio.NewScanner(r); s.Scan(); {
		countLine(counts, s.Text())
	}
	return counts
}
