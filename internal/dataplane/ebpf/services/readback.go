package services

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// readPorts reads the entries of an earlier run from the maps. They are unmatched until
// match gives them a PortID. filter gets all addresses that the table will write.
func readPorts(m map[string]*ebpf.Map, filter *objects.PortFilter) (*portTable, error) {
	n := &journal{}
	t := &portTable{
		frontends: filter.Before(noted[objects.TCFrontendKey](n, m, objects.TCMapFrontends)),
		services:  noted[uint32](n, m, objects.TCMapServices),
		slots:     noted[objects.TCSlotKey](n, m, objects.TCMapSlots), backends: noted[uint32](n, m, objects.TCMapBackends),
		ranges: noted[objects.TCRangeKey](n, m, objects.TCMapSourceRanges), ids: m[objects.IDsMap],
		changes: m[objects.TCMapServiceChanges], notes: n,
		byID: map[intent.PortID]*port{}, unmatched: map[uint32]*port{},
		owners: map[objects.TCFrontendKey]uint32{}, endpoints: newEndpointAddrs(),
	}
	at := func(service uint32) *port {
		t.last[serviceID] = max(t.last[serviceID], service)
		if t.unmatched[service] == nil {
			t.unmatched[service] = newPort(service)
		}
		return t.unmatched[service]
	}
	endpointAddrs := map[objects.TCFrontendKey]objects.TCFrontend{}
	err := objects.Each(t.services, func(id uint32, v objects.TCService) {
		e := at(id).entries
		e.header, e.written = v, true
		e.tftp = v.Flags&uint16(objects.TCServiceFlagsSERVICE_TFTP) != 0
	})
	if err != nil {
		return nil, err
	}
	err = objects.Each(t.frontends, func(key objects.TCFrontendKey, v objects.TCFrontend) {
		filter.Add(key)
		if objects.TCFrontendFlags(v.Flags)&objects.TCFrontendFlagsFRONTEND_ENDPOINT != 0 {
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
	err = objects.Each(t.backends, func(id uint32, v objects.TCBackend) {
		t.last[backendID] = max(t.last[backendID], id)
		addr := netip.AddrPortFrom(objects.FromAddr(v.Addr, v.Family), objects.ToPort(v.Port))
		e := at(v.Service).entries
		e.backends = append(e.backends, backendEntry{addr, id, v})
	})
	if err != nil {
		return nil, err
	}
	err = objects.Each(t.ranges, func(key objects.TCRangeKey, _ uint8) {
		if !objects.IsClusterRange(key) {
			at(key.Scope).entries.ranges[key] = true
		}
	})
	if err != nil {
		return nil, err
	}
	for _, p := range t.unmatched {
		e := p.entries
		slices.SortFunc(e.backends, compareBackends)
		for i := range e.backends {
			t.endpoints.count(endpointKey(p.protocol, e.backends[i].addr), e.tftp, 1)
		}
	}
	t.findOutOfSync(endpointAddrs)
	if err := t.readSlots(at); err != nil {
		return nil, err
	}
	return t, objects.Each(t.ids, func(kind, limit uint32) {
		t.reserved[kind] = limit
		t.last[kind] = max(t.last[kind], limit)
	})
}

func noted[K any](n *journal, m map[string]*ebpf.Map, name string) objects.Map {
	return notedMap[K]{m[name], name, n}
}

// findOutOfSync compares the entries of endpoints' own addresses with the endpoints.
func (t *portTable) findOutOfSync(found map[objects.TCFrontendKey]objects.TCFrontend) {
	for key, v := range found {
		if want, wanted := t.endpointEntry(key); !wanted || v != want {
			t.endpoints.outOfSync[key] = struct{}{}
		}
	}
	for key := range t.endpoints.refs {
		if _, there := found[key]; !there {
			t.endpoints.outOfSync[key] = struct{}{}
		}
	}
}

// maxSlots is the size of the map slots in bpf/maps.h. A set has no higher slot number;
// a key with one shows that the map is damaged.
const maxSlots = 1 << 21

// readSlots fills the sets. A killed run may have left a hole, an endpoint that does
// not exist. A later write fills it.
func (t *portTable) readSlots(at func(uint32) *port) error {
	return objects.Each(t.slots, func(key objects.TCSlotKey, id uint32) {
		p, set, i := at(key.Service), objects.ClusterSet, int(key.Slot&^objects.SlotLocal)
		if key.Slot&objects.SlotLocal != 0 {
			set = objects.LocalSet
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

// inherit matches the entries with the ports of an earlier table.
func (t *portTable) inherit(earlier *portTable) {
	for id, p := range earlier.byID {
		if o := t.unmatched[p.service]; o != nil {
			t.match(id, o)
		}
	}
}

// Applied reads the maps again. The names of ports, and fields that the maps do not
// have, come from memory.
func (w *Writer) Applied() (ports []*intent.ServicePort, err error) {
	read, err := readPorts(w.objects.Maps, w.objects.Filter)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	names := map[uint32]intent.PortID{}
	for id, p := range w.table.byID {
		names[p.service] = id
	}
	for service, p := range read.unmatched {
		id, known := names[service]
		if !known {
			id = intent.PortID{Service: model.Name{Name: fmt.Sprintf("unknown-%d", service)}}
		}
		sp := &intent.ServicePort{
			ID: id, Affinity: time.Duration(p.entries.header.Affinity) * time.Second,
			Frontends: p.intentFrontends(), Balance: objects.BalanceOf(p.entries.header.Flags),
			DSR:      objects.TCServiceFlags(p.entries.header.Flags)&objects.TCServiceFlagsSERVICE_DSR != 0,
			SYNLimit: p.entries.header.SynLimit,
		}
		sp.Endpoints, sp.ServingUnselected, sp.Weights = p.intentEndpoints()
		if sp.Balance == intent.Maglev {
			sp.Table = p.intentTable()
			if known := w.table.byID[id]; known != nil && known.source != nil {
				sp.Weights = known.source.Weights
			}
		}
		if p.entries.tftp {
			sp.Helper = intent.TFTP
		}
		ports = append(ports, sp)
	}
	slices.SortFunc(ports, func(x, y *intent.ServicePort) int { return x.ID.Compare(y.ID) })
	return ports, nil
}

// intentFrontends converts entries back to decisions. The kind of an address is unknown: ClusterIP
// stands for all kinds but NodePort.
func (p *port) intentFrontends() []intent.Frontend {
	var ranges []netip.Prefix
	for key := range p.entries.ranges {
		ranges = append(ranges, objects.RangePrefix(key))
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
			Kind: intent.NodePort, Port: objects.ToPort(key.Port),
			ExternalRoute: intent.Route(v.ExternalRoute), InternalRoute: intent.Route(v.InternalRoute),
		}
		if key.Addr != (objects.TCAddr{}) {
			f.Kind, f.Addr = intent.ClusterIP, objects.FromAddr(key.Addr, key.Family)
		}
		if objects.TCFrontendFlags(v.Flags)&objects.TCFrontendFlagsFRONTEND_RANGES != 0 {
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
		flags := objects.TCBackendFlags(entry.value.Flags)
		endpoint := intent.Endpoint{
			Addr:                  entry.addr,
			ClusterPolicy:         flags&objects.TCBackendFlagsBACKEND_CLUSTER_POLICY != 0,
			LocalPolicy:           flags&objects.TCBackendFlagsBACKEND_LOCAL_POLICY != 0,
			OnThisNode:            flags&objects.TCBackendFlagsBACKEND_ON_THIS_NODE != 0,
			HostNetwork:           flags&objects.TCBackendFlagsBACKEND_HOST_NETWORK != 0,
			MustTraverseNetfilter: flags&objects.TCBackendFlagsBACKEND_TRAVERSES_NETFILTER != 0,
			AllowsAny:             flags&objects.TCBackendFlagsBACKEND_ALLOWS_ANY != 0,
			Watched:               flags&objects.TCBackendFlagsBACKEND_WATCHED != 0,
			Ejected:               flags&objects.TCBackendFlagsBACKEND_EJECTED != 0,
		}
		if entry.value.Flags&memberFlags == 0 {
			unselected = append(unselected, endpoint)
			continue
		}
		out = append(out, endpoint)
		weights = append(weights, max(in[objects.ClusterSet][entry.id], in[objects.LocalSet][entry.id]))
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
	for _, id := range p.slots[objects.ClusterSet] {
		table = append(table, index[id])
	}
	return table
}
