// Package objects loads the programs and maps of the eBPF dataplane. It has what all parts of the
// dataplane share: the Go side of bpf/abi.h, the configuration, the pins, and the port filter.
package objects

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"math/bits"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/kernel"
)

// Objects are the loaded programs and maps.
type Objects struct {
	Maps     map[string]*ebpf.Map
	Programs map[string]*ebpf.Program
	// TailCalls is the array of the program that those of tc call; nil in releases before.
	TailCalls *ebpf.Map
	// l3 has the programs for devices without a link-layer header, which loadL3 loads later than the
	// others. Only the attacher uses it: readers of programs take no lock.
	l3     map[string]*ebpf.Program
	loadL3 func() (map[string]*ebpf.Program, error)
	// Verdicts has the names of the counters, by index.
	Verdicts []string
	// Seed is hash_seed of bpf/config.h.
	Seed   uint32
	Filter *PortFilter
	// Features are those of the kernel.
	Features kernel.Features
}

// Close closes the programs and maps. The pinned ones go on serving.
func (o *Objects) Close() {
	for _, loaded := range []map[string]*ebpf.Program{o.Programs, o.l3} {
		for _, p := range loaded {
			p.Close()
		}
	}
	for _, m := range o.Maps {
		m.Close()
	}
	o.TailCalls.Close()
}

// loadL3Programs loads the programs for devices without a link-layer header, with the maps of o.
func (o *Objects) loadL3Programs(cfg *Config, features kernel.Features) (map[string]*ebpf.Program, error) {
	all, err := Specs(cfg, features)
	if err != nil {
		return nil, err
	}
	if err := SetSeed(all, o.Seed); err != nil {
		return nil, err
	}
	spec := all[0]
	maps.DeleteFunc(spec.Programs, func(name string, _ *ebpf.ProgramSpec) bool { return !isL3(name) })
	shared := ShareMaps(spec, func(name string) *ebpf.Map { return o.Maps[name] })
	// What an entry program has parsed is in a map without a pin.
	for name := range spec.Maps {
		if constants := strings.HasPrefix(name, "."); !constants && o.Maps[name] != nil {
			shared[name] = o.Maps[name]
		}
	}
	spec.Maps[TCMapTailCalls].Contents, shared[TCMapTailCalls] = nil, o.TailCalls
	coll, err := NewCollection(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, fmt.Errorf("load eBPF programs: %w", ShortError(err))
	}
	loaded := maps.Clone(coll.Programs)
	clear(coll.Programs)
	coll.Close()
	return loaded, nil
}

// ShareMaps has a spec use pinned maps that exist already, and returns those for MapReplacements.
func ShareMaps(spec *ebpf.CollectionSpec, existing func(name string) *ebpf.Map) map[string]*ebpf.Map {
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
	return program == TCProgFromNetworkL3 || program == TCProgToNetworkL3
}

// SocketPrograms returns the programs for the cgroup. Those of events are loaded if they are
// wanted: selectSocketPrograms.
func (o *Objects) SocketPrograms() map[ebpf.AttachType]*ebpf.Program {
	programs := map[ebpf.AttachType]*ebpf.Program{
		ebpf.AttachCGroupInet4Connect:     o.Programs[SockProgConnect4],
		ebpf.AttachCGroupInet6Connect:     o.Programs[SockProgConnect6],
		ebpf.AttachCGroupUDP4Sendmsg:      o.Programs[SockProgSendmsg4],
		ebpf.AttachCGroupUDP6Sendmsg:      o.Programs[SockProgSendmsg6],
		ebpf.AttachCGroupUDP4Recvmsg:      o.Programs[SockProgRecvmsg4],
		ebpf.AttachCGroupUDP6Recvmsg:      o.Programs[SockProgRecvmsg6],
		ebpf.AttachCgroupInet4GetPeername: o.Programs[SockProgGetpeername4],
		ebpf.AttachCgroupInet6GetPeername: o.Programs[SockProgGetpeername6],
	}
	for at, name := range SocketEventPrograms {
		if p := o.Programs[name]; p != nil {
			programs[at] = p
		}
	}
	return programs
}

// NewCollection loads an object of an agent, or of a dry run. Tests of maps and hooks replace it: they load
// programs that do nothing, which costs the verifier nothing.
var NewCollection = ebpf.NewCollectionWithOptions

// Load loads the programs of these objects with the maps pinned in a directory, or with new
// ones. Call OpenFilter when the maps have their entries.
func Load(all []*ebpf.CollectionSpec, dir string, cfg *Config, features kernel.Features) (o *Objects, err error) {
	o = &Objects{Maps: map[string]*ebpf.Map{}, Programs: map[string]*ebpf.Program{}, Features: features}
	o.loadL3 = func() (map[string]*ebpf.Program, error) { return o.loadL3Programs(cfg, features) }
	if o.Verdicts, err = VerdictNames(all[0]); err != nil {
		return nil, err
	}
	if o.Seed, err = hashSeed(cfg.BPFFS); err != nil {
		return nil, err
	}
	if err := SetSeed(all, o.Seed); err != nil {
		return nil, err
	}
	opts := ebpf.CollectionOptions{Maps: ebpf.MapOptions{PinPath: dir}}
	for _, spec := range all {
		coll, err := NewCollection(spec, opts)
		if err != nil {
			o.Close()
			return nil, fmt.Errorf("load eBPF programs: %w", cfg.withMemory(ShortError(err)))
		}
		for name, p := range coll.Programs {
			o.Programs[name] = p
		}
		for name, m := range coll.Maps {
			if name == TCMapTailCalls {
				o.TailCalls = m
				continue
			}
			if o.Maps[name] != nil { // of the tc programs: the same, if it is pinned
				m.Close()
				continue
			}
			o.Maps[name] = m
		}
	}
	return o, nil
}

// L3Programs returns the programs for devices without a link-layer header, and loads them if they
// are not yet.
func (o *Objects) L3Programs() (map[string]*ebpf.Program, error) {
	if o.Programs[TCProgFromNetworkL3] != nil {
		return o.Programs, nil
	}
	var err error
	if o.l3 == nil {
		o.l3, err = o.loadL3()
	}
	return o.l3, err
}

// SetSeed sets hash_seed of bpf/config.h.
func SetSeed(specs []*ebpf.CollectionSpec, seed uint32) error {
	for _, spec := range specs {
		if v := spec.Variables[TCVarHashSeed]; v != nil {
			if err := v.Set(seed); err != nil {
				return fmt.Errorf("set hash seed: %w", err)
			}
		}
	}
	return nil
}

// Specs returns the objects with their sizes and load-time constants: that of the tc programs,
// of the socket hooks, and with Config.XDP that of XDP.
func Specs(cfg *Config, features kernel.Features) ([]*ebpf.CollectionSpec, error) {
	var all []*ebpf.CollectionSpec
	for _, load := range []func() (*ebpf.CollectionSpec, error){LoadTC, LoadSock, LoadXDP} {
		spec, err := load()
		if err != nil {
			return nil, fmt.Errorf("read eBPF objects: %w", err)
		}
		all = append(all, spec)
	}
	if !cfg.UsesXDP() {
		all = all[:2]
	}
	if err := Configure(all, cfg, features); err != nil {
		return nil, err
	}
	if cfg.XDP == XDPAuto && features.XDPFrags {
		// Without the flag a driver refuses an MTU above a page. The program passes a frame that is
		// not whole in its first buffer: see bpf/lib/xdp/parse_frame.h. In the generic mode the kernel
		// copies frames for a program with the flag, and connections to a veth time out (6.18).
		all[2].Programs[XDPProgXdpFromNetwork].Flags |= unix.BPF_F_XDP_HAS_FRAGS
	}
	return all, cfg.selectSocketPrograms(all[1], features)
}

// AgentSpecs returns the specs that an agent loads, with the map of ids.
func AgentSpecs(cfg *Config, features kernel.Features) ([]*ebpf.CollectionSpec, error) {
	all, err := Specs(cfg, features)
	if err != nil {
		return nil, err
	}
	all[0].Maps[IDsMap] = IDsSpec()
	if !cfg.LoadAll {
		maps.DeleteFunc(all[0].Programs, func(name string, _ *ebpf.ProgramSpec) bool { return isL3(name) })
	}
	return all, nil
}

// Configure sets sizes and load-time constants.
func Configure(specs []*ebpf.CollectionSpec, cfg *Config, features kernel.Features) error {
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
		TCVarHostNetnsCookie: cookie,
		TCVarUnconfirmedMax:  cfg.unconfirmed(), TCVarClientFlowsMax: cfg.ClientFlowsMax(),
		TCVarPortFilterMask: cfg.filterWords() - 1, TCVarDsrFlowsMax: max(cfg.DSRFlows(), 1),
		TCVarMaglevSeed: crc32.ChecksumIEEE([]byte(cfg.MaglevSeed)),
	}
	for name, value := range cfg.eventConstants() {
		c[name] = value
	}
	if cfg.UsesXDP() {
		var key [16]byte
		_, _ = rand.Read(key[:]) // never fails
		c[TCVarSynKey0], c[TCVarSynKey1] = binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:])
	}
	for i, key := range cfg.DSRKeys[:min(len(cfg.DSRKeys), 2)] {
		names := [][2]string{{TCVarDsrKey0, TCVarDsrKey1}, {TCVarDsrPreviousKey0, TCVarDsrPreviousKey1}}[i]
		c[TCVarDsr], c[TCVarDsrPort] = uint8(1), bits.ReverseBytes16(cfg.DSRPort)
		c[names[0]], c[names[1]] = binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:])
	}
	if f.SetRetval {
		c[TCVarHasSetRetval] = uint8(1)
	}
	if f.ConntrackLookup {
		c[TCVarHasCtLookup] = uint8(1)
	}
	if f.CsumReplaceIPv6 {
		c[TCVarHasCsumIpv6] = uint8(1)
	}
	return c, nil
}

// MaxDSRPaths is the number of endpoints on other nodes whose paths to clients are watched.
const MaxDSRPaths = 1 << 14

// dsrPaths returns the number of entries of the maps dsr_paths and dsr_encapsulations.
func (c *Config) dsrPaths() uint32 {
	if len(c.DSRKeys) > 0 {
		return MaxDSRPaths
	}
	return 1
}

// maxSYNProofs is SYN_PROOFS of bpf/abi.h.
const maxSYNProofs = 1 << 20

// synProofs returns the number of entries of the map of this name.
func (c *Config) synProofs() uint32 {
	if c.UsesXDP() {
		return maxSYNProofs
	}
	return 1
}

// UnconfirmedShare is the number of confirmed flows for each unconfirmed one.
const UnconfirmedShare = 4

// unconfirmed returns the length of the ring of unconfirmed flows.
func (c *Config) unconfirmed() uint32 { return max(c.FlowTableSize/UnconfirmedShare, 1) }

// DSRFlows returns the length of the ring of flows with DSR at the node that receives them. The map
// flows keeps its size with DSRKeys: flows that begin while it is created anew may be lost. So these
// flows take room of confirmed ones.
func (c *Config) DSRFlows() uint32 {
	if len(c.DSRKeys) == 0 {
		return 0
	}
	return c.unconfirmed()
}

// ClientFlowsMax returns the maximum number of confirmed flows of one client: half of all.
func (c *Config) ClientFlowsMax() uint32 { return max(c.FlowTableSize/2, 1) }

// IDsMap records which ids are in use; see newID of package services. No program uses it.
const IDsMap = "ids"

// IDsSpec returns the layout of the map of ids.
func IDsSpec() *ebpf.MapSpec {
	return &ebpf.MapSpec{
		Name: IDsMap, Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 2,
		Pinning: ebpf.PinByName,
	}
}

// PortMaps refer to each other, so they are replaced together.
var PortMaps = []string{TCMapFrontends, TCMapServices, TCMapSlots, TCMapBackends, TCMapSourceRanges}

// ShortError reduces a verifier error to its last words.
func ShortError(err error) error {
	var ve *ebpf.VerifierError
	if errors.As(err, &ve) {
		return fmt.Errorf("%w: %v", ve.Cause, strings.Join(ve.Log[max(0, len(ve.Log)-2):], "; "))
	}
	return err
}

// MaxLoads is the number of places of the map loads: a power of two. With more live endpoints
// than places, two may share one.
const MaxLoads = 1 << 16

// loads returns the number of entries of the map of this name.
func (c *Config) loads() uint32 {
	if c.BalanceByLoad {
		return MaxLoads
	}
	return 1
}
