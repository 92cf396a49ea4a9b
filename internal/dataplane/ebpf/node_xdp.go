package ebpf

import (
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// onXDPDevices receives the external devices with the XDP program.
func (w *nodeWriter) onXDPDevices(devices map[int]attach.XDPDevice) {
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
