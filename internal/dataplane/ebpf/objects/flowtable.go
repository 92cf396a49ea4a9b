package objects

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// SweepBatch is the number of entries that one system call reads.
const SweepBatch = 4096

// SweepMargin is the time in seconds that a flow is kept after its timeout: the
// programs treat it as dead at once, and may just be reviving it.
const SweepMargin = 2

// EachFlow calls f for every entry of the flow table until one call fails or ctx
// ends; now is the programs' clock.
func EachFlow(ctx context.Context, flows *ebpf.Map, f func(k *TCTuple, f *TCFlow, now uint32) error) error {
	keys := make([]TCTuple, SweepBatch)
	values := make([]TCFlow, SweepBatch)
	var cursor ebpf.MapBatchCursor
	for ctx.Err() == nil {
		n, err := flows.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read flow table: %w", err)
		}
		now := BootSeconds()
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

// Dead mirrors flow_dead of bpf/lib/flow/timeout.h, with a margin.
func (t *Timeouts) Dead(key *TCTuple, f *TCFlow, now uint32) bool {
	var limit time.Duration
	state := TCFlowState(f.State)
	switch {
	case model.Protocol(key.Proto) == model.UDP && state != TCFlowStateFLOW_NEW:
		limit = t.UDP
	case model.Protocol(key.Proto) != model.TCP:
		limit = t.UDPNew
	case state == TCFlowStateFLOW_NEW, state == TCFlowStateFLOW_SYN_RECV, state == TCFlowStateFLOW_LAST_ACK:
		limit = t.TCPNew
	case state == TCFlowStateFLOW_ESTABLISHED:
		limit = t.TCPEstablished
	case state == TCFlowStateFLOW_CLOSING:
		limit = t.TCPClosing
	default:
		limit = t.TCPClosed
	}
	return int32(now-f.Seen) > int32(Seconds(limit)+SweepMargin)
}

// BootSeconds is the programs' clock, now of bpf/lib/base.h: bpf_ktime_get_coarse_ns is
// CLOCK_MONOTONIC.
func BootSeconds() uint32 {
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

// Seconds returns whole seconds, as the programs count time.
func Seconds(d time.Duration) uint32 { return uint32(d / time.Second) }

// ReverseOf returns the key of the packets in the other direction. It is not the key of the
// entry for a TFTP request, whose answers have any port.
func ReverseOf(k *TCTuple, f *TCFlow) TCTuple {
	return TCTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto, Family: k.Family}
}

// FlowMember returns the member that lets the packets of a flow's entry pass: the Service or
// the endpoint. Flows of egress need none (bpf/lib/egress/leave.h).
func FlowMember(k *TCTuple, f *TCFlow) TCFrontendKey {
	if TCFlowFlags(f.Flags)&TCFlowFlagsFLOW_REPLY != 0 {
		return TCFrontendKey{Addr: k.Saddr, Port: k.Sport, Proto: k.Proto}
	}
	return TCFrontendKey{Addr: k.Daddr, Port: k.Dport, Proto: k.Proto}
}

// FlowsCreated returns how many flows programs of any version have created; 0 if the
// counter cannot be read.
func FlowsCreated(verdicts *ebpf.Map) (n uint64) {
	var perCPU []uint64
	if verdicts.Lookup(uint32(TCVerdictFLOW_CREATED), &perCPU) != nil {
		return 0
	}
	for _, count := range perCPU {
		n += count
	}
	return n
}

// TupleFor returns the key of a packet's flow.
func TupleFor(proto model.Protocol, src, dst netip.AddrPort) TCTuple {
	return TCTuple{
		Saddr: ToAddr(src.Addr()), Daddr: ToAddr(dst.Addr()), Sport: ToPort(src.Port()), Dport: ToPort(dst.Port()),
		Proto: uint8(proto), Family: FamilyOf(dst.Addr()),
	}
}
