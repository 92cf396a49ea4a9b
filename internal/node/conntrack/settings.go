package conntrack

// sysctlDir has the files of conntrack's sysctls.
const sysctlDir = "/proc/sys/net/netfilter"

// SysctlPrefix stands before the name of a file of sysctlDir in the name of its sysctl.
const SysctlPrefix = "net.netfilter."

// Files of sysctlDir (Documentation/networking/nf_conntrack-sysctl.rst). Sizes are numbers of entries,
// buckets or expectations; timeouts are in seconds.
const (
	SysctlCount     = "nf_conntrack_count"
	SysctlMax       = "nf_conntrack_max"
	SysctlBuckets   = "nf_conntrack_buckets"
	SysctlExpectMax = "nf_conntrack_expect_max"
	SysctlLiberal   = "nf_conntrack_tcp_be_liberal" // 1: do not compare segments with the window

	SysctlUDP       = "nf_conntrack_udp_timeout"
	SysctlUDPStream = "nf_conntrack_udp_timeout_stream"
	SysctlTimeWait  = "nf_conntrack_tcp_timeout_time_wait"
	SysctlFinWait   = "nf_conntrack_tcp_timeout_fin_wait"
)

// Flags of the agent for conntrack. All but the last two are kube-proxy's
// (cmd/kube-proxy/app/options.go of Kubernetes).
const (
	FlagMaxPerCore      = "conntrack-max-per-core"
	FlagMin             = "conntrack-min"
	FlagTCPEstablished  = "conntrack-tcp-timeout-established"
	FlagTCPCloseWait    = "conntrack-tcp-timeout-close-wait"
	FlagTCPLiberal      = "conntrack-tcp-be-liberal"
	FlagUDP             = "conntrack-udp-timeout"
	FlagUDPStream       = "conntrack-udp-timeout-stream"
	FlagAutopilot       = "conntrack-autopilot"
	FlagAutopilotMemory = "conntrack-autopilot-memory"
)
