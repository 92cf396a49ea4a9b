package node

import (
	"errors"
	"maps"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// OnUplinks receives the external devices.
func (w *Writer) OnUplinks(uplinks map[int]attach.Uplink) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uplinks = maps.Clone(uplinks)
	want, l3 := map[uint32]objects.TCUplink{}, map[uint32]uint8{}
	for i, u := range uplinks {
		var v objects.TCUplink
		if u.L3 {
			l3[uint32(i)] = 1
		}
		if u.V4.IsValid() {
			v.V4, w.sources[u.V4] = objects.ToAddr(u.V4), true
		}
		if u.V6.IsValid() {
			v.V6, w.sources[u.V6] = objects.ToAddr(u.V6), true
		}
		want[uint32(i)] = v
	}
	if err := errors.Join(objects.ReplaceMap(w.m(objects.TCMapUplinks), want),
		objects.ReplaceMap(w.m(objects.TCMapL3Devices), l3)); err != nil {
		w.cfg.Log.Error("Write external devices", "err", err)
	}
	if w.node != nil {
		if err := w.writeSettings(w.node); err != nil {
			w.cfg.Log.Error("Write settings", "err", err)
		}
		if err := w.loseSources(w.node); err != nil {
			w.cfg.Log.Error("Write external devices", "err", err)
		}
	}
}

// OnXDPDevices receives the external devices with the XDP program.
func (w *Writer) OnXDPDevices(devices map[int]attach.XDPDevice) {
	m := w.m(objects.TCMapXdpDevices)
	for ifindex := range m.MaxEntries() {
		var want, have objects.TCXdpDevice
		if d, ok := devices[int(ifindex)]; ok {
			want = objects.TCXdpDevice{Mac: d.MAC, Flags: uint16(objects.TCXdpDeviceFlagsXDP_DEVICE_SERVED)}
			if d.Redirects {
				want.Flags |= uint16(objects.TCXdpDeviceFlagsXDP_DEVICE_REDIRECTS)
			}
		}
		err := m.Lookup(ifindex, &have)
		if err == nil && have != want {
			err = m.Put(ifindex, want)
		}
		if err != nil {
			w.cfg.Log.Error("Write devices with XDP", "err", err)
			return
		}
	}
}
