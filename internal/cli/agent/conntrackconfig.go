package agent

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/api/resource"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
)

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

	Autopilot       string
	AutopilotMemory string

	// Filled by readConfig and Validate.
	given  map[string]bool // flags that were given, or fields in the file
	memory int64           // bytes of AutopilotMemory
}

func (c *ConntrackConfig) flags() []flag {
	return []flag{
		{name: conntrack.FlagAutopilot, to: at(&c.Autopilot, autopilot.Advise), choices: autopilot.Modes,
			usage: "Sizes and timeouts of the kernel's conntrack: off, advise (report the changes to make) or on (make them)."},
		{name: conntrack.FlagAutopilotMemory, to: at(&c.AutopilotMemory, "5%"),
			usage: "Memory limit for full conntrack tables: a share of the machine's memory, such as 5%, or bytes, such as 512Mi."},
	}
}

func (c *ConntrackConfig) validate() error {
	var err error
	if c.memory, err = memoryShare(c.AutopilotMemory, machineMemory()); err != nil {
		return cli.UsageErrorf("--conntrack-autopilot-memory %q: %v: write a share of the machine's memory, such as 5%%, or bytes, such as 512Mi",
			c.AutopilotMemory, err)
	}
	return c.validateFlowTable()
}

// memoryShare parses a share of memory, in bytes, or a number of bytes.
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
		return 0, fmt.Errorf("must be above 0 and at most the machine's %s", inGiB(memory))
	}
	return int64(bytes), nil
}

// bounds returns the limits of the autopilot: the configured size of the table, and timeouts
// by their sysctl. A flag that was not given is no limit.
func (c *ConntrackConfig) bounds() (entries int, timeouts map[string]time.Duration) {
	if (c.given[conntrack.FlagMaxPerCore] || c.given[conntrack.FlagMin]) && c.MaxPerCore > 0 {
		entries = int(min(max(int64(c.MaxPerCore)*int64(runtime.NumCPU()), int64(c.Min)), math.MaxInt32))
	}
	timeouts = map[string]time.Duration{}
	if c.given[conntrack.FlagUDP] {
		timeouts[conntrack.SysctlUDP] = c.UDP
	}
	if c.given[conntrack.FlagUDPStream] {
		timeouts[conntrack.SysctlUDPStream] = c.UDPStream
	}
	return entries, timeouts
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
