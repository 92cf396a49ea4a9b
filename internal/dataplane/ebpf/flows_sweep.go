package ebpf

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// sweepBatch is the number of entries that one system call reads.
const sweepBatch = 4096

// sweepMargin is the time in seconds that a flow is kept after its timeout: the
// programs treat it as dead at once, and may just be reviving it.
const sweepMargin = 2

// flowCounts has the numbers of flows of the last sweep.
type flowCounts struct {
	tcp, udp, swept atomic.Uint64
}

// sweepLoop removes dead flows. It takes at most a twentieth of one core, for any size
// of the table.
func (b *Backend) sweepLoop(ctx context.Context) {
	wait := b.cfg.SweepInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		start := time.Now()
		if err := b.sweep(ctx); err != nil && ctx.Err() == nil {
			b.cfg.Log.Error("Sweep flow table", "err", err)
		}
		wait = max(b.cfg.SweepInterval, 20*time.Since(start))
	}
}

// sweep walks through the table once.
func (b *Backend) sweep(ctx context.Context) error {
	var tcp, udp uint64
	clients, filter := newClientFlows(b.seed), b.objects.filter
	clients.created, clients.swept = flowsCreated(b.m(tcMapVerdicts)), b.flows.swept.Load()
	tidy := filter.beginTidy()
	ends, active, loads := b.beginEnds(), map[uint32]uint64{}, b.loads.begin()
	err := eachFlow(ctx, b.m(tcMapFlows), func(k *tcTuple, f *tcFlow, now uint32) error {
		if tidy {
			filter.keep(flowMember(k, f))
		}
		if b.cfg.Timeouts.dead(k, f, now) {
			return b.sweepOne(*k, now, ends)
		}
		ends.seen(k, f)
		loads.count(f)
		if tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_REPLY == 0 {
			if b.cfg.ServiceMetrics && tcFlowState(f.State) != tcFlowStateFLOW_CLOSED {
				active[f.Service]++
			}
			if model.Protocol(k.Proto) == model.TCP {
				tcp++
				clients.count(k, f)
			} else {
				udp++
			}
		}
		return nil
	})
	if tidy {
		err = filter.endTidy(b.objects.maps, err)
	}
	if err != nil {
		return err
	}
	if !clients.same(b.clients) || b.flows.swept.Load() != clients.swept {
		if err := clients.write(b.m(tcMapSources)); err != nil {
			return err
		}
	}
	b.clients = clients
	b.flows.tcp.Store(tcp)
	b.flows.udp.Store(udp)
	ends.finish()
	if err := loads.finish(); err != nil {
		return err
	}
	b.active.counts.Store(&active)
	return b.forgetServices()
}

// eachFlow calls f for every entry of the flow table until one call fails or ctx
// ends; now is the programs' clock.
func eachFlow(ctx context.Context, flows *ebpf.Map, f func(k *tcTuple, f *tcFlow, now uint32) error) error {
	keys := make([]tcTuple, sweepBatch)
	values := make([]tcFlow, sweepBatch)
	var cursor ebpf.MapBatchCursor
	for ctx.Err() == nil {
		n, err := flows.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read flow table: %w", err)
		}
		now := bootSeconds()
		for i := range n {
			if err := f(&keys[i], &values[i], now); err != nil {
				return err
			}
		}
		if err != nil {
			break // ErrKeyNotExist: that was the last batch
		}
	}
	return ctx.Err()
}

// sweepOne deletes an entry that the batch showed as dead. Between a lookup and a plain
// delete, a first packet may store a new flow under the same key, which would lose this
// direction. So the kernel returns the deleted entry, and a live one is stored again at
// once.
func (b *Backend) sweepOne(key tcTuple, now uint32, ends *sweptEnds) error {
	var f tcFlow
	flows := b.m(tcMapFlows)
	// The batch is some time old: an entry that is live by now is not touched.
	if flows.Lookup(key, &f) != nil || !b.cfg.Timeouts.dead(&key, &f, now) {
		return nil
	}
	return b.deleteDead(key, now, ends)
}

// deleteDead deletes the entry if it is dead at that moment.
func (b *Backend) deleteDead(key tcTuple, now uint32, ends *sweptEnds) error {
	var f tcFlow
	flows := b.m(tcMapFlows)
	if err := flows.LookupAndDelete(key, &f); err != nil { // 5.14
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil
		}
		return fmt.Errorf("delete dead flow: %w", err)
	}
	if b.cfg.Timeouts.dead(&key, &f, now) {
		if tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_REPLY == 0 {
			b.flows.swept.Add(1)
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

// dead mirrors flow_dead of bpf/lib/flow/table.h, with a margin.
func (t *Timeouts) dead(key *tcTuple, f *tcFlow, now uint32) bool {
	var limit time.Duration
	state := tcFlowState(f.State)
	switch {
	case model.Protocol(key.Proto) == model.UDP && state == tcFlowStateFLOW_NEW:
		limit = t.UDPNew
	case model.Protocol(key.Proto) == model.UDP:
		limit = t.UDP
	case state == tcFlowStateFLOW_NEW, state == tcFlowStateFLOW_SYN_RECV, state == tcFlowStateFLOW_LAST_ACK:
		limit = t.TCPNew
	case state == tcFlowStateFLOW_ESTABLISHED:
		limit = t.TCPEstablished
	case state == tcFlowStateFLOW_CLOSING:
		limit = t.TCPClosing
	default:
		limit = t.TCPClosed
	}
	return int32(now-f.Seen) > int32(seconds(limit)+sweepMargin)
}

// bootSeconds is the programs' clock, now of bpf/lib/base.h: bpf_ktime_get_coarse_ns is
// CLOCK_MONOTONIC.
func bootSeconds() uint32 {
	return uint32(uint64(monotonic()) >> 20 * 1099 >> 20)
}

// monotonic returns nanoseconds since boot, or 0 if the kernel has no such clock.
func monotonic() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &ts); err != nil {
		return 0
	}
	return ts.Nano()
}
