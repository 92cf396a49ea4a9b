package flows

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// sweepCounts has the numbers of flows of the last sweep.
type sweepCounts struct {
	tcp, udp, icmp, swept atomic.Uint64
}

// sweepLoop removes dead flows. It takes at most a twentieth of one core, for any size
// of the table.
func (t *Table) sweepLoop(ctx context.Context) {
	wait := t.cfg.SweepInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		start := time.Now()
		if err := t.Sweep(ctx); err != nil && ctx.Err() == nil {
			t.cfg.Log.Error("Sweep flow table", "err", err)
		}
		wait = max(t.cfg.SweepInterval, 20*time.Since(start))
	}
}

// Sweep walks through the table once.
func (t *Table) Sweep(ctx context.Context) error {
	var tcp, udp, icmp uint64
	clients, filter := newClientFlows(t.objects.Seed), t.objects.Filter
	clients.created, clients.swept = objects.FlowsCreated(t.m(objects.TCMapVerdicts)), t.counts.swept.Load()
	tidy := filter.BeginTidy()
	ends, active, loads, egress := t.beginEnds(), map[uint32]uint64{}, t.loads.begin(), newEgressCounts()
	kept, goOn := t.kept.Load(), false
	err := objects.EachFlow(ctx, t.m(objects.TCMapFlows), func(k *objects.TCTuple, f *objects.TCFlow, now uint32) error {
		if tidy && f.Service != objects.ServiceEgress {
			filter.Keep(objects.FlowMember(k, f))
		}
		if t.cfg.Timeouts.Dead(k, f, now) {
			return t.sweepOne(*k, now, ends)
		}
		ends.seen(k, f)
		loads.count(f)
		if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY == 0 {
			if t.cfg.ServiceMetrics && objects.TCFlowState(f.State) != objects.TCFlowStateFLOW_CLOSED {
				active[f.Service]++
			}
			egress.count(k, f)
			goOn = goOn || kept.has(k, f)
			switch model.Protocol(k.Proto) {
			case model.TCP:
				tcp++
				clients.count(k, f)
			case model.UDP:
				udp++
			default:
				icmp++
			}
		}
		return nil
	})
	if tidy {
		err = filter.EndTidy(t.objects.Maps, err)
	}
	if err != nil {
		return err
	}
	if !clients.same(t.clients) || t.counts.swept.Load() != clients.swept {
		if err := clients.write(t.m(objects.TCMapSources)); err != nil {
			return err
		}
	}
	t.clients = clients
	t.counts.tcp.Store(tcp)
	t.counts.udp.Store(udp)
	t.counts.icmp.Store(icmp)
	t.egress.Store(egress.use())
	if kept != nil && !goOn && t.kept.CompareAndSwap(kept, nil) {
		kept.none()
	}
	ends.finish()
	if err := loads.finish(); err != nil {
		return err
	}
	t.active.counts.Store(&active)
	return t.forgetServices()
}

// sweepOne deletes an entry that the batch showed as dead. Between a lookup and a plain
// delete, a first packet may store a new flow under the same key, which would lose this
// direction. So the kernel returns the deleted entry, and a live one is stored again at
// once.
func (t *Table) sweepOne(key objects.TCTuple, now uint32, ends *sweptEnds) error {
	var f objects.TCFlow
	flows := t.m(objects.TCMapFlows)
	// The batch is some time old: an entry that is live by now is not touched.
	if flows.Lookup(key, &f) != nil || !t.cfg.Timeouts.Dead(&key, &f, now) {
		return nil
	}
	return t.deleteDead(key, now, ends)
}

// deleteDead deletes the entry if it is dead at that moment.
func (t *Table) deleteDead(key objects.TCTuple, now uint32, ends *sweptEnds) error {
	var f objects.TCFlow
	flows := t.m(objects.TCMapFlows)
	if err := flows.LookupAndDelete(key, &f); err != nil { // 5.14
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return fmt.Errorf("delete dead flow: %w", err)
	}
	if t.cfg.Timeouts.Dead(&key, &f, now) {
		if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY == 0 {
			t.counts.swept.Add(1)
			ends.timedOut(&key, &f)
		}
		return nil
	}
	// A packet may have stored a newer entry meanwhile, which stays.
	if err := flows.Update(key, f, ebpf.UpdateNoExist); err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("put back revived flow: %w", err)
	}
	return nil
}
