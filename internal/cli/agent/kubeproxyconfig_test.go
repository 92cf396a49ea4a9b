package agent

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

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
	if c.ProxyMode != "ebpf" || c.NodeName != "flag" || c.Verbosity != 5 || c.Bypass != "never" {
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
	c, err := configured(t, configHead+"mode: iptables\nipvs: {scheduler: rr}\niptables: {localhostNodePorts: true}\nwinkernel: {enableDSR: true}\nclusterCIDRR: 10.0.0.0/8\n")
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
		configHead + "mode: userspace\n":       `--proxy-mode "userspace": not a proxy mode`,
		configHead + "clusterCIDR: 10.0.0.0\n": `--cluster-cidr "10.0.0.0": not an address range`,
		configHead + "clusterCIDR: 10.244.1.5/16,fd44::/48\n": `--cluster-cidr "10.244.1.5/16": not how this address range is written: write 10.244.0.0/16`,
		configHead + "nodePortAddresses: [192.168.1.5/24]\n":  `--nodeport-addresses "192.168.1.5/24": not how this address range is written: write 192.168.1.0/24`,
		configHead + "detectLocalMode: Nobody\n":              `--detect-local-mode "Nobody": not a mode`,
	} {
		if _, err := configured(t, text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q gives %v, want %q", text, err, want)
		}
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
		{"the flag wins, since the file has no field for it", "featureGates: {AllowServiceExternalIPs: true}", []string{"--allow-external-ips=false"}, false, 0},
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
		"--bind-address=0.0.0.0", "--bind-address-hard-fail", "--config-sync-period=15m", "--log-flush-frequency=5s",
		"--vmodule=x=3", "--oom-score-adj=-999", "--show-hidden-metrics-for-version=1.35", "--iptables-localhost-nodeports=false",
		"--iptables-masquerade-bit=14", "--ipvs-scheduler=rr", "--ipvs-strict-arp", "--ipvs-exclude-cidrs=10.0.0.0/8", "--ipvs-sync-period=30s",
	}
	c, err := parse(append(given, "--kube-api-qps=7.5", "--kube-api-burst=15", "--kube-api-content-type=application/json", "--logging-format=json",
		"--feature-gates=AllowServiceExternalIPs=false")...)
	if err != nil {
		t.Fatal(err)
	}
	if c.client.QPS != 7.5 || c.client.Burst != 15 || c.client.ContentType != "application/json" || c.LogFormat != "json" || c.AllowExternalIPs {
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
	c, err = parse("--feature-gates=Other=true,AllowServiceExternalIPs=false", "--allow-external-ips")
	if err != nil || !c.AllowExternalIPs || len(c.remarks) != 1 || !strings.Contains(c.remarks[0], "Other") {
		t.Errorf("another gate: %v, %q, allowed %v", err, c.remarks, c.AllowExternalIPs)
	}
	var usage *cli.UsageError
	if _, err = parse("--feature-gates=Other"); !errors.As(err, &usage) {
		t.Errorf("a gate without a value: %v", err)
	}
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
