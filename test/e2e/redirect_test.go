package e2e

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/must"
)

// TestLocalRedirectWhileTheCacheRestarts restarts the cache in front of a Service again and
// again, as a DaemonSet does: it terminates, dies, starts and becomes ready. No question may be
// lost, and the cache must have answered some.
func TestLocalRedirectWhileTheCacheRestarts(t *testing.T) {
	e := start(t, "e2e-redirect")
	web := flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b0"),
		Annotations: map[string]string{intent.LocalRedirectAnnotation: "cache"}}
	cache := func(eps []flows.Endpoint) []flows.Object {
		return []flows.Object{web, flows.Service{Name: "cache", Type: corev1.ServiceTypeClusterIP, Endpoints: eps}}
	}
	s := e.Load(t, cache(flows.On("a2"))...)
	// A socket of the node's own process keeps its endpoint: --end-sockets is for those.
	for from, kinds := range map[string][]string{"a1": {"udp", "new-udp", "new-tcp"}, "a1/vm": {"udp", "new-udp", "new-tcp"},
		"a": {"new-udp", "new-tcp"}} {
		for _, combo := range flows.AllCombos {
			for _, kind := range kinds {
				if kind != combo.Protocol() && kind != "new-"+combo.Protocol() {
					continue
				}
				st := stream{fmt.Sprintf("%s from %s, %s", kind, from, combo), e.MustProbe(t, from)}
				_, err := st.probe.Do(t.Context(), probe.Request{Op: probe.Stream, Name: st.name, Proto: kind,
					Dst: s.MustAddress(t, flows.ClusterIP.Of("web"), combo), PauseMS: 5})
				must.Do(t, err)
				e.streams = append(e.streams, st)
			}
		}
	}
	step := func(pause time.Duration, eps []flows.Endpoint) {
		s.MustWrite(t, cache(eps)...)
		s.MustWait(t)
		time.Sleep(pause)
	}
	// In its grace a server that terminates answers what it still gets: netfilter's agents delete the
	// conntrack entries of UDP sockets after the sync.
	const grace, ready = time.Second, 200 * time.Millisecond
	for range 5 {
		step(grace, flows.Terminating("a2"))
		e.Output(t, "a2", "nft", "table inet dead { chain in { type filter hook prerouting priority raw; th dport 8080 drop; }; }")
		step(0, flows.NotReady("a2"))
		e.Output(t, "a2", "nft", "delete table inet dead")
		step(ready, flows.On("a2"))
	}
	served := map[string]int{}
	for _, combo := range flows.TCP { // a UDP socket may have the port of an earlier one, and continue its flow
		for _, a := range ask(t, e.MustProbe(t, "a1"), s.MustAddress(t, flows.ClusterIP.Of("web"), combo), combo, 3) {
			served[a.Server]++
		}
	}
	if len(served) != 1 || served["a2"] == 0 {
		t.Errorf("answers of %v after the last restart, want a2's", served)
	}
	e.endStreams(t)
}
