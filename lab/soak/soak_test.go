package soak

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	RunIfAsked()
	os.Exit(runTests(m))
}

// programDir holds the agent's program as long as the tests run.
var programDir string

func runTests(m *testing.M) int {
	var err error
	if programDir, err = os.MkdirTemp("", "spillway-soak-"); err != nil {
		panic(err)
	}
	defer os.RemoveAll(programDir)
	return m.Run()
}

// program is built once.
var program = sync.OnceValues(func() (string, error) { return cluster.Build(context.Background(), programDir, "") })

// config is a short run with a fixed seed.
func config(t *testing.T, name string) Config {
	t.Helper()
	if err := topology.RequireRoot(); err != nil {
		t.Skip(err)
	}
	path, err := program()
	if err != nil {
		t.Fatal(err)
	}
	return Config{Name: name, Duration: 10 * time.Minute, Seed: 3, Mode: "ebpf", Patience: 15 * time.Second,
		Dir: filepath.Join(t.TempDir(), "report"), Progress: testWriter{t}, program: path, quick: true}
}

// testWriter writes lines to a test's log.
type testWriter struct{ t *testing.T }

func (w testWriter) Write(b []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}

// TestASoakLosesNothing runs each action once, or with -short those that change agents.
func TestASoakLosesNothing(t *testing.T) {
	t.Parallel()
	cfg := config(t, "soak-test")
	cfg.Steps = len(Kinds())
	if testing.Short() {
		cfg.Only, cfg.Steps = []string{"kill", "mode", "endpoint-remove"}, 3
	}
	report, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	if err := report.Write(&text); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", text.String())
	if err := report.Err(); err != nil {
		events, _ := os.ReadFile(filepath.Join(cfg.Dir, "events.log"))
		t.Errorf("%v\n%s", err, events)
	}
	if report.Actions != cfg.Steps || report.Connections < 100 {
		t.Errorf("%d actions, want %d; %d connections", report.Actions, cfg.Steps, report.Connections)
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, "report.json")); err != nil {
		t.Error(err)
	}
}

// TestASoakNoticesALoss ends a server before its endpoint is removed.
func TestASoakNoticesALoss(t *testing.T) {
	t.Parallel()
	cfg := config(t, "soak-plant")
	cfg.plant, cfg.Steps = true, 1
	report, err := Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if report.Err() == nil || report.Lost == 0 {
		t.Fatalf("%d losses, error %v: the soak does not notice a server that ended", report.Lost, report.Err())
	}
	for _, x := range report.Losses {
		if x.Excuse == "" && (x.Action != planted.name || x.Kind != stream && x.Kind != connect) {
			t.Errorf("loss %s: not of the planted action", x)
		}
	}
}

func TestAnInterruptedSoakLeavesNothing(t *testing.T) {
	t.Parallel()
	cfg := config(t, "soak-end")
	ctx, cancel := context.WithCancel(t.Context())
	cfg.Progress = onLine(func(line string) {
		if strings.Contains(line, "load started") {
			cancel()
		}
	})
	report, err := Run(ctx, cfg)
	if err == nil || report == nil || report.Failed != "interrupted" {
		t.Fatalf("report %+v, error %v, want interrupted", report, err)
	}
	if found, _ := filepath.Glob("/run/netns/spw-soak-end-*"); len(found) > 0 {
		t.Errorf("namespaces are left: %v", found)
	}
}

// onLine calls a function for each line.
type onLine func(string)

func (f onLine) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}

func TestASeedChoosesTheActions(t *testing.T) {
	draw := func(seed uint64) (list []action) {
		p := newPlan(seed, Kinds())
		for range 100 {
			list = append(list, p.next())
		}
		return list
	}
	if diff := cmp.Diff(draw(1), draw(1), cmp.AllowUnexported(action{})); diff != "" {
		t.Errorf("two plans of one seed differ: %s", diff)
	}
	if cmp.Equal(draw(1), draw(2), cmp.AllowUnexported(action{})) {
		t.Error("two seeds give the same actions")
	}
	seen := map[string]bool{}
	for _, a := range draw(1)[:len(Kinds())] {
		seen[a.kind] = true
	}
	if len(seen) != len(Kinds()) {
		t.Errorf("a round has %d kinds of %d", len(seen), len(Kinds()))
	}
}

func TestOnlyDocumentedLossesAreExcused(t *testing.T) {
	l := newLedger(func(string, ...any) {})
	l.know("moved", flowInfo{kind: keptUDP, service: webService})
	l.know("fresh", flowInfo{kind: freshUDP, service: webService})
	l.know("stream", flowInfo{kind: stream, service: webService})
	l.begin(1, "endpoint-remove", 3)
	r := &run{ledger: l}
	done := r.allowMoves(webService)
	for _, name := range []string{"moved", "fresh", "stream"} {
		l.lose(Loss{Flow: name, at: time.Now(), Error: "timeout", Again: true})
	}
	l.lose(Loss{Flow: "moved", at: time.Now(), Error: "timeout"}) // and so is the next datagram
	done(0)
	l.lose(Loss{Flow: "moved", at: time.Now().Add(time.Second), Error: "timeout", Again: true})
	if lost, excused := l.totals(); lost != 4 || excused != 1 {
		t.Errorf("%d lost, %d excused, want 4 and 1", lost, excused)
	}
	l.close()
	l.lose(Loss{Flow: "stream", at: time.Now()})
	if lost, _ := l.totals(); lost != 4 {
		t.Errorf("%d lost after the end, want 4", lost)
	}
}

func TestOnlyASocketOlderThanTheChangeKeepsItsEndpoint(t *testing.T) {
	a := &nodeAgent{mode: "ebpf", host: &topology.Host{Name: "node0"}}
	r := &run{agents: []*nodeAgent{a}}
	old := Loss{opened: time.Now().Add(-time.Second), flowInfo: flowInfo{kind: keptUDP, from: "node0"}}
	if r.staysWithEndpoint(&old) {
		t.Error("a socket keeps its endpoint although the node has always run eBPF")
	}
	a.use("nftables")
	young, unconnected := old, old
	young.opened, unconnected.kind = time.Now().Add(time.Second), sendtoUDP
	for _, c := range []struct {
		loss *Loss
		want bool
	}{{&old, true}, {&young, false}, {&unconnected, false}} {
		if got := r.staysWithEndpoint(c.loss); got != c.want {
			t.Errorf("socket of kind %s, opened at %s: %v, want %v", c.loss.kind, c.loss.opened, got, c.want)
		}
	}
}

func TestGrowthBeyondABoundIsReported(t *testing.T) {
	g := Growth{Start: Usage{Pins: 10, RSS: 50 * mib}, End: Usage{Node: "node0", Pins: 11, RSS: 60 * mib}}
	g.judge()
	if diff := cmp.Diff([]string{"PINS of node0: 11, limit 10"}, g.Over); diff != "" {
		t.Error(diff)
	}
}

func TestReportFitsTheTerminal(t *testing.T) {
	usage := func(node string, n int) Usage {
		return Usage{Node: node, RSS: 70 * n * mib, Heap: 8 * n * mib, Goroutines: 60 * n, Files: 100, Flows: 4000 * n, Conntrack: 90_000 * n,
			Entries: 201, Pins: 45, Rules: 4}
	}
	report := &Report{Seed: 18446744073709551615, Ran: 4 * time.Hour, Actions: 4321, Connections: 512_345,
		Questions: 2_512_345, Lost: 1, CPU: 0.21,
		Excused: map[string]int{excuseLink: 120, excuseMove: 2},
		Rows: []Row{{Action: "endpoint-remove", Times: 200, Seconds: 210, Sockets: 54, Excused: 2},
			{Action: "link", Times: 201, Seconds: 201, Sockets: 54, Excused: 120}, {Action: "mode", Times: 199, Seconds: 400, Sockets: 53, Lost: 1}},
		Losses: []*Loss{{At: 71 * time.Minute, Took: 15 * time.Second, Flow: "stream from outside to web at node0 ([fd30::a]:30000)",
			Action: "mode", Number: 1200,
			Error: "read tcp [fd30::c8]:43943->[fd30::a]:30000: i/o timeout", Local: "[fd30::c8]:43943", Server: "node1-pod0"}},
		Growth: []Growth{{Start: usage("node0", 1), End: usage("node0", 2)}, {Start: usage("node1", 1), End: usage("node1", 1)},
			{Start: usage("node2", 1), End: usage("node2", 1)}},
	}
	for i := range report.Growth {
		report.Growth[i].judge()
	}
	clitest.Pages(t, "report", report)
}
