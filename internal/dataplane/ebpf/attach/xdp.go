package attach

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// The ways to run an XDP program.
const (
	XDPNative = "native" // by the driver, before the kernel allocates an skb
	// XDPGeneric runs the program by the kernel, on any device. It is for tests: it is slow, and
	// packets that a pod of this machine sends may lack their checksum.
	XDPGeneric = "generic"
)

// XDP configures the program at the ingress of external Ethernet devices.
type XDP struct {
	Program *ebpf.Program
	Mode    string // XDPNative or XDPGeneric
	// Devices with this index and above get no program.
	Devices int
	// OnDevices receives the devices with the program, after each change.
	OnDevices func(map[int]XDPDevice)
	// OnDecision receives, once for each change, how a device is served: Mode, or why it has
	// no program.
	OnDecision func(iface, decision string, err error)
}

// XDPDevice is a device with the program.
type XDPDevice struct {
	MAC [6]byte
	// Redirects says that the driver sends frames that came by another device.
	Redirects bool
}

// xdpHooks attaches one program to devices, by links pinned as DIR/IFINDEX.
type xdpHooks struct {
	cfg     XDP
	id      ebpf.ProgramID
	dir     string
	links   map[int]link.Link
	mtus    map[int]int // the largest MTU that a driver has accepted with the program, by device
	recheck bool        // drivers check a raised MTU again: see ensure
	decided map[int]string
	devices map[int]XDPDevice
}

func xdpDir(pinDir string) string { return filepath.Join(pinDir, "xdp") }

// openXDP takes over the links of an earlier run.
func openXDP(pinDir string, cfg XDP) (*xdpHooks, error) {
	info, err := cfg.Program.Info()
	if err != nil {
		return nil, fmt.Errorf("read XDP program: %w", err)
	}
	id, _ := info.ID()
	running, err := kernel.RunningVersion()
	if err != nil {
		return nil, err
	}
	x := &xdpHooks{
		cfg: cfg, id: id, dir: xdpDir(pinDir), recheck: !running.Less(kernel.Version{Major: 6, Minor: 3}),
		links: map[int]link.Link{}, mtus: map[int]int{}, decided: map[int]string{},
	}
	if err := os.MkdirAll(x.dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory for pinned XDP links: %w", err)
	}
	pins, err := os.ReadDir(x.dir)
	if err != nil {
		return nil, fmt.Errorf("list pinned XDP links: %w", err)
	}
	for _, pin := range pins {
		path := filepath.Join(x.dir, pin.Name())
		ifindex, err := strconv.Atoi(pin.Name())
		if err != nil { // a crash has left it, with the program at its device: see pinOver
			_ = os.Remove(path)
			continue
		}
		l, err := link.LoadPinnedLink(path, nil)
		if passing(err) {
			return nil, fmt.Errorf("open pinned XDP link %s: %w", path, err)
		}
		if err == nil {
			x.links[ifindex] = l
		}
	}
	return x, nil
}

// sync attaches the program to the devices that can run it, and detaches it from others.
func (x *xdpHooks) sync(ifaces []Interface, devices []device) error {
	byIndex, tagged := map[int]*device{}, map[int]bool{}
	for i := range devices {
		byIndex[devices[i].index] = &devices[i]
		if devices[i].kind == "vlan" {
			tagged[devices[i].peer] = true
		}
	}
	served := map[int]XDPDevice{}
	seen := map[int]bool{}
	for _, i := range ifaces {
		d := byIndex[i.Ifindex]
		if i.Role != External || i.L3 || d == nil {
			continue
		}
		seen[i.Ifindex] = true
		decision, err := x.cfg.Mode, error(nil)
		if x.cfg.Mode == XDPNative {
			if why := d.withoutXDP(tagged[d.index]); why != "" {
				decision = why
			}
		}
		if i.Ifindex >= x.cfg.Devices {
			decision = fmt.Sprintf("none: the index of the device is %d, and the program knows those below %d", i.Ifindex, x.cfg.Devices)
		}
		if decision == x.cfg.Mode {
			if err = x.ensure(d); err == nil {
				served[i.Ifindex] = XDPDevice{MAC: macOf(d.mac), Redirects: x.redirects(i.Ifindex)}
				if accepted := x.mtus[d.index]; d.mtu > accepted {
					decision = fmt.Sprintf("%s: the MTU was raised from %d to %d, and the driver may drop longer frames than before: set it back, "+
						"switch XDP off, then raise it", decision, accepted, d.mtu)
				}
			} else if !vanished(err) {
				decision = "none: " + err.Error()
			}
		}
		x.decide(i, decision, err)
	}
	if !maps.Equal(served, x.devices) && x.cfg.OnDevices != nil {
		x.cfg.OnDevices(served)
	}
	x.devices = served
	var errs []error
	for ifindex := range x.links {
		if _, ok := served[ifindex]; !ok {
			errs = append(errs, x.drop(ifindex))
		}
	}
	maps.DeleteFunc(x.decided, func(ifindex int, _ string) bool { return !seen[ifindex] })
	return errors.Join(errs...)
}

func (x *xdpHooks) decide(i Interface, decision string, err error) {
	if x.decided[i.Ifindex] == decision {
		return
	}
	x.decided[i.Ifindex] = decision
	if x.cfg.OnDecision != nil {
		x.cfg.OnDecision(i.Name, decision, err)
	}
}

// withoutXDP returns why a device gets no program, or "".
func (d *device) withoutXDP(tagged bool) string {
	switch {
	case d.kind == "veth":
		return "none: a veth drops frames without a word if its peer cannot take them, and loses the checksum that a sender leaves to the device"
	case d.kind != "device":
		return "none: only a device with a driver of its own runs programs before the kernel, and this is a " + d.kind
	case tagged:
		return "none: it has VLANs, whose tags the hardware may remove before the program sees them"
	}
	return ""
}

func macOf(a net.HardwareAddr) (mac [6]byte) {
	copy(mac[:], a)
	return mac
}

// ensure attaches the program to a device, or replaces that of an earlier run. A link keeps the
// mode that it was created with.
//
// A driver checks the MTU when it gets a program. Some do not check it again when the MTU is raised,
// and drop frames that the program cannot take. So ensure attaches again then. Before Linux 6.3 it
// leaves the program there: virtio_net checks the MTU in vain when a program is removed, too, and
// goes on running it.
func (x *xdpHooks) ensure(d *device) error {
	ifindex, flags, other := d.index, link.XDPDriverMode, uint32(nl.XDP_ATTACHED_SKB)
	if x.cfg.Mode == XDPGeneric {
		flags, other = link.XDPGenericMode, nl.XDP_ATTACHED_DRV
	}
	if l := x.links[ifindex]; l != nil {
		info, err := l.Info()
		current := err == nil && info.XDP() != nil && int(info.XDP().Ifindex) == ifindex && d.xdp != other
		if current && info.Program != x.id {
			if err := l.Update(x.cfg.Program); err != nil {
				return fmt.Errorf("the driver refuses XDP: %w", err)
			}
			x.mtus[ifindex] = d.mtu
			return nil
		}
		if current && (d.mtu <= x.mtus[ifindex] || !x.recheck) {
			return nil
		}
		if err := x.drop(ifindex); err != nil {
			return err
		}
	}
	l, err := link.AttachXDP(link.XDPOptions{Program: x.cfg.Program, Interface: ifindex, Flags: flags})
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("another XDP program has the device: %w", err)
	}
	if err != nil && !vanished(err) && x.cfg.Mode == XDPNative {
		err = explainRefusal(err, x.cfg.Program, ifindex)
	}
	if err != nil {
		return fmt.Errorf("the driver refuses XDP: %w", err)
	}
	if err := pinOver(l, filepath.Join(x.dir, strconv.Itoa(ifindex))); err != nil {
		l.Close()
		return err
	}
	x.links[ifindex], x.mtus[ifindex] = l, d.mtu
	return nil
}

func (x *xdpHooks) drop(ifindex int) error {
	l := x.links[ifindex]
	delete(x.links, ifindex)
	delete(x.mtus, ifindex)
	err := l.Detach()
	if errors.Is(err, link.ErrNotSupported) || vanished(err) {
		err = nil
	}
	if rm := os.Remove(filepath.Join(x.dir, strconv.Itoa(ifindex))); rm != nil && !errors.Is(rm, fs.ErrNotExist) {
		err = errors.Join(err, rm)
	}
	l.Close()
	if err != nil {
		return fmt.Errorf("detach XDP program from interface %d: %w", ifindex, err)
	}
	return nil
}

func (x *xdpHooks) close() {
	for _, l := range x.links {
		l.Close()
	}
}

// redirects reports whether a device sends frames that came by another one.
func (x *xdpHooks) redirects(ifindex int) bool {
	if x.cfg.Mode == XDPGeneric {
		return true
	}
	features, err := xdpFeatures(ifindex)
	return err == nil && features&featureXmit != 0
}

// From linux/netdev.h, since Linux 6.3.
const (
	netdevFamily   = "netdev"
	netdevGet      = 1
	netdevIfindex  = 1
	netdevFeatures = 3
	featureXmit    = 1 << 2 // NETDEV_XDP_ACT_NDO_XMIT
	genericHeader  = 4
)

// genericRequest is struct genlmsghdr: command, version, and two bytes that must be 0. nl.Genlmsg
// has whatever is behind it in memory there, and this family refuses that.
type genericRequest [genericHeader]byte

func (r genericRequest) Len() int          { return len(r) }
func (r genericRequest) Serialize() []byte { return r[:] }

// xdpFeatures returns what a driver can do with XDP.
func xdpFeatures(ifindex int) (uint64, error) {
	family, err := netlink.GenlFamilyGet(netdevFamily)
	if err != nil {
		return 0, fmt.Errorf("ask for XDP features: %w", err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), unix.NLM_F_ACK)
	req.AddData(genericRequest{netdevGet, 1})
	req.AddData(nl.NewRtAttr(netdevIfindex, nl.Uint32Attr(uint32(ifindex))))
	msgs, err := req.Execute(unix.NETLINK_GENERIC, 0)
	if err != nil {
		return 0, fmt.Errorf("ask for XDP features: %w", err)
	}
	for _, m := range msgs {
		if len(m) < genericHeader {
			continue
		}
		attrs, err := nl.ParseRouteAttr(m[genericHeader:])
		if err != nil {
			return 0, fmt.Errorf("read XDP features: %w", err)
		}
		for _, a := range attrs {
			if a.Attr.Type == netdevFeatures && len(a.Value) >= 8 {
				return binary.NativeEndian.Uint64(a.Value), nil
			}
		}
	}
	return 0, errors.New("the kernel does not tell XDP features")
}

// UnpinXDP removes the XDP links of an instance, and so detaches its program. A second call is
// no error.
func UnpinXDP(pinDir string) error {
	dir := xdpDir(pinDir)
	pins, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list pinned XDP links: %w", err)
	}
	var errs []error
	for _, pin := range pins {
		if l, err := link.LoadPinnedLink(filepath.Join(dir, pin.Name()), nil); err == nil {
			if err := l.Detach(); err != nil && !errors.Is(err, link.ErrNotSupported) && !vanished(err) {
				errs = append(errs, fmt.Errorf("detach XDP program: %w", err))
			}
			l.Close()
		}
	}
	return errors.Join(append(errs, os.RemoveAll(dir))...)
}
