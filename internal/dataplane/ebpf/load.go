package ebpf

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/bits"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/node/kernel"
)

// objects are the loaded programs and maps.
type objects struct {
	maps     map[string]*ebpf.Map
	programs map[string]*ebpf.Program
	// l3 has the programs for devices without a link-layer header, which loadL3 loads later than the
	// others. Only the attacher uses it: readers of programs take no lock.
	l3     map[string]*ebpf.Program
	loadL3 func() (map[string]*ebpf.Program, error)
	// verdicts has the names of the counters, by index.
	verdicts []string
	// seed is hash_seed of bpf/config.h.
	seed   uint32
	filter *portFilter
	// migrator is nil if there is nothing to migrate.
	migrator *migrator
}

func (o *objects) close() {
	for _, loaded := range []map[string]*ebpf.Program{o.programs, o.l3} {
		for _, p := range loaded {
			p.Close()
		}
	}
	for _, m := range o.maps {
		m.Close()
	}
}

// xdp returns the program for external devices, or nil without Config.XDP.
func (o *objects) xdp(cfg *Config) *attach.XDP {
	p := o.programs[xdpProgXdpFromNetwork]
	if p == nil {
		return nil
	}
	mode := attach.XDPNative
	if cfg.XDP == XDPGeneric {
		mode = attach.XDPGeneric
	}
	return &attach.XDP{Program: p, Mode: mode, Devices: int(o.maps[tcMapXdpDevices].MaxEntries()), OnDevices: o.writeXDPDevices(cfg), OnDecision: func(iface, decision string, err error) {
		if err != nil {
			cfg.Log.Warn("No XDP at an interface", "interface", iface, "reason", decision)
			return
		}
		cfg.Log.Info("XDP at an interface", "interface", iface, "mode", decision)
	}}
}

func (o *objects) writeXDPDevices(cfg *Config) func(map[int]attach.XDPDevice) {
	return func(devices map[int]attach.XDPDevice) {
		m := o.maps[tcMapXdpDevices]
		for ifindex := range m.MaxEntries() {
			var want, have tcXdpDevice
			if d, ok := devices[int(ifindex)]; ok {
				want = tcXdpDevice{Mac: d.MAC, Flags: uint16(tcXdpDeviceFlagsXDP_DEVICE_SERVED)}
				if d.Redirects {
					want.Flags |= uint16(tcXdpDeviceFlagsXDP_DEVICE_REDIRECTS)
				}
			}
			err := m.Lookup(ifindex, &have)
			if err == nil && have != want {
				err = m.Put(ifindex, want)
			}
			if err != nil {
				cfg.Log.Error("Write devices with XDP", "err", err)
				return
			}
		}
	}
}

// tcPrograms returns the programs for the interfaces.
func (o *objects) tcPrograms() attach.Programs {
	toNetwork := o.programs[tcProgToNetwork]
	return attach.Programs{
		FromNetwork: o.programs[tcProgFromNetwork], ToNetwork: toNetwork,
		FromPod: o.programs[tcProgFromPod], ToPod: toNetwork,
		LoadL3: func() (fromNetwork, toNetwork *ebpf.Program, err error) {
			loaded := o.programs
			if loaded[tcProgFromNetworkL3] == nil {
				if o.l3 == nil {
					if o.l3, err = o.loadL3(); err != nil {
						return nil, nil, err
					}
				}
				loaded = o.l3
			}
			return loaded[tcProgFromNetworkL3], loaded[tcProgToNetworkL3], nil
		},
	}
}

// loadL3Programs loads the programs for devices without a link-layer header, with the maps of o.
func (o *objects) loadL3Programs(cfg *Config, features kernel.Features) (map[string]*ebpf.Program, error) {
	all, err := specs(cfg, features)
	if err != nil {
		return nil, err
	}
	if err := setSeed(all, o.seed); err != nil {
		return nil, err
	}
	spec := all[0]
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !isL3(name) })
	shared := share(spec, func(name string) *ebpf.Map { return o.maps[name] })
	coll, err := newCollection(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, fmt.Errorf("load eBPF programs: %w", oneLine(err))
	}
	loaded := maps.Clone(coll.Programs)
	clear(coll.Programs)
	coll.Close()
	return loaded, nil
}

// share has a spec use pinned maps that exist already, and returns those for MapReplacements.
func share(spec *ebpf.CollectionSpec, existing func(name string) *ebpf.Map) map[string]*ebpf.Map {
	shared := map[string]*ebpf.Map{}
	for name, want := range spec.Maps {
		if want.Pinning != ebpf.PinByName {
			continue
		}
		want.Pinning = ebpf.PinNone
		if m := existing(name); m != nil {
			want.MaxEntries = m.MaxEntries() // it may have another size
			shared[name] = m
		}
	}
	return shared
}

func isL3(program string) bool {
	return program == tcProgFromNetworkL3 || program == tcProgToNetworkL3
}

// socketPrograms returns the programs for the cgroup. Those of events are loaded if they are
// wanted: selectSocketPrograms.
func (o *objects) socketPrograms() map[ebpf.AttachType]*ebpf.Program {
	programs := map[ebpf.AttachType]*ebpf.Program{
		ebpf.AttachCGroupInet4Connect:     o.programs[sockProgConnect4],
		ebpf.AttachCGroupInet6Connect:     o.programs[sockProgConnect6],
		ebpf.AttachCGroupUDP4Sendmsg:      o.programs[sockProgSendmsg4],
		ebpf.AttachCGroupUDP6Sendmsg:      o.programs[sockProgSendmsg6],
		ebpf.AttachCGroupUDP4Recvmsg:      o.programs[sockProgRecvmsg4],
		ebpf.AttachCGroupUDP6Recvmsg:      o.programs[sockProgRecvmsg6],
		ebpf.AttachCgroupInet4GetPeername: o.programs[sockProgGetpeername4],
		ebpf.AttachCgroupInet6GetPeername: o.programs[sockProgGetpeername6],
	}
	for at, name := range socketEventPrograms {
		if p := o.programs[name]; p != nil {
			programs[at] = p
		}
	}
	return programs
}

// newCollection loads an object of an agent, or of a dry run. Tests of maps and hooks replace it: they load
// programs that do nothing, which costs the verifier nothing.
var newCollection = ebpf.NewCollectionWithOptions

// load loads the programs with the maps that an earlier run has pinned, or with new
// ones. A map with another configured size is created again, and the entries that
// programs have written are copied.
func load(cfg *Config, features kernel.Features) (*objects, error) {
	all, err := specs(cfg, features)
	if err != nil {
		return nil, err
	}
	tc := all[0]
	tc.Maps[idsMap] = idsSpec()
	if !cfg.LoadAll {
		maps.DeleteFunc(tc.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return isL3(name) })
	}
	older, migrated := migrate(all, cfg)
	dir := mapsDir(cfg.BPFFS)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("create directory for pinned maps: %w", err)
	}
	if err := dropMisfits(tc, dir, cfg); err != nil {
		return nil, err
	}
	older = append(older, setAside(dir, nil)...)
	made := map[string]bool{}
	for name := range tc.Maps {
		_, err := os.Stat(filepath.Join(dir, name))
		made[name] = migrated || err != nil
	}

	o := &objects{maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}
	o.loadL3 = func() (map[string]*ebpf.Program, error) { return o.loadL3Programs(cfg, features) }
	if o.verdicts, err = verdictNames(tc); err != nil {
		return nil, err
	}
	if o.seed, err = hashSeed(cfg.BPFFS); err != nil {
		return nil, err
	}
	if err := setSeed(all, o.seed); err != nil {
		return nil, err
	}
	opts := ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}
	for _, spec := range all {
		coll, err := newCollection(spec, opts)
		if err != nil {
			o.close()
			return nil, fmt.Errorf("load eBPF programs: %w", cfg.withMemory(oneLine(err)))
		}
		for name, p := range coll.Programs {
			o.programs[name] = p
		}
		for name, m := range coll.Maps {
			if old := o.maps[name]; old != nil {
				old.Close()
			}
			o.maps[name] = m
		}
	}
	o.startMigration(older, made, cfg)
	if o.filter, err = openFilter(o); err != nil {
		o.close()
		return nil, err
	}
	return o, nil
}

// setSeed sets hash_seed of bpf/config.h.
func setSeed(specs []*ebpf.CollectionSpec, seed uint32) error {
	for _, spec := range specs {
		if v := spec.Variables[tcVarHashSeed]; v != nil {
			if err := v.Set(seed); err != nil {
				return fmt.Errorf("set hash seed: %w", err)
			}
		}
	}
	return nil
}

// startMigration runs the first and longest pass over the maps of earlier runs. Later
// passes run shortly before and after the hooks switch.
func (o *objects) startMigration(older []previousLayout, made map[string]bool, cfg *Config) {
	if len(older) == 0 {
		return
	}
	o.migrator = &migrator{previous: older, made: made, timeouts: cfg.Timeouts, log: cfg.Log}
	if err := o.migrator.migrate(o.maps, beforeSwitch); err != nil {
		cfg.Log.Warn("Running flows are forgotten", "reason", err)
		o.migrator = nil
	}
}

// specs returns the objects with their sizes and load-time constants: that of the tc programs,
// of the socket hooks, and with Config.XDP that of XDP.
func specs(cfg *Config, features kernel.Features) ([]*ebpf.CollectionSpec, error) {
	var all []*ebpf.CollectionSpec
	for _, load := range []func() (*ebpf.CollectionSpec, error){loadTc, loadSock, loadXdp} {
		spec, err := load()
		if err != nil {
			return nil, fmt.Errorf("read eBPF objects: %w", err)
		}
		all = append(all, spec)
	}
	if !cfg.xdp() {
		all = all[:2]
	}
	if err := configure(all, cfg, features); err != nil {
		return nil, err
	}
	if cfg.XDP == XDPAuto && features.XDPFrags {
		// Without the flag a driver refuses an MTU above a page. The program passes a frame that is
		// not whole in its first buffer: see bpf/lib/xdp/parse.h. In the generic mode the kernel
		// copies frames for a program with the flag, and connections to a veth time out (6.18).
		all[2].Programs[xdpProgXdpFromNetwork].Flags |= unix.BPF_F_XDP_HAS_FRAGS
	}
	return all, cfg.selectSocketPrograms(all[1], features)
}

// configure sets sizes and load-time constants.
func configure(specs []*ebpf.CollectionSpec, cfg *Config, features kernel.Features) error {
	constants, err := constants(cfg, features)
	if err != nil {
		return err
	}
	for _, spec := range specs {
		for name, v := range spec.Variables {
			if strings.HasPrefix(name, "unused_") {
				delete(spec.Variables, name)
				continue
			}
			if value, ok := constants[name]; ok {
				if err := v.Set(value); err != nil {
					return fmt.Errorf("set eBPF constant %s: %w", name, err)
				}
			}
		}
		setSizes(spec, cfg)
	}
	return nil
}

// constants returns the values of bpf/config.h.
func constants(cfg *Config, f kernel.Features) (map[string]any, error) {
	cookie, err := kernel.NetnsCookie()
	if err != nil {
		return nil, fmt.Errorf("find out network namespace: %w", err)
	}
	c := map[string]any{
		tcVarHostNetnsCookie: cookie,
		tcVarUnconfirmedMax:  cfg.unconfirmed(), tcVarClientFlowsMax: cfg.clientFlowsMax(),
		tcVarPortFilterMask: cfg.filterWords() - 1, tcVarOneWayMax: max(cfg.oneWay(), 1),
		tcVarMaglevSeed: crc32.ChecksumIEEE([]byte(cfg.MaglevSeed)),
	}
	for name, value := range cfg.eventConstants() {
		c[name] = value
	}
	if cfg.xdp() {
		var key [16]byte
		_, _ = rand.Read(key[:]) // never fails
		c[tcVarSynKey0], c[tcVarSynKey1] = binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:])
	}
	for i, key := range cfg.DSRKeys[:min(len(cfg.DSRKeys), 2)] {
		names := [][2]string{{tcVarDsrKey0, tcVarDsrKey1}, {tcVarDsrPreviousKey0, tcVarDsrPreviousKey1}}[i]
		c[tcVarDsr], c[tcVarDsrPort] = uint8(1), bits.ReverseBytes16(cfg.DSRPort)
		c[names[0]], c[names[1]] = binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:])
	}
	if f.SetRetval {
		c[tcVarHasSetRetval] = uint8(1)
	}
	if f.ConntrackLookup {
		c[tcVarHasCtLookup] = uint8(1)
	}
	if f.CsumReplaceIPv6 {
		c[tcVarHasCsumIpv6] = uint8(1)
	}
	return c, nil
}

// maxDSRPaths is the number of endpoints on other nodes whose paths to clients are watched.
const maxDSRPaths = 1 << 14

// dsrPaths returns the number of entries of the maps dsr_paths and dsr_carriers.
func (c *Config) dsrPaths() uint32 {
	if len(c.DSRKeys) > 0 {
		return maxDSRPaths
	}
	return 1
}

// maxSYNProofs is SYN_PROOFS of bpf/abi.h.
const maxSYNProofs = 1 << 20

// synProofs returns the number of entries of the map of this name.
func (c *Config) synProofs() uint32 {
	if c.xdp() {
		return maxSYNProofs
	}
	return 1
}

// unconfirmedShare is the number of confirmed flows for each unconfirmed one.
const unconfirmedShare = 4

// unconfirmed returns the length of the ring of unconfirmed flows.
func (c *Config) unconfirmed() uint32 { return max(c.FlowTableSize/unconfirmedShare, 1) }

// oneWay returns the length of the ring of flows that this node sees one direction of. The map
// flows keeps its size with DSRKeys: flows that begin while it is created anew may be lost. So these
// flows take room of confirmed ones.
func (c *Config) oneWay() uint32 {
	if len(c.DSRKeys) == 0 {
		return 0
	}
	return c.unconfirmed()
}

// clientFlowsMax returns the maximum number of confirmed flows of one client: half of all.
func (c *Config) clientFlowsMax() uint32 { return max(c.FlowTableSize/2, 1) }

// idsMap records which ids are in use; see portTable.newID. No program uses it.
const idsMap = "ids"

func idsSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: idsMap, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 2,
		Pinning: ebpf.PinByName,
	}
}

// portMaps refer to each other, so they are replaced together.
var portMaps = []string{tcMapFrontends, tcMapServices, tcMapSlots, tcMapBackends, tcMapSourceRanges}

// dropMisfits unpins maps that do not have the wanted layout. The programs of the
// earlier run keep using theirs until they are replaced. So that these stay consistent
// until then, all maps of Services are replaced together. Maps that programs write and
// that differ only in size are moved aside for the migrator.
func dropMisfits(spec *ebpf.CollectionSpec, dir string, cfg *Config) error {
	drop := map[string]bool{}
	var aside []string
	for name, want := range spec.Maps {
		if want.Pinning != ebpf.PinByName {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
		if err != nil {
			continue
		}
		if err := want.Compatible(m); err != nil && replaceable(name) {
			drop[name] = true
		} else if onlySizeDiffers(want, m) && err != nil {
			cfg.Log.Info("Pinned map is created again in another size, and its entries are migrated",
				"map", name, "from", m.MaxEntries(), "to", want.MaxEntries)
			aside = append(aside, name)
		} else if errors.Is(err, ebpf.ErrMapIncompatible) {
			cfg.Log.Warn("Pinned map is created again", "map", name, "reason", err)
			drop[name] = true
		}
		m.Close()
	}
	if slices.ContainsFunc(portMaps, func(name string) bool { return drop[name] }) {
		for _, name := range portMaps {
			drop[name] = true
		}
	}
	for name := range drop {
		_ = os.Remove(filepath.Join(dir, name))
	}
	return putAside(dir, aside)
}

// replaceable reports whether a map may lose its entries: earlier flows end by their
// timeouts, loads are counted again, and the rest is of events.
func replaceable(name string) bool {
	switch name {
	case tcMapUnconfirmed, tcMapEvents, tcMapHandshakes, tcMapFlowBytes, tcMapLoads, tcMapSynProofs:
		return true
	}
	return false
}

// verdictNames reads the names of enum verdict from the object's BTF.
func verdictNames(spec *ebpf.CollectionSpec) ([]string, error) {
	var e *btf.Enum
	if err := spec.Types.TypeByName("verdict", &e); err != nil {
		return nil, fmt.Errorf("read verdicts from BTF: %w", err)
	}
	names := make([]string, len(e.Values)-1)
	for i := range names {
		names[i] = strings.ToLower(e.Values[i].Name)
	}
	return names, nil
}

// oneLine reduces a verifier error to its last words.
func oneLine(err error) error {
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return fmt.Errorf("%w: %v", ve.Cause, strings.Join(ve.Log[max(0, len(ve.Log)-2):], "; "))
	}
	return err
}
