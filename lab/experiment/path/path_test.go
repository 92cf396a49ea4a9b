package path

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
)

// samples returns measurements with these rates; all other figures follow from the rate.
func samples(entries int, rates ...float64) []harness.Sample {
	var out []harness.Sample
	for _, r := range rates {
		s := harness.Sample{CPUPerRequest: 1e6 / r, Conntrack: entries}
		s.Rate, s.Latency.P999 = r, 1e7/r
		s.Requests = int64(r)
		out = append(out, s)
	}
	return out
}

func testReport() *Report {
	m := experiment.Machine{Kernel: "6.1.0", Arch: "x86_64", CPU: "Fast CPU", Cores: 2,
		Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)}
	r := newReport(Config{Mode: "ebpf", Rounds: 6, Duration: 2 * time.Second, Connections: 32}, m)
	type trial = experiment.Trial[harness.Sample]
	base := samples(32, 30000, 31000, 32000, 30000, 31000, 32000)
	slow := samples(0, 27000, 31000, 28800, 27000, 31000, 28800)
	slow[1].Errors = map[string]int64{"timeout": 2, "reset": 1}
	slow[2].ClientLimited = true
	r.add(plan{name: "NodePort ÷ metal", kind: load.HTTP, target: &experiment.Target{Limit: 0.97}}, 0,
		trial{A: base, B: slow}, trial{A: base, B: base})
	r.add(plan{name: "NodePort ÷ metal", kind: load.Conn, tail: true, target: &experiment.Target{Limit: 1.1, AtMost: true}}, 5000,
		trial{A: base, B: base}, trial{})
	r.add(plan{name: "NodePort, pod on other node", kind: load.Conn}, 0, trial{A: base, B: slow}, trial{})
	// Ended by a signal: five rounds are not enough to judge by.
	r.add(plan{name: "NodePort, pod on other node", kind: load.HTTP, target: &experiment.Target{Limit: 0.97}}, 0,
		trial{A: base[:5], B: slow[:5]}, trial{})
	return r
}

func TestReportTable(t *testing.T) {
	clitest.Pages(t, "report", testReport())
}

func TestReportFigures(t *testing.T) {
	c := testReport().Comparisons
	if c[0].Ratio.Median != 0.9 || *c[0].Met || c[0].Control.Median != 1 || c[0].Conntrack != 0 || c[0].BaseConntrack != 32 {
		t.Errorf("closed loop: %+v", c[0])
	}
	if c[0].Errors["timeout"] != 2 || c[0].ClientLimited != 1 {
		t.Errorf("errors are not added up: %+v", c[0])
	}
	if c[1].Figure != "p99.9 µs" || c[1].Base != 1e7/31000 || !*c[1].Met || c[1].Rate != 5000 {
		t.Errorf("open loop: %+v", c[1])
	}
	if c[2].Met != nil || c[2].Control.N != 0 {
		t.Errorf("without a target: %+v", c[2])
	}
	if c[3].Met != nil || c[3].Target == nil {
		t.Errorf("five rounds: %+v", c[3])
	}
}

// Leftovers of a Service and limits of a server are reported for files only.
func TestReportOfFiles(t *testing.T) {
	r := newReport(Config{Files: []string{"ebpf", KubeProxy}, Rounds: 6, Duration: 400 * time.Millisecond, Warmup: 100 * time.Millisecond,
		Connections: 32}, experiment.Machine{})
	base, lost := samples(9000, 10000, 10000, 10000, 10000, 10000, 10000), samples(0, 0, 0, 0, 0, 0, 0)
	for i := range base {
		base[i].Seconds, base[i].ClientCPUSeconds, base[i].ServerCPUSeconds = 0.4, 0.25, 0.1
		lost[i].Errors, lost[i].Dropped, lost[i].Expectations = map[string]int64{"timeout": 32}, 48, i
	}
	r.add(plan{name: "NodePort ÷ metal", kind: load.TFTP, full: true}, 0, experiment.Trial[harness.Sample]{A: base, B: lost},
		experiment.Trial[harness.Sample]{})
	c := r.Comparisons[0]
	want := Files{Failed: 192, Expectations: 5, Dropped: 288, ClientCore: 20000, ServerCore: 50000, ClientBusy: 0.5, ServerBusy: 0.2}
	if c.Files == nil || *c.Files != want || c.Load != "files of 5 KB, full table" || r.Mode != "ebpf, kube-proxy" {
		t.Errorf("mode %q, %q: %+v, want %+v", r.Mode, c.Load, c.Files, want)
	}
	var out strings.Builder
	if err := r.Write(&out); err != nil || !strings.Contains(out.String(), "50 %, 20000 files/s") ||
		!strings.Contains(out.String(), " 2.50\n") {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestReportJSON(t *testing.T) {
	text, err := json.MarshalIndent(testReport(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	clitest.File(t, "report.json", string(text)+"\n")
}

func TestValidateFiles(t *testing.T) {
	for _, files := range [][]string{{}, {"ipvs"}, {"ebpf", "ebpf"}} {
		cfg := Config{Files: files, Rounds: 10, Duration: time.Second, Connections: 32}
		if err := cfg.Validate(); err == nil {
			t.Errorf("files by %q are measured", files)
		}
	}
}

func TestValidate(t *testing.T) {
	good := Config{Mode: "ebpf", Rounds: 10, Duration: time.Second, Connections: 32}
	if err := good.Validate(); err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"mode":                       func(c *Config) { c.Mode = "ipvs" },
		"rounds is 0: use 1 or more": func(c *Config) { c.Rounds = 0 },
		"duration":                   func(c *Config) { c.Duration = time.Millisecond },
		"connections":                func(c *Config) { c.Connections = 0 },
	} {
		cfg := good
		change(&cfg)
		if err := cfg.Validate(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("wrong %s: error %v", want, err)
		}
	}
}
