package agent

import (
	"fmt"
	"runtime"
	"time"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/node/conntrack"
)

// minFlows is the smallest flow table. Each CPU evicts from an LRU map in batches: in a
// smaller table a new flow can lose an entry at once.
const minFlows = 4096

// maxDefaultFlows is the largest flow table without a flag: that of 16 cores.
const maxDefaultFlows = 16 * maxPerCore

// maxPerCore is kube-proxy's default.
const maxPerCore = 32768

// flowTableFlags returns kube-proxy's flags for conntrack. They set the size and timeouts of
// the eBPF dataplane's flow table.
func (c *Config) flowTableFlags() []flag {
	d, n := ebpf.DefaultTimeouts, &c.Conntrack
	return []flag{
		{name: conntrack.FlagMaxPerCore, to: at(&n.MaxPerCore, maxPerCore), field: "conntrack.maxPerCore",
			usage: fmt.Sprintf("Flows kept for each core, at least %d in all. If neither this nor --conntrack-min is given: %d in all at most, "+
				"and fewer on a node, or in a container, with little memory. 0: likewise %d, and --conntrack-min is ignored.", minFlows,
				maxDefaultFlows, ebpf.DefaultFlowTableSize)},
		{name: conntrack.FlagMin, to: at(&n.Min, 131072), field: "conntrack.min",
			usage: fmt.Sprintf("Least number of flows kept; never below %d.", minFlows)},
		{name: conntrack.FlagTCPEstablished, to: at(&n.TCPEstablished, d.TCPEstablished), modes: onEBPF,
			field: "conntrack.tcpEstablishedTimeout", usage: "Timeout for idle TCP connections."},
		{name: conntrack.FlagTCPCloseWait, to: at(&n.TCPCloseWait, d.TCPClosing), modes: onEBPF, field: "conntrack.tcpCloseWaitTimeout",
			usage: "Timeout for TCP connections that one side has closed."},
		{name: conntrack.FlagUDP, to: at(&n.UDP, d.UDPNew), field: "conntrack.udpTimeout",
			usage: "Timeout for unreplied UDP flows. With eBPF, also for pings of pods to the outside (--egress)."},
		{name: conntrack.FlagUDPStream, to: at(&n.UDPStream, d.UDP), field: "conntrack.udpStreamTimeout",
			usage: "Timeout for answered UDP flows."},
		{name: conntrack.FlagTCPLiberal, to: at(&c.EBPF.TCPLiberal, false), modes: onEBPF, field: "conntrack.tcpBeLiberal",
			usage: "Compare only RSTs with the window of their TCP connection, not all segments."},
	}
}

func (c *ConntrackConfig) validateFlowTable() error {
	if c.MaxPerCore < 0 || c.Min < 0 {
		return cli.UsageErrorf("--conntrack-max-per-core %d, --conntrack-min %d: must not be negative", c.MaxPerCore, c.Min)
	}
	for flag, d := range map[string]time.Duration{
		conntrack.FlagTCPEstablished: c.TCPEstablished,
		conntrack.FlagTCPCloseWait:   c.TCPCloseWait,
		conntrack.FlagUDP:            c.UDP,
		conntrack.FlagUDPStream:      c.UDPStream,
	} {
		if d != 0 && d < time.Second {
			return cli.UsageErrorf("--%s %v: must be a second or longer, or 0 for the default", flag, d)
		}
	}
	return c.validateFlows(ebpf.MaxFlowTableSize)
}

// validateFlows refuses a table that the kernel would refuse, with E2BIG and without the name of a
// flag.
func (c *ConntrackConfig) validateFlows(most uint64) error {
	if n := c.flows(); n > most {
		return cli.UsageErrorf("%s: the table of %d flows needs %s of kernel memory; the kernel allows %d flows: give a smaller value",
			c.flowsFlag(), n, inGiB(n*ebpf.FlowMemory), most)
	}
	return nil
}

// flowsFlag returns the flag that determines the size of the flow table.
func (c *ConntrackConfig) flowsFlag() string {
	if perCore := uint64(c.MaxPerCore) * uint64(runtime.NumCPU()); perCore >= uint64(c.Min) {
		return fmt.Sprintf("--conntrack-max-per-core %d on %d cores", c.MaxPerCore, runtime.NumCPU())
	}
	return fmt.Sprintf("--conntrack-min %d", c.Min)
}

// flows is the size of the flow table, or without a flag the size that memory may reduce.
func (c *ConntrackConfig) flows() uint64 {
	if !c.flowsGiven() {
		return min(c.requestedFlows(), maxDefaultFlows)
	}
	return max(c.requestedFlows(), minFlows)
}

// flowsGiven reports whether flags, or a file, request a size.
func (c *ConntrackConfig) flowsGiven() bool {
	return c.MaxPerCore > 0 && (c.given[conntrack.FlagMaxPerCore] || c.given[conntrack.FlagMin])
}

// requestedFlows returns the size that the flags request, even if it is too small.
func (c *ConntrackConfig) requestedFlows() uint64 {
	if c.MaxPerCore == 0 {
		return ebpf.DefaultFlowTableSize
	}
	return max(uint64(c.MaxPerCore)*uint64(runtime.NumCPU()), uint64(c.Min))
}

// remark describes how the flow table differs from the requested one; "" if it does not.
func (c *ConntrackConfig) remark() string {
	requested := c.requestedFlows()
	if requested >= c.flows() {
		return ""
	}
	return fmt.Sprintf("--conntrack-max-per-core %d and --conntrack-min %d request a table of %d flows; it has %d, the minimum",
		c.MaxPerCore, c.Min, requested, c.flows())
}

// timeouts returns the flows' timeouts. 0 keeps the default, as kube-proxy keeps the
// kernel's.
func (c *ConntrackConfig) timeouts() ebpf.Timeouts {
	t := ebpf.DefaultTimeouts
	for _, v := range []struct {
		from time.Duration
		to   *time.Duration
	}{
		{c.TCPEstablished, &t.TCPEstablished}, {c.TCPCloseWait, &t.TCPClosing},
		{c.UDP, &t.UDPNew}, {c.UDPStream, &t.UDP},
	} {
		if v.from != 0 {
			*v.to = v.from
		}
	}
	return t
}
