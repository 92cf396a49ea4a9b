package main

import (
	"fmt"
	"math"
	"runtime"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf"
)

// minFlows is the smallest flow table. An LRU map evicts in batches of each CPU:
// in a smaller one a new flow can lose one of its halves at once.
const minFlows = 4096

// conntrackConfig holds kube-proxy's flags for the table of connections. The
// eBPF dataplane has a table of its own, which they size and time.
type conntrackConfig struct {
	MaxPerCore     int32
	Min            int32
	TCPEstablished time.Duration
	TCPCloseWait   time.Duration
	UDP            time.Duration
	UDPStream      time.Duration
}

func (c *conntrackConfig) addFlags(f *pflag.FlagSet) {
	d := ebpf.DefaultTimeouts
	f.Int32Var(&c.MaxPerCore, "conntrack-max-per-core", 32768, fmt.Sprintf("flows kept for each core, %d at least in all; 0: %d in all, and --conntrack-min is ignored", minFlows, ebpf.DefaultFlowTableSize))
	f.Int32Var(&c.Min, "conntrack-min", 131072, fmt.Sprintf("flows kept at least; never less than %d", minFlows))
	f.DurationVar(&c.TCPEstablished, "conntrack-tcp-timeout-established", d.TCPEstablished, "how long an idle TCP connection is remembered")
	f.DurationVar(&c.TCPCloseWait, "conntrack-tcp-timeout-close-wait", d.TCPClosing, "how long a TCP connection is that one side has closed")
	f.DurationVar(&c.UDP, "conntrack-udp-timeout", d.UDPNew, "how long a UDP flow without an answer is")
	f.DurationVar(&c.UDPStream, "conntrack-udp-timeout-stream", d.UDP, "how long an answered UDP flow is")
}

func (c *conntrackConfig) validate() error {
	if c.MaxPerCore < 0 || c.Min < 0 {
		return usageErrorf("--conntrack-max-per-core %d, --conntrack-min %d: must not be negative", c.MaxPerCore, c.Min)
	}
	for flag, d := range map[string]time.Duration{
		"--conntrack-tcp-timeout-established": c.TCPEstablished,
		"--conntrack-tcp-timeout-close-wait":  c.TCPCloseWait,
		"--conntrack-udp-timeout":             c.UDP,
		"--conntrack-udp-timeout-stream":      c.UDPStream,
	} {
		if d != 0 && d < time.Second {
			return usageErrorf("%s %v: must be a second or longer, or 0 for the default", flag, d)
		}
	}
	return c.validateFlows(ebpf.MaxFlowTableSize, machineMemory())
}

// validateFlows refuses a table that the kernel would refuse (with E2BIG, and
// no word of any flag), or that does not fit into memory, in bytes; the kernel
// allocates it whole.
func (c *conntrackConfig) validateFlows(most, memory uint64) error {
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
	return usageErrorf("%s: a table of %d flows, which takes %s of kernel memory; %s: give less", flag, n, inGiB(size), limit)
}

func inGiB(bytes uint64) string { return fmt.Sprintf("%.1f GiB", float64(bytes)/(1<<30)) }

// machineMemory is the machine's memory in bytes.
func machineMemory() uint64 {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return math.MaxUint64 // the kernel will know
	}
	return uint64(info.Totalram) * uint64(info.Unit)
}

// flows is the size of the flow table.
func (c *conntrackConfig) flows() uint64 { return max(c.askedFlows(), minFlows) }

// askedFlows is the size that the flags ask for, be it too small.
func (c *conntrackConfig) askedFlows() uint64 {
	if c.MaxPerCore == 0 {
		return ebpf.DefaultFlowTableSize
	}
	return max(uint64(c.MaxPerCore)*uint64(runtime.NumCPU()), uint64(c.Min))
}

// remark says what the flow table has instead of what was asked for; "" if it
// has just that.
func (c *conntrackConfig) remark() string {
	asked := c.askedFlows()
	if asked == c.flows() {
		return ""
	}
	return fmt.Sprintf("--conntrack-max-per-core %d and --conntrack-min %d ask for a table of %d flows; it has %d, the least that works",
		c.MaxPerCore, c.Min, asked, c.flows())
}

// timeouts are those of flows; 0 leaves the default, as kube-proxy leaves the
// kernel's.
func (c *conntrackConfig) timeouts() ebpf.Timeouts {
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
