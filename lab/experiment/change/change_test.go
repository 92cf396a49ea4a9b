package change

import (
	"context"
	"encoding/json"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/lab/experiment"
)

// memory is a dataplane that only remembers.
type memory struct {
	ports   map[intent.PortID]*intent.ServicePort
	applied int
	sizes   []int
}

func (m *memory) Name() string                       { return "memory" }
func (m *memory) CanCarry(*intent.ServicePort) error { return nil }
func (m *memory) Close() error                       { return nil }
func (m *memory) Drifted() <-chan struct{}           { return nil }
func (m *memory) Repaired() (r dataplane.Repair)     { return r }

func (m *memory) Apply(_ context.Context, c intent.Changes) error {
	m.applied++
	m.sizes = append(m.sizes, len(c.Upserts))
	for _, p := range c.Upserts {
		m.ports[p.ID] = p
	}
	return nil
}

func (m *memory) Replace(_ context.Context, s intent.State) error {
	m.ports = map[intent.PortID]*intent.ServicePort{}
	for _, p := range s.Ports {
		m.ports[p.ID] = p
	}
	return nil
}

func TestEachChangeIsOneEndpointAndABatchLeavesTheWorldAsItWas(t *testing.T) {
	m := &memory{}
	s := Side{Open: func(context.Context) (dataplane.Backend, error) { return m, nil },
		Node: "node-0", Pod: netip.MustParseAddr("10.244.0.2"), Services: 50, Changes: 30}
	var out strings.Builder
	if err := s.Run(t.Context(), strings.NewReader("\n\n"), &out); err != nil {
		t.Fatal(err)
	}
	answers := json.NewDecoder(strings.NewReader(out.String()))
	var cold Cold
	if err := answers.Decode(&cold); err != nil || cold.Seconds <= 0 || cold.RSS <= 0 {
		t.Errorf("cold %+v, error %v", cold, err)
	}
	for range 2 {
		var b Batch
		if err := answers.Decode(&b); err != nil || len(b.Millis) != 30 || b.RSS <= 0 {
			t.Errorf("batch %+v, error %v", b, err)
		}
	}
	if m.applied != 2*31 || len(m.ports) != 51 {
		t.Fatalf("%d calls, %d ports; want 62, 51", m.applied, len(m.ports))
	}
	for i, n := range m.sizes {
		if n != 1 && i != 30 && i != 61 { // the last of a batch reverts all
			t.Errorf("change %d touches %d ports, want 1", i, n)
		}
	}
	for id, p := range m.ports {
		if want := Endpoints; id.Service != probe && len(p.Endpoints) != want {
			t.Errorf("%s has %d endpoints, want %d", id, len(p.Endpoints), want)
		}
	}
}

func TestReport(t *testing.T) {
	r := Report{
		Machine: experiment.Machine{Kernel: "6.18.0", Arch: "x86_64", CPU: "Test", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)},
		Changes: 4, Endpoints: Endpoints,
		Rows: []Row{
			{Mode: "ebpf", Services: 100, Cold: Cold{Seconds: 0.12, KernelMiB: 159}, Connect: 165,
				Batch:       Batch{Millis: []float64{4, 1, 3, 2}, CPU: 0.05, RSS: 31, Full: 0.01},
				FirstPacket: experiment.Summarize([]float64{1, 1.1, 0.9})},
			{Mode: "iptables", Services: 10000, Cold: Cold{Seconds: 12.5}},
		},
	}
	clitest.Pages(t, "report", &r)
}

func TestAModeSaysWhoWritesIntoWhat(t *testing.T) {
	type parts struct {
		dataplane, variant string
		peer               bool
	}
	for mode, want := range map[string]parts{
		"ebpf": {"ebpf", "", false}, "iptables": {"iptables", "", false}, "iptables-nft": {"iptables", "nft", false},
		"kube-proxy-nftables": {"nftables", "", true}, "kube-proxy-iptables": {"iptables", "", true},
		"kube-proxy-iptables-legacy": {"iptables", "legacy", true},
	} {
		var got parts
		if got.dataplane, got.variant, got.peer = dataplaneOf(mode); got != want {
			t.Errorf("%s: %+v, want %+v", mode, got, want)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Config{Modes: Modes, Services: []int{10}, Changes: 1, Rounds: 1}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for name, break_ := range map[string]func(*Config){
		"mode":                       func(c *Config) { c.Modes = []string{"ipvs"} },
		"services":                   func(c *Config) { c.Services = []int{0} },
		"nothing":                    func(c *Config) { c.Modes = nil },
		"changes":                    func(c *Config) { c.Changes = 0 },
		"rounds is 0: use 1 or more": func(c *Config) { c.Rounds = 0 },
	} {
		c := good
		break_(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("wrong %s: error %v", name, err)
		}
	}
}

func TestOnlySyncsOfIPv4Count(t *testing.T) {
	const metrics = `# TYPE kubeproxy_sync_proxy_rules_duration_seconds histogram
kubeproxy_sync_proxy_rules_duration_seconds_bucket{ip_family="IPv4",le="0.001"} 0
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 0.25
kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 3
kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family="IPv6"} 7
kubeproxy_sync_full_proxy_rules_duration_seconds_sum{ip_family="IPv4"} 9
`
	var got []string
	for _, m := range syncMetric.FindAllStringSubmatch(metrics, -1) {
		got = append(got, m[1]+" "+m[2])
	}
	if diff := cmp.Diff([]string{"sum 0.25", "count 3"}, got); diff != "" {
		t.Errorf("metrics read (-want +got):\n%s", diff)
	}
	if m := syncMetric.FindStringSubmatch("kubeproxy_sync_proxy_rules_duration_seconds_sum 1.5\n"); m == nil || m[2] != "1.5" {
		t.Errorf("without families: %q", m)
	}
}
