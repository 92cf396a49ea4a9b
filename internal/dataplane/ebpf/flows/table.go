// Package flows sweeps the flow table, and reads what the programs count and report about flows.
package flows

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// Table sweeps the flow table, and reads what the programs count and report about flows.
type Table struct {
	cfg      *objects.Config
	objects  *objects.Objects
	services Services
	counts   sweepCounts
	clients  *clientFlows // of the last sweep
	ends     *socketEnds  // nil: no socket is ended
	loads    *loadTable   // nil: no Service chooses by load
	events   eventQueue
	active   activeFlows
	egress   atomic.Pointer[dataplane.EgressUse] // of the last sweep, without Ports and Refused
	kept     atomic.Pointer[keptFlows]           // nil: nothing waits for their end
}

// Services is what a Table needs to know about Service ports.
type Services interface {
	// Port returns the Service port of an id.
	Port(id uint32) (port intent.PortID, known bool)
	// IDsOf returns the ids of Service ports.
	IDsOf(ports []intent.PortID) map[uint32]intent.PortID
	// Selected returns the ids of the Service ports that a function selects.
	Selected(selects func(intent.PortID) bool) []uint32
	// IfRemoved and IfGone call use with a function that reports whether an endpoint is in no Service,
	// or neither serves nor terminates. known is false while that is unknown: use is not called.
	IfRemoved(use func(removed func(objects.TCFrontendKey) bool)) (known bool)
	IfGone(use func(gone func(objects.TCFrontendKey) bool)) (known bool)
}

// New returns a Table that ends no socket and corrects no load before Open.
func New(cfg *objects.Config, o *objects.Objects, services Services) *Table {
	return &Table{cfg: cfg, objects: o, services: services}
}

// Open opens the iterators over sockets. Missing support of the kernel is no error.
func (t *Table) Open() { t.ends, t.loads = t.openSocketEnds(), t.openLoads() }

// Run sweeps the table and ends sockets until ctx is done.
func (t *Table) Run(ctx context.Context) {
	var ends sync.WaitGroup
	ends.Go(func() { t.endLoop(ctx) })
	t.sweepLoop(ctx)
	ends.Wait()
}

// EndpointsRemoved has the sockets of removed endpoints end soon.
func (t *Table) EndpointsRemoved() { t.ends.want() }

// Close frees what Open has opened.
func (t *Table) Close() {
	t.ends.close()
	t.loads.close()
}

// m returns a map by its name in bpf/maps.h.
func (t *Table) m(name string) *ebpf.Map { return t.objects.Maps[name] }

// Use returns the flow table's use, as at the last sweep.
func (t *Table) Use() dataplane.Table {
	used := t.counts.tcp.Load() + t.counts.udp.Load() + t.counts.icmp.Load()
	return dataplane.Table{Name: objects.TCMapFlows, Used: used, Size: uint64(t.cfg.FlowTableSize)}
}
