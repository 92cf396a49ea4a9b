package ebpf

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"time"
)

// The values of Config.Bypass, after --bypass.
const (
	BypassAuto   = "auto"   // through the stack where intent says that a pod is policed
	BypassAlways = "always" // the same: intent, told of it, says so of fewer pods
	BypassNever  = "never"  // endpoints of this node always through the stack
)

// Config is how the dataplane is set up.
type Config struct {
	// BPFFS is this instance's own directory in a bpf file system.
	BPFFS string
	// CgroupRoot is the cgroup2 directory whose processes use Services.
	CgroupRoot string
	Bypass     string
	Log        *slog.Logger

	// FlowTableSize is how many confirmed flows are kept; the oldest go first. A
	// quarter as many unconfirmed ones are kept besides (bpf/lib/unconfirmed.h). 0 is
	// DefaultFlowTableSize, the most is MaxFlowTableSize. A flow takes FlowBytes
	// of kernel memory, which the kernel allocates at once.
	FlowTableSize uint32
	// MaxFrontends, MaxEndpoints bound the maps of Services; 0 is the default.
	MaxFrontends, MaxEndpoints uint32
	// Timeouts of flows; the zero value is DefaultTimeouts.
	Timeouts Timeouts
	// SweepInterval is the time between two sweeps of the flow table.
	SweepInterval time.Duration
	// Linger is how long Cleanup lets flows go on when nobody begins one any more, and
	// half of it is how long Drain lets netfilter see those that passed by it.
	Linger time.Duration
	// WatchNAT follows whether netfilter may translate destinations in this network
	// namespace. It calls changed with the present answer before it returns, then each
	// time the answer changes, until stop returns; reason says why netfilter may. While
	// it may, packets of endpoints are looked up in conntrack, and connections that
	// netfilter knows go through it. Nil: netfilter never translates.
	WatchNAT func(changed func(may bool, reason string)) (stop func(), err error)
	// TCPLiberal believes what a TCP segment says that does not fit the window, unless
	// it is an RST: for networks in which not every packet of a connection comes here.
	TCPLiberal bool
	// Refused gets a text about each address that a pod claims and that is not
	// believed; nil: only the log has it. It must not wait.
	Refused func(note string)
	// ForceClsact attaches as on kernels before 6.6.
	ForceClsact bool
}

// Defaults of Config.
const (
	DefaultFlowTableSize = 262144
	DefaultMaxFrontends  = 1 << 19
	DefaultMaxEndpoints  = 1 << 20
	defaultSweepInterval = 10 * time.Second
)

// Bounds of the flow table.
const (
	// FlowBytes is what a flow of FlowTableSize takes, in bytes: two entries of 224,
	// a quarter of an unconfirmed flow, and its place in the ring.
	FlowBytes = 448 + (448+40)/4
	// MaxFlowTableSize in flows is what the kernel allows: a hash table of at
	// most 2^27 buckets of 16 bytes, which must count in 32 bits
	// (kernel/bpf/hashtab.c), and two entries a flow.
	MaxFlowTableSize = 1 << 26 / 5 * 4
)

// Timeouts say how long a flow is remembered after its last packet, by state;
// whole seconds. The values are kube-proxy's where it sets one for conntrack.
type Timeouts struct {
	TCPNew         time.Duration // no answer yet
	TCPEstablished time.Duration
	TCPClosing     time.Duration // one side has sent FIN
	TCPClosed      time.Duration
	UDPNew         time.Duration
	UDP            time.Duration // answered
}

// DefaultTimeouts follow nf_conntrack_proto_tcp.c and nf_conntrack_proto_udp.c,
// with kube-proxy's 24 h for established and 1 h for half-closed connections.
var DefaultTimeouts = Timeouts{
	TCPNew:         60 * time.Second,
	TCPEstablished: 24 * time.Hour,
	TCPClosing:     time.Hour,
	TCPClosed:      10 * time.Second,
	UDPNew:         30 * time.Second,
	UDP:            120 * time.Second,
}

// Validate checks the configuration and fills in defaults.
func (c *Config) Validate() error {
	if !filepath.IsAbs(c.BPFFS) {
		return fmt.Errorf("bpffs %q: must be an absolute path", c.BPFFS)
	}
	if !filepath.IsAbs(c.CgroupRoot) {
		return fmt.Errorf("cgroup root %q: must be an absolute path", c.CgroupRoot)
	}
	if c.Bypass == "" {
		c.Bypass = BypassAuto
	}
	if !slices.Contains([]string{BypassAuto, BypassAlways, BypassNever}, c.Bypass) {
		return fmt.Errorf("bypass %q: use auto, always or never", c.Bypass)
	}
	if c.Log == nil {
		return errors.New("no logger")
	}
	if c.FlowTableSize > MaxFlowTableSize {
		return fmt.Errorf("flow table of %d flows: the kernel allows %d", c.FlowTableSize, MaxFlowTableSize)
	}
	c.FlowTableSize = orDefault(c.FlowTableSize, DefaultFlowTableSize)
	c.MaxFrontends = orDefault(c.MaxFrontends, DefaultMaxFrontends)
	c.MaxEndpoints = orDefault(c.MaxEndpoints, DefaultMaxEndpoints)
	if c.Timeouts == (Timeouts{}) {
		c.Timeouts = DefaultTimeouts
	}
	if c.SweepInterval == 0 {
		c.SweepInterval = defaultSweepInterval
	}
	return nil
}

func orDefault(v, d uint32) uint32 {
	if v == 0 {
		return d
	}
	return v
}
