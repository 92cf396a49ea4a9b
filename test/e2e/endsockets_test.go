package e2e

import (
	"errors"
	"net/netip"
	"os"
	"testing"
	"time"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestSocketsOfAGoneEndpointEnd removes an endpoint that stays alive and silent: neither an
// RST nor a FIN would end its clients.
func TestSocketsOfAGoneEndpointEnd(t *testing.T) {
	if err := kernel.ProbeSocketIterators(); errors.Is(err, os.ErrPermission) {
		t.Skip(err)
	}
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-ends"),
		Flags: map[string][]string{"": {"--end-sockets"}}})}
	if e.Mode != "ebpf" {
		t.Skip("the other dataplanes translate no sockets")
	}
	// b0 is an endpoint of two Services: it is gone when neither has it.
	first, second, kept := e.Load(t, nodePort("b0")), e.Load(t, nodePort("b0")), e.Load(t, nodePort("a0"))
	var lost, others []*harness.Reader
	for _, combo := range flows.AllCombos {
		protocol := combo.Protocol()
		for _, from := range []string{"a", "a1"} {
			lost = append(lost, e.StartReader(t, from, protocol, first.MustAddress(t, flows.ClusterIP, combo)))
			others = append(others, e.StartReader(t, from, protocol, kept.MustAddress(t, flows.ClusterIP, combo)),
				e.StartReader(t, from, protocol, netip.AddrPortFrom(e.Addr("b0", combo.IPv6()), 8080).String()))
		}
		others = append(others, e.StartReader(t, "client0", protocol, first.MustAddress(t, flows.NodePort("a"), combo)))
	}
	first.MustWrite(t, nodePort("b1"))
	first.MustWait(t)
	wantWaiting(t, "while another Service has the endpoint", lost)
	began := time.Now()
	second.MustWrite(t, nodePort("b1"))
	for _, r := range lost {
		if err := r.WaitAborted(); err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d sockets ended within %v of the change of a file", len(lost), time.Since(began).Round(time.Millisecond))
	second.MustWait(t)
	wantWaiting(t, "although the endpoint is not gone, or no socket hook has translated", others)
}

func wantWaiting(t *testing.T, when string, list []*harness.Reader) {
	t.Helper()
	for _, r := range list {
		if err := r.StillWaits(); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
}
