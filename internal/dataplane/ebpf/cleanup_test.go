package ebpf

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func wantError(t *testing.T, what string, err error, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if err == nil || !strings.Contains(err.Error(), part) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: error %v, want one line with %q", what, err, part)
		}
	}
}

// otherNetns takes the test's thread to a new network namespace.
func otherNetns(t *testing.T) netns.NsHandle {
	t.Helper()
	ns, err := netns.New()
	must.Do(t, err)
	return ns
}

func wantPins(t *testing.T, cfg Config, want bool) {
	t.Helper()
	if _, err := os.Stat(objects.MapsDir(cfg.BPFFS)); (err == nil) != want {
		t.Errorf("pins are there: %v (%v), want %v", err == nil, err, want)
	}
}

func TestCleanupSaysWhatIsNoPlaceOfPins(t *testing.T) {
	cfg := ownPlace(t)
	for _, never := range []string{filepath.Join(t.TempDir(), "never", "used"), filepath.Join(cfg.BPFFS, "never")} {
		cfg.BPFFS = never
		must.Do(t, upgrade.Cleanup(cfg))
	}
	dir := t.TempDir()
	must.Do(t, os.Mkdir(filepath.Join(dir, "links"), 0o700))
	file := filepath.Join(dir, "links", "maps-v1")
	must.Do(t, os.WriteFile(file, nil, 0o600))
	for path, want := range map[string]string{
		dir:         dir + " is not in a bpf file system: give the --bpffs that the agent had",
		file:        file + " is not a directory",
		file + "/a": "not a directory",
	} {
		cfg.BPFFS = path
		wantError(t, path, upgrade.Cleanup(cfg), want)
		if _, err := os.Stat(file); err != nil {
			t.Fatal(err)
		}
	}
}

// Cleanup names objects of other programs among the pins, and deletes all others.
func TestCleanupNamesWhatIsNotOurs(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	eth0 := addOutward(t, "spw-eth0", "192.0.2.10/24")
	runBackend(t, cfg, intent.State{}, nil)
	var strangers []string
	for _, dir := range []string{"", "links", "cgroup"} {
		strange := filepath.Join(cfg.BPFFS, dir, "strange")
		must.Do(t, os.MkdirAll(filepath.Join(strange, "deep"), 0o700))
		strangers = append(strangers, strange)
	}
	b, err := New(t.Context(), cfg) // an agent does not mind
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), intent.State{}))
	must.Do(t, b.Close())
	for range 2 {
		wantError(t, "clean-up", upgrade.Cleanup(cfg), append(strangers, "remove "+cfg.BPFFS+": it holds what is not Spillway's", "rm -r")...)
		wantHooks(t, cfg, eth0, 0)
		wantPins(t, cfg, false)
	}
	for _, strange := range strangers {
		must.Do(t, os.RemoveAll(strange))
	}
	must.Do(t, upgrade.Cleanup(cfg))
	if _, err := os.Stat(cfg.BPFFS); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left (%v)", cfg.BPFFS, err)
	}
}

// Among the maps, too, and in a file system that the agent has mounted for itself.
func TestCleanupNamesWhatIsNotOursAmongTheMaps(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	cfg.BPFFS = filepath.Join(t.TempDir(), "own")
	runBackend(t, cfg, intent.State{}, nil)
	if !kernel.IsOwnBPFFS(cfg.BPFFS) {
		t.Fatalf("%s is not a mount of the agent's", cfg.BPFFS)
	}
	maps := objects.MapsDir(cfg.BPFFS)
	link := filepath.Join(maps, "mymap")
	must.Do(t, os.Link(filepath.Join(maps, "frontends"), link))
	strangers := []string{link}
	for _, dir := range []string{filepath.Join(maps, "strange"), filepath.Join(cfg.BPFFS, objects.LayoutPrefix+"9", "theirs"),
		filepath.Join(cfg.BPFFS, "mine")} {
		must.Do(t, os.MkdirAll(dir, 0o700))
		strangers = append(strangers, dir)
	}
	for range 2 {
		wantError(t, "clean-up", upgrade.Cleanup(cfg), append(strangers, "it holds what is not Spillway's")...)
		if left, err := os.ReadDir(maps); err != nil || len(left) != 2 {
			t.Errorf("%d pins of the maps are left (%v), want the 2 that are not ours", len(left), err)
		}
	}
	for _, strange := range strangers {
		must.Do(t, os.RemoveAll(strange))
	}
	must.Do(t, upgrade.Cleanup(cfg))
	if _, err := os.Stat(cfg.BPFFS); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left (%v)", cfg.BPFFS, err)
	}
}

// Two agents share the file system that the first has mounted: the last one that
// is cleaned up takes it away.
func TestCleanupUnmountsWhatAnAgentHasMounted(t *testing.T) {
	first := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	mounted := func(at string) bool {
		on, err := kernel.OnBPFFS(at)
		must.Do(t, err)
		return on
	}
	at := t.TempDir()
	must.Do(t, unix.Mount("spillway", at, "bpf", 0, "")) // as at /sys/fs/bpf
	first.BPFFS = filepath.Join(at, "first")
	second := first
	second.BPFFS = filepath.Join(at, "second")
	must.Do(t, kernel.EnsureBPFFS(second.BPFFS))
	must.Do(t, upgrade.SetPinOwner(second.BPFFS))
	runBackend(t, first, intent.State{}, nil)
	for range 2 {
		must.Do(t, upgrade.Cleanup(first))
		if _, known, err := objects.OwnerOf(second.BPFFS); err != nil || !known {
			t.Fatalf("the other instance's pins are gone (%v)", err)
		}
	}
	for range 2 {
		must.Do(t, upgrade.Cleanup(second))
		if mounted(at) {
			t.Error("the mount is left")
		}
	}

	// By itself at the very path.
	first.BPFFS = filepath.Join(t.TempDir(), "own")
	runBackend(t, first, intent.State{}, nil)
	for range 2 {
		must.Do(t, upgrade.Cleanup(first))
		if mounted(first.BPFFS) {
			t.Error("the mount is left")
		}
	}
}

// needsTCX skips what is about links alone: filters of another namespace cannot be seen.
func needsTCX(t *testing.T) {
	t.Helper()
	if !kernel.HaveTCX() {
		t.Skip("needs tcx (Linux 6.6): is about its links")
	}
}

// An agent in another network namespace would end the links of the first.
func TestPinsBelongToTheNamespaceTheyWereMadeIn(t *testing.T) {
	needsTCX(t)
	cfg := ownPlace(t)
	stubPrograms(t)
	eth0 := addOutward(t, "spw-eth0", "192.0.2.10/24")
	first, err := netns.Get()
	must.Do(t, err)
	defer first.Close()
	runBackend(t, cfg, intent.State{}, nil)
	someone := exec.Command("sleep", "600") // a process that lives there
	must.Do(t, someone.Start())
	defer func() { _ = someone.Process.Kill(); _ = someone.Wait() }()

	second := otherNetns(t)
	defer second.Close()
	_, err = New(t.Context(), cfg)
	wantError(t, "another agent", err, "bpffs "+cfg.BPFFS+": belongs to the agent of another network namespace, net:[",
		"give another --bpffs", "nsenter --net=/proc/", "/ns/net spillway agent --cleanup --bpffs "+cfg.BPFFS)
	wantError(t, "clean-up from elsewhere", upgrade.Cleanup(cfg), "clean up there: nsenter --net=/proc/")

	// No way in can be seen any more, but the links are at work.
	must.Do(t, someone.Process.Kill())
	_ = someone.Wait()
	_, err = New(t.Context(), cfg)
	wantError(t, "another agent while links are attached", err, "uninstall that agent first: spillway agent --cleanup --bpffs "+cfg.BPFFS)

	must.Do(t, netns.Set(first))
	wantHooks(t, cfg, eth0, 1)
	wantPins(t, cfg, true)
	runBackend(t, cfg, intent.State{}, nil)

	// No agent can clean up there, so this one may.
	must.Do(t, netns.Set(second))
	must.Do(t, upgrade.Cleanup(cfg))
	if _, err := os.Stat(cfg.BPFFS); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is left (%v)", cfg.BPFFS, err)
	}
	must.Do(t, netns.Set(first))
	wantHooks(t, cfg, eth0, 0)
}

func TestANamespaceThatIsGoneBlocksNobody(t *testing.T) {
	needsTCX(t)
	cfg := ownPlace(t)
	stubPrograms(t)
	here, err := netns.Get()
	must.Do(t, err)
	defer here.Close()
	for _, next := range []func() error{
		func() error { runBackend(t, cfg, intent.State{}, nil); return nil }, // a new agent takes over
		func() error { return upgrade.Cleanup(cfg) },
	} {
		doomed := otherNetns(t)
		addOutward(t, "spw-eth0", "192.0.2.10/24")
		runBackend(t, cfg, intent.State{}, nil)
		if !attach.Attached(cfg.BPFFS) {
			t.Fatal("no link was attached: the test is blind")
		}
		must.Do(t, netns.Set(here))
		must.Do(t, doomed.Close())
		await.True(t, "the end of a namespace without users", func() bool { return !attach.Attached(cfg.BPFFS) })
		must.Do(t, next())
		must.Do(t, upgrade.Cleanup(cfg))
		wantPins(t, cfg, false)
	}
}

// clsact filters stay without pins. They must go all the same, whether the
// directory vanished with its file system or is an empty mount point now.
func TestCleanupFindsClsactFiltersWithoutPins(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	cfg.ForceClsact = true
	mount := filepath.Dir(cfg.BPFFS)
	eth0 := addOutward(t, "spw-eth0", "192.0.2.10/24")
	for _, below := range []string{"spillway", ""} {
		cfg.BPFFS = filepath.Join(mount, below)
		runBackend(t, cfg, intent.State{}, nil)
		if n := filters(t, eth0); n != 2 {
			t.Fatalf("%d filters are attached, want 2: the test is blind", n)
		}
		must.Do(t, unix.Unmount(mount, unix.MNT_DETACH))
		if below == "" {
			wantError(t, "clean-up without a bpf file system", upgrade.Cleanup(cfg), "is not in a bpf file system")
		} else {
			must.Do(t, upgrade.Cleanup(cfg))
		}
		if n := filters(t, eth0); n != 0 {
			t.Errorf("%q: %d filters are left", below, n)
		}
		must.Do(t, unix.Mount("bpf", mount, "bpf", 0, "")) // for ownPlace to unmount
	}
}

// filters counts the filters of a device.
func filters(t *testing.T, ifindex int) (n int) {
	t.Helper()
	l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		list, err := netlink.FilterList(l, parent)
		if err != nil && !errors.Is(err, unix.EINVAL) { // no clsact
			t.Fatal(err)
		}
		n += len(list)
	}
	return n
}
