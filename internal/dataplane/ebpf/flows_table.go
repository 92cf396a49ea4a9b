package ebpf

import (
	"context"
	"sync"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// flowTable sweeps the flow table, and reads what the programs count and report about flows.
type flowTable struct {
	cfg      *objects.Config
	objects  *objects.Objects
	services serviceReader
	counts   flowCounts
	clients  *clientFlows // of the last sweep
	ends     *socketEnds  // nil: no socket is ended
	loads    *loadTable   // nil: no Service chooses by load
	events   flowEvents
	active   serviceFlows
}

// serviceReader is what flowTable needs to know about Service ports.
type serviceReader interface {
	// Port returns the Service port of an id.
	Port(id uint32) (port intent.PortID, known bool)
	// IDsOf returns the ids of Service ports.
	IDsOf(ports []intent.PortID) map[uint32]intent.PortID
	// IfRemoved and IfGone call use with a function that reports whether an endpoint is in no Service,
	// or neither serves nor terminates. known is false while that is unknown: use is not called.
	IfRemoved(use func(removed func(objects.TCFrontendKey) bool)) (known bool)
	IfGone(use func(gone func(objects.TCFrontendKey) bool)) (known bool)
}

func newFlowTable(cfg *objects.Config, o *objects.Objects, services serviceReader) *flowTable {
	return &flowTable{cfg: cfg, objects: o, services: services}
}

// open opens the iterators over sockets. Missing support of the kernel is no error.
func (t *flowTable) open() { t.ends, t.loads = t.openSocketEnds(), t.openLoads() }

// run sweeps the table and ends sockets until ctx is done.
func (t *flowTable) run(ctx context.Context) {
	var ends sync.WaitGroup
	ends.Go(func() { t.endLoop(ctx) })
	t.sweepLoop(ctx)
	ends.Wait()
}

// endpointsRemoved has the sockets of removed endpoints end soon.
func (t *flowTable) endpointsRemoved() { t.ends.want() }

// close frees what open has opened.
func (t *flowTable) close() {
	t.ends.close()
	t.loads.close()
}

// m returns a map by its name in bpf/maps.h.
func (t *flowTable) m(name string) *ebpf.Map { return t.objects.Maps[name] }

// table returns the flow table's use, as at the last sweep.
func (t *flowTable) table() dataplane.Table {
	return dataplane.Table{Name: objects.TCMapFlows, Used: t.counts.tcp.Load() + t.counts.udp.Load(), Size: uint64(t.cfg.FlowTableSize)}
}
