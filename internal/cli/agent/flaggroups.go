package agent

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/conntrack/autopilot"
	"spillway.dev/spillway/internal/proxymode"
)

// flagGroups are the groups of the agent's flags in its help.
var flagGroups = []struct {
	name  string
	flags []string
}{
	{"Source", []string{"kubeconfig", "master", "manifests", "config", "hostname-override", "service-proxy-name",
		"kube-api-qps", "kube-api-burst", "kube-api-content-type"}},
	{"Dataplane", []string{"proxy-mode", "bypass", "takeover", "cleanup", "bpffs", "cgroup-root", "socket-hooks", "end-sockets", "drop-capabilities", "leave-previous-layout", "ebpf-sctp"}},
	{"Service", []string{"cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
		"nodeport-addresses", "localhost-nodeports", "masquerade-all", "allow-external-ips", "max-source-ranges", "feature-gates"}},
	{"Flow Table", []string{"conntrack-max-per-core", "conntrack-min", "conntrack-tcp-timeout-established", "conntrack-tcp-timeout-close-wait",
		"conntrack-udp-timeout", "conntrack-udp-timeout-stream", "conntrack-tcp-be-liberal"}},
	{"Conntrack Autopilot", []string{"conntrack-autopilot", "conntrack-autopilot-memory"}},
	{"Sync", []string{"iptables-sync-period", "iptables-min-sync-period", "nftables-service-counters", "verify-partial-sync"}},
	{"Health and Metrics", []string{"healthz-bind-address", "metrics-bind-address", "bind-address-hard-fail", "profiling",
		"influx-url", "influx-password-file", "influx-token-file", "influx-interval"}},
	{"OpenTelemetry", []string{"otlp-endpoint", "otlp-signals", "otlp-metrics-interval", "otlp-insecure", "otlp-ca-file", "otlp-cert-file", "otlp-key-file", "otlp-headers-file"}},
	{"API", []string{"api-socket", "api-listen", "api-tls-cert", "api-tls-key", "api-client-ca"}},
	{"Flow Events", []string{"flow-events", "flow-events-sample", "flow-events-rate", "service-metrics"}},
	{"Log", []string{"v", "log-format", "logging-format"}},
}

// groupFlags groups the flags, and makes a shell complete their values.
func groupFlags(cmd *cobra.Command) {
	for _, g := range flagGroups {
		cli.GroupFlags(cmd.Flags(), g.name, g.flags...)
	}
	cli.Choices(cmd, "proxy-mode", proxymode.Names()...)
	cli.Choices(cmd, "detect-local-mode", string(intent.LocalClusterCIDR), string(intent.LocalNodeCIDR),
		string(intent.LocalBridgeInterface), string(intent.LocalInterfaceNamePrefix))
	cli.Choices(cmd, "bypass", bypasses...)
	cli.Choices(cmd, "socket-hooks", ebpf.SocketHooks...)
	cli.Choices(cmd, "takeover", "kube-proxy")
	cli.Choices(cmd, "verify-partial-sync", iptables.VerifyChoices...)
	cli.Choices(cmd, "conntrack-autopilot", autopilot.Modes...)
	cli.Choices(cmd, "flow-events", flowEvents...)
	cli.Choices(cmd, "service-metrics", serviceMetrics...)
	cli.Choices(cmd, "otlp-signals", otlpSignals...)
	cli.Choices(cmd, "log-format", logFormats...)
	cli.Choices(cmd, "logging-format", logFormats...)
}
