package objects

import (
	"fmt"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"

	"spillway.dev/spillway/internal/node/kernel"
)

const (
	// EventsRing is the size of the ring of events in bytes: 30,000 events, as 10,000
	// connections make. demandRing is its size with EventsOnDemand, and refusalsRing without events
	// of flows.
	EventsRing   = 4 << 20
	demandRing   = 1 << 20
	refusalsRing = 512 << 10
	// CountedFlowsMax is the maximum number of reported flows whose packets are counted. With
	// EventsOnDemand it is a countedShare of the flow table. The least used ones lose their
	// counters first. A flow takes two entries of 120 bytes.
	CountedFlowsMax = 1 << 16
	countedShare    = 16
	// MaxEventsRate is the maximum of Config.FlowEventsRate apart from 0: the interval
	// is in whole nanoseconds.
	MaxEventsRate = 1_000_000
)

// EventSettings are the settings about events.
const EventSettings = TCSettingsFlagsSETTING_EVENTS_REFUSED | TCSettingsFlagsSETTING_EVENTS_FLOWS |
	TCSettingsFlagsSETTING_EVENTS_SELECTED

// ReportsFlows reports whether the programs can report flows: always, or on demand.
func (c *Config) ReportsFlows() bool {
	return c.FlowEvents == EventsAll || c.FlowEvents == EventsOnDemand
}

// EventFlags returns the settings of the programs without a demand. Close clears them.
func (c *Config) EventFlags() TCSettingsFlags {
	switch c.FlowEvents {
	case EventsRefused, EventsOnDemand:
		return TCSettingsFlagsSETTING_EVENTS_REFUSED
	case EventsAll:
		return TCSettingsFlagsSETTING_EVENTS_REFUSED | TCSettingsFlagsSETTING_EVENTS_FLOWS
	}
	return 0
}

// eventConstants returns the values of bpf/config.h that concern events.
func (c *Config) eventConstants() map[string]any {
	constants := map[string]any{
		TCVarEventSample:  max(c.FlowEventsSample, 1),
		TCVarEventsWakeup: c.eventsSize() / 4,
	}
	if c.FlowEventsRate > 0 {
		constants[TCVarEventInterval] = uint32(time.Second) / c.FlowEventsRate
	}
	if c.ReportsFlows() {
		constants[TCVarCountBytes] = uint8(1)
	}
	if c.ServiceMetrics {
		constants[TCVarServiceMetrics] = uint8(1)
		if !c.ServiceConnectionsOnly {
			constants[TCVarServicePackets] = uint8(1)
		}
	}
	if c.BalanceByLoad {
		constants[TCVarBalanceByLoad] = uint8(1)
		constants[TCVarLoadsMask] = c.loads() - 1
	}
	return constants
}

// SocketEventPrograms follow the flows that the connect hooks translate. The first one counts the
// handshakes of TCP, always.
var SocketEventPrograms = map[ebpf.AttachType]string{
	ebpf.AttachCGroupSockOps:         SockProgSockOps,
	ebpf.AttachCgroupInetSockRelease: SockProgSockRelease,
}

// selectSocketPrograms removes the programs for flows of sockets and for lost sockets that no
// configured part needs. UDP needs the offsets of fields of the kernel's socket, from BTF.
func (c *Config) selectSocketPrograms(sock *ebpf.CollectionSpec, f kernel.Features) error {
	events, ends := c.ReportsFlows(), c.EndSockets && f.SocketIterators
	tcp := c.SocketHooks != HooksOff && features.HaveProgramHelper(ebpf.SockOps, asm.FnSkStorageGet) == nil
	udp := (events || c.BalanceByLoad) && f.BTF && features.HaveProgramHelper(ebpf.CGroupSock, asm.FnProbeReadKernel) == nil
	for _, p := range []struct {
		wanted, always    bool // always: for all Services
		program, constant string
	}{
		{tcp, tcp, SockProgSockOps, SockVarFollowTcpSockets},
		{udp, udp && events, SockProgSockRelease, SockVarReportUdpSockets},
		{udp, udp && c.BalanceByLoad, SockProgSockRelease, SockVarUdpEndsSeen},
		{c.BalanceByLoad && f.SocketIterators, false, SockProgCountedSockets, ""},
		{ends, ends, SockProgLostSockets, SockVarEndSockets},
		{f.SocketIterators, false, SockProgLostHandshakes, ""},
	} {
		if !p.wanted {
			delete(sock.Programs, p.program)
		}
		if !p.always {
			continue
		}
		if err := sock.Variables[p.constant].Set(uint8(1)); err != nil {
			return fmt.Errorf("set eBPF constant %s: %w", p.constant, err)
		}
	}
	return nil
}

// eventsSize returns the size of the ring: at least a page.
func (c *Config) eventsSize() uint32 {
	switch c.FlowEvents {
	case EventsRefused:
		return refusalsRing
	case EventsOnDemand:
		return demandRing
	case EventsAll:
		return EventsRing
	}
	return uint32(os.Getpagesize())
}

// handshakes returns the number of entries of the map of this name.
func (c *Config) handshakes() uint32 {
	if c.ReportsFlows() || c.ServiceMetrics || c.BalanceByLoad {
		return c.unconfirmed()
	}
	return 1
}

// countedFlows returns the number of entries of flow_bytes.
func (c *Config) countedFlows() uint32 {
	switch c.FlowEvents {
	case EventsOnDemand:
		return 2 * min(max(c.FlowTableSize/countedShare, 1), CountedFlowsMax)
	case EventsAll:
		return 2 * min(c.FlowTableSize, CountedFlowsMax)
	}
	return 1
}
