package services

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// portTable is the content of the maps of Services. Writer alone calls it.
//
//	frontends[address:port] -> service id
//	services[id]            -> size of each set
//	slots[id, n]            -> backend id, n < size
//	backends[id]            -> address, port, flags
//
// Every lookup of a program, at any moment of an update, finds an endpoint that is
// correct before or after the change. The order of the writes below guarantees that.
type portTable struct {
	frontends, services, slots, backends, ranges, ids objects.Map

	notes *journal // records writes to the first five maps
	byID  map[intent.PortID]*port
	// unmatched are Services read from the maps whose PortID is not known yet, by their ids.
	unmatched map[uint32]*port
	// endpoints has the addresses of endpoints; see endpointaddrs.go.
	endpoints endpointAddrs
	// owners has the Service of each frontend, so that a frontend that moves is not
	// removed from its new owner.
	owners map[objects.TCFrontendKey]uint32
	addrs  *frontendAddrs // counts the keys of owners; nil: not counted
	names  *portNames     // nil: not recorded
	ended  func()         // called when an endpoint is removed; nil: not needed
	// last has the last id of a Service and of an endpoint. An id is never reused, not
	// even by a later run, because flows and sockets store it.
	last [2]uint32
	// reserved is the content of the map of ids: ids up to it may be in use.
	reserved [2]uint32

	// changes is the map service_changes; nil: there are no programs. changed says that the
	// programs must compare UDP flows with their Services again; see countChange.
	changes *ebpf.Map
	changed bool

	batches *portBatches // see begin
	ofNone  change       // of entries that belong to no port
}

// The keys of the map of ids.
const (
	serviceID = 0
	backendID = 1
)

// idBlock is the number of ids that one write to the map of ids reserves.
const idBlock = 4096

// newID returns an id that was never used before.
func (t *portTable) newID(kind uint32) (uint32, error) {
	if t.last[kind] >= t.reserved[kind] {
		limit := t.last[kind] + idBlock
		if err := t.ids.Put(kind, limit); err != nil {
			return 0, fmt.Errorf("reserve ids: %w", err)
		}
		t.reserved[kind] = limit
	}
	t.last[kind]++
	return t.last[kind], nil
}

// port is one Service port in the maps. A large cluster has many, and few change: what
// follows from the decision that was written is not stored again.
type port struct {
	service  uint32
	protocol model.Protocol
	slots    [2][]uint32
	// source is the decision that the maps hold, and ids are those of its endpoints, in
	// their order. Both are nil while entries is not.
	source *intent.ServicePort
	ids    []uint32
	// entries are the port's entries after a restart, during a write, and after one that
	// failed.
	entries *portEntries
}

// portEntries are the entries of a port in the maps apart from its slots.
type portEntries struct {
	header    objects.TCService
	written   bool // header is in the map
	tftp      bool // its endpoints answer from other ports (TFTP)
	frontends map[objects.TCFrontendKey]objects.TCFrontend
	ranges    map[objects.TCRangeKey]bool
	backends  []backendEntry      // sorted by address
	added     *intent.ServicePort // its new entries are written, and its old ones are not yet removed
}

// backendEntry is an entry of the map backends. Its id is 0 after it was removed.
type backendEntry struct {
	addr  netip.AddrPort
	id    uint32
	value objects.TCBackend
}

func newPort(service uint32) *port {
	return &port{service: service, entries: &portEntries{
		frontends: map[objects.TCFrontendKey]objects.TCFrontend{}, ranges: map[objects.TCRangeKey]bool{},
	}}
}

// current returns the port's entries in the maps.
func (p *port) current() *portEntries {
	if p.entries != nil {
		return p.entries
	}
	e := &portEntries{written: true, tftp: p.source.Helper == intent.TFTP}
	e.header = e.newHeader(p.source)
	for set := range p.slots {
		e.header.Count[set] = uint32(len(p.slots[set]))
	}
	e.frontends, e.ranges = wantedFrontends(p.service, p.source), wantedRanges(p.service, p.source)
	e.backends = make([]backendEntry, len(p.ids))
	for i, endpoint := range servedBy(p.source) {
		e.backends[i] = backendEntry{endpoint.Addr, p.ids[i], backendOf(p.service, endpoint)}
	}
	return e
}

// beginUpdate prepares a write: from now on the entries differ from the decision.
func (p *port) beginUpdate() *portEntries {
	p.entries = p.current()
	p.source, p.ids = nil, nil
	return p.entries
}

// commitUpdate records that the maps hold this decision and no more. Most ports have the same
// ids in the slots, in the same order: one list serves both until the next write.
func (p *port) commitUpdate(source *intent.ServicePort) {
	p.ids = p.slots[objects.ClusterSet]
	if !slices.EqualFunc(p.ids, p.entries.backends, func(id uint32, b backendEntry) bool { return id == b.id }) {
		p.ids = make([]uint32, len(p.entries.backends))
		for i := range p.entries.backends {
			p.ids[i] = p.entries.backends[i].id
		}
	}
	p.source, p.entries = source, nil
}

// replace makes the maps contain these ports and no others. It writes only ports that
// differ.
func (t *portTable) replace(ctx context.Context, ports []*intent.ServicePort) (map[intent.PortID]error, error) {
	want := make(map[intent.PortID]bool, len(ports))
	for _, p := range ports {
		want[p.ID] = true
		t.matchByFrontend(p)
	}
	var gone []intent.PortID
	for id := range t.byID {
		if !want[id] {
			gone = append(gone, id)
		}
	}
	return t.update(ctx, ports, gone, true)
}

// update writes ports and removes others, and with whole also all unmatched Services. It removes
// ports first, unless the others get an address or an endpoint of theirs. Of what continues it adds
// all new entries before it removes any, so that an address that moves between Services is always
// served. The entries of a port that does not fit are removed where the port no longer has them.
func (t *portTable) update(ctx context.Context, ports []*intent.ServicePort, gone []intent.PortID,
	whole bool) (map[intent.PortID]error, error) {
	defer t.release()
	failed := map[intent.PortID]error{}
	gone, ended := t.split(gone, ports)
	for some := range chunks(ended, func(id intent.PortID) int { return t.byID[id].size() }) {
		maps.Copy(failed, t.remove(some))
	}
	var unwritten []*intent.ServicePort
	for some := range chunks(ports, func(p *intent.ServicePort) int { return len(p.Endpoints) }) {
		if err := ctx.Err(); err != nil {
			return failed, err
		}
		for p := range t.addNew(some) {
			unwritten = append(unwritten, p)
		}
	}
	unwritten = slices.DeleteFunc(unwritten, func(p *intent.ServicePort) bool {
		return t.takesOver(p) && len(t.addNew([]*intent.ServicePort{p})) == 0
	})
	for some := range chunks(ports, func(p *intent.ServicePort) int { return len(p.Endpoints) }) {
		maps.Copy(failed, t.removeOld(some))
	}
	// Ports that did not fit may fit now, or after the rest is removed.
	slices.SortFunc(unwritten, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
	unwritten = slices.DeleteFunc(unwritten, func(p *intent.ServicePort) bool { return t.writeOrShrink(p) == nil })
	for some := range chunks(gone, func(id intent.PortID) int { return t.byID[id].size() }) {
		maps.Copy(failed, t.remove(some))
	}
	var err error
	if whole {
		err = t.eraseUnmatched()
	}
	for _, p := range unwritten {
		if err := t.writeOrShrink(p); err != nil {
			failed[p.ID] = err
		}
	}
	if whole || t.endpoints.retry {
		err = errors.Join(err, t.repairEndpointAddrs())
	}
	return failed, err
}

// split separates the ports of which others get an address or an endpoint from those that end.
func (t *portTable) split(gone []intent.PortID, ports []*intent.ServicePort) (moved, ended []intent.PortID) {
	if len(ports) == 0 || len(gone) == 0 {
		return nil, gone
	}
	next := map[objects.TCFrontendKey]bool{}
	for _, p := range ports {
		for _, f := range p.Frontends {
			next[objects.FrontendKey(p.ID, f)] = true
		}
		for _, e := range servedBy(p) {
			next[endpointKey(p.ID.Protocol, e.Addr)] = true
		}
	}
	for _, id := range gone {
		have := t.byID[id]
		if have != nil && have.hasAny(next) {
			moved = append(moved, id)
		} else {
			ended = append(ended, id)
		}
	}
	return moved, ended
}

// hasAny reports whether an address or an endpoint of a port is among these.
func (p *port) hasAny(keys map[objects.TCFrontendKey]bool) bool {
	e := p.current()
	for key := range e.frontends {
		if keys[key] {
			return true
		}
	}
	return slices.ContainsFunc(e.backends, func(b backendEntry) bool { return keys[endpointKey(p.protocol, b.addr)] })
}

// takesOver reports whether a port that could not be written gets an address of another
// one, which is about to remove that address.
func (t *portTable) takesOver(p *intent.ServicePort) bool {
	own := t.byID[p.ID]
	return slices.ContainsFunc(p.Frontends, func(f intent.Frontend) bool {
		owner, taken := t.owners[objects.FrontendKey(p.ID, f)]
		return taken && (own == nil || owner != own.service)
	})
}

// chunkEndpoints is the number of endpoints that one stage writes for several ports.
const chunkEndpoints = 4096

// chunks cuts a list into parts of chunkEndpoints or one element.
func chunks[T any](all []T, endpoints func(T) int) iter.Seq[[]T] {
	return func(yield func([]T) bool) {
		for len(all) > 0 {
			n, sum := 1, endpoints(all[0])
			for ; n < len(all); n++ {
				if sum += 1 + endpoints(all[n]); sum > chunkEndpoints {
					break
				}
			}
			if !yield(all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

// size returns the number of a port's endpoints in the maps; nil has none.
func (p *port) size() int {
	switch {
	case p == nil:
		return 0
	case p.entries != nil:
		return len(p.entries.backends)
	}
	return len(p.ids)
}

// eraseUnmatched removes the Services of an earlier run that no longer exist.
func (t *portTable) eraseUnmatched() (first error) {
	all := slices.Collect(maps.Values(t.unmatched))
	for some := range chunks(all, (*port).size) {
		cs := make(changes, len(some))
		for i, o := range some {
			cs[i].have = o
		}
		t.erase(cs)
		for i := range cs {
			if err := cs[i].err; err != nil {
				first = cmp.Or(first, fmt.Errorf("remove Service left by an earlier run: %w", err))
				continue
			}
			delete(t.unmatched, cs[i].have.service)
		}
	}
	return first
}

// matchByFrontend gives a port the entries that an earlier run wrote for it: those that one of
// its addresses leads to. Endpoints keep their ids, and so flows keep their endpoints.
func (t *portTable) matchByFrontend(p *intent.ServicePort) {
	if t.byID[p.ID] != nil || len(t.unmatched) == 0 {
		return
	}
	for _, f := range p.Frontends {
		service, ok := t.owners[objects.FrontendKey(p.ID, f)]
		if !ok {
			continue
		}
		if o := t.unmatched[service]; o != nil {
			t.match(p.ID, o)
			return
		}
	}
}

// match gives an unmatched Service its PortID.
func (t *portTable) match(id intent.PortID, o *port) {
	delete(t.unmatched, o.service)
	t.byID[id] = o
	t.names.set(o.service, id)
	if o.protocol == id.Protocol {
		return
	}
	// No address is left that would show its protocol.
	e := o.entries
	for i := range e.backends {
		t.readEndpoint(endpointKey(o.protocol, e.backends[i].addr), e.tftp, -1)
		t.readEndpoint(endpointKey(id.Protocol, e.backends[i].addr), e.tftp, 1)
	}
	o.protocol = id.Protocol
}
