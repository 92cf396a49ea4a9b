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
	maps, flows := c.Dataplanes(nil).EBPF, uint32(c.Conntrack.flows())
	maps.FlowTableSize, maps.MaxFrontends, maps.MaxEndpoints, maps.MaxSourceRanges = 0, 0, 0, c.MaxSourceRanges
	if c.Conntrack.flowsGiven() {
		maps.FlowTableSize = flows
	}
	need, err := maps.Fit(share, flows)
	if err != nil {
		return err
	}
	c.EBPF.FlowTableSize, c.EBPF.MaxFrontends, c.EBPF.MaxEndpoints, c.mapMemory = maps.FlowTableSize,
		maps.MaxFrontends, maps.MaxEndpoints, need
	need += agentMemory
	room, what := m.machine, fmt.Sprintf("this machine has %d MiB: ", m.machine>>20)
	if m.limit > 0 && m.limit < m.machine {
		room, what = m.limit, fmt.Sprintf("the memory limit is %d MiB (%s): raise the limit, or ", m.limit>>20, m.file)
	}
	switch {
	case need <= room:
		return nil
	case c.Conntrack.flowsGiven():
		return cli.UsageErrorf("%s: a table of %d flows, the other maps and the agent need %d MiB; %sgive a smaller value",
			c.Conntrack.flowsFlag(), flows, need>>20, what)
	}
	return cli.UsageErrorf("--proxy-mode ebpf: the maps and the agent need %d MiB; %sgive --conntrack-max-per-core 1 and a "+
		"--conntrack-min below %d", need>>20, what, c.EBPF.FlowTableSize)
}

// logMapSizes logs the sizes that fitMaps chose.
func (c *Config) logMapSizes(log *slog.Logger) {
	if c.mapMemory > 0 {
		log.Info("sizes of eBPF maps", "flows", c.EBPF.FlowTableSize, "servicePorts", c.EBPF.MaxFrontends, "endpoints",
			c.EBPF.MaxEndpoints, "MiB", c.mapMemory>>20)
	}
}
