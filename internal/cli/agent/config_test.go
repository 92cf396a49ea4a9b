package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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
		"--iptables-sync-period=0s":  "--iptables-sync-period 0s: must be longer than 0",
		"--iptables-sync-period=-5s": "--iptables-sync-period -5s: must be longer than 0",
		"--iptables-min-sync-period=-1s": "--iptables-min-sync-period -1s: must be between 0 and " +
			"--iptables-sync-period 30s",
		"--iptables-min-sync-period=31s": "--iptables-min-sync-period 31s: must be between 0 and " +
			"--iptables-sync-period 30s",
		"--conntrack-udp-timeout=999ms": "--conntrack-udp-timeout 999ms: must be a second or longer, or 0 " +
			"for the default",
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

// TestLocalhostNodePorts names combinations of flags in which --localhost-nodeports has no
// effect.
func TestLocalhostNodePorts(t *testing.T) {
	const refused = "--localhost-nodeports and --socket-hooks off: only socket hooks serve NodePorts on loopback: give one of them"
	for args, want := range map[string]struct{ err, warning string }{
		"":                      {},
		"--localhost-nodeports": {},
		"--localhost-nodeports --socket-hooks=host":                         {},
		"--localhost-nodeports --nodeport-addresses=10.0.0.0/8,127.0.0.0/8": {},
		"--localhost-nodeports --socket-hooks=off":                          {err: refused},
		"--localhost-nodeports --proxy-mode=nftables": {
			warning: "flag has no meaning with this --proxy-mode\" flag=--localhost-nodeports"},
		"--localhost-nodeports --nodeport-addresses=10.0.0.0/8,fd00::/8": {
			warning: "--localhost-nodeports serves nothing: --nodeport-addresses has no loopback address"},
		"--localhost-nodeports --nodeport-addresses=primary": {
			warning: "--localhost-nodeports serves nothing: --nodeport-addresses has no loopback address"},
		"--localhost-nodeports --nodeport-addresses=primary --proxy-mode=iptables": {warning: "has no meaning with this --proxy-mode"},
	} {
		c, err := withFlags(t, strings.Fields(args)...)
		var usage *cli.UsageError
		if want.err == "" && err != nil || want.err != "" && (err == nil || err.Error() != want.err || !errors.As(err, &usage)) {
			t.Errorf("%s: %v, want %q", args, err, want.err)
			continue
		}
		var log bytes.Buffer
		c.warnOfIdleFlags(slog.New(slog.NewTextHandler(&log, nil)))
		if text := log.String(); err == nil && (want.warning == "" && text != "" || !strings.Contains(text, want.warning) ||
			strings.Count(text, "\n") > 1) {
			t.Errorf("%s: log %q, want %q", args, text, want.warning)
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

// Operators keep the flags of kube-proxy for other modes, so nothing is logged about them.
func TestFlagsForOtherModesAreNamed(t *testing.T) {
	for args, want := range map[string][]string{
		"":                               nil,
		"--proxy-mode=nftables":          nil,
		"--balance-by-load --dsr-port=1": nil,
		"--proxy-mode=iptables --socket-hooks=all --flow-events-sample=1":                        nil,
		"--proxy-mode=iptables --conntrack-tcp-be-liberal --conntrack-tcp-timeout-close-wait=1h": nil,
		"--detect-local-mode=NodeCIDR":                                       nil,
		"--proxy-mode=nftables --outlier-ejection":                           nil,
		"--proxy-mode=iptables --outlier-ejection":                           {"outlier-ejection"},
		"--proxy-mode=nftables --verify-partial-sync=always":                 {"verify-partial-sync"},
		"--nftables-service-counters":                                        {"nftables-service-counters"},
		"--proxy-mode=iptables --socket-hooks=off --service-metrics=top-100": {"socket-hooks", "service-metrics"},
		"--proxy-mode=nftables --balance-by-load --flow-events=all --maglev-table-size=251": {"balance-by-load",
			"maglev-table-size", "flow-events"},
	} {
		c, err := withFlags(t, strings.Fields(args)...)
		if err != nil {
			t.Errorf("%s: %v", args, err)
			continue
		}
		var log bytes.Buffer
		c.warnOfIdleFlags(slog.New(slog.NewTextHandler(&log, nil)))
		var got []string
		for _, m := range regexp.MustCompile(`flag has no meaning with this --proxy-mode" flag=--(\S+)`).FindAllStringSubmatch(log.String(), -1) {
			got = append(got, m[1])
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q: log %q, want warnings about %q", args, log.String(), want)
		}
	}
}

// TestDecisionsNameFlagsThatExist: what decisions say about a Service goes to Events, the log
// and the API, with the flag that changes it.
func TestDecisionsNameFlagsThatExist(t *testing.T) {
	var c Config
	flags := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	c.AddFlags(flags)
	flags.Bool("allocate-node-cidrs", false, "") // of kube-controller-manager
	named, literal := 0, regexp.MustCompile(`"(?:[^"\\\n]|\\.)*"`)
	err := filepath.WalkDir("../../decisions", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, s := range literal.FindAllString(string(text), -1) {
			for _, name := range flagName.FindAllString(s, -1) {
				named++
				if flags.Lookup(name[2:]) == nil {
					t.Errorf("%s: %s names %s, which the agent does not have", path, s, name)
				}
			}
		}
		return err
	})
	if err != nil || named < 10 {
		t.Errorf("%d flags are named: the test looks at nothing (%v)", named, err)
	}
}
