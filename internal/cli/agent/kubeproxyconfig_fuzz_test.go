package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// FuzzKubeProxyConfiguration reads files with any content. Reading must end, and report
// errors in one line.
func FuzzKubeProxyConfiguration(f *testing.F) {
	const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	for _, s := range []string{
		head, head + "mode: ipvs\n", head + "mode: iptables\niptables: {syncPeriod: 10s, masqueradeAll: true}\nclusterCIDR: " +
			"10.0.0.0/8,fd00::/16\nhostnameOverride: ' N '\n",
		head + "conntrack: {maxPerCore: 0, min: -1, tcpEstablishedTimeout: 0s, udpTimeout: -5s}\n",
		head + "nodePortAddresses: [primary, 10.0.0.1/8]\nfeatureGates: {AllowServiceExternalIPs: false}\n",
		head + "iptables: {syncPeriod: 10}\n", head + "a: &a [x]\nb: [*a, *a]\n", "---\n---\n" + head, "null", "", "kind: 1", "\xff",
		head + "detectLocal: {bridgeInterface: \"a\\nb\"}\ndetectLocalMode: \"a\\nb\"\n",
		head + "logging: {verbosity: 99999, format: json}\n\"a\\nb\": 1\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		path := filepath.Join(t.TempDir(), "config.yaml")
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		var c Config
		flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(flags)
		if err := flags.Parse([]string{"--config", path}); err != nil {
			t.Fatal(err)
		}
		err := c.readConfig(flags)
		if err == nil {
			err = c.Validate()
		}
		if err != nil && strings.ContainsAny(strings.ReplaceAll(err.Error(), path, ""), "\n\r") {
			t.Errorf("not one line: %q", err)
		}
		for _, line := range c.remarks {
			if strings.ContainsAny(line, "\n\r") {
				t.Errorf("not one line: %q", line)
			}
		}
	})
}
