package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestLeastConnections opens connections that stay. Each endpoint of four must have its share
// of them, within a few: with random shares they would differ by a quarter.
func TestLeastConnections(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-least"),
		Flags: map[string][]string{"": {"--balance-by-load"}}})}
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0", "a2", "b0", "b1"),
		Annotations: map[string]string{intent.BalanceAnnotation: "least"}})
	status := oneLine(e.spillway(t, "a", "status", "-o", "wide"))
	if problem := strings.Contains(status, "least has no effect on this node"); problem != (e.Mode != "ebpf") {
		t.Errorf("status with --proxy-mode %s: %s", e.Mode, status)
	}
	if e.Mode != "ebpf" {
		return // least is random there
	}
	if text := e.spillway(t, "a", "services", e.nameOfService(s)); !strings.Contains(text, "fewer active flows") {
		t.Errorf("services does not say how endpoints are chosen: %s", text)
	}
	r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4))
	if found := step(r, "endpoint").Found; !strings.Contains(found, "; least of two random ones") {
		t.Errorf("trace shows the choice %q", found)
	}
	const each = 15
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6} {
		for _, c := range ejectionClients {
			p, served := e.MustProbe(t, c.From), map[string]int{}
			name := func(i int) string { return fmt.Sprintf("%s %s %d", c.To, combo, i) }
			for i := range 4 * each {
				_, err := p.Do(t.Context(), probe.Request{Op: probe.Stream, Name: name(i), Proto: combo.Protocol(),
					Dst: s.MustAddress(t, c.To, combo), PauseMS: 200})
				must.Do(t, err)
			}
			for i := range 4 * each {
				resp, err := p.Do(t.Context(), probe.Request{Op: probe.Stop, Name: name(i)})
				must.Do(t, err)
				for server := range resp.Report.Servers {
					served[server]++
				}
			}
			for server, n := range served {
				if n < each-3 || n > each+3 {
					t.Errorf("%s to %s, %s: %s has %d of %d connections", c.From, c.To, combo, server, n, 4*each)
				}
			}
			if len(served) != 4 {
				t.Errorf("%s to %s, %s: answers of %v", c.From, c.To, combo, served)
			}
			t.Logf("%s to %s, %s: %v", c.From, c.To, combo, served)
		}
	}
}

// TestMaglev asks two nodes from the same ports of a client: both must choose the same endpoint,
// also after one of the endpoints has gone.
func TestMaglev(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-maglev")})}
	service := func(on ...string) flows.Service {
		return flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(on...),
			Annotations: map[string]string{intent.BalanceAnnotation: "maglev"}}
	}
	s := e.Load(t, service("a0", "a2", "b0", "b1", "a1"))
	status := oneLine(e.spillway(t, "a", "status", "-o", "wide"))
	if problem := strings.Contains(status, "maglev has no effect on this node"); problem != (e.Mode != "ebpf") {
		t.Errorf("status with --proxy-mode %s: %s", e.Mode, status)
	}
	if e.Mode != "ebpf" {
		return // maglev is random there
	}
	if text := e.spillway(t, "a", "services", e.nameOfService(s)); !strings.Contains(text, "maglev: by the client's address and port") {
		t.Errorf("services does not say how endpoints are chosen: %s", text)
	}
	client := e.MustProbe(t, "client0")
	const ports = 40
	answers := func(node string, combo flows.Combo) (servers []string) {
		for i := range ports {
			resp, err := client.Do(t.Context(), probe.Request{Op: probe.Try, Proto: combo.Protocol(),
				Dst: s.MustAddress(t, flows.NodePort(node), combo), LocalPort: 20000 + i})
			must.Do(t, err)
			servers = append(servers, resp.Answers[0].Server)
		}
		return servers
	}
	before := map[flows.Combo][]string{}
	for _, combo := range flows.AllCombos {
		before[combo] = answers("a", combo)
		if diff := cmp.Diff(before[combo], answers("b", combo)); diff != "" {
			t.Errorf("%s: nodes a and b choose different endpoints: %s", combo, diff)
		}
		if n := len(slices.Compact(slices.Sorted(slices.Values(before[combo])))); n != 5 {
			t.Errorf("%s: %d ports got %d endpoints, want 5: %v", combo, ports, n, before[combo])
		}
	}
	s.MustWrite(t, service("a0", "a2", "b0", "b1"))
	s.MustWait(t)
	for _, combo := range flows.TCP { // a UDP socket of a port that was used continues its flow
		after := answers("a", combo)
		for i, server := range before[combo] {
			if server != after[i] && server != "a1" || after[i] == "a1" {
				t.Errorf("%s: port %d got %s, and %s when only a1 had gone", combo, 20000+i, server, after[i])
			}
		}
		if diff := cmp.Diff(after, answers("b", combo)); diff != "" {
			t.Errorf("%s: nodes a and b choose different endpoints: %s", combo, diff)
		}
	}
}
