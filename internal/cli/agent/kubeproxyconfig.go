package agent

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/kube-proxy/config/v1alpha1"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent/kubeproxyconfig"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/proxymode"
)

// configFlags returns the flags that KubeProxyConfiguration has a field for. As with
// kube-proxy they have no effect beside --config. --proxy-mode is not among them:
// the file of kube-proxy cannot name every dataplane here.
func (c *Config) configFlags() []flag {
	return slices.DeleteFunc(c.flags(), func(f flag) bool { return f.field == "" })
}

// setting names where a value is set: a flag, or a field of --config in its place.
func (c *Config) setting(flag string) string {
	if field, ok := c.fields[flag]; ok {
		return field + " in --config"
	}
	return "--" + flag
}

// flagName matches a flag in a message.
var flagName = regexp.MustCompile(`--[a-z][-a-z0-9]*`)

// inFile changes an error so that it names the fields of --config whose values are
// refused, instead of the flags that the operator did not give.
func (c *Config) inFile(err error) error {
	var usage *cli.UsageError
	if len(c.fields) == 0 || !errors.As(err, &usage) {
		return err
	}
	named := false
	text := flagName.ReplaceAllStringFunc(usage.Error(), func(flag string) string {
		field, ok := c.fields[flag[2:]]
		if !ok {
			return flag
		}
		named = true
		return field
	})
	if !named {
		return err
	}
	return cli.UsageErrorf("--config %s: %s", c.ConfigFile, text)
}

// readConfig applies the file of --config, if there is one. Settings that are
// unknown or not served here become remarks.
func (c *Config) readConfig(f *pflag.FlagSet) error {
	c.Conntrack.given = map[string]bool{}
	if c.ConfigFile == "" {
		for _, flag := range c.configFlags() {
			fl := f.Lookup(flag.name)
			c.Conntrack.given[flag.name] = fl != nil && fl.Changed
		}
		if least := f.Lookup("iptables-min-sync-period"); least == nil || !least.Changed {
			c.defaultMinSyncPeriod()
		}
		return c.applyKubeProxyFlags(f)
	}
	text, err := os.ReadFile(c.ConfigFile)
	if err != nil {
		return fmt.Errorf("read --config: %w", err)
	}
	file, remarks, err := kubeproxyconfig.Decode(text)
	if err != nil {
		return cli.UsageErrorf("read --config %s: %v", c.ConfigFile, err)
	}
	c.remarks = append(c.remarks, remarks...)
	c.fields = map[string]string{}
	for _, flag := range c.configFlags() {
		c.fields[flag.name] = flag.field
		if fl := f.Lookup(flag.name); fl != nil && fl.Changed {
			c.remark("--%s does not count beside --config; set it in the file", flag.name)
			if err := reset(fl); err != nil {
				return fmt.Errorf("read --config: reset --%s: %w", flag.name, err)
			}
		}
	}
	if err := c.applyKubeProxyFlags(f); err != nil {
		return err
	}
	return c.applyConfig(f, file)
}

// reset gives a flag its default value again. The default of a list is empty, which
// a list cannot parse.
func reset(f *pflag.Flag) error {
	if list, ok := f.Value.(pflag.SliceValue); ok {
		return list.Replace(nil)
	}
	return f.Value.Set(f.DefValue)
}

// applyConfig applies the file; a zero value means kube-proxy's default.
func (c *Config) applyConfig(f *pflag.FlagSet, file *v1alpha1.KubeProxyConfiguration) error {
	if c.NodeName == "" && file.HostnameOverride != "" { // --hostname-override wins, as with kube-proxy
		c.NodeName, c.fields["hostname-override"] = file.HostnameOverride, "hostnameOverride"
	}
	if !f.Changed("proxy-mode") && file.Mode != "" {
		c.ProxyMode, c.fields["proxy-mode"] = string(file.Mode), "mode"
	}
	if c.ProxyMode == "ipvs" {
		return cli.UsageErrorf("--config %s: mode \"ipvs\" is not served: write one of %s", c.ConfigFile, strings.Join(proxymode.Names(), ", "))
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
	c.BindHardFail = file.BindAddressHardFail
	c.Profiling = file.EnableProfiling
	if v := int(file.Logging.Verbosity); v != 0 && !f.Changed("v") {
		c.Verbosity = v
	}
	if !f.Changed("log-format") && !f.Changed("logging-format") && file.Logging.Format != "" {
		c.LogFormat, c.fields["log-format"] = file.Logging.Format, "logging.format"
	}
	if allow, ok := file.FeatureGates[kubeproxyconfig.GateExternalIPs]; ok && !f.Changed("allow-external-ips") {
		c.AllowExternalIPs = allow
	}
	c.applyModeConfig(file)
	c.applyConntrackConfig(&file.Conntrack)
	for _, field := range kubeproxyconfig.NotServed(file) {
		c.remark("%s is not served here and is ignored", field)
	}
	return nil
}

// applyModeConfig applies the section of the proxy mode. The file has no section for
// ebpf, which uses that of iptables, as the names of the flags do.
func (c *Config) applyModeConfig(file *v1alpha1.KubeProxyConfiguration) {
	period, least := file.IPTables.SyncPeriod.Duration, file.IPTables.MinSyncPeriod.Duration
	c.MasqueradeAll = file.IPTables.MasqueradeAll
	section := "iptables."
	if c.ProxyMode == "nftables" {
		section = "nftables."
		period, least = file.NFTables.SyncPeriod.Duration, file.NFTables.MinSyncPeriod.Duration
		c.MasqueradeAll = file.NFTables.MasqueradeAll
	}
	c.fields["masquerade-all"] = section + "masqueradeAll"
	c.fields["iptables-sync-period"], c.fields["iptables-min-sync-period"] = section+"syncPeriod", section+"minSyncPeriod"
	set(&c.SyncPeriod, period)
	c.defaultMinSyncPeriod()
	set(&c.MinSyncPeriod, least)
}

// defaultMinSyncPeriod sets the time between syncs for a configuration that has none. A
// sync of a few changes takes the eBPF dataplane a few hundred microseconds, in a cluster
// of any size. So it need not wait for more changes.
func (c *Config) defaultMinSyncPeriod() {
	if c.ProxyMode == "ebpf" {
		c.MinSyncPeriod = 10 * time.Millisecond
	}
}

func (c *Config) applyConntrackConfig(file *v1alpha1.KubeProxyConntrackConfiguration) {
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
	set(&c.EBPF.TCPLiberal, file.TCPBeLiberal)
	c.Conntrack.given[conntrack.FlagMaxPerCore] = file.MaxPerCore != nil
	c.Conntrack.given[conntrack.FlagMin] = file.Min != nil
	c.Conntrack.given[conntrack.FlagUDP] = file.UDPTimeout.Duration != 0
	c.Conntrack.given[conntrack.FlagUDPStream] = file.UDPStreamTimeout.Duration != 0
}

// set sets *to unless v is the zero value.
func set[T comparable](to *T, v T) {
	var zero T
	if v != zero {
		*to = v
	}
}

// remark notes something about the configuration for the log.
func (c *Config) remark(format string, args ...any) {
	c.remarks = append(c.remarks, fmt.Sprintf(format, args...))
}
