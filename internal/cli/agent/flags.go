package agent

import (
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent/kubeproxyconfig"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/proxymode"
)

// flag is a row of the table of the agent's flags, from which the flags, their help, the
// reference and the checks of their values follow.
type flag struct {
	name, short string
	to          variable
	// modes are the proxy modes that the flag concerns; nil: all.
	modes []string
	// field is the field of KubeProxyConfiguration that replaces the flag; "": none. kube-proxy
	// has these flags.
	field string
	// choices are the values that a shell completes; the agent refuses others than these and
	// the default. Code refuses the values of a flag that is open.
	choices []string
	open    bool
	usage   string
}

// flagGroup is the flags below one heading of the help.
type flagGroup struct {
	name  string
	flags []flag
}

// The modes of flags that do not concern all of them.
var (
	onEBPF      = []string{"ebpf"}
	onNFTables  = []string{"nftables"}
	onIPTables  = []string{"iptables"}
	onNetfilter = []string{"nftables", "iptables"}
	onWatching  = []string{"ebpf", "nftables"} // count handshakes
)

// flagTable returns the flags in the order of the help. Flags that kube-proxy has keep its
// names and defaults.
func (c *Config) flagTable() []flagGroup {
	return []flagGroup{
		{"Source", c.sourceFlags()},
		{"Dataplane", c.dataplaneFlags()},
		{"Service", c.serviceFlags()},
		{"Endpoint", c.endpointFlags()},
		{"Egress", c.egressFlags()},
		{"Flow Table", c.flowTableFlags()},
		{"Conntrack Autopilot", c.Conntrack.flags()},
		{"Sync", c.syncFlags()},
		{"Health and Metrics", append(c.serverFlags(), c.Influx.flags()...)},
		{"OpenTelemetry", c.OTLP.flags()},
		{"API", c.API.flags()},
		{"Flow Events", c.eventsFlags()},
		{"Log", c.logFlags()},
	}
}

// flags returns the flags of all groups.
func (c *Config) flags() (all []flag) {
	for _, g := range c.flagTable() {
		all = append(all, g.flags...)
	}
	return all
}

func (c *Config) sourceFlags() []flag {
	return []flag{
		{name: "hostname-override", to: at(&c.NodeName, ""), usage: "Name of this node's Node object (default: the host name)."},
		{name: "manifests", to: at(&c.Manifests, ""),
			usage: "Directory of Kubernetes YAML to serve instead of an API server. The agent watches it."},
		{name: "service-proxy-name", to: at(&c.ProxyName, ""),
			usage: "Value of the label service.kubernetes.io/service-proxy-name of the Services to serve (default: Services without the label)."},
		{name: "kubeconfig", to: at(&c.Kubeconfig, ""), field: "clientConnection.kubeconfig",
			usage: "Kubeconfig file for the API server (default, without --manifests: the Pod's own account)."},
		{name: "master", to: at(&c.Master, ""), usage: "Address of the API server, instead of the kubeconfig's."},
		{name: "config", to: at(&c.ConfigFile, ""),
			usage: "KubeProxyConfiguration file (kubeproxy.config.k8s.io/v1alpha1). It replaces the flags that it has fields for, " +
				"except --proxy-mode, --hostname-override and --v."},
		{name: "kube-api-qps", to: at(&c.client.QPS, 0), field: "clientConnection.qps",
			usage: "Requests to the API server in a second (default: 5)."},
		{name: "kube-api-burst", to: at(&c.client.Burst, 0), field: "clientConnection.burst",
			usage: "Requests to the API server at once (default: 10)."},
		{name: "kube-api-content-type", to: at(&c.client.ContentType, ""), field: "clientConnection.contentType",
			usage: "Content type of objects from the API server (default: application/vnd.kubernetes.protobuf)."},
	}
}

// defaultBPFFS is the directory of the instance that a node usually has.
const defaultBPFFS = "/sys/fs/bpf/spillway"

func (c *Config) dataplaneFlags() []flag {
	return []flag{
		{name: "proxy-mode", to: at(&c.ProxyMode, "ebpf"), choices: proxymode.Names(), usage: "Dataplane: ebpf, nftables or iptables."},
		{name: "cleanup", to: at(&c.Cleanup, false), usage: "Remove everything of this instance from the kernel, and exit."},
		{name: "takeover", to: at(&c.Takeover, ""), choices: []string{"kube-proxy"},
			usage: "kube-proxy: remove kube-proxy's rules from the kernel when this agent serves and no kube-proxy runs here."},
		{name: "cgroup-root", to: at(&c.EBPF.CgroupRoot, ""),
			usage: "cgroup2 directory whose processes use Services (default: where cgroup2 is mounted)."},
		{name: "socket-hooks", to: at(&c.EBPF.SocketHooks, ebpf.HooksAll), modes: onEBPF, choices: ebpf.SocketHooks,
			usage: "Sockets that eBPF translates when they connect: all, host (of the node's own network namespace) or off. The packets of " +
				"other pods are translated one by one. With off, processes of the node have no Services."},
		{name: "xdp", to: at(&c.EBPF.XDP, ebpf.XDPOff), modes: onEBPF,
			usage: "Where to send packets of known flows on, and drop SYNs that a Service drops, before the kernel allocates memory for them: " +
				"auto (network devices whose driver runs XDP programs) or off. The value generic is for tests: any device, and slow."},
		{name: "end-sockets", to: at(&c.EBPF.EndSockets, false), modes: onEBPF,
			usage: "End connected sockets that a socket hook has translated when their endpoint neither serves nor terminates any more: the " +
				"process gets ECONNABORTED. Sockets of pods need CAP_SYS_ADMIN, and /run/netns of the host."},
		{name: "bpffs", to: at(&c.EBPF.BPFFS, defaultBPFFS), usage: "Directory of this instance in a bpf file system."},
		{name: "drop-capabilities", to: at(&c.DropCapabilities, false),
			usage: "Drop CAP_SYS_ADMIN and CAP_PERFMON after the dataplane is loaded. Conntrack of other network namespaces is then neither " +
				"measured nor tuned."},
		{name: "leave-previous-layout", to: at(&c.EBPF.LeavePrevious, false), modes: onEBPF,
			usage: "Leave the maps and programs of the release before when the agent ends, for a rollback to it."},
		{name: "bypass", to: at(&c.EBPF.Bypass, ebpf.BypassAuto), choices: []string{ebpf.BypassAuto, ebpf.BypassAlways, ebpf.BypassNever},
			usage: "Whether packets to a pod bypass netfilter: auto (unless a NetworkPolicy selects the pod), always or never."},
	}
}

func (c *Config) serviceFlags() []flag {
	return []flag{
		{name: "cluster-cidr", to: at(&c.ClusterCIDR, nil), field: "clusterCIDR", usage: "Address ranges of pods, separated by commas."},
		{name: "detect-local-mode", to: at(&c.DetectLocalMode, string(intent.LocalClusterCIDR)), modes: onNetfilter, field: "detectLocalMode",
			choices: []string{string(intent.LocalClusterCIDR), string(intent.LocalNodeCIDR),
				string(intent.LocalBridgeInterface), string(intent.LocalInterfaceNamePrefix)}, open: true,
			usage: "How nftables and iptables recognize packets of this node's pods: ClusterCIDR, NodeCIDR, BridgeInterface or " +
				"InterfaceNamePrefix."},
		{name: "pod-bridge-interface", to: at(&c.PodBridge, ""), modes: onNetfilter, field: "detectLocal.bridgeInterface",
			usage: "Bridge for --detect-local-mode=BridgeInterface."},
		{name: "pod-interface-name-prefix", to: at(&c.PodInterfacePrefix, ""), modes: onNetfilter, field: "detectLocal.interfaceNamePrefix",
			usage: "Device name prefix for --detect-local-mode=InterfaceNamePrefix."},
		{name: "nodeport-addresses", to: at(&c.NodePortAddresses, nil), field: "nodePortAddresses",
			usage: "Address ranges in which NodePorts are served, or 'primary' for the addresses of the Node object (default: all addresses of " +
				"the node)."},
		{name: "localhost-nodeports", to: at(&c.LocalhostNodePorts, false), modes: onEBPF,
			usage: "Serve TCP and UDP NodePorts on 127.0.0.0/8 and ::1 to processes of the node's own network namespace. route_localnet stays off."},
		{name: "host-ports", to: at(&c.HostPorts, false),
			usage: "Serve the hostPort of containers of this node's Pods, at the addresses of --nodeport-addresses, beside or instead of the " +
				"CNI's portmap plugin."},
		{name: "masquerade-all", to: at(&c.MasqueradeAll, false), field: "masqueradeAll",
			usage: "Use the node's address as the source of every Service packet."},
		{name: "allow-external-ips", to: at(&c.AllowExternalIPs, true),
			usage: "Serve the externalIPs of Services. A user who may write Services can name any address there (CVE-2020-8554)."},
		{name: "max-source-ranges", to: at(&c.MaxSourceRanges, 0),
			usage: "Source ranges (loadBalancerSourceRanges) of all Services together, each once for each port, that the node has room for. A " +
				"namespace gets half of what others leave. 0: 262144 for ebpf, 65536 for iptables, 16384 for nftables."},
		{name: "feature-gates", to: at(&c.FeatureGates, nil), field: "featureGates",
			usage: "Feature gates: " + kubeproxyconfig.GateExternalIPs +
				"=false is --allow-external-ips=false. Other gates of kube-proxy are named in the log and ignored."},
	}
}

// endpointFlags returns the flags that say which endpoint a client gets, and how packets get there.
func (c *Config) endpointFlags() []flag {
	return []flag{
		{name: "outlier-ejection", to: at(&c.OutlierEjection, false), modes: onWatching,
			usage: "Let the annotation spillway.dev/outlier-ejection of a Service leave out endpoints that do not accept connections. With " +
				"--proxy-mode ebpf it attaches one more program to the TCP sockets of all processes; with nftables, rules count the handshakes of " +
				"such Services."},
		{name: "balance-by-load", to: at(&c.EBPF.BalanceByLoad, false), modes: onEBPF,
			usage: "Let the annotation spillway.dev/balance of a Service choose endpoints by their active flows (least) or by their handshake " +
				"time (latency). It attaches two more programs to the sockets of all processes."},
		{name: "maglev-table-size", to: at(&c.MaglevSize, intent.DefaultMaglevSize), modes: onEBPF,
			usage: "Entries of the table of a Service port with spillway.dev/balance: maglev: 251, 509, 1021, 2039, 4093, 8191, 16381, 32749, " +
				"65521 or 131071, the same on all nodes, at least 100 times its endpoints."},
		{name: "maglev-seed-file", to: at(&c.MaglevSeedFile, ""), modes: onEBPF,
			usage: "File with a text that enters into the hashes of spillway.dev/balance: maglev, the same on all nodes. A client who does not " +
				"know it cannot compute which endpoint a port of its own gets. It can still try ports, if endpoints answer differently."},
		{name: "forwarding", to: at(&c.Forwarding, intent.SNAT), choices: intent.Forwardings,
			usage: "How clients' packets get to endpoints on other nodes: snat (with this node's address), hybrid (TCP of Services with " +
				"spillway.dev/balance: maglev keeps the client's address, and the endpoint's node answers the client) or dsr (UDP too). The " +
				"annotation spillway.dev/forwarding of a Service takes precedence. hybrid and dsr need --proxy-mode ebpf, and --dsr-key-file on " +
				"all nodes."},
		{name: "dsr-key-file", to: at(&c.DSRKeyFile, ""), modes: onEBPF,
			usage: "File with the cluster's secret, by which nodes prove to each other that they forward a client's connection. Its first line " +
				"is the secret, of 16 characters or more. A second line is the one before it, which is accepted too."},
		{name: "dsr-port", to: at(&c.EBPF.DSRPort, ebpf.DefaultDSRPort), modes: onEBPF,
			usage: "UDP port, on all nodes the same, by which nodes with --dsr-key-file find out what the network between them forwards. Where " +
				"it drops IP options, clients' packets travel within datagrams to that port. 0: no probes, and no datagrams."},
	}
}

func (c *Config) syncFlags() []flag {
	return []flag{
		{name: "iptables-sync-period", to: at(&c.SyncPeriod, 30*time.Second), field: "syncPeriod",
			usage: "Time between full syncs, on every dataplane."},
		{name: "iptables-min-sync-period", to: at(&c.MinSyncPeriod, 100*time.Millisecond), field: "minSyncPeriod",
			usage: "Least time between syncs, on every dataplane. If not given, 10ms for ebpf."},
		{name: "nftables-service-counters", to: at(&c.NFTables.ServiceCounters, false), modes: onNFTables,
			usage: "Count the connections to each address and port of a Service: nft list set inet spillway services4-counters shows them."},
		{name: "verify-partial-sync", to: at(&c.IPTables.VerifyPartialSync, iptables.VerifyOff), modes: onIPTables,
			choices: iptables.VerifyChoices, usage: "Compare the kernel's rules with the wanted ones after partial syncs: off, sampled (1% of " +
				"the time at most) or always."},
	}
}

func (c *Config) serverFlags() []flag {
	return []flag{
		{name: "healthz-bind-address", to: at(&c.HealthzAddr, "0.0.0.0:10256"), field: "healthzBindAddress",
			usage: "IP:port of /healthz and /livez. Empty: not served."},
		{name: "metrics-bind-address", to: at(&c.MetricsAddr, "127.0.0.1:10249"), field: "metricsBindAddress",
			usage: "IP:port of /metrics and /proxyMode. Empty: not served."},
		{name: "bind-address-hard-fail", to: at(&c.BindHardFail, false), field: "bindAddressHardFail",
			usage: "End the agent if the address of /healthz or /metrics cannot be bound, instead of trying again."},
		{name: "profiling", to: at(&c.Profiling, false), field: "enableProfiling", usage: "Serve /debug/pprof/ beside /metrics."},
	}
}

func (c *Config) logFlags() []flag {
	formats := []string{"text", "json"}
	return []flag{
		{name: "v", short: "v", to: at(&c.Verbosity, 0), usage: "Log level: 0 is info, 4 and more is debug."},
		{name: "log-format", to: at(&c.LogFormat, formats[0]), choices: formats, usage: "Log format: text or json."},
		{name: "logging-format", to: at(&c.LogFormat, formats[0]), choices: formats, usage: "kube-proxy's name for --log-format."},
	}
}

// AddFlags binds the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.SortFlags = false
	for _, g := range c.flagTable() {
		for _, row := range g.flags {
			row.addTo(f)
			cli.GroupFlags(f, g.name, row.name)
		}
	}
	addHiddenFlags(f)
}

// addTo binds a flag. Its help says which proxy modes it concerns.
func (r *flag) addTo(f *pflag.FlagSet) {
	usage := r.usage
	if r.modes != nil {
		usage += " Only with --proxy-mode " + strings.Join(r.modes, " or ") + "."
	}
	r.to.addTo(f, r.name, r.short, usage)
}

// completeFlags makes a shell complete the flags' values.
func (c *Config) completeFlags(cmd *cobra.Command) {
	for _, row := range c.flags() {
		if row.choices != nil {
			cli.Choices(cmd, row.name, row.choices...)
		}
	}
}

// validateChoices checks the flags that have a set of values.
func (c *Config) validateChoices() error {
	for _, row := range c.flags() {
		if value := row.to.String(); row.choices != nil && !row.open && !slices.Contains(row.choices, value) && value != row.to.initialString() {
			return cli.UsageErrorf("--%s %q: not a choice: use %s", row.name, value, strings.Join(row.choices, ", "))
		}
	}
	return nil
}

// warnOfIdleFlags logs flags without an effect in this --proxy-mode. It omits
// kube-proxy's flags for other modes: operators keep them.
func (c *Config) warnOfIdleFlags(log *slog.Logger) {
	for _, row := range c.flags() {
		if row.modes != nil && !slices.Contains(row.modes, c.ProxyMode) && row.field == "" && row.to.String() != row.to.initialString() {
			log.Warn("flag has no meaning with this --proxy-mode", "flag", "--"+row.name, "proxy-mode", c.ProxyMode, "modes",
				strings.Join(row.modes, ", "))
		}
	}
	if c.LocalhostNodePorts && c.ProxyMode == "ebpf" && len(c.intent().LoopbackNodePorts()) == 0 {
		log.Warn("--localhost-nodeports serves nothing: --nodeport-addresses has no loopback address: give ranges that contain 127.0.0.1 or ::1",
			"nodeport-addresses", strings.Join(c.NodePortAddresses, ","))
	}
}

// variable is what a flag sets, and the value without the flag.
type variable struct{ pointer, initial any }

// at returns the variable at a pointer.
func at[T any](to *T, initial T) variable { return variable{to, initial} }

// String returns the present value.
func (v variable) String() string { return fmt.Sprint(reflect.ValueOf(v.pointer).Elem().Interface()) }

func (v variable) initialString() string { return fmt.Sprint(v.initial) }

func (v variable) addTo(f *pflag.FlagSet, name, short, usage string) {
	switch to := v.pointer.(type) {
	case *string:
		f.StringVarP(to, name, short, v.initial.(string), usage)
	case *[]string:
		f.StringSliceVarP(to, name, short, v.initial.([]string), usage)
	case *bool:
		f.BoolVarP(to, name, short, v.initial.(bool), usage)
	case *int:
		f.IntVarP(to, name, short, v.initial.(int), usage)
	case *int32:
		f.Int32VarP(to, name, short, v.initial.(int32), usage)
	case *uint16:
		f.Uint16VarP(to, name, short, v.initial.(uint16), usage)
	case *uint32:
		f.Uint32VarP(to, name, short, v.initial.(uint32), usage)
	case *float32:
		f.Float32VarP(to, name, short, v.initial.(float32), usage)
	case *time.Duration:
		f.DurationVarP(to, name, short, v.initial.(time.Duration), usage)
	default:
		panic(fmt.Sprintf("--%s: no flag can set a %T", name, to)) // a mistake in the source
	}
}
