package path

import (
	"context"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// Both sides of a row must send the same load from the same place, and the sides without a
// Service must need no agent.
func TestEndToEndRows(t *testing.T) {
	cluster, _ := fixture.Manifests(t, "endtoend", func(r *harness.Harness) (string, error) { return writeManifests(r, false, false) })
	names := map[string]bool{}
	for _, r := range endRows(cluster, cluster) {
		if name := r.name + ", " + r.loadName(); names[name] {
			t.Errorf("two rows %q", name)
		} else {
			names[name] = true
		}
		if r.base == r.service {
			t.Errorf("%s compares a load with itself", r.name)
		}
		if r.base.kind != r.service.kind || r.base.stream != r.service.stream || r.base.way.from != r.service.way.from {
			t.Errorf("%s compares %+v with %+v", r.name, r.base, r.service)
		}
		for _, p := range []probe{r.base, r.service} {
			if needsAgent(cluster, p.way) && p.state == without {
				t.Errorf("%s: %s needs an agent", r.name, p.way.to)
			}
		}
		if ours := needsAgent(cluster, r.service.way); strings.Contains(r.name, "→") == ours {
			t.Errorf("%s: to a Service is %v", r.name, ours)
		}
	}
}

func needsAgent(c *topology.Cluster, w way) bool {
	for _, s := range benchServices(c) {
		if w.to.Addr() == s.clusterIP || w.to.Port() == uint16(s.nodePort) {
			return true
		}
	}
	return false
}

// endToEndReport returns a report on three rows from phases in which the nodes become
// slower from one to the next: a round must compare neighbors.
func endToEndReport(mode string, rounds int) *EndToEndReport {
	same := probe{kind: load.HTTP}
	sameWith := same
	sameWith.state = with
	slow, fast := sameWith, sameWith
	slow.kind, fast.vxlan = load.Conn, true
	rows := []endRow{
		{name: "client → node", base: same, service: sameWith, least: 0.99},
		{name: "NodePort here ÷ metal", base: probe{kind: load.Conn}, service: slow, least: 0.95},
		{name: "NodePort away, VXLAN", base: sameWith, service: fast, least: 0.9},
		{name: "pod → pod, VXLAN", base: same, service: same},
	}
	speed := 100000.0
	var phases []phase
	for i, letter := range "A" + strings.Repeat("ABBA", rounds/2) + strings.Repeat("AB", rounds%2) {
		speed *= 0.99
		s := state(strings.IndexRune("AB", letter))
		ph := phase{s, map[probe]harness.Sample{}}
		for _, r := range rows {
			for _, p := range []probe{r.base, r.service} {
				if p.state != s {
					continue
				}
				rate := speed
				if p == slow {
					rate *= 0.9
				}
				ph.samples[p] = samples(0, rate)[0]
			}
		}
		if i == 1 {
			first := ph.samples[same]
			first.Errors = map[string]int64{"reset": 1}
			ph.samples[same] = first
		}
		phases = append(phases, ph)
	}
	m := experiment.Machine{Kernel: "6.1.0", Arch: "x86_64", CPU: "Fast CPU", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)}
	cfg := EndToEndConfig{Mode: mode, Rounds: rounds, Duration: 400 * time.Millisecond, Connections: 32}
	return newEndToEndReport(cfg, m, rows, phases)
}

// noisyReport returns a row of eight rounds that differ by a fifth and more.
func noisyReport() Comparison {
	row := endRow{base: probe{kind: load.HTTP}, service: probe{state: with, kind: load.HTTP}, least: 0.9}
	phases := []phase{{state: without}}
	for i := range 8 {
		phases = append(phases, phase{without, map[probe]harness.Sample{row.base: samples(0, 1000)[0]}},
			phase{with, map[probe]harness.Sample{row.service: samples(0, 1000+100*float64(i))[0]}})
	}
	return newEndToEndReport(EndToEndConfig{Mode: "ebpf"}, experiment.Machine{}, []endRow{row}, phases).Comparisons[0]
}

func TestEndToEndReport(t *testing.T) {
	clitest.Pages(t, "endtoend", endToEndReport("ebpf", 6))
	c := endToEndReport("ebpf", 6).Comparisons
	for i, want := range []float64{1, 0.9, 1, 1} {
		if got := c[i].Ratio; got.N != 6 || got.Median < want-0.001 || got.Median > want+0.001 {
			t.Errorf("%s: %+v, want a median of %g", c[i].Name, got, want)
		}
	}
	if !*c[0].Met || *c[1].Met || c[3].Target != nil {
		t.Errorf("verdicts: %+v", c)
	}
	// A A at the start and twice between rounds, B B within each pair of rounds.
	if c[0].Control.N != 3 || c[2].Control.N != 3 || c[0].Control.Median > 0.991 {
		t.Errorf("controls: %+v, %+v", c[0].Control, c[2].Control)
	}
	if got := endToEndReport("nftables", 7); got.Comparisons[0].Target != nil || got.Comparisons[0].Ratio.N != 7 ||
		got.Order != "AABBAABBAABBAAB" {
		t.Errorf("nftables: %+v", got)
	}
	if few, noisy := endToEndReport("ebpf", 4).Comparisons[0], noisyReport(); few.Met != nil || noisy.Met != nil {
		t.Errorf("verdicts on few rounds %v and on noise %v", few.Met, noisy.Met)
	}
	if got := newEndToEndReport(EndToEndConfig{}, experiment.Machine{}, []endRow{{}}, nil); got.Comparisons != nil {
		t.Errorf("a run without a round has %+v", got.Comparisons)
	}
}

func TestEndToEndFits80Columns(t *testing.T) {
	var out strings.Builder
	if err := endToEndReport("ebpf", 6).Write(&page.Page{Writer: &out}); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out.String()) {
		if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > 80 {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestEndToEndConfig(t *testing.T) {
	good := EndToEndConfig{Name: "e2e", Mode: "ebpf", Rounds: 1, Duration: time.Second, Connections: 1}
	if err := good.Validate(); err != nil {
		t.Error(err)
	}
	for want, change := range map[string]func(*EndToEndConfig){
		"at most 14 characters": func(c *EndToEndConfig) { c.Name = "a-name-too-long" },
		`mode "ipvs"`:           func(c *EndToEndConfig) { c.Mode = "ipvs" },
		"rounds is 0":           func(c *EndToEndConfig) { c.Rounds = 0 },
	} {
		bad := good
		change(&bad)
		if _, err := EndToEnd(context.Background(), bad); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", bad, err, want)
		}
	}
}
