package attach

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// listener keeps what a receiver of pod changes would have.
type listener struct {
	mu   sync.Mutex
	pods map[netip.Addr]Pod
	full int
}

func (l *listener) told(c PodChanges) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.Full {
		l.full++
		l.pods = make(map[netip.Addr]Pod)
	}
	maps.Copy(l.pods, c.Upserts)
	for _, a := range c.Deletes {
		delete(l.pods, a)
	}
}

func (l *listener) want(want map[string]Pod) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pods) != len(want) {
		return fmt.Errorf("pods %v, want %v", l.pods, want)
	}
	for a, p := range want {
		if got := l.pods[addr(a)]; !got.equal(p) {
			return fmt.Errorf("pod %s is %v, want %v", a, got, p)
		}
	}
	return nil
}

func TestPods(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0", HardwareAddr: []byte{2, 0, 0, 0, 0, 1}}})
	addAddr(t, "cni0", "10.244.1.1/24")
	addAddr(t, "cni0", "2001:db8:1::1/64")
	bridged := newPod(t, "veth1")
	setMaster(t, "veth1", "cni0")
	bridged.addAddr(t, "10.244.1.2/24")
	bridged.addAddr(t, "2001:db8:1::2/64")
	routed := newPod(t, "cali1")
	routed.addAddr(t, "10.244.2.2/32")
	addRoute(t, "10.244.2.2/32", "cali1")
	addRoute(t, "10.244.2.3/32", "cali1")

	var l listener
	a := newAttacher(t, Config{PinDir: dir, OnPods: l.told})
	must.Do(t, a.Sync(context.Background()))
	bridge, err := netlink.LinkByName("cni0")
	must.Do(t, err)
	cali, err := netlink.LinkByName("cali1")
	must.Do(t, err)
	one := Pod{ifindex(t, "veth1"), bridged.mac(t), bridge.Attrs().HardwareAddr}
	two := Pod{cali.Attrs().Index, routed.mac(t), cali.Attrs().HardwareAddr}
	must.Do(t, l.want(map[string]Pod{"10.244.1.2": one, "2001:db8:1::2": one, "10.244.2.2": two}))

	run(t, a)
	// An address added later, one removed, a MAC changed.
	routed.addAddr(t, "10.244.2.3/32")
	bridged.delAddr(t, "2001:db8:1::2/64")
	await.NoError(t, func() error {
		return l.want(map[string]Pod{"10.244.1.2": one, "10.244.2.2": two, "10.244.2.3": two})
	})
	eth0, err := routed.h.LinkByName("eth0")
	must.Do(t, err)
	two.PodMAC = []byte{2, 0, 0, 0, 0, 9}
	must.Do(t, routed.h.LinkSetHardwareAddr(eth0, two.PodMAC))
	await.NoError(t, func() error {
		return l.want(map[string]Pod{"10.244.1.2": one, "10.244.2.2": two, "10.244.2.3": two})
	})
	// A pod that comes later and gets its address later still.
	late := newPod(t, "veth3")
	setMaster(t, "veth3", "cni0")
	await.NoError(t, func() error { return statusRole(a, "veth3", PodSide) })
	late.addAddr(t, "10.244.1.3/24")
	late.addAddr(t, "fe80::3/64")
	three := Pod{ifindex(t, "veth3"), late.mac(t), bridge.Attrs().HardwareAddr}
	await.NoError(t, func() error {
		return l.want(map[string]Pod{"10.244.1.2": one, "10.244.2.2": two, "10.244.2.3": two, "10.244.1.3": three})
	})
	// A namespace deleted.
	routed.delete()
	await.NoError(t, func() error { return l.want(map[string]Pod{"10.244.1.2": one, "10.244.1.3": three}) })
	// The gateway's MAC changes.
	three.HostMAC = []byte{2, 0, 0, 0, 0, 7}
	one.HostMAC = three.HostMAC
	must.Do(t, netlink.LinkSetHardwareAddr(bridge, three.HostMAC))
	await.NoError(t, func() error { return l.want(map[string]Pod{"10.244.1.2": one, "10.244.1.3": three}) })
	if l.full != 1 {
		t.Errorf("%d full sets told, want 1", l.full)
	}
}

// A pod's new interface may be there before the old one is gone. The CNI moves the route.
func TestPodAddressMovesToNewerInterface(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	old, young := newPod(t, "cali1"), newPod(t, "cali2")
	old.addAddr(t, "10.244.1.2/32")
	young.addAddr(t, "10.244.1.2/32")
	addRoute(t, "10.244.1.2/32", "cali2")
	var l listener
	a := newAttacher(t, Config{PinDir: dir, OnPods: l.told})
	must.Do(t, a.Sync(context.Background()))
	host, err := netlink.LinkByName("cali2")
	must.Do(t, err)
	want := map[string]Pod{"10.244.1.2": {host.Attrs().Index, young.mac(t), host.Attrs().HardwareAddr}}
	must.Do(t, l.want(want))
	run(t, a)
	delLink(t, "cali1")
	await.NoError(t, func() error { return statusGone(a, "cali1") })
	must.Do(t, l.want(want))
}

// Addresses that no interface holds are found by what the neighbors say.
func TestPodsByNeighbours(t *testing.T) {
	enterNetns(t)
	dir := mountBPF(t)
	addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0", HardwareAddr: []byte{2, 0, 0, 0, 0, 1}}})
	addAddr(t, "cni0", "10.244.1.1/24")
	newPod(t, "veth1")
	setMaster(t, "veth1", "cni0")
	newPod(t, "cali1")
	addRoute(t, "10.244.2.2/32", "cali1")
	var l listener
	a := newAttacher(t, Config{PinDir: dir, OnPods: l.told})
	must.Do(t, a.Sync(context.Background()))
	must.Do(t, l.want(nil))
	run(t, a)

	mac := []byte{2, 0, 0, 0, 0, 0x42}
	must.Do(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: ifindex(t, "cali1"), IP: addr("10.244.2.2").AsSlice(), HardwareAddr: mac, State: netlink.NUD_PERMANENT,
	}))
	must.Do(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: ifindex(t, "veth1"), Family: 7, HardwareAddr: mac, State: netlink.NUD_NOARP, Flags: netlink.NTF_MASTER,
	}))
	must.Do(t, netlink.NeighAdd(&netlink.Neigh{
		LinkIndex: ifindex(t, "cni0"), IP: addr("10.244.1.2").AsSlice(), HardwareAddr: mac, State: netlink.NUD_REACHABLE,
	}))
	cali, err := netlink.LinkByName("cali1")
	must.Do(t, err)
	want := map[string]Pod{
		"10.244.2.2": {cali.Attrs().Index, mac, cali.Attrs().HardwareAddr},
		"10.244.1.2": {ifindex(t, "veth1"), mac, []byte{2, 0, 0, 0, 0, 1}},
	}
	await.NoError(t, func() error { return l.want(want) })
}

func statusRole(a *Attacher, name string, role Role) error {
	for _, s := range a.Status() {
		if s.Name == name && s.Role == role {
			return nil
		}
	}
	return fmt.Errorf("%s is not %s", name, role)
}

func statusGone(a *Attacher, name string) error {
	for _, s := range a.Status() {
		if s.Name == name {
			return fmt.Errorf("%s is still there", name)
		}
	}
	return nil
}
