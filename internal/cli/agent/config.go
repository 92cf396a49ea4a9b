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
	OutlierEjection    bool
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
	Egress             string
	EgressConfig       string
	EgressAddresses    []string
	DSRKeyFile         string
	DropCapabilities   bool
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
	egressAddresses []netip.Prefix
	mapMemory       uint64 // kernel memory of the maps of eBPF at load, in bytes; 0 with other modes
	client          kube.Access
	fields          map[string]string // of --config, by the flag that their values replace
	remarks         []string          // about --config and kube-proxy's flags, for the log
}

// warnOfExposure logs that other machines can read profiles. They contain addresses of
// memory and the command line, and the server requires no credentials.
func (c *Config) warnOfExposure(log *slog.Logger) {
	addr, err := netip.ParseAddrPort(c.MetricsAddr)
	if c.Profiling && err == nil && !addr.Addr().IsLoopback() {
		log.Warn("--profiling serves /debug/pprof/ to every host that reaches --metrics-bind-address: give a loopback address",
			"address", c.MetricsAddr)
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
	if err := c.validateValues(); err != nil {
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
		return cli.UsageErrorf("--masquerade-all and --bypass never: a packet with the node's own address as its source cannot go through " +
			"the stack: give one of them")
	}
	if err := c.validateXDP(); err != nil {
		return err
	}
	if err := c.validateEgress(); err != nil {
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

// validateValues checks the flags that have a range of values.
func (c *Config) validateValues() error {
	if c.Takeover != "" && c.ProxyName != "" {
		return cli.UsageErrorf("--takeover and --service-proxy-name: Services without that label would not be served: give one of them")
	}
	if !slices.Contains(intent.MaglevSizes, c.MaglevSize) {
		return cli.UsageErrorf("--maglev-table-size %d: use one of %s", c.MaglevSize, strings.Trim(fmt.Sprint(intent.MaglevSizes), "[]"))
	}
	if c.SyncPeriod <= 0 {
		return cli.UsageErrorf("--iptables-sync-period %v: must be longer than 0", c.SyncPeriod)
	}
	if c.MinSyncPeriod < 0 || c.MinSyncPeriod > c.SyncPeriod {
		return cli.UsageErrorf("--iptables-min-sync-period %v: must be between 0 and --iptables-sync-period %v", c.MinSyncPeriod, c.SyncPeriod)
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
		OutlierEjection:       c.OutlierEjection && c.ProxyMode != "iptables",
		BalanceByLoad:         c.EBPF.BalanceByLoad && c.ProxyMode == "ebpf",
		MaglevSize:            c.maglevSize(),
		Forwarding:            c.Forwarding,
		CanForwardByDSR:       len(c.EBPF.DSRKeys) > 0,
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
	return func(p *intent.ServicePort) bool { return ebpf.NeedsFallback(p.ID.Protocol, p.Helper) != nil }
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
	p := proxymode.Config{Mode: c.ProxyMode, EBPF: c.EBPF, NFTables: c.NFTables, IPTables: c.IPTables,
		MaxSourceRanges: c.MaxSourceRanges, Log: log}
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
