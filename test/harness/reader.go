package harness

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// Reader is a process that waits for data on a connected socket.
type Reader struct {
	name   string
	cmd    *topology.Cmd
	stderr bytes.Buffer
	ended  chan error
}

// StartReader starts a Reader on a host, which connects by TCP or UDP ("tcp", "udp"). It
// returns after the connect(). The Reader ends with the test.
func (h *Harness) StartReader(t testing.TB, from, protocol, to string) *Reader {
	t.Helper()
	r := &Reader{name: fmt.Sprintf("%s of %s to %s", protocol, from, to), ended: make(chan error, 1)}
	dst := netip.MustParseAddrPort(to)
	ctx, stop := context.WithCancel(context.Background())
	script := fmt.Sprintf("exec 3<>/dev/%s/%s/%d && echo connected && exec cat <&3", protocol, dst.Addr(), dst.Port())
	r.cmd = h.MustHost(t, from).Command(ctx, "bash", "-c", script)
	r.cmd.Stderr = &r.stderr
	out, err := r.cmd.StdoutPipe()
	if err == nil {
		err = r.cmd.Start()
	}
	if err != nil {
		stop()
		t.Fatalf("start %s: %v", r.name, err)
	}
	if _, err := io.ReadFull(out, make([]byte, len("connected\n"))); err != nil {
		stop()
		t.Fatalf("%s: connect: %v, %v: %s", r.name, err, r.cmd.Wait(), &r.stderr)
	}
	go func() { r.ended <- r.cmd.Wait() }()
	t.Cleanup(func() { stop(); <-r.ended })
	return r
}

// WaitAborted waits until the kernel has aborted the connection (ECONNABORTED).
func (r *Reader) WaitAborted() error {
	select {
	case err := <-r.ended:
		r.ended <- err // for the cleanup
		if err == nil || !strings.Contains(r.stderr.String(), "connection abort") {
			return fmt.Errorf("%s: ended, %w: %s", r.name, err, &r.stderr)
		}
		return nil
	case <-time.After(time.Minute):
		return fmt.Errorf("%s: not aborted", r.name)
	}
}

// StillWaits returns an error if the Reader has ended.
func (r *Reader) StillWaits() error {
	select {
	case err := <-r.ended:
		r.ended <- err
		return fmt.Errorf("%s: ended, %w: %s", r.name, err, &r.stderr)
	default:
		return nil
	}
}
