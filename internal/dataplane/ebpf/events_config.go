package ebpf

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
	// eventsRing is the size of the ring of events in bytes: 30,000 events, as 10,000
	// connections make. refusalsRing is its size without those of flows.
	eventsRing   = 4 << 20
	refusalsRing = 512 << 10
	// The agent reads at these intervals: the longer one while there are no events.
	eventsInterval    = 50 * time.Millisecond
	maxEventsInterval = 400 * time.Millisecond
	// countedFlowsMax is the maximum number of reported flows whose packets are counted.
	// The least used ones lose their counters first. A flow takes two entries of 120
	// bytes.
	countedFlowsMax = 1 << 16
	// MaxEventsRate is the maximum of Config.FlowEventsRate apart from 0: the interval
	// is in whole nanoseconds.
	MaxEventsRate = 1_000_000
)

// eventFlags returns the settings of the programs. Close clears them.
func (c *Config) eventFlags() tcSettingsFlags {
	switch c.FlowEvents {
	case EventsRefused:
		return tcSettingsFlagsSETTING_EVENTS_REFUSED
	case EventsAll:
		return tcSettingsFlagsSETTING_EVENTS_REFUSED | tcSettingsFlagsSETTING_EVENTS_FLOWS
	}
	return 0
}

// eventConstants returns the values of bpf/config.h that concern events.
func (c *Config) eventConstants() map[string]any {
	constants := map[string]any{
		tcVarEventSample:  max(c.FlowEventsSample, 1),
		tcVarEventsWakeup: c.eventsSize() / 4,
	}
	if c.FlowEventsRate > 0 {
		constants[tcVarEventInterval] = uint32(time.Second) / c.FlowEventsRate
	}
	if c.FlowEvents == EventsAll {
		constants[tcVarCountBytes] = uint8(1)
	}
	if c.ServiceMetrics {
		constants[tcVarServiceMetrics] = uint8(1)
	}
	if c.BalanceByLoad {
		constants[tcVarBalanceByLoad] = uint8(1)
		constants[tcVarLoadsMask] = c.loads() - 1
	}
	return constants
}

// socketEventPrograms report the flows that the connect hooks translate. The first one counts
// their handshakes, too.
var socketEventPrograms = map[ebpf.AttachType]string{
	ebpf.AttachCGroupSockOps:         sockProgSockOps,
	ebpf.AttachCgroupInetSockRelease: sockProgSockRelease,
}

// selectSocketPrograms removes the programs for flows of sockets and for lost sockets that no
// configured part needs. UDP needs the offsets of fields of the kernel's socket, from BTF.
func (c *Config) selectSocketPrograms(sock *ebpf.CollectionSpec, f kernel.Features) error {
	events, ends := c.FlowEvents == EventsAll, c.EndSockets && f.SocketIterators
	udp := (events || c.BalanceByLoad) && f.BTF && features.HaveProgramHelper(ebpf.CGroupSock, asm.FnProbeReadKernel) == nil
	for _, p := range []struct {
		wanted, always    bool // always: for all Services
		program, constant string
	}{
		{events || c.ServiceMetrics || c.OutlierEjection || c.BalanceByLoad, events || c.ServiceMetrics, sockProgSockOps, sockVarReportTcpSockets},
		{udp, udp && events, sockProgSockRelease, sockVarReportUdpSockets},
		{udp, udp && c.BalanceByLoad, sockProgSockRelease, sockVarUdpEndsSeen},
		{c.BalanceByLoad && f.SocketIterators, false, sockProgCountedSockets, ""},
		{ends, ends, sockProgLostSockets, sockVarEndSockets},
		{f.SocketIterators, false, sockProgLostHandshakes, ""},
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
	case EventsAll:
		return eventsRing
	}
	return uint32(os.Getpagesize())
}

// handshakes returns the number of entries of the map of this name.
func (c *Config) handshakes() uint32 {
	if c.FlowEvents == EventsAll || c.ServiceMetrics || c.BalanceByLoad {
		return c.unconfirmed()
	}
	return 1
}

// countedFlows returns the number of entries of flow_bytes.
func (c *Config) countedFlows() uint32 {
	if c.FlowEvents == EventsAll {
		return 2 * min(c.FlowTableSize, countedFlowsMax)
	}
	return 1
}
