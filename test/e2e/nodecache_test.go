package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/must"
)

// TestACacheThatHasTheClusterIP does on node a what NodeLocal DNSCache does: a device of the node has
// the cluster IP of the DNS Service, a process of the node listens there, and rules keep its
// packets from conntrack. Node b has the address on the device that kube-proxy's mode ipvs leaves.
func TestACacheThatHasTheClusterIP(t *testing.T) {
	e := start(t, "e2e-nodecache")
	dns := flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b0"), Ports: []flows.Port{
		{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, Target: 8080},
		{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53, Target: 8080},
	}}
	s := e.Load(t, dns)
	expect := func(when, atA string) {
		t.Helper()
		for from, want := range map[string]string{"a1": atA, "a1/vm": atA, "a": atA, "a/host": atA, "b1": "b0", "b1/vm": "b0"} {
			for _, combo := range flows.AllCombos {
				for _, a := range ask(t, e.MustProbe(t, from), s.MustAddress(t, flows.ClusterIP, combo), combo, 4) {
					if a.Server != want {
						t.Errorf("%s: from %s, %s: answer %+v, want server %q", when, from, combo, a, want)
						break
					}
				}
			}
		}
		for _, combo := range flows.AllCombos { // the Service's other addresses stay
			if got := ask(t, e.MustProbe(t, "client0"), s.MustAddress(t, flows.NodePort("a"), combo), combo, 1); got[0].Server != "b0" {
				t.Errorf("%s: NodePort, %s: answer %+v, want server b0", when, combo, got[0])
			}
		}
	}
	awaitServer := func(want string) {
		t.Helper()
		for _, combo := range flows.AllCombos {
			await.True(t, "an answer of "+want+", "+string(combo), func() bool {
				return ask(t, e.MustProbe(t, "a1"), s.MustAddress(t, flows.ClusterIP, combo), combo, 1)[0].Server == want
			})
		}
	}
	expect("no cache", "b0")

	for node, device := range map[string]string{"a": "nodelocaldns", "b": "kube-ipvs0"} {
		e.Output(t, node, "ip", "link", "add", device, "type", "bridge")
		for _, combo := range flows.TCP {
			addr := netip.MustParseAddrPort(s.MustAddress(t, flows.ClusterIP, combo)).Addr()
			e.Output(t, node, "ip", "addr", "add", netip.PrefixFrom(addr, addr.BitLen()).String(), "dev", device, "nodad")
		}
		e.Output(t, node, "ip", "link", "set", device, "up")
	}
	rules := ""
	for _, combo := range flows.AllCombos {
		dst := s.MustAddress(t, flows.ClusterIP, combo)
		_, err := e.MustProbe(t, "a/host").Do(t.Context(),
			probe.Request{Op: probe.Serve, Server: "cache", Listen: []string{combo.Protocol() + " " + dst}})
		must.Do(t, err)
		ip := map[bool]string{false: "ip", true: "ip6"}[combo.IPv6()]
		addr := netip.MustParseAddrPort(dst).Addr()
		rules += fmt.Sprintf("add rule inet nodelocal pre %[1]s daddr %[2]s %[3]s dport 53 notrack; add rule inet nodelocal out %[1]s daddr "+
			"%[2]s %[3]s dport 53 notrack; add rule inet nodelocal out %[1]s saddr %[2]s %[3]s sport 53 notrack; ",
			ip, addr, combo.Protocol())
	}
	awaitServer("cache")
	expect("without rules", "cache")
	e.Output(t, "a", "nft", "table inet nodelocal { chain pre { type filter hook prerouting priority raw; }; chain out { type filter "+
		"hook output priority raw; }; }; "+rules)
	expect("with rules", "cache")
	for node, want := range map[string]bool{"a": true, "b": false} {
		await.NoError(t, func() error { // the status has a problem a moment after the programs
			if text := oneLine(e.spillway(t, node, "status", "-o", "wide")); strings.Contains(text, intent.LocalRedirectAnnotation) != want {
				return fmt.Errorf("status of node %s names the annotation: %v, want %v: %s", node, !want, want, text)
			}
			return nil
		})
	}

	e.Output(t, "a", "nft", "delete table inet nodelocal") // as the cache does when it ends
	e.Output(t, "a", "ip", "link", "del", "nodelocaldns")
	awaitServer("b0")
	expect("the cache is gone", "b0")
}
