package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// readPorts reads the entries of an earlier run from the maps. They are orphans until a
// Service port claims them. filter gets all addresses that the table will write.
func readPorts(m map[string]*ebpf.Map, filter *portFilter) (*portTable, error) {
	n := &journal{}
	t := &portTable{
		frontends: filter.before(noted[tcFrontendKey](n, m, tcMapFrontends)), services: noted[uint32](n, m, tcMapServices),
		slots: noted[tcSlotKey](n, m, tcMapSlots), backends: noted[uint32](n, m, tcMapBackends),
		ranges: noted[tcRangeKey](n, m, tcMapSourceRanges), ids: m[idsMap], changes: m[tcMapServiceChanges], notes: n,
		byID: map[intent.PortID]*port{}, orphans: map[uint32]*port{},
		owners: map[tcFrontendKey]uint32{}, endpoints: newEndpointAddrs(),
	}
	at := func(service uint32) *port {
		t.last[serviceID] = max(t.last[serviceID], service)
		if t.orphans[service] == nil {
			t.orphans[service] = newPort(service)
		}
		return t.orphans[service]
	}
	endpointAddrs := map[tcFrontendKey]tcFrontend{}
	err := each(t.services, func(id uint32, v tcService) {
		e := at(id).entries
		e.header, e.written = v, true
		e.tftp = v.Flags&uint16(tcServiceFlagsSERVICE_TFTP) != 0
	})
	if err != nil {
		return nil, err
	}
	err = each(t.frontends, func(key tcFrontendKey, v tcFrontend) {
		filter.add(key)
		if tcFrontendFlags(v.Flags)&tcFrontendFlagsFRONTEND_ENDPOINT != 0 {
			endpointAddrs[key] = v
			return
		}
		p := at(v.Service)
		p.entries.frontends[key] = v
		p.protocol = model.Protocol(key.Proto)
		t.owners[key] = v.Service
	})
	if err != nil {
		return nil, err
	}
	err = each(t.backends, func(id uint32, v tcBackend) {
		t.last[backendID] = max(t.last[backendID], id)
		addr := netip.AddrPortFrom(fromAddr(v.Addr, v.Family), toPort(v.Port))
		e := at(v.Service).entries
		e.backends = append(e.backends, backendEntry{addr, id, v})
	})
	if err != nil {
		return nil, err
	}
	err = each(t.ranges, func(key tcRangeKey, _ uint8) {
		if !isClusterRange(key) {
			at(key.Scope).entries.ranges[key] = true
		}
	})
	if err != nil {
		return nil, err
	}
	for _, p := range t.orphans {
		e := p.entries
		slices.SortFunc(e.backends, compareBackends)
		for i := range e.backends {
			t.endpoints.count(endpointKey(p.protocol, e.backends[i].addr), e.tftp, 1)
		}
	}
	t.findOdd(endpointAddrs)
	if err := t.readSlots(at); err != nil {
		return nil, err
	}
	return t, each(t.ids, func(kind, limit uint32) {
		t.reserved[kind] = limit
		t.last[kind] = max(t.last[kind], limit)
	})
}

func noted[K any](n *journal, m map[string]*ebpf.Map, name string) kernelMap {
	return notedMap[K]{m[name], name, n}
}

// findOdd compares the entries of endpoints' own addresses with the endpoints.
func (t *portTable) findOdd(found map[tcFrontendKey]tcFrontend) {
	for key, v := range found {
		if want, wanted := t.endpointEntry(key); !wanted || v != want {
			t.endpoints.odd[key] = struct{}{}
		}
	}
	for key := range t.endpoints.refs {
		if _, there := found[key]; !there {
			t.endpoints.odd[key] = struct{}{}
		}
	}
}

// maxSlots is the size of the map slots in bpf/maps.h. A set has no higher slot number;
// a key with one shows that the map is damaged.
const maxSlots = 1 << 21

// readSlots fills the sets. A killed run may have left a hole, an endpoint that does
// not exist. A later write fills it.
func (t *portTable) readSlots(at func(uint32) *port) error {
	return each(t.slots, func(key tcSlotKey, id uint32) {
		p, set, i := at(key.Service), clusterSet, int(key.Slot&^slotLocal)
		if key.Slot&slotLocal != 0 {
			set = localSet
		}
		if i >= maxSlots {
			return
		}
		for len(p.slots[set]) <= i {
			p.slots[set] = append(p.slots[set], 0)
		}
		p.slots[set][i] = id
		t.last[backendID] = max(t.last[backendID], id)
	})
}

// readClusterRanges reads the cluster's own prefixes.
func readClusterRanges(m *ebpf.Map) (map[tcRangeKey]bool, error) {
	found := map[tcRangeKey]bool{}
	err := each(m, func(key tcRangeKey, _ uint8) {
		if isClusterRange(key) {
			found[key] = true
		}
	})
	return found, err
}

// removeEarlierRanges removes the cluster's prefixes from source_ranges, where programs of earlier
// agents looked for them.
func removeEarlierRanges(m *ebpf.Map) error {
	found, err := readClusterRanges(m)
	for key := range found {
		err = errors.Join(err, remove(m, key))
	}
	return err
}

// inherit claims the entries for the ports of an earlier table.
func (t *portTable) inherit(earlier *portTable) {
	for id, p := range earlier.byID {
		if o := t.orphans[p.service]; o != nil {
			t.claim(id, o)
		}
	}
}

// readBatch is the number of entries that one system call reads. The kernel returns
// whole buckets of a hash map, which are much smaller.
const readBatch = 1024

// each calls f for every entry of a map that only this agent writes.
func each[K, V any](m kernelMap, f func(K, V)) error {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, readBatch), make([]V, readBatch)
	for first := true; ; first = false {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && first && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return eachByOne(m, f) // the kernel has no batches for this kind of map
		}
		for i := range n {
			f(keys[i], values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil // that was the last batch
		case err != nil:
			return fmt.Errorf("read eBPF map %s: %w", m, err)
		}
	}
}

// eachByOne is each with two system calls for each entry.
func eachByOne[K, V any](m kernelMap, f func(K, V)) error {
	var key K
	var value V
	it := m.Iterate()
	for it.Next(&key, &value) {
		f(key, value)
	}
	if err := it.Err(); err != nil {
		return fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	return nil
}

// Applied reads the maps again. The names of ports, and fields that the maps do not
// have, come from memory.
func (b *Backend) Applied(context.Context) (intent.State, error) {
	read, err := readPorts(b.objects.maps, b.objects.filter)
	if err != nil {
		return intent.State{}, err
	}
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	names := map[uint32]intent.PortID{}
	for id, p := range b.ports.byID {
		names[p.service] = id
	}
	var s intent.State
	for service, p := range read.orphans {
		id, known := names[service]
		if !known {
			id = intent.PortID{Service: model.Name{Name: fmt.Sprintf("unknown-%d", service)}}
		}
		sp := &intent.ServicePort{
			ID: id, Affinity: time.Duration(p.entries.header.Affinity) * time.Second,
			Frontends: p.intentFrontends(), Balance: balanceOf(p.entries.header.Flags), Direct: tcServiceFlags(p.entries.header.Flags)&tcServiceFlagsSERVICE_DSR != 0,
			SYNLimit: p.entries.header.SynLimit,
		}
		sp.Endpoints, sp.ServingUnselected, sp.Weights = p.intentEndpoints()
		if sp.Balance == intent.Maglev {
			sp.Table = p.intentTable()
			if known := b.ports.byID[id]; known != nil && known.source != nil {
				sp.Weights = known.source.Weights
			}
		}
		if p.entries.tftp {
			sp.Helper = intent.TFTP
		}
		s.Ports = append(s.Ports, sp)
	}
	slices.SortFunc(s.Ports, func(x, y *intent.ServicePort) int { return x.ID.Compare(y.ID) })
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.node != nil {
		s.Node = *b.node
	}
	return s, nil
}

// intentFrontends converts entries back to decisions. The kind of an address is unknown: ClusterIP
// stands for all kinds but NodePort.
func (p *port) intentFrontends() []intent.Frontend {
	var ranges []netip.Prefix
	for key := range p.entries.ranges {
		ranges = append(ranges, rangePrefix(key))
	}
	slices.SortFunc(ranges, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	var out []intent.Frontend
	for key, v := range p.entries.frontends {
		f := intent.Frontend{
			Kind: intent.NodePort, Port: toPort(key.Port),
			ExternalRoute: intent.Route(v.ExternalRoute), InternalRoute: intent.Route(v.InternalRoute),
		}
		if key.Addr != (tcAddr{}) {
			f.Kind, f.Addr = intent.ClusterIP, fromAddr(key.Addr, key.Family)
		}
		if tcFrontendFlags(v.Flags)&tcFrontendFlagsFRONTEND_RANGES != 0 {
			f.SourceRanges = append([]netip.Prefix{}, ranges...)
		}
		out = append(out, f)
	}
	slices.SortFunc(out, func(a, b intent.Frontend) int {
		if a.Kind != b.Kind {
			return int(a.Kind) - int(b.Kind)
		}
		if c := a.Addr.Compare(b.Addr); c != 0 {
			return c
		}
		return int(a.Port) - int(b.Port)
	})
	return out
}

// intentEndpoints converts the backends to endpoints, and the sets to their weights: the
// slots that an endpoint has. unselected are in no set.
func (p *port) intentEndpoints() (out, unselected []intent.Endpoint, weights []uint16) {
	var in [2]map[uint32]uint16
	for set, slots := range p.slots {
		in[set] = map[uint32]uint16{}
		for i := 0; i < len(slots) && i < int(p.entries.header.Count[set]); i++ {
			in[set][slots[i]]++
		}
	}
	for _, entry := range p.entries.backends {
		flags := tcBackendFlags(entry.value.Flags)
		endpoint := intent.Endpoint{
			Addr:                  entry.addr,
			ClusterPolicy:         flags&tcBackendFlagsBACKEND_CLUSTER_POLICY != 0,
			LocalPolicy:           flags&tcBackendFlagsBACKEND_LOCAL_POLICY != 0,
			OnThisNode:            flags&tcBackendFlagsBACKEND_ON_THIS_NODE != 0,
			HostNetwork:           flags&tcBackendFlagsBACKEND_HOST_NETWORK != 0,
			MustTraverseNetfilter: flags&tcBackendFlagsBACKEND_TRAVERSES_NETFILTER != 0,
			AllowsAny:             flags&tcBackendFlagsBACKEND_ALLOWS_ANY != 0,
			Watched:               flags&tcBackendFlagsBACKEND_WATCHED != 0,
			Ejected:               flags&tcBackendFlagsBACKEND_EJECTED != 0,
		}
		if entry.value.Flags&memberFlags == 0 {
			unselected = append(unselected, endpoint)
			continue
		}
		out = append(out, endpoint)
		weights = append(weights, max(in[clusterSet][entry.id], in[localSet][entry.id]))
	}
	if !slices.ContainsFunc(weights, func(w uint16) bool { return w != weights[0] }) {
		weights = nil
	}
	return out, unselected, weights
}

// intentTable converts the slots back to a decision's table.
func (p *port) intentTable() (table []uint32) {
	index := map[uint32]uint32{}
	for _, entry := range p.entries.backends {
		if entry.value.Flags&memberFlags != 0 {
			index[entry.id] = uint32(len(index))
		}
	}
	for _, id := range p.slots[clusterSet] {
		table = append(table, index[id])
	}
	return table
}

// Endpoints lists the endpoints in the maps of an instance, even if no agent runs. It
// changes nothing.
func Endpoints(bpffs string) ([]netip.AddrPort, error) {
	backends, err := ebpf.LoadPinnedMap(filepath.Join(mapsDir(bpffs), tcMapBackends), &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("open eBPF map %s: %w", tcMapBackends, err)
	}
	defer backends.Close()
	var found []netip.AddrPort
	err = each(backends, func(_ uint32, b tcBackend) {
		family := uint8(model.IPv4)
		if b.Addr.W[1]|b.Addr.W[2]|b.Addr.W[3] != 0 {
			family = uint8(model.IPv6)
		}
		found = append(found, netip.AddrPortFrom(fromAddr(b.Addr, family), toPort(b.Port)))
	})
	return found, err
}
