// Package inspect shows what an instance has in the kernel: single entries, whole maps, counters, and
// dry runs of the programs. It reads only.
package inspect

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// View reads single entries of an instance's pinned maps. It writes nothing.
type View struct {
	bpffs    string
	spec     *ebpf.CollectionSpec
	maps     map[string]*ebpf.Map
	verdicts []string
	seed     uint32
	owner    kernel.NetnsID
}

// OpenView opens the maps of the instance with pins below bpffs. The error is os.ErrNotExist
// if there is none of this version.
func OpenView(bpffs string) (*View, error) {
	spec, err := objects.LoadTC()
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects: %w", err)
	}
	v := &View{bpffs: bpffs, spec: spec, maps: map[string]*ebpf.Map{}}
	if err := v.open(); err != nil {
		v.Close()
		return nil, err
	}
	return v, nil
}

func (v *View) open() error {
	for name, want := range v.spec.Maps {
		if want.Pinning != ebpf.PinByName {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(v.bpffs), name), &ebpf.LoadPinOptions{ReadOnly: true})
		if err != nil {
			return fmt.Errorf("open map %s of %s: %w", name, v.bpffs, err)
		}
		v.maps[name] = m
		if m.KeySize() != want.KeySize || m.ValueSize() != want.ValueSize && !objects.PerCPU(want.Type) {
			return fmt.Errorf("open map %s of %s: the agent has another version: use its spillway", name, v.bpffs)
		}
	}
	var err error
	if v.verdicts, err = objects.VerdictNames(v.spec); err != nil {
		return err
	}
	if v.owner, _, err = objects.OwnerOf(v.bpffs); err != nil {
		return err
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(v.bpffs, objects.SeedPin), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return fmt.Errorf("open hash seed of %s: %w", v.bpffs, err)
	}
	defer m.Close()
	if err := m.Lookup(uint32(0), &v.seed); err != nil {
		return fmt.Errorf("read hash seed of %s: %w", v.bpffs, err)
	}
	return nil
}

// Close closes the maps.
func (v *View) Close() {
	for _, m := range v.maps {
		m.Close()
	}
}

// Netns is the network namespace of the instance.
func (v *View) Netns() kernel.NetnsID { return v.owner }

// Verdicts returns the current counters of the instance.
func (v *View) Verdicts() map[string]uint64 {
	return objects.SumVerdicts(v.maps[objects.TCMapVerdicts], v.verdicts)
}

// lookup reads an entry. It reports false if there is none.
func lookup[K, V any](v *View, name string, key K) (value V, found bool) {
	err := v.maps[name].Lookup(key, &value)
	return value, err == nil
}

// FrontendEntry is an entry of the map frontends.
type FrontendEntry struct {
	Key           string   `json:"key"`
	Service       uint32   `json:"service"`
	ExternalRoute string   `json:"externalRoute"`
	InternalRoute string   `json:"internalRoute"`
	Flags         []string `json:"flags,omitempty"`
}

// Has reports whether the entry has a flag, such as "ranges".
func (f *FrontendEntry) Has(flag string) bool { return slices.Contains(f.Flags, flag) }

// Frontend reads an entry of the map frontends; nil if there is none. The zero address is
// that of NodePorts.
func (v *View) Frontend(proto model.Protocol, at netip.AddrPort) *FrontendEntry {
	e, found := lookup[objects.TCFrontendKey, objects.TCFrontend](v, objects.TCMapFrontends, objects.PortKey(at.Addr(), proto, at.Port()))
	if !found {
		return nil
	}
	return &FrontendEntry{
		Key: fmt.Sprintf("%s/%s", at, strings.ToLower(proto.String())), Service: e.Service,
		ExternalRoute: v.name("route", uint64(e.ExternalRoute), "ROUTE_"),
		InternalRoute: v.name("route", uint64(e.InternalRoute), "ROUTE_"),
		Flags:         v.flags("frontend_flags", uint64(e.Flags), "FRONTEND_"),
	}
}

// FilterHas reports whether the port filter lets packets with this address and port pass.
func (v *View) FilterHas(proto model.Protocol, at netip.AddrPort) bool {
	key := objects.TCFrontendKey{Addr: objects.ToAddr(at.Addr()), Port: objects.ToPort(at.Port()), Proto: uint8(proto)}
	m := v.maps[objects.TCMapPortFilter]
	index, set := objects.FilterPlace(v.seed, m.MaxEntries(), &key)
	var word uint64
	return m.Lookup(index, &word) == nil && word&set == set
}

// NodeAddr reports whether an address is the node's, and whether it serves NodePorts.
func (v *View) NodeAddr(a netip.Addr) (own, nodePorts bool) {
	flags, own := lookup[objects.TCAddrKey, uint32](v, objects.TCMapNodeAddrs, objects.AddrKey(a))
	return own, own && objects.TCNodeAddrFlags(flags)&objects.TCNodeAddrFlagsNODE_ADDR_NODEPORT != 0
}

// PodEntry is an entry of the map pods.
type PodEntry struct {
	Ifindex int
	Flags   []string
}

// Pod reads the entry of a pod of this node; nil if there is none.
func (v *View) Pod(a netip.Addr) *PodEntry {
	e, found := lookup[objects.TCAddrKey, objects.TCPod](v, objects.TCMapPods, objects.AddrKey(a))
	if !found {
		return nil
	}
	return &PodEntry{Ifindex: int(e.Ifindex), Flags: v.flags("pod_flags", uint64(e.Flags), "POD_")}
}

// unhooked reports whether a cgroup is that of a pod without socket hooks.
func (v *View) unhooked(cgroup uint64) bool {
	var one uint8
	return v.maps[objects.TCMapUnhookedCgroups].Lookup(cgroup, &one) == nil
}

// Hooked reports whether connect() in a cgroup calls the instance's socket hooks, and the
// cgroup is not excluded. served is that of attach.ServedCgroup, and dir a directory of tree.
func (v *View) Hooked(served attach.Cgroup, tree *kernel.CgroupTree, dir string) bool {
	return dir != "" && served.ID != 0 && tree.Below(dir, served.ID) && !tree.BelowAny(dir, v.unhooked)
}

// Uplink returns the node's address towards an external device. found is false for a device
// that is not external.
func (v *View) Uplink(ifindex int, like netip.Addr) (own netip.Addr, found bool) {
	e, found := lookup[uint32, objects.TCUplink](v, objects.TCMapUplinks, uint32(ifindex))
	if !found {
		return own, false
	}
	if like.Is4() {
		return objects.FromAddr(e.V4, uint8(model.IPv4)), true
	}
	return objects.FromAddr(e.V6, uint8(model.IPv6)), true
}

// SettingsEntry is the map node_settings.
type SettingsEntry struct {
	Flags []string
	// SNATPorts and NetworkPorts are the numbers of source ports in the two lists.
	SNATPorts, NetworkPorts int
	// First and Last are the lowest and the highest port of the list for SNAT.
	First, Last uint16
}

// Settings reads the settings of the programs.
func (v *View) Settings() SettingsEntry {
	s, _ := lookup[uint32, objects.TCSettings](v, objects.TCMapNodeSettings, 0)
	e := SettingsEntry{Flags: v.flags("settings_flags", uint64(s.Flags), "SETTING_"), SNATPorts: int(s.SnatPorts),
		NetworkPorts: int(s.NetworkPorts)}
	if s.SnatPorts > 0 {
		e.First, _ = lookup[uint32, uint16](v, objects.TCMapSnatPorts, 0)
		e.Last, _ = lookup[uint32, uint16](v, objects.TCMapSnatPorts, s.SnatPorts-1)
	}
	return e
}

// SourceRanges lists loadBalancerSourceRanges of a Service, and reports whether a client is
// in one of them.
func (v *View) SourceRanges(service uint32, client netip.Addr) (list []netip.Prefix, contains bool) {
	_ = objects.Each(v.maps[objects.TCMapSourceRanges], func(k objects.TCRangeKey, _ uint8) {
		if k.Scope == service && !objects.IsClusterRange(k) {
			list = append(list, objects.RangePrefix(k))
		}
	})
	_, contains = lookup[objects.TCRangeKey, uint8](v, objects.TCMapSourceRanges,
		objects.RangeKey(service, netip.PrefixFrom(client, client.BitLen())))
	slices.SortFunc(list, netip.Prefix.Compare)
	return list, contains
}

// EndpointShare is an endpoint of a set and its share of new connections.
type EndpointShare struct {
	Addr    netip.AddrPort `json:"address"`
	Backend uint32         `json:"backend"`
	Share   float64        `json:"share"`
	Flags   []string       `json:"flags,omitempty"`
}

// Endpoints reads the set of a route: "cluster" or "local". Each slot of a set gets the same
// share of the hashes.
func (v *View) Endpoints(service uint32, route string) (list []EndpointShare, affinity uint32) {
	s, found := lookup[uint32, objects.TCService](v, objects.TCMapServices, service)
	if !found {
		return nil, 0
	}
	n, local := s.Count[objects.ClusterSet], uint32(0)
	if route == "local" {
		n, local = s.Count[objects.LocalSet], objects.SlotLocal
	}
	at := map[uint32]int{}
	for i := range n {
		id, found := lookup[objects.TCSlotKey, uint32](v, objects.TCMapSlots, objects.TCSlotKey{Service: service, Slot: i | local})
		if !found {
			continue
		}
		k, known := at[id]
		if !known {
			k = len(list)
			at[id] = k
			list = append(list, v.endpoint(id))
		}
		list[k].Share += 1 / float64(n)
	}
	return list, s.Affinity
}

// Balance reads how a Service chooses one of its endpoints.
func (v *View) Balance(service uint32) intent.Balance {
	s, _ := lookup[uint32, objects.TCService](v, objects.TCMapServices, service)
	return objects.BalanceOf(s.Flags)
}

func (v *View) endpoint(id uint32) EndpointShare {
	e := EndpointShare{Backend: id}
	if b, found := lookup[uint32, objects.TCBackend](v, objects.TCMapBackends, id); found {
		e.Addr = netip.AddrPortFrom(objects.FromAddr(b.Addr, b.Family), objects.ToPort(b.Port))
		e.Flags = v.flags("backend_flags", uint64(b.Flags), "BACKEND_")
	}
	return e
}

// AffinityEntry is an entry of the map affinities.
type AffinityEntry struct {
	Endpoint EndpointShare
	Idle     uint32 // seconds
}

// Affinity reads the session affinity of a client, or of a network namespace by its cookie
// if that is not 0; nil if there is none.
func (v *View) Affinity(service uint32, client netip.Addr, cookie uint64) *AffinityEntry {
	key := objects.TCAffinityKey{Service: service, Family: objects.FamilyOf(client), Client: objects.ToAddr(client)}
	if cookie != 0 {
		key.ByCookie, key.Client = 1, objects.TCAddr{W: [4]uint32{uint32(cookie), uint32(cookie >> 32)}}
	}
	e, found := lookup[objects.TCAffinityKey, objects.TCAffinity](v, objects.TCMapAffinities, key)
	if !found {
		return nil
	}
	return &AffinityEntry{Endpoint: v.endpoint(e.Backend), Idle: objects.BootSeconds() - e.Seen}
}

// UntrackedRules returns how many rules of do-not-track policies leave a port of a pod
// untracked, for some peers.
func (v *View) UntrackedRules(proto model.Protocol, at netip.AddrPort) (rules int) {
	e, _ := lookup[objects.TCFrontendKey, objects.TCUntrackedPort](v, objects.TCMapUntrackedPorts,
		objects.PortKey(at.Addr(), proto, at.Port()))
	for _, r := range e.Rules {
		if r.Peers != 0 {
			rules++
		}
	}
	return rules
}

// FlowEntry is an entry of the flow table.
type FlowEntry struct {
	// From and To are the packet as it arrives, Src and Dst after translation.
	From    netip.AddrPort `json:"from"`
	To      netip.AddrPort `json:"to"`
	Src     netip.AddrPort `json:"translatedFrom"`
	Dst     netip.AddrPort `json:"translatedTo"`
	State   string         `json:"state"`
	Flags   []string       `json:"flags,omitempty"`
	Service uint32         `json:"service"`
	Backend uint32         `json:"backend"`
	Idle    uint32         `json:"idleSeconds"`
}

// Has reports whether the entry has a flag, such as "snat".
func (f *FlowEntry) Has(flag string) bool { return slices.Contains(f.Flags, flag) }

// IsEgress reports whether the entry is of a pod's connection to the outside with the node's address.
func (f *FlowEntry) IsEgress() bool { return f.Service == objects.ServiceEgress }

// Flow reads the entry of a packet in the flow table; nil if there is none.
func (v *View) Flow(proto model.Protocol, src, dst netip.AddrPort) *FlowEntry {
	key := objects.TupleFor(proto, src, dst)
	f, found := lookup[objects.TCTuple, objects.TCFlow](v, objects.TCMapFlows, key)
	if !found {
		return nil
	}
	return v.flowEntry(&key, &f)
}

func (v *View) flowEntry(k *objects.TCTuple, f *objects.TCFlow) *FlowEntry {
	at := func(a objects.TCAddr, port uint16) netip.AddrPort {
		return netip.AddrPortFrom(objects.FromAddr(a, k.Family), objects.ToPort(port))
	}
	return &FlowEntry{
		From: at(k.Saddr, k.Sport), To: at(k.Daddr, k.Dport), Src: at(f.Saddr, f.Sport), Dst: at(f.Daddr, f.Dport),
		State: v.name("flow_state", uint64(f.State), "FLOW_"), Flags: v.flags("flow_flags", uint64(f.Flags), "FLOW_"),
		Service: f.Service, Backend: f.Backend, Idle: objects.BootSeconds() - f.Seen,
	}
}

// PortsInUse counts the flows of the instance towards an endpoint whose source address the
// programs have replaced: each has a port of the node's.
func (d *DryRun) PortsInUse(proto model.Protocol, to netip.AddrPort) (n int) {
	addr, port := objects.ToAddr(to.Addr()), objects.ToPort(to.Port())
	_ = objects.Each(d.tc.Maps[objects.TCMapFlows], func(k objects.TCTuple, f objects.TCFlow) {
		if k.Proto == uint8(proto) && f.Daddr == addr && f.Dport == port && objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_SNAT != 0 {
			n++
		}
	})
	return n
}

// name returns the name of an enum's value, in lower case and without a prefix.
func (v *View) name(enum string, value uint64, prefix string) string {
	var e *btf.Enum
	if err := v.spec.Types.TypeByName(enum, &e); err != nil {
		return fmt.Sprint(value)
	}
	return enumName(e, value, prefix)
}

func enumName(e *btf.Enum, value uint64, prefix string) string {
	for _, have := range e.Values {
		if have.Value == value {
			return strings.ToLower(strings.TrimPrefix(have.Name, prefix))
		}
	}
	return fmt.Sprint(value)
}

// flags returns the names of the set bits.
func (v *View) flags(enum string, bits uint64, prefix string) (names []string) {
	var e *btf.Enum
	if err := v.spec.Types.TypeByName(enum, &e); err != nil {
		return nil
	}
	for _, have := range e.Values {
		if bits&have.Value != 0 {
			names = append(names, strings.ToLower(strings.TrimPrefix(have.Name, prefix)))
		}
	}
	return names
}

// Endpoints lists the endpoints in the maps of an instance, even if no agent runs. It
// changes nothing.
func Endpoints(bpffs string) ([]netip.AddrPort, error) {
	backends, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(bpffs), objects.TCMapBackends), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open eBPF map %s: %w", objects.TCMapBackends, err)
	}
	defer backends.Close()
	var found []netip.AddrPort
	err = objects.Each(backends, func(_ uint32, b objects.TCBackend) {
		family := uint8(model.IPv4)
		if b.Addr.W[1]|b.Addr.W[2]|b.Addr.W[3] != 0 {
			family = uint8(model.IPv6)
		}
		found = append(found, netip.AddrPortFrom(objects.FromAddr(b.Addr, family), objects.ToPort(b.Port)))
	})
	return found, err
}
