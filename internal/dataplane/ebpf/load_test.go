package ebpf

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// All objects share every map that they both name.
func TestSharedMapsAgree(t *testing.T) {
	cfg := Config{FlowTableSize: 1000, MaxFrontends: 100, MaxEndpoints: 200, XDP: XDPAuto}
	all, err := objects.Specs(&cfg, kernel.Features{})
	must.Do(t, err)
	tc := all[0]
	for _, spec := range all[1:] {
		shared := 0
		for name, m := range tc.Maps {
			other := spec.Maps[name]
			if other == nil || m.Pinning != ebpf.PinByName {
				continue
			}
			shared++
			if m.Type != other.Type || m.KeySize != other.KeySize || m.ValueSize != other.ValueSize ||
				m.MaxEntries != other.MaxEntries || m.Flags != other.Flags || other.Pinning != m.Pinning {
				t.Errorf("map %s: %v in one object, %v in the other", name, m, other)
			}
		}
		if shared < 5 {
			t.Errorf("only %d maps are shared", shared)
		}
	}
	for _, name := range objects.PortMaps {
		if tc.Maps[name] == nil {
			t.Errorf("no map %s", name)
		}
	}
	if got := tc.Maps[objects.TCMapFlows].MaxEntries; got != 2500 {
		t.Errorf("%d entries for 1000 confirmed flows and 250 others", got)
	}
}

// verdicts are labels of metrics: their order and names stay.
var verdicts = []string{
	"pass_other", "pass_malformed", "pass_fragment", "translated_direct", "translated_stack",
	"translated_from_stack", "translated_icmp", "passed_direct", "flow_created", "rejected_rst",
	"rejected_icmp", "answered_too_big", "answered_ttl", "drop_policy_local", "drop_source_range",
	"drop_rejected_silent", "drop_no_backend", "drop_snat_ports", "drop_no_snat_addr",
	"drop_no_route", "drop_flow_table", "drop_rewrite", "flow_revived", "flow_conflict",
	"socket_translated", "socket_refused", "socket_timed_out",
}

func TestVerdictNames(t *testing.T) {
	tc, err := objects.LoadTC()
	must.Do(t, err)
	names, err := objects.VerdictNames(tc)
	must.Do(t, err)
	if len(names) < len(verdicts) || !slices.Equal(names[:len(verdicts)], verdicts) {
		t.Errorf("verdicts %v, want these, and new ones only at the end: %v", names, verdicts)
	}
	snake := regexp.MustCompile(`^[a-z]+(_[a-z0-9]+)*$`)
	for _, name := range names {
		if !snake.MatchString(name) {
			t.Errorf("verdict %q is no label", name)
		}
	}
	if n := tc.Maps[objects.TCMapVerdicts].MaxEntries; int(n) != len(names) {
		t.Errorf("%d counters for %d verdicts", n, len(names))
	}
}

func TestMetrics(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{FlowTableSize: 1024, Timeouts: objectstest.Timeouts})
	perCPU := make([]uint64, ebpf.MustPossibleCPU())
	for i := range perCPU {
		perCPU[i] = uint64(i + 1)
	}
	sum := float64(len(perCPU) * (len(perCPU) + 1) / 2)
	for _, name := range []string{"flow_created", "drop_no_route"} {
		must.Do(t, b.m(objects.TCMapVerdicts).Put(uint32(slices.Index(verdicts, name)), perCPU))
	}
	for n := range uint32(5 + 6 + 7) {
		proto, seen := model.TCP, objects.BootSeconds()
		if n >= 5 && n < 5+6 {
			proto = model.UDP
		} else if n >= 5 {
			seen -= 10_000 // dead
		}
		keys, values := objectstest.Flow(n, proto, objects.TCFlowStateFLOW_ESTABLISHED, seen)
		for i := range keys {
			must.Do(t, b.m(objects.TCMapFlows).Put(keys[i], values[i]))
		}
	}
	must.Do(t, b.flows.Sweep(t.Context()))

	registry := prometheus.NewPedanticRegistry()
	must.Do(t, registry.Register(b))
	families, err := registry.Gather()
	must.Do(t, err)
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	must.Do(t, err)
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
	have := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			have[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	for name, want := range map[string]float64{
		"spillway_ebpf_verdicts_total flow_created": sum,
		"spillway_ebpf_verdicts_total pass_other":   0,
		"spillway_ebpf_drops_total no_route":        sum,
		"spillway_ebpf_flows tcp":                   5,
		"spillway_ebpf_flows udp":                   6,
		"spillway_ebpf_flows_swept_total":           7,
		"spillway_ebpf_flows_max":                   1024,
	} {
		if got, ok := have[name]; !ok || got != want {
			t.Errorf("%s is %v (there: %t), want %v", name, got, ok, want)
		}
	}
}

// The kernel refuses more before it allocates anything.
func TestTheKernelRefusesMoreThanTheLargestFlowTable(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes eBPF maps")
	}
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.LRUHash, KeySize: 4, ValueSize: 4, MaxEntries: 1<<27 + 1})
	if !errors.Is(err, unix.E2BIG) {
		m.Close()
		t.Errorf("error %v, want E2BIG", err)
	}
	cfg := Config{BPFFS: "/b", CgroupRoot: "/c", Log: quietLog(), FlowTableSize: MaxFlowTableSize + 1}
	if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), "the kernel allows 53687088") {
		t.Errorf("error %v", err)
	}
}

func TestProgramsForDevicesWithoutEthernet(t *testing.T) {
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprint("LoadAll=", all), func(t *testing.T) {
			cfg := ownPlace(t)
			cfg.LoadAll, cfg.XDP = all, XDPAuto // with a map of its own for what it has parsed
			if all {
				stubPrograms(t) // TestLoadLimits loads all at once
			}
			features, err := probe(&cfg)
			must.Do(t, err)
			o, _, err := upgrade.Open(&cfg, features)
			must.Do(t, err)
			defer o.Close()
			if loaded := o.Programs[objects.TCProgFromNetworkL3] != nil; loaded != all {
				t.Errorf("loaded at the start: %v", loaded)
			}
			in, out, err := programsOf(o).LoadL3()
			if err != nil || in == nil || out == nil {
				t.Errorf("programs %v and %v, error %v", in, out, err)
			}
			used, whole := mapsOf(t, in), mapsOf(t, o.Programs[objects.TCProgFromNetwork])
			if !slices.Equal(used, whole) {
				t.Errorf("uses the maps %v, the program for other devices %v", used, whole)
			}
			again, _, err := programsOf(o).LoadL3()
			if err != nil || again != in {
				t.Errorf("again: program %v, error %v", again, err)
			}
			if o.Programs[objects.TCProgFromNetworkL3] != nil != all {
				t.Error("LoadL3 writes a map that the agent's API reads meanwhile")
			}
		})
	}
}

// mapsOf returns the ids of the maps that a program uses, without those of constants.
func mapsOf(t *testing.T, p *ebpf.Program) (ids []ebpf.MapID) {
	t.Helper()
	info, err := p.Info()
	must.Do(t, err)
	all, _ := info.MapIDs()
	for _, id := range all {
		m, err := ebpf.NewMapFromID(id)
		must.Do(t, err)
		defer m.Close()
		about, err := m.Info()
		must.Do(t, err)
		if !strings.Contains(about.Name, ".") {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Two forward declarations of a type come in any order: flow_keys_type in parse/packet.h.
func TestObjectsAreReproducible(t *testing.T) {
	for name, load := range map[string]func() (*ebpf.CollectionSpec, error){"tc": objects.LoadTC, "xdp": objects.LoadXDP,
		"sock": objects.LoadSock} {
		spec, err := load()
		must.Do(t, err)
		var declared []string
		for typ, err := range spec.Types.All() {
			must.Do(t, err)
			if f, is := typ.(*btf.Fwd); is {
				declared = append(declared, f.Name)
			}
		}
		if len(declared) > 1 {
			t.Errorf("%s only declares %v: complete all but one", name, declared)
		}
	}
}
