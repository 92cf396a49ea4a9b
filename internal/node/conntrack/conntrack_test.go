package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// open opens a Conn in the current namespace.
func open(t testing.TB) *Conn {
	t.Helper()
	c, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// plant adds an entry to the table of the current namespace.
func plant(t testing.TB, protocol uint8, src, dst, answerFrom string) {
	t.Helper()
	s, d, a := netip.MustParseAddrPort(src), netip.MustParseAddrPort(dst), netip.MustParseAddrPort(answerFrom)
	family := netlink.InetFamily(unix.AF_INET)
	if s.Addr().Is6() {
		family = unix.AF_INET6
	}
	flow := &netlink.ConntrackFlow{
		FamilyType: uint8(family), TimeOut: 100,
		Forward: netlink.IPTuple{Protocol: protocol, SrcIP: net.IP(s.Addr().AsSlice()), SrcPort: s.Port(),
			DstIP: net.IP(d.Addr().AsSlice()), DstPort: d.Port()},
		Reverse: netlink.IPTuple{Protocol: protocol, SrcIP: net.IP(a.Addr().AsSlice()), SrcPort: a.Port(),
			DstIP: net.IP(s.Addr().AsSlice()), DstPort: s.Port()},
	}
	if protocol == unix.IPPROTO_TCP {
		flow.ProtoInfo = &netlink.ProtoInfoTCP{State: 3}
	}
	if err := netlink.ConntrackCreate(netlink.ConntrackTable, family, flow); err != nil {
		t.Fatalf("plant entry %s -> %s: %v", src, dst, err)
	}
}

func entries(t testing.TB, c *Conn, f Filter) []string {
	t.Helper()
	var out []string
	if err := c.Dump(t.Context(), f, func(e *Entry) bool { out = append(out, e.String()); return true }); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func TestADumpGivesEveryEntryAndTheFilterIsTheKernels(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	const confirmed = 1 << 3 // IPS_CONFIRMED, which every planted entry has
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4001", "10.96.0.11:53", "10.96.0.11:53")
	plant(t, unix.IPPROTO_UDP, "[fd00::1]:4000", "[fd96::10]:53", "[fd00::2]:53")
	plant(t, unix.IPPROTO_UDP, "[fd00::1]:4000", "[fd96::11]:54", "[fd96::11]:54")
	plant(t, unix.IPPROTO_TCP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
	for _, row := range []struct {
		name   string
		filter Filter
		want   []string
	}{
		{"all", Filter{}, []string{
			"tcp 192.0.2.1:4000 -> 10.96.0.10:53, answers from 10.244.0.2:53",
			"udp 192.0.2.1:4000 -> 10.96.0.10:53, answers from 10.244.0.2:53",
			"udp 192.0.2.1:4001 -> 10.96.0.11:53, answers from 10.96.0.11:53",
			"udp [fd00::1]:4000 -> [fd96::10]:53, answers from [fd00::2]:53",
			"udp [fd00::1]:4000 -> [fd96::11]:54, answers from [fd96::11]:54"}},
		{"udp", Filter{Protocol: unix.IPPROTO_UDP}, []string{
			"udp 192.0.2.1:4000 -> 10.96.0.10:53, answers from 10.244.0.2:53",
			"udp 192.0.2.1:4001 -> 10.96.0.11:53, answers from 10.96.0.11:53",
			"udp [fd00::1]:4000 -> [fd96::10]:53, answers from [fd00::2]:53",
			"udp [fd00::1]:4000 -> [fd96::11]:54, answers from [fd96::11]:54"}},
		{"one destination", Filter{Protocol: unix.IPPROTO_UDP, OrigDst: netip.MustParseAddrPort("10.96.0.10:53")}, []string{
			"udp 192.0.2.1:4000 -> 10.96.0.10:53, answers from 10.244.0.2:53"}},
		{"one IPv6 destination", Filter{Protocol: unix.IPPROTO_UDP, OrigDst: netip.MustParseAddrPort("[fd96::10]:53")}, []string{
			"udp [fd00::1]:4000 -> [fd96::10]:53, answers from [fd00::2]:53"}},
		{"assured", Filter{Status: Assured}, nil},
		{"confirmed and not answered", Filter{Protocol: unix.IPPROTO_TCP, Status: confirmed, Unset: SeenReply}, []string{
			"tcp 192.0.2.1:4000 -> 10.96.0.10:53, answers from 10.244.0.2:53"}},
	} {
		if got := entries(t, c, row.filter); !slices.Equal(got, row.want) {
			t.Errorf("%s:\n%s\nwant:\n%s", row.name, strings.Join(got, "\n"), strings.Join(row.want, "\n"))
		}
		// The kernel must not have copied an entry that Filter.passes would reject.
		n := 0
		for _, family := range row.filter.families() {
			err := c.dumpAll(unix.NFNL_SUBSYS_CTNETLINK, msgGet, family, row.filter.attrs(family), func([]byte) bool { n++; return true })
			if err != nil {
				t.Errorf("%s: %v", row.name, err)
			}
		}
		if n != len(row.want) {
			t.Errorf("%s: the kernel gave %d entries, want %d", row.name, n, len(row.want))
		}
	}
}

func TestAFilterOfUnsetBits(t *testing.T) {
	f := Filter{Status: DstNAT, Unset: SeenReply}
	for status, want := range map[Status]bool{DstNAT: true, DstNAT | SrcNAT: true, DstNAT | SeenReply: false, SeenReply: false, 0: false} {
		if got := f.passes(&Entry{Status: status}); got != want {
			t.Errorf("status %#x passes: %t", status, got)
		}
	}
	for _, bad := range []Filter{{Unset: SeenReply}, {Status: SeenReply, Unset: SeenReply}} {
		if bad.Validate() == nil {
			t.Errorf("%+v is valid", bad)
		}
	}
}

func TestAddTakesATupleThatNobodyHas(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	for _, row := range []struct{ from, to string }{
		{"10.244.0.2:8080", "192.0.2.1:4000"},
		{"[fd00::2]:8080", "[2001:db8::1]:4000"},
	} {
		from, to := netip.MustParseAddrPort(row.from), netip.MustParseAddrPort(row.to)
		want := Entry{
			Protocol: unix.IPPROTO_TCP, TCPState: 3, Status: Assured | SeenReply, Timeout: 100 * time.Second,
			Orig: Tuple{Src: from, Dst: to}, Reply: Tuple{Src: to, Dst: from},
		}
		for i := range 2 {
			if added, err := c.Add(&want); err != nil || added != (i == 0) {
				t.Fatalf("%s, %d: added %v, error %v", row.from, i, added, err)
			}
		}
		want.Status |= Confirmed
		found := false
		err := c.Dump(t.Context(), Filter{}, func(e *Entry) bool {
			if e.Orig.Src == from {
				e.ID = 0
				e.Timeout = e.Timeout.Round(10 * time.Second)
				found = true
				if diff := cmp.Diff(want, *e, cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b })); diff != "" {
					t.Errorf("-want +got:\n%s", diff)
				}
			}
			return true
		})
		if err != nil || !found {
			t.Errorf("%s: found %v, error %v", row.from, found, err)
		}
	}
	// A connection that netfilter translates: its reply has the tuple.
	plant(t, unix.IPPROTO_TCP, "192.0.2.1:4001", "10.96.0.10:80", "10.244.0.2:8080")
	before := entries(t, c, Filter{})
	from, to := netip.MustParseAddrPort("10.244.0.2:8080"), netip.MustParseAddrPort("192.0.2.1:4001")
	added, err := c.Add(&Entry{Protocol: unix.IPPROTO_TCP, Timeout: time.Second, Orig: Tuple{Src: from, Dst: to},
		Reply: Tuple{Src: to, Dst: from}})
	if added || err != nil {
		t.Errorf("added over another: %v, error %v", added, err)
	}
	if diff := cmp.Diff(before, entries(t, c, Filter{})); diff != "" {
		t.Error(diff)
	}
}

func TestDeleteTakesThatEntryAndNotItsSuccessor(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.2:53")
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4001", "10.96.0.10:53", "10.244.0.2:53")
	var first Entry
	err := c.Dump(t.Context(), Filter{}, func(e *Entry) bool {
		if e.Orig.Src.Port() == 4000 {
			first = *e
			// In the middle of the dump, as the reconciler of stale entries does.
			if err := c.Delete(e); err != nil {
				t.Error(err)
			}
		}
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := entries(t, c, Filter{}); len(got) != 1 || !strings.Contains(got[0], ":4001 ") {
		t.Fatalf("left after the delete: %q", got)
	}
	if err := c.Delete(&first); err != nil {
		t.Errorf("delete what is gone: %v", err)
	}
	plant(t, unix.IPPROTO_UDP, "192.0.2.1:4000", "10.96.0.10:53", "10.244.0.9:53")
	if err := c.Delete(&first); err != nil {
		t.Errorf("delete what is gone, with a successor: %v", err)
	}
	if got := entries(t, c, Filter{}); len(got) != 2 {
		t.Errorf("the successor was deleted: %q", got)
	}
}

func TestADumpEndsWhenAskedAndTheConnGoesOn(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	for i := range 300 {
		plant(t, unix.IPPROTO_UDP, fmt.Sprintf("192.0.2.1:%d", 4000+i), "10.96.0.10:53", "10.244.0.2:53")
	}
	seen := 0
	if err := c.Dump(t.Context(), Filter{}, func(*Entry) bool { seen++; return seen < 3 }); err != nil || seen != 3 {
		t.Errorf("saw %d entries, want 3: %v", seen, err)
	}
	if n := len(entries(t, c, Filter{})); n != 300 {
		t.Errorf("%d entries in the next dump, want 300", n)
	}
}

func TestADumpThatIsBrokenOffIsBegunAgain(t *testing.T) {
	refused := errors.New("refused")
	for _, row := range []struct {
		name  string
		errs  []error
		want  error
		tries int
	}{
		{"at once", []error{nil}, nil, 1},
		{"interrupted", []error{nl.ErrDumpInterrupted, unix.EINTR, unix.ENOBUFS, nil}, nil, 4},
		{"never whole", slices.Repeat([]error{unix.ENOBUFS}, 99), unix.ENOBUFS, dumpTries},
		{"refused", []error{refused, nil}, refused, 1},
	} {
		tries := 0
		err := dumpAgain(t.Context(), func() error { tries++; return row.errs[tries-1] })
		if !errors.Is(err, row.want) || tries != row.tries {
			t.Errorf("%s: %d tries, %v", row.name, tries, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := dumpAgain(ctx, func() error { cancel(); return unix.EINTR })
	if !errors.Is(err, context.Canceled) {
		t.Errorf("canceled between two tries: %v", err)
	}
}

// The decoder relies on well-formed messages of the kernel, but they may be incomplete.
func TestCutAttributesAreNoFault(t *testing.T) {
	netnstest.Enter(t)
	c := open(t)
	plant(t, unix.IPPROTO_TCP, "[fd00::1]:4000", "[fd96::10]:53", "[fd00::2]:53")
	var e Entry
	err := c.dumpAll(unix.NFNL_SUBSYS_CTNETLINK, msgGet, unix.AF_UNSPEC, nil, func(b []byte) bool {
		for n := range b {
			decodeEntry(b[:n:n], &e)
		}
		decodeEntry(b, &e)
		return true
	})
	if err != nil || e.state() != "established" || e.Reply.Src != netip.MustParseAddrPort("[fd00::2]:53") {
		t.Errorf("%s %s: %v", &e, e.state(), err)
	}
}

// A kernel without nf_conntrack_netlink answers so after it has looked for the module.
func TestAKernelWithoutConntrackOverNetlinkIsSaid(t *testing.T) {
	for _, err := range []error{unix.EOPNOTSUPP, fmt.Errorf("dump: %w", unix.EPROTONOSUPPORT)} {
		if !errors.Is(meaning(err), ErrUnsupported) {
			t.Errorf("%v is not told", err)
		}
	}
	if err := meaning(unix.EPERM); errors.Is(err, ErrUnsupported) {
		t.Errorf("no permission is told as %v", err)
	}
}
