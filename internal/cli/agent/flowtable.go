package agent

import (
	"fmt"
	"runtime"
	"time"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
)

// minFlows is the smallest flow table. Each CPU evicts from an LRU map in batches: in a
// smaller table a new flow can lose an entry at once.
const minFlows = 4096

// addFlowTableFlags binds kube-proxy's flags for conntrack. They set the size and timeouts of
// the eBPF dataplane's flow table.
func (c *ConntrackConfig) addFlowTableFlags(f *pflag.FlagSet) {
	d := ebpf.DefaultTimeouts
	f.Int32Var(&c.MaxPerCore, "conntrack-max-per-core", 32768, fmt.Sprintf("Flows kept for each core, at least %d in all. 0: %d in all, and --conntrack-min is ignored.", minFlows, ebpf.DefaultFlowTableSize))
	f.Int32Var(&c.Min, "conntrack-min", 131072, fmt.Sprintf("Least number of flows kept; never below %d.", minFlows))
	f.DurationVar(&c.TCPEstablished, "conntrack-tcp-timeout-established", d.TCPEstablished, "Timeout for idle TCP connections.")
	f.DurationVar(&c.TCPCloseWait, "conntrack-tcp-timeout-close-wait", d.TCPClosing, "Timeout for TCP connections that one side has closed.")
	f.DurationVar(&c.UDP, "conntrack-udp-timeout", d.UDPNew, "Timeout for unreplied UDP flows.")
	f.DurationVar(&c.UDPStream, "conntrack-udp-timeout-stream", d.UDP, "Timeout for answered UDP flows.")
	f.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "Compare only RSTs with the window of their TCP connection, not all segments (--proxy-mode ebpf).")
}

func (c *ConntrackConfig) validateFlowTable() error {
	if c.MaxPerCore < 0 || c.Min < 0 {
		return cli.UsageErrorf("--conntrack-max-per-core %d, --conntrack-min %d: must not be negative", c.MaxPerCore, c.Min)
	}
	for flag, d := range map[string]time.Duration{
		"--conntrack-tcp-timeout-established": c.TCPEstablished,
		"--conntrack-tcp-timeout-close-wait":  c.TCPCloseWait,
		"--conntrack-udp-timeout":             c.UDP,
		"--conntrack-udp-timeout-stream":      c.UDPStream,
	} {
		if d != 0 && d < time.Second {
			return cli.UsageErrorf("%s %v: must be a second or longer, or 0 for the default", flag, d)
		}
	}
	return c.validateFlows(ebpf.MaxFlowTableSize, machineMemory())
}

// validateFlows refuses a table that the kernel would refuse (with E2BIG, without the
// name of a flag). It also refuses a table that does not fit into memory, in bytes. The
// kernel allocates the whole table at once.
func (c *ConntrackConfig) validateFlows(most, memory uint64) error {
	n := c.flows()
	size := n * ebpf.FlowBytes
	if n <= most && size <= memory {
		return nil
	}
	flag := fmt.Sprintf("--conntrack-min %d", c.Min)
	if c.MaxPerCore == 0 {
		flag = "--conntrack-max-per-core 0"
	} else if perCore := uint64(c.MaxPerCore) * uint64(runtime.NumCPU()); perCore >= uint64(c.Min) {
		flag = fmt.Sprintf("--conntrack-max-per-core %d on %d cores", c.MaxPerCore, runtime.NumCPU())
	}
	limit := fmt.Sprintf("this machine has %s", inGiB(memory))
	if n > most {
		limit = fmt.Sprintf("the kernel allows %d flows", most)
	}
	return cli.UsageErrorf("%s: the table of %d flows needs %s of kernel memory; %s: give a smaller value", flag, n, inGiB(size), limit)
}

// flows is the size of the flow table.
func (c *ConntrackConfig) flows() uint64 { return max(c.askedFlows(), minFlows) }

// askedFlows returns the size that the flags request, even if it is too small.
func (c *ConntrackConfig) askedFlows() uint64 {
	if c.MaxPerCore == 0 {
		return ebpf.DefaultFlowTableSize
	}
	return max(uint64(c.MaxPerCore)*uint64(runtime.NumCPU()), uint64(c.Min))
}

// remark describes how the flow table differs from the requested one; "" if it does not.
func (c *ConntrackConfig) remark() string {
	asked := c.askedFlows()
	if asked == c.flows() {
		return ""
	}
	return fmt.Sprintf("--conntrack-max-per-core %d and --conntrack-min %d request a table of %d flows; it has %d, the minimum",
		c.MaxPerCore, c.Min, asked, c.flows())
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
