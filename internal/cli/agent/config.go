package agent

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/proxymode"
)

// Config is the agent's command line. Call Validate after its fields are set.
type Config struct {
	// The options of the dataplanes. Validate sets those that follow from flags.
	EBPF     ebpf.Config
	NFTables nftables.Config
	IPTables iptables.Config

	NodeName           string
	ProxyMode          string
	Manifests          string
	Kubeconfig         string
	Master             string
	ConfigFile         string
	ClusterCIDR        []string
	DetectLocalMode    string
	PodBridge          string
	PodInterfacePrefix string
	NodePortAddresses  []string
	LocalhostNodePorts bool
	MasqueradeAll      bool
	AllowExternalIPs   bool
	BindHardFail       bool
	HealthzAddr        string
	MetricsAddr        string
	Profiling          bool
	Cleanup            bool
	Takeover           string
	HostPorts          bool
	MaglevSize         int
	MaxSourceRanges    uint32
	MaglevSeedFile     string
	Forwarding         string
	DSRKeyFile         string
	DropCapabilities   bool
	EBPFSCTP           bool
	ProxyName          string
	Conntrack          ConntrackConfig
	Influx             InfluxConfig
	OTLP               OTLPConfig
	API                APIConfig
	ServiceMetrics     string
	SyncPeriod         time.Duration
	MinSyncPeriod      time.Duration
	Verbosity          int
	LogFormat          string
	FeatureGates       []string

	// Filled by Validate.
	clusterCIDRs    []netip.Prefix
	nodePortCIDRs   []netip.Prefix
	nodePortPrimary bool
	mapMemory       uint64 // kernel memory of the maps of eBPF at load, in bytes; 0 with other modes
	client          kube.Access
	fields          map[string]string // of --config, by the flag that their values replace
	remarks         []string          // about --config and kube-proxy's flags, for the log
}

// defaultBPFFS is the directory of the instance that a node usually has.
const defaultBPFFS = "/sys/fs/bpf/spillway"

// AddFlags binds the flags. Flags that kube-proxy has keep its names and defaults.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	f.StringVar(&c.NodeName, "hostname-override", "", "Name of this node's Node object (default: the host name).")
	f.StringVar(&c.ProxyMode, "proxy-mode", "ebpf", "Dataplane: ebpf, nftables or iptables.")
	f.StringVar(&c.Manifests, "manifests", "", "Directory of Kubernetes YAML to serve instead of an API server. The agent watches it.")
	f.StringSliceVar(&c.ClusterCIDR, "cluster-cidr", nil, "Address ranges of pods, separated by commas.")
	f.StringVar(&c.DetectLocalMode, "detect-local-mode", "ClusterCIDR", "How nftables and iptables recognize packets of this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or InterfaceNamePrefix.")
	f.StringVar(&c.PodBridge, "pod-bridge-interface", "", "Bridge for --detect-local-mode=BridgeInterface.")
	f.StringVar(&c.PodInterfacePrefix, "pod-interface-name-prefix", "", "Device name prefix for --detect-local-mode=InterfaceNamePrefix.")
	f.StringSliceVar(&c.NodePortAddresses, "nodeport-addresses", nil, "Address ranges in which NodePorts are served, or 'primary' for the addresses of the Node object (default: all addresses of the node).")
	f.BoolVar(&c.LocalhostNodePorts, "localhost-nodeports", false, "Serve TCP and UDP NodePorts on 127.0.0.0/8 and ::1 to processes of the node's own network namespace (--proxy-mode ebpf). route_localnet stays off.")
	f.BoolVar(&c.HostPorts, "host-ports", false, "Serve the hostPort of containers of this node's Pods, at the addresses of --nodeport-addresses, beside or instead of the CNI's portmap plugin.")
	f.BoolVar(&c.MasqueradeAll, "masquerade-all", false, "Use the node's address as the source of every Service packet.")
	f.BoolVar(&c.AllowExternalIPs, "allow-external-ips", true, "Serve the externalIPs of Services. A user who may write Services can name any address there (CVE-2020-8554).")
	f.StringVar(&c.HealthzAddr, "healthz-bind-address", "0.0.0.0:10256", "IP:port of /healthz and /livez. Empty: not served.")
	f.StringVar(&c.MetricsAddr, "metrics-bind-address", "127.0.0.1:10249", "IP:port of /metrics and /proxyMode. Empty: not served.")
	f.BoolVar(&c.BindHardFail, "bind-address-hard-fail", false, "End the agent if the address of /healthz or /metrics cannot be had, instead of trying again.")
	f.BoolVar(&c.Profiling, "profiling", false, "Serve /debug/pprof/ beside /metrics.")
	f.BoolVar(&c.Cleanup, "cleanup", false, "Remove everything of this instance from the kernel, and exit.")
	f.StringVar(&c.Takeover, "takeover", "", "kube-proxy: remove kube-proxy's rules from the kernel when this agent serves and no kube-proxy runs here.")
	f.StringVar(&c.EBPF.CgroupRoot, "cgroup-root", "", "cgroup2 directory whose processes use Services (default: where cgroup2 is mounted).")
	f.StringVar(&c.EBPF.SocketHooks, "socket-hooks", ebpf.HooksAll, "Sockets that eBPF translates when they connect: all, host (of the node's own network namespace) or off. The packets of other pods are translated one by one. With off, processes of the node have no Services.")
	f.BoolVar(&c.EBPF.OutlierEjection, "outlier-ejection", false, "Let the annotation spillway.dev/outlier-ejection of a Service leave out endpoints that do not accept connections. With --proxy-mode ebpf it attaches one more program to the TCP sockets of all processes; with nftables, rules count the handshakes of such Services; iptables cannot.")
	f.BoolVar(&c.EBPF.BalanceByLoad, "balance-by-load", false, "Let the annotation spillway.dev/balance of a Service choose endpoints by their active flows (least) or by their handshake time (latency). It attaches two more programs to the sockets of all processes (--proxy-mode ebpf).")
	f.IntVar(&c.MaglevSize, "maglev-table-size", intent.DefaultMaglevSize, "Entries of the table of a Service port with spillway.dev/balance: maglev: 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521 or 131071, the same on all nodes, at least 100 times its endpoints (--proxy-mode ebpf).")
	f.Uint32Var(&c.MaxSourceRanges, "max-source-ranges", 0, "Source ranges (loadBalancerSourceRanges) of all Services together, each once for each port, that the node has room for. A namespace gets half of what others leave. 0: 262144 for ebpf, 65536 for iptables, 16384 for nftables.")
	f.StringVar(&c.MaglevSeedFile, "maglev-seed-file", "", "File with a text that enters into the hashes of spillway.dev/balance: maglev, the same on all nodes (--proxy-mode ebpf). A client who does not know it cannot compute which endpoint a port of its own gets. It can still try ports, if endpoints answer differently.")
	f.StringVar(&c.Forwarding, "forwarding", intent.SNAT, "How clients' packets get to endpoints on other nodes: snat (with this node's address), hybrid (TCP of Services with spillway.dev/balance: maglev keeps the client's address, and the endpoint's node answers the client) or dsr (UDP too). The annotation spillway.dev/forwarding of a Service takes precedence. hybrid and dsr need --proxy-mode ebpf, and --dsr-key-file on all nodes.")
	f.StringVar(&c.EBPF.XDP, "xdp", ebpf.XDPOff, "Where to send packets of known flows on, and drop SYNs that a Service drops, before the kernel allocates memory for them: auto (network devices whose driver runs XDP programs) or off. Needs --proxy-mode ebpf. The value generic is for tests: any device, and slow.")
	f.StringVar(&c.DSRKeyFile, "dsr-key-file", "", "File with the cluster's secret, by which nodes prove to each other that they forward a client's connection. Its first line is the secret, of 16 characters or more. A second line is the one before it, which is accepted too.")
	f.Uint16Var(&c.EBPF.DSRPort, "dsr-port", ebpf.DefaultDSRPort, "UDP port, on all nodes the same, by which nodes with --dsr-key-file find out what the network between them forwards. Where it drops IP options, clients' packets travel within datagrams to that port. 0: no probes, and no datagrams.")
	f.BoolVar(&c.EBPF.EndSockets, "end-sockets", false, "End connected sockets that a socket hook has translated when their endpoint neither serves nor terminates any more: the process gets ECONNABORTED (--proxy-mode ebpf). Sockets of pods need CAP_SYS_ADMIN, and /run/netns of the host.")
	f.StringVar(&c.EBPF.BPFFS, "bpffs", defaultBPFFS, "Directory of this instance in a bpf file system.")
	f.BoolVar(&c.DropCapabilities, "drop-capabilities", false, "Drop CAP_SYS_ADMIN and CAP_PERFMON after the dataplane is loaded. Conntrack of other network namespaces is then neither measured nor tuned.")
	f.BoolVar(&c.EBPF.LeavePrevious, "leave-previous-layout", false, "Leave the maps and programs of the release before when the agent ends, for a rollback to it (--proxy-mode ebpf).")
	f.BoolVar(&c.EBPFSCTP, "ebpf-sctp", false, "Serve SCTP with eBPF, not with nftables and conntrack (--proxy-mode ebpf). Processes of the node, as in host-network pods, then have no SCTP Services.")
	f.StringVar(&c.ProxyName, "service-proxy-name", "", "Value of the label service.kubernetes.io/service-proxy-name of the Services to serve (default: Services without the label).")
	f.StringVar(&c.EBPF.Bypass, "bypass", "auto", "Whether packets to a pod bypass netfilter: auto (unless a NetworkPolicy selects the pod), always or never.")
	c.Conntrack.addFlags(f)
	f.BoolVar(&c.EBPF.TCPLiberal, "conntrack-tcp-be-liberal", false, "Compare only RSTs with the window of their TCP connection, not all segments (--proxy-mode ebpf).")
	c.Influx.addFlags(f)
	c.OTLP.addFlags(f)
	c.API.addFlags(f)
	c.addEventsFlags(f)
	f.DurationVar(&c.SyncPeriod, "iptables-sync-period", 30*time.Second, "Time between full syncs, on every dataplane.")
	f.DurationVar(&c.MinSyncPeriod, "iptables-min-sync-period", 100*time.Millisecond, "Least time between syncs, on every dataplane. If not given, 10ms for ebpf.")
	f.BoolVar(&c.NFTables.ServiceCounters, "nftables-service-counters", false, "With nftables, count the connections to each address and port of a Service: nft list set inet spillway services4-counters shows them.")
	f.StringVar(&c.IPTables.VerifyPartialSync, "verify-partial-sync", iptables.VerifyOff, "With iptables, compare the kernel's rules with the wanted ones after partial syncs: off, sampled (1% of the time at most) or always.")
	f.IntVarP(&c.Verbosity, "v", "v", 0, "Log level: 0 is info, 4 and more is debug.")
	f.StringVar(&c.LogFormat, "log-format", "text", "Log format: text or json.")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "Kubeconfig file for the API server (default, without --manifests: the Pod's own account).")
	f.StringVar(&c.Master, "master", "", "Address of the API server, instead of the kubeconfig's.")
	f.StringVar(&c.ConfigFile, "config", "", "KubeProxyConfiguration file (kubeproxy.config.k8s.io/v1alpha1). It replaces the flags that it has fields for, except --proxy-mode, --hostname-override and --v.")
	c.addKubeProxyFlags(f)
}

// warnOfIdleFlags logs flags without an effect in this --proxy-mode. It omits
// kube-proxy's flags for other modes: operators keep them.
func (c *Config) warnOfIdleFlags(log *slog.Logger) {
	if c.NFTables.ServiceCounters && c.ProxyMode != "nftables" {
		log.Warn("--nftables-service-counters has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.EBPF.LeavePrevious && c.ProxyMode != "ebpf" {
		log.Warn("--leave-previous-layout has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.EBPFSCTP && c.ProxyMode != "ebpf" {
		log.Warn("--ebpf-sctp has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.EBPF.SocketHooks != ebpf.HooksAll && c.ProxyMode != "ebpf" {
		log.Warn("--socket-hooks has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.EBPF.EndSockets && c.ProxyMode != "ebpf" {
		log.Warn("--end-sockets has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	switch {
	case !c.LocalhostNodePorts:
	case c.ProxyMode != "ebpf":
		log.Warn("--localhost-nodeports has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	case len(c.intent().LoopbackNodePorts()) == 0:
		log.Warn("--localhost-nodeports serves nothing: --nodeport-addresses has no loopback address: give ranges that contain 127.0.0.1 or ::1", "nodeport-addresses", strings.Join(c.NodePortAddresses, ","))
	}
	if c.MaglevSize != intent.DefaultMaglevSize && c.ProxyMode != "ebpf" {
		log.Warn("--maglev-table-size has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.EBPF.ServiceMetrics && c.ProxyMode != "ebpf" {
		log.Warn("--service-metrics has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
	if c.IPTables.VerifyPartialSync != iptables.VerifyOff && c.ProxyMode != "iptables" {
		log.Warn("--verify-partial-sync has no meaning with this --proxy-mode", "proxy-mode", c.ProxyMode)
	}
}

// warnOfExposure logs that other machines can read profiles. They contain addresses of
// memory and the command line, and the server requires no credentials.
func (c *Config) warnOfExposure(log *slog.Logger) {
	addr, err := netip.ParseAddrPort(c.MetricsAddr)
	if c.Profiling && err == nil && !addr.Addr().IsLoopback() {
		log.Warn("--profiling serves /debug/pprof/ to every host that reaches --metrics-bind-address: give a loopback address", "address", c.MetricsAddr)
	}
}

// warnOfRemarks logs remarks on the configuration.
func (c *Config) warnOfRemarks(log *slog.Logger) {
	for _, r := range c.remarks {
		log := log
		if c.ConfigFile != "" {
			log = log.With("file", c.ConfigFile)
		}
		log.Warn("configuration", "what", r)
	}
	if what := c.Conntrack.remark(); what != "" && c.ProxyMode == "ebpf" {
		log.Warn("configuration", "what", what)
	}
}

// Validate checks the command line and sets defaults that depend on the machine. Its
// errors are UsageErrors.
func (c *Config) Validate() error { return c.inFile(c.validate()) }

func (c *Config) validate() error {
	if err := c.validateChoices(); err != nil {
		return err
	}
	if err := c.Conntrack.validate(); err != nil {
		return err
	}
	if err := c.Influx.validate(); err != nil {
		return err
	}
	if err := c.OTLP.validate(); err != nil {
		return err
	}
	if err := c.API.validate(); err != nil {
		return err
	}
	if err := c.validateEvents(); err != nil {
		return err
	}
	if c.LocalhostNodePorts && c.ProxyMode == "ebpf" && c.EBPF.SocketHooks == ebpf.HooksOff {
		return cli.UsageErrorf("--localhost-nodeports and --socket-hooks off: only socket hooks serve NodePorts on loopback: give one of them")
	}
	if c.MasqueradeAll && c.EBPF.Bypass == "never" {
		return cli.UsageErrorf("--masquerade-all and --bypass never: a packet with the node's own address as its source cannot go through the stack: give one of them")
	}
	if err := c.validateXDP(); err != nil {
		return err
	}
	if err := c.validateForwarding(); err != nil {
		return err
	}
	if err := c.readMaglevSeed(); err != nil {
		return err
	}
	if err := c.validateAddresses(); err != nil {
		return err
	}
	if err := c.validateNodeName(); err != nil {
		return err
	}
	if err := c.validatePaths(); err != nil {
		return err
	}
	if err := c.fitMaps(readMemory()); err != nil {
		return err
	}
	if err := c.intent().Validate(); err != nil {
		return cli.UsageErrorf("%v", err)
	}
	return nil
}

// The choices of --bypass and --log-format.
var (
	bypasses   = []string{"auto", "always", "never"}
	logFormats = []string{"text", "json"}
)

// validateChoices checks the flags that have a set or a range of values.
func (c *Config) validateChoices() error {
	if modes := proxymode.Names(); !slices.Contains(modes, c.ProxyMode) {
		return cli.UsageErrorf("--proxy-mode %q: not a proxy mode: use %s", c.ProxyMode, strings.Join(modes, ", "))
	}
	if !slices.Contains(bypasses, c.EBPF.Bypass) {
		return cli.UsageErrorf("--bypass %q: not a choice: use auto, always or never", c.EBPF.Bypass)
	}
	if !slices.Contains(ebpf.SocketHooks, c.EBPF.SocketHooks) {
		return cli.UsageErrorf("--socket-hooks %q: not a choice: use %s", c.EBPF.SocketHooks, strings.Join(ebpf.SocketHooks, ", "))
	}
	if err := c.validateTakeover(); err != nil {
		return err
	}
	if !slices.Contains(intent.MaglevSizes, c.MaglevSize) {
		return cli.UsageErrorf("--maglev-table-size %d: use one of %s", c.MaglevSize, strings.Trim(fmt.Sprint(intent.MaglevSizes), "[]"))
	}
	if !slices.Contains(logFormats, c.LogFormat) {
		return cli.UsageErrorf("--log-format %q: not a format: use text or json", c.LogFormat)
	}
	if c.SyncPeriod <= 0 {
		return cli.UsageErrorf("--iptables-sync-period %v: must be longer than 0", c.SyncPeriod)
	}
	if c.MinSyncPeriod < 0 || c.MinSyncPeriod > c.SyncPeriod {
		return cli.UsageErrorf("--iptables-min-sync-period %v: must be between 0 and --iptables-sync-period %v", c.MinSyncPeriod, c.SyncPeriod)
	}
	if !slices.Contains(iptables.VerifyChoices, c.IPTables.VerifyPartialSync) {
		return cli.UsageErrorf("--verify-partial-sync %q: not a choice: use %s", c.IPTables.VerifyPartialSync, strings.Join(iptables.VerifyChoices, ", "))
	}
	if bad := validation.IsValidLabelValue(c.ProxyName); len(bad) > 0 {
		return cli.UsageErrorf("--service-proxy-name %q: no label can have this value: %s", c.ProxyName, bad[0])
	}
	return nil
}

// validateAddresses parses address ranges, and completes the addresses of the servers.
func (c *Config) validateAddresses() (err error) {
	if c.clusterCIDRs, err = parsePrefixes("--cluster-cidr", c.ClusterCIDR); err != nil {
		return err
	}
	if c.nodePortPrimary = len(c.NodePortAddresses) == 1 && c.NodePortAddresses[0] == "primary"; !c.nodePortPrimary {
		if c.nodePortCIDRs, err = parsePrefixes("--nodeport-addresses", c.NodePortAddresses); err != nil {
			return err
		}
	}
	if c.HealthzAddr, err = bindAddress("--healthz-bind-address", c.HealthzAddr, 10256); err != nil {
		return err
	}
	if c.MetricsAddr, err = bindAddress("--metrics-bind-address", c.MetricsAddr, 10249); err != nil {
		return err
	}
	return nil
}

func (c *Config) validateTakeover() error {
	switch {
	case c.Takeover == "":
	case c.Takeover != "kube-proxy":
		return cli.UsageErrorf("--takeover %q: not a proxy that can be taken over from: use kube-proxy", c.Takeover)
	case c.ProxyName != "":
		return cli.UsageErrorf("--takeover and --service-proxy-name: Services without that label would not be served: give one of them")
	}
	return nil
}

// validateNodeName checks the name against the rule for Node objects.
func (c *Config) validateNodeName() error {
	what := fmt.Sprintf("--hostname-override %q", c.NodeName)
	if c.NodeName != "" {
		c.NodeName = strings.ToLower(strings.TrimSpace(c.NodeName)) // as kube-proxy does
	} else {
		host, err := os.Hostname()
		if err != nil {
			return cli.UsageErrorf("find the host name: %v: give --hostname-override", err)
		}
		c.NodeName = strings.ToLower(host) // as Kubernetes does with Node names
		what = fmt.Sprintf("host name %q", c.NodeName)
	}
	if len(validation.IsDNS1123Subdomain(c.NodeName)) > 0 {
		return cli.UsageErrorf("%s: no Node can have this name: give --hostname-override as 'kubectl get nodes' shows it: "+
			"lower-case letters, digits, '-' and '.', at most %d", what, validation.DNS1123SubdomainMaxLength)
	}
	return nil
}

func (c *Config) validatePaths() error {
	if !filepath.IsAbs(c.EBPF.BPFFS) {
		return cli.UsageErrorf("--bpffs %q: must be an absolute path", c.EBPF.BPFFS)
	}
	if c.EBPF.CgroupRoot != "" && !filepath.IsAbs(c.EBPF.CgroupRoot) {
		return cli.UsageErrorf("--cgroup-root %q: must be an absolute path", c.EBPF.CgroupRoot)
	}
	for flag, value := range map[string]string{"--kubeconfig": c.Kubeconfig, "--master": c.Master} {
		if value != "" && c.Manifests != "" {
			return cli.UsageErrorf("%s and --manifests: two sources: give one of them", flag)
		}
	}
	return nil
}

// intent is the part of the command line that intent needs.
func (c *Config) intent() intent.Config {
	return intent.Config{
		NodeName:          c.NodeName,
		ProxyName:         c.ProxyName,
		NodePortAddresses: c.nodePortCIDRs,

		LocalhostNodePorts: c.LocalhostNodePorts,

		ClusterCIDRs:      c.clusterCIDRs,
		MasqueradeAll:     c.MasqueradeAll,
		RefuseExternalIPs: !c.AllowExternalIPs,
		NodePortPrimary:   c.nodePortPrimary,
		DetectLocal:       intent.LocalMode(c.DetectLocalMode),
		LocalInterface:    c.localInterface(),
		ExpectNode:        c.Manifests == "",
		LocalBySource:     c.Manifests == "" && c.ProxyMode != "ebpf",
		Servers:           c.servers(),

		IgnoreNetworkPolicies: c.EBPF.Bypass == "always",
		Lingering:             c.EBPF.EndSockets && c.ProxyMode == "ebpf",
		OutlierEjection:       c.EBPF.OutlierEjection && c.ProxyMode != "iptables",
		BalanceByLoad:         c.EBPF.BalanceByLoad && c.ProxyMode == "ebpf",
		MaglevSize:            c.maglevSize(),
		Forwarding:            c.Forwarding,
		CanForwardDirectly:    len(c.EBPF.DSRKeys) > 0,
		FilterSYNs:            c.EBPF.XDP != ebpf.XDPOff,
		HostPorts:             c.HostPorts,
		Capacity:              proxymode.Capacity(c.Dataplanes(nil)),
		FallsBack:             c.fallsBack(),
	}
}

// fallsBack returns which ports mode ebpf leaves to nftables; nil: another mode carries all.
func (c *Config) fallsBack() func(*intent.ServicePort) bool {
	if c.ProxyMode != "ebpf" {
		return nil
	}
	return func(p *intent.ServicePort) bool { return ebpf.GivesAway(p.ID.Protocol, p.Helper, c.EBPFSCTP) != nil }
}

// maglevSize returns 0 for a dataplane without tables.
func (c *Config) maglevSize() int {
	if c.ProxyMode != "ebpf" {
		return 0
	}
	return c.MaglevSize
}

// servers returns the addresses of the agent's HTTP servers, after Validate.
func (c *Config) servers() (list []netip.AddrPort) {
	for _, addr := range []string{c.HealthzAddr, c.MetricsAddr, c.API.Listen} {
		if strings.HasPrefix(addr, ":") {
			addr = "[::]" + addr
		}
		if server, err := netip.ParseAddrPort(addr); err == nil { // else not served
			list = append(list, server)
		}
	}
	return list
}

// Dataplanes is the part of the command line that the dataplanes need. The caller may
// set EBPF.Refused and Takeover.
func (c *Config) Dataplanes(log *slog.Logger) proxymode.Config {
	p := proxymode.Config{Mode: c.ProxyMode, EBPF: c.EBPF, NFTables: c.NFTables, IPTables: c.IPTables, MaxSourceRanges: c.MaxSourceRanges, Log: log}
	p.EBPF.SCTP = c.EBPFSCTP
	p.EBPF.Timeouts = c.Conntrack.timeouts()
	p.EBPF.LoadAll = c.DropCapabilities
	return p
}

// localInterface returns the name or the prefix for --detect-local-mode.
func (c *Config) localInterface() string {
	switch intent.LocalMode(c.DetectLocalMode) {
	case intent.LocalBridgeInterface:
		return c.PodBridge
	case intent.LocalInterfaceNamePrefix:
		return c.PodInterfacePrefix
	}
	return ""
}

// parsePrefixes parses ranges without bits beyond the prefix length. kube-proxy reads
// 10.244.1.5/16 as 10.244.0.0/16, which its documentation does not mention. The author
// may as well mean 10.244.1.5/32.
func parsePrefixes(flag string, values []string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, v := range values {
		p, err := netip.ParsePrefix(strings.TrimSpace(v))
		if err != nil {
			return nil, cli.UsageErrorf("%s %q: not an address range: write one like 10.0.0.0/8 or fd00::/8", flag, v)
		}
		if exact := unmapped(p).Masked(); p != exact {
			return nil, cli.UsageErrorf("%s %q: not how this address range is written: write %s", flag, v, exact)
		}
		out = append(out, p)
	}
	return out, nil
}

// unmapped converts a range of IPv4-mapped addresses, ::ffff:10.0.0.0/104, to the IPv4
// range: no packet has a mapped address.
func unmapped(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

// bindAddress completes "IP" to "IP:port", as kube-proxy does.
func bindAddress(flag, v string, port uint16) (string, error) {
	if v == "" {
		return "", nil
	}
	if a, err := netip.ParseAddr(v); err == nil {
		return netip.AddrPortFrom(a, port).String(), nil
	}
	host, p, err := net.SplitHostPort(v)
	if err == nil {
		_, err = strconv.ParseUint(p, 10, 16)
	}
	if err == nil && host != "" {
		_, err = netip.ParseAddr(host)
	}
	if err != nil {
		return "", cli.UsageErrorf("%s %q: not an address: write IP:port, or leave it empty to serve nothing", flag, v)
	}
	return v, nil
}
