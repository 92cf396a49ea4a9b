package e2e

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestANewProxyModeTakesOverWithoutAGap changes the dataplane of running nodes
// under a stream of new connections, and looks for what the one before left.
func TestANewProxyModeTakesOverWithoutAGap(t *testing.T) {
	spec := topology.DefaultSpec("e2e-mode")
	spec.Masquerade = true // netfilter goes on translating what it knows
	story := tellStory(t)
	e := startSpec(t, spec)
	e.story = story
	// A handshake that the change of the other node broke is an open connection here
	// until one end times out, which may take longer than the test.
	e.Flags = map[string][]string{"": {"--conntrack-tcp-timeout-established", "5s"}}
	s := e.Load(t, nodePort("a0", "b0"))
	e.writePods(t, policyPods{"a0": "cache", "b0": "client"})
	e.writeAll(t, "policy.yaml", strings.Replace(policyYAML("web", "", ""), fmt.Sprint(cachePort), "8080", 1))
	e.startNewConnections(t, s)
	modes := []string{"nftables", "iptables", "ebpf", "iptables", "nftables", "ebpf"}
	if testing.Short() {
		modes = modes[:3] // each once
	}
	for _, mode := range modes {
		e.Mode = mode
		for _, node := range e.Nodes() {
			story.step("restart the agent on %s in mode %s", node, mode)
			e.restartAfter(t, node, syscall.SIGTERM, func() { e.askMore(t, 3) })
			e.waitReady(t)
			story.step("wait for the end of other dataplanes on %s", node)
			e.waitOnly(t, node, mode)
		}
	}
	story.step("end the streams")
	e.endStreams(t)
}

// startNewConnections starts streams that take a new socket for each question.
func (e *env) startNewConnections(t *testing.T, s *suite.File) {
	t.Helper()
	for _, f := range askers {
		p := e.MustProbe(t, f.From)
		for _, combo := range flows.AllCombos {
			st := stream{fmt.Sprintf("new %s from %s to %s, %s", combo.Protocol(), f.From, f.To, combo), p}
			_, err := p.Do(t.Context(), probe.Request{
				Op: probe.Stream, Name: st.name, Proto: "new-" + combo.Protocol(), Dst: s.MustAddress(t, f.To, combo), PauseMS: 20,
				TimeoutMS: 4000, // a handshake under way may have to begin anew: SYN is sent again after 1 s
			})
			if err != nil {
				t.Fatalf("start %s: %v", st.name, err)
			}
			e.streams = append(e.streams, st)
		}
	}
}

// waitOnly waits until nothing of another dataplane is left on a node.
func (e *env) waitOnly(t *testing.T, node, mode string) {
	t.Helper()
	await.NoError(t, func() error {
		left := e.traces(t, node)
		delete(left, mode)
		if len(left) > 0 {
			return fmt.Errorf("%s in mode %s still has %v", node, mode, left)
		}
		return nil
	})
}

// traces says which dataplanes have something in a node's kernel.
func (e *env) traces(t *testing.T, node string) map[string]string {
	t.Helper()
	host, err := e.Host(node)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	if left := e.residue(t, node); len(left) > 0 {
		found["ebpf"] = left[0]
	}
	if tables := run(t, host, "nft", "list", "tables"); strings.Contains(tables, "table inet spillway\n") {
		found["nftables"] = "table inet spillway"
	}
	for _, program := range []string{"iptables-legacy-save", "iptables-nft-save", "ip6tables-legacy-save", "ip6tables-nft-save"} {
		for line := range strings.Lines(run(t, host, program)) {
			if strings.HasPrefix(line, ":SPW") {
				found["iptables"] = program + ": " + line
			}
		}
	}
	return found
}

func run(t *testing.T, host *topology.Host, argv ...string) string {
	t.Helper()
	out, err := host.Command(t.Context(), argv...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %v: %s", argv, err, out)
	}
	return string(out)
}

// TestConnectionsThatNetfilterTranslatesSurviveTheSwitchToEBPF keeps connections
// open that netfilter translates, like a kube-proxy's. netfilter must continue to
// translate their answers back, also from a pod that a do-not-track policy selects: the
// policy applies from the switch on.
func TestConnectionsThatNetfilterTranslatesSurviveTheSwitchToEBPF(t *testing.T) {
	spec := topology.DefaultSpec("e2e-adopt")
	spec.Masquerade = true
	e := startSpec(t, spec)
	e.Mode = "nftables"
	for _, node := range e.Nodes() {
		e.restart(t, node, syscall.SIGTERM)
		e.waitReady(t)
		e.waitOnly(t, node, e.Mode)
	}
	s := e.Load(t, nodePort("a0", "b0"))
	e.writePods(t, policyPods{"a0": "cache", "b0": "client"})
	e.writeAll(t, "policy.yaml", strings.Replace(policyYAML("web", "", ""), fmt.Sprint(cachePort), "8080", 1))
	e.startTCP(t, s)
	e.askMore(t, 5)
	e.Mode = "ebpf"
	for _, node := range e.Nodes() {
		e.restart(t, node, syscall.SIGTERM)
		e.waitReady(t)
		e.waitOnly(t, node, e.Mode)
	}
	e.askMore(t, 10)
	e.awaitKept(t)
	e.endStreams(t)
}

// awaitKept waits until node a has a set for what stays tracked beside the policy.
func (e *env) awaitKept(t *testing.T) {
	t.Helper()
	await.NoError(t, func() error {
		out, err := e.MustHost(t, "a").Command(t.Context(), "nft", "list", "set", "inet", "spillway-policy", "kept4").CombinedOutput()
		if err != nil {
			err = fmt.Errorf("what stays tracked beside the policy: %w: %s", err, out)
		}
		return err
	})
}

// startTCP starts TCP streams, each of which keeps its connection. An answer that is late
// says nothing of a connection that continues: a busy machine has taken 5 s for one.
func (e *env) startTCP(t *testing.T, s *suite.File) {
	t.Helper()
	for _, f := range askers {
		p := e.MustProbe(t, f.From)
		for _, combo := range flows.AllCombos {
			if combo.Protocol() != "tcp" {
				continue
			}
			for i := range 4 { // to either endpoint
				st := stream{fmt.Sprintf("tcp %d from %s to %s, %s", i, f.From, f.To, combo), p}
				_, err := p.Do(t.Context(), probe.Request{
					Op: probe.Stream, Name: st.name, Proto: "tcp", Dst: s.MustAddress(t, f.To, combo), PauseMS: 20, TimeoutMS: 10_000,
				})
				if err != nil {
					t.Fatalf("start %s: %v", st.name, err)
				}
				e.streams = append(e.streams, st)
			}
		}
	}
}

// TestConnectionsThatEBPFTranslatesSurviveTheSwitchToNetfilter keeps connections
// open over a change to either other mode, and over a restart in it: the programs
// stay for them alone, go when they have ended, and come back whole. No
// CNI masquerades here. With masquerading, netfilter would change the source of a pod's
// answer if it is the first packet that netfilter sees, and the client would reset.
func TestConnectionsThatEBPFTranslatesSurviveTheSwitchToNetfilter(t *testing.T) {
	e := start(t, "e2e-drain")
	s := e.Load(t, nodePort("a0", "b0"))
	for _, mode := range []string{"nftables", "iptables"} {
		e.startTCP(t, s)
		for range 2 {
			e.Mode = mode
			for _, node := range e.Nodes() {
				e.restart(t, node, syscall.SIGTERM)
			}
			e.waitReady(t)
			time.Sleep(2 * reconcile.Linger) // half of one before, and one after new ones were left to others
			e.expectNew(t, s)
		}
		for _, node := range e.Nodes() {
			if e.traces(t, node)["ebpf"] == "" {
				t.Errorf("%s in mode %s: eBPF is gone while connections go through it", node, mode)
			}
		}
		e.endStreams(t)
		for _, node := range e.Nodes() {
			e.waitOnly(t, node, mode)
		}
		e.Mode = "ebpf"
		for _, node := range e.Nodes() {
			e.restart(t, node, syscall.SIGTERM)
			e.waitReady(t)
			e.waitOnly(t, node, e.Mode)
		}
		e.expectNew(t, s)
	}
}

// expectNew expects answers to new connections from everywhere, also from the source
// port of an earlier connection that another dataplane served: conntrack may still have
// an entry for it.
func (e *env) expectNew(t *testing.T, s *suite.File) {
	t.Helper()
	for i, f := range askers {
		for _, combo := range flows.AllCombos {
			for _, port := range []int{0, 41000 + i} {
				resp, err := e.MustProbe(t, f.From).Do(t.Context(), probe.Request{
					Op: probe.Try, Proto: combo.Protocol(), Dst: s.MustAddress(t, f.To, combo), Tries: 3, TimeoutMS: patienceMS, LocalPort: port,
				})
				if err != nil {
					t.Error(err)
				}
				for _, a := range resp.Answers {
					if a.Server == "" {
						t.Errorf("%s: %s to %s, %s, local port %d: answer %+v", e.Mode, f.From, f.To, combo, port, a)
					}
				}
			}
		}
	}
}

// TestAPortOfADrainingConnectionServesAnotherAddress keeps a connection that the eBPF programs
// translate, and asks another address of its Service from the same local port after the switch:
// netfilter must not give the two the same tuple towards the endpoint.
func TestAPortOfADrainingConnectionServesAnotherAddress(t *testing.T) {
	e := start(t, "e2e-drainport")
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, ExternalLocal: true, Via: []string{"a"}, Endpoints: flows.On("a0")})
	client := e.MustProbe(t, "client0")
	const port = 41007
	for _, combo := range flows.AllCombos {
		if combo.Protocol() != "tcp" {
			continue
		}
		st := stream{fmt.Sprintf("tcp to the NodePort, %s", combo), client}
		_, err := client.Do(t.Context(), probe.Request{
			Op: probe.Stream, Name: st.name, Proto: "tcp", Dst: s.MustAddress(t, flows.NodePort("a"), combo), PauseMS: 20,
			TimeoutMS: patienceMS, LocalPort: port,
		})
		if err != nil {
			t.Fatal(err)
		}
		e.streams = append(e.streams, st)
	}
	e.askMore(t, 3)
	ask := func(when string) {
		for _, combo := range flows.AllCombos {
			if combo.Protocol() != "tcp" {
				continue
			}
			resp, err := client.Do(t.Context(), probe.Request{
				Op: probe.Try, Proto: "tcp", Dst: s.MustAddress(t, flows.LoadBalancer("a"), combo), Tries: 1, TimeoutMS: patienceMS, LocalPort: port,
			})
			if err != nil {
				t.Error(err)
			}
			for _, a := range resp.Answers {
				if a.Server == "" {
					t.Errorf("%s, %s: answer %+v", when, combo, a)
				}
			}
		}
	}
	ask("before")
	for _, mode := range []string{"nftables", "iptables"} {
		e.Mode = mode
		e.restart(t, "a", syscall.SIGTERM)
		e.waitReady(t)
		ask("after the switch to " + mode)
		time.Sleep(2 * reconcile.Linger)
		ask("a while after the switch to " + mode)
	}
	e.endStreams(t)
}
