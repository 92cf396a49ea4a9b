package agent

import (
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/dataplane/ebpf"
)

func TestConntrackFlagsSizeTheFlowTable(t *testing.T) {
	cores := uint64(runtime.NumCPU())
	both := map[string]bool{"conntrack-max-per-core": true, "conntrack-min": true}
	for _, c := range []struct {
		cfg  ConntrackConfig
		want uint64
	}{
		{ConntrackConfig{MaxPerCore: 0, Min: 5, given: both}, ebpf.DefaultFlowTableSize},
		{ConntrackConfig{MaxPerCore: 1000, Min: 1 << 20, given: both}, 1 << 20},
		{ConntrackConfig{MaxPerCore: 1, Min: 1, given: both}, minFlows},
		{ConntrackConfig{MaxPerCore: 1, Min: minFlows, given: both}, minFlows},
		{ConntrackConfig{MaxPerCore: 1 << 20, Min: 5, given: both}, cores << 20},
		{ConntrackConfig{MaxPerCore: 1 << 20, Min: 131072}, maxDefaultFlows}, // as on 512 cores
		{ConntrackConfig{MaxPerCore: maxPerCore, Min: 131072}, min(max(cores*32768, 131072), 524288)},
	} {
		if got := c.cfg.flows(); got != c.want {
			t.Errorf("%+v: %d flows, want %d", c.cfg, got, c.want)
		}
		if raised, says := c.cfg.Min == 1, c.cfg.remark(); raised != strings.Contains(says, "it has 4096") || !raised && says != "" {
			t.Errorf("%+v: the log says %q", c.cfg, says)
		}
	}
}

func TestConntrackFlagsSetTimeouts(t *testing.T) {
	c := ConntrackConfig{UDP: 3 * time.Second, TCPEstablished: time.Hour}
	want := ebpf.DefaultTimeouts
	want.UDPNew, want.TCPEstablished = 3*time.Second, time.Hour
	if got := c.timeouts(); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	c.UDPStream = time.Millisecond
	if err := c.validate(); err == nil {
		t.Error("a timeout below a second was taken")
	}
}

func TestOnlyConntrackFlagsThatAreGivenBoundTheAutopilot(t *testing.T) {
	cores := runtime.NumCPU()
	file := filepath.Join(t.TempDir(), "config.yaml")
	err := os.WriteFile(file, []byte("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"+
		"conntrack: {maxPerCore: 100000, udpTimeout: 9s}\n"), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		name     string
		args     []string
		entries  int
		timeouts map[string]time.Duration
	}{
		{"nothing", nil, 0, nil},
		{"a size", []string{"--conntrack-max-per-core=200000"}, 200_000 * cores, nil},
		{"a least size", []string{"--conntrack-min=5000000"}, 5_000_000, nil},
		{"no size", []string{"--conntrack-max-per-core=0", "--conntrack-min=5000000"}, 0, nil},
		{"the default, said aloud", []string{"--conntrack-udp-timeout=30s"}, 0,
			map[string]time.Duration{"nf_conntrack_udp_timeout": 30 * time.Second}},
		{"streams", []string{"--conntrack-udp-timeout-stream=1m"}, 0, map[string]time.Duration{"nf_conntrack_udp_timeout_stream": time.Minute}},
		{"a file", []string{"--config", file, "--conntrack-udp-timeout-stream=1m"}, max(100_000*cores, 131072),
			map[string]time.Duration{"nf_conntrack_udp_timeout": 9 * time.Second}},
	} {
		var c Config
		f := pflag.NewFlagSet("agent", pflag.ContinueOnError)
		c.AddFlags(f)
		if err := errors.Join(f.Parse(row.args), c.readConfig(f)); err != nil {
			t.Fatal(err)
		}
		if entries, timeouts := c.Conntrack.bounds(); entries != row.entries || !maps.Equal(timeouts, row.timeouts) {
			t.Errorf("%s: %d entries, %v; want %d, %v", row.name, entries, timeouts, row.entries, row.timeouts)
		}
	}
}

func TestMemoryIsAPartOrBytes(t *testing.T) {
	for in, want := range map[string]int64{"50%": 512, "0.5%": 5, "1Ki": 1024, "100": 100, "0": 0, "-1": 0, "101%": 0, "2Ki": 0,
		"NaN%": 0, "x": 0, "": 0} {
		if got, err := memoryShare(in, 1024); got != want || (err == nil) != (want != 0) {
			t.Errorf("%q of 1024 bytes: %d, want %d: %v", in, got, want, err)
		}
	}
}

// The chart refuses sizes that no node can have: its templates cannot read the limit.
func TestTheChartKnowsTheLimitOfTheFlowTable(t *testing.T) {
	for _, file := range []string{"values.yaml", "templates/_names.tpl"} {
		text, err := os.ReadFile(filepath.Join("../../../deploy/helm/spillway", file))
		if err != nil {
			t.Fatal(err)
		}
		if limit := strconv.Itoa(ebpf.MaxFlowTableSize); !strings.Contains(string(text), limit) {
			t.Errorf("%s does not name the limit, %s", file, limit)
		}
	}
}
