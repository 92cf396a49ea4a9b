package attach

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// xdpPasses is a program that passes all frames.
func xdpPasses(t *testing.T) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.XDP, License: "GPL", Instructions: asm.Instructions{asm.LoadImm(asm.R0, 2, asm.DWord), asm.Return()},
	})
	must.Do(t, err)
	t.Cleanup(func() { p.Close() })
	return p
}

// wantXDP fails unless an interface has this program; nil: none.
func wantXDP(t *testing.T, name string, want *ebpf.Program) {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must.Do(t, err)
	var have, id ebpf.ProgramID
	if x := l.Attrs().Xdp; x != nil {
		have = ebpf.ProgramID(x.ProgId)
	}
	if want != nil {
		info, err := want.Info()
		must.Do(t, err)
		id, _ = info.ID()
	}
	if have != id {
		t.Errorf("%s has XDP program %d, want %d", name, have, id)
	}
}

// xdpReports collects what an attacher says.
type xdpReports struct {
	devices  map[int]XDPDevice
	decision map[string]string
	calls    int
}

func (r *xdpReports) config(p *ebpf.Program, mode string) *XDP {
	return &XDP{
		Program: p, Mode: mode, Devices: 1 << 30,
		OnDevices: func(d map[int]XDPDevice) { r.devices, r.calls = d, r.calls+1 },
		OnDecision: func(iface, decision string, _ error) {
			if r.decision == nil {
				r.decision = map[string]string{}
			}
			r.decision[iface] = decision
		},
	}
}

func TestXDPFollowsInterfacesAndRestarts(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	newPod(t, "cali1")
	first, second := xdpPasses(t), xdpPasses(t)

	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(first, XDPGeneric)})
	must.Do(t, a.Sync(context.Background()))
	must.Do(t, a.Sync(context.Background()))
	wantXDP(t, "eth0", first)
	wantXDP(t, "cali1", nil)
	l, err := netlink.LinkByName("eth0")
	must.Do(t, err)
	if d := r.devices[eth0]; len(r.devices) != 1 || r.calls != 1 || d.MAC != macOf(l.Attrs().HardwareAddr) || !d.Redirects {
		t.Errorf("after %d calls: devices %+v, want eth0 with its address", r.calls, r.devices)
	}
	if r.decision["eth0"] != XDPGeneric {
		t.Errorf("decisions %v", r.decision)
	}
	must.Do(t, netlink.LinkSetHardwareAddr(l, []byte{2, 1, 2, 3, 4, 5}))
	must.Do(t, a.Sync(context.Background()))
	if r.devices[eth0].MAC != [6]byte{2, 1, 2, 3, 4, 5} {
		t.Errorf("the address has changed: %+v", r.devices)
	}
	a.Close()
	wantXDP(t, "eth0", first) // it goes on without the agent

	b := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(second, XDPGeneric)})
	must.Do(t, b.Sync(context.Background()))
	wantXDP(t, "eth0", second)
	must.Do(t, netlink.LinkDel(l))
	must.Do(t, b.Sync(context.Background()))
	if len(r.devices) > 0 {
		t.Errorf("the device is gone: %+v", r.devices)
	}
	addDummyNIC(t, "eth1", "192.0.2.2/24")
	must.Do(t, b.Sync(context.Background()))
	wantXDP(t, "eth1", second)
	b.Close()

	without := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, without.Sync(context.Background()))
	wantXDP(t, "eth1", nil)
	must.Do(t, UnpinXDP(dir))
}

// An agent that was killed while it pinned a link leaves one that the next agent replaces.
func TestXDPAfterACrash(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	l, err := link.AttachXDP(link.XDPOptions{Program: xdpPasses(t), Interface: eth0, Flags: link.XDPGenericMode})
	must.Do(t, err)
	must.Do(t, os.MkdirAll(xdpDir(dir), 0o700))
	must.Do(t, l.Pin(filepath.Join(xdpDir(dir), strconv.Itoa(eth0)+newNameSuffix)))
	must.Do(t, l.Close())
	next := xdpPasses(t)
	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(next, XDPGeneric)})
	await.NoError(t, func() error { // the kernel detaches a link without a pin on its own time
		must.Do(t, a.Sync(context.Background()))
		if len(r.devices) == 0 {
			return errors.New(r.decision["eth0"])
		}
		return nil
	})
	wantXDP(t, "eth0", next)
}

// An instance whose agent is gone leaves nothing behind.
func TestUnpinDetachesXDP(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	addDummyNIC(t, "eth0", "192.0.2.1/24")
	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(xdpPasses(t), XDPGeneric)})
	must.Do(t, a.Sync(context.Background()))
	a.Close()
	must.Do(t, Unpin(dir))
	wantXDP(t, "eth0", nil)
}

// A device that cannot run the program safely has none. The decision names the reason.
func TestXDPIsRefused(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	addDummyNIC(t, "eth0", "192.0.2.1/24")
	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(xdpPasses(t), XDPNative)})
	must.Do(t, a.Sync(context.Background()))
	wantXDP(t, "eth0", nil)
	if !strings.Contains(r.decision["eth0"], "checksum") || len(r.devices) > 0 {
		t.Errorf("decision %v, devices %v", r.decision, r.devices)
	}
	if why := (&device{kind: "device"}).withoutXDP(true); !strings.Contains(why, "VLAN") {
		t.Errorf("a device with VLANs: %q", why)
	}
	if why := (&device{kind: "bond"}).withoutXDP(false); !strings.Contains(why, "bond") {
		t.Errorf("a bond: %q", why)
	}
	if why := (&device{kind: "device"}).withoutXDP(false); why != "" {
		t.Errorf("a network card: %q", why)
	}
}

// linkOf returns the id of the XDP link of a device.
func linkOf(t *testing.T, dir string, ifindex int) link.ID {
	t.Helper()
	l, err := link.LoadPinnedLink(filepath.Join(xdpDir(dir), strconv.Itoa(ifindex)), nil)
	must.Do(t, err)
	defer l.Close()
	info, err := l.Info()
	must.Do(t, err)
	return info.ID
}

// Drivers that do not check a raised MTU are asked again, where that is safe.
func TestXDPAndARaisedMTU(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(xdpPasses(t), XDPGeneric)})
	for _, recheck := range []bool{true, false} {
		a.xdp.recheck = recheck
		set := func(mtu int) link.ID {
			l, err := netlink.LinkByName("eth0")
			must.Do(t, err)
			must.Do(t, netlink.LinkSetMTU(l, mtu))
			must.Do(t, a.Sync(context.Background()))
			return linkOf(t, dir, eth0)
		}
		first := set(1500)
		if lower := set(1400); lower != first {
			t.Errorf("a lower MTU: link %d after %d", lower, first)
		}
		if raised := set(3000); (raised != first) != recheck {
			t.Errorf("recheck %v, a raised MTU: link %d after %d", recheck, raised, first)
		}
		if named := strings.Contains(r.decision["eth0"], "raised from 1500 to 3000"); named == recheck {
			t.Errorf("recheck %v: decision %q", recheck, r.decision["eth0"])
		}
		if len(r.devices) != 1 {
			t.Errorf("recheck %v: devices %v", recheck, r.devices)
		}
		must.Do(t, a.xdp.drop(eth0))
	}
}

// A link of another mode is replaced.
func TestXDPOfAnotherMode(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	p := xdpPasses(t)
	for _, mode := range []string{XDPGeneric, XDPNative, XDPGeneric} {
		x, err := openXDP(dir, XDP{Program: p, Mode: mode})
		must.Do(t, err)
		for range 2 {
			links, err := netlink.LinkList()
			must.Do(t, err)
			devices := listDevices(links, nil, routes{})
			for i := range devices {
				if devices[i].index == eth0 {
					must.Do(t, x.ensure(&devices[i])) // a veth can
				}
			}
		}
		l, err := netlink.LinkByName("eth0")
		must.Do(t, err)
		want := uint32(nl.XDP_ATTACHED_DRV)
		if mode == XDPGeneric {
			want = nl.XDP_ATTACHED_SKB
		}
		if have := l.Attrs().Xdp.AttachMode; have != want {
			t.Errorf("%s: mode %d, want %d", mode, have, want)
		}
		x.close()
	}
}

// The error of a refusal has the kernel's words.
func TestXDPRefusalIsExplained(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	index := addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}})
	x, err := openXDP(dir, XDP{Program: xdpPasses(t), Mode: XDPNative})
	must.Do(t, err)
	err = x.ensure(&device{index: index, kind: "device"})
	if !errors.Is(err, unix.EOPNOTSUPP) || !strings.Contains(err.Error(), "native mode") {
		t.Errorf("a device whose driver has no XDP: %v", err)
	}
}

// The program's table of devices has an end.
func TestXDPKnowsDevicesUpToAnIndex(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	var r xdpReports
	cfg := r.config(xdpPasses(t), XDPGeneric)
	cfg.Devices = eth0
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: cfg})
	must.Do(t, a.Sync(context.Background()))
	wantXDP(t, "eth0", nil)
	if !strings.Contains(r.decision["eth0"], "index") {
		t.Errorf("decision %v", r.decision)
	}
}

// Another program keeps its device.
func TestXDPLeavesOtherProgramsAlone(t *testing.T) {
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	foreign := xdpPasses(t)
	l, err := link.AttachXDP(link.XDPOptions{Program: foreign, Interface: eth0, Flags: link.XDPGenericMode})
	must.Do(t, err)
	defer l.Close()
	var r xdpReports
	a := newAttacher(t, Config{PinDir: dir, Programs: progs, XDP: r.config(xdpPasses(t), XDPGeneric)})
	must.Do(t, a.Sync(context.Background()))
	wantXDP(t, "eth0", foreign)
	if !strings.Contains(r.decision["eth0"], "another XDP program") {
		t.Errorf("decision %v", r.decision)
	}
}

// The kernel tells what a driver can do: a veth whose peer takes no frames cannot send them.
func TestXDPFeatures(t *testing.T) {
	enterNetns(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	features, err := xdpFeatures(eth0)
	if errors.Is(err, unix.ENOENT) {
		t.Skip("before Linux 6.3: ", err)
	}
	must.Do(t, err)
	if features&1 == 0 {
		t.Errorf("a veth runs XDP programs, features are %#x", features)
	}
	if _, err := xdpFeatures(1 << 20); err == nil {
		t.Error("no device has this index")
	}
}
