package main

import (
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/kube-proxy/config/v1alpha1"
)

// notServed is what kube-proxy can be asked for that this proxy does not do, or does
// not have to do: the field of a file, how to see that it is set (nil: it never
// matters), and the flags that ask for the same.
var notServed = []struct {
	field string
	set   func(*v1alpha1.KubeProxyConfiguration) bool
	flags []string
}{
	{"featureGates", func(f *v1alpha1.KubeProxyConfiguration) bool {
		_, served := f.FeatureGates[gateExternalIPs]
		return len(f.FeatureGates) > 1 || len(f.FeatureGates) == 1 && !served
	}, nil},
	{"bindAddress", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return !slices.Contains([]string{"", "0.0.0.0", "::"}, f.BindAddress)
	}, []string{"bind-address"}},
	{"showHiddenMetricsForVersion", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.ShowHiddenMetricsForVersion != "" }, []string{"show-hidden-metrics-for-version"}},
	{"iptables.localhostNodePorts", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.IPTables.LocalhostNodePorts != nil && *f.IPTables.LocalhostNodePorts
	}, []string{"iptables-localhost-nodeports"}},
	{"iptables.masqueradeBit", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.IPTables.MasqueradeBit != nil && *f.IPTables.MasqueradeBit != 14
	}, []string{"iptables-masquerade-bit"}},
	{"nftables.masqueradeBit", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.NFTables.MasqueradeBit != nil && *f.NFTables.MasqueradeBit != 14
	}, nil},
	{"ipvs", func(f *v1alpha1.KubeProxyConfiguration) bool { return ipvsAsked(f.IPVS) }, []string{"ipvs-sync-period", "ipvs-min-sync-period", "ipvs-scheduler", "ipvs-exclude-cidrs", "ipvs-strict-arp", "ipvs-tcp-timeout", "ipvs-tcpfin-timeout", "ipvs-udp-timeout"}},
	{"winkernel", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.Winkernel != (v1alpha1.KubeProxyWinkernelConfiguration{})
	}, nil},
	{"windowsRunAsService", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.WindowsRunAsService }, nil},
	{"oomScoreAdj", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.OOMScoreAdj != nil }, []string{"oom-score-adj"}},
	{"portRange", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.PortRange != "" }, nil},
	{"clientConnection.acceptContentTypes", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.ClientConnection.AcceptContentTypes != "" }, nil},
	{"bindAddressHardFail", nil, []string{"bind-address-hard-fail"}},
	{"configSyncPeriod", nil, []string{"config-sync-period"}},
	{"logging", nil, []string{
		"vmodule", "log-flush-frequency", "log-text-split-stream", "log-text-info-buffer-size", "log-json-split-stream", "log-json-info-buffer-size",
	}},
}

// ipvsAsked reports whether the section says more than kubeadm writes into it.
func ipvsAsked(i v1alpha1.KubeProxyIPVSConfiguration) bool {
	i.SyncPeriod.Duration, i.MinSyncPeriod.Duration = 0, 0
	if len(i.ExcludeCIDRs) == 0 {
		i.ExcludeCIDRs = nil
	}
	return !reflect.DeepEqual(i, v1alpha1.KubeProxyIPVSConfiguration{})
}

func unsupported(file *v1alpha1.KubeProxyConfiguration) []string {
	var out []string
	for _, n := range notServed {
		if n.set != nil && n.set(file) {
			out = append(out, n.field)
		}
	}
	return out
}

// switches are the flags of notServed that can be given without a value.
var switches = []string{
	"iptables-localhost-nodeports", "ipvs-strict-arp", "bind-address-hard-fail", "log-text-split-stream", "log-json-split-stream",
}

// addKubeProxyFlags adds flags of kube-proxy that this agent takes so that its command
// line can be kept. --help shows those that mean something.
func (c *agentConfig) addKubeProxyFlags(f *pflag.FlagSet) {
	f.Float32Var(&c.client.QPS, "kube-api-qps", 0, "requests to the API server in a second (default: 5)")
	f.IntVar(&c.client.Burst, "kube-api-burst", 0, "requests to the API server at once (default: 10)")
	f.StringVar(&c.client.ContentType, "kube-api-content-type", "", "how the API server is to write objects (default: application/vnd.kubernetes.protobuf)")
	f.StringSliceVar(&c.FeatureGates, "feature-gates", nil, gateExternalIPs+"=false is --allow-external-ips=false; other gates of kube-proxy are named in the log and ignored")
	f.StringVar(&c.LogFormat, "logging-format", "text", "the same as --log-format")
	for _, n := range notServed {
		for _, name := range n.flags {
			if slices.Contains(switches, name) {
				f.Bool(name, false, "")
			} else {
				f.String(name, "", "")
			}
			f.Lookup(name).Hidden = true
		}
	}
}

// takeKubeProxyFlags names flags that are given in vain, and follows a gate.
func (c *agentConfig) takeKubeProxyFlags(f *pflag.FlagSet) error {
	for _, n := range notServed {
		for _, name := range n.flags {
			if f.Changed(name) {
				c.remark("--%s is not served here and is ignored", name)
			}
		}
	}
	for _, gate := range c.FeatureGates {
		name, text, _ := strings.Cut(gate, "=")
		on, err := strconv.ParseBool(text)
		switch {
		case err != nil:
			return usageErrorf("--feature-gates %q: not a gate: write NAME=true or NAME=false", gate)
		case name != gateExternalIPs:
			c.remark("--feature-gates %s is not served here and is ignored", name)
		case !f.Changed("allow-external-ips"):
			c.AllowExternalIPs = on
		}
	}
	return nil
}
