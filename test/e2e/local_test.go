package e2e

import (
	"net/netip"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
)

// TestPodsOfThisNodeAreToldAsDetectLocalModeSays asks from a pod: a NodePort of its
// own node with externalTrafficPolicy Local and no endpoint there, which only pods
// of the node are led past, and a cluster IP, where only packets from outside the
// pods get the node's address.
func TestPodsOfThisNodeAreToldAsDetectLocalModeSays(t *testing.T) {
	e := start(t, "e2e-local")
	local := flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b0"), ExternalLocal: true}
	if dropped := e.Load(t, local); e.Mode == "ebpf" {
		e.expectDrop(t, dropped.MustAddress(t, flows.NodePort("a"), flows.TCP4), "drop_policy_local")
	}
	e.Mode = "iptables"
	for _, test := range []struct {
		name  string
		flags []string
		told  bool
	}{
		{"the Node's podCIDRs", []string{"--detect-local-mode=NodeCIDR"}, true},
		{"the pods' bridge", []string{"--detect-local-mode=BridgeInterface", "--pod-bridge-interface=cni0"}, true},
		{"the beginning of a device's name", []string{"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=cn"}, true},
		{"a device that is no pod's", []string{"--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=tap"}, false},
	} {
		e.Flags = map[string][]string{"": test.flags}
		for _, node := range e.Nodes() {
			e.restart(t, node, syscall.SIGTERM)
			e.waitReady(t)
			e.waitOnly(t, node, e.Mode)
		}
		s := e.Load(t, local)
		pod := e.MustProbe(t, "a1")
		for _, combo := range flows.AllCombos {
			want, own := "", e.Addr("a1", combo.IPv6())
			if test.told {
				want = "b0"
			}
			if got := askOnce(t, pod, s.MustAddress(t, flows.NodePort("a"), combo), combo, test.told); got[0].Server != want {
				t.Errorf("%s: a pod's NodePort, %s: answer %+v, want server %q", test.name, combo, got[0], want)
			}
			got := ask(t, pod, s.MustAddress(t, flows.ClusterIP, combo), combo, 1)
			if seen, err := netip.ParseAddrPort(got[0].Source); got[0].Server != "b0" || err != nil || test.told != (seen.Addr().Unmap() == own) {
				t.Errorf("%s: a pod's cluster IP, %s: answer %+v", test.name, combo, got[0])
			}
			outside := e.MustProbe(t, "client0")
			if got := ask(t, outside, s.MustAddress(t, flows.ClusterIP, combo), combo, 1); got[0].Server != "b0" {
				t.Errorf("%s: a client's cluster IP, %s: answer %+v", test.name, combo, got[0])
			}
		}
	}
}
