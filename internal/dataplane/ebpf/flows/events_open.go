package flows

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// openFlowsMax is the maximum number of open flows that the agent knows. It does not report
// when the kernel evicts others.
const openFlowsMax = objects.CountedFlowsMax

// sweepsBeforeEvicted is the number of sweeps in a row that must miss a flow. The event of its
// end may be in the ring yet when the first one does.
const sweepsBeforeEvicted = 2

// flowKey identifies a flow by the first packet's addresses.
type flowKey struct {
	protocol        model.Protocol
	client, service netip.AddrPort
}

// openFlows are the reported flows that have not ended. The kernel does not tell which entries
// it evicts: a flow that the sweeps no longer find was evicted. Safe for concurrent use.
type openFlows struct {
	mu    sync.Mutex
	flows map[flowKey]*openFlow
	sweep uint32        // number of the current sweep
	lost  atomic.Uint64 // flows beyond openFlowsMax
}

type openFlow struct {
	flow   dataplane.EventFlow
	sweep  uint32 // that began last when the flow was seen
	missed uint8
}

// add adds a flow. If one with this key is open, its end was not seen.
func (o *openFlows) add(key flowKey, f *dataplane.EventFlow) (former dataplane.EventFlow, replaced bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if last := o.flows[key]; last != nil {
		former, replaced = last.flow, true
	} else if len(o.flows) >= openFlowsMax {
		o.lost.Add(1)
		return former, false
	}
	if o.flows == nil {
		o.flows = map[flowKey]*openFlow{}
	}
	o.flows[key] = &openFlow{flow: *f, sweep: o.sweep}
	return former, replaced
}

// clear forgets all flows: nothing is known of their ends.
func (o *openFlows) clear() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.flows = nil
}

// answered stores the time of a handshake.
func (o *openFlows) answered(key flowKey, handshake time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if f := o.flows[key]; f != nil {
		f.flow.Handshake = handshake
	}
}

// remove removes a flow that has ended, and returns its handshake time. It corrects the time
// when the flow was opened, which the table has in seconds.
func (o *openFlows) remove(key flowKey, ended *dataplane.EventFlow) time.Duration {
	o.mu.Lock()
	defer o.mu.Unlock()
	f := o.flows[key]
	if f == nil {
		return 0
	}
	delete(o.flows, key)
	ended.Opened = f.flow.Opened
	return f.flow.Handshake
}

// begin starts a sweep.
func (o *openFlows) begin() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.sweep++
}

// seen records that the sweep has found a flow. A flow that an earlier agent has reported is
// added.
func (o *openFlows) seen(key flowKey, flow func() dataplane.EventFlow) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f := o.flows[key]
	if f == nil {
		if len(o.flows) >= openFlowsMax {
			return
		}
		if o.flows == nil {
			o.flows = map[flowKey]*openFlow{}
		}
		f = &openFlow{flow: flow()}
		o.flows[key] = f
	}
	f.sweep, f.missed = o.sweep, 0
}

// evicted ends a complete sweep, and returns the flows that the last sweeps have missed.
func (o *openFlows) evicted() (out []dataplane.EventFlow) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for key, f := range o.flows {
		if f.sweep == o.sweep {
			continue
		}
		if f.missed++; f.missed >= sweepsBeforeEvicted {
			out = append(out, f.flow)
			delete(o.flows, key)
		}
	}
	return out
}
