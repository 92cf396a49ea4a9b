package agent

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
)

// minFlows is the smallest flow table. Each CPU evicts from an LRU map in batches: in a
// smaller table a new flow can lose an entry at once.
const minFlows = 4096

// ConntrackConfig holds kube-proxy's flags for conntrack. They also set the size and
// timeouts of the eBPF dataplane's flow table. Flags that were given also limit the
// conntrack autopilot.
type ConntrackConfig struct {
	MaxPerCore     int32
	Min            int32
	TCPEstablished time.Duration
	TCPCloseWait   time.Duration
	UDP            time.Duration
	UDPStream      time.Duration
	TCPBeLiberal   bool

	Autopilot       string
	AutopilotMemory string

	// Filled by readConfig and Validate.
	given  map[string]bool // flags that were given, or fields in the file
	memory int64           // bytes of AutopilotMemory
}

func (c *ConntrackConfig) addFlags(f *pflag.FlagSet) {
	d := ebpf.DefaultTimeouts
	f.Int32Var(&c.MaxPerCore, "conntrack-max-per-core", 32768, fmt.Sprintf("flows kept for each core, %d at least in all; 0: %d in all, and --conntrack-min is ignored", minFlows, ebpf.DefaultFlowTableSize))
	f.Int32Var(&c.Min, "conntrack-min", 131072, fmt.Sprintf("flows kept at least; never less than %d", minFlows))
	f.DurationVar(&c.TCPEstablished, "conntrack-tcp-timeout-established", d.TCPEstablished, "how long an idle TCP connection is remembered")
	f.DurationVar(&c.TCPCloseWait, "conntrack-tcp-timeout-close-wait", d.TCPClosing, "how long a TCP connection is that one side has closed")
	f.DurationVar(&c.UDP, "conntrack-udp-timeout", d.UDPNew, "how long a UDP flow without an answer is")
	f.DurationVar(&c.UDPStream, "conntrack-udp-timeout-stream", d.UDP, "how long an answered UDP flow is")
	f.BoolVar(&c.TCPBeLiberal, "conntrack-tcp-be-liberal", false, "compare only RSTs with the window of their TCP connection, not all segments (--proxy-mode ebpf)")
	f.StringVar(&c.Autopilot, "conntrack-autopilot", autopilot.Advise, "sizes and time-outs of the kernel's conntrack: off, advise (say what should be changed) or on (change it)")
	f.StringVar(&c.AutopilotMemory, "conntrack-autopilot-memory", "5%", "memory that full conntrack tables may take: a part of the machine's, as 5%, or bytes, as 512Mi")
}

func (c *ConntrackConfig) validate() error {
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
	if !slices.Contains(autopilot.Modes, c.Autopilot) {
		return cli.UsageErrorf("--conntrack-autopilot %q: not a choice: use %s", c.Autopilot, strings.Join(autopilot.Modes, ", "))
	}
	var err error
	if c.memory, err = memoryShare(c.AutopilotMemory, machineMemory()); err != nil {
		return cli.UsageErrorf("--conntrack-autopilot-memory %q: %v: write a part of the machine's memory, as 5%%, or bytes, as 512Mi", c.AutopilotMemory, err)
	}
	return c.validateFlows(ebpf.MaxFlowTableSize, machineMemory())
}

// memoryShare reads a part of so much memory, or a number of bytes.
func memoryShare(text string, memory uint64) (int64, error) {
	var bytes float64
	if part, isPart := strings.CutSuffix(text, "%"); isPart {
		percent, err := strconv.ParseFloat(part, 64)
		if err != nil {
			return 0, errors.New("not a number")
		}
		bytes = percent / 100 * float64(memory)
	} else {
		q, err := resource.ParseQuantity(text)
		if err != nil {
			return 0, errors.New("not a quantity")
		}
		bytes = q.AsApproximateFloat64()
	}
	if !(bytes >= 1 && bytes <= float64(memory)) {
		return 0, fmt.Errorf("must be more than nothing and no more than the machine's %s", inGiB(memory))
	}
	return int64(bytes), nil
}

// bounds returns the limits of the autopilot: the configured size of the table, and timeouts
// by their sysctl. A flag that was not given is no limit.
func (c *ConntrackConfig) bounds() (entries int, timeouts map[string]time.Duration) {
	if (c.given["conntrack-max-per-core"] || c.given["conntrack-min"]) && c.MaxPerCore > 0 {
		entries = int(min(max(int64(c.MaxPerCore)*int64(runtime.NumCPU()), int64(c.Min)), math.MaxInt32))
	}
	timeouts = map[string]time.Duration{}
	if c.given["conntrack-udp-timeout"] {
		timeouts["nf_conntrack_udp_timeout"] = c.UDP
	}
	if c.given["conntrack-udp-timeout-stream"] {
		timeouts["nf_conntrack_udp_timeout_stream"] = c.UDPStream
	}
	return entries, timeouts
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
	return cli.UsageErrorf("%s: a table of %d flows, which takes %s of kernel memory; %s: give less", flag, n, inGiB(size), limit)
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
	return fmt.Sprintf("--conntrack-max-per-core %d and --conntrack-min %d ask for a table of %d flows; it has %d, the least that works",
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
