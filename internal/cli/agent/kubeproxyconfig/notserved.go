package kubeproxyconfig

import (
	"reflect"
	"slices"

	"k8s.io/kube-proxy/config/v1alpha1"
)

// setting is one of kube-proxy that has no effect here.
type setting struct {
	field string
	// set reports whether a file sets the field to something else than Spillway does; nil:
	// files have no such field.
	set func(*v1alpha1.KubeProxyConfiguration) bool
	// flags set the same. Their values in idle ask for what Spillway does.
	flags, idle []string
}

var notServed = []setting{
	{"featureGates", func(f *v1alpha1.KubeProxyConfiguration) bool {
		_, served := f.FeatureGates[GateExternalIPs]
		return len(f.FeatureGates) > 1 || len(f.FeatureGates) == 1 && !served
	}, nil, nil},
	{"bindAddress", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return !slices.Contains([]string{"", "0.0.0.0", "::"}, f.BindAddress)
	}, []string{"bind-address"}, []string{"", "0.0.0.0", "::"}},
	{"showHiddenMetricsForVersion",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return f.ShowHiddenMetricsForVersion != "" },
		[]string{"show-hidden-metrics-for-version"}, []string{""}},
	{"iptables.localhostNodePorts", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.IPTables.LocalhostNodePorts != nil && *f.IPTables.LocalhostNodePorts
	}, []string{"iptables-localhost-nodeports"}, []string{"false"}},
	{"iptables.masqueradeBit", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.IPTables.MasqueradeBit != nil && *f.IPTables.MasqueradeBit != 14
	}, []string{"iptables-masquerade-bit"}, []string{"14"}},
	{"nftables.masqueradeBit", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.NFTables.MasqueradeBit != nil && *f.NFTables.MasqueradeBit != 14
	}, nil, nil},
	{"ipvs",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return hasIPVSOptions(f.IPVS) },
		[]string{"ipvs-sync-period", "ipvs-min-sync-period", "ipvs-scheduler", "ipvs-exclude-cidrs", "ipvs-strict-arp", "ipvs-tcp-timeout",
			"ipvs-tcpfin-timeout", "ipvs-udp-timeout"}, []string{"", "false"}},
	{"winkernel", func(f *v1alpha1.KubeProxyConfiguration) bool {
		return f.Winkernel != (v1alpha1.KubeProxyWinkernelConfiguration{})
	}, nil, nil},
	{"windowsRunAsService", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.WindowsRunAsService }, nil, nil},
	{"oomScoreAdj", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.OOMScoreAdj != nil }, []string{"oom-score-adj"}, nil},
	{"portRange", func(f *v1alpha1.KubeProxyConfiguration) bool { return f.PortRange != "" }, nil, nil},
	{"clientConnection.acceptContentTypes",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return f.ClientConnection.AcceptContentTypes != "" }, nil, nil},
	{"configSyncPeriod",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return f.ConfigSyncPeriod.Duration != 0 }, []string{"config-sync-period"}, nil},
	{"logging.vmodule",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return len(f.Logging.VModule) > 0 }, []string{"vmodule"}, []string{""}},
	{"logging.flushFrequency",
		func(f *v1alpha1.KubeProxyConfiguration) bool { return f.Logging.FlushFrequency.Duration.Duration != 0 },
		[]string{"log-flush-frequency"}, nil},
	{"logging.options", hasLoggingOptions, []string{
		"log-text-split-stream", "log-text-info-buffer-size", "log-json-split-stream", "log-json-info-buffer-size",
	}, []string{"", "0", "false"}},
	{"", nil, []string{"boot-id-file", "machine-id-file"}, nil}, // cAdvisor's, of kube-proxy before 1.36
}

// hasLoggingOptions reports whether the section has values that kubeadm does not write.
func hasLoggingOptions(f *v1alpha1.KubeProxyConfiguration) bool {
	text, json := f.Logging.Options.Text, f.Logging.Options.JSON
	return text.SplitStream || json.SplitStream || !text.InfoBufferSize.IsZero() || !json.InfoBufferSize.IsZero()
}

// hasIPVSOptions reports whether the section has values that kubeadm does not write.
func hasIPVSOptions(i v1alpha1.KubeProxyIPVSConfiguration) bool {
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
	"iptables-localhost-nodeports", "ipvs-strict-arp", "log-text-split-stream", "log-json-split-stream",
}

// Flag is a flag of kube-proxy.
type Flag struct {
	Name   string
	Switch bool     // it can be given without a value
	Idle   []string // values that ask for what Spillway does
}

// FlagsNotServed are the flags of kube-proxy that have no effect here.
func FlagsNotServed() (flags []Flag) {
	for _, n := range notServed {
		for _, name := range n.flags {
			flags = append(flags, Flag{name, slices.Contains(switches, name), n.idle})
		}
	}
	return flags
}
