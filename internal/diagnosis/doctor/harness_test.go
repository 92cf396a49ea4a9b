package doctor

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// newNamespace creates a network namespace for the test, with loopback up and conntrack
// active, and finds it.
func newNamespace(t testing.TB, role string) conntrack.Namespace {
	t.Helper()
	name := fmt.Sprintf("spw-doctor-%d-%s", os.Getpid(), role)
	shell(t, "ip netns add "+name)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	list, err := conntrack.Namespaces()
	if err != nil && !errors.Is(err, os.ErrPermission) {
		t.Fatal(err)
	}
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return n.Is(name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	inside(t, list[i], `
ip link set lo up
nft 'add table inet track; add chain inet track c { type filter hook output priority 300; }; add rule inet track c ct state new'`)
	return list[i]
}

// outward gives a namespace a default route, to a neighbor that never answers.
const outward = `ip link add d0 type veth peer name d1; ip link set d1 up; ip link set d0 up; ip addr add 192.0.2.1/24 dev d0
ip neigh add 192.0.2.254 lladdr 02:00:00:00:00:01 dev d0; ip route add default via 192.0.2.254
`

// shell runs a script as an operator pastes commands.
func shell(t testing.TB, script string) string {
	t.Helper()
	out, err := exec.Command("bash", "-ec", script).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

func inside(t testing.TB, n conntrack.Namespace, script string) string {
	t.Helper()
	cmd := exec.Command("bash", "-ec", n.EnterCommand()+"bash -es")
	cmd.Stdin = strings.NewReader(script)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
	return string(out)
}

// examine loads these namespaces and runs every check on them.
func examine(t testing.TB, list ...conntrack.Namespace) (*Node, []Finding) {
	t.Helper()
	n, err := Load(t.Context(), Config{Namespaces: func() ([]conntrack.Namespace, error) { return list, nil }})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range n.Problems {
		t.Errorf("not examined: %+v", p)
	}
	return n, Examine(n)
}

func withID(findings []Finding, id string) []Finding {
	return slices.DeleteFunc(slices.Clone(findings), func(f Finding) bool { return f.ID != id })
}

// onlyFinding returns the single finding with that id. Findings of other ids are ignored.
func onlyFinding(t testing.TB, findings []Finding, id string) Finding {
	t.Helper()
	got := withID(findings, id)
	if len(got) != 1 {
		t.Fatalf("%d findings %s, want one, among %s", len(got), id, ids(findings))
	}
	f := got[0]
	if f.Title == "" || f.Packets == "" || f.Remedy == "" || len(f.Evidence) == 0 || len(f.Numbers) == 0 {
		t.Errorf("incomplete: %+v", f)
	}
	return f
}

// expectNone fails if there is such a finding.
func expectNone(t testing.TB, id string, list ...conntrack.Namespace) {
	t.Helper()
	if _, findings := examine(t, list...); len(withID(findings, id)) > 0 {
		t.Errorf("after the fix there is still %+v", withID(findings, id))
	}
}

func ids(findings []Finding) string {
	var out []string
	for _, f := range findings {
		out = append(out, f.ID)
	}
	return strings.Join(out, ", ")
}

// applyFixes applies --fix to one finding; every fix must work.
func applyFixes(t testing.TB, f Finding) []Fixed {
	t.Helper()
	done := ApplyFixes(t.Context(), []Finding{f})
	if len(done) == 0 {
		t.Fatalf("--fix does nothing for %s", f.ID)
	}
	for _, d := range done {
		if !d.Done {
			t.Errorf("fix failed: %+v", d)
		}
	}
	return done
}

// restore restores machine-wide sysctls at the end of the test. Tests that use it only
// raise them, because other tests run at the same time.
func restore(t testing.TB, sysctls ...string) {
	t.Helper()
	for _, name := range sysctls {
		before, err := kernel.ReadSysctl(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := kernel.WriteSysctl(name, before); err != nil {
				t.Errorf("restore: %v", err)
			}
		})
	}
}

func sysctlNow(t testing.TB, name string) string {
	t.Helper()
	s, err := kernel.ReadSysctl(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// fill creates entries by sending datagrams on loopback, until there are enough. None of them
// expires meanwhile, however slow the machine is.
func fill(t testing.TB, n conntrack.Namespace, entries int) {
	t.Helper()
	const timeout = "net.netfilter.nf_conntrack_udp_timeout"
	netnstest.Within(t, n.Names[0], func() {
		before := sysctlNow(t, timeout)
		if err := kernel.WriteSysctl(timeout, "3600"); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = kernel.WriteSysctl(timeout, before) }()
		c, err := conntrack.Open()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		for a := 1; a < 250; a++ {
			fd := socket(t, unix.SOCK_DGRAM)
			for port := 1; port < 1<<16; port++ {
				_ = unix.Sendto(fd, nil, 0, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 1, byte(a)}})
				if port%1000 != 0 {
					continue
				}
				if got, _, err := c.Size(); err != nil || int(got) >= entries {
					unix.Close(fd)
					return
				}
			}
			unix.Close(fd)
		}
		t.Fatal("the table does not fill")
	})
}

func socket(t testing.TB, kind int) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// plant adds a UDP entry to the table of the calling thread's namespace.
func plant(t testing.TB, src, dst string, timeout uint32) {
	t.Helper()
	s, d := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst)
	flow := &netlink.ConntrackFlow{
		FamilyType: unix.AF_INET, TimeOut: timeout,
		Forward: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: net.IP(s.Addr().AsSlice()), SrcPort: s.Port(),
			DstIP: net.IP(d.Addr().AsSlice()), DstPort: d.Port()},
		Reverse: netlink.IPTuple{Protocol: unix.IPPROTO_UDP, SrcIP: net.IP(d.Addr().AsSlice()), SrcPort: d.Port(),
			DstIP: net.IP(s.Addr().AsSlice()), DstPort: s.Port()},
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, unix.AF_INET, flow); err != nil {
		t.Fatal(err)
	}
}

// send sends a datagram from the namespace.
func send(t testing.TB, n conntrack.Namespace, to string) {
	t.Helper()
	netnstest.Within(t, n.Names[0], func() {
		c, err := net.Dial("udp", to)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte("\x00\x01boot\x00octet\x00")) // refused is fine; it reads as a TFTP request
	})
}

// sendNothing sends a TCP header with no flags at all, which no connection has.
func sendNothing(t testing.TB) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	segment := make([]byte, 20)
	segment[1], segment[3], segment[12] = 9, 9, 5<<4
	_ = unix.Sendto(fd, segment, 0, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}) // dropped is fine
}
