package kernel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces, mounts, loads BPF programs")
	}
}

func TestParseVersion(t *testing.T) {
	for in, want := range map[string]Version{
		"6.18.44-generic": {6, 18, 44}, "5.15.0": {5, 15, 0}, "6.6-rc1": {6, 6, 0}, "5.4.0-193": {5, 4, 0},
	} {
		if got, err := parseVersion(in); err != nil || got != want {
			t.Errorf("%s: %v, %v; want %v", in, got, err, want)
		}
	}
	for _, in := range []string{"", "6", "x.y.z"} {
		if _, err := parseVersion(in); err == nil {
			t.Errorf("%q: no error", in)
		}
	}
	if (Version{5, 15, 0}).Less(Floor) || !(Version{5, 4, 200}).Less(Floor) || (Version{6, 1, 0}).Less(Floor) {
		t.Error("versions are not compared part by part")
	}
}

func TestMissingIsOneLineWithAdvice(t *testing.T) {
	good := Features{
		Kernel: Version{6, 1, 0}, BPFFS: true, Cgroup2: true,
		Place: Place{BPFFS: "/sys/fs/bpf/spillway", CgroupRoot: "/nowhere"},
	}
	for name, c := range map[string]struct {
		change func(*Features)
		want   string
	}{
		"nothing": {func(*Features) {}, ""},
		"old kernel": {
			func(f *Features) { f.Kernel = Version{5, 4, 0}; f.BPFFS = false },
			"eBPF dataplane needs Linux 5.15 or newer, this is 5.4.0: use --proxy-mode nftables",
		},
		"no rights": {func(f *Features) { f.Lacks = []string{"CAP_BPF", "CAP_NET_ADMIN"} },
			"needs CAP_BPF, CAP_NET_ADMIN, which this process lacks"},
		"bpf denied": {
			func(f *Features) { f.Needed = map[string]error{"LPM tries": fmt.Errorf("detect: %w", unix.EPERM)} },
			"needs bpf(2), which a seccomp profile or a security module denies",
		},
		"no bpffs":  {func(f *Features) { f.BPFFS = false }, "mount -t bpf bpf /sys/fs/bpf/spillway"},
		"no cgroup": {func(f *Features) { f.Cgroup2 = false }, "--cgroup-root"},
		"no helper": {
			func(f *Features) { f.Needed = map[string]error{"bpf_x": ebpf.ErrNotSupported, "bpf_y": nil} },
			"needs bpf_x, which Linux 6.1.0",
		},
		"failed probe": {
			func(f *Features) { f.Needed = map[string]error{"bpf_x": errors.New("out of files")} },
			"out of files",
		},
	} {
		f := good
		c.change(&f)
		got := ""
		if err := f.Err(); err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, c.want) || (c.want == "") != (got == "") || strings.Contains(got, "\n") {
			t.Errorf("%s: %q, want one line with %q", name, got, c.want)
		}
	}
}

func TestProbe(t *testing.T) {
	netnstest.Enter(t)
	mount, err := Cgroup2Mount()
	must.Do(t, err)
	dir := mountTestBPF(t)
	must.Do(t, LoadConntrack())
	f, err := Probe(Place{BPFFS: dir, CgroupRoot: mount})
	must.Do(t, err)
	must.Do(t, f.Err())
	t.Logf("%+v", f)
	if f.Kernel.Less(Version{6, 6, 0}) == f.TCX {
		t.Errorf("tcx %v on Linux %s", f.TCX, f.Kernel)
	}
	if f.Kernel.Less(Version{5, 18, 0}) == f.ConntrackLookup {
		t.Errorf("bpf_skb_ct_lookup %v on Linux %s", f.ConntrackLookup, f.Kernel)
	}
	if !f.Kernel.Less(Version{6, 16, 0}) && !f.CsumReplaceIPv6 {
		t.Errorf("no BPF_F_IPV6 on Linux %s", f.Kernel)
	}
	f, err = Probe(Place{BPFFS: t.TempDir(), CgroupRoot: t.TempDir()})
	must.Do(t, err)
	if got := f.missing(); len(got) != 2 {
		t.Errorf("missing %q, want bpffs and cgroup2", got)
	}
}

func mountTestBPF(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, unix.Mount("bpf", dir, "bpf", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dir, 0)) })
	return dir
}

func TestEnsureBPFFS(t *testing.T) {
	needRoot(t)
	inside := filepath.Join(mountTestBPF(t), "a", "b")
	missing := filepath.Join(t.TempDir(), "x", "bpf")
	empty := t.TempDir()
	for _, path := range []string{inside, missing, empty} {
		for range 2 {
			must.Do(t, EnsureBPFFS(path))
			if on, err := OnBPFFS(path); err != nil || !on {
				t.Errorf("%s: no BPF file system there (%v)", path, err)
			}
		}
	}
	must.Do(t, unix.Unmount(missing, 0))
	must.Do(t, unix.Unmount(empty, 0))
	if on, _ := OnBPFFS(missing); on {
		t.Error("mounted twice")
	}
	must.Do(t, EnsureBPFFS(empty))
	must.Do(t, unix.Mount("", empty, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
	for _, path := range []string{empty, filepath.Join(empty, "new")} {
		if err := EnsureBPFFS(path); !errors.Is(err, unix.EROFS) || !strings.Contains(err.Error(), "remount,rw") {
			t.Errorf("%s on a read-only BPF file system: %v", path, err)
		}
	}
	must.Do(t, unix.Unmount(empty, 0))
	full := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(full, "file"), nil, 0o600))
	if err := EnsureBPFFS(full); err == nil || !strings.Contains(err.Error(), "not empty") {
		t.Errorf("directory with files: %v", err)
	}
}

// The reader of mountinfo must undo escapes and refuse half a line.
func TestParseMount(t *testing.T) {
	const line = `33 23 0:28 / /sys/fs/cgroup/my\040unified rw,relatime shared:9 - cgroup2 cgroup2 rw`
	got, err := mountinfo.GetMountsFromReader(strings.NewReader(line), nil)
	if err != nil || len(got) != 1 || got[0].Root != "/" || got[0].Mountpoint != "/sys/fs/cgroup/my unified" ||
		got[0].FSType != "cgroup2" || got[0].Source != "cgroup2" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err := mountinfo.GetMountsFromReader(strings.NewReader("33 23 0:28 / /sys"), nil); err == nil {
		t.Errorf("took half a line for %+v", got)
	}
}

// Only the mount of EnsureBPFFS is removed, and only after its last user.
func TestReleaseBPFFS(t *testing.T) {
	needRoot(t)
	on := func(path string) bool {
		is, err := OnBPFFS(path)
		must.Do(t, err)
		return is
	}
	release := func(path string, want bool) {
		t.Helper()
		for range 2 {
			must.Do(t, ReleaseBPFFS(path))
		}
		if is := on(path) || on(filepath.Dir(path)); is != want {
			t.Errorf("%s: a BPF file system is there: %v, want %v", path, is, want)
		}
	}
	own := filepath.Join(t.TempDir(), "bpf")
	must.Do(t, EnsureBPFFS(own))
	shared := filepath.Join(own, "second") // another instance, in the mount of the first
	must.Do(t, EnsureBPFFS(shared))
	release(own, true)
	must.Do(t, os.Remove(shared))
	held, err := os.Open(own)
	must.Do(t, err)
	release(own, true) // a process has it open
	must.Do(t, held.Close())
	release(shared, false)
	must.Do(t, EnsureBPFFS(own))
	release(own, false)
	if _, err := os.Stat(own); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the mount point is left (%v)", err)
	}
	operators := mountTestBPF(t)
	release(filepath.Join(operators, "spillway"), true)
	release(filepath.Join(t.TempDir(), "never"), false)

	// Two mounts at one place: the upper one decides.
	must.Do(t, EnsureBPFFS(own))
	must.Do(t, unix.Mount("bpf", own, "bpf", 0, ""))
	release(own, true)
	must.Do(t, unix.Unmount(own, 0))
	release(own, false)
}

// A container sees the node's mounts, and the node does not see the container's.
func TestAMountInAContainerLeadsNowhere(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	must.Do(t, unix.Mount("tmpfs", dir, "tmpfs", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dir, 0)) })
	must.Do(t, unix.Mount("", dir, "", unix.MS_SHARED, ""))
	if isSlaveMount(dir) {
		t.Error("on the node it does")
	}
	inside := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its namespace
		inside <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
				return err
			}
			if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
				return err
			}
			if !isSlaveMount(dir) {
				return errors.New("in the container it does not")
			}
			return nil
		}()
	}()
	must.Do(t, <-inside)
}

func TestDo(t *testing.T) {
	home, own := netnstest.Enter(t)
	here, err := NetnsCookie()
	must.Do(t, err)
	var there, again uint64
	must.Do(t, Do(home, func() (err error) { there, err = NetnsCookie(); return err }))
	must.Do(t, Do(own, func() (err error) { again, err = NetnsCookie(); return err }))
	if there == here || again != here || here == 0 {
		t.Errorf("cookies: here %d, in the other %d, here again %d", here, there, again)
	}
	if after, _ := NetnsCookie(); after != here {
		t.Error("the caller's thread was moved")
	}
	bad := errors.New("bad")
	if err := Do(home, func() error { return bad }); !errors.Is(err, bad) {
		t.Errorf("error %v, want the function's", err)
	}
}

func TestNetnsPath(t *testing.T) {
	for in, want := range map[string]string{
		"node-a": "/run/netns/node-a", "/proc/7/ns/net": "/proc/7/ns/net", "7": "/proc/7/ns/net",
	} {
		if got := netnsPath(in); got != want {
			t.Errorf("%s: %s, want %s", in, got, want)
		}
	}
	if _, err := OpenNetns("spw-no-such"); err == nil {
		t.Error("opened a namespace that is not there")
	}
}

func TestSysctlsAreTheNamespaces(t *testing.T) {
	home, _ := netnstest.Enter(t)
	const name = "net.ipv4.ip_local_port_range"
	var before string
	must.Do(t, Do(home, func() (err error) { before, err = ReadSysctl(name); return err }))
	must.Do(t, WriteSysctl(name, "20000 20999"))
	must.Do(t, WriteSysctl("net.ipv4.ip_local_reserved_ports", "20100,20200-20210"))
	r, err := LocalPortRange()
	must.Do(t, err)
	if r != (PortRange{20000, 20999}) {
		t.Errorf("local ports %v", r)
	}
	reserved, err := LocalReservedPorts()
	must.Do(t, err)
	if want := []PortRange{{20100, 20100}, {20200, 20210}}; !slices.Equal(reserved, want) {
		t.Errorf("reserved ports %v, want %v", reserved, want)
	}
	var after string
	must.Do(t, Do(home, func() (err error) { after, err = ReadSysctl(name); return err }))
	if after != before {
		t.Errorf("%s of the other namespace became %q", name, after)
	}
	for _, bad := range []string{"net.ipv4.no_such", "../../etc/passwd", "/etc/passwd", ""} {
		if _, err := ReadSysctl(bad); err == nil {
			t.Errorf("read sysctl %q", bad)
		}
	}
	if got, _ := sysctlPath("net.ipv4.conf.eth0/100.forwarding"); got != "/proc/sys/net/ipv4/conf/eth0.100/forwarding" {
		t.Errorf("path %s", got)
	}
}

func TestWatchAddrs(t *testing.T) {
	netnstest.Enter(t)
	must.Do(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d0"}, PeerName: "d1"}))
	d0, err := netlink.LinkByName("d0")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(d0))
	lists := make(chan []netip.Addr, 100)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	must.Do(t, WatchAddrs(ctx, func(a []netip.Addr) { lists <- a }))
	if got := <-lists; len(got) != 0 {
		t.Errorf("at first %v, want none", got)
	}
	for _, cidr := range []string{"2001:db8::1/64", "192.0.2.1/24", "fe80::9/64"} {
		a, err := netlink.ParseAddr(cidr)
		must.Do(t, err)
		a.Flags = unix.IFA_F_NODAD
		must.Do(t, netlink.AddrAdd(d0, a))
	}
	waitFor(t, lists, "192.0.2.1", "2001:db8::1")
	d1, err := netlink.LinkByName("d1")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetName(d1, "kube-ipvs0")) // of kube-proxy's mode ipvs
	for dev, cidr := range map[netlink.Link]string{d1: "10.96.0.1/32", d0: "192.0.2.2/24"} {
		a, err := netlink.ParseAddr(cidr)
		must.Do(t, err)
		must.Do(t, netlink.AddrAdd(dev, a))
	}
	waitFor(t, lists, "192.0.2.1", "192.0.2.2", "2001:db8::1")
	must.Do(t, netlink.LinkDel(d0))
	waitFor(t, lists)
}

// TestWatchLastingAddrs: addresses that go by themselves, and those that may be another machine's, are left out.
// Deprecated ones are apart, also one that becomes deprecated.
func TestWatchLastingAddrs(t *testing.T) {
	netnstest.Enter(t)
	must.Do(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "d0"}, PeerName: "d1"}))
	d0, err := netlink.LinkByName("d0")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(d0))
	must.Do(t, WriteSysctl("net.ipv6.conf.d0.use_tempaddr", "2"))
	lists := make(chan []netip.Addr, 100)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	must.Do(t, WatchLastingAddrs(ctx, func(lasting, deprecated []netip.Addr) { lists <- slices.Concat(lasting, deprecated) }))
	put := func(cidr string, change func(*netlink.Addr)) {
		t.Helper()
		a, err := netlink.ParseAddr(cidr)
		must.Do(t, err)
		a.Flags = unix.IFA_F_NODAD
		change(a)
		must.Do(t, netlink.AddrReplace(d0, a))
	}
	as := func(*netlink.Addr) {}
	deprecated := func(a *netlink.Addr) { a.ValidLft, a.PreferedLft = 3600, 0 }
	put("2001:db8::1/64", as)
	put("192.0.2.2/24", deprecated)
	put("192.0.2.1/24", as) // secondary: the bit is that of temporary ones of IPv6
	put("2001:db8::2/64", deprecated)
	put("2001:db8::3/64", func(a *netlink.Addr) { a.Flags = 0 }) // d0 has no carrier: the check does not end
	waitFor(t, lists, "192.0.2.1", "2001:db8::1", "192.0.2.2", "2001:db8::2")
	put("2001:db8::1/64", deprecated)
	waitFor(t, lists, "192.0.2.1", "192.0.2.2", "2001:db8::1", "2001:db8::2")
	d1, err := netlink.LinkByName("d1")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(d1)) // the checks end
	waitFor(t, lists, "192.0.2.1", "2001:db8::3", "192.0.2.2", "2001:db8::1", "2001:db8::2")
	put("2001:db8:1::1/64", func(a *netlink.Addr) { a.Flags |= unix.IFA_F_MANAGETEMPADDR })
	waitFor(t, lists, "192.0.2.1", "2001:db8::3", "2001:db8:1::1", "192.0.2.2", "2001:db8::1", "2001:db8::2")
	await.True(t, "the node has a temporary address", func() bool {
		own, err := Addrs()
		must.Do(t, err)
		return len(own) == 7
	})
	must.Do(t, netlink.AddrDel(d0, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 2, 1), Mask: net.CIDRMask(24, 32)}}))
	waitFor(t, lists, "2001:db8::3", "2001:db8:1::1", "192.0.2.2", "2001:db8::1", "2001:db8::2")
}

func waitFor(t *testing.T, lists chan []netip.Addr, want ...string) {
	t.Helper()
	var addrs []netip.Addr
	for _, w := range want {
		addrs = append(addrs, netip.MustParseAddr(w))
	}
	for {
		select {
		case got := <-lists:
			if slices.Equal(got, addrs) {
				return
			}
		case <-time.After(time.Minute):
			t.Fatalf("addresses %v were not told", want)
		}
	}
}
