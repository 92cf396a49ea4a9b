package ebpf

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/must"
)

// A whole life: start, restart, restarts with other sizes, clean-up.
func TestBackendLife(t *testing.T) {
	cfg := ownPlace(t)
	eth0 := addOutward(t, "spw-eth0", "192.0.2.10/24")
	state := intent.State{
		Ports: []*intent.ServicePort{objectstest.SimplePort(1, 3), objectstest.SimplePort(2, 2)},
		Node:  intent.Node{Name: "node", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.10")}},
	}
	must.Do(t, os.MkdirAll(filepath.Join(cfg.BPFFS, "maps-v0"), 0o700))

	first := runBackend(t, cfg, state, func() {
		wantHooks(t, cfg, eth0, 0) // not before the maps are filled
	})
	wantHooks(t, cfg, eth0, 1)
	if _, err := os.Stat(filepath.Join(cfg.BPFFS, "maps-v0")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("maps of another version are left (%v)", err)
	}

	// No subtests: they would run on another thread, in another namespace.
	second := runBackend(t, cfg, state, func() {
		objectstest.WantSame(t, "restart: programs before Replace", programIDs(t, cfg), first.programs)
	})
	objectstest.WantSame(t, "restart: maps", second.maps, first.maps)
	objectstest.WantSame(t, "restart: links", second.links, first.links)
	objectstest.WantSame(t, "restart: endpoints", second.endpoints, first.endpoints)
	for hook, id := range second.programs {
		if id == first.programs[hook] {
			t.Errorf("restart: %s still has the program of the run before", hook)
		}
	}

	stubPrograms(t) // what follows is about maps
	cfg.FlowTableSize *= 2
	third := runBackend(t, cfg, state, nil)
	wantChanged(t, third.maps, second.maps, objects.TCMapFlows, objects.TCMapUnconfirmed)
	objectstest.WantSame(t, "larger flow table: links", third.links, first.links)
	objectstest.WantSame(t, "larger flow table: endpoints", third.endpoints, first.endpoints)
	wantUses(t, cfg, third.maps)

	cfg.MaxFrontends *= 2
	fourth := runBackend(t, cfg, state, func() {
		objectstest.WantSame(t, "more Services: programs before Replace", programIDs(t, cfg), third.programs)
	})
	wantChanged(t, fourth.maps, third.maps, append(slices.Clone(objects.PortMaps), objects.TCMapPortFilter)...)
	wantUses(t, cfg, fourth.maps)
	wantHooks(t, cfg, eth0, 1)
	// Flows remember the former ids, so these are not given again.
	for name, id := range fourth.endpoints {
		if slices.Contains(slices.Collect(maps.Values(first.endpoints)), id) {
			t.Errorf("%s has id %d, which was another's", name, id)
		}
	}

	for range 2 {
		must.Do(t, upgrade.Cleanup(cfg))
		wantHooks(t, cfg, eth0, 0)
		if _, err := os.Stat(cfg.BPFFS); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left (%v)", cfg.BPFFS, err)
		}
	}
}

// Where a BPF file system is mounted at the very path, only its content goes.
func TestCleanupOfMountPoint(t *testing.T) {
	cfg := ownPlace(t)
	cfg.BPFFS = filepath.Dir(cfg.BPFFS)
	must.Do(t, os.MkdirAll(objects.MapsDir(cfg.BPFFS), 0o700))
	for range 2 {
		must.Do(t, upgrade.Cleanup(cfg))
		for _, name := range []string{"maps-v1", "links", "cgroup"} {
			if _, err := os.Stat(filepath.Join(cfg.BPFFS, name)); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left (%v)", name, err)
			}
		}
	}
}

func TestNewSaysWhatIsMissing(t *testing.T) {
	good := ownPlace(t)
	file := filepath.Join(t.TempDir(), "file")
	must.Do(t, os.WriteFile(file, nil, 0o600))
	for name, c := range map[string]struct {
		change func(*testing.T, *Config)
		want   string
	}{
		"no cgroup":                 {func(_ *testing.T, c *Config) { c.CgroupRoot = "/nowhere/cgroup" }, "/nowhere/cgroup"},
		"a cgroup root that is not": {func(_ *testing.T, c *Config) { c.CgroupRoot = file }, file},
		"bpffs is a file":           {func(_ *testing.T, c *Config) { c.BPFFS = file }, file},
		"bpffs is below a file":     {func(_ *testing.T, c *Config) { c.BPFFS = file + "/spillway" }, file},
		"bpffs is in use":           {func(_ *testing.T, c *Config) { c.BPFFS = filepath.Dir(file) }, "not empty"},
		"bpffs is read-only":        {readOnly, "read-only"},
		"relative bpffs":            {func(_ *testing.T, c *Config) { c.BPFFS = "bpf" }, `"bpf"`},
		"relative cgroup":           {func(_ *testing.T, c *Config) { c.CgroupRoot = "cgroup" }, `"cgroup"`},
		"unknown bypass":            {func(_ *testing.T, c *Config) { c.Bypass = "sometimes" }, "auto, always or never"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := good
			c.change(t, &cfg)
			b, err := New(t.Context(), cfg)
			if err == nil {
				b.Close()
				t.Fatal("no error")
			}
			if text := err.Error(); !strings.Contains(text, c.want) || strings.Contains(text, "\n") {
				t.Errorf("error %q, want one line with %q", text, c.want)
			}
		})
	}
}

// A kernel that is too old is refused in one line, before anything is loaded;
// hack/vm -k 5.10 has one.
func TestAKernelBelowTheFloorIsRefused(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	running, err := kernel.RunningVersion()
	must.Do(t, err)
	b, err := New(t.Context(), cfg)
	if !running.Less(kernel.Floor) {
		must.Do(t, err)
		must.Do(t, b.Close())
		return
	}
	t.Log(err)
	wantError(t, "Linux "+running.String(), err, "needs Linux 5.15 or newer, this is "+running.String(), "use --proxy-mode nftables")
	wantPins(t, cfg, false)
	must.Do(t, upgrade.Cleanup(cfg))
}

func readOnly(t *testing.T, c *Config) {
	dir := filepath.Dir(c.BPFFS)
	must.Do(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	t.Cleanup(func() { must.Do(t, unix.Mount("", dir, "", unix.MS_REMOUNT, "")) })
}

func TestCanCarry(t *testing.T) {
	b := &Backend{}
	p := objectstest.SimplePort(1, 1)
	must.Do(t, b.CanCarry(p))
	p.ID.Protocol = model.SCTP
	if err := b.CanCarry(p); err == nil || !strings.Contains(err.Error(), "SCTP") || !strings.Contains(err.Error(), "nftables") {
		t.Errorf("SCTP: error %v, want one that names it and another dataplane", err)
	}
	p = objectstest.SimplePort(1, 1)
	p.Helper = intent.FTP
	if err := b.CanCarry(p); err == nil || !strings.Contains(err.Error(), "nftables") ||
		!strings.Contains(err.Error(), intent.HelperAnnotation+"=none") {
		t.Errorf("FTP: error %v, want one that names another dataplane and a way out", err)
	}
}

// kernelIDs are the kernel's numbers of what one run works with.
type kernelIDs struct {
	maps      map[string]ebpf.MapID
	links     map[string]link.ID
	programs  map[string]ebpf.ProgramID
	endpoints map[string]uint32
}

// runBackend starts a backend, writes the state and closes it again.
func runBackend(t *testing.T, cfg Config, state intent.State, beforeReplace func()) kernelIDs {
	t.Helper()
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	if beforeReplace != nil {
		beforeReplace()
	}
	must.Do(t, b.Replace(t.Context(), state))
	wantApplied(t, b, state.Ports)
	ids := kernelIDs{maps: map[string]ebpf.MapID{}, links: map[string]link.ID{},
		endpoints: objectstest.EndpointIDs(t, b.objects.Maps, state.Ports)}
	for name, m := range b.objects.Maps {
		info, err := m.Info()
		must.Do(t, err)
		id, _ := info.ID()
		if _, err := os.Stat(filepath.Join(objects.MapsDir(cfg.BPFFS), name)); err == nil {
			ids.maps[name] = id
		}
	}
	must.Do(t, b.Close())
	for path, l := range pinnedLinks(t, cfg) {
		ids.links[path] = l.ID
	}
	ids.programs = programIDs(t, cfg)
	return ids
}

func programIDs(t *testing.T, cfg Config) map[string]ebpf.ProgramID {
	t.Helper()
	out := map[string]ebpf.ProgramID{}
	for path, l := range pinnedLinks(t, cfg) {
		out[path] = l.Program
	}
	return out
}

func pinnedLinks(t *testing.T, cfg Config) map[string]*link.Info {
	t.Helper()
	out := map[string]*link.Info{}
	for _, dir := range []string{"links", "cgroup"} {
		paths, err := filepath.Glob(filepath.Join(cfg.BPFFS, dir, "*"))
		must.Do(t, err)
		for _, path := range paths {
			l, err := link.LoadPinnedLink(path, nil)
			must.Do(t, err)
			info, err := l.Info()
			must.Do(t, err)
			out[filepath.Base(path)] = info
			l.Close()
		}
	}
	return out
}

// wantUses checks that programs at the hooks work with these maps.
func wantUses(t *testing.T, cfg Config, want map[string]ebpf.MapID) {
	t.Helper()
	byID := map[ebpf.MapID]bool{}
	for _, id := range want {
		byID[id] = true
	}
	for path, l := range pinnedLinks(t, cfg) {
		p, err := ebpf.NewProgramFromID(l.Program)
		must.Do(t, err)
		info, err := p.Info()
		must.Do(t, err)
		ids, _ := info.MapIDs()
		for _, id := range ids {
			m, err := ebpf.NewMapFromID(id)
			must.Do(t, err)
			mi, err := m.Info()
			must.Do(t, err)
			if _, pinned := want[mi.Name]; pinned && want[mi.Name] != id {
				t.Errorf("%s uses an old map %s", path, mi.Name)
			}
			m.Close()
		}
		p.Close()
	}
}

func wantChanged(t *testing.T, have, before map[string]ebpf.MapID, names ...string) {
	t.Helper()
	if len(have) < 10 {
		t.Errorf("only %d maps are pinned", len(have))
	}
	for name, id := range have {
		if changed := id != before[name]; changed != slices.Contains(names, name) {
			t.Errorf("map %s: made again %t", name, changed)
		}
	}
}

// wantHooks checks how many programs are at each hook.
func wantHooks(t *testing.T, cfg Config, ifindex, n int) {
	t.Helper()
	if kernel.HaveTCX() {
		for _, typ := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			wantAttached(t, link.QueryOptions{Target: ifindex, Attach: typ}, n)
		}
	} else {
		wantFilters(t, ifindex, n)
	}
	dir, err := os.Open(cfg.CgroupRoot)
	must.Do(t, err)
	defer dir.Close()
	for typ := range (&objects.Objects{}).SocketPrograms() {
		wantAttached(t, link.QueryOptions{Target: int(dir.Fd()), Attach: typ}, n)
	}
}

// wantFilters does it for devices before 6.6.
func wantFilters(t *testing.T, ifindex, n int) {
	t.Helper()
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		l := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}
		filters, err := netlink.FilterList(l, parent)
		must.Do(t, err)
		if len(filters) != n {
			t.Errorf("%x: %d filters, want %d", parent, len(filters), n)
		}
	}
}

func wantAttached(t *testing.T, opts link.QueryOptions, n int) {
	t.Helper()
	res, err := link.QueryPrograms(opts)
	must.Do(t, err)
	if len(res.Programs) != n {
		t.Errorf("%s: %d programs, want %d", opts.Attach, len(res.Programs), n)
	}
}

// ownPlace gives the test a network namespace, a BPF file system and a cgroup of
// its own, and a configuration for them.
func ownPlace(t *testing.T) Config {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces and loads eBPF programs")
	}
	mount, err := kernel.Cgroup2Mount()
	if err != nil {
		t.Skip(err)
	}
	netnstest.Enter(t)
	cgroup := filepath.Join(mount, fmt.Sprintf("spw-test-%d-dataplane", os.Getpid()))
	must.Do(t, os.Mkdir(cgroup, 0o755))
	t.Cleanup(func() { must.Do(t, os.Remove(cgroup)) })
	dir := t.TempDir()
	must.Do(t, unix.Mount("bpf", dir, "bpf", 0, ""))
	t.Cleanup(func() { must.Do(t, unix.Unmount(dir, 0)) })
	return Config{
		BPFFS: filepath.Join(dir, "spillway"), CgroupRoot: cgroup, Log: quietLog(),
		FlowTableSize: 1024, MaxFrontends: 256, MaxEndpoints: 256,
	}
}

// addVeth makes an interface whose peer eth0 is in a network namespace of its own.
func addVeth(t *testing.T, attrs netlink.LinkAttrs) (l netlink.Link, there netns.NsHandle) {
	t.Helper()
	here, err := netns.Get()
	must.Do(t, err)
	defer here.Close()
	there, err = netns.New()
	must.Do(t, err)
	t.Cleanup(func() { there.Close() })
	must.Do(t, netns.Set(here))
	must.Do(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(there)}))
	l, err = netlink.LinkByName(attrs.Name)
	must.Do(t, err)
	return l, there
}

// addOutward makes an interface that leads out, to a namespace of its own.
func addOutward(t *testing.T, name, cidr string) (ifindex int) {
	t.Helper()
	l, _ := addVeth(t, netlink.LinkAttrs{Name: name})
	addr, err := netlink.ParseAddr(cidr)
	must.Do(t, err)
	must.Do(t, netlink.AddrAdd(l, addr))
	must.Do(t, netlink.LinkSetUp(l))
	return l.Attrs().Index
}

// newMapsBackend is a backend that has all maps and no program.
func newMapsBackend(t *testing.T, cfg Config) *Backend {
	t.Helper()
	c, o := objectstest.Objects(t, cfg)
	b := &Backend{cfg: *c, objects: o}
	b.makeParts()
	var err error
	b.attacher, err = attach.New(attach.Config{PinDir: c.BPFFS})
	must.Do(t, err)
	t.Cleanup(func() { b.attacher.Close() })
	return b
}

func wantApplied(t *testing.T, b *Backend, want []*intent.ServicePort) {
	t.Helper()
	have, err := b.Applied(context.Background())
	must.Do(t, err)
	objectstest.WantPorts(t, have.Ports, want)
}

// TestForeignPinsAreReplaced finds objects of other programs where the maps of an earlier run were:
// maps of another layout, or no maps at all.
func TestForeignPinsAreReplaced(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	runBackend(t, cfg, upgradeState(), nil)
	foreign := map[string]func(path string) error{
		"map": func(path string) error {
			m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 3, ValueSize: 5, MaxEntries: 1})
			if err != nil {
				return err
			}
			defer m.Close()
			return m.Pin(path)
		},
		"program": func(path string) error {
			p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "GPL",
				Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}})
			if err != nil {
				return err
			}
			defer p.Close()
			return p.Pin(path)
		},
	}
	for what, pin := range foreign {
		pins, err := os.ReadDir(objects.MapsDir(cfg.BPFFS))
		must.Do(t, err)
		if len(pins) < 20 {
			t.Fatalf("%d maps are pinned", len(pins))
		}
		paths := []string{filepath.Join(cfg.BPFFS, objects.SeedPin)}
		for _, p := range pins {
			paths = append(paths, filepath.Join(objects.MapsDir(cfg.BPFFS), p.Name()))
		}
		for _, path := range paths {
			must.Do(t, os.Remove(path))
			must.Do(t, pin(path))
		}
		t.Log("foreign:", what)
		wantUses(t, cfg, runBackend(t, cfg, upgradeState(), nil).maps)
	}
}
