package privilege

import (
	"errors"
	"os"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/flows"
)

// TestSocketsOfPodsEndWithTheChartsPrivileges has the capabilities, the flags and the mounts
// of endSockets: all.
func TestSocketsOfPodsEndWithTheChartsPrivileges(t *testing.T) {
	if err := kernel.ProbeSocketIterators(); errors.Is(err, os.ErrPermission) {
		t.Skip(err)
	}
	t.Parallel()
	const values = "replace" // it has endSockets: all
	for name, seccomp := range map[string]string{
		"RuntimeDefault": runtimeDefault(t, granted(t, values)), "own profile": absolute(t, ownProfile),
	} {
		t.Run(name, func(t *testing.T) {
			n := newNodeWith(t, modes[0], 2, values)
			n.confine(confinement{Capabilities: granted(t, values), Netns: mounts(t, values, "/run/netns"), Seccomp: seccomp})
			if err := n.StartAgents(t.Context()); err != nil {
				t.Fatal(err)
			}
			web := func(pod string) flows.Service {
				return flows.Service{Type: corev1.ServiceTypeClusterIP, Endpoints: flows.On(pod)}
			}
			s := n.Load(t, web("b0"))
			node := n.StartReader(t, "a", "tcp", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
			pod := n.StartReader(t, "a1", "tcp", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
			s.MustWrite(t, web("b1"))
			if err := node.WaitAborted(); err != nil {
				t.Error(err)
			}
			if err := pod.WaitAborted(); err != nil {
				t.Errorf("%v\n%s", err, n.Agent("a").Tail())
			}
		})
	}
}
