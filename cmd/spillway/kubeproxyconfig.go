package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/kube-proxy/config/v1alpha1"
	kjson "sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// configFlags are the flags whose values stand in a KubeProxyConfiguration. As
// with kube-proxy they do not count when --config is given. --proxy-mode is not
// among them: kube-proxy's files cannot ask for every dataplane here.
var configFlags = []string{
	"kubeconfig", "cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
	"nodeport-addresses", "masquerade-all", "healthz-bind-address", "metrics-bind-address", "profiling",
	"conntrack-max-per-core", "conntrack-min", "conntrack-tcp-timeout-established",
	"conntrack-tcp-timeout-close-wait", "conntrack-udp-timeout", "conntrack-udp-timeout-stream",
	"iptables-sync-period", "iptables-min-sync-period",
	"kube-api-qps", "kube-api-burst", "kube-api-content-type", "feature-gates",
}

// gateExternalIPs is the feature gate by which kube-proxy serves externalIPs: on
// by default since KEP-5707 made it (1.36), and to be off in a later version.
const gateExternalIPs = "AllowServiceExternalIPs"

// readConfig takes over the file of --config, if there is one. What it says
// that is not known or not served here comes back as remarks.
func (c *agentConfig) readConfig(f *pflag.FlagSet) error {
	c.Conntrack.given = map[string]bool{}
	if c.ConfigFile == "" {
		for _, name := range configFlags {
			fl := f.Lookup(name)
			c.Conntrack.given[name] = fl != nil && fl.Changed
		}
		if least := f.Lookup("iptables-min-sync-period"); least == nil || !least.Changed {
			c.hurry()
		}
		return c.takeKubeProxyFlags(f)
	}
	text, err := os.ReadFile(c.ConfigFile)
	if err != nil {
		return fmt.Errorf("read --config: %w", err)
	}
	file, unknown, err := decodeConfig(text)
	if err != nil {
		return usageErrorf("read --config %s: %v", c.ConfigFile, err)
	}
	if more, err := documents(text); err != nil {
		return usageErrorf("read --config %s: %v", c.ConfigFile, err)
	} else if more > 1 {
		c.remark("the file has %d documents; only the first counts", more)
	}
	for _, u := range unknown {
		c.remark("%s; it is ignored", u)
	}
	for _, name := range configFlags {
		if fl := f.Lookup(name); fl != nil && fl.Changed {
			c.remark("--%s does not count beside --config; set it in the file", name)
			if err := reset(fl); err != nil {
				return fmt.Errorf("read --config: reset --%s: %w", name, err)
			}
		}
	}
	if err := c.takeKubeProxyFlags(f); err != nil {
		return err
	}
	return c.takeConfig(f, file)
}

// reset gives a flag its default again. Lists are empty by default, which they
// cannot parse.
func reset(f *pflag.Flag) error {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.Replace(nil)
	}
	return f.Value.Set(f.DefValue)
}

// decodeConfig reads a KubeProxyConfiguration. Fields that it does not know are
// no errors, as they are none to kube-proxy.
func decodeConfig(text []byte) (*v1alpha1.KubeProxyConfiguration, []string, error) {
	raw, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, nil, fmt.Errorf("is not YAML: %w", err)
	}
	if bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
		return nil, nil, fmt.Errorf("is empty: write a KubeProxyConfiguration")
	}
	var file v1alpha1.KubeProxyConfiguration
	strict, err := kjson.UnmarshalStrict(raw, &file)
	if err != nil {
		if strings.Contains(err.Error(), "cannot unmarshal number") && strings.HasSuffix(err.Error(), "of type string") {
			err = fmt.Errorf("%w: write text there, with its unit for a duration, such as 10s", err)
		}
		return nil, nil, fmt.Errorf("cannot be decoded: %w", err)
	}
	if want := v1alpha1.SchemeGroupVersion.String(); file.APIVersion != want || file.Kind != "KubeProxyConfiguration" {
		return nil, nil, fmt.Errorf("is %q of %q: write kind KubeProxyConfiguration of %s", file.Kind, file.APIVersion, want)
	}
	var unknown []string
	for _, e := range strict {
		unknown = append(unknown, e.Error())
	}
	return &file, unknown, nil
}

// documents counts the documents of a YAML file that hold something.
func documents(text []byte) (n int, err error) {
	r := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		doc, err := r.Read()
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, fmt.Errorf("is not YAML: %w", err)
		}
		if raw, err := yaml.YAMLToJSON(doc); err != nil || !bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
			n++
		}
	}
}

// takeConfig sets what the file says; a zero value is kube-proxy's default.
func (c *agentConfig) takeConfig(f *pflag.FlagSet, file *v1alpha1.KubeProxyConfiguration) error {
	if c.NodeName == "" { // --hostname-override wins, as with kube-proxy
		c.NodeName = strings.ToLower(strings.TrimSpace(file.HostnameOverride))
	}
	if !f.Changed("proxy-mode") && file.Mode != "" {
		c.ProxyMode = string(file.Mode)
	}
	if c.ProxyMode == "ipvs" {
		return usageErrorf("--config %s: mode \"ipvs\" is not served: write one of %s", c.ConfigFile, strings.Join(proxyModeNames(), ", "))
	}
	c.Kubeconfig = file.ClientConnection.Kubeconfig
	c.client.QPS, c.client.Burst = file.ClientConnection.QPS, int(file.ClientConnection.Burst)
	c.client.ContentType = file.ClientConnection.ContentType
	if file.ClusterCIDR != "" {
		c.ClusterCIDR = strings.Split(file.ClusterCIDR, ",")
	}
	set(&c.DetectLocalMode, string(file.DetectLocalMode))
	c.PodBridge, c.PodInterfacePrefix = file.DetectLocal.BridgeInterface, file.DetectLocal.InterfaceNamePrefix
	c.NodePortAddresses = file.NodePortAddresses
	set(&c.HealthzAddr, file.HealthzBindAddress)
	set(&c.MetricsAddr, file.MetricsBindAddress)
	c.Profiling = file.EnableProfiling
	if v := int(file.Logging.Verbosity); v != 0 && !f.Changed("v") {
		c.Verbosity = v
	}
	if !f.Changed("log-format") && !f.Changed("logging-format") && (file.Logging.Format == "json" || file.Logging.Format == "text") {
		c.LogFormat = file.Logging.Format
	}
	if allow, ok := file.FeatureGates[gateExternalIPs]; ok && !f.Changed("allow-external-ips") {
		c.AllowExternalIPs = allow
	}
	c.takeModeConfig(file)
	c.takeConntrackConfig(&file.Conntrack)
	for _, field := range unsupported(file) {
		c.remark("%s is not served here and is ignored", field)
	}
	return nil
}

// takeModeConfig reads the section of the chosen mode; ebpf, of which the file
// has none, goes by that of iptables, as the names of the flags do.
func (c *agentConfig) takeModeConfig(file *v1alpha1.KubeProxyConfiguration) {
	period, least := file.IPTables.SyncPeriod.Duration, file.IPTables.MinSyncPeriod.Duration
	c.MasqueradeAll = file.IPTables.MasqueradeAll
	if c.ProxyMode == "nftables" {
		period, least = file.NFTables.SyncPeriod.Duration, file.NFTables.MinSyncPeriod.Duration
		c.MasqueradeAll = file.NFTables.MasqueradeAll
	}
	set(&c.SyncPeriod, period)
	c.hurry()
	set(&c.MinSyncPeriod, least)
}

// hurry is for when nobody has said how often the kernel is written to at most. A
// sync of a few changes is a few hundred microseconds of work for the eBPF dataplane,
// in a cluster of any size, so it need not wait for more to come.
func (c *agentConfig) hurry() {
	if c.ProxyMode == "ebpf" {
		c.MinSyncPeriod = 10 * time.Millisecond
	}
}

func (c *agentConfig) takeConntrackConfig(file *v1alpha1.KubeProxyConntrackConfiguration) {
	if file.MaxPerCore != nil {
		c.Conntrack.MaxPerCore = *file.MaxPerCore
	}
	if file.Min != nil {
		c.Conntrack.Min = *file.Min
	}
	if d := file.TCPEstablishedTimeout; d != nil {
		c.Conntrack.TCPEstablished = d.Duration
	}
	if d := file.TCPCloseWaitTimeout; d != nil {
		c.Conntrack.TCPCloseWait = d.Duration
	}
	set(&c.Conntrack.UDP, file.UDPTimeout.Duration)
	set(&c.Conntrack.UDPStream, file.UDPStreamTimeout.Duration)
	set(&c.Conntrack.TCPBeLiberal, file.TCPBeLiberal)
	c.Conntrack.given["conntrack-max-per-core"] = file.MaxPerCore != nil
	c.Conntrack.given["conntrack-min"] = file.Min != nil
	c.Conntrack.given["conntrack-udp-timeout"] = file.UDPTimeout.Duration != 0
	c.Conntrack.given["conntrack-udp-timeout-stream"] = file.UDPStreamTimeout.Duration != 0
}

// set sets what is given, and leaves the default otherwise.
func set[T comparable](to *T, v T) {
	var zero T
	if v != zero {
		*to = v
	}
}

// remark notes something about the configuration for the log.
func (c *agentConfig) remark(format string, args ...any) {
	c.remarks = append(c.remarks, fmt.Sprintf(format, args...))
}
