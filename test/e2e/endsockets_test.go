package e2e

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/lab/topology"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
)

// reader is a process that waits for data on a connected socket.
type reader struct {
	name   string
	cmd    *topology.Cmd
	stderr bytes.Buffer
	ended  chan error
}

// read starts a reader in a host. It returns after the connect().
func (e *env) read(t *testing.T, from string, combo flows.Combo, dst string) *reader {
	t.Helper()
	to := netip.MustParseAddrPort(dst)
	r := &reader{name: fmt.Sprintf("%s, %s to %s", from, combo, dst), ended: make(chan error, 1)}
	ctx, stop := context.WithCancel(context.Background())
	script := fmt.Sprintf("exec 3<>/dev/%s/%s/%d && echo connected && exec cat <&3", combo.Protocol(), to.Addr(), to.Port())
	r.cmd = e.MustHost(t, from).Command(ctx, "bash", "-c", script)
	r.cmd.Stderr = &r.stderr
	out, err := r.cmd.StdoutPipe()
	must(t, err)
	must(t, r.cmd.Start())
	line := make([]byte, len("connected\n"))
	if _, err := out.Read(line); err != nil || string(line) != "connected\n" {
		stop()
		t.Fatalf("%s: %q, %v, %v: %s", r.name, line, err, r.cmd.Wait(), &r.stderr)
	}
	go func() { r.ended <- r.cmd.Wait() }()
	t.Cleanup(func() { stop(); <-r.ended })
	return r
}

// aborted waits until the reader has ended, and reports whether the kernel has aborted its
// connection.
func (r *reader) aborted(t *testing.T) bool {
	t.Helper()
	select {
	case err := <-r.ended:
		r.ended <- err
		return err != nil && strings.Contains(r.stderr.String(), "connection abort")
	case <-time.After(time.Minute):
		return false
	}
}

// TestSocketsOfAGoneEndpointEnd removes an endpoint that stays alive and silent: neither an
// RST nor a FIN would end its clients.
func TestSocketsOfAGoneEndpointEnd(t *testing.T) {
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-ends"),
		Flags: map[string][]string{"": {"--end-sockets"}}})}
	if e.Mode != "ebpf" {
		t.Skip("the other dataplanes translate no sockets")
	}
	// b0 is an endpoint of two Services: it is gone when neither has it.
	first, second, kept := e.Load(t, nodePort("b0")), e.Load(t, nodePort("b0")), e.Load(t, nodePort("a0"))
	var lost, others []*reader
	for _, combo := range flows.AllCombos {
		for _, from := range []string{"a", "a1"} {
			lost = append(lost, e.read(t, from, combo, first.MustAddress(t, flows.ClusterIP, combo)))
			others = append(others, e.read(t, from, combo, kept.MustAddress(t, flows.ClusterIP, combo)),
				e.read(t, from, combo, netip.AddrPortFrom(e.Addr("b0", combo.IPv6()), 8080).String()))
		}
		others = append(others, e.read(t, "client0", combo, first.MustAddress(t, flows.NodePort("a"), combo)))
	}
	first.MustWrite(t, nodePort("b1"))
	first.MustWait(t)
	wantRunning(t, lost, "while another Service has its endpoint")
	began := time.Now()
	second.MustWrite(t, nodePort("b1"))
	for _, r := range lost {
		if !r.aborted(t) {
			t.Errorf("%s: not aborted: %s", r.name, &r.stderr)
		}
	}
	t.Logf("%d sockets ended within %v of the change of a file", len(lost), time.Since(began).Round(time.Millisecond))
	second.MustWait(t)
	wantRunning(t, others, "although its endpoint is not gone, or no socket hook translated it")
}

func wantRunning(t *testing.T, list []*reader, why string) {
	t.Helper()
	for _, r := range list {
		if len(r.ended) > 0 {
			t.Errorf("%s: ended %s: %s", r.name, why, &r.stderr)
		}
	}
}
