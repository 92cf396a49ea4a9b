package agent

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
)

// withFlags returns the configuration of a command line, and the error of Validate.
func withFlags(t *testing.T, args ...string) (*Config, error) {
	t.Helper()
	var c Config
	f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	c.AddFlags(f)
	if err := f.Parse(append([]string{"--hostname-override=n"}, args...)); err != nil {
		t.Fatal(err)
	}
	return &c, c.Validate()
}

func TestPeriodsThatCannotWorkAreRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--iptables-sync-period=0s":                                    "--iptables-sync-period 0s: must be longer than 0",
		"--iptables-sync-period=-5s":                                   "--iptables-sync-period -5s: must be longer than 0",
		"--iptables-min-sync-period=-1s":                               "--iptables-min-sync-period -1s: must be between 0 and --iptables-sync-period 30s",
		"--iptables-min-sync-period=31s":                               "--iptables-min-sync-period 31s: must be between 0 and --iptables-sync-period 30s",
		"--conntrack-udp-timeout=999ms":                                "--conntrack-udp-timeout 999ms: must be a second or longer, or 0 for the default",
		"--iptables-sync-period=1s --iptables-min-sync-period=1s":      "",
		"--conntrack-udp-timeout=0s --iptables-min-sync-period=0s":     "",
		"--conntrack-udp-timeout=1s --conntrack-udp-timeout-stream=1h": "",
	} {
		_, err := withFlags(t, strings.Fields(args)...)
		var usage *cli.UsageError
		if want == "" && err != nil || want != "" && (err == nil || err.Error() != want || !errors.As(err, &usage)) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}

func TestIntentKnowsTheServersOfTheAgent(t *testing.T) {
	for args, want := range map[string]string{
		"": "[0.0.0.0:10256 127.0.0.1:10249]",
		"--healthz-bind-address=:1 --metrics-bind-address=":               "[[::]:1]",
		"--healthz-bind-address=192.0.2.1 --metrics-bind-address=[::1]:2": "[192.0.2.1:10256 [::1]:2]",
	} {
		c, err := withFlags(t, strings.Fields(args)...)
		if got := fmt.Sprint(c.intent().Servers); err != nil || got != want {
			t.Errorf("%s: %s (%v), want %s", args, got, err, want)
		}
	}
}
