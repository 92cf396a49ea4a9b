// Package stale takes entries of UDP Services out of conntrack that are no
// longer right. Netfilter decides by its NAT rules for the first packet of a
// flow only; later ones follow the entry. A UDP client that keeps its port
// therefore keeps talking to an endpoint that is gone, or to a Service address
// that nobody translated yet, for as long as it goes on asking.
//
//	intent.Changes ──Apply──> which frontends may have stale entries
//	                               │
//	     conntrack ────Dump────────┴──> judge ──stale──> Delete
//
// TCP and SCTP are left alone, as kube-proxy does: their peers are told by RST,
// ABORT or their own time-outs, and a new connection is a new entry.
//
// An entry whose original destination is a frontend is right as long as its
// answers come from an endpoint that serves the Service port, by whatever route
// it came to be chosen: traffic policy and topology are for new flows. In zones
// other than 0, where CNIs keep their own entries, nothing is touched.
package stale

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// Table is the conntrack of one network namespace; *conntrack.Conn is the one
// in use.
type Table interface {
	Dump(context.Context, conntrack.Filter, func(*conntrack.Entry) bool) error
	Delete(*conntrack.Entry) error
}

// Config is how a Reconciler is set up.
type Config struct {
	Table Table
	// TranslatedOnly leaves entries alone that netfilter does not translate. It
	// is for a dataplane that translates before netfilter sees the packet, such
	// as eBPF: what is left in netfilter then are flows that another proxy
	// translated. Where netfilter is the dataplane, an entry to a frontend that
	// is not translated is one from before the Service, and keeps the client
	// from it.
	TranslatedOnly bool
}

// Validate says what is missing.
func (c Config) Validate() error {
	if c.Table == nil {
		return errors.New("no conntrack table")
	}
	return nil
}

// frontend is a place that a Service port is reached at.
type frontend struct {
	addr   netip.Addr // invalid for a NodePort
	family model.Family
	port   uint16
}

// Reconciler remembers what the kernel serves, and so knows what it no longer
// does. It is used by one goroutine at a time.
type Reconciler struct {
	cfg       Config
	ports     map[intent.PortID]*intent.ServicePort // UDP
	owners    map[frontend]intent.PortID
	nodeAddrs map[netip.Addr]struct{} // where NodePorts are served

	// dirty are the frontends whose entries must be looked at, with the endpoints
	// that served it before, of which only those with no owner any more are used.
	dirty map[frontend]*intent.ServicePort
	// again are those of the last look: a packet that was under way through the
	// old rules makes its entry only after it.
	again map[frontend]*intent.ServicePort

	deleted atomic.Uint64
}

// New makes a Reconciler that knows of no Service port yet. What it is told
// first it takes for new, and looks at all entries of it: endpoints may have
// gone while no agent ran.
func New(cfg Config) (*Reconciler, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("set up stale conntrack entries: %w", err)
	}
	return &Reconciler{
		cfg:       cfg,
		ports:     map[intent.PortID]*intent.ServicePort{},
		owners:    map[frontend]intent.PortID{},
		nodeAddrs: map[netip.Addr]struct{}{},
		dirty:     map[frontend]*intent.ServicePort{},
		again:     map[frontend]*intent.ServicePort{},
	}, nil
}

// Apply is told what the kernel now serves otherwise than before, and deletes
// the entries that are not right any more. Ports that did not change may be
// among the Upserts. After an error nothing is forgotten: the next Apply, of
// empty Changes too, does what is left.
func (r *Reconciler) Apply(ctx context.Context, c intent.Changes) error {
	if c.Node != nil {
		r.setNodeAddrs(c.Node.NodePortAddrs)
	}
	for _, id := range c.Deletes {
		r.remove(id)
	}
	for _, p := range c.Upserts {
		if p.ID.Protocol == model.UDP {
			r.upsert(p)
		}
	}
	fresh := len(r.dirty) > 0
	for f, before := range r.again {
		if _, known := r.dirty[f]; !known {
			r.dirty[f] = before
		}
	}
	if len(r.dirty) == 0 {
		return nil
	}
	err := r.look(ctx)
	if errors.Is(err, conntrack.ErrUnsupported) && r.cfg.TranslatedOnly {
		err = nil // no conntrack, no entries
	}
	if err != nil {
		return fmt.Errorf("delete stale conntrack entries: %w", err)
	}
	// New maps: to clear one costs what it once held.
	r.again = map[frontend]*intent.ServicePort{}
	if fresh {
		r.again = r.dirty
	}
	r.dirty = map[frontend]*intent.ServicePort{}
	return nil
}

// setNodeAddrs takes in where NodePorts are served. On an address that is new,
// clients may have asked before.
func (r *Reconciler) setNodeAddrs(addrs []netip.Addr) {
	now := make(map[netip.Addr]struct{}, len(addrs))
	grown := false
	for _, a := range addrs {
		now[a] = struct{}{}
		if _, known := r.nodeAddrs[a]; !known {
			grown = true
		}
	}
	r.nodeAddrs = now
	if !grown {
		return
	}
	for f := range r.owners {
		if !f.addr.IsValid() {
			r.touch(f, nil)
		}
	}
}

func (r *Reconciler) remove(id intent.PortID) {
	p := r.ports[id]
	if p == nil {
		return
	}
	delete(r.ports, id)
	for _, f := range frontendsOf(p) {
		if r.owners[f] == id {
			delete(r.owners, f)
			r.touch(f, p)
		}
	}
}

func (r *Reconciler) upsert(p *intent.ServicePort) {
	old := r.ports[p.ID]
	if old == p {
		return
	}
	now := frontendsOf(p)
	if old != nil {
		for _, f := range frontendsOf(old) {
			if r.owners[f] == p.ID && !slices.Contains(now, f) {
				delete(r.owners, f)
				r.touch(f, old)
			}
		}
	}
	lost := old == nil || lostEndpoint(old, p)
	for _, f := range now {
		if owner, owned := r.owners[f]; lost || !owned || owner != p.ID {
			r.touch(f, old)
		}
		r.owners[f] = p.ID
	}
	r.ports[p.ID] = p
}

// touch has the entries of a frontend looked at. before is who served it; the
// first one counts, in case that nobody does in the end.
func (r *Reconciler) touch(f frontend, before *intent.ServicePort) {
	if r.dirty[f] == nil {
		r.dirty[f] = before
	}
}

// lostEndpoint reports whether entries of a port may have become wrong: an
// endpoint serves no more. A port without endpoints made no entries worth
// keeping, so that its first one counts too.
func lostEndpoint(old, now *intent.ServicePort) bool {
	serving := servingSet(now)
	for a := range servingSet(old) {
		if _, still := serving[a]; !still {
			return true
		}
	}
	return len(old.Endpoints) == 0
}

// servingSet are the endpoints that flows of a port may have.
func servingSet(p *intent.ServicePort) map[netip.AddrPort]struct{} {
	set := make(map[netip.AddrPort]struct{}, len(p.Endpoints)+len(p.ServingUnselected))
	for _, e := range p.Endpoints {
		set[e.Addr] = struct{}{}
	}
	for _, a := range p.ServingUnselected {
		set[a] = struct{}{}
	}
	return set
}

func frontendsOf(p *intent.ServicePort) []frontend {
	out := make([]frontend, 0, len(p.Frontends))
	for _, f := range p.Frontends {
		out = append(out, frontend{addr: f.Addr, family: p.ID.Family, port: f.Port})
	}
	return out
}

// Describe implements prometheus.Collector.
func (r *Reconciler) Describe(ch chan<- *prometheus.Desc) { ch <- deletedDesc }

// Collect implements prometheus.Collector.
func (r *Reconciler) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(deletedDesc, prometheus.CounterValue, float64(r.deleted.Load()))
}

var deletedDesc = prometheus.NewDesc("spillway_conntrack_stale_entries_deleted_total",
	"Conntrack entries of UDP Services that were deleted because they led to no endpoint that serves.", nil, nil)

// protocol is the only one whose entries are looked at.
const protocol = unix.IPPROTO_UDP
