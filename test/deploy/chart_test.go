package deploy

import (
	"bytes"
	"flag"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	chart "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	chartutil "helm.sh/helm/v4/pkg/chart/v2/util"
	"helm.sh/helm/v4/pkg/engine"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const root = "../.."

var update = flag.Bool("update", false, "write testdata/*.yaml anew")

func load(t *testing.T) *chart.Chart {
	t.Helper()
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the chart's links to files beside it
	c, err := loader.LoadDir(filepath.Join(root, "deploy", "helm", "spillway"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// render is "helm template spillway --namespace kube-system --values VALUES",
// in the order of the templates' names.
func render(t *testing.T, values string) (string, error) {
	t.Helper()
	var v map[string]any
	if err := yaml.UnmarshalStrict([]byte(values), &v); err != nil {
		t.Fatal(err)
	}
	return renderChart(load(t), common.ReleaseOptions{Name: "spillway", Namespace: "kube-system"}, v)
}

// renderChart renders a chart's manifests, in the order of the templates' names.
func renderChart(c *chart.Chart, release common.ReleaseOptions, values map[string]any) (string, error) {
	all, err := util.ToRenderValues(c, values, release, common.DefaultCapabilities)
	if err != nil {
		return "", err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return "", err
	}
	var out strings.Builder
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, ".yaml") {
			continue
		}
		for doc := range strings.SplitSeq(files[name], "\n---\n") {
			if text := strings.Trim(strings.TrimPrefix(doc, "---\n"), "\n"); strings.TrimSpace(text) != "" {
				out.WriteString("---\n" + text + "\n")
			}
		}
	}
	return out.String(), nil
}

func TestTheChartRendersAsItDidBefore(t *testing.T) {
	found, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil || len(found) < 5 {
		t.Fatalf("%d files of values (%v)", len(found), err)
	}
	for _, path := range found {
		name := strings.TrimSuffix(filepath.Base(path), ".values.yaml")
		t.Run(name, func(t *testing.T) {
			values, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			got, err := render(t, string(values))
			if err != nil {
				t.Fatal(err)
			}
			got = withoutDashboard(t, got)
			golden := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(want, []byte(got)) {
				t.Errorf("%s is out of date: look at what changed with go test -update and git diff\n%s", golden, difference(string(want), got))
			}
		})
	}
}

// withoutDashboard replaces the dashboard, which has tests of its own, by its path.
func withoutDashboard(t *testing.T, manifests string) string {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	indented := strings.ReplaceAll(strings.TrimSpace(string(text)), "\n", "\n    ")
	return strings.Replace(manifests, indented, "(deploy/grafana/spillway.json)", 1)
}

// difference shows the first lines that differ.
func difference(want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range min(len(w), len(g)) {
		if w[i] != g[i] {
			return "- " + w[i] + "\n+ " + g[i]
		}
	}
	return "one is longer"
}

func TestBadValuesAreRefusedWithTheirName(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{"mode: instead", "at '/mode': value must be one of 'replace', 'beside'"},
		{"proxyMode: ipvs", "at '/proxyMode': value must be one of 'ebpf', 'nftables', 'iptables'"},
		{"bypass: sometimes", "bypass"},
		{"socketHooks: some", "socketHooks"},
		{"endSockets: true", "endSockets"},
		{"clusterCidr: [10.0.0.0/8]", "additional properties 'clusterCidr' not allowed"},
		{"clusterCIDR: [10.0.0.0]", "clusterCIDR/0"},
		{"nodePortAddresses: [secondary]", "nodePortAddresses/0"},
		{"conntrack: {maxPerCore: -1}", "conntrack/maxPerCore"},
		{"conntrack: {udpTimeout: 30}", "conntrack/udpTimeout"},
		{"conntrack: {udpTimeout: 30x}", "conntrack.udpTimeout: 30x: not a duration such as 500ms, 30s or 1h30m"},
		{"conntrack: {udpTimeout: 999ms}", "conntrack.udpTimeout: 999ms: write a second or longer, or 0s for the default"},
		{"conntrack: {maxPerCore: 53687089}", "conntrack.maxPerCore: 53687089: the kernel allows 53687088 flows in all: choose a smaller number"},
		{"conntrack: {min: 2000000000}", "conntrack.min: 2000000000: the kernel allows"},
		{"syncPeriod: 0s", "syncPeriod: 0s: must be longer than 0: remove it for the default of 30s"},
		{"syncPeriod: 0h0.0s", "syncPeriod: 0h0.0s: must be longer than 0"},
		{"syncPeriod: -30s", "syncPeriod: -30s: not a duration"},
		{"syncPeriod: often", "syncPeriod: often: not a duration"},
		{"syncPeriod: 2562048h", "syncPeriod: 2562048h: not a duration"},
		{"minSyncPeriod: 31s", "minSyncPeriod: 31s: longer than syncPeriod (30s): choose a shorter one"},
		{"{minSyncPeriod: 1.001s, syncPeriod: 1s}", "minSyncPeriod: 1.001s: longer than syncPeriod (1s)"},
		{"conntrack: {udp: 30s}", "additional properties 'udp' not allowed"},
		{"healthz: {port: 70000}", "healthz/port"},
		{"metrics: {bindAddress: 'localhost'}", "metrics/bindAddress"},
		{"k8sServiceHost: https://10.0.0.1", "k8sServiceHost: https://10.0.0.1: an address or a host name is wanted"},
		{"k8sServiceHost: 10.0.0.1:6443", "k8sServiceHost: 10.0.0.1:6443: an address or a host name is wanted: put the port into k8sServicePort"},
		{"k8sServiceHost: '[fd00::1]:6443'", "put the port into k8sServicePort"},
		{"k8sServiceHost: 10.0.0.300", "k8sServiceHost: 10.0.0.300: not the address of a host"},
		{"k8sServiceHost: 10.0.1", "k8sServiceHost: 10.0.1: not the address of a host"},
		{"k8sServiceHost: 'fd00::1::2'", "k8sServiceHost: fd00::1::2: not the address of a host"},
		{"k8sServiceHost: 0.0.0.0", "k8sServiceHost: 0.0.0.0: not the address of a host"},
		{"k8sServiceHost: api server", "k8sServiceHost: api server: neither an address nor a host name"},
		{"k8sServiceHost: -api.example.com", "neither an address nor a host name"},
		{"k8sServiceHost: kubernetes.default", "k8sServiceHost: kubernetes.default: this is the Service \"kubernetes\", which does not work " +
			"before the agent runs: set an address"},
		{"k8sServiceHost: kubernetes.default.svc", "this is the Service \"kubernetes\""},
		{"k8sServiceHost: kubernetes.default.svc.cluster.local.", "this is the Service \"kubernetes\""},
		{"k8sServicePort: '6443'", "k8sServicePort"},
		{"{k8sServiceHost: 10.0.0.1, healthz: {port: 10249}}", "healthz.port and metrics.port are both 10249"},
		{"{k8sServiceHost: 10.0.0.1, api: {bindAddress: 0.0.0.0}}", "api.bindAddress without api.secretName"},
		{"{k8sServiceHost: 10.0.0.1, api: {bindAddress: 1.2.3.4.5, secretName: s}}", "api.bindAddress: 1.2.3.4.5: not an IP address"},
		{"{k8sServiceHost: 10.0.0.1, conntrackAutopilot: {mode: 'on'}}", "set privileged: true"},
		{"conntrackAutopilot: {mode: auto}", "at '/conntrackAutopilot/mode': value must be one of 'off', 'advise', 'on'"},
		{"conntrackAutopilot: {memory: half}", "conntrackAutopilot/memory"},
		{"flowEvents: all", "flowEvents"},
		{"flowEvents: {mode: dropped}", "at '/flowEvents/mode': value must be one of 'off', 'refused', 'on-demand', 'all'"},
		{"flowEvents: {sample: 0}", "flowEvents/sample"},
		{"flowEvents: {rate: -1}", "flowEvents/rate"},
		{"serviceMetrics: top-0", "serviceMetrics"},
		{"serviceMetrics: 100", "serviceMetrics"},
		{"outlierEjection: ebpf", "outlierEjection"},
		{"balanceByLoad: least", "balanceByLoad"},
		{"allowExternalIPs: never", "allowExternalIPs"},
		{"conntrack: {tcpBeLiberal: 1}", "conntrack/tcpBeLiberal"},
		{"extraArgs: [--flow-events=all]", "set flowEvents.mode instead"},
		{"extraArgs: [--conntrack-autopilot=on]", "set conntrackAutopilot.mode instead"},
		{"{k8sServiceHost: 10.0.0.1, otlp: {endpoint: 'collector:4318'}}", "otlp.endpoint: not an address"},
		{"{k8sServiceHost: 10.0.0.1, otlp: {endpoint: 'https://me:secret@collector'}}", "otlp.endpoint: not an address"},
		{"{k8sServiceHost: 10.0.0.1, otlp: {endpoint: 'http://10.0.0.5:4318'}}", "set otlp.insecure: true"},
		{"{k8sServiceHost: 10.0.0.1, otlp: {endpoint: 'https://c', secretName: s}}", "otlp.secretName without otlp.secretKeys"},
		{"{k8sServiceHost: 10.0.0.1, otlp: {endpoint: 'https://c', secretKeys: [headers]}}", "otlp.secretKeys without otlp.secretName"},
		{"otlp: {metricsInterval: often}", "otlp.metricsInterval: often: not a duration"},
		{"otlp: {metricsInterval: 999ms}", "otlp.metricsInterval: 999ms: write a second or longer"},
		{"otlp: {signals: [traces]}", "otlp/signals/0"},
		{"extraArgs: ['--otlp-endpoint=http://c']", "set otlp.endpoint instead"},
		{"takeover: kube-proxy", "takeover"},
		{"extraArgs: [v=4]", "extraArgs: v=4: not a flag: write each as --name=value"},
		{"extraArgs: [--influx-url, http://influx]", "extraArgs: http://influx: not a flag"},
		{"extraArgs: [--v 4]", "extraArgs: --v 4: not a flag"},
		{"extraArgs: [-v=4]", "extraArgs: -v=4: not a flag"},
		{"extraArgs: [--]", "extraArgs: --: not a flag"},
		{"extraArgs: [4]", "extraArgs/0"},
		{"extraArgs: [--proxy-mode=iptables]", "extraArgs: --proxy-mode=iptables: the chart sets this flag: set proxyMode instead"},
		{"extraArgs: [--bpffs=/x]", "extraArgs: --bpffs=/x: the chart sets this flag: remove it"},
		{"extraArgs: [--cleanup]", "set cleanup instead"},
		{"image: {digest: latest}", "image.digest: latest: not a digest: sha256: and 64 digits"},
		{"image: {repository: 'spillway:0.1.0'}", "image.repository: spillway:0.1.0: put the tag into image.tag"},
		{"image: {repository: 'spillway@sha256:ab'}", "put the digest into image.digest"},
		{"image: {repository: 'https://example.com/spillway'}", "write it without https://"},
		{"image: {repository: example.com/Spillway}",
			"image.repository: example.com/Spillway: not a repository such as registry.example.com/spillway, in lower case"},
		{"image: {repository: example.com//spillway}", "not a repository"},
		{"image: {repository: ' spillway'}", "not a repository"},
		{"image: {tag: 'a:b'}", "image.tag: a:b: not a tag"},
		{"image: {tag: -a}", "image.tag: -a: not a tag"},
		{"{cleanup: true, image: {tag: 'a b'}}", "image.tag: a b: not a tag"},
		{"image: {repository: ''}", "image/repository"},
		{"extraCapabilities: [net_raw]", "extraCapabilities/0"},
		{"cgroupRoot: sys/fs/cgroup", "cgroupRoot"},
		{"seccompProfile: {type: Default}", "seccompProfile/type"},
		{"seccompProfile: {type: Localhost, localhostProfile: /etc/spillway.json}", "seccompProfile/localhostProfile"},
		{"sysAdmin: 'no'", "sysAdmin"},
		{"clusterCIDR: [10.244.0.0/33]", "clusterCIDR: 10.244.0.0/33: the length after / is from 0 to 32"},
		{"clusterCIDR: [10.244.0.0/16, 'fd00::/129']", "clusterCIDR: fd00::/129: the length after / is from 0 to 128"},
		{"clusterCIDR: [10.244.0.0/016]", "clusterCIDR: 10.244.0.0/016: the length after / is from 0 to 32"},
		{"clusterCIDR: [10.244.1.5/16]", "clusterCIDR: 10.244.1.5/16: bits are set after the length: write 10.244.0.0/16"},
		{"clusterCIDR: [10.244.1.5/30]", "write 10.244.1.4/30"},
		{"clusterCIDR: [10.244/16]", "clusterCIDR: 10.244/16: not an address range such as 10.244.0.0/16 or fd00::/48"},
		{"clusterCIDR: [256.0.0.0/8]", "clusterCIDR: 256.0.0.0/8: not an address range"},
		{"clusterCIDR: ['fd00/8']", "clusterCIDR: fd00/8: not an address range"},
		{"clusterCIDR: ['fd00:1/32']", "clusterCIDR: fd00:1/32: not an address range"},
		{"clusterCIDR: ['fd00::1::/32']", "clusterCIDR: fd00::1::/32: not an address range"},
		{"clusterCIDR: ['1:2:3:4:5:6:7:8:9/32']", "not an address range"},
		{"clusterCIDR: ['1:2:3:4::5:6:7:8/32']", "not an address range"},
		{"clusterCIDR: 10.244.0.0/16", "clusterCIDR: 10.244.0.0/16: a list is wanted: --set 'clusterCIDR={10.244.0.0/16}', or clusterCIDR: " +
			"[10.244.0.0/16] in a file"},
		{"nodePortAddresses: [10.0.0.0/40]", "nodePortAddresses: 10.0.0.0/40: the length after / is from 0 to 32"},
		{"nodePortAddresses: [primary, 10.0.0.0/8]", "nodePortAddresses: primary stands alone"},
		{"metrics: {bindAddress: 10.0.1}", "metrics.bindAddress: 10.0.1: not an IP address such as 0.0.0.0 or ::"},
		{"podLabels: {app.kubernetes.io/name: other}",
			"podLabels: app.kubernetes.io/name: the DaemonSet finds its Pods by this label: choose another name"},
		{"podLabels: {app.kubernetes.io/instance: other}", "podLabels: app.kubernetes.io/instance: the DaemonSet"},
		{"startupProbe: {failureThreshold: 0}", "startupProbe/failureThreshold"},
		{"livenessProbe: {httpGet: {path: /}}", "additional properties 'httpGet' not allowed"},
		// What no single value is to blame for.
		{"{loadModules: true, seccompProfile: {type: Localhost}}",
			"spillway.json denies module loading: set seccompProfile.type: RuntimeDefault"},
		{"{mode: beside, takeover: true}", "beside kube-proxy nothing is taken over"},
		{"{masqueradeAll: true, bypass: never}", "choose one"},
		{"{localhostNodePorts: true, socketHooks: 'off'}", "only socket hooks serve NodePorts on loopback"},
		{"{endSockets: host, socketHooks: 'off'}", "only sockets that socket hooks translate end"},
		{"{endSockets: all, sysAdmin: false}", "sockets of Pods need SYS_ADMIN"},
		{"extraArgs: [--end-sockets]", "set endSockets instead"},
		{"extraArgs: [--forwarding=hybrid]", "set forwarding instead"},
		{"{forwarding: hybrid, k8sServiceHost: 10.1.2.3}", "set forwardingSecretName too"},
		{"{forwardingSecretName: s, proxyMode: nftables, k8sServiceHost: 10.1.2.3}", "only proxyMode: ebpf forwards without SNAT"},
		{"{xdp: auto, proxyMode: nftables, k8sServiceHost: 10.1.2.3}", "only proxyMode: ebpf has an XDP program"},
		{"extraArgs: [--egress=auto]", "set egress.mode instead"},
		{"egress: {mode: always}", "egress"},
		{"{egress: {addresses: [192.0.2.0/24]}, k8sServiceHost: 10.1.2.3}", "egress.addresses has no meaning with egress.mode: off"},
		{"{egress: {mode: auto, addresses: [192.0.2.1/24]}, k8sServiceHost: 10.1.2.3}", "egress.addresses: 192.0.2.1/24: bits are set"},
		{"{egress: {mode: auto, configMapName: x}, k8sServiceHost: 10.1.2.3}", "without egress.mode: on"},
		{"extraArgs: [--dsr-port=1]", "set forwardingPort instead"},
		{"extraArgs: [--xdp=auto]", "set xdp instead"},
		{"extraArgs: [--maglev-seed-file=/x]", "set maglevSeedSecretName instead"},
		{"{maglevSeedSecretName: s, proxyMode: nftables, k8sServiceHost: 10.1.2.3}", "only proxyMode: ebpf has tables of maglev"},
		{"xdp: generic", "xdp"},
		{"{forwardingSecretName: s, masqueradeAll: true, k8sServiceHost: 10.1.2.3}", "either the client's address or the node's"},
		{"detectLocalMode: BridgeInterface", "podBridgeInterface"},
		{"detectLocalMode: InterfaceNamePrefix", "podInterfaceNamePrefix"},
		{"podMonitor: {enabled: true}", "Prometheus cannot reach loopback"},
		{"{podMonitor: {enabled: true}, metrics: {bindAddress: '::1'}}", "metrics.bindAddress: ::1: Prometheus cannot reach loopback"},
		{"{podMonitor: {enabled: true}, metrics: {bindAddress: '0:0:0:0:0:0:0:1'}}", "Prometheus cannot reach loopback"},
		{"{podMonitor: {enabled: true}, metrics: {bindAddress: '::ffff:127.0.0.1'}}", "Prometheus cannot reach loopback"},
		{"{podMonitor: {enabled: true}, metrics: {bindAddress: '::ffff:7f00:1'}}", "Prometheus cannot reach loopback"},
		{"podAnnotations: {prometheus.io/scrape: 'true'}",
			"podAnnotations: prometheus.io/scrape: true and metrics.bindAddress: 127.0.0.1: Prometheus cannot reach loopback"},
		{"podMonitor: {kubeProxy: {enabled: true}}", "podMonitor.kubeProxy.enabled: true and podMonitor.enabled: false"},
		{"podMonitor: {kubeProxy: {labels: {job: x}}}", "set podMonitor.kubeProxy.job instead"},
		{"podMonitor: {kubeProxy: {labels: {a-b: x}}}", "podMonitor/kubeProxy/labels': additional properties 'a-b' not allowed"},
		{"healthz: {bindAddress: '127.0.0.1:10256'}",
			"healthz.bindAddress: 127.0.0.1:10256: an address alone is wanted: write 127.0.0.1, and the port into healthz.port"},
		{"healthz: {bindAddress: '[::1]:10256'}", "healthz.bindAddress: [::1]:10256: an address alone is wanted: write ::1, and the port " +
			"into healthz.port"},
		{"metrics: {bindAddress: '[::]'}", "metrics.bindAddress: [::]: an address alone is wanted: write ::, and the port into metrics.port"},
		{"metrics: {bindAddress: '[::'}", "metrics.bindAddress: [::: not an IP address"},
		{"updateStrategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}", "maxSurge: 1: a node has the ports of one agent"},
		{"updateStrategy: {rollingUpdate: {maxSurge: 10%, maxUnavailable: 0}}", "maxSurge: 10%: a node has the ports of one agent"},
		{"enabled: false", "only a chart that depends on this one can leave it out, with condition: spillway.enabled"},
		{"fullnameOverride: Core", "fullnameOverride"},
		{"{nameOverride: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, viewer: {enabled: false}}",
			"it has 54 letters, and names of Pods have room for 53"},
		{"{}", "k8sServiceHost is not set"},
		{"{takeover: true}", "set k8sServiceHost and k8sServicePort"},
	} {
		t.Run(c.values, func(t *testing.T) {
			_, err := render(t, c.values)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
}

// The values that become flags of the agent: null and empty mean the agent's default.
func TestEmptyValuesMeanTheDefault(t *testing.T) {
	const base = "k8sServiceHost: 10.1.2.3\n"
	want, err := render(t, base)
	if err != nil {
		t.Fatal(err)
	}
	for _, value := range []string{"''", "null"} {
		for _, names := range []string{
			"nameOverride", "fullnameOverride", "proxyMode", "clusterCIDR", "detectLocalMode", "podBridgeInterface", "podInterfaceNamePrefix",
			"nodePortAddresses", "localhostNodePorts", "hostPorts", "forwarding", "forwardingSecretName", "forwardingPort", "maglevSeedSecretName",
			"allowExternalIPs", "outlierEjection", "balanceByLoad", "conntrack.tcpBeLiberal", "conntrackAutopilot.mode", "conntrackAutopilot.memory",
			"flowEvents.mode", "flowEvents.sample", "flowEvents.rate", "serviceMetrics",
			"xdp", "egress.mode", "egress.configMapName", "egress.addresses", "masqueradeAll", "bypass", "socketHooks", "endSockets",
			"conntrack.maxPerCore", "conntrack.min", "conntrack.tcpTimeoutEstablished", "conntrack.tcpTimeoutCloseWait", "conntrack.udpTimeout",
			"conntrack.udpTimeoutStream",
			"syncPeriod", "minSyncPeriod", "healthz.bindAddress", "healthz.port", "metrics.bindAddress", "metrics.port", "profiling",
			"logLevel", "logFormat",
			"api.socket", "api.bindAddress", "api.port", "api.secretName", "otlp.endpoint", "otlp.signals", "otlp.metricsInterval", "otlp.insecure",
			"otlp.secretName", "otlp.secretKeys",
		} {
			outer, inner, nested := strings.Cut(names, ".")
			values := base + outer + ": " + value
			if nested {
				values = base + outer + ": {" + inner + ": " + value + "}"
			}
			if got, err := render(t, values); err != nil {
				t.Errorf("%s: %s: %v", names, value, err)
			} else if got != want {
				t.Errorf("%s: %s: %s", names, value, difference(want, got))
			}
		}
	}
	for _, empty := range []string{"clusterCIDR: []", "nodePortAddresses: []", "conntrack: {}", "conntrack: null", "healthz: null",
		"metrics: null", "api: null", "otlp: null", "flowEvents: null", "conntrackAutopilot: null"} {
		if got, err := render(t, base+empty); err != nil || got != want {
			t.Errorf("%s: %v, %s", empty, err, difference(want, got))
		}
	}
}

func TestGoodValuesAreRendered(t *testing.T) {
	for _, c := range []struct{ values, want string }{
		{"clusterCIDR: [10.244.0.0/16, 'fd00:10:244::/56', '1:2:3:4:5:6:7:8/128', '::/0', 0.0.0.0/0, 192.0.2.255/32, '64:ff9b::10.0.0.0/104']",
			"--cluster-cidr=10.244.0.0/16,fd00:10:244::/56,1:2:3:4:5:6:7:8/128,::/0,0.0.0.0/0,192.0.2.255/32,64:ff9b::10.0.0.0/104\n"},
		{"endSockets: host", "- --drop-capabilities\n            - --end-sockets\n"},
		{"forwarding: hybrid\nforwardingSecretName: s", "- --dsr-key-file=/etc/spillway/forwarding/secret\n            - --forwarding=hybrid\n"},
		{"xdp: auto", "- --xdp=auto\n"},
		{"allowExternalIPs: false", "- --allow-external-ips=false\n"},
		{"conntrackAutopilot: {mode: 'off', memory: 512Mi}", "- --conntrack-autopilot=off\n            - --conntrack-autopilot-memory=512Mi\n"},
		{"flowEvents: {mode: all, sample: 10, rate: 0}",
			"- --flow-events=all\n            - --flow-events-rate=0\n            - --flow-events-sample=10\n"},
		{"flowEvents: {mode: on-demand}\nserviceMetrics: connections", "- --flow-events=on-demand\n"},
		{"serviceMetrics: top-100", "- --service-metrics=top-100\n"},
		{"egress: {mode: auto}", "- --egress=auto\n"},
		{"egress: {mode: auto, addresses: [192.0.2.0/24, 'fd00::/64']}", "- --egress-addresses=192.0.2.0/24,fd00::/64\n"},
		{"egress: {mode: 'on', configMapName: ip-masq-agent}", "- --egress=on\n            - --egress-config=/etc/spillway/egress/config\n"},
		{"egress: {mode: 'on', configMapName: ip-masq-agent}", "name: egress\n          configMap: {name: \"ip-masq-agent\"}\n"},
		{"forwarding: dsr\nforwardingSecretName: s", "- --forwarding=dsr\n"},
		{"forwardingSecretName: s\nforwardingPort: 0", "- --dsr-port=0\n"},
		{"maglevSeedSecretName: s", "- --maglev-seed-file=/etc/spillway/maglev/seed\n"},
		{"maglevSeedSecretName: s", "name: maglev\n          secret: {secretName: \"s\", defaultMode: 0400}\n"},
		{"forwardingSecretName: s", "secret: {secretName: \"s\", defaultMode: 0400}\n"},
		{"endSockets: all", "- --v=0\n            - --end-sockets\n"},
		{"{endSockets: all, k8sServiceHost: 10.1.2.3}", "hostPath: {path: /run/netns, type: DirectoryOrCreate}\n"},
		{"nodePortAddresses: [primary]", "--nodeport-addresses=primary\n"},
		{"api: {socket: false}", "- --api-socket=\n"},
		{"api: {bindAddress: '::', secretName: tls}", "--api-listen=[::]:10261\n"},
		{"api: {bindAddress: 0.0.0.0, port: 7, secretName: tls}", "secret: {secretName: \"tls\", defaultMode: 0400}\n"},
		{"otlp: {endpoint: 'http://127.0.0.1:4318', signals: [logs]}",
			"- --otlp-endpoint=http://127.0.0.1:4318\n            - --otlp-signals=logs\n"},
		{"otlp: {endpoint: 'http://10.0.0.5:4318', insecure: true}", "- --otlp-insecure\n"},
		{"otlp: {endpoint: 'https://c:4318', secretName: s, secretKeys: [tls.crt]}", "- --otlp-key-file=/etc/spillway/otlp/tls.key\n"},
		{"otlp: {endpoint: 'https://c:4318', secretName: s, secretKeys: [headers]}", "secret: {secretName: \"s\", defaultMode: 0400}\n"},
		{"k8sServiceHost: 'fd00::1'", "value: \"fd00::1\"\n"},
		{"k8sServiceHost: api-1.Example.com.", "value: \"api-1.Example.com.\"\n"},
		{"k8sServiceHost: kubernetes.default.example.com", "value: \"kubernetes.default.example.com\"\n"},
		{"{mode: beside, k8sServiceHost: kubernetes.default.svc}", "value: \"kubernetes.default.svc\"\n"},
		{"syncPeriod: 1m30s\nminSyncPeriod: 1.5m", "--iptables-min-sync-period=1.5m\n"},
		{"minSyncPeriod: 0s", "--iptables-min-sync-period=0s\n"},
		{"conntrack: {udpTimeout: 0s, maxPerCore: 53687088}", "--conntrack-max-per-core=53687088\n"},
		{"image: {repository: 'REGISTRY.example:5000/a/b__c--d.e', tag: v1.0_x}", " image: REGISTRY.example:5000/a/b__c--d.e:v1.0_x\n"},
		{"image: {repository: '[fd00::1]:5000/spillway'}", " image: [fd00::1]:5000/spillway:"},
		{"extraArgs: ['--influx-url=http://influx:8086?a=b']", "\"--influx-url=http://influx:8086?a=b\"\n"},
		{"podAnnotations: {prometheus.io/scrape: 'true'}\nmetrics: {bindAddress: 0.0.0.0}", "prometheus.io/scrape: \"true\"\n"},
		{"mode: replace", "- --metrics-bind-address=127.0.0.1:10249\n            - --bind-address-hard-fail"},
		{"takeover: true", "- --metrics-bind-address=127.0.0.1:10249\n            - --bypass=auto\n"},
		{"healthz: {bindAddress: '::'}", "--healthz-bind-address=[::]:10256\n"},
		{"extraCapabilities: [CAP_SYS_PTRACE, SYSLOG]", "                - SYS_PTRACE\n                - SYSLOG\n"},
		{"podLabels: {team: network}", "        app.kubernetes.io/instance: spillway\n        team: network\n"},
		{"podAnnotations: {kubectl.kubernetes.io/default-container: other}",
			"      annotations:\n        kubectl.kubernetes.io/default-container: other\n    spec:"},
		{"nodeSelector: {kubernetes.io/os: linux, proxy: spillway}",
			"      nodeSelector:\n        kubernetes.io/os: linux\n        proxy: spillway\n"},
		{"loadModules: true\nseccompProfile: {type: Localhost, localhostProfile: profiles/modules.json}",
			"localhostProfile: profiles/modules.json"},
		{"startupProbe: {periodSeconds: 10, failureThreshold: 180}",
			"            failureThreshold: 180\n            periodSeconds: 10\n            timeoutSeconds: 1\n"},
		{"livenessProbe: {timeoutSeconds: 5}", "            failureThreshold: 6\n            periodSeconds: 10\n            timeoutSeconds: 5\n"},
	} {
		values := c.values
		if !strings.Contains(values, "k8sServiceHost") {
			values = "k8sServiceHost: 10.1.2.3\n" + values
		}
		got, err := render(t, values)
		if err != nil || !strings.Contains(got, c.want) {
			t.Errorf("%s: %v, want %q", c.values, err, c.want)
		}
	}
}

// A Pod with hostNetwork has the node's address. The kubelet probes it unless a probe has
// another host.
func TestTheKubeletProbesWhereTheAgentListens(t *testing.T) {
	for address, want := range map[string]string{
		"": "", "0.0.0.0": "", "::": "", "0:0:0:0:0:0:0:0": "",
		"127.0.0.1": "127.0.0.1", "127.0.0.53": "127.0.0.53", "::1": "::1", "169.254.20.10": "169.254.20.10",
	} {
		out, err := render(t, "{k8sServiceHost: 10.1.2.3, healthz: {bindAddress: '"+address+"'}}")
		if err != nil {
			t.Fatal(err)
		}
		probes := 0
		for _, o := range objects(t, out) {
			if o.GetKind() != "DaemonSet" {
				continue
			}
			containers, _, _ := unstructured.NestedSlice(o.Object, "spec", "template", "spec", "containers")
			for _, name := range []string{"startupProbe", "livenessProbe", "readinessProbe"} {
				get, found, _ := unstructured.NestedStringMap(containers[0].(map[string]any), name, "httpGet")
				if found && get["host"] == want && get["port"] == "healthz" {
					probes++
				}
			}
		}
		if probes != 3 {
			t.Errorf("healthz.bindAddress: %q: %d of 3 probes have the host %q", address, probes, want)
		}
	}
}

// Of two flags of one name the agent takes the last, so that one in extraArgs would replace a
// value without a word.
func TestExtraArgsRepeatNoFlagOfTheChart(t *testing.T) {
	found, err := filepath.Glob("testdata/*.values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]bool{}
	for _, path := range found {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		out, err := render(t, string(text))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(out) {
			if flag, ok := strings.CutPrefix(strings.TrimSpace(line), "- --"); ok {
				name, _, _ := strings.Cut(flag, "=")
				flags[name] = true
			}
		}
	}
	if len(flags) < 27 {
		t.Errorf("testdata has %d flags of the chart, and does not name every one: %q", len(flags), slices.Sorted(maps.Keys(flags)))
	}
	for name := range flags {
		_, err := render(t, "{k8sServiceHost: 10.1.2.3, extraArgs: [--"+name+"=1]}")
		if err == nil || !strings.Contains(err.Error(), "extraArgs: --"+name+"=1: the chart sets this flag: ") {
			t.Errorf("--%s: %v", name, err)
		}
	}
}

// Helm refuses other versions with the range and the cluster's version.
func TestAKubernetesThatIsTooOldIsRefused(t *testing.T) {
	constraint := load(t).Metadata.KubeVersion
	for version, want := range map[string]bool{"v1.30.9": false, "v1.31.0": true, "v1.31.0-eks-1": true, "v1.36.3+k3s1": true} {
		if got := chartutil.IsCompatibleRange(constraint, version); got != want {
			t.Errorf("kubeVersion %s allows %s: %v, want %v", constraint, version, got, want)
		}
	}
}

func TestADigestReplacesTheTagInEveryContainer(t *testing.T) {
	digest := "sha256:" + strings.Repeat("ab", 32)
	for _, cleanup := range []string{"false", "true"} {
		out, err := render(t, "{k8sServiceHost: 10.1.2.3, cleanup: "+cleanup+
			", image: {repository: example.com/spillway, tag: other, digest: '"+digest+"'}}")
		if err != nil {
			t.Fatal(err)
		}
		all, pinned := strings.Count(out, " image: "), strings.Count(out, " image: example.com/spillway@"+digest+"\n")
		if all < 2 || pinned != all {
			t.Errorf("cleanup: %s: %d of %d containers have the digest", cleanup, pinned, all)
		}
	}
}

// Every value has a default, which says that it is there and of what type it is.
func TestTheSchemaAndTheValuesNameTheSame(t *testing.T) {
	var schema schemaNode
	if err := yaml.Unmarshal(load(t).Schema, &schema); err != nil {
		t.Fatal(err)
	}
	compare(t, "", schema, load(t).Values)
}

type schemaNode struct {
	Properties map[string]schemaNode `json:"properties"`
}

func compare(t *testing.T, at string, schema schemaNode, values map[string]any) {
	for name, below := range schema.Properties {
		v, ok := values[name]
		if !ok && at+name != "global" { // Helm's own
			t.Errorf("values.yaml lacks %s", at+name)
		}
		if m, isMap := v.(map[string]any); isMap && below.Properties != nil {
			compare(t, at+name+".", below, m)
		}
	}
	for name := range values {
		if _, ok := schema.Properties[name]; !ok {
			t.Errorf("values.schema.json lacks %s", at+name)
		}
	}
}
