package reconcile

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// Questions about Services are answered by Run's goroutine between two turns, so that the
// decisions need no lock and no copy, and cost nothing while no one asks. An answer has
// pointers to values that do not change; the asker reads them in its own goroutine.
//
//	asker ──questions──> wait ──> intent.Tracker, backend syncs ──answer──> asker

// ErrBusy is the cause of an error when the loop did not answer in time: it writes to the
// kernel, or it does not run.
var ErrBusy = errors.New("the agent is busy with writing to the kernel; ask again")

// Service is a Service of this node, the decisions about it, and how far the kernel has them.
type Service struct {
	intent.Inspected
	Sync []PortSync // of Inspected.Ports
}

// PortSync is how far the kernel has one Service port.
type PortSync struct {
	Dataplane string    // that serves the port; "": none can
	Err       error     // of the last write; nil: none
	Waits     bool      // for the next sync
	Since     time.Time // of the change that waits; zero: unknown
}

// Services returns the Services of a namespace ("": of all) that follow a name, sorted by
// name, and as many as limit at most. It waits for the end of a turn.
func (r *Reconciler) Services(ctx context.Context, namespace string, after model.Name, limit int) (list []Service, err error) {
	err = r.runInLoop(ctx, func() {
		for _, s := range r.cfg.Tracker.Services().InspectAfter(namespace, after, limit) {
			list = append(list, r.service(s))
		}
	})
	return list, err
}

// Service returns a Service, and whether this node serves one of that name. It waits for the
// end of a turn.
func (r *Reconciler) Service(ctx context.Context, name model.Name) (s Service, ok bool, err error) {
	err = r.runInLoop(ctx, func() {
		var found intent.Inspected
		if found, ok = r.cfg.Tracker.Services().Inspect(name); ok {
			s = r.service(found)
		}
	})
	return s, ok, err
}

// Address is an address and port of a packet. The answer of Names fills the other fields.
type Address struct {
	Protocol model.Protocol
	AddrPort netip.AddrPort
	Service  intent.PortID // that is served there; zero: none
	Pod      model.Name    // that has the address; zero: unknown
	Node     string        // of the pod or of the address; "": unknown

	// EndpointOf are the Service ports that have it as an endpoint, sorted. The asker sets
	// EndpointOfMax, the most it wants.
	EndpointOf    []intent.PortID
	EndpointOfMax int
}

// Names fills in what the store knows about addresses. It waits for the end of a turn; the
// caller limits the number of addresses, so that the next turn does not wait long.
func (r *Reconciler) Names(ctx context.Context, addrs []Address) error {
	found := make([]Address, len(addrs))
	copy(found, addrs)
	err := r.runInLoop(ctx, func() {
		services := r.cfg.Tracker.Services()
		for i := range found {
			a := &found[i]
			a.Service = services.PortAt(a.Protocol, a.AddrPort)
			if a.Pod, a.Node = services.PodAt(a.AddrPort.Addr()); a.Node == "" {
				a.Node = services.NodeAt(a.AddrPort.Addr())
			}
			if a.EndpointOfMax > 0 {
				a.EndpointOf = services.EndpointOf(a.Protocol, a.AddrPort, a.EndpointOfMax)
			}
		}
	})
	if err == nil {
		copy(addrs, found)
	}
	return err
}

// Pods returns the pods that the store names, of a namespace and of a name; "": of all.
func (r *Reconciler) Pods(ctx context.Context, namespace, name string) (pods []intent.Pod, err error) {
	err = r.runInLoop(ctx, func() { pods = r.cfg.Tracker.Services().PodsOf(namespace, name) })
	return pods, err
}

// runInLoop runs answer in Run's goroutine and waits for its end, or for the end of ctx before the
// loop has begun with it.
func (r *Reconciler) runInLoop(ctx context.Context, answer func()) error {
	done := make(chan struct{})
	select {
	case r.questions <- func() { defer close(done); answer() }:
		<-done
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w (%w)", ErrBusy, context.Cause(ctx))
	}
}

// service adds how far the kernel has the ports.
func (r *Reconciler) service(s intent.Inspected) Service {
	out := Service{Inspected: s, Sync: make([]PortSync, len(s.Ports))}
	for i, p := range s.Ports {
		out.Sync[i] = r.portSync(p.ID)
	}
	return out
}

func (r *Reconciler) portSync(id intent.PortID) PortSync {
	a, known := r.assignments[id]
	if !known || a.backend == unassigned {
		return PortSync{Err: r.counters.unassigned[id]}
	}
	bs := r.syncs[a.backend]
	out := PortSync{Dataplane: bs.backend.Name(), Err: bs.err}
	if bs.full {
		out.Waits, out.Since = true, r.pendingSince
	} else if p, waits := bs.pending[id]; waits {
		out.Waits, out.Since = true, p.since
	}
	if f, failed := bs.failed[id]; failed && out.Err == nil {
		out.Err = f.err
	}
	return out
}
