package e2e

import (
	"os"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestNodesOfOneFamily serves a Service on nodes that have IPv4 alone, with IPv6 off in
// the kernel, and IPv6 alone, with each dataplane.
func TestNodesOfOneFamily(t *testing.T) {
	for family, combos := range map[string][]flows.Combo{
		"4": {flows.TCP4, flows.UDP4}, "6": {flows.TCP6, flows.UDP6},
	} {
		t.Run("IPv"+family, func(t *testing.T) {
			spec := topology.DefaultSpec("e2e-family" + family)
			spec.IPv4, spec.IPv6 = family == "4", family == "6"
			e := startSpec(t, spec)
			if family == "4" {
				for _, node := range e.Nodes() {
					e.Do(t, node, func() error {
						return os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0)
					})
				}
			}
			for _, mode := range []string{"nftables", "iptables", "ebpf"} {
				e.Mode = mode
				for _, node := range e.Nodes() {
					e.restart(t, node, syscall.SIGTERM)
				}
				e.waitReady(t)
				s := e.Load(t, flows.Service{
					Type: corev1.ServiceTypeNodePort, Families: family, Endpoints: flows.On("a0", "b0"),
				})
				for _, flow := range askers {
					p := e.MustProbe(t, flow.From)
					for _, combo := range combos {
						answers := ask(t, p, s.MustAddress(t, flow.To, combo), combo, 4)
						for _, a := range answers {
							if a.Server != "a0" && a.Server != "b0" {
								t.Errorf("%s: %s to %v, %s: %+v", mode, flow.From, flow.To, combo, a)
							}
						}
					}
				}
				e.expectQuietLog(t, mode)
			}
		})
	}
}

// expectQuietLog fails if an agent logged a warning or an error.
func (e *env) expectQuietLog(t *testing.T, mode string) {
	t.Helper()
	for _, node := range e.Nodes() {
		text, err := os.ReadFile(e.Agent(node).Log)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "level=ERROR") || strings.Contains(line, "level=WARN") {
				t.Errorf("%s: node %s logs %q", mode, node, line)
			}
		}
	}
}
