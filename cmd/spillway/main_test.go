package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/internal/cli"
)

func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"an unknown command", []string{"agnet"}, 2, `unknown command "agnet" (did you mean agent?): see 'spillway --help'`},
		{"an unknown flag", []string{"agent", "--nope"}, 2, "unknown flag: --nope: see 'spillway agent --help'"},
		{"an argument too many", []string{"version", "x"}, 2, "spillway: "},
		{"a word for a number", []string{"agent", "--conntrack-max-per-core", "x"}, 2,
			`spillway: --conntrack-max-per-core "x": a whole number is expected: see 'spillway agent --help'`},
		{"a number out of range", []string{"agent", "--conntrack-min", "9999999999"}, 2,
			`--conntrack-min "9999999999": a whole number in range is expected`},
		{"a number for a duration", []string{"agent", "--iptables-sync-period", "30"}, 2,
			`--iptables-sync-period "30": a duration such as 30s or 2m is expected`},
		{"a word for a switch", []string{"agent", "--masquerade-all=maybe"}, 2, `--masquerade-all "maybe": true or false is expected`},
		{"a word for a part", []string{"plan", "--headroom", "much"}, 2, `--headroom "much": a number is expected: see 'spillway plan --help'`},
		{"an unknown mode", []string{"agent", "--proxy-mode", "ipvs"}, 2, `--proxy-mode "ipvs": not a choice: use ebpf, nftables, iptables`},
		{"a range that is none", []string{"agent", "--cluster-cidr", "10.0.0.0"}, 2, `--cluster-cidr "10.0.0.0": not an address range`},
		{"a range with host bits", []string{"agent", "--cluster-cidr", "fd00::/8,10.244.1.5/16"}, 2,
			`--cluster-cidr "10.244.1.5/16": not how this address range is written: write 10.244.0.0/16`},
		{"a NodePort range with host bits", []string{"agent", "--nodeport-addresses", "fd00:1::5/64"}, 2,
			`--nodeport-addresses "fd00:1::5/64": not how this address range is written: write fd00:1::/64`},
		{"a range of mapped addresses", []string{"agent", "--cluster-cidr", "::ffff:10.1.0.0/104"}, 2, `write 10.0.0.0/8`},
		{"a proxy name that no label has", []string{"agent", "--service-proxy-name", "a,b"}, 2,
			`--service-proxy-name "a,b": no label can have this value`},
		{"a proxy name that is too long", []string{"agent", "--service-proxy-name", strings.Repeat("a", 64)}, 2, "no more than 63"},
		{"a bad bind address", []string{"agent", "--healthz-bind-address", "here"}, 2, `--healthz-bind-address "here": not an address`},
		{"a bad period", []string{"agent", "--iptables-sync-period", "0s"}, 2, "must be longer than 0"},
		{"a node name that no Node has", []string{"agent", "--hostname-override", "a b"}, 2,
			`--hostname-override "a b": no Node can have this name`},
		{"a node name with an underscore", []string{"agent", "--hostname-override", "Node_1"}, 2,
			`--hostname-override "Node_1": no Node can have this name`},
		{"flows beyond the kernel's limit", []string{"agent", "--conntrack-max-per-core", "2000000000"}, 2,
			"--conntrack-max-per-core 2000000000 on "},
		{"too many flows at least", []string{"agent", "--conntrack-min", "2000000000"}, 2,
			"--conntrack-min 2000000000: the table of 2000000000 flows needs 1061.7 GiB of kernel memory; the kernel allows 53687088 flows: " +
				"give a smaller value"},
		{"a bad autopilot", []string{"agent", "--conntrack-autopilot", "yes"}, 2,
			`--conntrack-autopilot "yes": not a choice: use off, advise, on`},
		{"more memory than there is", []string{"agent", "--conntrack-autopilot-memory", "120%"}, 2,
			`--conntrack-autopilot-memory "120%": must be above 0 and at most the machine's`},
		{"memory that is no number", []string{"agent", "--conntrack-autopilot-memory", "much"}, 2,
			`--conntrack-autopilot-memory "much": not a quantity`},
		{"an InfluxDB that is no address", []string{"agent", "--influx-url", "db:8086"}, 2, `--influx-url: "db:8086": not an address`},
		{"a password in the address of an InfluxDB", []string{"agent", "--influx-url", "http://me:hunter2@db:8086"}, 2,
			`--influx-url: "...@db:8086": has a password, which every user of the machine can read: write it to a file and set --influx-password-file`},
		{"a password among its parameters", []string{"agent", "--influx-url", "http://db:8086/write?db=x&u=me&p=hunter2"}, 2,
			`--influx-url: "http://db:8086/write": has a parameter other than db, `},
		{"a user without a password", []string{"agent", "--influx-url", "http://me@db:8086"}, 2,
			"--influx-url names a user: give --influx-password-file too"},
		{"a password without a user", []string{"agent", "--influx-url", "http://db:8086", "--influx-password-file", "p"}, 2,
			"--influx-password-file: --influx-url names no user"},
		{"a password and a token", []string{"agent", "--influx-url", "http://me@db:8086", "--influx-password-file", "p", "--influx-token-file",
			"t"}, 2, "give one of the two"},
		{"a password without an address", []string{"agent", "--influx-password-file", "p"}, 2, "--influx-password-file without --influx-url"},
		{"a token without an address", []string{"agent", "--influx-token-file", "t"}, 2, "--influx-token-file without --influx-url"},
		{"a bad choice", []string{"agent", "--verify-partial-sync", "often"}, 2,
			`--verify-partial-sync "often": not a choice: use off, sampled, always`},
		{"an empty way to forward", []string{"agent", "--forwarding", ""}, 2, `--forwarding "": not a choice: use snat, hybrid, dsr`},
		{"an empty XDP mode", []string{"agent", "--xdp", ""}, 2, `--xdp "": not a way to run the program`},
		{"a table without entries", []string{"agent", "--maglev-table-size", "0"}, 2, "--maglev-table-size 0: use one of 251 "},
		{"two sources", []string{"agent", "--manifests", dir, "--kubeconfig", "k"}, 2, "--kubeconfig and --manifests: two sources"},
		{"a kubeconfig that is not there", []string{"agent", "--bpffs", dir, "--kubeconfig", "/nonexistent"}, 1,
			"read kubeconfig: open /nonexistent: no such file or directory: fix --kubeconfig /nonexistent"},
		{"no cluster to be a Pod of", []string{"agent", "--bpffs", dir}, 1,
			"this is not a Pod of a cluster: set --kubeconfig FILE, or --manifests DIR"},
		{"a KubeProxyConfiguration that is not there", []string{"agent", "--config", "/nonexistent"}, 1, "read --config: open /nonexistent"},
		{"an unknown local mode", []string{"agent", "--detect-local-mode", "x"}, 2, `--detect-local-mode "x": not a mode`},
		{"a bridge without a name", []string{"agent", "--detect-local-mode", "BridgeInterface"}, 2, "set --pod-bridge-interface"},
		{"a take-over from another proxy", []string{"agent", "--takeover", "cilium"}, 2, `--takeover "cilium": not a choice: use kube-proxy`},
		{"a take-over of some Services only", []string{"agent", "--takeover", "kube-proxy", "--service-proxy-name", "x"}, 2,
			"--takeover and --service-proxy-name: "},
		{"two flags that exclude each other", []string{"agent", "--masquerade-all", "--bypass", "never"}, 2,
			"--masquerade-all and --bypass never: "},
		{"a prefix without a name", []string{"agent", "--detect-local-mode", "InterfaceNamePrefix"}, 2, "set --pod-interface-name-prefix"},
		{"a least wait beyond the most", []string{"agent", "--iptables-min-sync-period", "1m"}, 2, "--iptables-min-sync-period"},
		{"a chart without a step", []string{"chart"}, 2, "no step given: use mount-bpffs or wait"},
		{"an unknown step of the chart", []string{"chart", "mount"}, 2, `unknown command "mount"`},
		{"a bad format", []string{"version", "-o", "xml"}, 2, `--output "xml": not a format`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			if code := run(c.args, &out, &errs); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			line := errs.String()
			if strings.Count(line, "\n") != 1 || !strings.HasPrefix(line, "spillway: ") || !strings.Contains(line, c.says) {
				t.Errorf("stderr is %q, want one line with %q", line, c.says)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"version", "-o", "json"}, &out, &errs); code != 0 {
		t.Fatal(code, errs.String())
	}
	var got map[string]string
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got["version"] == "" || got["goVersion"] == "" {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestWithoutRootCommandsSaySoInOneLine(t *testing.T) {
	if os.Geteuid() == 0 {
		if err := syscall.Seteuid(65534); err != nil { // the whole process: Go sees to all threads
			t.Fatal(err)
		}
		defer func() {
			if err := syscall.Seteuid(0); err != nil {
				t.Fatal(err)
			}
		}()
	}
	for _, line := range []string{"doctor", "doctor --fix", "doctor --fail-on critical", "doctor --netns nowhere", "doctor -o json",
		"maps frontends", "top --once", "top"} {
		var out, errs bytes.Buffer
		code := run(strings.Fields(line), &out, &errs)
		if code != cli.ExitFailed || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 || errs.Len() > 80 ||
			!strings.Contains(errs.String(), ": not root: run it as root") {
			t.Errorf("%s: exit code %d: %q, page %q", line, code, &errs, &out)
		}
	}
}

// An empty variable in a script must not widen what a command does.
func TestEmptyFiltersAreWrongUsage(t *testing.T) {
	for _, args := range [][]string{
		{"doctor", "--netns", ""}, {"doctor", "--fix", "--netns", "here,"}, {"doctor", "--fail-on", ""},
		{"drops", "--pod", ""}, {"drops", "--netns", ""}, {"drops", "--address", ""}, {"drops", "--reason", ""}, {"drops", "--protocol", ""},
		{"drops", "--port", ""},
		{"drops", "--pod", "", "--netns", "here"}, {"drops", "--address", "10.0.0.1,", "--count", "1"},
	} {
		var out, errs bytes.Buffer
		if code := run(args, &out, &errs); code != cli.ExitUsage || out.Len() > 0 || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%q: exit code %d: %q", args, code, &errs)
		}
	}
}
