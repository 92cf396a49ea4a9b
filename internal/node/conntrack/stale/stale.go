// Package stale deletes stale conntrack entries of Services. Netfilter applies NAT rules
// only to the first packet of a flow; later packets follow the entry. A UDP client may keep
// its source port. Its packets then continue to go to a removed endpoint, or to a Service
// address that was not translated yet. So do the SYNs of a TCP client that gets no answer.
//
//	intent.Changes ──Apply──> which frontends may have stale entries
//	                               │
//	     conntrack ────Dump────────┴──> judge ──stale──> Delete
//
// Entries of SCTP, and of TCP connections that were answered, stay. A RST, an ABORT or a
// timeout ends such a connection, and a new connection gets a new entry. Those of unanswered
// TCP handshakes with removed endpoints are deleted: see handshakes.
//
// An entry whose original destination is a frontend is valid while its replies come from
// an endpoint that serves the Service port. Traffic policy and topology apply only to
// new flows. Entries in zones other than 0 belong to CNIs and stay.
//
// A translated entry without a reply is deleted only grace later: its client has asked just
// now, and without the entry the answer that is on the way would be lost.
package stale

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// Table is the conntrack table of one network namespace, in production a *conntrack.Conn.
type Table interface {
	Dump(context.Context, conntrack.Filter, func(*conntrack.Entry) bool) error
	Delete(*conntrack.Entry) error
}

// Config configures a Reconciler.
type Config struct {
	Table Table
	// Size returns the entries of the table and the buckets that a dump walks. nil: not known.
	Size func() (entries, buckets int, err error)
	// TranslatedOnly keeps entries that netfilter does not translate. It is for a
	// dataplane that translates before netfilter, such as eBPF: netfilter then has
	// only flows that another proxy translated. Where netfilter is the dataplane, an
	// untranslated entry to a frontend is older than the Service and keeps the client
	// from reaching it.
	TranslatedOnly bool
}

// Validate reports a missing value.
func (c Config) Validate() error {
	if c.Table == nil {
		return errors.New("no conntrack table")
	}
	return nil
}

// grace is the time for the answer to a client's first datagram, if its endpoint is removed
// meanwhile. A client that repeats the datagram earlier repeats it to the same endpoint.
const grace = time.Second

// maxGrace bounds grace for a Service whose endpoints change all the time.
const maxGrace = 5 * grace

// frontend is an address and port of a Service port, or a NodePort.
type frontend struct {
	addr   netip.Addr // invalid for a NodePort
	family model.Family
	port   uint16
}

// Reconciler remembers the Service ports that the kernel serves, and deletes the entries
// of a change. It is not safe for concurrent use.
type Reconciler struct {
	cfg       Config
	ports     map[intent.PortID]*intent.ServicePort // UDP
	owners    map[frontend]intent.PortID
	nodeAddrs map[netip.Addr]struct{} // where NodePorts are served

	// dirty holds the frontends whose entries must be checked, with the Service port
	// that served each before. That port counts only for a frontend without an owner.
	dirty map[frontend]*intent.ServicePort
	// again holds the frontends to check once more: their entries may have waited for an
	// answer, and a packet that was traversing the old rules creates its entry after the
	// first check.
	again map[frontend]recheck

	handshakes handshakes

	now func() time.Time // the time, except in tests

	deleted atomic.Uint64
}

// recheck is a check that is due at a time.
type recheck struct {
	before    *intent.ServicePort // as in Reconciler.dirty
	first, at time.Time           // first is the time of the first check
}

// New makes a Reconciler without Service ports. Ports in the first update count as new,
// so all their entries are checked: endpoints may have been removed while no agent ran.
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
		again:     map[frontend]recheck{},
		now:       time.Now,

		handshakes: newHandshakes(),
	}, nil
}

// Apply takes the changes that the kernel now serves, and deletes the entries that have
// become stale. Upserts may contain unchanged ports. After an error the next Apply, even
// with empty Changes, repeats the work. Recheck returns when to call Apply again.
func (r *Reconciler) Apply(ctx context.Context, c intent.Changes) error {
	if c.Node != nil {
		r.setNodeAddrs(c.Node.NodePortAddrs)
	}
	for _, id := range c.Deletes {
		r.remove(id)
		r.handshakes.remove(id)
	}
	for _, p := range c.Upserts {
		switch {
		case p.ID.Protocol == model.UDP:
			r.upsert(p)
		case p.ID.Protocol == model.TCP && !r.cfg.TranslatedOnly:
			r.handshakes.upsert(p)
		}
	}
	return errors.Join(r.applyUDP(ctx), r.applyTCP(ctx))
}

func (r *Reconciler) applyTCP(ctx context.Context) error {
	if err := r.scanHandshakes(ctx); err != nil {
		return fmt.Errorf("delete conntrack entries of handshakes: %w", err)
	}
	return nil
}

func (r *Reconciler) applyUDP(ctx context.Context) error {
	now := r.now()
	checks := r.due(now)
	if len(checks) == 0 {
		return nil
	}
	err := r.scan(ctx, checks)
	if errors.Is(err, conntrack.ErrUnsupported) && r.cfg.TranslatedOnly {
		err = nil // no conntrack, no entries
	}
	if err != nil {
		return fmt.Errorf("delete stale conntrack entries: %w", err)
	}
	for f, c := range checks {
		former, known := r.again[f]
		delete(r.again, f)
		if _, dirty := r.dirty[f]; !dirty {
			continue
		}
		first := now
		if known && !c.final {
			first = former.first
		}
		r.again[f] = recheck{c.before, first, now.Add(grace)}
	}
	r.dirty = map[frontend]*intent.ServicePort{} // clearing a map costs as much as its largest size
	return nil
}

// check says how to judge the entries of a frontend.
type check struct {
	before *intent.ServicePort // as in Reconciler.dirty
	final  bool                // entries that wait for an answer have waited long enough
}

// due returns the frontends to check now.
func (r *Reconciler) due(now time.Time) map[frontend]check {
	checks := make(map[frontend]check, len(r.dirty))
	for f, before := range r.dirty {
		former, known := r.again[f]
		checks[f] = check{before, known && now.Sub(former.first) >= maxGrace}
	}
	for f, a := range r.again {
		if _, dirty := checks[f]; !dirty && !a.at.After(now) {
			checks[f] = check{a.before, true}
		}
	}
	return checks
}

// Recheck returns when Apply has to be called again, even with empty Changes. Zero: it
// does not have to.
func (r *Reconciler) Recheck() (at time.Time) {
	at = r.handshakes.recheck()
	for _, a := range r.again {
		if at.IsZero() || a.at.Before(at) {
			at = a.at
		}
	}
	return at
}

// setNodeAddrs sets the addresses of NodePorts. It marks NodePorts dirty if an address is
// new: clients may have sent packets there before.
func (r *Reconciler) setNodeAddrs(addrs []netip.Addr) {
	now := make(map[netip.Addr]struct{}, len(addrs))
	added := false
	for _, a := range addrs {
		now[a] = struct{}{}
		if _, known := r.nodeAddrs[a]; !known {
			added = true
		}
	}
	r.nodeAddrs = now
	if !added {
		return
	}
	for f := range r.owners {
		if !f.addr.IsValid() {
			r.markDirty(f, nil)
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
			r.markDirty(f, p)
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
				r.markDirty(f, old)
			}
		}
	}
	lost := old == nil || lostEndpoint(old, p)
	for _, f := range now {
		if owner, owned := r.owners[f]; lost || !owned || owner != p.ID {
			r.markDirty(f, old)
		}
		r.owners[f] = p.ID
	}
	r.ports[p.ID] = p
}

// markDirty schedules a check of a frontend's entries. before is the Service port that
// served the frontend; the first call counts, for the case that it ends up without owner.
func (r *Reconciler) markDirty(f frontend, before *intent.ServicePort) {
	if r.dirty[f] == nil {
		r.dirty[f] = before
	}
}

// lostEndpoint reports whether entries of a port may have become stale: an endpoint no
// longer serves. It is also true if the port had no endpoints, since then none of its
// entries is valid.
func lostEndpoint(old, now *intent.ServicePort) bool {
	serving := servingSet(now)
	for a := range servingSet(old) {
		if _, still := serving[a]; !still {
			return true
		}
	}
	return len(old.Endpoints) == 0
}

// servingSet returns the valid endpoints for flows of a port.
func servingSet(p *intent.ServicePort) map[netip.AddrPort]struct{} {
	set := make(map[netip.AddrPort]struct{}, len(p.Endpoints)+len(p.ServingUnselected))
	for _, e := range p.Endpoints {
		set[e.Addr] = struct{}{}
	}
	for _, e := range p.ServingUnselected {
		set[e.Addr] = struct{}{}
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
	"Conntrack entries of UDP flows and of unanswered TCP handshakes that were deleted because their endpoint no longer serves.", nil, nil)

// protocol is the protocol of the flows whose entries are checked.
const protocol = unix.IPPROTO_UDP
