package controlplane

import (
	"context"
	"maps"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/test/testbed/controlplane"
)

// TestCompletePrograms checks that a complete agent and kube-proxy have the watches of the
// clients that bench apiserver counts.
func TestCompletePrograms(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: three programs start, one after the other")
	}
	n := newNode(t)
	before := must[map[string]int](t)(n.cp.Watches(t.Context()))
	watches := func() map[string]int {
		now := must[map[string]int](t)(n.cp.Watches(context.WithoutCancel(t.Context())))
		for resource, count := range before {
			if now[resource] -= count; now[resource] == 0 {
				delete(now, resource)
			}
		}
		return now
	}
	agent := map[string]int{"services": 1, "endpointslices": 1, "nodes": 1, "pods": 1, "networkpolicies": 1}
	kubeProxy := must[string](t)(controlplane.Program("kube-proxy"))
	for _, c := range []struct {
		name string
		argv []string
		want map[string]int
	}{
		{"ebpf", n.argv, agent},
		{"nftables", append(n.argv[:len(n.argv):len(n.argv)], "--proxy-mode", "nftables"), agent},
		{"kube-proxy", []string{kubeProxy, "--proxy-mode", "nftables", "--hostname-override", n.host.Name, "--kubeconfig",
			flagValue(n.argv, "--kubeconfig"),
			// No setting of the whole machine is changed.
			"--conntrack-max-per-core", "0", "--conntrack-min", "0", "--conntrack-tcp-timeout-established", "0",
			"--conntrack-tcp-timeout-close-wait", "0"},
			map[string]int{"services": 1, "endpointslices": 1, "nodes": 1, "servicecidrs": 1}},
	} {
		n.argv = c.argv
		n.start()
		n.until("the watches of "+c.name, func() bool { return maps.Equal(watches(), c.want) })
		n.signal(syscall.SIGTERM)
		n.until("no watch after "+c.name, func() bool { return len(watches()) == 0 })
	}
}

// flagValue returns the argument after a flag.
func flagValue(argv []string, flag string) string {
	for i, arg := range argv {
		if strings.EqualFold(arg, flag) {
			return argv[i+1]
		}
	}
	return ""
}
