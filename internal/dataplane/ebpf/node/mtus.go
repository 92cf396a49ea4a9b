package node

import (
	"fmt"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// OnRouteMTUs receives the MTUs of this node's routes.
func (w *Writer) OnRouteMTUs(routes attach.RouteMTUs) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.writeRouteMTUs(routes.MTUs); err != nil {
		w.cfg.Log.Error("Write MTUs of routes", "err", err)
	}
	left := routes.LeftOut > 0
	if left != w.routesLeftOut {
		if left {
			w.cfg.Log.Warn("Routes with an MTU, and those within them, are too many: some packets are sent by another route's MTU, or by the "+
				"device's; "+
				"give the device that MTU instead", "leftOut", routes.LeftOut, "room", w.m(objects.TCMapRouteMtus).MaxEntries())
		} else {
			w.cfg.Log.Info("There is room again for all routes with an MTU")
		}
	}
	w.routesLeftOut = left
}

// writeRouteMTUs writes the map route_mtus. At no moment does a wider route's MTU count for one
// without an MTU that both states have: a sender keeps an MTU that it was told for minutes.
func (w *Writer) writeRouteMTUs(routes map[attach.RouteKey]uint32) error {
	m := w.m(objects.TCMapRouteMtus)
	have, want := map[objects.TCRangeKey]uint32{}, map[objects.TCRangeKey]uint32{}
	if err := objects.Each(m, func(k objects.TCRangeKey, v uint32) { have[k] = v }); err != nil {
		return fmt.Errorf("read eBPF map %s: %w", objects.TCMapRouteMtus, err)
	}
	for key, mtu := range routes {
		want[objects.RangeKey(uint32(key.Ifindex), key.Dst)] = mtu
	}
	var errs []error
	for _, without := range []bool{false, true} { // last those that a wider route's would replace
		for key, mtu := range have {
			if _, wanted := want[key]; !wanted && (mtu == 0) == without {
				errs = append(errs, objects.Remove(m, key))
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
	return objects.FirstError(errs)
}
