package ebpf

import (
	"context"
	"errors"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
)

var (
	_ dataplane.Inspector        = (*Backend)(nil)
	_ dataplane.FlowReporter     = (*Backend)(nil)
	_ dataplane.FlowSwitch       = (*Backend)(nil)
	_ dataplane.ServiceCounter   = (*Backend)(nil)
	_ dataplane.HandshakeWatcher = (*Backend)(nil)
	_ dataplane.SocketWatcher    = (*Backend)(nil)
)

// Tables returns the maps that can be full. The flow table is as at the last sweep.
func (b *Backend) Tables() []dataplane.Table {
	return append([]dataplane.Table{b.flows.Use()}, b.services.Tables()...)
}

// Hooks returns the hooks of devices and of the cgroup.
func (b *Backend) Hooks() []dataplane.Hook {
	var hooks []dataplane.Hook
	for _, s := range b.attacher.Status() {
		if mode, _, _ := strings.Cut(s.XDP, ":"); mode == attach.XDPNative || mode == attach.XDPGeneric {
			hooks = append(hooks, dataplane.Hook{Place: s.Name, Program: objects.XDPProgXdpFromNetwork, Mechanism: "xdp " + mode})
		}
		from := objects.TCProgFromNetwork
		if s.Role == attach.PodSide {
			from = objects.TCProgFromPod
		}
		for _, h := range []dataplane.Hook{{Place: "ingress", Program: from}, {Place: "egress", Program: objects.TCProgToNetwork}} {
			direction := h.Place
			h.Place, h.Mechanism = s.Name+" "+direction, b.attacher.Mechanism()
			if !slices.Contains(s.Attached, direction) {
				if h.Err = s.Err; h.Err == nil {
					continue // the device needs none
				}
			}
			hooks = append(hooks, h)
		}
	}
	attached := b.attached.Load()
	var socket []dataplane.Hook
	programs := b.objects.SocketPrograms()
	if b.cfg.SocketHooks == HooksOff {
		programs = nil
	}
	for at, program := range programs {
		h := dataplane.Hook{Place: b.cfg.CgroupRoot, Program: strings.ToLower(at.String()), Mechanism: "cgroup"}
		if info, err := program.Info(); err == nil {
			h.Program = info.Name
		}
		if !attached {
			h.Err = errors.New("the first sync has not ended")
		}
		socket = append(socket, h)
	}
	slices.SortFunc(socket, func(a, b dataplane.Hook) int { return strings.Compare(a.Program, b.Program) })
	return append(hooks, socket...)
}

// Features returns the features that the programs use where the kernel has them.
func (b *Backend) Features() []dataplane.Feature {
	f := b.objects.Features
	return []dataplane.Feature{
		{Name: "tcx", Present: f.TCX, Detail: "programs of other projects keep their place at a device; otherwise clsact"},
		{Name: "bpf_set_retval", Present: f.SetRetval, Detail: "a refused socket gets ECONNREFUSED, not EPERM"},
		{Name: "bpf_l4_csum_replace IPv6", Present: f.CsumReplaceIPv6, Detail: "checksums of IPv6 by the kernel"},
		{Name: "bpf_skb_ct_lookup", Present: f.ConntrackLookup, Detail: "the programs leave connections of netfilter to it"},
		{Name: "BTF", Present: f.BTF, Detail: "types in dumps of other tools, and events of UDP sockets"},
		{Name: "iterators of sockets", Present: f.SocketIterators,
			Detail: "--end-sockets, and exact counts of open sockets for --balance-by-load"},
	}
}

// Drops returns the counters of the verdicts that refuse or drop and are not 0, sorted.
func (b *Backend) Drops() []dataplane.Drop {
	var drops []dataplane.Drop
	for name, n := range b.Verdicts() {
		if verdict, _ := objects.VerdictOf(name); verdict.Effect.Fails() && n > 0 {
			drops = append(drops, dataplane.Drop{Reason: name, Meaning: verdict.Meaning, Packets: n})
		}
	}
	slices.SortFunc(drops, func(a, b dataplane.Drop) int { return strings.Compare(a.Reason, b.Reason) })
	return drops
}

// Flows calls each with the flows of the table that are not dead, until it returns false.
func (b *Backend) Flows(ctx context.Context, each func(dataplane.Flow) bool) error {
	return inspect.ListFlows(ctx, b.m(objects.TCMapFlows), &b.cfg.Timeouts, each)
}

// ReportFlows implements dataplane.FlowReporter. With EventsOff it waits for ctx.
func (b *Backend) ReportFlows(ctx context.Context, report func([]dataplane.FlowEvent)) error {
	return b.flows.ReportFlows(ctx, report)
}

// CatchUp implements dataplane.FlowReporter.
func (b *Backend) CatchUp(ctx context.Context) { b.flows.CatchUp(ctx) }

// SwitchFlows implements dataplane.FlowSwitch, for Config.FlowEvents EventsOnDemand.
func (b *Backend) SwitchFlows(of dataplane.FlowSelection) error {
	return b.flows.Switch(of, b.node.SetEvents)
}

// FlowEventCounts implements dataplane.FlowReporter.
func (b *Backend) FlowEventCounts() dataplane.FlowEventCounts { return b.flows.FlowEventCounts() }

// ServiceCounters implements dataplane.ServiceCounter. It reads the kernel's counters.
func (b *Backend) ServiceCounters() (map[intent.PortID]*dataplane.ServiceCounters, error) {
	return b.flows.ServiceCounters()
}

// ServiceCountersOf implements dataplane.ServiceCounter.
func (b *Backend) ServiceCountersOf(ports []intent.PortID) (map[intent.PortID]*dataplane.ServiceCounters, error) {
	return b.flows.ServiceCountersOf(ports)
}

// Outcomes implements dataplane.HandshakeWatcher.
func (b *Backend) Outcomes() ([]outlier.Outcome, error) { return b.flows.Outcomes() }

// FailedSockets implements dataplane.SocketWatcher.
func (b *Backend) FailedSockets() ([]dataplane.FailedSockets, error) { return b.flows.FailedSockets() }

// Differences compares the entries of a Service port with the maps. It reads the maps beside
// writes, and then under the writers' lock only the entries that seemed to differ.
func (b *Backend) Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error) {
	return b.services.Differences(ctx, id, limit)
}

// Drifted returns a channel that receives when the maps differ from what was written.
func (b *Backend) Drifted() <-chan struct{} { return b.services.Drifted() }

// Repaired returns and resets the number of map entries that Replace has repaired.
func (b *Backend) Repaired() dataplane.Repair { return b.services.Repaired() }

// Applied reads the maps again. The names of ports, and fields that the maps do not
// have, come from memory.
func (b *Backend) Applied(context.Context) (s intent.State, err error) {
	s.Ports, err = b.services.Applied()
	if err != nil {
		return intent.State{}, err
	}
	if node := b.node.Current(); node != nil {
		s.Node = *node
	}
	return s, nil
}
