package agent

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"spillway.dev/spillway/internal/cli"
)

const configHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// configured reads a file beside a command line.
func configured(t *testing.T, text string, args ...string) (Config, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var c Config
	f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	c.AddFlags(f)
	if err := f.Parse(append(args, "--config", path)); err != nil {
		t.Fatal(err)
	}
	err := c.readConfig(f)
	if err == nil {
		err = c.Validate()
	}
	return c, err
}

// kubeadmConfig is the file that kubeadm 1.36 writes for a cluster of two families.
const kubeadmConfig = configHead + `
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16,fd44::/48
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
`

func TestTheFileOfKubeadmIsTakenWithoutARemark(t *testing.T) {
	c, err := configured(t, kubeadmConfig)
	if err != nil || len(c.remarks) > 0 {
		t.Fatalf("%v; remarks: %q", err, c.remarks)
	}
	if c.ProxyMode != "ebpf" || c.Kubeconfig != "/var/lib/kube-proxy/kubeconfig.conf" || len(c.clusterCIDRs) != 2 ||
		c.HealthzAddr != "0.0.0.0:10256" || c.MetricsAddr != "127.0.0.1:10249" || c.SyncPeriod != 30*time.Second ||
		c.Conntrack.TCPEstablished != 24*time.Hour || c.DetectLocalMode != "ClusterCIDR" {
		t.Errorf("%+v", c)
	}
}

func TestAFileSaysWhatFlagsSay(t *testing.T) {
	c, err := configured(t, configHead+`
mode: nftables
hostnameOverride: Node-A
nodePortAddresses: [primary]
detectLocalMode: BridgeInterface
detectLocal: {bridgeInterface: cni0}
healthzBindAddress: 127.0.0.1
metricsBindAddress: 0.0.0.0:9999
enableProfiling: true
nftables: {syncPeriod: 1m, minSyncPeriod: 2s, masqueradeAll: true}
iptables: {syncPeriod: 5m}
conntrack: {maxPerCore: 7, min: 9, tcpEstablishedTimeout: 1h, tcpCloseWaitTimeout: 5m, udpTimeout: 9s, udpStreamTimeout: 10s}
clientConnection: {qps: 50, burst: 100}
logging: {verbosity: 4, format: json}
`)
	if err != nil {
		t.Fatal(err)
	}
	if c.ProxyMode != "nftables" || c.NodeName != "node-a" || !c.nodePortPrimary || c.localInterface() != "cni0" ||
		c.HealthzAddr != "127.0.0.1:10256" || c.MetricsAddr != "0.0.0.0:9999" || !c.Profiling ||
		c.SyncPeriod != time.Minute || c.MinSyncPeriod != 2*time.Second || !c.MasqueradeAll ||
		c.Conntrack.MaxPerCore != 7 || c.Conntrack.Min != 9 || c.Conntrack.TCPEstablished != time.Hour ||
		c.Conntrack.TCPCloseWait != 5*time.Minute || c.Conntrack.UDP != 9*time.Second || c.Conntrack.UDPStream != 10*time.Second ||
		c.client.QPS != 50 || c.client.Burst != 100 || c.Verbosity != 4 || c.LogFormat != "json" {
		t.Errorf("%+v", c)
	}
}

func TestEBPFIsWrittenToAtOnceUnlessSomebodySaysOtherwise(t *testing.T) {
	for _, c := range []struct {
		file string
		args []string
		want time.Duration
	}{
		{"mode: nftables\n", []string{"--proxy-mode", "ebpf"}, 10 * time.Millisecond},
		{"mode: nftables\n", nil, 100 * time.Millisecond},
		{"mode: iptables\niptables: {minSyncPeriod: 3s}\n", []string{"--proxy-mode", "ebpf"}, 3 * time.Second},
	} {
		got, err := configured(t, configHead+c.file, c.args...)
		if err != nil || got.MinSyncPeriod != c.want {
			t.Errorf("%q %q: %v, %v, want %v", c.file, c.args, got.MinSyncPeriod, err, c.want)
		}
	}
	for _, c := range []struct {
		args []string
		want time.Duration
	}{
		{nil, 10 * time.Millisecond},
		{[]string{"--proxy-mode", "iptables"}, 100 * time.Millisecond},
		{[]string{"--iptables-min-sync-period", "1s"}, time.Second},
	} {
		var got Config
		f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		got.AddFlags(f)
		if err := errors.Join(f.Parse(c.args), got.readConfig(f)); err != nil || got.MinSyncPeriod != c.want {
			t.Errorf("%q: %v, %v, want %v", c.args, got.MinSyncPeriod, err, c.want)
		}
	}
}

func TestFlagsBesideAFile(t *testing.T) {
	c, err := configured(t, configHead+"mode: iptables\nhostnameOverride: file\nlogging: {verbosity: 2}\n",
		"--proxy-mode", "ebpf", "--hostname-override", "flag", "--v", "5", "--bypass", "never",
		"--cluster-cidr", "10.0.0.0/8", "--iptables-sync-period", "7s", "--masquerade-all")
	if err != nil {
		t.Fatal(err)
	}
	if c.ProxyMode != "ebpf" || c.NodeName != "flag" || c.Verbosity != 5 || c.EBPF.Bypass != "never" {
		t.Errorf("flags that count do not: %+v", c)
	}
	if len(c.clusterCIDRs) != 0 || c.SyncPeriod != 30*time.Second || c.MasqueradeAll {
		t.Errorf("flags that do not count do: %v %v %v", c.clusterCIDRs, c.SyncPeriod, c.MasqueradeAll)
	}
	for _, flag := range []string{"--cluster-cidr", "--iptables-sync-period", "--masquerade-all"} {
		if !slices.ContainsFunc(c.remarks, func(r string) bool { return strings.HasPrefix(r, flag+" does not count beside --config") }) {
			t.Errorf("no remark about %s: %q", flag, c.remarks)
		}
	}
	if len(c.remarks) != 3 {
		t.Errorf("remarks: %q", c.remarks)
	}
}

func TestWhatAFileAsksInVainIsNamed(t *testing.T) {
	c, err := configured(t, configHead+"mode: iptables\nipvs: {scheduler: rr}\niptables: {localhostNodePorts: true}\nwinkernel: "+
		"{enableDSR: true}\nclusterCIDRR: 10.0.0.0/8\n")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`unknown field "clusterCIDRR"; it is ignored`,
		"iptables.localhostNodePorts is not served here and is ignored",
		"ipvs is not served here and is ignored",
		"winkernel is not served here and is ignored",
	}
	if !slices.Equal(c.remarks, want) {
		t.Errorf("remarks: %q, want %q", c.remarks, want)
	}
}

func TestAFileThatCannotBeUsedIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                     "is empty",
		"kind: [":                              "is not YAML",
		"apiVersion: v1\nkind: Service\n":      `is "Service" of "v1": write kind KubeProxyConfiguration`,
		configHead + "clusterCIDR: 5\n":        "cannot be decoded",
		configHead + "mode: ipvs\n":            `mode "ipvs" is not served`,
		configHead + "mode: userspace\n":       `mode "userspace": not a choice`,
		configHead + "clusterCIDR: 10.0.0.0\n": `clusterCIDR "10.0.0.0": not an address range`,
		configHead + "clusterCIDR: 10.244.1.5/16,fd44::/48\n": `clusterCIDR "10.244.1.5/16": not how this address range is written: write 10.244.0.0/16`,
		configHead + "nodePortAddresses: [192.168.1.5/24]\n":  `nodePortAddresses "192.168.1.5/24": not how this address range is written: write 192.168.1.0/24`,
		configHead + "detectLocalMode: Nobody\n":              `detectLocalMode "Nobody": not a mode`,
		configHead + "hostnameOverride: no_name\n":            `hostnameOverride "no_name": no Node can have this name: give hostnameOverride as`,
		configHead + "logging: {format: xml}\n":               `logging.format "xml": not a choice`,
		configHead + "mode: nftables\nnftables: {syncPeriod: 1s, minSyncPeriod: " +
			"2s}\n": "nftables.minSyncPeriod 2s: must be between 0 and nftables.syncPeriod 1s",
		configHead + "healthzBindAddress: localhost\n": `healthzBindAddress "localhost": not an address`,
		configHead + "conntrack: {maxPerCore: -1}\n":   "conntrack.maxPerCore",
	} {
		if _, err := configured(t, text); err == nil || !strings.Contains(err.Error(), want) || strings.Count(err.Error(), "--") != 1 {
			t.Errorf("%q gives %v, want %q and no flag but --config", text, err, want)
		}
	}
	_, err := configured(t, configHead+"clientConnection: {kubeconfig: /k}\n", "--manifests", t.TempDir())
	if err == nil || !strings.Contains(err.Error(), ": clientConnection.kubeconfig and --manifests: two sources") {
		t.Errorf("two sources give %v", err)
	}
	if _, err = configured(t, configHead, "--hostname-override", "no_name"); err == nil ||
		!strings.HasPrefix(err.Error(), `--hostname-override "no_name"`) {
		t.Errorf("a flag beside the file gives %v", err)
	}
}

func TestTheGateOfExternalIPsIsFollowed(t *testing.T) {
	for _, row := range []struct {
		name, file string
		args       []string
		want       bool
		remarks    int
	}{
		{"nothing said", "", nil, true, 0},
		{"the gate off", "featureGates: {AllowServiceExternalIPs: false}", nil, false, 0},
		{"the flag wins, since the file has no field for it", "featureGates: {AllowServiceExternalIPs: true}",
			[]string{"--allow-external-ips=false"}, false, 0},
		{"another gate is named", "featureGates: {AllowServiceExternalIPs: false, Other: true}", nil, false, 1},
	} {
		t.Run(row.name, func(t *testing.T) {
			c, err := configured(t, configHead+row.file, row.args...)
			if err != nil || c.AllowExternalIPs != row.want || len(c.remarks) != row.remarks {
				t.Errorf("allowed %v, remarks %q, error %v; want %v and %d remarks", c.AllowExternalIPs, c.remarks, err, row.want, row.remarks)
			}
		})
	}
}

// TestKubeProxysCommandLineIsTaken uses flags that have no effect here; a remark names
// each.
func TestKubeProxysCommandLineIsTaken(t *testing.T) {
	parse := func(args ...string) (Config, error) {
		var c Config
		f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(f)
		err := f.Parse(args)
		if err == nil {
			err = c.readConfig(f)
		}
		if err == nil {
			err = c.Validate()
		}
		return c, err
	}
	given := []string{
		"--bind-address=192.0.2.1", "--config-sync-period=15m", "--log-flush-frequency=5s", "--boot-id-file=/x", "--machine-id-file=/x",
		"--vmodule=x=3", "--oom-score-adj=-999", "--show-hidden-metrics-for-version=1.35", "--iptables-localhost-nodeports",
		"--iptables-masquerade-bit=15", "--ipvs-scheduler=rr", "--ipvs-strict-arp", "--ipvs-exclude-cidrs=10.0.0.0/8", "--ipvs-sync-period=30s",
	}
	c, err := parse(append(given, "--kube-api-qps=7.5", "--kube-api-burst=15", "--kube-api-content-type=application/json",
		"--logging-format=json",
		"--feature-gates=AllowServiceExternalIPs=false", "--bind-address-hard-fail", "--hostname-override", " NODE0 ")...)
	if err != nil {
		t.Fatal(err)
	}
	if c.client.QPS != 7.5 || c.client.Burst != 15 || c.client.ContentType != "application/json" || c.LogFormat != "json" ||
		c.AllowExternalIPs || !c.BindHardFail || c.NodeName != "node0" {
		t.Errorf("flags that mean something do not count: %+v", c)
	}
	for _, arg := range given {
		name, _, _ := strings.Cut(arg, "=")
		if !slices.Contains(c.remarks, name+" is not served here and is ignored") {
			t.Errorf("nothing is said about %s: %q", name, c.remarks)
		}
	}
	if len(c.remarks) != len(given) {
		t.Errorf("%d remarks, want %d: %q", len(c.remarks), len(given), c.remarks)
	}
	// These ask for what the agent does.
	c, err = parse("--bind-address=0.0.0.0", "--iptables-localhost-nodeports=false", "--iptables-masquerade-bit=14", "--ipvs-strict-arp=false",
		"--ipvs-scheduler=", "--log-json-split-stream=false")
	if err != nil || len(c.remarks) > 0 {
		t.Errorf("flags with the agent's own values: %v, remarks %q", err, c.remarks)
	}
	c, err = parse("--feature-gates=Other=true,AllowServiceExternalIPs=false", "--allow-external-ips")
	if err != nil || !c.AllowExternalIPs || len(c.remarks) != 1 || !strings.Contains(c.remarks[0], "Other") {
		t.Errorf("another gate: %v, %q, allowed %v", err, c.remarks, c.AllowExternalIPs)
	}
	var usage *cli.UsageError
	if _, err = parse("--feature-gates=Other"); !errors.As(err, &usage) {
		t.Errorf("a gate without a value: %v", err)
	}
	for _, arg := range []string{"--init-only", "--write-config-to=/x", "--healthz-port=0", "--metrics-port=1", "--version",
		"--hostname-override= "} {
		name, _, _ := strings.Cut(arg, "=")
		if _, err = parse(arg); !errors.As(err, &usage) || !strings.HasPrefix(err.Error(), name) {
			t.Errorf("%s: %v", arg, err)
		}
	}
}

func TestAFieldThatIsGivenTwiceIsNamed(t *testing.T) {
	c, err := configured(t, configHead+"mode: iptables\nconntrack: {min: 1, min: 2}\nmode: nftables\n")
	if err != nil {
		t.Fatal(err)
	}
	if c.ProxyMode != "nftables" || c.Conntrack.Min != 2 {
		t.Errorf("mode %s, conntrack.min %d: not the last of each", c.ProxyMode, c.Conntrack.Min)
	}
	if len(c.remarks) != 2 || !strings.Contains(c.remarks[0], `"min"`) || !strings.Contains(c.remarks[1], `"mode"`) {
		t.Errorf("remarks: %q", c.remarks)
	}
}

// TestNoFieldIsIgnoredInSilence sets each field of v1alpha1. It changes the agent's
// configuration in one of the modes, is refused by its name, or a remark names it.
func TestNoFieldIsIgnoredInSilence(t *testing.T) {
	fields := map[string]any{}
	leaves("", reflect.TypeFor[v1alpha1.KubeProxyConfiguration](), fields)
	if len(fields) < 50 {
		t.Fatalf("%d fields: %v", len(fields), fields)
	}
	for path, value := range fields {
		var answered bool
		for _, args := range [][]string{nil, {"--proxy-mode=nftables"}, {"--proxy-mode=iptables"}} {
			without, err := configured(t, configHead, args...)
			if err != nil {
				t.Fatal(err)
			}
			with, err := configured(t, configHead+field(t, path, value), args...)
			named := func(remark string) bool {
				name, _, _ := strings.Cut(remark, " ")
				return name == path || strings.HasPrefix(path, name+".")
			}
			answered = answered || err != nil && strings.Contains(err.Error(), path) || slices.ContainsFunc(with.remarks, named) ||
				err == nil && !reflect.DeepEqual(effects(without), effects(with))
		}
		if !answered {
			t.Errorf("%s: %v has no effect, and no remark names it", path, value)
		}
	}
}

// effects is the configuration without what a file always changes.
func effects(c Config) Config {
	c.ConfigFile, c.fields, c.remarks = "", nil, nil
	return c
}

// leaves adds the fields below a type by their path, each with a value that is not its
// default.
func leaves(path string, of reflect.Type, to map[string]any) {
	switch {
	case of == reflect.TypeFor[metav1.TypeMeta]():
	case of == reflect.TypeFor[metav1.Duration](), of.Name() == "TimeOrMetaDuration":
		to[path] = "7s"
	case of.Name() == "QuantityValue":
		to[path] = "7"
	case of.Name() == "VModuleConfiguration":
		to[path] = []any{map[string]any{"filePattern": "x", "verbosity": 7}}
	case of.Kind() == reflect.Pointer:
		leaves(path, of.Elem(), to)
	case of.Kind() == reflect.Struct:
		for i := range of.NumField() {
			f := of.Field(i)
			name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			if options != "inline" {
				name = strings.TrimPrefix(path+"."+name, ".")
			} else {
				name = path
			}
			leaves(name, f.Type, to)
		}
	case of.Kind() == reflect.Bool:
		to[path] = true
	case of.Kind() == reflect.String:
		to[path] = "7"
	case of.Kind() == reflect.Slice:
		to[path] = []any{"10.0.0.0/7"}
	case of.Kind() == reflect.Map:
		to[path] = map[string]any{"Seven": true}
	default:
		to[path] = 7
	}
}

// field is YAML with one field.
func field(t *testing.T, path string, value any) string {
	t.Helper()
	names := strings.Split(path, ".")
	for _, name := range slices.Backward(names) {
		value = map[string]any{name: value}
	}
	text, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestAFileOfTwoDocumentsIsRemarked(t *testing.T) {
	for text, remarks := range map[string]int{
		"---\n" + configHead + "---\n# nothing\n":        0,
		configHead + "---\n" + configHead + "mode: ipvs": 1,
	} {
		if c, err := configured(t, text); err != nil || len(c.remarks) != remarks {
			t.Errorf("%q: %v, remarks %q", text, err, c.remarks)
		}
	}
}

func TestAFileThatIsWrongIsWrongUsage(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: kubeproxy.config.k8s.io/v1beta4\nkind: KubeProxyConfiguration\n": "write kind",
		configHead + "iptables: {syncPeriod: 10}\n":                                   "such as 10s",
	} {
		var usage *cli.UsageError
		if _, err := configured(t, text); !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// TestRemarksDoNotWaitForTheAPIServer: an operator with a bad kubeconfig sees them too.
func TestRemarksDoNotWaitForTheAPIServer(t *testing.T) {
	var said strings.Builder
	a := testAgent(t, &memory{})
	a.stderr = &said
	a.cfg.Manifests, a.cfg.Kubeconfig, a.cfg.remarks = "", "/nonexistent/kubeconfig", []string{"a remark"}
	if err := a.run(t.Context()); err == nil || !strings.Contains(said.String(), "a remark") {
		t.Errorf("error %v, log %q", err, &said)
	}
}
