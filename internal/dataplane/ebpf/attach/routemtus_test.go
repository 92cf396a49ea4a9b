package attach

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// mtuListener has what OnRouteMTUs was last called with.
type mtuListener struct {
	mu   sync.Mutex
	last RouteMTUs
}

func (l *mtuListener) told(m RouteMTUs) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = m
}

func (l *mtuListener) want(t *testing.T, want map[RouteKey]uint32, leftOut int) {
	t.Helper()
	await.NoError(t, func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if !maps.Equal(l.last.MTUs, want) || l.last.LeftOut != leftOut {
			return fmt.Errorf("%d left out, and MTUs %v, want %d and %v", l.last.LeftOut, l.last.MTUs, leftOut, want)
		}
		return nil
	})
}

func mtuKey(dst string, ifindex int) RouteKey { return RouteKey{netip.MustParsePrefix(dst), ifindex} }

// changed is a route with changes.
func changed(t *testing.T, dst, dev string, change func(*netlink.Route)) *netlink.Route {
	t.Helper()
	r := route(t, dst, dev)
	change(r)
	return r
}

func withMTU(mtu int) func(*netlink.Route) { return func(r *netlink.Route) { r.MTU = mtu } }

// newMTUNode has two devices and an Attacher that runs and has room for some routes.
func newMTUNode(t *testing.T, limit int) (told *mtuListener, eth0, eth1 int) {
	t.Helper()
	enterNetns(t)
	eth0, eth1 = addDummyNIC(t, "eth0", "192.0.2.1/24"), addDummyNIC(t, "eth1", "198.51.100.1/24")
	addAddr(t, "eth0", "2001:db8::1/64")
	told = &mtuListener{}
	a := newAttacher(t, Config{PinDir: mountBPF(t), OnRouteMTUs: told.told, MaxRouteMTUs: limit})
	must.Do(t, a.Sync(context.Background()))
	run(t, a)
	return told, eth0, eth1
}

func TestRouteMTUs(t *testing.T) {
	told, eth0, eth1 := newMTUNode(t, 100)
	want := map[RouteKey]uint32{}
	told.want(t, want, 0)
	replace := func(dst, dev string, change func(*netlink.Route)) {
		t.Helper()
		must.Do(t, netlink.RouteReplace(changed(t, dst, dev, change)))
	}

	replace("10.1.0.0/16", "eth0", withMTU(1300))
	want[mtuKey("10.1.0.0/16", eth0)] = 1300
	told.want(t, want, 0)
	replace("10.1.0.0/16", "eth0", func(r *netlink.Route) { r.MTU, r.MTULock = 1200, true })
	replace("2001:db8:1::/48", "eth0", withMTU(1000))
	want[mtuKey("10.1.0.0/16", eth0)] = 1200
	want[mtuKey("2001:db8:1::/48", eth0)] = leastMTUv6
	told.want(t, want, 0)

	// Within one that has an MTU; by another device; within none.
	replace("10.1.2.0/24", "eth0", withMTU(0))
	replace("10.1.3.0/24", "eth1", withMTU(0))
	replace("10.2.0.0/24", "eth0", withMTU(0))
	want[mtuKey("10.1.2.0/24", eth0)] = 0
	told.want(t, want, 0)
	replace("10.1.3.0/24", "eth1", withMTU(1350))
	want[mtuKey("10.1.3.0/24", eth1)] = 1350
	told.want(t, want, 0)

	// A route that the kernel does not use for its worse priority.
	must.Do(t, netlink.RouteAdd(changed(t, "10.1.2.0/24", "eth0", func(r *netlink.Route) { r.MTU, r.Priority = 1111, 50 })))
	replace("10.3.0.0/24", "eth0", withMTU(1250))
	must.Do(t, netlink.RouteAdd(changed(t, "10.3.0.0/24", "eth0", func(r *netlink.Route) { r.Priority = 50 })))
	want[mtuKey("10.3.0.0/24", eth0)] = 1250
	told.want(t, want, 0)
	must.Do(t, netlink.RouteDel(changed(t, "10.3.0.0/24", "eth0", withMTU(1250))))
	delete(want, mtuKey("10.3.0.0/24", eth0))
	told.want(t, want, 0)

	// The default route has all others within it, also those of addresses.
	replace("0.0.0.0/0", "eth1", withMTU(1290))
	want[mtuKey("0.0.0.0/0", eth1)], want[mtuKey("198.51.100.0/24", eth1)] = 1290, 0
	told.want(t, want, 0)
	replace("10.1.0.0/16", "eth0", withMTU(0)) // 10.1.2.0/24 has two routes still
	delete(want, mtuKey("10.1.0.0/16", eth0))
	told.want(t, want, 0)
}

// TestRouteMTUsOfOthers: routes that the programs do not find.
func TestRouteMTUsOfOthers(t *testing.T) {
	told, eth0, eth1 := newMTUNode(t, 100)
	add := func(dst string, change func(*netlink.Route)) {
		t.Helper()
		must.Do(t, netlink.RouteAdd(changed(t, dst, "eth0", change)))
	}
	add("10.1.0.0/16", func(r *netlink.Route) { r.MTU, r.Table = 1300, 77 })
	add("10.2.0.0/16", func(r *netlink.Route) { r.MTU, r.Tos = 1300, 0x10 })
	add("10.3.0.0/16", func(r *netlink.Route) { r.MTU, r.Type, r.LinkIndex = 1300, unix.RTN_UNREACHABLE, 0 })
	hops := []*netlink.NexthopInfo{{LinkIndex: eth0}, {LinkIndex: eth1}}
	add("10.4.0.0/16", func(r *netlink.Route) { r.MTU, r.LinkIndex, r.MultiPath = 1300, 0, hops })
	told.want(t, map[RouteKey]uint32{mtuKey("10.4.0.0/16", eth0): 1300, mtuKey("10.4.0.0/16", eth1): 1300}, 0)
}

// TestTooManyRouteMTUs: those without an MTU are left out first.
func TestTooManyRouteMTUs(t *testing.T) {
	told, eth0, _ := newMTUNode(t, 3)
	want := map[RouteKey]uint32{}
	for _, dst := range []string{"10.0.1.0/24", "10.0.2.0/24"} {
		must.Do(t, netlink.RouteAdd(route(t, dst, "eth0")))
	}
	must.Do(t, netlink.RouteAdd(changed(t, "10.0.0.0/16", "eth0", withMTU(1300))))
	want[mtuKey("10.0.0.0/16", eth0)], want[mtuKey("10.0.1.0/24", eth0)], want[mtuKey("10.0.2.0/24", eth0)] = 1300, 0, 0
	told.want(t, want, 0)
	must.Do(t, netlink.RouteAdd(changed(t, "10.0.3.0/24", "eth0", withMTU(1310))))
	want[mtuKey("10.0.3.0/24", eth0)] = 1310
	delete(want, mtuKey("10.0.2.0/24", eth0))
	told.want(t, want, 1)
	must.Do(t, netlink.RouteDel(changed(t, "10.0.3.0/24", "eth0", withMTU(1310))))
	delete(want, mtuKey("10.0.3.0/24", eth0))
	want[mtuKey("10.0.2.0/24", eth0)] = 0
	told.want(t, want, 0)
}
