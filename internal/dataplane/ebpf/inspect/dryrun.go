package inspect

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// DryRun decides about first packets as the programs of an instance do, and sends none. It
// loads the same programs once more. They read the maps that the agent writes. Instead of
// the maps that programs write, they get new ones with a copy of the entries that matter:
//
//	agent ──> frontends, services, …  ──read──> attached programs ──> flows, verdicts, …
//	                                  ──read──> programs of DryRun ──> flows, verdicts, … (own)
//
// BPF_PROG_RUN gives a packet to a program and returns it: the kernel does not carry out a
// redirect.
type DryRun struct {
	*View
	tc, sock *ebpf.Collection
	features kernel.Features
	copied   int
}

// agentMaps are the maps that only the agent writes. A DryRun shares them.
var agentMaps = []string{
	objects.TCMapFrontends, objects.TCMapServices, objects.TCMapSlots, objects.TCMapBackends, objects.TCMapServiceChanges,
	objects.TCMapPods, objects.TCMapNodeAddrs,
	objects.TCMapUplinks, objects.TCMapL3Devices, objects.TCMapUntrackedPorts, objects.TCMapUntrackedPods, objects.TCMapUntrackedBlocks,
	objects.TCMapNodeSettings, objects.TCMapSnatPorts, objects.TCMapPortFilter, objects.TCMapSourceRanges, objects.TCMapClusterRanges,
	objects.TCMapUnhookedCgroups,
	objects.TCMapDsrEncapsulations, objects.TCMapRouteMtus,
}

// dryRunFlows is the size of a DryRun's flow table. It gets at most dryRunCopies entries.
const (
	dryRunFlows  = 1 << 17
	dryRunCopies = dryRunFlows * 3 / 4
)

// Hook is a tc hook at which new connections arrive.
type Hook string

// The hooks.
const (
	FromNetwork Hook = objects.TCProgFromNetwork
	FromPod     Hook = objects.TCProgFromPod
)

// DryRunPacket is the first packet of a connection.
type DryRunPacket struct {
	Hook     Hook
	Ifindex  int
	Protocol model.Protocol
	Src, Dst netip.AddrPort
}

// DryRunResult is a decision of the programs.
type DryRunResult struct {
	// Action is what the program returned: next, drop, redirect.
	Action string `json:"action"`
	// Verdicts are the counters that grew, in the order of enum verdict.
	Verdicts []string `json:"verdicts"`
	// Flow is the entry that the program has created or found; nil for none.
	Flow *FlowEntry `json:"flow,omitempty"`
	// Found reports that the entry existed before.
	Found bool `json:"flowExisted,omitempty"`
	// NextHop is the next hop that the program has found; nil for none.
	NextHop *NextHop `json:"nextHop,omitempty"`
	// Tag is the kernel's hash of the program.
	Tag string `json:"programTag"`
}

// NextHop is the result of the programs' search for a next hop.
type NextHop struct {
	Kind    string     `json:"kind"` // pod, neigh, link, stack, too_big, ttl_exceeded, no_route
	Ifindex int        `json:"ifindex,omitempty"`
	Gateway netip.Addr `json:"gateway,omitzero"`
	// Known reports that the kernel's neighbor table has the gateway's MAC address.
	Known bool `json:"neighborKnown"`
}

// OpenDryRun loads the programs for the instance with pins below bpffs. The calling thread
// must be in the instance's network namespace.
func OpenDryRun(bpffs string) (*DryRun, error) {
	v, err := OpenView(bpffs)
	if err != nil {
		return nil, err
	}
	d := &DryRun{View: v}
	if err := d.load(); err != nil {
		d.Close()
		return nil, fmt.Errorf("load programs for a dry run: %w", objects.ShortError(err))
	}
	return d, nil
}

// Close frees the programs and maps.
func (d *DryRun) Close() {
	for _, c := range []*ebpf.Collection{d.tc, d.sock} {
		if c != nil {
			c.Close()
		}
	}
	d.View.Close()
}

func (d *DryRun) load() error {
	var err error
	if d.features, err = kernel.Probe(kernel.Place{BPFFS: d.bpffs}); err != nil {
		return err
	}
	spec := d.spec.Copy()
	for name := range spec.Programs {
		if name != string(FromNetwork) && name != string(FromPod) && name != objects.TCProgHandle {
			delete(spec.Programs, name)
		}
	}
	if err := d.prepare(spec); err != nil {
		return err
	}
	d.tc, err = objects.NewCollection(spec, ebpf.CollectionOptions{MapReplacements: d.shared(spec)})
	if err != nil {
		return err
	}
	return d.copyState()
}

// shared returns the agent's maps for a spec.
func (d *DryRun) shared(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	maps := map[string]*ebpf.Map{}
	for _, name := range agentMaps {
		if spec.Maps[name] != nil {
			maps[name] = d.maps[name]
		}
	}
	return maps
}

// prepare sets sizes and load-time constants to those of the instance, and unpins all maps.
func (d *DryRun) prepare(spec *ebpf.CollectionSpec) error {
	c := map[string]any{
		objects.TCVarHostNetnsCookie: d.owner.Cookie, objects.TCVarHashSeed: d.seed,
		objects.TCVarUnconfirmedMax: d.maps[objects.TCMapUnconfirmed].MaxEntries(),
		objects.TCVarPortFilterMask: d.maps[objects.TCMapPortFilter].MaxEntries() - 1,
	}
	for name, on := range map[string]bool{
		objects.TCVarDsr:          d.hasDSRKeys(), // without the keys: no packet is sent
		objects.TCVarHasSetRetval: d.features.SetRetval, objects.TCVarHasCtLookup: d.features.ConntrackLookup,
		objects.TCVarHasCsumIpv6: d.features.CsumReplaceIPv6,
	} {
		if on {
			c[name] = uint8(1)
		}
	}
	if d.hasDSRKeys() {
		// Any port will do: no packet is sent. Without probes, dsr_encapsulations is empty.
		c[objects.TCVarDsrPort] = bits.ReverseBytes16(objects.DefaultDSRPort)
	}
	for name, v := range spec.Variables {
		if strings.HasPrefix(name, "unused_") {
			delete(spec.Variables, name)
			continue
		}
		if value, ok := c[name]; ok {
			if err := v.Set(value); err != nil {
				return fmt.Errorf("set eBPF constant %s: %w", name, err)
			}
		}
	}
	for name, m := range spec.Maps {
		m.Pinning = ebpf.PinNone
		if slices.Contains(agentMaps, name) {
			m.MaxEntries = d.maps[name].MaxEntries()
		}
	}
	for name, size := range map[string]uint32{
		objects.TCMapFlows: dryRunFlows, objects.TCMapUnconfirmed: d.maps[objects.TCMapUnconfirmed].MaxEntries(),
		objects.TCMapDsrPaths: d.maps[objects.TCMapDsrPaths].MaxEntries(),
	} {
		if m := spec.Maps[name]; m != nil {
			m.MaxEntries = size
		}
	}
	return nil
}

// copyState copies the small state that programs write and that decisions depend on.
func (d *DryRun) copyState() error {
	var features, next uint32
	for name, value := range map[string]*uint32{objects.TCMapFeaturesSeen: &features, objects.TCMapUnconfirmedNext: &next} {
		if err := d.maps[name].Lookup(uint32(0), value); err != nil {
			return fmt.Errorf("read map %s: %w", name, err)
		}
		if err := d.tc.Maps[name].Put(uint32(0), *value); err != nil {
			return fmt.Errorf("copy map %s: %w", name, err)
		}
	}
	err := objects.Each(d.maps[objects.TCMapDsrPaths], func(k uint32, v objects.TCDsrPath) { _ = d.tc.Maps[objects.TCMapDsrPaths].Put(k, v) })
	if err != nil {
		return err
	}
	return objects.Each(d.maps[objects.TCMapAffinities], func(k objects.TCAffinityKey, v objects.TCAffinity) {
		_ = d.tc.Maps[objects.TCMapAffinities].Put(k, v) // a full map evicts
	})
}

// Run gives a first packet to the program of its hook. It runs twice: the second time with
// the flows that lead to the endpoint of the first time, whose ports may be in use. The
// calling thread must be in the instance's network namespace.
func (d *DryRun) Run(ctx context.Context, p DryRunPacket) (*DryRunResult, error) {
	frame, err := p.frame()
	if err != nil {
		return nil, err
	}
	key := objects.TupleFor(p.Protocol, p.Src, p.Dst)
	found, err := d.copyFlow(key)
	if err != nil {
		return nil, err
	}
	r, err := d.run(p, frame, key)
	if err != nil || found || r.Flow == nil {
		if r != nil {
			r.Found = found
		}
		return r, err
	}
	if err := d.copyFlowsOf(ctx, key, r.Flow); err != nil {
		return nil, err
	}
	return d.run(p, frame, key)
}

// Copied returns the number of flows that the dry run knows, and whether there are more to
// the endpoint than that.
func (d *DryRun) Copied() (n int, all bool) { return d.copied, d.copied < dryRunCopies }

// copyFlow copies both entries of the packet's own flow, if there is one.
func (d *DryRun) copyFlow(key objects.TCTuple) (found bool, err error) {
	var f objects.TCFlow
	if err := d.maps[objects.TCMapFlows].Lookup(key, &f); errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	} else if err != nil {
		return false, fmt.Errorf("read flow table: %w", err)
	}
	if err := d.tc.Maps[objects.TCMapFlows].Put(key, f); err != nil {
		return true, fmt.Errorf("copy flow: %w", err)
	}
	reverse := objects.TCTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: key.Proto, Family: key.Family}
	if d.maps[objects.TCMapFlows].Lookup(reverse, &f) == nil {
		err = d.tc.Maps[objects.TCMapFlows].Put(reverse, f)
	}
	return true, err
}

// copyFlowsOf replaces the flows of the last run by those towards the same endpoint.
func (d *DryRun) copyFlowsOf(ctx context.Context, own objects.TCTuple, to *FlowEntry) error {
	addr, port := objects.ToAddr(to.Dst.Addr()), objects.ToPort(to.Dst.Port())
	_ = d.tc.Maps[objects.TCMapFlows].Delete(own)
	_ = d.tc.Maps[objects.TCMapFlows].Delete(objects.TupleFor(model.Protocol(own.Proto), to.Dst, to.Src))
	return objects.EachFlow(ctx, d.maps[objects.TCMapFlows], func(k *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		request := f.Daddr == addr && f.Dport == port
		reply := k.Saddr == addr && k.Sport == port
		if k.Proto != own.Proto || !request && !reply || d.copied >= dryRunCopies {
			return nil
		}
		d.copied++
		return d.tc.Maps[objects.TCMapFlows].Put(*k, *f)
	})
}

// run gives the packet to the program once.
func (d *DryRun) run(p DryRunPacket, frame []byte, key objects.TCTuple) (*DryRunResult, error) {
	prog := d.tc.Programs[string(p.Hook)]
	if prog == nil {
		return nil, fmt.Errorf("dry run: no program %s", p.Hook)
	}
	ctx := struct { // struct __sk_buff
		_                       [9]uint32
		IngressIfindex, Ifindex uint32
		_                       [37]uint32
	}{IngressIfindex: uint32(p.Ifindex), Ifindex: uint32(p.Ifindex)}
	before := d.counts()
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+dryRunRoom), Context: ctx}
	code, err := prog.Run(&opts)
	if err != nil {
		return nil, fmt.Errorf("dry run of %s: %w", p.Hook, err)
	}
	r := &DryRunResult{Action: actionNames[int32(code)], Verdicts: d.increased(before)}
	if info, err := prog.Info(); err == nil {
		r.Tag = info.Tag
	}
	var f objects.TCFlow
	if d.tc.Maps[objects.TCMapFlows].Lookup(key, &f) == nil {
		r.Flow = d.flowEntry(&key, &f)
	}
	r.NextHop = d.nextHop()
	return r, nil
}

// dryRunRoom is the most that an answer may be longer than the packet.
const dryRunRoom = 1500

// actionNames are the results of tc programs.
var actionNames = map[int32]string{-1: "next", 0: "accept", 2: "drop", 7: "redirect"}

// counts reads the counters of the dry run.
func (d *DryRun) counts() map[string]uint64 {
	return objects.SumVerdicts(d.tc.Maps[objects.TCMapVerdicts], d.verdicts)
}

// increased returns the counters that are higher than before.
func (d *DryRun) increased(before map[string]uint64) []string {
	now := d.counts()
	out := []string{}
	for _, name := range d.verdicts {
		if now[name] > before[name] {
			out = append(out, name)
		}
	}
	return out
}

// nextHop reads and clears the next hop in the programs' scratch memory. There is one for
// each CPU, and a run changes one.
func (d *DryRun) nextHop() *NextHop {
	var scratch *btf.Struct
	var kinds *btf.Enum
	if d.spec.Types.TypeByName("scratch", &scratch) != nil || d.spec.Types.TypeByName("next_hop_kind", &kinds) != nil {
		return nil
	}
	m := d.tc.Maps[objects.TCMapScratches]
	var perCPU [][]byte
	if m.Lookup(uint32(0), &perCPU) != nil {
		return nil
	}
	offset, hopType := member(scratch, "next_hop")
	hop, ok := btf.UnderlyingType(hopType).(*btf.Struct)
	if !ok {
		return nil
	}
	var found *NextHop
	for _, b := range perCPU {
		if h := hopAt(b[offset:], hop, kinds); h != nil {
			found = h
		}
		clear(b)
	}
	_ = m.Put(uint32(0), perCPU)
	return found
}

// hopAt reads struct next_hop; nil if it is unused.
func hopAt(b []byte, layout *btf.Struct, kinds *btf.Enum) *NextHop {
	word := func(name string) uint32 {
		offset, _ := member(layout, name)
		return binary.NativeEndian.Uint32(b[offset:])
	}
	hop := &NextHop{Ifindex: int(word("ifindex")), Known: word("neighbor_known") != 0}
	if word("kind") == 0 && hop.Ifindex == 0 {
		return nil
	}
	hop.Kind = enumName(kinds, uint64(word("kind")), "NEXT_HOP_")
	if neigh, _ := member(layout, "neigh"); hop.Kind == "neigh" { // struct bpf_redir_neigh
		switch address := b[neigh+4:]; binary.NativeEndian.Uint32(b[neigh:]) {
		case unix.AF_INET:
			hop.Gateway = netip.AddrFrom4([4]byte(address[:4]))
		case unix.AF_INET6:
			hop.Gateway = netip.AddrFrom16([16]byte(address[:16]))
		}
	}
	return hop
}

// member returns the offset in bytes and the type of a member of a struct, nil if it has
// none of that name.
func member(s *btf.Struct, name string) (offset uint32, of btf.Type) {
	for _, m := range s.Members {
		if m.Name == name {
			return m.Offset.Bytes(), m.Type
		}
	}
	return 0, nil
}

// frame builds the packet. Its link-layer destination is the device itself: programs leave
// frames for other hosts.
func (p DryRunPacket) frame() ([]byte, error) {
	link, err := netlink.LinkByIndex(p.Ifindex)
	if err != nil {
		return nil, fmt.Errorf("find device %d: %w", p.Ifindex, err)
	}
	return firstFrame(p.Protocol, link.Attrs().HardwareAddr, p.Src, p.Dst), nil
}
