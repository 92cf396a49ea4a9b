package kubeproxyconfig

import (
	"reflect"
	"slices"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// notServed lists settings of kube-proxy that have no effect here. An entry has the field
// of the file, whether a file sets it (nil: the field never matters), and the flags that
// set the same.
var notServed = []struct {
	field string
	set   func(*v1alpha1.KubeProxyConfiguration) bool
	flags []string
}{
	{"featureGates", func(f *v1alpha1.KubeProxyConfiguration) bool {
		_, served := f.FeatureGates[GateExternalIPs]
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

// ipvsAsked reports whether the section has values that kubeadm does not write.
func ipvsAsked(i v1alpha1.KubeProxyIPVSConfiguration) bool {
	i.SyncPeriod.Duration, i.MinSyncPeriod.Duration = 0, 0
	if len(i.ExcludeCIDRs) == 0 {
		i.ExcludeCIDRs = nil
	}
	return !reflect.DeepEqual(i, v1alpha1.KubeProxyIPVSConfiguration{})
}

// NotServed names the fields that the file sets and that have no effect here.
func NotServed(file *v1alpha1.KubeProxyConfiguration) []string {
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

// Flag is a flag of kube-proxy.
type Flag struct {
	Name   string
	Switch bool // it can be given without a value
}

// FlagsNotServed are the flags of kube-proxy that have no effect here.
func FlagsNotServed() (flags []Flag) {
	for _, n := range notServed {
		for _, name := range n.flags {
			flags = append(flags, Flag{name, slices.Contains(switches, name)})
		}
	}
	return flags
}
