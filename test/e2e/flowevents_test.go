package e2e

import (
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// firstUDPPort is the local port of askAnew's first UDP socket.
const firstUDPPort = 45000

// TestEventsCountConnections: each connection through a node makes one event of each kind,
// and each refused one an event with the reason.
func TestEventsCountConnections(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{
		Spec:  topology.DefaultSpec("e2e-events"),
		Flags: map[string][]string{"": {"--flow-events", "all", "--flow-events-rate", "0", "--service-metrics", "all"}},
	})}
	const each = 25
	outside := flows.Flow{From: "client0", To: flows.NodePort("a")}
	s := e.Load(t, nodePort("a0", "b0"))
	// The socket hooks count too: the harness asks from the node itself.
	before, err := agent.Metric(t.Context(), e.MustHost(t, "a"), "spillway_service_connections_total", `protocol="TCP"`)
	must.Do(t, err)
	handshakes, err := agent.Metric(t.Context(), e.MustHost(t, "a"), "spillway_service_handshake_duration_seconds_count", `protocol="TCP"`)
	must.Do(t, err)
	inside := e.askAnew(t, s, flows.Flow{From: "a1", To: flows.ClusterIP}, flows.TCP, each, "")
	made, asked := e.askAnew(t, s, outside, flows.TCP, each, ""), e.askAnew(t, s, outside, flows.UDP, each, "")
	tcp := int(before) + inside + made
	e.waitMetric(t, "spillway_service_connections_total", `protocol="TCP"`, tcp)
	e.waitMetric(t, "spillway_flow_events_total", `kind="opened"`, tcp+asked)
	e.waitMetric(t, "spillway_flow_events_total", `kind="answered"`, tcp+asked)
	e.waitMetric(t, "spillway_flow_events_total", `kind="closed"`, tcp)
	e.waitMetric(t, "spillway_service_handshake_duration_seconds_count", `protocol="TCP"`, int(handshakes)+inside+made)

	must.Do(t, s.Write([]flows.Object{nodePort()}))
	must.Do(t, s.Wait(t.Context()))
	after, err := agent.Metric(t.Context(), e.MustHost(t, "a"), "spillway_service_connections_total", `protocol="TCP"`)
	must.Do(t, err)
	refused := e.askAnew(t, s, outside, flows.TCP, each, "refused")
	bySocket := e.askAnew(t, s, flows.Flow{From: "a1", To: flows.ClusterIP}, flows.TCP, each, "refused")
	e.waitMetric(t, "spillway_flow_events_total", `kind="refused"`, refused+bySocket)
	e.waitMetric(t, "spillway_service_refused_total", `reason="socket_refused"`, bySocket)
	e.waitMetric(t, "spillway_service_refused_total", `reason="rejected_rst"`, refused)
	e.waitMetric(t, "spillway_flow_events_total", `kind="opened"`, int(after)+asked)
	for _, none := range []string{"spillway_flow_events_lost_total", "spillway_flow_events_left_out_total"} {
		e.waitMetric(t, none, "", 0)
	}
}

// askAnew asks, each time from another socket, and returns the number of sockets. UDP
// sockets get a port each: the kernel may give one the port of a former flow, which goes on.
func (e *env) askAnew(t *testing.T, s *suite.File, f flows.Flow, combos []flows.Combo, each int, err string) (sockets int) {
	t.Helper()
	p := e.MustProbe(t, f.From)
	for _, combo := range combos {
		req := probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: s.MustAddress(t, f.To, combo), TimeoutMS: patienceMS}
		for range each {
			if combo.Protocol() == "udp" {
				req.LocalPort = firstUDPPort + sockets
			}
			resp, doErr := p.Do(t.Context(), req)
			must.Do(t, doErr)
			if a := resp.Answers[0]; string(a.Err) != err {
				t.Fatalf("%s: answer %+v, want error %q", combo, a, err)
			}
			sockets++
		}
	}
	return sockets
}

// waitMetric waits until the sum of a metric of node a has this value.
func (e *env) waitMetric(t *testing.T, name, labels string, want int) {
	t.Helper()
	node := e.MustHost(t, "a")
	var last float64
	defer func() {
		if t.Failed() {
			t.Logf("%s %s is %v, want %d", name, labels, last, want)
		}
	}()
	waitFor(t, e.Agent("a"), name+" "+labels, func() bool {
		var err error
		last, err = agent.Metric(t.Context(), node, name, labels)
		must.Do(t, err)
		if last > float64(want) {
			t.FailNow()
		}
		return last == float64(want)
	})
}

// follower is a `spillway flows -f` that runs.
type follower struct {
	cmd    *exec.Cmd
	prints string // directory of what it prints
}

// follow starts `spillway flows -f` on node a.
func (e *env) follow(t *testing.T, args ...string) *follower {
	t.Helper()
	argv := append([]string{"flows", "-f", "--api-socket", e.Agent("a").Socket()}, args...)
	f := &follower{cmd: exec.Command(e.Binary, argv...), prints: t.TempDir()}
	for name, to := range map[string]*io.Writer{"events": &f.cmd.Stdout, "notes": &f.cmd.Stderr} {
		file, err := os.Create(filepath.Join(f.prints, name))
		must.Do(t, err)
		defer file.Close()
		*to = file
	}
	must.Do(t, f.cmd.Start())
	t.Cleanup(f.end)
	return f
}

// printed returns how often it has printed a text, among its events or notes.
func (f *follower) printed(t *testing.T, where, text string) int {
	t.Helper()
	out, err := os.ReadFile(filepath.Join(f.prints, where))
	must.Do(t, err)
	return strings.Count(string(out), text)
}

func (f *follower) end() {
	if f.cmd.ProcessState == nil {
		_ = f.cmd.Process.Signal(os.Interrupt)
		_ = f.cmd.Wait()
	}
}

// reported returns whether the agent of node a says that the flows of all Services are reported.
func (e *env) reported(t *testing.T) bool {
	t.Helper()
	var status struct {
		Events struct{ Mode, FlowsSince string }
	}
	if err := json.Unmarshal([]byte(e.spillway(t, "a", "status", "-o", "json")), &status); err != nil {
		t.Fatal(err)
	}
	if status.Events.Mode != "on-demand" {
		t.Fatalf("the mode is %q", status.Events.Mode)
	}
	return status.Events.FlowsSince != ""
}

// With the default flags, the kernel reports flows while a program follows them, and refusals always.
func TestFlowsAreReportedOnDemand(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-demand")})}
	outside, inside := flows.Flow{From: "client0", To: flows.NodePort("a")}, flows.Flow{From: "a1", To: flows.ClusterIP}
	s := e.Load(t, nodePort("a0", "b0"))
	const each = 5
	ask := func() int {
		t.Helper()
		return e.askAnew(t, s, outside, flows.TCP, each, "") + e.askAnew(t, s, inside, flows.TCP, each, "")
	}
	refused := 0
	// A refusal follows the flows: when it has arrived, so have their events.
	unreported := func(opened int) {
		t.Helper()
		ask()
		must.Do(t, s.Write([]flows.Object{nodePort()}))
		must.Do(t, s.Wait(t.Context()))
		refused += e.askAnew(t, s, outside, flows.TCP, 1, "refused")
		e.waitMetric(t, "spillway_flow_events_total", `kind="refused"`, refused)
		e.waitMetric(t, "spillway_flow_events_total", `kind="opened"`, opened)
		must.Do(t, s.Write([]flows.Object{nodePort("a0", "b0")}))
		must.Do(t, s.Wait(t.Context()))
	}
	unreported(0)
	if e.reported(t) {
		t.Error("flows are reported without a watcher")
	}

	const note = "flows are reported since "
	first := e.follow(t)
	waitFor(t, e.Agent("a"), "the note of the first program", func() bool { return first.printed(t, "notes", note) == 1 })
	opened := ask()
	e.waitMetric(t, "spillway_flow_events_total", `kind="opened"`, opened)
	waitFor(t, e.Agent("a"), "the flows that the first program prints", func() bool {
		return first.printed(t, "events", " opened ") == opened && first.printed(t, "events", " answered ") == opened
	})
	second := e.follow(t, "--event", "opened")
	waitFor(t, e.Agent("a"), "the second program", func() bool {
		opened += ask()
		return second.printed(t, "events", " opened ") > 0
	})
	if !e.reported(t) {
		t.Error("Status does not say that flows are reported")
	}
	first.end()
	// The flows go on for the second one, although it has turned nothing on.
	opened += ask()
	e.waitMetric(t, "spillway_flow_events_total", `kind="opened"`, opened)
	if second.printed(t, "notes", note) > 0 {
		t.Error("the second program says that it has turned flows on")
	}
	second.end()
	waitFor(t, e.Agent("a"), "the end of reports", func() bool { return !e.reported(t) })
	unreported(opened)
}
