// Package process runs programs of the lab in the background, on one of its hosts or on
// none. A program ends with the process that started it.
package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

// Process is a running program. A nil Process is one that has ended.
type Process struct {
	name string
	log  string // output since this start
	cmd  *exec.Cmd
	done chan struct{}
}

// Start starts a program, on a host of the lab if there is one. Its output replaces the
// log file, whose name without its extension names the program in errors. The kernel
// kills it when the thread that started it ends (PR_SET_PDEATHSIG), so that thread waits
// with it.
func Start(host *topology.Host, logFile string, argv []string) (*Process, error) {
	out, err := os.Create(logFile)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", argv[0], err)
	}
	p := &Process{name: strings.TrimSuffix(filepath.Base(logFile), ".log"), log: logFile, done: make(chan struct{})}
	run := func(cmd *exec.Cmd) {
		p.cmd = cmd
		cmd.Stdout, cmd.Stderr = out, out
		// A group of its own: Ctrl-C on a terminal is for the process that started it,
		// which then ends its programs in order.
		if cmd.Env == nil {
			cmd.Env = os.Environ()
		}
		// On a small machine the API server spends a third of its time on garbage
		// collection while it creates thousands of objects.
		cmd.Env = append(cmd.Env, "GOGC=400")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	}
	var begin func() error
	if host == nil {
		cmd := exec.Command(argv[0], argv[1:]...)
		run(cmd)
		begin = cmd.Start
	} else {
		cmd := host.Command(context.Background(), argv...)
		run(cmd.Cmd)
		begin = cmd.Start
	}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		defer close(p.done)
		defer out.Close()
		err := begin()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // the log has more details than the exit code
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", p.name, err)
	}
	return p, nil
}

// ID returns the process id.
func (p *Process) ID() int { return p.cmd.Process.Pid }

// Stop sends SIGTERM, and kills the process after a timeout.
func (p *Process) Stop(patience time.Duration) {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(patience):
		p.Kill()
	}
}

// Kill ends the process at once.
func (p *Process) Kill() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Kill()
	<-p.done
}

// ErrEnded reports that a process ended instead of serving.
var ErrEnded = errors.New("ended")

// Until repeats a check until it passes, the process ends or the context does.
func (p *Process) Until(ctx context.Context, check func(context.Context) error) error {
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s %w: %s", p.name, ErrEnded, p.lastLine())
		case <-ctx.Done():
			return fmt.Errorf("%s does not serve: %w; see %s", p.name, err, p.log)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// lastLine is the last line that the process printed.
func (p *Process) lastLine() string {
	text, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return lines[len(lines)-1]
}
