package soak

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// readyWithin bounds the time for an agent to start or to end. It is long because
// a busy machine verifies eBPF programs slowly.
const readyWithin = 2 * time.Minute

// nodeAgent is the agent of a node, over all its processes.
type nodeAgent struct {
	host   *topology.Host
	mode   string
	left   atomic.Int64 // when it last left eBPF, in Unix nanoseconds
	binary string
	source []string // flags
	bpffs  string
	log    string // file; each process appends

	cmd      *topology.Cmd
	done     chan struct{}
	expected *atomic.Bool // the end of cmd is
	died     func(error)  // called if a process ends by itself
}

// use sets the dataplane of the next process.
func (a *nodeAgent) use(mode string) {
	if a.mode == "ebpf" && mode != a.mode {
		a.left.Store(time.Now().UnixNano())
	}
	a.mode = mode
}

// start starts a process of the agent.
func (a *nodeAgent) start() error {
	log, err := os.OpenFile(a.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("start agent on %s: %w", a.host.Name, err)
	}
	defer log.Close()
	argv := slices.Concat([]string{a.binary}, agent.Args(a.host, a.mode, a.bpffs), a.source)
	cmd := a.host.Command(context.Background(), argv...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl-C is for the soak alone
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start agent: %w", err)
	}
	a.cmd, a.done, a.expected = cmd, make(chan struct{}), new(atomic.Bool)
	go func(done chan struct{}, expected *atomic.Bool) {
		err := cmd.Wait()
		close(done)
		if !expected.Load() {
			a.died(fmt.Errorf("agent on %s ended by itself (%v): %s", a.host.Name, err, a.lastLine()))
		}
	}(a.done, a.expected)
	return nil
}

// end ends the process with a signal. After SIGTERM its exit code must be 0.
func (a *nodeAgent) end(sig syscall.Signal) error {
	if a.cmd == nil {
		return nil
	}
	a.expected.Store(true)
	_ = a.cmd.Process.Signal(sig)
	defer func() { a.cmd = nil }()
	select {
	case <-a.done:
	case <-time.After(readyWithin):
		_ = a.cmd.Process.Kill()
		<-a.done
		return fmt.Errorf("end agent on %s: it still runs %v after %v", a.host.Name, readyWithin, sig)
	}
	if code := a.cmd.ProcessState.ExitCode(); sig == syscall.SIGTERM && code != 0 {
		return fmt.Errorf("end agent on %s: exit code %d after SIGTERM: %s", a.host.Name, code, a.lastLine())
	}
	return nil
}

// ready waits until the agent has written its Services.
func (a *nodeAgent) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	for {
		err := agent.Ready(ctx, a.host)
		if err == nil {
			return nil
		}
		select {
		case <-a.done:
			return fmt.Errorf("agent on %s ended: %s", a.host.Name, a.lastLine())
		case <-ctx.Done():
			return fmt.Errorf("agent on %s is not ready: %w: %s", a.host.Name, errors.Join(err, ctx.Err()), a.lastLine())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (a *nodeAgent) lastLine() string {
	text, err := os.ReadFile(a.log)
	if err != nil {
		return err.Error()
	}
	text = bytes.TrimSpace(text)
	return string(text[bytes.LastIndexByte(text, '\n')+1:])
}

// synced reports whether the sync has ended that brought a change, which was written and
// whose canary answered at these times.
func (a *nodeAgent) synced(ctx context.Context, written, answered time.Time) bool {
	at, err := agent.LastSync(ctx, a.host)
	if err != nil || at.Before(written) {
		return false
	}
	if at.After(answered) {
		return true
	}
	pending, err := agent.Metric(ctx, a.host, "kubeproxy_sync_proxy_rules_service_changes_pending", "")
	return err == nil && pending == 0
}

// copyProgram copies a program, as an upgrade does: the copy is a file of its own.
func copyProgram(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return fmt.Errorf("copy program: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return fmt.Errorf("copy program: %w", err)
	}
	if err := os.WriteFile(to, text, 0o755); err != nil {
		return fmt.Errorf("copy program: %w", err)
	}
	return nil
}

// output runs a program on the node and returns its output.
func (a *nodeAgent) output(ctx context.Context, argv ...string) (string, error) {
	cmd := a.host.Command(ctx, argv...)
	out, err := cmd.Output()
	return string(out), err
}
