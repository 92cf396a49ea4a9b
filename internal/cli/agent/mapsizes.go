package agent

import (
	"fmt"
	"log/slog"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/node/kernel"
)

// Shares of memory that the maps of eBPF may take at start, without a flag for the flow table. The
// rest of a container's limit is for the agent, and for the entries of Services.
const (
	machineShare = 64
	limitShare   = 2
)

// agentMemory is what an agent with few Services needs beside its maps, in bytes: its heap, its
// programs, and what the verifier needs while it checks them.
const agentMemory = 64 << 20

// mapSizes are sizes of the maps of eBPF, and their kernel memory at load in bytes.
type mapSizes struct {
	flows, frontends, endpoints uint32
	memory                      uint64
}

// availableMemory is what a process may use, in bytes.
type availableMemory struct {
	machine uint64
	limit   uint64 // of the cgroup; 0: none is known
	file    string // has limit
}

func readMemory() availableMemory {
	m := availableMemory{machine: machineMemory()}
	m.limit, m.file = kernel.MemoryLimit()
	return m
}

// fitMaps chooses the sizes of the maps of eBPF. It refuses a flow table that flags request, and
// the smallest one, if they do not fit into memory.
func (c *Config) fitMaps(m availableMemory) error {
	if c.ProxyMode != "ebpf" || c.Cleanup {
		return nil
	}
	share := m.machine / machineShare
	if m.limit > 0 {
		share = min(share, m.limit/limitShare, m.limit-min(m.limit, agentMemory))
	}
	planes, flows := c.Dataplanes(nil), uint32(c.Conntrack.flows())
	if c.Conntrack.flowsGiven() {
		planes.FlowTableSize = flows
	}
	need, err := planes.FitMaps(share, flows)
	if err != nil {
		return err
	}
	c.maps = mapSizes{planes.FlowTableSize, planes.MaxFrontends, planes.MaxEndpoints, need}
	need += agentMemory
	room, what := m.machine, fmt.Sprintf("this machine has %d MiB: ", m.machine>>20)
	if m.limit > 0 && m.limit < m.machine {
		room, what = m.limit, fmt.Sprintf("the memory limit is %d MiB (%s): raise the limit, or ", m.limit>>20, m.file)
	}
	switch {
	case need <= room:
		return nil
	case c.Conntrack.flowsGiven():
		return cli.UsageErrorf("%s: a table of %d flows, the other maps and the agent need %d MiB; %sgive a smaller value", c.Conntrack.flowsFlag(), flows, need>>20, what)
	}
	return cli.UsageErrorf("--proxy-mode ebpf: the maps and the agent need %d MiB; %sgive --conntrack-max-per-core 1 and a --conntrack-min below %d", need>>20, what, c.maps.flows)
}

// logMapSizes logs the sizes that fitMaps chose.
func (c *Config) logMapSizes(log *slog.Logger) {
	if c.maps.flows > 0 {
		log.Info("sizes of eBPF maps", "flows", c.maps.flows, "servicePorts", c.maps.frontends, "endpoints", c.maps.endpoints, "MiB", c.maps.memory>>20)
	}
}
