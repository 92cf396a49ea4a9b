package objects

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
)

// The values of Config.Bypass, from --bypass.
const (
	BypassAuto   = "auto"   // through the stack if intent marks a pod as traversing netfilter
	BypassAlways = "always" // the same; intent, which knows the setting, marks fewer pods
	BypassNever  = "never"  // endpoints of this node always through the stack
)

// The values of Config.FlowEvents, from --flow-events.
const (
	EventsOff      = "off"
	EventsRefused  = "refused"   // packets and connections that are refused or dropped
	EventsOnDemand = "on-demand" // also flows, while the agent asks for them: dataplane.FlowSwitch
	EventsAll      = "all"       // also flows: opened, answered, closed
)

// The values of Config.SocketHooks, from --socket-hooks.
const (
	HooksAll  = "all"  // sockets of the node and of pods
	HooksHost = "host" // sockets of the node's own network namespace
	HooksOff  = "off"  // no socket: no program is attached to the cgroup
)

// SocketHooks are the values of Config.SocketHooks.
var SocketHooks = []string{HooksAll, HooksHost, HooksOff}

// The values of Config.XDP, from --xdp.
const (
	XDPOff     = "off"
	XDPAuto    = "auto"    // where the driver runs the program itself
	XDPGeneric = "generic" // for tests: attach.XDPGeneric
)

// XDPModes are the values of Config.XDP.
var XDPModes = []string{XDPOff, XDPAuto, XDPGeneric}

// Config configures the dataplane.
type Config struct {
	// BPFFS is this instance's own directory in a bpf file system.
	BPFFS string
	// CgroupRoot is the cgroup2 directory whose processes use Services. HooksOff needs none.
	CgroupRoot string
	// SocketHooks selects the sockets that the socket hooks translate; "" means HooksAll.
	// The tc programs translate packets of the other sockets of pods. Other processes of
	// the node have no Services.
	SocketHooks string
	Bypass      string
	Log         *slog.Logger
	// XDP attaches a program to external devices that sends packets of known flows on, and
	// drops SYNs, before the kernel has an skb for them; "" means XDPOff.
	XDP string

	// FlowTableSize is the maximum number of confirmed flows; the kernel evicts the
	// oldest first. The table has room for a quarter as many unconfirmed flows in
	// addition (bpf/lib/flow/unconfirmed.h). With DSRKeys, a quarter of it may be flows that
	// the node sees one direction of. 0 means DefaultFlowTableSize, and the
	// maximum is MaxFlowTableSize. A flow takes FlowMemory of kernel memory, allocated
	// at start.
	FlowTableSize uint32
	// MaxFrontends, MaxEndpoints and MaxSourceRanges are the sizes of the maps of Services; 0
	// means the default.
	MaxFrontends, MaxEndpoints, MaxSourceRanges uint32
	// Timeouts are the timeouts of flows; the zero value means DefaultTimeouts.
	Timeouts Timeouts
	// SweepInterval is the time between two sweeps of the flow table.
	SweepInterval time.Duration
	// Linger is how long Cleanup lets existing flows continue after new connections
	// stop. Half of it is how long Drain lets netfilter see flows that bypassed it.
	Linger time.Duration
	// WatchNAT reports whether netfilter may translate destinations in this network
	// namespace. It calls changed with the present state before it returns, and after
	// every change until stop returns. reason says why netfilter may translate. While
	// it may, the programs look up packets of endpoints in conntrack, and leave
	// connections of netfilter to it. Nil: netfilter never translates.
	WatchNAT func(changed func(may bool, reason string)) (stop func(), err error)
	// TCPLiberal accepts TCP segments outside the window, except RSTs. It is for
	// networks in which some packets of a connection take another path.
	TCPLiberal bool
	// Refused receives a text about each refused address of a pod; nil: only the log
	// has it. It must not block.
	Refused func(note string)
	// FlowEvents selects the events that Events reads; "" means EventsOff.
	FlowEvents string
	// FlowEventsSample reports 1 of N flows; 0 means each. Refusals and drops are
	// not sampled.
	FlowEventsSample uint32
	// FlowEventsRate is the maximum number of flows that are reported for each Service
	// port in a second, and of its refusals and drops; 0 means no limit.
	FlowEventsRate uint32
	// ServiceMetrics counts connections, refusals and handshakes by Service port, and packets and bytes
	// without ServiceConnectionsOnly. ServiceMetricsTop exports metrics of so many ports, the most used
	// first; 0 means all.
	ServiceMetrics         bool
	ServiceConnectionsOnly bool
	ServiceMetricsTop      int
	// EndSockets ends connected TCP and UDP sockets that a socket hook has translated, when
	// their endpoint neither serves nor terminates any more. The decisions must have
	// Lingering endpoints (intent.Config).
	EndSockets bool
	// BalanceByLoad counts the active flows of endpoints and measures handshakes, for Services
	// that choose by them (intent.ServicePort.Balance).
	BalanceByLoad bool
	// MaglevSeed enters into the hashes of packets to Services that choose by tables
	// (intent.ServicePort.Table). It must be the same on all nodes.
	MaglevSeed string
	// DSRKeys authenticate what the nodes of a cluster tell each other about connections whose
	// endpoint answers the client directly (bpf/lib/dsr/option.h): the present key, and
	// optionally the one before it. Without a key, this node takes part in no such connection.
	DSRKeys []DSRKey
	// DSRPort is the UDP port by which the nodes find out what the network between them forwards,
	// and of packets that travel within datagrams (internal/dataplane/ebpf/dsrprobe). It must be the
	// same on all nodes. 0: neither.
	DSRPort uint16
	// LeavePrevious has Close leave the maps and programs of the release before, for a
	// rollback to it. The maps whose layout differs exist twice until then.
	LeavePrevious bool
	// LoadAll has New also load programs that no device may need, for a process that loses the
	// right to load them later.
	LoadAll bool
	// ForceClsact attaches as on kernels before 6.6.
	ForceClsact bool
}

// DSRKey is a key of SipHash.
type DSRKey [16]byte

// Defaults of Config.
const (
	DefaultFlowTableSize   = 262144
	DefaultDSRPort         = 6080 // IANA's for GUE
	DefaultMaxFrontends    = 1 << 19
	DefaultMaxEndpoints    = 1 << 20
	DefaultMaxSourceRanges = 1 << 18
	defaultSweepInterval   = 10 * time.Second
)

// Bounds of the flow table.
const (
	// FlowMemory is the kernel memory of a flow of FlowTableSize, in bytes: two entries
	// of 224, a quarter of an unconfirmed flow, and its slot in the ring.
	FlowMemory = 448 + (448+40)/4
	// MaxFlowTableSize is the kernel's limit in flows: a hash table has at most 2^27
	// buckets of 16 bytes, whose size must fit into 32 bits (kernel/bpf/hashtab.c), and
	// two entries for each flow.
	MaxFlowTableSize = 1 << 26 / 5 * 4
)

// Timeouts are the idle times after which a flow is deleted, by state, in whole
// seconds. Where kube-proxy sets a timeout of conntrack, the value is the same.
type Timeouts struct {
	TCPNew         time.Duration // before the handshake completes
	TCPEstablished time.Duration
	TCPClosing     time.Duration // one side has sent a FIN
	TCPClosed      time.Duration
	UDPNew         time.Duration // and of all flows of ICMP
	UDP            time.Duration // after a reply
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

// Validate checks the configuration and sets defaults.
func (c *Config) Validate() error {
	if !filepath.IsAbs(c.BPFFS) {
		return fmt.Errorf("bpffs %q: must be an absolute path", c.BPFFS)
	}
	if c.SocketHooks == "" {
		c.SocketHooks = HooksAll
	}
	if !slices.Contains(SocketHooks, c.SocketHooks) {
		return fmt.Errorf("socket hooks %q: use all, host or off", c.SocketHooks)
	}
	if !filepath.IsAbs(c.CgroupRoot) && c.SocketHooks != HooksOff {
		return fmt.Errorf("cgroup root %q: must be an absolute path", c.CgroupRoot)
	}
	if c.Bypass == "" {
		c.Bypass = BypassAuto
	}
	if !slices.Contains([]string{BypassAuto, BypassAlways, BypassNever}, c.Bypass) {
		return fmt.Errorf("bypass %q: use auto, always or never", c.Bypass)
	}
	if c.FlowEvents == "" {
		c.FlowEvents = EventsOff
	}
	if !slices.Contains([]string{EventsOff, EventsRefused, EventsOnDemand, EventsAll}, c.FlowEvents) {
		return fmt.Errorf("flow events %q: use off, refused, on-demand or all", c.FlowEvents)
	}
	if c.FlowEventsRate > MaxEventsRate {
		return fmt.Errorf("%d flow events in a second: the maximum is %d; 0 is no limit", c.FlowEventsRate, MaxEventsRate)
	}
	c.FlowEventsSample = max(c.FlowEventsSample, 1)
	if c.XDP == "" {
		c.XDP = XDPOff
	}
	if !slices.Contains(XDPModes, c.XDP) {
		return fmt.Errorf("xdp %q: use auto or off", c.XDP)
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
	c.MaxSourceRanges = orDefault(c.MaxSourceRanges, DefaultMaxSourceRanges)
	if c.Timeouts == (Timeouts{}) {
		c.Timeouts = DefaultTimeouts
	}
	if c.SweepInterval == 0 {
		c.SweepInterval = defaultSweepInterval
	}
	return nil
}

// Capacity is what the maps of Services have room for.
func (c *Config) Capacity() intent.Capacity {
	endpoints := int(orDefault(c.MaxEndpoints, DefaultMaxEndpoints))
	return intent.Capacity{
		Frontends: int(orDefault(c.MaxFrontends, DefaultMaxFrontends)), Endpoints: endpoints, Slots: slotsOf * endpoints,
		SourceRanges: int(orDefault(c.MaxSourceRanges, DefaultMaxSourceRanges)),
	}
}

// slotsOf is the number of slots for each endpoint: one for each policy.
const slotsOf = 2

// UsesXDP reports whether external devices get a program.
func (c *Config) UsesXDP() bool { return c.XDP == XDPAuto || c.XDP == XDPGeneric }

func orDefault(v, d uint32) uint32 {
	if v == 0 {
		return d
	}
	return v
}
