package e2e

import (
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestDSR sends a client's connections through node a to endpoints of node b. The endpoints must
// see the client's address, and a connection must go on when node a dies and the client's router
// uses node c.
func TestDSR(t *testing.T) {
	t.Parallel()
	for _, network := range []string{topology.Routed, topology.VXLAN} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			spec := topology.DefaultSpec("e2e-dsr-" + network)
			spec.Nodes, spec.PodNetwork = 3, network
			e := startDirect(t, spec, "hybrid")
			e.dsr(t, "dsr", 10000, func(flows.Combo) bool { return true })
			s := e.dsr(t, "", 20000, func(combo flows.Combo) bool { return combo.Protocol() == "tcp" })
			e.showDirect(t, s)
			if e.Spec.PodNetwork == topology.VXLAN {
				e.strictTunnel(t)
			}
			e.surviveReceiver(t, s, e.MustProbe(t, "client0"))
		})
	}
}

// startDirect starts agents with this --forwarding, and a secret.
func startDirect(t *testing.T, spec topology.Spec, forwarding string) *env {
	t.Helper()
	if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
		t.Skip("the other dataplanes forward with their node's address")
	}
	secret := filepath.Join(t.TempDir(), "secret")
	must.Do(t, os.WriteFile(secret, []byte("a secret of the cluster\n"), 0o600))
	flags := []string{"--forwarding", forwarding, "--dsr-key-file", secret}
	return &env{Harness: harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{"": flags}})}
}

// dsr asks a Service with this forwarding ("": the flag's), from local ports from this one on. The
// endpoints must see the client in the combinations that keep its address.
func (e *env) dsr(t *testing.T, forwarding string, port int, keeps func(flows.Combo) bool) *suite.File {
	annotations := map[string]string{intent.BalanceAnnotation: "maglev"}
	if forwarding != "" {
		annotations[intent.ForwardingAnnotation] = forwarding
	}
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, Endpoints: flows.On("b0", "b1", "b"),
		Annotations: annotations})
	client := e.MustProbe(t, "client0")
	own := e.MustHost(t, "client0")
	for _, combo := range flows.AllCombos {
		for n, to := range []flows.Target{flows.NodePort("a"), flows.LoadBalancer("a")} {
			servers := map[string]bool{}
			for i := range 20 {
				// The same ports would get the same endpoints at both addresses, which could not tell the
				// connections apart.
				resp, err := client.Do(t.Context(), probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: s.MustAddress(t, to, combo),
					LocalPort: port + 1000*n + i})
				must.Do(t, err)
				a := resp.Answers[0]
				seen, err := netip.ParseAddrPort(a.Source)
				kept := seen.Addr().Unmap() == own.IPv4 || seen.Addr() == own.IPv6
				if err != nil || kept != keeps(combo) {
					t.Errorf("%s by %s: answer %+v", combo, to, a)
				}
				servers[a.Server] = true
			}
			if len(servers) != 3 {
				t.Errorf("%s by %s: answers of %v", combo, to, servers)
			}
		}
	}
	return s
}

// surviveReceiver keeps connections busy while the node that received them dies.
func (e *env) surviveReceiver(t *testing.T, s *suite.File, client *probe.Process) {
	const each = 50
	name := func(combo flows.Combo, i int) string { return fmt.Sprintf("%s %d", combo, i) }
	combos := []flows.Combo{flows.TCP4, flows.TCP6}
	var streams []stream
	for _, combo := range combos {
		for i := range each {
			_, err := client.Do(t.Context(), probe.Request{Op: probe.Stream, Name: name(combo, i), Proto: combo.Protocol(),
				Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), PauseMS: 50, TimeoutMS: 5000})
			must.Do(t, err)
			streams = append(streams, stream{name(combo, i), client})
		}
	}
	askMore(t, streams, 10)
	e.setLink(t, "a", "down")
	for _, combo := range combos {
		dst, err := netip.ParseAddrPort(s.MustAddress(t, flows.LoadBalancer("a"), combo))
		must.Do(t, err)
		c := e.MustHost(t, "c")
		via := c.IPv4
		if dst.Addr().Is6() {
			via = c.IPv6
		}
		e.Run(t, "client0", "ip", "route", "replace", dst.Addr().String(), "via", via.String())
	}
	askMore(t, streams, 20)
	ended, sent := 0, 0
	for _, combo := range combos {
		for i := range each {
			resp, err := client.Do(t.Context(), probe.Request{Op: probe.Stop, Name: name(combo, i)})
			must.Do(t, err)
			r := resp.Report
			sent += r.Sent
			if r.Ended > 0 || r.Sent != r.Answered || r.Sent < 20 {
				ended++
				t.Logf("%s: %+v", name(combo, i), r)
			}
		}
	}
	t.Logf("%d questions by %d connections", sent, each*len(combos))
	if ended > 0 {
		t.Errorf("%d of %d connections did not go on when node a died", ended, each*len(combos))
	}
}
