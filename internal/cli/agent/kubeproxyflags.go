package agent

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent/kubeproxyconfig"
)

// refusedFlags are flags of kube-proxy with which the agent does not start, and what to use
// instead.
var refusedFlags = map[string]string{
	"init-only":       "the agent has no separate start with more privileges: remove the flag, and see --drop-capabilities",
	"write-config-to": "the agent has no file of its own to write: give flags, or --config with kube-proxy's file",
	"healthz-port":    "give --healthz-bind-address",
	"metrics-port":    "give --metrics-bind-address",
	"version":         "run 'spillway version'",
}

// addHiddenFlags adds flags of kube-proxy that have no effect, so that its command line can be
// used unchanged. --help does not show them.
func addHiddenFlags(f *pflag.FlagSet) {
	for name := range refusedFlags {
		f.String(name, "", "")
		f.Lookup(name).Hidden = true
		f.Lookup(name).NoOptDefVal = "true"
	}
	for _, flag := range kubeproxyconfig.FlagsNotServed() {
		if flag.Switch {
			f.Bool(flag.Name, false, "")
		} else {
			f.String(flag.Name, "", "")
		}
		f.Lookup(flag.Name).Hidden = true
	}
}

// applyKubeProxyFlags adds remarks for flags that have no effect, and applies the
// feature gate that has one.
func (c *Config) applyKubeProxyFlags(f *pflag.FlagSet) error {
	for _, name := range slices.Sorted(maps.Keys(refusedFlags)) {
		if f.Changed(name) {
			return cli.UsageErrorf("--%s: kube-proxy's flag, which is not served here: %s", name, refusedFlags[name])
		}
	}
	for _, flag := range kubeproxyconfig.FlagsNotServed() {
		if f.Changed(flag.Name) && !slices.Contains(flag.Idle, f.Lookup(flag.Name).Value.String()) {
			c.remark("--%s is not served here and is ignored", flag.Name)
		}
	}
	for _, gate := range c.FeatureGates {
		name, text, _ := strings.Cut(gate, "=")
		on, err := strconv.ParseBool(text)
		switch {
		case err != nil:
			return cli.UsageErrorf("--feature-gates %q: not a gate: write NAME=true or NAME=false", gate)
		case name != kubeproxyconfig.GateExternalIPs:
			c.remark("--feature-gates %s is not served here and is ignored", name)
		case !f.Changed("allow-external-ips"):
			c.AllowExternalIPs = on
		}
	}
	return nil
}
