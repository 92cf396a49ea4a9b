package e2e

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
)

// TestANetworkPolicyHoldsOverRestarts asks a pod all the time that a rule of a
// NetworkPolicy engine closes, while agents end, are killed and start again. No
// question may be answered: at every moment the packets traverse netfilter, where
// the rule is (CVE-2023-27595 was a proxy that failed this).
func TestANetworkPolicyHoldsOverRestarts(t *testing.T) {
	e := start(t, "e2e-policy")
	closed := e.Load(t,
		flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0"), Ports: []flows.Port{
			{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: 8090},
			{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, Target: 8090},
		}},
		flows.Policy{Pods: []string{"a0"}},
	)
	open := e.Load(t, nodePort("a1")) // shows that Services are served meanwhile
	rules := fmt.Sprintf("add table inet engine; add chain inet engine forward { type filter hook forward priority 0; };"+
		"add rule inet engine forward ip daddr %s meta l4proto { tcp, udp } th dport 8090 drop;"+
		"add rule inet engine forward ip6 daddr %s meta l4proto { tcp, udp } th dport 8090 drop", e.Addr("a0", false), e.Addr("a0", true))
	if out, err := e.MustHost(t, "a").Command(t.Context(), "nft", rules).CombinedOutput(); err != nil {
		t.Fatalf("close the pod: %v: %s", err, out)
	}
	ctx, stop := context.WithCancel(t.Context())
	var asked atomic.Int64
	var wg sync.WaitGroup
	for _, f := range []flows.Flow{{From: "client0", To: flows.NodePort("a")}, {From: "client0", To: flows.NodePort("b")},
		{From: "b0", To: flows.ClusterIP}} {
		for _, combo := range flows.AllCombos {
			p, dst := e.MustProbe(t, f.From), closed.MustAddress(t, f.To, combo)
			wg.Go(func() {
				for ctx.Err() == nil {
					resp, err := p.Do(ctx, probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: dst, Tries: 1, TimeoutMS: 100})
					for _, answer := range resp.Answers {
						if err == nil && answer.Server != "" {
							t.Errorf("%s to %s, %s: the closed pod answers: %+v", f.From, f.To, combo, answer)
							return
						}
					}
					asked.Add(1)
				}
			})
		}
	}
	for range 2 {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
			for _, node := range e.Nodes() {
				e.restartAfter(t, node, sig, func() {
					before := asked.Load()
					await.True(t, "questions without an agent", func() bool { return asked.Load() >= before+10 })
				})
				e.waitReady(t)
			}
		}
	}
	e.expect(t, "after the restarts", open, "a1")
	stop()
	wg.Wait()
	t.Logf("%d questions", asked.Load())
	if asked.Load() < 100 {
		t.Error("too few questions were asked")
	}
	// The rule and nothing else has closed the pod.
	if out, err := e.MustHost(t, "a").Command(t.Context(), "nft", "delete table inet engine").CombinedOutput(); err != nil {
		t.Fatalf("open the pod: %v: %s", err, out)
	}
	e.expect(t, "without the rule", closed, "a0:8090")
}
