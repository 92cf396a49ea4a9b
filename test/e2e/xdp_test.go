package e2e

import (
	"flag"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestXDP sends connections through node a to endpoints of node b, with the XDP program in the
// kernel's generic mode: the devices are veths.
func TestXDP(t *testing.T) {
	t.Parallel()
	for _, network := range []string{topology.Routed, topology.VXLAN} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			spec := topology.DefaultSpec("e2e-xdp-" + network)
			spec.PodNetwork = network
			flags := []string{"--xdp", "generic"}
			if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
				flags = nil
			}
			e := &env{Harness: harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": flags}})}
			if e.Mode != "ebpf" {
				t.Skip("the other dataplanes have no XDP program")
			}
			e.xdpForwards(t)
			e.synFilter(t)
		})
	}
}

func (e *env) verdict(t *testing.T, name string) float64 {
	t.Helper()
	n, err := agent.Metric(t.Context(), e.MustHost(t, "a"), "spillway_ebpf_verdicts_total", `verdict="`+name+`"`)
	must.Do(t, err)
	return n
}

// xdpForwards asks endpoints of node b through node a: XDP has to send most packets.
func (e *env) xdpForwards(t *testing.T) {
	t.Helper()
	// A question and its answer are two packets, and tc gets the first ones of each second.
	asked, sent := e.xdpStreams(t)
	if sent < float64(asked) {
		t.Errorf("XDP sent %v packets of %d questions and their answers", sent, asked)
	} else {
		t.Logf("XDP sent %v packets of %d questions and their answers", sent, asked)
	}
}

// xdpStreams returns how many questions were asked, and answered, and how many packets XDP sent.
func (e *env) xdpStreams(t *testing.T) (asked int, sent float64) {
	t.Helper()
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0", "b1")})
	client := e.MustProbe(t, "client0")
	before := e.verdict(t, "translated_xdp")
	var streams []stream
	for _, combo := range flows.AllCombos {
		streams = append(streams, stream{string(combo), client})
		_, err := client.Do(t.Context(), probe.Request{Op: probe.Stream, Name: string(combo), Proto: combo.Protocol(),
			Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), PauseMS: 5, TimeoutMS: 5000})
		must.Do(t, err)
	}
	askMore(t, streams, 300)
	for _, combo := range flows.AllCombos {
		resp, err := client.Do(t.Context(), probe.Request{Op: probe.Stop, Name: string(combo)})
		must.Do(t, err)
		r := resp.Report
		asked += r.Sent
		if r.Ended > 0 || r.Sent != r.Answered || r.Sent < 20 {
			t.Errorf("%s: %+v", combo, r)
		}
	}
	return asked, e.verdict(t, "translated_xdp") - before
}

// synFilter floods a Service, and asks by sockets of the kernel meanwhile.
func (e *env) synFilter(t *testing.T) {
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0", "b1"),
		Annotations: map[string]string{intent.SYNFilterAnnotation: "1"}})
	challenged, proved := e.verdict(t, "syn_challenged"), e.verdict(t, "syn_proved")
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		dst, err := netip.ParseAddrPort(s.MustAddress(t, flows.LoadBalancer("a"), combo))
		must.Do(t, err)
		p := e.MustProbe(t, "client0")
		slow := 0
		for i := range 40 {
			begin := time.Now()
			resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: dst.String(), TimeoutMS: patienceMS})
			must.Do(t, err)
			if a := resp.Answers[0]; a.Err != "" {
				t.Errorf("%s, connection %d: %+v", combo, i, a)
			}
			if time.Since(begin) > 900*time.Millisecond {
				slow++
			}
		}
		t.Logf("%s: %d of 40 connections took a second", combo, slow)
	}
	challenged, proved = e.verdict(t, "syn_challenged")-challenged, e.verdict(t, "syn_proved")-proved
	if challenged == 0 || proved == 0 {
		t.Errorf("%v SYNs were challenged, and %v clients have proved their address", challenged, proved)
	}
	t.Logf("%v SYNs were challenged, %v clients have proved their address", challenged, proved)
}
