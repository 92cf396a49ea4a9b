package e2e

import (
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
