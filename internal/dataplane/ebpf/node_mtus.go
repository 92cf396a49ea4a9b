package ebpf

import (
	"fmt"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
)

// onRouteMTUs receives the MTUs of this node's routes.
func (b *Backend) onRouteMTUs(routes attach.RouteMTUs) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.writeRouteMTUs(routes.MTUs); err != nil {
		b.cfg.Log.Error("Write MTUs of routes", "err", err)
	}
	left := routes.LeftOut > 0
	if left != b.routesLeftOut {
		if left {
			b.cfg.Log.Warn("Routes with an MTU, and those within them, are too many: some packets are sent by another route's MTU, or by the device's; "+
				"give the device that MTU instead", "leftOut", routes.LeftOut, "room", b.m(tcMapRouteMtus).MaxEntries())
		} else {
			b.cfg.Log.Info("There is room again for all routes with an MTU")
		}
	}
	b.routesLeftOut = left
}

// writeRouteMTUs writes the map route_mtus. At no moment does a wider route's MTU count for one
// without an MTU that both states have: a sender keeps an MTU that it was told for minutes.
func (b *Backend) writeRouteMTUs(routes map[attach.RouteKey]uint32) error {
	m := b.m(tcMapRouteMtus)
	have, want := map[tcRangeKey]uint32{}, map[tcRangeKey]uint32{}
	if err := each(m, func(k tcRangeKey, v uint32) { have[k] = v }); err != nil {
		return fmt.Errorf("read eBPF map %s: %w", tcMapRouteMtus, err)
	}
	for key, mtu := range routes {
		want[rangeKey(uint32(key.Ifindex), key.Dst)] = mtu
	}
	var errs []error
	for _, without := range []bool{false, true} { // last those that a wider route's would replace
		for key, mtu := range have {
			if _, wanted := want[key]; !wanted && (mtu == 0) == without {
				errs = append(errs, remove(m, key))
			}
		}
	}
	for _, without := range []bool{true, false} {
		for key, mtu := range want {
			if old, found := have[key]; (!found || old != mtu) && (mtu == 0) == without {
				errs = append(errs, m.Put(key, mtu))
			}
		}
	}
	return firstOf(errs)
}
