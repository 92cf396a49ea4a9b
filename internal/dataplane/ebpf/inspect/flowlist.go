package inspect

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// flowStates has the names of enum flow_state of bpf/abi.h.
var flowStates = map[objects.TCFlowState]string{
	objects.TCFlowStateFLOW_NEW: "new", objects.TCFlowStateFLOW_SYN_RECV: "syn-recv", objects.TCFlowStateFLOW_ESTABLISHED: "established",
	objects.TCFlowStateFLOW_CLOSING: "closing", objects.TCFlowStateFLOW_LAST_ACK: "last-ack", objects.TCFlowStateFLOW_CLOSED: "closed",
}

// ListFlows calls each with the flows of the table that are not dead, until it returns false.
func ListFlows(ctx context.Context, table *ebpf.Map, timeouts *objects.Timeouts, each func(dataplane.Flow) bool) error {
	enough := errors.New("enough")
	clock := time.Now()
	err := objects.EachFlow(ctx, table, func(k *objects.TCTuple, f *objects.TCFlow, now uint32) error {
		if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY != 0 || timeouts.Dead(k, f, now) {
			return nil
		}
		flow := dataplane.Flow{
			Protocol: model.Protocol(k.Proto), State: flowStates[objects.TCFlowState(f.State)],
			Client:   netip.AddrPortFrom(objects.FromAddr(k.Saddr, k.Family), objects.ToPort(k.Sport)),
			Service:  netip.AddrPortFrom(objects.FromAddr(k.Daddr, k.Family), objects.ToPort(k.Dport)),
			Endpoint: netip.AddrPortFrom(objects.FromAddr(f.Daddr, k.Family), objects.ToPort(f.Dport)),
			Reset:    model.Protocol(k.Proto) == model.TCP && objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_RESET != 0,
			LastSeen: clock.Add(-time.Duration(int32(now-f.Seen)) * time.Second),
		}
		flow.Refused = isRefused(table, k, f)
		flow.DSR, flow.OneWay = dsrOf(f)
		if f.Service == objects.ServiceEgress {
			flow.Egress, flow.Source = true, netip.AddrPortFrom(objects.FromAddr(f.Saddr, k.Family), objects.ToPort(f.Sport))
		}
		if f.Opened != 0 {
			flow.Opened = clock.Add(-time.Duration(int32(now-f.Opened)) * time.Second)
		}
		if !each(flow) {
			return enough
		}
		return nil
	})
	if errors.Is(err, enough) {
		return nil
	}
	return err
}

// isRefused reports whether an RST answered the first segment of a flow's connection. After a
// SYN-ACK, the endpoint's entry has a sequence number or a window.
func isRefused(table *ebpf.Map, k *objects.TCTuple, f *objects.TCFlow) bool {
	const reset, confirmed = objects.TCFlowFlagsFLOW_RESET, objects.TCFlowFlagsFLOW_CONFIRMED
	if k.Proto != uint8(model.TCP) || objects.TCFlowState(f.State) != objects.TCFlowStateFLOW_CLOSED ||
		objects.TCFlowFlags(f.Flags)&(reset|confirmed) != reset {
		return false
	}
	var reply objects.TCFlow
	if table.Lookup(objects.ReverseOf(k, f), &reply) != nil {
		return false
	}
	return reply.Tcp.End == 0 && reply.Tcp.Window == 0
}
