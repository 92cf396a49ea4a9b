// Package services writes the maps of Services, and checks that they hold what was written.
package services

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// Writer is the one writer of the maps of Services. It is safe for concurrent use.
type Writer struct {
	objects *objects.Objects
	log     *slog.Logger
	names   portNames
	addrs   frontendAddrs
	ended   func() // called when an endpoint is removed; nil: not needed
	checks  chan struct{}
	drifted chan struct{}

	mu       sync.Mutex       // for the fields below: the check loop runs beside writes
	table    *portTable       // only update and replace write it
	known    bool             // table was read from the maps, and no check has found a difference since
	drift    dataplane.Repair // the differences that the last check found
	repaired dataplane.Repair
}

// New returns a Writer that has not read the maps yet.
func New(o *objects.Objects, log *slog.Logger) *Writer {
	return &Writer{objects: o, log: log, table: &portTable{}, checks: make(chan struct{}, 1), drifted: make(chan struct{}, 1)}
}

// OnChanges has changed called when a Service gets an address or loses one, and ended when an endpoint
// is removed. Call it before the first write.
func (w *Writer) OnChanges(changed, ended func()) { w.addrs.changed, w.ended = changed, ended }

// Update writes these changes. failed has the errors of single ports.
func (w *Writer) Update(ctx context.Context, upserts []*intent.ServicePort,
	deletes []intent.PortID) (failed map[intent.PortID]error, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.table.byID == nil { // the first call, without a replace before it
		if err := w.reread(); err != nil {
			return nil, err
		}
	}
	return w.table.update(ctx, upserts, deletes, false)
}

// Replace writes these ports and removes all others. failed has the errors of single ports.
func (w *Writer) Replace(ctx context.Context, ports []*intent.ServicePort) (failed map[intent.PortID]error, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := w.reread(); err != nil {
		return nil, err
	}
	return w.table.replace(ctx, ports)
}

// Empty reports whether no Service port was written yet. It reads the maps if necessary.
func (w *Writer) Empty() (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	err := w.reread()
	return len(w.table.byID) == 0, err
}

// Drifted returns a channel that receives when the maps differ from what was written.
func (w *Writer) Drifted() <-chan struct{} { return w.drifted }

// Port returns the Service port of an id.
func (w *Writer) Port(id uint32) (port intent.PortID, known bool) { return w.names.port(id) }

// IDsOf returns the ids of Service ports. A port that was deleted and came again has several.
func (w *Writer) IDsOf(ports []intent.PortID) map[uint32]intent.PortID {
	return w.names.of(ports)
}

// Selected returns the ids of the Service ports that a function selects, also of those that were just
// deleted.
func (w *Writer) Selected(selects func(intent.PortID) bool) []uint32 {
	return w.names.selected(selects)
}

// OnNewID has added called with each Service port that gets an id. Call it before the first write.
func (w *Writer) OnNewID(added func(id uint32, port intent.PortID)) { w.names.added = added }

// HasAddr reports whether an address is that of a Service.
func (w *Writer) HasAddr(a netip.Addr) bool { return w.addrs.has(a) }

// IfRemoved calls use with a function that reports whether no port has an endpoint. known is false
// after a restart, before the first update: then use is not called.
func (w *Writer) IfRemoved(use func(removed func(objects.TCFrontendKey) bool)) (known bool) {
	return w.judge((*portTable).removed, use)
}

// IfGone calls use with a function that reports whether an endpoint neither serves nor terminates, in
// any port. known is false while the decision about a port is unknown, as after a restart or after a
// failed write: then use is not called.
func (w *Writer) IfGone(use func(gone func(objects.TCFrontendKey) bool)) (known bool) {
	return w.judge((*portTable).gone, use)
}

func (w *Writer) judge(by func(*portTable) (func(objects.TCFrontendKey) bool, bool), use func(func(objects.TCFrontendKey) bool)) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	is, known := by(w.table)
	if known {
		use(is)
	}
	return known
}

// Tables returns the maps of Services that can be full.
func (w *Writer) Tables() (tables []dataplane.Table) {
	var services, slots, backends, frontends int
	w.mu.Lock()
	services, frontends = len(w.table.byID)+len(w.table.unmatched), len(w.table.owners)
	for _, p := range w.table.byID {
		slots += len(p.slots[objects.ClusterSet]) + len(p.slots[objects.LocalSet])
		backends += len(p.ids)
		if p.entries != nil {
			backends += len(p.entries.backends)
		}
	}
	for key := range w.table.endpoints.refs {
		if _, owned := w.table.owners[key]; !owned {
			frontends++
		}
	}
	w.mu.Unlock()
	for _, t := range []struct {
		name string
		used int
	}{{objects.TCMapServices, services}, {objects.TCMapFrontends, frontends}, {objects.TCMapBackends, backends}, {objects.TCMapSlots, slots}} {
		tables = append(tables, dataplane.Table{Name: t.name, Used: uint64(t.used), Size: uint64(w.objects.Maps[t.name].MaxEntries())})
	}
	return tables
}

// reread reads the maps if their content is unknown, or a check found a difference.
// Only this agent writes them, but Replace must not depend on that: hence the checks.
// The caller holds mu.
func (w *Writer) reread() error {
	if w.known {
		return nil
	}
	fresh, err := readPorts(w.objects.Maps, w.objects.Filter)
	if err != nil {
		return err
	}
	fresh.names, fresh.ended = &w.names, w.ended
	fresh.inherit(w.table)
	fresh.addrs = &w.addrs
	w.addrs.reset(fresh.owners)
	// An earlier run may have been killed before it counted its last write.
	fresh.changed = true
	fresh.countChange()
	w.table, w.known = fresh, true
	w.repaired.Add(w.drift)
	w.drift = dataplane.Repair{}
	return nil
}

// removed returns a function that reports whether no port has an endpoint. It is valid until the
// table changes. known is false after a restart, before the first update.
func (t *portTable) removed() (removed func(objects.TCFrontendKey) bool, known bool) {
	if t.byID == nil || len(t.unmatched) > 0 {
		return nil, false
	}
	return func(key objects.TCFrontendKey) bool { return t.endpoints.refs[key] == 0 }, true
}

// gone returns a function that reports whether an endpoint neither serves nor terminates,
// in any port. It is valid until the table changes. known is false while the decision about
// a port is unknown, as after a restart or after a failed write.
func (t *portTable) gone() (gone func(objects.TCFrontendKey) bool, known bool) {
	removed, known := t.removed()
	if !known {
		return nil, false
	}
	lingering := map[objects.TCFrontendKey]struct{}{}
	for _, p := range t.byID {
		if p.source == nil {
			return nil, false
		}
		for _, a := range p.source.Lingering {
			lingering[endpointKey(p.protocol, a)] = struct{}{}
		}
	}
	return func(key objects.TCFrontendKey) bool {
		_, lingers := lingering[key]
		return !lingers && removed(key)
	}, true
}

// EachDSREndpoint calls f with each endpoint of Service ports with DSR.
func (w *Writer) EachDSREndpoint(f func(*intent.Endpoint)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range w.table.byID {
		if p.source == nil || !p.source.DSR { // nil: a write of it has failed
			continue
		}
		for i := range p.source.Endpoints {
			f(&p.source.Endpoints[i])
		}
	}
}
