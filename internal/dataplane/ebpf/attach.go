package ebpf

import (
	"context"
	"fmt"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// xdpProgram returns the program for external devices, or nil without Config.XDP.
func xdpProgram(o *objects.Objects, cfg *Config, onDevices func(map[int]attach.XDPDevice)) *attach.XDP {
	p := o.Programs[objects.XDPProgXdpFromNetwork]
	if p == nil {
		return nil
	}
	mode := attach.XDPNative
	if cfg.XDP == XDPGeneric {
		mode = attach.XDPGeneric
	}
	return &attach.XDP{Program: p, Mode: mode, Devices: int(o.Maps[objects.TCMapXdpDevices].MaxEntries()), OnDevices: onDevices,
		OnDecision: func(iface, decision string, err error) {
			if err != nil {
				cfg.Log.Warn("No XDP at an interface", "interface", iface, "reason", decision)
				return
			}
			cfg.Log.Info("XDP at an interface", "interface", iface, "mode", decision)
		}}
}

// programsOf returns the programs for the interfaces.
func programsOf(o *objects.Objects) attach.Programs {
	toNetwork := o.Programs[objects.TCProgToNetwork]
	return attach.Programs{
		FromNetwork: o.Programs[objects.TCProgFromNetwork], ToNetwork: toNetwork,
		FromPod: o.Programs[objects.TCProgFromPod], ToPod: toNetwork,
		LoadL3: func() (fromNetwork, toNetwork *ebpf.Program, err error) {
			loaded, err := o.L3Programs()
			return loaded[objects.TCProgFromNetworkL3], loaded[objects.TCProgToNetworkL3], err
		},
		TailCalls: o.TailCalls,
	}
}

// attachPrevious replaces this version's programs in their hooks by those of the release before.
func (b *Backend) attachPrevious(previous *objects.Objects) error {
	a, err := attach.New(attach.Config{PinDir: b.cfg.BPFFS, Programs: programsOf(previous), ForceClsact: b.cfg.ForceClsact})
	if err != nil {
		return fmt.Errorf("attach programs of the release before: %w", err)
	}
	defer a.Close()
	if err := a.Sync(context.Background()); err != nil {
		// The others are served.
		b.cfg.Log.Error("Attach to interfaces", "err", err)
	}
	if err := attach.AttachCgroup(b.cfg.BPFFS, b.cfg.CgroupRoot, previous.SocketPrograms()); err != nil {
		return fmt.Errorf("attach socket hooks of the release before: %w", err)
	}
	return nil
}

// newAttacher returns the attacher, whose observations the parts write.
func (b *Backend) newAttacher() (*attach.Attacher, error) {
	return attach.New(attach.Config{
		PinDir:      b.cfg.BPFFS,
		Programs:    programsOf(b.objects),
		ForceClsact: b.cfg.ForceClsact,
		XDP:         xdpProgram(b.objects, &b.cfg, b.node.OnXDPDevices),
		OnUplinks:   b.node.OnUplinks,
		OnRouteMTUs: b.node.OnRouteMTUs,
		OnPods:      b.node.OnPods,
		Facts:       b.node.Fact,
		Owners:      b.node.Pods(),
		OnRefused:   b.node.OnRefused,
		OnError:     b.onInterfaceError,

		MaxRouteMTUs: int(b.m(objects.TCMapRouteMtus).MaxEntries()),
	})
}

// noteFacts has the attacher decide again about addresses that pods announce.
func (b *Backend) noteFacts() {
	if b.attacher != nil {
		b.attacher.NoteFacts()
	}
}

func (b *Backend) onInterfaceError(iface string, err error) {
	switch {
	case err == nil:
		b.cfg.Log.Info("Interface is served again", "interface", iface)
	case iface == "":
		b.cfg.Log.Error("Follow network interfaces", "err", err)
	default:
		b.cfg.Log.Error("Interface is not served", "interface", iface, "err", err)
	}
}
