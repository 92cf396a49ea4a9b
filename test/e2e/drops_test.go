package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
)

// expectDrop has a client ask in vain, and wants `spillway drops` to say that node
// a's dataplane dropped the SYN, and by which of its reasons.
func (e *env) expectDrop(t *testing.T, dst, reason string) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit)
	defer stop()
	cmd := exec.CommandContext(ctx, e.Binary, "drops", "--bpffs", e.Agent("a").BPFFS, "--reason", "TC_INGRESS",
		"--netns", e.MustHost(t, "a").Namespace, "--protocol", "tcp", "--count", "1", "-o", "json") // other tests have clients of this address
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make(chan []byte, 1)
	go func() {
		b, _ := bufio.NewReader(out).ReadBytes('\n')
		line <- b
	}()
	var got []byte
	for got == nil {
		askOnce(t, e.MustProbe(t, "client0"), dst, flows.TCP4, false) // the follower may not be there for the first
		select {
		case got = <-line:
		default:
			if ctx.Err() != nil {
				t.Fatalf("no drop was reported: %s", &stderr)
			}
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("spillway drops: %v: %s", err, &stderr)
	}
	var d struct{ Reason, By, Meaning, Namespace, Interface string }
	if err := json.Unmarshal(got, &d); err != nil {
		t.Fatalf("%v: %s", err, got)
	}
	if d.Reason != "TC_INGRESS" || d.By != "spillway" || !strings.Contains(d.Meaning, reason) ||
		!strings.HasSuffix(d.Namespace, "node0") || d.Interface != "eth0" {
		t.Errorf("%s", got)
	}
}
